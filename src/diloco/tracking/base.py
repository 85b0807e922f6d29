"""What a tracker is given, and what it does with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """One process of a run, as its trackers know it.

    Attributes:
        id: the same whenever the process is started again, so that a tracker goes on; letters, digits, "-".
        project: under which trackers file it.
        group: of the run's processes, the run's name.
        name: for people.
        config: of the run, plain values.
    """

    id: str
    project: str
    group: str
    name: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """Numbers at one moment.

    Attributes:
        step: inner steps, of the run at its syncer, of its own at a learner.
        t: Unix time in seconds.
        values: by the names of docs/trackers.md.
    """

    step: int
    t: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """Logs points of one run. Methods may take long and may raise anything: nothing but a `Feed` waits for them."""

    def start(self, run: TrackedRun) -> None:
        """Begin, or go on with what an earlier process of the same id began."""

    def log(self, point: Point) -> None:
        """Keep a point. Points come in the order of their time; their steps may go back where the run does."""

    def end(self) -> None:
        """Keep what is not kept yet. Nothing comes afterwards."""
