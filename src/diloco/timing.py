"""How long calls were blocked."""

from bisect import bisect_left


class Histogram:
    """How many calls of `step` were blocked for how long."""

    BOUNDS_S = (0.0, 0.001, 0.01, 0.1, 1.0, 10.0)

    def __init__(self) -> None:
        self._counts = [0] * (len(self.BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        """One call."""
        self._counts[bisect_left(self.BOUNDS_S, seconds)] += 1

    def as_dict(self) -> dict[str, int]:
        """By upper bound in seconds; "0" were not blocked."""
        names = [*(f"{bound:g}" for bound in self.BOUNDS_S), "inf"]
        return dict(zip(names, self._counts, strict=True))
