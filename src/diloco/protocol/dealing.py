"""Sets of groups of experts that the syncer deals to its learners (`train.holds_experts = "auto"`).

A set keeps its size, and is kept as long as it can be: another group takes the place of one of its groups only where
that group has fewer than `copies` holders, and the other one at least two holders more. With `every`, all sets are
shifted by one group after so many rounds of the trunk, so that every learner trains every group in turn.

What is dealt is the state that a syncer tells its learners: a learner that holds another set leaves, and joins again
with the one that it was dealt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diloco.protocol.members import Member

PROMISED_FOR_S = 600.0
"""How long a set is kept for a learner that has not joined with it: it builds its model meanwhile."""

Sets = dict[str, frozenset[int]]
"""Groups by learner."""


def first_set(sets: Iterable[Iterable[int]], num_groups: int, size: int) -> frozenset[int]:
    """The set of a new learner: the `size` groups that the fewest of `sets` have, of equal ones the lowest."""
    count = Counter(group for each in sets for group in each)
    return frozenset(sorted(range(num_groups), key=lambda group: (count[group], group))[:size])


def balanced(sets: Mapping[str, frozenset[int]], others: Sequence[Iterable[int]], num_groups: int, copies: int) -> Sets:
    """The sets after the fewest changes, one group at a time: the group with the fewest holders, if they are fewer than
    `copies`, replaces the one with the most in the set of the first learner that lacks it, if these are two more.

    Arguments:
        others: the groups of each learner whose set is fixed.
    """
    dealt = dict(sets)
    count = Counter(group for each in (*dealt.values(), *others) for group in each)
    while moves := [
        (count[to], to, -count[group], learner, group)
        for to in range(num_groups)
        if count[to] < copies
        for learner, own in dealt.items()
        if to not in own
        for group in own
        if count[group] >= count[to] + 2
    ]:
        _, to, _, learner, group = min(moves)
        dealt[learner] = dealt[learner] - {group} | {to}
        count[to] += 1
        count[group] -= 1
    return dealt


class Dealing:
    """The sets of one run, of learners that are members, or that were promised one.

    Arguments:
        num_groups, copies, every: as in `Experts`; 0 groups: the run has no experts.

    Attributes:
        sets: by learner, the groups that it is to hold.
    """

    def __init__(self, num_groups: int = 0, copies: int = 1, every: int = 0) -> None:
        self.num_groups, self.copies, self.every = num_groups, copies, every
        self.sets: Sets = {}
        self._turn = 0  # by how many groups all sets have been shifted
        self._promised_until: dict[str, float] = {}

    def ask(self, now: float, learner: str, size: int, members: Mapping[str, Member]) -> tuple[int, ...]:
        """The groups of a learner that is to hold so many; the same ones when it asks again. Those of a member stay as
        many as they are."""
        self._forget(now, members)
        if len(self.sets.get(learner, ())) != size and not (learner in members and learner in self.sets):
            self.sets.pop(learner, None)
            held = [*self.sets.values(), *self._others(members, learner)]
            self.sets[learner] = first_set(held, self.num_groups, size)
        if learner not in members:
            self._promised_until[learner] = now + PROMISED_FOR_S
        self._balance(members)
        return self.of(learner)

    def of(self, learner: str) -> tuple[int, ...]:
        """The groups that a learner is to hold, ascending; none: its set is fixed."""
        return tuple(sorted(self.sets.get(learner, ())))

    def joined(self, learner: str, members: Mapping[str, Member], *, is_dealt: bool) -> None:
        """A member has joined. `is_dealt`: it holds what it was dealt, before now or by an earlier state of the run."""
        self._promised_until.pop(learner, None)
        if is_dealt:
            self.sets.setdefault(learner, self._groups_of(members[learner]))
        else:
            self.sets.pop(learner, None)
        self._balance(members)

    def left(self, now: float, member: Member, members: Mapping[str, Member]) -> None:
        """A member has left. If it holds what it was dealt, it left for good, and others take over the groups
        without a holder; otherwise it is expected back."""
        if self.sets.get(member.learner, self._groups_of(member)) == self._groups_of(member):
            self.sets.pop(member.learner, None)
            self._balance(members)
        else:
            self._promised_until[member.learner] = now + PROMISED_FOR_S

    def tick(self, now: float, members: Mapping[str, Member]) -> None:
        """Time has passed: others take over the groups of learners that have not joined in time."""
        self._forget(now, members)
        self._balance(members)

    @property
    def ends_at(self) -> float:
        """When the next promise ends."""
        return min(self._promised_until.values(), default=math.inf)

    def lost(self, learner: str, members: Mapping[str, Member]) -> None:
        """A learner was evicted: others take over the groups without a holder."""
        self.sets.pop(learner, None)
        self._balance(members)

    def turned(self, versions: Sequence[int], members: Mapping[str, Member]) -> None:
        """The fragments have these versions: shift all sets if so many rounds of the trunk are over."""
        turn = min(versions[self.num_groups :], default=0) // self.every if self.every else 0
        shift, self._turn = turn - self._turn, turn
        if shift and self.num_groups:
            self.sets = {
                learner: frozenset((group + shift) % self.num_groups for group in own)
                for learner, own in self.sets.items()
            }
            self._balance(members)

    def saved(self) -> dict[str, Any]:
        """Plain values (JSON)."""
        return {"turn": self._turn, "sets": {learner: sorted(own) for learner, own in self.sets.items()}}

    def restore(self, now: float, saved: Mapping[str, Any], members: Mapping[str, Member]) -> None:
        """Continue from `saved`, which may have had more members: of a run that went back, none is one yet."""
        self._turn = saved["turn"]
        self.sets = {learner: frozenset(own) for learner, own in saved["sets"].items()}
        self._promised_until = {learner: now + PROMISED_FOR_S for learner in self.sets if learner not in members}
        self._balance(members)

    def _forget(self, now: float, members: Mapping[str, Member]) -> None:
        """Forget sets of learners that have not joined in time."""
        for learner, until in list(self._promised_until.items()):
            if until <= now:
                del self._promised_until[learner]
                if learner not in members:
                    self.sets.pop(learner, None)

    def _balance(self, members: Mapping[str, Member]) -> None:
        self.sets = balanced(self.sets, self._others(members), self.num_groups, self.copies)

    def _others(self, members: Mapping[str, Member], learner: str | None = None) -> list[frozenset[int]]:
        """The groups of members whose sets are fixed, without `learner`."""
        return [self._groups_of(it) for it in members.values() if it.learner not in self.sets and it.learner != learner]

    def _groups_of(self, member: Member) -> frozenset[int]:
        return frozenset(group for group in range(self.num_groups) if member.holds(group))
