"""What is closed at its end."""

from typing import Self


class Closing:
    """A context manager that calls `close` at its end."""

    def close(self) -> None:
        """Close it; each class has its own way."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
