"""Defects that are put in on purpose. Storms find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from diloco.learner.error_feedback import ErrorFeedback
from diloco.protocol.accounting import Account, Accounting
from diloco.protocol.contribution import MISSED, OUT_OF_STEP, Contribution, Verdict
from diloco.protocol.dealing import Dealing
from diloco.protocol.learner import LearnerCore
from diloco.protocol.leases import Leases
from diloco.protocol.members import Deadlines, Member
from diloco.protocol.rounds import late_contributions
from diloco.protocol.rounds.called import CalledLearner, CalledSyncer
from diloco.protocol.rounds.late_contributions import LateRounds
from diloco.protocol.rounds.pushed import PushedLearner
from diloco.protocol.rounds.scheduled import ScheduledSyncer
from diloco.protocol.session import session_core
from diloco.protocol.session.transfers import ModelCache, Outbox
from diloco.protocol.syncer import SyncerCore
from diloco.run import driver, tensor_jobs
from diloco.run.driver import Driver
from diloco.run.executor import ActionExecutor
from diloco.run.global_model import GlobalModel

Defect = Callable[[pytest.MonkeyPatch], None]


# --- contributions ----------------------------------------------------------------------------------------------------


def forgets_that_it_was_merged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounting, "is_known", lambda self, c: False)


def never_sends_again(patch: pytest.MonkeyPatch) -> None:
    take = Outbox.next
    patch.setattr(Outbox, "next", lambda self, boot: c if (c := take(self, 1)) is not None and boot == 1 else None)


def sends_again_under_a_new_number(patch: pytest.MonkeyPatch) -> None:
    acknowledged = Outbox.acknowledged

    def renumbered(self: Outbox, c: Contribution, boot: int) -> None:
        acknowledged(self, c, boot)
        if boot > 1 and c.number < 100:
            self.add(replace(c, number=c.number + 100, tokens=0, discarded=()))

    patch.setattr(Outbox, "acknowledged", renumbered)


def mixes_payloads_up(patch: pytest.MonkeyPatch) -> None:
    close = ActionExecutor._close

    def swapped(self: ActionExecutor[Any, Any, Any], action: Any) -> None:
        keys, slots = action.contributions, self.uploads._slots
        slots.update(zip(keys, reversed([slots[c] for c in keys]), strict=True))
        close(self, action)

    patch.setattr(ActionExecutor, "_close", swapped)


def keeps_what_was_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Driver, "cut_push", lambda self, push, no_room=None, received=0: None)


def keeps_what_a_rejected_contribution_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ErrorFeedback, "roll_back", lambda self, fragment, number: None)


# --- calls and rounds -------------------------------------------------------------------------------------------------


def never_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CalledSyncer, "calls", lambda self, learner: ())


def loses_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelCache, "called", lambda self, calls: [])


def ignores_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CalledLearner, "called", lambda self, fragment, version: False)


def repeats_calls_that_are_answered(patch: pytest.MonkeyPatch) -> None:
    def calls(self: CalledSyncer, learner: str) -> tuple[tuple[int, int], ...]:
        return tuple((fragment, self._run.fragments[fragment].version) for fragment in self.open_fragments())

    patch.setattr(CalledSyncer, "calls", calls)


def scales_too_much(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CalledSyncer, "scale", lambda self, fragment, closed, weights: 7.0)


def never_scales(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateRounds, "scale", lambda *_: 1.0)


def pushes_only_once(patch: pytest.MonkeyPatch) -> None:
    due = PushedLearner.due
    patch.setattr(
        PushedLearner, "due", lambda self, step: [f for f in due(self, step) if self.fragments[f].number == 0]
    )


# --- tokens and verdicts ----------------------------------------------------------------------------------------------


def counts_merged_tokens_as_discarded(patch: pytest.MonkeyPatch) -> None:
    count = Account.count
    patch.setattr(Account, "count", lambda self, c, reason, version: count(self, c, reason or MISSED, version))


def discards_nothing(patch: pytest.MonkeyPatch) -> None:
    count = Account.count

    def kept(self: Account, c: Contribution, reason: str | None, version: int) -> None:
        count(self, c, reason and OUT_OF_STEP, version)

    patch.setattr(Account, "count", kept)


def books_nothing_as_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounting, "end", lambda self, learner: None)


def books_acknowledged_work_as_lost(patch: pytest.MonkeyPatch) -> None:
    def end(self: Accounting, learner: str) -> None:
        self.accounts[learner].is_gone = True
        for ledger in self.accounts[learner].ledgers:
            ledger.lose()

    patch.setattr(Accounting, "end", end)


def keeps_verdicts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounting, "confirm", lambda self, learner, confirmed: None)


def confirms_what_has_no_verdict(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outbox, "confirmed", property(lambda self: tuple(self._newest)))


def tells_verdicts_before_they_are_durable(patch: pytest.MonkeyPatch) -> None:
    def verdicts(self: Accounting, learner: str) -> tuple[Verdict, ...]:
        return tuple(verdict for _, verdict in sorted(self.accounts[learner].verdicts.items()))

    patch.setattr(Accounting, "verdicts", verdicts)


def hears_no_rejection(patch: pytest.MonkeyPatch) -> None:
    take = Outbox.take

    def merged(self: Outbox, verdicts: Iterable[Verdict]) -> Sequence[tuple[Verdict, Contribution]]:
        return take(self, [replace(each, reason=None) for each in verdicts])

    patch.setattr(Outbox, "take", merged)


def misses_what_was_merged(patch: pytest.MonkeyPatch) -> None:
    received = LearnerCore.received
    patch.setattr(LearnerCore, "received", lambda self, fragment, version, merged: received(self, fragment, version, 0))


# --- members and versions ---------------------------------------------------------------------------------------------


def saves_nothing_of_learners(patch: pytest.MonkeyPatch) -> None:
    def restore(self: SyncerCore, now: float, values: Any) -> None:
        self.step = values["step"]

    patch.setattr(SyncerCore, "restore", restore)


def never_evicts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deadlines, "ends_at", lambda self, member: member.seen_at + 1e6)


def keeps_too_few_updates(patch: pytest.MonkeyPatch) -> None:
    take = GlobalModel.take

    def fewer(self: GlobalModel[Any, Any], *taken: Any) -> None:
        take(self, *taken)
        for fragment in self._fragments:
            if len(fragment.updates) > 1:
                fragment.updates.popleft()

    patch.setattr(GlobalModel, "take", fewer)


def follows_an_older_copy(patch: pytest.MonkeyPatch) -> None:
    for each in (session_core, driver):
        patch.setattr(each, "refusal", lambda seen, offered: None)


def counts_nothing_of_evicted_incarnations(patch: pytest.MonkeyPatch) -> None:
    trained = Accounting.trained
    patch.setattr(Accounting, "trained", lambda self, learner, tokens, _: trained(self, learner, tokens))


def counts_evicted_incarnations_again(patch: pytest.MonkeyPatch) -> None:
    lose = Account.lose_late

    def twice(self: Account, tokens: int, held: frozenset[int] | None) -> None:
        lose(self, tokens, held)
        lose(self, tokens, held)

    patch.setattr(Account, "lose_late", twice)


def merges_what_is_not_trained(patch: pytest.MonkeyPatch) -> None:
    encoded_of = tensor_jobs.encoded_of

    def whole(contributions: Sequence[Contribution], *arguments: Any) -> Any:
        trained = [replace(c, tensors=c.tensors and None) for c in contributions]
        return encoded_of(trained, *arguments)

    patch.setattr(tensor_jobs, "encoded_of", whole)


def trains_what_its_last_process_trained(patch: pytest.MonkeyPatch) -> None:
    """The driver knows of a learner what its first contribution to each fragment said."""
    contributed, first = SyncerCore.contributed, dict[tuple[str, int], Contribution]()

    def remembered(self: SyncerCore, now: float, c: Contribution) -> Any:
        known = first.setdefault((c.learner, c.fragment), c)
        is_empty = c.is_empty or known.is_empty
        return contributed(self, now, c if is_empty else replace(c, tensors=known.tensors))

    patch.setattr(SyncerCore, "contributed", remembered)


# --- held parts -------------------------------------------------------------------------------------------------------


def merges_what_is_not_held(patch: pytest.MonkeyPatch) -> None:
    """A learner fetches, trains and sends all, and the syncer takes it."""
    begin, check = ModelCache.__init__, SyncerCore.check
    patch.setattr(ModelCache, "__init__", lambda self, num_fragments, fragments=None: begin(self, num_fragments))
    patch.setattr(SyncerCore, "check", lambda self, *which, fragment=None: check(self, *which, fragment=None))


def waits_for_all_whatever_they_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "holds", lambda self, fragment: True)


def needs_more_learners_than_hold_a_fragment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScheduledSyncer, "_at_least", lambda self, fragment, step: self._run.at_least)


def takes_all_that_train_for_holders(patch: pytest.MonkeyPatch) -> None:
    """In called and pushed rounds."""
    ready = late_contributions.ready
    patch.setattr(late_contributions, "ready", lambda run, fragment=None: ready(run))


def counts_tokens_in_what_is_not_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "holds", lambda self, fragment: True)


def forgets_what_members_hold(patch: pytest.MonkeyPatch) -> None:
    restored = Member.restored
    patch.setattr(Member, "restored", lambda *saved: restored(*saved[:-1], None))


def holds_what_its_last_process_held(patch: pytest.MonkeyPatch) -> None:
    """A learner counts as holding what it held when it first joined."""
    begin, first = Accounting.begin, dict[tuple[Accounting, str], Any]()

    def begun(self: Accounting, learner: str, process: int, after: int = 0, held: Any = None) -> int:
        return begin(self, learner, process, after, first.setdefault((self, learner), held))

    patch.setattr(Accounting, "begin", begun)


def leases_until_what_is_not_held_is_settled(patch: pytest.MonkeyPatch) -> None:
    ask = Leases.ask
    patch.setattr(Leases, "ask", lambda self, *asked, held, **before: ask(self, *asked, held=None, **before))


def loses_late_tokens_in_what_another_process_held(patch: pytest.MonkeyPatch) -> None:
    """As it was before storms had held parts: those of a process by what another one of its name held."""
    begin = Accounting.begin

    def begun(self: Accounting, learner: str, process: int, after: int = 0, held: Any = None) -> int:
        before = self.accounts[learner].held if learner in self.accounts else held
        incarnation = begin(self, learner, process, after, held)
        self.accounts[learner].held_before = before
        return incarnation

    patch.setattr(Accounting, "begin", begun)


def sees_no_circle_of_learners_that_hold_parts(patch: pytest.MonkeyPatch) -> None:
    """As it was over a network, where a learner says 0 of what it does not hold."""
    patch.setattr(
        Member,
        "is_blocked_at",
        lambda self, now: self.blocked_with == tuple(v if self.holds(f) else -1 for f, v in enumerate(now)),
    )


HELD: dict[Defect, int] = {
    merges_what_is_not_held: 1,
    waits_for_all_whatever_they_hold: 3,
    needs_more_learners_than_hold_a_fragment: 3,
    takes_all_that_train_for_holders: 6,
    counts_tokens_in_what_is_not_held: 1,
    forgets_what_members_hold: 1,
    holds_what_its_last_process_held: 3,
    leases_until_what_is_not_held_is_settled: 1,
    loses_late_tokens_in_what_another_process_held: 46,
    sees_no_circle_of_learners_that_hold_parts: 316,
}
"""Of learners that hold parts; each with the first seed to try."""


def never_takes_over(patch: pytest.MonkeyPatch) -> None:
    """Groups without a holder stay without one."""
    patch.setattr(Dealing, "_balance", lambda self, members: None)


def forgets_what_it_dealt(patch: pytest.MonkeyPatch) -> None:
    """A syncer that is started again has no sets."""
    patch.setattr(Dealing, "restore", lambda self, now, saved, members: None)


def keeps_the_sets_of_the_evicted(patch: pytest.MonkeyPatch) -> None:
    """So that others do not take over."""
    patch.setattr(Dealing, "lost", lambda self, learner, members: None)


def never_turns(patch: pytest.MonkeyPatch) -> None:
    """Each learner keeps its experts."""
    patch.setattr(Dealing, "turned", lambda self, versions, members: None)


def tells_no_member_what_it_was_dealt(patch: pytest.MonkeyPatch) -> None:
    """Those that are dealt others stay."""
    standing = SyncerCore.standing
    patch.setattr(SyncerCore, "standing", lambda self, *args: replace(standing(self, *args), dealt=()))


DEALT: dict[Defect, int] = {
    never_takes_over: 1,
    forgets_what_it_dealt: 1,
    keeps_the_sets_of_the_evicted: 3,
    never_turns: 1,
    tells_no_member_what_it_was_dealt: 17,
}
"""Likewise, of sets that are dealt."""

DEFECTS: dict[Defect, int] = {
    forgets_that_it_was_merged: 14,
    never_sends_again: 3,
    sends_again_under_a_new_number: 0,
    mixes_payloads_up: 1,
    keeps_what_was_cut: 44,
    keeps_what_a_rejected_contribution_lost: 2,
    never_calls: 60,
    loses_calls: 60,
    ignores_calls: 60,
    repeats_calls_that_are_answered: 0,
    scales_too_much: 0,
    never_scales: 5,
    pushes_only_once: 47,
    counts_merged_tokens_as_discarded: 0,
    discards_nothing: 2,
    books_nothing_as_lost: 0,
    books_acknowledged_work_as_lost: 2,
    counts_nothing_of_evicted_incarnations: 562,
    counts_evicted_incarnations_again: 113,
    keeps_verdicts: 1,
    confirms_what_has_no_verdict: 0,
    tells_verdicts_before_they_are_durable: 5,
    hears_no_rejection: 2,
    misses_what_was_merged: 2,
    saves_nothing_of_learners: 13,
    never_evicts: 0,
    keeps_too_few_updates: 19,
    follows_an_older_copy: 0,
}
"""Each with the first seed to try: the storms before it are good all the same."""
