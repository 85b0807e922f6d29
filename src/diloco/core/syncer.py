"""What a syncer does when: sans-I/O bookkeeping of members, rounds and versions.

    events:   joined · left · heartbeat · disconnected · contributed · merged · stored · tick        (each with the time)
    actions:  Accept · Reject · Call · Merge · Store · Publish · Evict · WakeAt                      (values, carried out by the caller)

The life of a round: contributions come in; when `decide()` says so it is merged; the result is stored; only then is it published
and visible. Who opens a round, who belongs to it and what becomes of late work is in `core.scheduled` for rounds that all learners
contribute to by schedule, and in `core.opened` for those that nobody blocks on.

No tensor, clock, socket or thread is in here. `exchange.local` and the syncer process drive it, in lock step or under a lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diloco.core import opened, scheduled
from diloco.core.books import Books
from diloco.core.ledger import Ledger
from diloco.core.members import Deadlines, Member
from diloco.core.method import Method
from diloco.core.quorum import Decision, Pace
from diloco.core.rounds import Accept, Action, Evict, FragmentState, Merge, Publish, Reject, Round, Store, WakeAt
from diloco.core.update import MISSED, OUTLIER, Contribution
from diloco.core.weights import merge_weights, weights_of
from diloco.errors import StaleIncarnationError, VersionError


class SyncerCore:
    """The bookkeeping of one run.

    Arguments:
        method: the run's.
        versions: the version of each fragment.
        deadlines: when a silent learner is given up.
        roster: learners that were live before a restart; they have until their deadline to come back, and rounds wait for them.
        incarnations: the last incarnation given to each learner ever.
        ledgers: as `books.durable_ledgers` said, stored together with the roster.
        step: the highest inner step known.
        round_steps: per fragment, after which inner step the contributions to its version were sent, as `round_steps` said; None: the
            run begins here, after `step`.
        clock: the run clock, as `clock` said.
        merged_rounds: as `books.durable_merged_rounds` said.
    """

    def __init__(
        self,
        method: Method,
        versions: Sequence[int],
        *,
        deadlines: Deadlines | None = None,
        roster: Sequence[Member] = (),
        incarnations: Mapping[str, int] | None = None,
        ledgers: Mapping[str, Sequence[Ledger]] | None = None,
        step: int = 0,
        round_steps: Sequence[int] | None = None,
        clock: float = 0.0,
        merged_rounds: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self.method = method
        self.schedule = method.schedule(len(versions))
        self.clock = clock
        """The run clock: inner steps that an average live learner has taken. It paces the rounds that the syncer calls."""
        self.pace = Pace()
        self.deadlines = deadlines or Deadlines()
        self.fragments = [
            FragmentState(version, step=sent, turn=opened.next_turn(self, index))
            for index, (version, sent) in enumerate(zip(versions, round_steps or [step] * len(versions), strict=True))
        ]
        self.members: dict[str, Member] = {member.learner: member for member in roster}
        self.incarnations: dict[str, int] = dict(incarnations or {})
        self.step = step
        self.books = Books(
            self.fragments, ledgers=ledgers or {}, merged_rounds=merged_rounds or {},
            alive={member.learner: member.tokens for member in roster},
        )  # fmt: skip

    def wind(self, clock: float) -> None:
        """Set the run clock (of a checkpoint), and every fragment's next turn by it."""
        self.clock = clock
        for index, state in enumerate(self.fragments):
            state.turn = opened.next_turn(self, index)

    # --- membership -------------------------------------------------------------------------------------------------------

    def joined(self, now: float, learner: str, *, ready: bool = False) -> tuple[int, list[Action]]:
        """A new incarnation of a learner; returns its number. A live older incarnation is replaced.

        `ready`: rounds wait for it from the start (membership is fixed), not only once it has trained.
        """
        actions: list[Action] = []
        if learner in self.members:
            actions += self._evict(learner, "replaced by a newer incarnation", replaced=True)
        incarnation = self.incarnations.get(learner, 0) + 1
        self.incarnations[learner] = incarnation
        sent_step = dict.fromkeys(range(len(self.fragments)), self.step)
        self.members[learner] = Member(learner, incarnation, self.step, now, now, ready=ready, sent_step=sent_step)
        self.books.begin(learner)
        return incarnation, actions + self._look_again(now)

    def start_step(self, learner: str) -> int:
        """The inner step that a learner starts from which has not trained yet: the run's, or less where a round lacks learners."""
        may_be_less = self.method.quorum.scheduled and self.members[learner].tokens == 0
        return scheduled.start_step(self) if may_be_less else self.step

    def check(self, learner: str, incarnation: int) -> None:
        """Whether this incarnation may speak.

        Raises:
            StaleIncarnationError: it was evicted or replaced.
        """
        member = self.members.get(learner)
        if member is None or member.incarnation != incarnation:
            raise StaleIncarnationError(
                f"incarnation {incarnation} of learner {learner!r} is not part of the run any more; join again for a new one."
            )

    def heartbeat(
        self, now: float, learner: str, incarnation: int, *, step: int, tokens: int, step_s: float | None, waiting: bool,
        finished: bool = False,
    ) -> list[Action]:  # fmt: skip
        """A sign of life. `tokens`: trained by this incarnation in all; `waiting`: it is blocked on an answer; `finished`: it takes no
        more steps."""
        self.check(learner, incarnation)
        member = self.members[learner]
        member.waiting, member.step_s = waiting, step_s or member.step_s
        self._alive(now, member, step, tokens)
        if finished:
            member.finished, member.ready = True, False
        if tokens > 0:
            member.trains(member.step)
        look = waiting or finished or not self.method.quorum.scheduled
        return self._look_again(now) if look else self._wake(now)

    def disconnected(self, now: float, learner: str, incarnation: int) -> list[Action]:
        """Its connection broke; it has until its reconnect deadline to come back."""
        member = self.members.get(learner)
        if member is None or member.incarnation != incarnation:
            return []
        member.connected, member.seen_at, member.broken_at = False, now, now
        return self._wake(now)

    def left(self, now: float, learner: str, incarnation: int, *, tokens: int) -> list[Action]:
        """It says goodbye. What it was acknowledged for stays; what it had pending is lost with it."""
        self.check(learner, incarnation)
        member = self.members[learner]
        self._alive(now, member, member.step, tokens)
        self._remove(learner)
        return self._look_again(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: give up learners whose deadline is over, and look at every open round again."""
        actions: list[Action] = []
        for member in list(self.members.values()):
            if (reason := self.deadlines.passed(now, member)) is not None:
                actions += self._evict(member.learner, reason, replaced=False)
        return actions + self._look_again(now)

    # --- rounds -----------------------------------------------------------------------------------------------------------

    def contributed(self, now: float, c: Contribution) -> list[Action]:
        """A complete, valid contribution is here; the first action answers it.

        Raises:
            StaleIncarnationError: from an incarnation that was evicted or replaced.
            VersionError: there is no such fragment.
            ConfigError: it has no weight, so that no round could be closed with it.
        """
        self.check(c.learner, c.incarnation)
        if not 0 <= c.fragment < len(self.fragments):
            raise VersionError(
                f"there is no fragment {c.fragment}; the run has fragments 0 to {len(self.fragments) - 1}."
            )
        weights_of(self.method.weight, [c.tokens], [c.steps], [0])
        member = self.members[c.learner]
        self._alive(now, member, c.step, c.trained)
        member.waiting = False  # or it could not have sent; a heartbeat says when it is blocked again
        member.trains(c.step - 1)
        answer = (scheduled.answer if self.method.quorum.scheduled else opened.answer)(self, now, c)
        if isinstance(answer, Accept):
            member.sent_step[c.fragment], member.sent_work[c.fragment] = c.step, (c.tokens, c.steps)
        return [answer, *self._look_again(now)]

    def merged(self, fragment: int, refused: Sequence[str] = ()) -> list[Action]:
        """The tensor work of the fragment's round is done; its tokens count as merged in the ledgers that are stored with it.

        `refused`: learners whose contributions the method's screen left out.
        """
        state = self.fragments[fragment]
        state.phase = "storing"
        round_ = state.rounds[state.version]
        round_.refuse(refused)
        for c in round_.refused:
            self.books.discard(c, OUTLIER)
        self.books.merged(fragment, round_)
        return [Store(fragment, state.version + 1)]

    def abandoned(self, now: float, fragment: int, reason: str) -> list[Action]:
        """The round cannot be merged (its result is not finite): stay at the version, and reject what is in it or counts on it.

        Learners count on rounds that the schedule calls. Where they do not, later rounds are merged in its place.
        """
        state = self.fragments[fragment]
        failed = list(state.rounds.values()) if self.method.quorum.scheduled else [state.rounds[state.version]]
        later = [round_ for round_ in state.rounds.values() if round_ not in failed]
        for round_ in later:
            round_.number -= 1
        contributions = [c for round_ in failed for c in (*round_.everything, *round_.missed)]
        state.rounds, state.phase = {round_.number: round_ for round_ in later}, "open"
        for c in contributions:
            self.books.discard(c, reason)
        return [*(Reject(c, reason) for c in contributions), *self._look_again(now)]

    def stored(self, now: float, fragment: int) -> list[Action]:
        """The new version is durable: publish it, say who is not in it, and go on with the next round."""
        state = self.fragments[fragment]
        round_ = state.rounds.pop(state.version)
        state.version, state.step, state.phase = state.version + 1, round_.step, "open"
        self.books.published(fragment, round_)
        for member in self.members.values():
            member.waiting = member.waiting and member.learner not in round_.contributions
        if round_.closed_at is not None:
            self.pace.measured(sync_s=now - round_.closed_at)
        contributors = tuple(sorted(round_.contributions))
        rejects = [Reject(c, OUTLIER) for c in round_.refused] + [Reject(c, MISSED) for c in round_.missed]
        for c in round_.missed:
            self.books.discard(c, MISSED)
        return [*rejects, Publish(fragment, state.version, contributors), *self._look_again(now)]

    def sync_every_of(self, learner: str) -> int:
        """Inner steps between two pushes of this learner: ⌊v/v_max · H⌋ by measured speed where the method's steps are dynamic."""
        every = self.schedule.sync_every_at(self.step + 1)
        member = self.members.get(learner)
        step_times = [each.step_s for each in self.members.values() if each.step_s]
        if not self.method.dynamic_steps or member is None or not member.step_s:
            return every
        return max(1, int(min(step_times) / member.step_s * every))

    def decision(self, now: float, fragment: int) -> Decision | None:
        """Whether the fragment's open round is merged, and if not, why; None if none is open."""
        if self.method.quorum.scheduled:
            return scheduled.decision(self, now, fragment)
        return opened.decision(self, now, fragment)

    def lacks_learners(self, fragment: int) -> int | None:
        """How many have contributed to the fragment's open round, where that is not enough and no other learner is waited for."""
        state = self.fragments[fragment]
        round_ = state.rounds.get(state.version)
        if not self.method.quorum.scheduled or state.phase != "open" or round_ is None:
            return None
        return None if round_.members - round_.contributions.keys() else len(round_.contributions)

    def _look_again(self, now: float) -> list[Action]:
        before_decisions = scheduled.before_decisions if self.method.quorum.scheduled else opened.before_decisions
        actions = before_decisions(self, now)
        for index, state in enumerate(self.fragments):
            decision = self.decision(now, index)
            if decision is not None and decision.merge is not None:
                state.phase = "merging"
                round_ = state.rounds[state.version]
                round_.closed_at = now
                if self.method.quorum.scheduled:
                    actions += scheduled.leave_out(self, round_)
                actions.append(self._merge(index, round_))
        return actions + self._wake(now)

    def _merge(self, fragment: int, round_: Round) -> Merge:
        everything = round_.everything
        learners = sorted(round_.contributions)
        each = [[c for c in everything if c.learner == learner] for learner in learners]
        weights = merge_weights(
            self.method.weight,
            [sum(c.tokens for c in own) for own in each],
            [sum(c.steps for c in own) for own in each],
            [max(round_.number - c.base for c in own) for own in each],
        )
        scale = opened.scale(self, round_, weights)
        return Merge(fragment, round_.number, everything, tuple(weights), scale)

    def _wake(self, now: float) -> list[Action]:
        """At the next deadline of anybody, whether a round waits for it or not, and at the end of the next grace window."""
        times = [self.deadlines.ends_at(member) for member in self.members.values()]
        if not self.method.quorum.scheduled:
            decisions = (self.decision(now, fragment) for fragment in range(len(self.fragments)))
            times += [d.wait_until for d in decisions if d is not None and d.wait_until is not None]
        return [WakeAt(min(times))] if times else []

    # --- helpers ----------------------------------------------------------------------------------------------------------

    def _evict(self, learner: str, reason: str, *, replaced: bool) -> list[Action]:
        member = self.members[learner]
        self._remove(learner)
        return [Evict(learner, member.incarnation, reason, replaced)]

    def _remove(self, learner: str) -> None:
        """No round waits for it any more."""
        del self.members[learner]
        self.books.end(learner)

    def _alive(self, now: float, member: Member, step: int, tokens: int) -> None:
        self.books.trained(member.learner, tokens)  # may refuse, before a number is counted
        steps = member.heard(now, step, tokens)
        self.step = max(self.step, member.step)
        if steps and not self.method.quorum.scheduled:
            opened.reported(self, steps)

    @property
    def round_steps(self) -> list[int]:
        """Per fragment, the inner step of the round that its version came from; of the version that is being stored, if one is."""
        return [
            state.rounds[state.version].step if state.phase == "storing" else state.step for state in self.fragments
        ]
