"""The driver of a storm, its jobs, store and worker, and the client of a learner, which tell what they do to what
checks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.chaos.versions import require
from tests.run.memory import Later, LaterWorker
from tests.storms.accounts import Accounts
from tests.storms.invariants import Ledger
from tests.storms.units import UnitLedger
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
from diloco.protocol.members import Claim, Report
from diloco.run.driver import Driver
from diloco.run.global_model import FragmentAnswer
from diloco.run.memory import MemorySlot, MemoryStore
from diloco.run.ports import ConnectionPort, InitialModel, Json, MergedRound, RunMethod, SavedRun, T, Work
from diloco.run.tensor_jobs import TensorJobs, TensorSlot, encoded_of


class StormDriver(Driver[GlobalFragment, MemorySlot, Tensor]):
    """What learners hear and fetch, and what is closed, is looked at. `ledger` and `accounts` are set at once."""

    ledger: Ledger
    accounts: Accounts

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        close = self._executor._close

        def closing(action: MergeRound) -> None:
            absent = sorted(action.members.difference(c.learner for c in action.contributions))
            tokens = [self.core.pending_tokens(learner, action.fragment) for learner in absent]
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
        self.ledger.fetched(fragment, base, fetched, num_due=1 + in_flight)
        self._told(claim.learner, fetched.verdicts)
        return fetched

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


class RecordingStore(MemoryStore[GlobalFragment, Tensor]):
    """Tells the ledger what is durable, also where the process dies at that very step.

    Attributes:
        ledger, units: what is durable, as far as storms look at it.
        verdicts: that become durable with the write which is under way.
        copies: of what was durable with each version, oldest first.
    """

    def __init__(self, ledger: Ledger, units: UnitLedger, at: Callable[[str], None]) -> None:
        super().__init__(at)
        self.units = units
        self.copies: list[SavedRun[GlobalFragment]] = []
        self.verdicts: dict[Key, str | None] = {}
        self.ledger = ledger

    def initialise(self, run: str, method: RunMethod, model: InitialModel[GlobalFragment]) -> None:
        before = self._saved
        try:
            super().initialise(run, method, model)
        finally:
            if self._saved is not before:
                self.ledger.initial(model.fragments)

    def publish(self, merged: MergedRound[GlobalFragment, Tensor], record: Json) -> None:
        before = self._saved
        try:
            super().publish(merged, record)
        finally:
            if self._saved is not before and self._saved is not None:
                self.copies.append(self._saved)
                self.ledger.durable(merged)
                kept = [c for c in merged.action.contributions if c.learner not in merged.refused]
                self.units.durable(kept, record)
                self.ledger.recorded(self.verdicts)
                self.backed_up()

    def backed_up(self) -> None:
        """There is a new version."""

    def save_record(self, record: Json) -> None:
        before = self._saved
        try:
            super().save_record(record)
        finally:
            if self._saved is not before:
                self.units.durable((), record)
                self.ledger.recorded(self.verdicts)


class RecordingWorker(LaterWorker):
    """Knows which verdicts are in a record, which is taken when its write begins.

    Arguments:
        recorded_with: the verdicts of a write that begins now; with it comes a version of this fragment, if any.
    """

    def __init__(
        self, store: RecordingStore, later: Later, recorded_with: Callable[[int | None], dict[Key, str | None]]
    ) -> None:
        super().__init__(later)
        self._store, self._recorded_with = store, recorded_with

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        if what == "write":
            self._store.verdicts = self._recorded_with(fragment)
        super().submit(what, fragment, job, done)
