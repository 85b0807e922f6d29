"""A library that is not installed is an error that names the extra that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from diloco.errors import ConfigError


@contextmanager
def needs(library: str, *, extra: str | None = None) -> Iterator[None]:
    """Inside, `library` is imported.

    Arguments:
        extra: of this package; None: it has the library's name.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ConfigError(
            f"{library} is not installed, which this integration attaches to; pip install 'diloco[{extra or library}]'"
        ) from error
