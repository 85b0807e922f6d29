"""The driver of a storm, its jobs and store, and the client of a learner, which tell what they do to what checks it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.chaos.versions import require
from tests.storms.accounts import Accounts
from tests.storms.groups import check_lease
from tests.storms.invariants import Ledger
from tests.storms.places import StormFormat
from torch import Tensor

from diloco.core.codecs import FP32
from diloco.core.global_fragment import GlobalFragment, close
from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.errors import PayloadError
from diloco.exchange.virtual.client import SessionClient
from diloco.protocol.accounting import Key
from diloco.protocol.actions import MergeRound
from diloco.protocol.contribution import Contribution, Standing, Verdict
from diloco.protocol.leases import Ask, Grant
from diloco.protocol.members import Claim, Report
from diloco.protocol.units import minus
from diloco.run.driver import Driver
from diloco.run.global_model import FragmentAnswer
from diloco.run.memory import MemorySlot
from diloco.run.ports import ConnectionPort, Json, MergedRound
from diloco.run.published import PublishedStore
from diloco.run.tensor_jobs import TensorJobs, TensorSlot, encoded_of


class StormDriver(Driver[GlobalFragment, MemorySlot, Tensor]):
    """What learners hear and fetch, and what is closed, is looked at. `ledger` and `accounts` are set at once.

    Attributes:
        first: the versions that it began with.
    """

    ledger: Ledger
    accounts: Accounts

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.first = defaultdict[int, int](int)
        if self.state.is_initialised:
            self.first.update(enumerate(self.state.versions))
        close = self._executor._close

        def closing(action: MergeRound) -> None:
            absent = sorted(action.members.difference(c.learner for c in action.contributions))
            accounts = self.core.accounting.accounts
            tokens = [accounts[learner].ledgers[action.fragment].pending for learner in absent]
            self.accounts.scaled(self.state.method, action, tokens)
            close(action)

        self._executor._close = closing  # type: ignore[method-assign]

    def heartbeat(self, claim: Claim, report: Report) -> Standing:
        standing = super().heartbeat(claim, report)
        self._told(claim.learner, standing.verdicts)
        return standing

    def connected(self, claim: Claim, connection: ConnectionPort) -> None:
        super().connected(claim, connection)
        self._told(claim.learner, self.core.standing(claim.learner).verdicts)

    def fetch(
        self, fragment: int, base: int, claim: Claim | None = None
    ) -> FragmentAnswer[GlobalFragment, Tensor]:  # fmt: skip
        assert claim is not None
        fetched = super().fetch(fragment, base, claim)
        overlap, schedule = self.core.members[claim.learner].overlap, self.core.rules.schedule
        in_flight = schedule.intervals_in_flight if overlap is None else schedule.intervals_in(overlap)
        self.ledger.fetched(fragment, base, fetched, num_due=1 + in_flight, first=self.first[fragment])
        self._told(claim.learner, fetched.verdicts)
        return fetched

    def lease(self, claim: Claim, ask: Ask, done: Callable[[Grant], None]) -> None:
        groups, leases = self.core.groups, self.core.leases
        before, num_before = leases.leased, groups.staleness.total()
        super().lease(claim, ask, done)
        holding = leases.leases.get((claim.learner, claim.incarnation))
        new = minus(leases.leased, before)
        check_lease(self.core, new if holding is None else minus(new, holding.grant.claimed), num_before)

    def _told(self, learner: str, verdicts: Sequence[Verdict]) -> None:
        incarnation = self.core.members[learner].incarnation
        for it in verdicts:
            self.ledger.told(learner, incarnation, it.fragment, it.number, it.reason)


class StormClient(SessionClient):
    """What a learner offers is noted. `accounts` is set before anything is offered."""

    accounts: Accounts

    def offer(self, c: Contribution, payload: Tensor) -> None:
        self.accounts.sent(c, payload)
        super().offer(c, payload)


class StormJobs(TensorJobs):
    """What is merged is looked at."""

    def __init__(self, method: Method, accounts: Accounts) -> None:
        super().__init__(method, seconds=None, in_place=True)
        self._accounts = accounts

    def close(
        self, action: MergeRound, layout: Layout, held: GlobalFragment, slots: Sequence[TensorSlot]
    ) -> MergedRound[GlobalFragment, Tensor] | PayloadError:
        payloads = [slot.tensor for slot in slots]
        self._accounts.closing(action, payloads)
        if all(c.tensors is None for c in action.contributions):
            return super().close(action, layout, held, slots)
        expected = self._without_the_rest(action, layout, held, payloads)
        merged = super().close(action, layout, held, slots)
        found = None if isinstance(merged, PayloadError) else merged.update.digest
        require(found == expected, f"{action} merges what a learner does not train")
        return merged

    def _without_the_rest(
        self, action: MergeRound, layout: Layout, held: GlobalFragment, payloads: Sequence[Tensor]
    ) -> str | None:
        """The digest of the round's result with other numbers in the place of what a learner does not train; None: it
        has none."""
        method, places = self._method.for_fragment(action.fragment), layout.fragments[action.fragment].tensors
        others = []
        for c, payload in zip(action.contributions, payloads, strict=True):
            if not c.is_empty:
                values = method.up.decode(payload, held.theta.numel())
                for index, place in enumerate(places):
                    if c.tensors is not None and index not in c.tensors:
                        values[place.elements] = 1e3
                payload = FP32().encode(values)
            others.append(payload)
        encoded = encoded_of(action.contributions, action.weights, others, action.round, places)
        plain = replace(method, up=FP32(), error_feedback=0.0)
        try:
            return close(plain, held, encoded, places, action.scale).update.digest
        except PayloadError:
            return None


class StormStore(PublishedStore[GlobalFragment, Tensor]):
    """Notes what is put, and which verdicts become durable with which record.

    Attributes:
        note: called with each version that is put.
        recorded_with: returns the verdicts of a record that is taken now, with versions of these fragments.
    """

    note: Callable[[MergedRound[GlobalFragment, Tensor]], None]
    recorded_with: Callable[[Sequence[int]], Mapping[Key, str | None]]
    _format: StormFormat

    def put(self, merged: MergedRound[GlobalFragment, Tensor], done: Callable[[], None]) -> None:
        self.note(merged)
        super().put(merged, done)

    def commit(
        self, versions: Sequence[MergedRound[GlobalFragment, Tensor]], record: Json, pack: Sequence[bytes],
        done: Callable[[], None],
    ) -> None:  # fmt: skip
        self._format.verdicts = self.recorded_with([each.update.fragment for each in versions])
        super().commit(versions, record, pack, done)
