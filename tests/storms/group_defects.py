"""Defects of groups that are put in on purpose. Storms find each of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.storms.defects import Defect

from diloco.protocol.groups import Groups
from diloco.protocol.leases import Leases
from diloco.protocol.workers import Workers
from diloco.run.driver import Driver
from diloco.run.executor import Writes


def acknowledges_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Writes, "after_record", lambda self, then: then())


def counts_a_lease_twice(patch: pytest.MonkeyPatch) -> None:
    leased = Groups.leased

    def twice(self: Groups, units: Any) -> None:
        leased(self, units)
        leased(self, units)

    patch.setattr(Groups, "leased", twice)


def leases_what_is_too_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "_drop_stale", lambda self: None)


def returns_what_is_too_old(patch: pytest.MonkeyPatch) -> None:
    ended = Leases.ended

    def returned(self: Leases, *arguments: Any) -> None:
        ended(self, *arguments)
        self.offer(self.left[arguments[0]].units if arguments[0] in self.left else ())

    patch.setattr(Leases, "ended", returned)
    published = Groups.published
    patch.setattr(Groups, "look", lambda self: [self._settle(n, "merged") for n in self._merged(self._leases)])

    def drops(self: Groups, versions: Any) -> None:
        published(self, versions)
        self._drop_stale()

    patch.setattr(Groups, "published", drops)


def forgets_a_pack(patch: pytest.MonkeyPatch) -> None:
    saved = Groups.saved

    def forgotten(self: Groups, *arguments: Any) -> Any:
        values = saved(self, *arguments)
        return values and {**values, "packs": values["packs"][-1:]}

    patch.setattr(Groups, "saved", forgotten)


def puts_groups_in_another_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Writes, "pack", lambda self, group: self._pack.insert(0, group))


def takes_every_answer(patch: pytest.MonkeyPatch) -> None:
    """A second group of a prompt replaces the first."""
    check = Groups._check

    def known(self: Groups, made: Any) -> None:
        self.workers.offer("rollout", [made.number])
        check(self, made)

    patch.setattr(Groups, "_check", known)


def counts_what_was_merged_as_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "look", Groups._drop_stale)


def keeps_leases_of_the_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "_release", lambda self, key, held: self.live[key].holds.difference_update(held))


def scores_before_they_are_durable(patch: pytest.MonkeyPatch) -> None:
    work = Driver.work

    def at_once(self: Driver[Any, Any, Any], message: Any, done: Any) -> None:
        assigned: list[Any] = []
        work(self, message, assigned.append)
        if message.scores and not assigned:
            done(self.core.groups.work(self._clock.now_s(), message))
        for each in assigned:
            done(each)

    patch.setattr(Driver, "work", at_once)


DEFECTS: dict[Defect, int] = {
    acknowledges_before_it_is_durable: 500,
    counts_a_lease_twice: 500,
    leases_what_is_too_old: 503,
    returns_what_is_too_old: 503,
    forgets_a_pack: 500,
    puts_groups_in_another_order: 500,
    takes_every_answer: 500,
    counts_what_was_merged_as_free: 500,
    keeps_leases_of_the_lost: 508,
    scores_before_they_are_durable: 500,
}
"""Each with the first seed to try."""
