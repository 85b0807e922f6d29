"""`SyncerCore`: sans-I/O bookkeeping of a run's members, versions and contributions.

    events    of learners: joined · heartbeat · lease · contributed · disconnected · left
              of workers of reinforcement learning: work · made
              of an operator: steer
              of the driver: merged · abandoned · stored · recorded · tick
    actions   Acknowledge · Reject · MergeRound · PersistRecord · Publish · Tell · Evict · WakeAt

Every event is given the time, and returns actions (`protocol.actions`) for the driver to execute. The method determines
how rounds are called: the syncer's half in `protocol.rounds` assigns contributions to rounds and decides when a round
is closed. This module holds what all methods share. A closed round is merged, its result is stored, and only then it is
published. A contribution is open until it has a verdict, and a verdict is sent once it is durable
(`protocol.accounting`).

This module uses no tensor, clock, socket or thread.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from diloco.core.weights import weights_of
from diloco.errors import PayloadError, StaleIncarnationError, VersionError
from diloco.protocol.accounting import Accounting, key_of
from diloco.protocol.actions import Acknowledge, Action, Evict, MergeRound, PersistRecord, Publish, Reject, Tell, WakeAt
from diloco.protocol.contribution import OUTLIER, Contribution, Decided, Standing, Verdict
from diloco.protocol.dealing import Dealing
from diloco.protocol.groups import Assigned, Groups, Made
from diloco.protocol.leases import Ask, Grant, Leases
from diloco.protocol.members import Deadlines, Member, Report
from diloco.protocol.records import Record, require_numbers
from diloco.protocol.rounds import HALVES
from diloco.protocol.rounds.base import ClosedRound, Decision, FragmentState, Rules
from diloco.protocol.steering import Order, Pool, Steering
from diloco.protocol.units import minus, ranges_of
from diloco.protocol.workers import Work


class SyncerCore:
    """The bookkeeping of one run.

    Arguments:
        rules: the run's method, as the state machines know it.
        versions: the version of each fragment.
        deadlines: when a silent learner is evicted.
        step: the inner step after which the run begins.
        pool: how many learners may train; None: as many as join.
        dealing: the sets of experts that were promised before the run had a model; None: the run deals none.

    Attributes:
        members: by learner id, in the order in which they joined.
        fragments: the rounds' phases, by fragment.
        accounting: tokens and verdicts of all learners, present and past.
        leases: of the units of the run's data.
        groups: of reinforcement learning.
        steering: the operator's orders that are in force: those in the newest durable record.
        rounds: the syncer's half of the method's way of calling rounds.
        step: the highest inner step known.
        is_settled: as `Standing.settled`.
    """

    def __init__(
        self, rules: Rules, versions: Sequence[int], *, deadlines: Deadlines | None = None, step: int = 0,
        pool: Pool | None = None, dealing: Dealing | None = None,
    ) -> None:  # fmt: skip
        self.rules = rules
        self.dealing = Dealing() if dealing is None else dealing
        self.pool = pool
        self.deadlines = deadlines or Deadlines()
        self.step = step
        self.dealing.turned(versions, {})
        self.members: dict[str, Member] = {}
        self.fragments = [FragmentState(version, step) for version in versions]
        self.accounting = Accounting(len(self.fragments))
        self.leases = Leases(len(self.fragments))
        self.groups = Groups(self.leases, versions)
        self.steering, self._ordered, self._saving = Steering(), Steering(), Steering()
        self._to_evict, self._evicting = dict[str, str](), dict[str, str]()  # by order, with the reason
        self.rounds = HALVES[type(rules.quorum)].syncer(rules.quorum, self)
        self.is_settled = False
        self._serial = 0
        self._wants_record = False
        self._paused_at = 0.0

    # --- saving -------------------------------------------------------------------------------------------------------

    def saved(self, storing: Collection[int] = ()) -> Record:
        """The state that must be durable besides the tensors.

        `storing`: fragments whose new versions are stored with the record, which counts those versions as published.

        A record has no open rounds: their contributions are sent again, and rounds wait for the contributions of
        learners that have finished. Take a record only when the one before is durable: records are stored in order.
        """
        self._serial += 1
        self._wants_record = False
        self._saving = Steering.restored(self._ordered.saved())
        self._evicting, self._to_evict = self._evicting | self._to_evict, {}
        steps = [state.step for state in self.fragments]
        decided: list[Decided] = []
        for fragment in storing:
            closing, version = self.fragments[fragment].closing, self.fragments[fragment].version + 1
            assert closing is not None
            steps[fragment] = closing.step
            decided += [(c, None, version) for c in closing.contributions]
            decided += [(c, reason, version) for c, reason in self._rejected_with(fragment, closing)]
        confirmed = {key_of(c) for c, _, _ in decided}
        left_open = [c for key, c in self.accounting.open.items() if key not in confirmed]
        leases = self.leases.after(decided, left_open)
        sends_again = {key_of(c)[:2] for c in left_open}
        members = {
            learner: member.saved(sends_again=(learner, member.incarnation) in sends_again)
            | {"rounds": self.rounds.saved_of(learner)}
            for learner, member in self.members.items()
        }
        values = {
            "step": self.step,
            "fragment_steps": steps,
            "members": members,
            "accounts": self.accounting.saved(self._serial, decided),
            "leases": leases.saved(),
            "groups": self.groups.saved(self._serial, leases),
            "rounds": self.rounds.saved(storing),
            "steering": self._saving.saved(),
            "dealing": self.dealing.saved(),
        }
        return Record(self._serial, values)

    def restore(self, now: float, values: Mapping[str, Any]) -> None:
        """Continue from a record. Members have until their deadline to reconnect, and rounds wait for them. Raises as
        `records.require_numbers`."""
        require_numbers(values)
        self.step = values["step"]
        for state, step in zip(self.fragments, values["fragment_steps"], strict=True):
            state.step = step
        self.accounting.restore(values["accounts"], values["members"])
        for learner, saved in values["members"].items():
            account = self.accounting.accounts[learner]
            self.members[learner] = Member.restored(learner, account.incarnation, saved, now, account.held)
            self.rounds.restore_of(learner, saved["rounds"])
        self.leases.restore(values.get("leases"), {(it.learner, it.incarnation) for it in self.members.values()})
        self.groups.restore(values.get("groups"))
        self.rounds.restore(values["rounds"])
        if "dealing" in values:
            self.dealing.restore(now, values["dealing"], self.members)
            self.dealing.turned([each.version for each in self.fragments], self.members)
        self.steering, self._paused_at = Steering.restored(values["steering"]), now
        self._ordered = Steering.restored(values["steering"])

    def saved_of(self, learner: str) -> dict[str, Any]:
        """The state of the run for a member's own checkpoint, as plain values (JSON); `records.rewound` restores it."""
        return {
            "step": self.members[learner].step,
            "fragment_steps": [state.step for state in self.fragments],
            "rounds": self.rounds.saved(()),
            "own_rounds": self.rounds.saved_of(learner),
            "has_leases": self.leases.data is not None,
            "ledgers": self.accounting.accounts[learner].as_dict()["ledgers"],
            "dealing": self.dealing.saved(),
        }

    # --- membership ---------------------------------------------------------------------------------------------------

    def joined(
        self, now: float, learner: str, *, process: int = 0, after: int = 0, ready: bool = False,
        overlap: int | None = None, tokens_per_step: int | None = None, held: Collection[int] | None = None,
        dealt: bool = False,
    ) -> tuple[int, list[Action]]:  # fmt: skip
        """A learner joins as a new incarnation; returns its number. An older live incarnation is replaced.

        Arguments:
            process: the learner's process.
            after: the last incarnation of the same process; 0: it had none. A run that was taken back to an older state
                may not have known it.
            ready: rounds wait for it from the start (fixed membership), not only once it has trained.
            overlap: the learner's own τ; None: the method's.
            tokens_per_step: the most that it trains in an inner step; None: not declared.
            held: the fragments that it holds, all those of the trunk among them; None: all. Only these count for it:
                their rounds wait for it, and its tokens are accounted for in them.
            dealt: it was dealt the groups that it holds (`deal`), and may be dealt others.

        Raises:
            StaleIncarnationError: it joins again, but a newer process has taken its name.
            NoRoomError: the pool has no place for it now. DrainedError: the pool will have none, or an operator has
                drained or evicted it.
        """
        if after and not self.accounting.is_newest(learner, process, after):
            raise StaleIncarnationError(
                f"another process has joined the run as {learner!r}; give every learner its own name, or pass "
                "ranks= to Learner where the processes are ranks of one learner."
            )
        self.steering.require_admitted(learner)
        if self.pool is not None:
            self.pool.require_place(learner, self._training, self.step)
        actions: list[Action] = []
        if learner in self.members:
            actions += self._evict(learner, "replaced by a newer incarnation", replaced=True)
        own = None if held is None or len(held) == len(self.fragments) else frozenset(held)
        incarnation = self.accounting.begin(learner, process, after, own)
        self.members[learner] = Member(
            learner, incarnation, self.step, now, now, overlap, tokens_per_step=tokens_per_step, ready=ready, held=own
        )
        self.rounds.joined(learner)
        self._wants_record = True
        before = self.dealing.sets.copy()
        self.dealing.joined(learner, self.members, is_dealt=dealt)
        return incarnation, [*actions, *self._dealt(before), *self._look_again(now)]

    def deal(self, now: float, learner: str, size: int) -> tuple[tuple[int, ...], list[Action]]:
        """The groups of experts of a learner that is to hold so many, before it joins with them; the same ones when it
        asks again. Others may be dealt to members (`Standing.dealt`).

        Raises:
            DrainedError: the run has no place for it.
        """
        self.steering.require_admitted(learner)
        before = self.dealing.sets.copy()
        return self.dealing.ask(now, learner, size, self.members), [*self._dealt(before), *self._wake(now)]

    def check(
        self, learner: str, incarnation: int, process: int | None = None, *, fragment: int | None = None
    ) -> None:  # fmt: skip
        """Check that this incarnation is a member, and holds the fragment that it contributes to.

        Arguments:
            process: the learner's process; None: it was checked before. In a run that was taken back, another process
                may have been given the same number since.

        Raises:
            StaleIncarnationError: it was evicted or replaced. PayloadError: it does not hold the fragment.
        """
        member = self.members.get(learner)
        is_known = member is not None and member.incarnation == incarnation
        if not is_known or (process is not None and process != self.accounting.accounts[learner].process):
            raise StaleIncarnationError(
                f"incarnation {incarnation} of learner {learner!r} is not part of the run any more; join again for a "
                "new one."
            )
        if member is not None and fragment is not None and not member.holds(fragment):
            raise PayloadError(
                f"{learner!r} contributes to fragment {fragment}, which it does not hold; contribute to the fragments "
                "that it joined with. Nothing of it was counted."
            )

    def heartbeat(self, now: float, learner: str, incarnation: int, report: Report) -> list[Action]:
        """A heartbeat. `report`: must not say that the learner has finished, or is blocked, at a syncer that may lack
        contributions of it."""
        self.check(learner, incarnation)
        member = self.members[learner]
        before = member.ready, member.finished
        member.waiting, member.step_s = report.waiting, report.step_s or member.step_s
        has_gone_on = report.step < member.step  # a contribution of a later step has overtaken this heartbeat
        member.blocked_with = () if has_gone_on else report.blocked_with
        look = self._alive(now, member, report.step, report.tokens, report.steps, report.earlier_tokens)
        if report.finished:
            member.finished, member.ready = True, False
            self.accounting.accounts[learner].ended_at = report.step
        if report.tokens > 0:
            member.trains(member.step)
        if report.confirmed:
            self.accounting.confirm(learner, report.confirmed)
        return self._look_again(now) if look or before != (member.ready, member.finished) else self._wake(now)

    def disconnected(self, now: float, learner: str, incarnation: int) -> list[Action]:
        """A learner's connection broke; the learner is evicted at its reconnect deadline, or at that of silence if it
        is sooner."""
        member = self.members.get(learner)
        if member is None or member.incarnation != incarnation:
            return []
        member.connected, member.broken_at = False, now
        return self._wake(now)

    def left(
        self, now: float, learner: str, incarnation: int, *, tokens: int, step: int = 0, earlier_tokens: int = 0
    ) -> list[Action]:  # fmt: skip
        """A learner leaves. Its acknowledged contributions stay; its pending tokens are given up. `step`: at which it
        ends, since its last heartbeat may be from before a restart. Tokens as in `Report`."""
        self.check(learner, incarnation)
        member = self.members[learner]
        self._alive(now, member, max(step, member.step), tokens, 0, earlier_tokens)
        if member.tokens > 0:
            self.accounting.accounts[learner].ended_at = member.step
        return [*self._leave(now, member), *self._look_again(now)]

    def _leave(self, now: float, member: Member) -> list[Action]:
        before = self.dealing.sets.copy()
        self._remove(member.learner)
        self.dealing.left(now, member, self.members)
        return self._dealt(before)

    def left_late(self, now: float, learner: str, *, process: int, tokens: int, step: int = 0) -> list[Action]:
        """A process leaves that knows of no live incarnation of its own: an eviction may not have been durable, or the
        answer to a join request was lost. `step`: as in `left`. `tokens`: trained by the process in all.

        Raises:
            StaleIncarnationError: another process has the learner's name, or none.
        """
        account = self.accounting.accounts.get(learner)
        if account is None or account.process != process:
            raise StaleIncarnationError(
                f"this process is not known as learner {learner!r}, so it cannot leave under that name."
            )
        self._wants_record |= self.accounting.trained_late(learner, tokens)
        if step > 0:
            account.ended_at = max(step, account.ended_at or 0)
        member = self.members.get(learner)
        return [*([] if member is None else self._leave(now, member)), *self._look_again(now)]

    def tick(self, now: float) -> list[Action]:
        """Evict learners whose deadline has passed, and decide every open round again."""
        actions: list[Action] = []
        for member in list(self.members.values()):
            if self.steering.paused is not None:
                member.progressed_at = now
            if (reason := self.deadlines.passed(now, member)) is not None:
                actions += self._evict(member.learner, reason, replaced=False)
        self.groups.workers.tick(now, self.deadlines.lost_floor_s)
        before = self.dealing.sets.copy()
        self.dealing.tick(now, self.members)
        return [*actions, *self._dealt(before), *self._look_again(now)]

    def was_suspended(self, seconds: float) -> None:
        """The syncer process was suspended for this long: move all deadlines, since messages of that time are
        unread."""
        for member in self.members.values():
            member.seen_at += seconds
            member.progressed_at += seconds
            if member.broken_at is not None:
                member.broken_at += seconds
        for state in self.fragments:
            if state.closing is not None:
                state.closing = replace(state.closing, closed_at=state.closing.closed_at + seconds)
        self.rounds.was_suspended(seconds)
        self.groups.was_suspended(seconds)
        self._paused_at += seconds

    # --- contributions ------------------------------------------------------------------------------------------------

    def contributed(self, now: float, c: Contribution) -> list[Action]:
        """A complete, valid contribution was received; the first action answers it.

        Raises:
            StaleIncarnationError: from an incarnation that was evicted or replaced.
            VersionError: there is no such fragment.
            ConfigError: its weight cannot be computed (tokens without steps).
            PayloadError: its tokens, or its units of data, are already accounted for, or are not the learner's; or the
                learner does not hold the fragment.
        """
        self.check(c.learner, c.incarnation, fragment=c.fragment)
        if not 0 <= c.fragment < len(self.fragments):
            raise VersionError(
                f"there is no fragment {c.fragment}; the run has fragments 0 to {len(self.fragments) - 1}."
            )
        weights_of(self.rules.weight, [c.tokens], [c.steps], [0])
        member = self.members[c.learner]
        self._alive(now, member, c.step, c.trained, c.steps)
        member.trains(c.step - 1)
        if self.accounting.is_known(c):
            return [Acknowledge(c, duplicate=True), *self._look_again(now)]
        member.waiting, member.blocked_with = False, ()  # a heartbeat says when it is blocked again
        self.accounting.check(c)
        self.leases.check(c, self.accounting.open.values())
        reason = self.rounds.admit(now, c)
        if reason is not None:
            return [self._reject(c, reason), *self._look_again(now)]
        self.accounting.acknowledge(c)
        return [Acknowledge(c, duplicate=False), *self._look_again(now)]

    def merged(self, fragment: int, refused: Sequence[str] = (), digest: str = "") -> None:
        """The fragment's closed round is merged, and its version will be made durable.

        Arguments:
            refused: learners whose contributions the method's screen refused.
            digest: of the new version.
        """
        state = self.fragments[fragment]
        self.groups.publishes(fragment, state.version + 1, digest)
        assert state.closing is not None
        kept = tuple(c for c in state.closing.contributions if c.learner not in refused)
        outliers = tuple(c for c in state.closing.contributions if c.learner in refused)
        state.closing, state.phase = replace(state.closing, contributions=kept, refused=outliers), "storing"

    def abandoned(self, now: float, fragment: int, reason: str) -> list[Action]:
        """The closed round has no finite result: keep the version, and reject the round's contributions, those left out
        of it, and those based on it."""
        state = self.fragments[fragment]
        assert state.closing is not None
        closed, state.closing, state.phase = state.closing, None, "open"
        failed = [*((c, reason) for c in closed.contributions), *self.rounds.abandoned(fragment, closed)]
        return [*(self._reject(c, why) for c, why in failed), *self._look_again(now)]

    def stored(self, now: float, fragment: int) -> list[Action]:
        """The new version is durable, with the last record: publish it, and open the next round."""
        state = self.fragments[fragment]
        assert state.closing is not None
        rejected = self._rejected_with(fragment, state.closing)
        closed, state.closing = state.closing, None
        self.rounds.stored(now, fragment, closed)
        state.version, state.step, state.phase = state.version + 1, closed.step, "open"
        for c in closed.contributions:
            self.accounting.count_merged(c, state.version)
            self.leases.decided(c, None, self.accounting.open.values(), version=state.version)
        self.groups.published([each.version for each in self.fragments])
        rejects = [self._reject(c, reason) for c, reason in rejected]
        contributors = tuple(dict.fromkeys(c.learner for c in closed.contributions))
        for member in self.members.values():
            member.waiting = member.waiting and member.learner not in contributors
        self.dealing.turned([each.version for each in self.fragments], self.members)
        return [*rejects, Publish(fragment, state.version, contributors), *self._look_again(now)]

    def recorded(self, now: float, serial: int) -> list[Action]:
        """The record with this serial number is durable: send its verdicts to their learners, and obey its orders."""
        self.groups.recorded(now, serial)
        learners = sorted(self.accounting.recorded(serial) & self.members.keys())
        if self.steering == self._saving and not self._evicting:
            return [Tell(tuple(learners))] if learners else []
        was_paused, self.steering = self.steering.paused is not None, self._saving
        evicting, self._evicting = self._evicting, {}
        evicts = [self._evict(it, why, replaced=False) for it, why in evicting.items() if it in self.members]
        if self.steering.paused is not None and not was_paused:
            self._paused_at = now
        elif was_paused and self.steering.paused is None:  # the time of the pause counts for no round and no learner
            self.rounds.was_suspended(now - self._paused_at)
            for member in self.members.values():  # their next heartbeats say whether they wait for an answer
                member.progressed_at, member.waiting, member.blocked_with = now, False, ()
        return [*chain.from_iterable(evicts), Tell(tuple(sorted(self.members))), *self._look_again(now)]

    # --- an operator --------------------------------------------------------------------------------------------------

    def steer(self, now: float, order: Order, by: str) -> tuple[str, list[Action]]:
        """An order of the operator `by`; returns its effect in a sentence. It is in force once a record with it is
        durable.

        Raises:
            ConfigError: the order cannot be executed.
        """
        present = [learner for learner in self._training if not self._ordered.takes_out(learner)]
        said = self._ordered.take(
            order, by, list(self.members), present, self.pool, one_at_a_time=self.rules.one_at_a_time
        )
        if order.what == "evict":
            self._to_evict[order.learner] = f"evicted {order.given(by)}"
        self._wants_record = True
        return said, self._wake(now)

    @property
    def at_least(self) -> int:
        """K, the fewest learners that a round is merged with: the operator's, or the method's; 1 once an operator has
        ended the run, so that last contributions wait for no other learner."""
        if self.steering.ended is not None:
            return 1
        return self.rules.quorum.at_least if self.steering.at_least is None else self.steering.at_least

    # --- data ---------------------------------------------------------------------------------------------------------

    def lease(
        self, now: float, learner: str, incarnation: int, ask: Ask, *, tokens_before: int = 0
    ) -> tuple[Grant, list[Action]]:  # fmt: skip
        """A learner asks for units of the run's data. Send the answer once a record with it is durable.

        Raises:
            StaleIncarnationError: the incarnation was evicted or replaced.
            ConfigError, PayloadError: as `Leases.ask`.
        """
        self.check(learner, incarnation)
        before = () if ask.data.groups is None else self.leases.leased
        held = self.members[learner].held
        grant = self.leases.ask(learner, incarnation, ask, tokens_before=tokens_before, held=held)
        if ask.data.groups is not None:
            self.groups.leased(minus(grant.units, before))  # a request may be repeated
        self._wants_record |= grant.number > 0
        return grant, self._wake(now)

    def work(self, now: float, work: Work) -> tuple[Assigned, list[Action]]:
        """A worker's message. If it has scores, send the answer once a record with them is durable.

        Raises:
            StaleIncarnationError, ConfigError, PayloadError: as `Groups.work`.
        """
        if work.role == "trainer":
            self.check(work.worker, work.process)
            if self.groups.rules is None:
                raise PayloadError(f"{work.worker!r} asks for groups, but the run has none; give the run [rl].")
            units, reasons = ranges_of((it.number, it.number + 1) for it in work.scores), dict[int, str]()
            for score in work.scores:
                reasons[score.number] = score.reason
            given_up = self.leases.give_up(work.worker, work.process, units, self.accounting.open.values())
            self.groups.given_up(work.worker, given_up, reasons)
            return self.groups.of_trainer(work.worker, work.process), self._wake(now)
        paused = self.steering.ended or self.steering.paused
        return self.groups.work(now, work, paused=None if paused is None else f"the run was {paused}"), self._wake(now)

    def made(self, now: float, worker: str, process: int, made: Made) -> tuple[bool, list[Action]]:
        """A group was received. Returns as `Groups.made`; send the answer once a record is durable.

        Raises:
            PayloadError, StaleIncarnationError: as `Groups.made`.
        """
        return self.groups.made(now, worker, process, made), self._wake(now)

    # --- the state of a run -------------------------------------------------------------------------------------------

    def standing(self, learner: str) -> Standing:
        """The standing of a member."""
        return Standing(
            self.step, self.start_step(learner), self.accounting.run_tokens, len(self.members),
            self.rounds.sync_every(learner), tuple(state.version for state in self.fragments),
            self.rounds.calls(learner), self.accounting.verdicts(learner), learner in self.drained,
            paused=self.steering.paused is not None, at_least=self.steering.at_least or 0, settled=self.is_settled,
            dealt=self.dealing.of(learner),
        )  # fmt: skip

    def verdicts(self, learner: str, fragment: int, version: int) -> tuple[Verdict, ...]:
        """The verdicts that a learner needs before it adopts this version of the fragment."""
        verdicts = self.accounting.verdicts(learner)
        return tuple(each for each in verdicts if each.fragment == fragment and each.version <= version)

    def start_step(self, learner: str) -> int:
        """The inner step at which a new learner starts: the run's, or an earlier one if a round lacks learners."""
        start = self.rounds.start_step(learner) if self.members[learner].tokens == 0 else None
        return self.step if start is None else start

    @property
    def intervals_in_flight(self) -> int:
        """The most answers of a fragment that may be outstanding when a member sends, by the method or its own τ."""
        schedule = self.rules.schedule
        own = [schedule.intervals_in(each.overlap) for each in self.members.values() if each.overlap is not None]
        return max(schedule.intervals_in_flight, *own, 0)

    def decision(self, now: float, fragment: int) -> Decision | None:
        """Whether to merge the fragment's open round, and why; None: no round is open."""
        if self.fragments[fragment].phase != "open":
            return None
        decision, paused = self.rounds.decision(now, fragment), self.steering.paused
        return decision if decision is None or paused is None else Decision(None, None, paused)

    @property
    def drained(self) -> Sequence[str]:
        """The newest members, if the pool has no place for them, and those that an operator has drained."""
        return self.steering.drained(self._training, self.pool, self.step)

    @property
    def _training(self) -> list[str]:
        """Members that have not finished, oldest first: the pool's places are assigned in this order."""
        return [learner for learner, member in self.members.items() if not member.finished]

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _look_again(self, now: float) -> list[Action]:
        if self.steering.paused is not None:
            self.is_settled = False
            return self._wake(now)
        actions: list[Action] = []
        if called := self.rounds.update(now):
            actions.append(Tell(tuple(sorted(called))))
        for fragment in self.rounds.open_fragments():
            decision = self.decision(now, fragment)
            if decision is not None and decision.merge is not None:
                actions.append(self._close(now, fragment, decision.reason))
        was_settled, self.is_settled = self.is_settled, self._settles(now)
        if self.is_settled and not was_settled and self.members:
            self._wants_record = True  # readers of the store learn that the run may be over
            actions.append(Tell(tuple(sorted(self.members))))
        return actions + self._wake(now)

    def _settles(self, now: float) -> bool:
        """Whether no member trains, no version is being made, and no open round ends by itself."""
        if not all(it.finished for it in self.members.values()) or any(it.phase != "open" for it in self.fragments):
            return False
        decisions = (self.decision(now, fragment) for fragment in self.rounds.open_fragments())
        return all(decision is None or decision.wait_until is None for decision in decisions)

    def _close(self, now: float, fragment: int, reason: str) -> MergeRound:
        state, closed = self.fragments[fragment], self.rounds.close(now, fragment)
        state.closing, state.phase = closed, "merging"
        weights = closed.weights(self.rules.weight)
        scale = self.rounds.scale(fragment, closed, weights)
        return MergeRound(fragment, closed.number, closed.contributions, tuple(weights), scale, closed.members, reason)

    def _wake(self, now: float) -> list[Action]:
        """Request a record if one is needed, and a wake-up at the next deadline or end of a grace window."""
        times = [self.deadlines.ends_at(member) for member in self.members.values()]
        times += [*self.rounds.ends(now), self.dealing.ends_at]
        times.append(self.groups.workers.wake_at(self.deadlines.lost_floor_s))
        due_at = self.groups.due_at(now)
        is_due = self._wants_record or self.accounting.needs_record or due_at <= now
        times = [at for at in (*times, *(() if is_due else (due_at,))) if at < math.inf]
        record: list[Action] = [PersistRecord()] if is_due else []
        return [*record, *([WakeAt(min(times))] if times else [])]

    def _rejected_with(self, fragment: int, closed: ClosedRound) -> list[tuple[Contribution, str]]:
        """The contributions to reject once a closed round's version is stored, with the reasons."""
        return [*((c, OUTLIER) for c in closed.refused), *self.rounds.left_out(fragment)]

    def _reject(self, c: Contribution, reason: str) -> Reject:
        version = self.fragments[c.fragment].version
        self.accounting.count_rejected(c, reason, version)
        self.leases.decided(c, reason, self.accounting.open.values(), version=version)
        self.groups.look()
        return Reject(c, reason)

    def _evict(self, learner: str, reason: str, *, replaced: bool) -> list[Action]:
        member, before = self.members[learner], self.dealing.sets.copy()
        self._remove(learner)
        if not replaced:
            self.dealing.lost(learner, self.members)
        return [Evict(learner, member.incarnation, reason, replaced), *self._dealt(before)]

    def _dealt(self, before: Mapping[str, frozenset[int]]) -> list[Action]:
        """Tell the members whose sets have changed."""
        after = self.dealing.sets
        changed = sorted(it for it in self.members if it in before and before[it] != after.get(it))
        self._wants_record |= after != before
        return [Tell(tuple(changed))] if changed else []

    def _remove(self, learner: str) -> None:
        """Remove a member; rounds wait for it no longer."""
        incarnation = self.members.pop(learner).incarnation
        self.accounting.end(learner)
        self.leases.ended(learner, incarnation, self.accounting.open.values())
        self.groups.look()
        self.rounds.removed(learner)
        self._wants_record = True

    def _alive(
        self, now: float, member: Member, step: int, tokens: int, steps: int, earlier_tokens: int = 0
    ) -> bool:  # fmt: skip
        """Record a member's progress; returns whether it may change a round."""
        self.accounting.trained(member.learner, tokens, earlier_tokens)  # it may refuse, before a number is counted
        num_new = member.heard(now, step, tokens, steps)
        self.step = max(self.step, member.step)
        return self.rounds.heard(member, num_new)
