"""A SyncerCore with two trainers, whose groups are driven by hand. The equation of the groups is checked after every
event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.protocol.driving import restarted

from diloco.core.presets import DiLoCo
from diloco.core.quorum import AllLive
from diloco.protocol.actions import PersistRecord
from diloco.protocol.contribution import Contribution
from diloco.protocol.groups import Assigned, Made
from diloco.protocol.leases import Ask, DataSet, Grant, GroupRules
from diloco.protocol.members import Report
from diloco.protocol.records import Record
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore
from diloco.protocol.units import Ranges, ranges_of
from diloco.protocol.workers import Score, Work

RULES = GroupRules("r" * 64, 100, 2, 8, 8, max_staleness=1, queue=8, inline=True)
GOOD, BAD = (1.0, 0.0), (0.5, 0.5)
"""Rewards of a group with a signal, and without."""


class Run:
    """A SyncerCore with trainers "a" and "b", each of which has sent a heartbeat; `now` goes on by hand.

    Attributes:
        durable: the newest record that is durable.
        orders: the newest message of each worker's process.
    """

    def __init__(self, *, fragments: int = 1, rules: GroupRules = RULES) -> None:
        method = DiLoCo(sync_every=10, quorum=AllLive(at_least=1))
        self.core = SyncerCore(Rules.of(method, fragments), [0] * fragments)
        self.data = DataSet(1, 0, rules.digest, groups=rules)
        self.now, self.orders = 0.0, dict[tuple[str, int], int]()
        self.asked = dict[str, int]()
        self.numbers = dict[tuple[str, int], int]()
        self.made: list[Made] = []
        for fragment in range(fragments):
            self.core.groups.publishes(fragment, 0, "0")
        for learner in ("a", "b"):
            self.core.joined(0.0, learner)
            self.core.heartbeat(0.0, learner, 1, Report(step=0, tokens=1))
        self.lease("a", rules.queue)  # it says what the run's groups are
        self.record()

    # --- what happens -------------------------------------------------------------------------------------------------

    def work(
        self, role: Any = "rollout", worker: str = "w", process: int = 1, *, holds: Sequence[int] = (), wants: int = 0,
        scores: Sequence[Score] = (), order: int | None = None, digest: str = RULES.digest,
    ) -> Assigned:  # fmt: skip
        one = worker, process
        self.orders[one] = self.orders.get(one, 0) + 1
        message = Work(role, worker, process, order or self.orders[one], digest, tuple(holds), wants, tuple(scores))
        try:
            assigned, self.actions = self.core.work(self.now, message)
        finally:
            self.check()
        return assigned

    def group(
        self, number: int, worker: str = "w", /, *, process: int = 1, rewards: tuple[float, ...] = (), **changes: Any
    ) -> bool:
        versions = tuple(state.version for state in self.core.fragments)
        weights = self.core.groups.weights_of(versions)
        assert weights is not None
        made = replace(Made(number, "sums", versions, weights, f"{number}", 100, 10, rewards), **changes)
        self.made.append(made)
        return self.sends(made, worker, process)

    def sends(self, made: Made, worker: str = "w", process: int = 1) -> bool:
        try:
            is_new, self.actions = self.core.made(self.now, worker, process, made)
        finally:
            self.check()
        return is_new

    def record(self) -> Record:
        """A record becomes durable."""
        self.durable = self.core.saved()
        self.check()
        self.core.recorded(self.now, self.durable.serial)
        self.check()
        return self.durable

    def restart(self) -> None:
        """The syncer starts again with what is durable."""
        self.restarts_with(self.durable)

    def restarts_with(self, record: Record, versions: Sequence[int] | None = None) -> None:
        self.core = restarted(self.core, record, self.now, versions)
        self.orders.clear()
        self.check()

    def generated(self, *rewards: tuple[float, ...]) -> list[int]:
        """Groups with these rewards of their own are leased, generated and durable."""
        numbers = self.work(wants=len(rewards)).numbers
        for number, its in zip(numbers, rewards, strict=True):
            self.group(number, rewards=its)
        self.record()
        return list(numbers)

    def lease(self, learner: str, num: int, incarnation: int = 1) -> Grant:
        number = self.asked.get(learner, 0) + 1
        grant, self.actions = self.core.lease(self.now, learner, incarnation, Ask(number, num, self.data))
        self.asked[learner] = max(self.asked.get(learner, 0), grant.number)
        self.check()
        return grant

    def send(
        self, learner: str, *units: int, fragment: int = 0, incarnation: int = 1, overwritten: Ranges = ()
    ) -> None:
        """Work of a trainer on these groups."""
        one, version = (learner, fragment), self.core.fragments[fragment].version
        self.numbers[one] = number = self.numbers.get(one, 0) + 1
        c = Contribution(
            learner, incarnation, fragment, number, version, version, 10, 1, 100 * number, step=10 * (version + 1),
            units=ranges_of((unit, unit + 1) for unit in units), overwritten=overwritten,
        )  # fmt: skip
        self.core.contributed(self.now, c)
        self.check()

    def publish(self, fragment: int = 0) -> None:
        """The round under way ends in a durable version."""
        self.core.merged(fragment, digest=str(self.core.fragments[fragment].version + 1))
        self.durable = self.core.saved(storing=[fragment])
        self.core.stored(self.now, fragment)
        self.check()
        self.core.recorded(self.now, self.durable.serial)
        self.check()

    def round(self, *units: int, fragment: int = 0) -> None:
        """A round in which trainer "a" has trained these groups, and "b" none."""
        self.send("a", *units, fragment=fragment)
        self.send("b", fragment=fragment)
        self.publish(fragment)

    # --- what holds ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        totals, groups = self.core.groups.totals(), self.core.groups
        assert min(totals.values()) >= 0
        assert totals.pop("acknowledged") == sum(totals.values())
        assert groups._unsaved.keys() <= groups.groups.keys()

    def totals(self, **expected: int) -> None:
        """All that is not named is 0."""
        found = {what: num for what, num in self.core.groups.totals().items() if num}
        assert found == {what.replace("_", " "): num for what, num in expected.items()}

    def is_due(self) -> bool:
        return any(isinstance(each, PersistRecord) for each in self.actions)
