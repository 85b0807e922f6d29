"""The queue of what is to be made durable: versions and the run's record, by one commit at a time.

A record is taken when its commit begins, so the store never holds an older state after a newer one, and one record
serves all earlier requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from diloco.run.ports import H, MergedRound, P

Then = Callable[[], None]


@dataclass(eq=False)
class Commit(Generic[H, P]):
    """Versions with a record, or a record alone.

    Attributes:
        versions: in merge order, each with the time at which it was merged.
        then: called once they are durable.
    """

    versions: list[tuple[MergedRound[H, P], float]]
    then: list[Then]


class Writes(Generic[H, P]):
    """The queue of one driver.

    Arguments:
        every_s: the shortest time between the beginnings of two commits.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._not_before_s = -math.inf
        self._num_putting = 0
        self._versions: list[tuple[MergedRound[H, P], float]] = []
        self._wants_record = False
        self._then: list[Then] = []
        self._is_under_way = False

    def putting(self) -> None:
        """A version is being stored."""
        self._num_putting += 1

    def put(self, merged: MergedRound[H, P], merged_at_s: float) -> None:
        """A version is stored: the next commit publishes it."""
        self._num_putting -= 1
        self._versions.append((merged, merged_at_s))

    def record(self, then: Then | None = None) -> None:
        """The run's record is to be made durable. `then`: called once it is."""
        self._wants_record = True
        if then is not None:
            self._then.append(then)

    def begin(self, now_s: float) -> Commit[H, P] | None:
        """The commit to begin now; None: one is under way, or none is due."""
        if self._is_under_way or now_s < self.next_s:
            return None
        commit = Commit(self._versions, self._then)
        self._versions, self._then, self._wants_record = [], [], False
        self._is_under_way, self._not_before_s = True, now_s + self._every_s
        return commit

    def ended(self) -> None:
        """The commit under way is durable."""
        self._is_under_way = False

    @property
    def next_s(self) -> float:
        """When the next commit is due; infinite while one is under way, whose end is an event."""
        is_wanted = self._wants_record or bool(self._versions)
        return self._not_before_s if is_wanted and not self._is_under_way else math.inf

    @property
    def are_open(self) -> bool:
        """Whether anything is to be made durable."""
        return self._is_under_way or self._wants_record or bool(self._versions) or self._num_putting > 0
