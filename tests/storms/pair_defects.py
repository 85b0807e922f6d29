"""Defects of two syncers that are put in on purpose. Storms with a standby find each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.storms.defects import Defect

from diloco.protocol.lineage import Lineage
from diloco.protocol.pair.endpoints import StandbyEndpoint
from diloco.protocol.pair.pair_core import PairCore
from diloco.protocol.pair.values import PairedWrites, StandbyConnection
from diloco.protocol.succession import Elector, Succession


def publishes_what_the_standby_lacks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PairCore, "_has", lambda self, serial: True)


def confirms_what_it_has_not_written(patch: pytest.MonkeyPatch) -> None:
    take = StandbyEndpoint.take

    def forgets(
        self: StandbyEndpoint, now: float, link: StandbyConnection, electorate: frozenset[str], epoch: int,
        write: Callable[[], None],
    ) -> None:  # fmt: skip
        take(self, now, link, electorate, epoch, write if epoch else lambda: None)

    patch.setattr(StandbyEndpoint, "take", forgets)


def goes_on_with_one_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Succession, "_is_majority", lambda self, number: number > 0)


def follows_whatever_serves(patch: pytest.MonkeyPatch) -> None:
    def refusal(self: Elector, lineage: Lineage) -> None:
        """It follows any."""

    patch.setattr(Elector, "refusal", refusal)


def forgets_that_it_has_a_standby(patch: pytest.MonkeyPatch) -> None:
    keep = PairCore.keep
    patch.setattr(PairCore, "keep", lambda self, **changes: keep(self, **{**changes, "is_paired": False}))


def writes_past_what_is_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PairedWrites, "begins", lambda self, key: key is not None and self._unconfirmed == key)


def has_a_base_only_once_it_is_alone(patch: pytest.MonkeyPatch) -> None:
    """One that is started again after most learners follow its epoch, and before it is alone, gets no vote."""
    keep, begun = PairCore.keep, Succession.begun

    def lower(self: PairCore, **changes: Any) -> None:
        is_begun = changes.get("is_paired") and changes.get("place") == "first" and "base" in changes
        keep(self, **{**changes, "base": self.position.base} if is_begun else changes)

    def without(self: Succession, epoch: int) -> None:
        base = self.base
        begun(self, epoch)
        self.base = base

    patch.setattr(PairCore, "keep", lower)
    patch.setattr(Succession, "begun", without)


DEFECTS: dict[Defect, int] = {
    publishes_what_the_standby_lacks: 0,
    confirms_what_it_has_not_written: 0,
    goes_on_with_one_vote: 28,
    follows_whatever_serves: 0,
    forgets_that_it_has_a_standby: 6,
    writes_past_what_is_not_confirmed: 31,
    has_a_base_only_once_it_is_alone: 9,
}
"""Each with the first seed to try: the storms before it are good all the same."""
