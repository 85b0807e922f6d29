"""The queue of writes that make a run durable: one at a time, repeated where the disk refuses.

A record is taken when its write begins, so the disk never holds an older state after a newer one, and one record serves
all earlier requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from diloco.run.ports import H, MergedRound, P

RETRY_S = 2.0
"""Between two tries of a write that the disk refuses."""

Then = Callable[[], None]


@dataclass(eq=False)
class Write(Generic[H, P]):
    """A version with its record, or a record alone.

    Attributes:
        merged: the version; None: a record alone.
        wanted_at_s: when it was first wanted.
        not_before_s: when it may be tried.
        is_refused: whether the disk has refused it before.
        has_record: whether a record was asked for, besides the version's own.
        then: called once it is durable.
    """

    merged: MergedRound[H, P] | None
    wanted_at_s: float
    not_before_s: float = -math.inf
    is_refused: bool = False
    has_record: bool = False
    then: list[Then] = field(default_factory=list)

    def __str__(self) -> str:
        if self.merged is None:
            return "the run's record"
        return f"version {self.merged.update.version} of fragment {self.merged.update.fragment}"


class Writes(Generic[H, P]):
    """The queue of writes. Versions come first, in merge order; each brings the record with it."""

    def __init__(self) -> None:
        self._versions: list[Write[H, P]] = []
        self._record: Write[H, P] | None = None
        self._then: list[Then] = []
        self._under_way: Write[H, P] | None = None

    def version(self, now_s: float, merged: MergedRound[H, P]) -> None:
        """Request that a version is made durable."""
        self._versions.append(Write(merged, now_s))

    def record(self, now_s: float, then: Then | None = None) -> None:
        """Request that the run's record is made durable. `then`: called once it is."""
        self._record = self._record or Write(None, now_s)
        if then is not None:
            self._then.append(then)

    def begin(self, now_s: float) -> Write[H, P] | None:
        """The write to begin now; None: one is under way, or none is due."""
        if self._under_way is not None:
            return None
        due = [write for write in self._waiting if write.not_before_s <= now_s]
        if not due:
            return None
        write = self._under_way = due[0]
        if write.merged is not None:
            self._versions.remove(write)
        write.has_record, write.then = self._record is not None, self._then
        self._record, self._then = None, []
        return write

    def ended(self, write: Write[H, P]) -> list[Then]:
        """A write is durable; returns the callbacks that waited for it."""
        self._under_way = None
        return write.then

    def refused(self, now_s: float, write: Write[H, P]) -> None:
        """The disk has refused a write: it is repeated later, with a record taken then."""
        self._under_way = None
        write.is_refused, write.not_before_s = True, now_s + RETRY_S
        self._then, write.then = [*write.then, *self._then], []
        if write.merged is None:
            self._record = write
        else:
            self._versions.append(write)
            if write.has_record:
                self._record = self._record or Write(None, now_s)

    @property
    def next_s(self) -> float:
        """When the next write is due; infinite while one is under way, whose end is an event."""
        if self._under_way is not None:
            return math.inf
        return min((write.not_before_s for write in self._waiting), default=math.inf)

    @property
    def are_moving(self) -> bool:
        """Whether a write is under way or due that does not wait for a disk that refused it."""
        return self._under_way is not None or not all(write.is_refused for write in self._waiting)

    @property
    def _waiting(self) -> list[Write[H, P]]:
        return [*self._versions, *([] if self._record is None else [self._record])]
