"""One line of the log a minute on what was merged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("diloco.syncer")

EVERY_S = 60.0


class MergeLines:
    """Sums up the versions that are published between two lines.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._due_at = clock, clock()
        self._forget()

    def _forget(self) -> None:
        self._num = self._contributors = self._live = 0
        self._tokens: dict[int, int] = {}  # by fragment
        self._newest = ""

    def merged(self, fragment: int, version: int, *, tokens: int, contributors: int, live: int) -> None:
        """A version was published that holds the work of so many learners, while so many were live: of its contributors
        some may have left since."""
        self._num, self._tokens[fragment] = self._num + 1, self._tokens.get(fragment, 0) + tokens
        self._contributors, self._live = self._contributors + contributors, self._live + max(live, contributors)
        self._newest = f"version {version} of fragment {fragment}"

    def say(self, *, is_last: bool = False) -> None:
        """Write a line, if anything was merged since the last one and that is a minute old."""
        if not self._num or (self._clock() < self._due_at and not is_last):
            return
        self._due_at = self._clock() + EVERY_S
        versions = "1 version" if self._num == 1 else f"{self._num:,} versions"
        share = f"{self._contributors / max(1, self._live):.0%} of live learners took part"
        tokens = round(sum(self._tokens.values()) / len(self._tokens))
        log.info("merged %s, %s tokens a fragment, %s; newest: %s", versions, f"{tokens:,}", share, self._newest)
        self._forget()
