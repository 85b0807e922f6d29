"""What a syncer does when: sans-I/O bookkeeping of members, rounds and versions.

    events:   joined · left · heartbeat · disconnected · contributed · merged · stored · tick        (each with the time)
    actions:  Accept · Reject · Merge · Store · Publish · Evict · WakeAt                             (values, carried out by the caller)

The life of a round: the first contribution opens it, with everybody who trains at that moment as members; the set only shrinks
(eviction, departure). When `decide()` says so it is merged; the result is stored; only then is it published and visible. While one
round of a fragment is merged or stored, contributions to the next are kept.

Learners block on the rounds they contributed to, so rounds of several fragments must not wait for each other in a circle. All
learners send the fragments in one order, that of the inner steps, but one that joins may be a little behind the others, or ahead:

    behind: it contributes after a step after which the others contributed to the round before. Its contribution is sent back, it
            keeps the work, and goes on to the step where the others are.
    ahead:  it had passed the step of a round before it counted as training. Such a round does not wait for it.

Should there be a circle nevertheless (a restart forgets who was where), everybody is blocked: then a round stops waiting for those
who are blocked in a round of a later step. All this needs a learner's contributions to arrive in order.

No tensor, clock, socket or thread is in here. `exchange.local` and the syncer process drive it, in lock step or under a lock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from diloco.core.ledger import Ledger, total
from diloco.core.merge import weights_of
from diloco.core.method import Method
from diloco.core.quorum import Decision, decide
from diloco.core.rounds import (
    Accept,
    Action,
    Deadlines,
    Evict,
    FragmentState,
    Member,
    Merge,
    Publish,
    Reject,
    Round,
    Store,
    WakeAt,
)
from diloco.core.update import MISSED, OUT_OF_STEP, TWICE, Contribution
from diloco.errors import StaleIncarnationError, VersionError

__all__ = [
    "Accept",
    "Action",
    "Deadlines",
    "Evict",
    "FragmentState",
    "Member",
    "Merge",
    "Publish",
    "Reject",
    "Round",
    "Store",
    "SyncerCore",
    "WakeAt",
]


class SyncerCore:
    """The bookkeeping of one run.

    Arguments:
        method: the run's.
        versions: the version of each fragment.
        deadlines: when a silent learner is given up.
        roster: learners that were live before a restart; they have until their deadline to come back, and rounds wait for them.
        incarnations: the last incarnation given to each learner ever.
        ledgers: tokens by learner id, one ledger per fragment, as stored together with the roster. What is pending of learners that
            are not in it was acknowledged before the restart and not merged: it is lost.
        step: the highest inner step known.
        round_steps: per fragment, after which inner step the contributions to its version were sent, as `round_steps` said.
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
    ) -> None:
        self.method = method
        self.deadlines = deadlines or Deadlines()
        self.fragments = [
            FragmentState(version, step=sent)
            for version, sent in zip(versions, round_steps or [0] * len(versions), strict=True)
        ]
        self.members: dict[str, Member] = {member.learner: member for member in roster}
        self.incarnations: dict[str, int] = dict(incarnations or {})
        self.ledgers: dict[str, list[Ledger]] = {learner: list(books) for learner, books in (ledgers or {}).items()}
        self.step = step
        self._settled_trained: dict[str, int] = {}  # tokens of a learner's earlier incarnations
        for learner, books in self.ledgers.items():
            member = self.members.get(learner)
            self._settled_trained[learner] = books[0].trained - (member.tokens if member else 0)
            if member is None:
                for ledger in books:
                    ledger.lose()

    # --- membership -------------------------------------------------------------------------------------------------------

    def joined(self, now: float, learner: str, *, ready: bool = False) -> tuple[int, list[Action]]:
        """A new incarnation of a learner; returns its number. A live older incarnation is replaced.

        `ready`: rounds wait for it from the start (membership is fixed), not only once it has trained.
        """
        actions: list[Action] = []
        if learner in self.members:
            actions += self._evict(now, learner, "replaced by a newer incarnation", replaced=True)
        incarnation = self.incarnations.get(learner, 0) + 1
        self.incarnations[learner] = incarnation
        self.members[learner] = Member(learner, incarnation, self.step, now, now, ready=ready)
        if learner not in self.ledgers:
            self.ledgers[learner] = [Ledger() for _ in self.fragments]
        self._settled_trained[learner] = self.ledgers[learner][0].trained if self.fragments else 0
        return incarnation, actions + self._look_again(now)

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

    def is_replaced(self, learner: str, incarnation: int) -> bool:
        """Whether a newer incarnation of the learner has joined."""
        return self.incarnations.get(learner, 0) > incarnation

    def heartbeat(
        self, now: float, learner: str, incarnation: int, *, step: int, tokens: int, step_s: float | None, waiting: bool
    ) -> list[Action]:
        """A sign of life. `tokens`: trained by this incarnation in all; `waiting`: it is blocked on an answer."""
        self.check(learner, incarnation)
        member = self.members[learner]
        member.waiting, member.step_s = waiting, step_s or member.step_s
        self._alive(now, member, step, tokens)
        if tokens > 0 and not member.ready:
            member.ready, member.ready_step = True, member.step
        return self._look_again(now) if waiting else self._wake()

    def disconnected(self, now: float, learner: str, incarnation: int) -> list[Action]:
        """Its connection broke; it has until its lost deadline to come back."""
        member = self.members.get(learner)
        if member is None or member.incarnation != incarnation:
            return []
        member.connected, member.seen_at = False, now
        return self._wake()

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
            if now >= self._deadline(member):
                silent = now - member.seen_at >= self.deadlines.lost_after_s(member.step_s)
                reason = (
                    f"nothing heard for {now - member.seen_at:.1f} s"
                    if silent
                    else f"no step for {now - member.progressed_at:.1f} s"
                )
                actions += self._evict(now, member.learner, reason, replaced=False)
        return actions + self._look_again(now)

    # --- rounds -----------------------------------------------------------------------------------------------------------

    def contributed(self, now: float, c: Contribution) -> list[Action]:
        """A complete, valid contribution is here; the first action answers it.

        Raises:
            StaleIncarnationError: from an incarnation that was evicted or replaced.
            VersionError: there is no such fragment.
        """
        self.check(c.learner, c.incarnation)
        if not 0 <= c.fragment < len(self.fragments):
            raise VersionError(
                f"there is no fragment {c.fragment}; the run has fragments 0 to {len(self.fragments) - 1}."
            )
        member = self.members[c.learner]
        self._alive(now, member, c.step, c.trained)
        member.waiting = False  # or it could not have sent; a heartbeat says when it is blocked again
        if not member.ready:
            member.ready, member.ready_step = True, c.step - 1
        return [self._answer(now, c), *self._look_again(now)]

    def _answer(self, now: float, c: Contribution) -> Accept | Reject:
        fragment = self.fragments[c.fragment]
        version, round_ = fragment.version, fragment.rounds.get(c.round)
        earlier = round_.contributions.get(c.learner) if round_ else None
        if earlier == c:
            return Accept(c, duplicate=True)
        if not 0 <= c.base <= version or not 0 <= c.round - c.base <= self.method.overlap // self.method.sync_every:
            return self._reject(c, "version")
        if c.round < version or (c.round == version and fragment.phase != "open"):
            # Sent again because the answer was lost: merged since, perhaps before a restart.
            return Accept(c, duplicate=True) if self._is_counted(c) else self._reject(c, MISSED)
        if c.round == version:
            after_step: float = fragment.step
        else:  # to the round after the one that is open, by a learner that had to contribute to that one first
            after_step = fragment.rounds[version].step if version in fragment.rounds else math.inf
        if c.step <= after_step:
            return self._reject(c, OUT_OF_STEP)
        if earlier is not None:
            return self._reject(c, TWICE)
        if round_ is None:
            round_ = fragment.rounds[c.round] = Round(c.round, now, c.step, set(self.members))
        round_.contributions[c.learner] = c
        round_.step = min(round_.step, c.step)
        return Accept(c, duplicate=False)

    def merged(self, fragment: int) -> list[Action]:
        """The tensor work of the fragment's round is done; its tokens count as merged in the ledgers that are stored with it."""
        state = self.fragments[fragment]
        state.phase = "storing"
        _count_merged(self.ledgers, state.rounds[state.version], fragment)
        return [Store(fragment, state.version + 1)]

    def abandoned(self, now: float, fragment: int, reason: str) -> list[Action]:
        """The round cannot be merged (its result is not finite): stay at the version, and reject what is in it or counts on it."""
        state = self.fragments[fragment]
        contributions = [c for round_ in state.rounds.values() for c in round_.contributions.values()]
        state.rounds, state.phase = {}, "open"
        for c in contributions:
            _count_discards(self.ledgers[c.learner][fragment], c)
            self.ledgers[c.learner][fragment].discard(c.tokens, reason)
        return [*(Reject(c, reason) for c in contributions), *self._look_again(now)]

    def stored(self, now: float, fragment: int) -> list[Action]:
        """The new version is durable: publish it and go on with the next round."""
        state = self.fragments[fragment]
        round_ = state.rounds.pop(state.version)
        state.version, state.step, state.phase = state.version + 1, round_.step, "open"
        for member in self.members.values():
            member.waiting = member.waiting and member.learner not in round_.contributions
        contributors = tuple(sorted(round_.contributions))
        return [Publish(fragment, state.version, contributors), *self._look_again(now)]

    def decision(self, now: float, fragment: int) -> Decision | None:
        """What `decide()` says of the fragment's open round; None if none is open."""
        state = self.fragments[fragment]
        round_ = state.rounds.get(state.version)
        if round_ is None or state.phase != "open":
            return None
        deadlines = {m.learner: self._deadline(m) for m in self.members.values()}
        return decide(now, round_.contributions, round_.members, deadlines, self.method.quorum)

    def _look_again(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for index, state in enumerate(self.fragments):
            for round_ in state.rounds.values():
                round_.members = {learner for learner in round_.members if self._belongs(learner, round_)}
            decision = self.decision(now, index)
            if decision is not None and decision.merge is not None:
                state.phase = "merging"
                contributions = tuple(state.rounds[state.version].contributions[learner] for learner in decision.merge)
                weights = weights_of(
                    self.method.weight, [each.tokens for each in contributions], [each.steps for each in contributions],
                    [each.round - each.base for each in contributions],
                )  # fmt: skip
                actions.append(Merge(index, state.version, contributions, tuple(weights), 1.0))
        return actions + self._wake()

    def _belongs(self, learner: str, round_: Round) -> bool:
        """Whether a member stays one. A lost connection does not matter: until its deadline a learner may come back with its work."""
        member = self.members.get(learner)
        if member is None or learner in round_.contributions:
            return member is not None
        return member.ready and member.ready_step < round_.step and not self._is_in_circle(member, round_)

    def _is_in_circle(self, member: Member, round_: Round) -> bool:
        """Whether all learners are blocked, and this one in a round of a later step that those it waits for have not reached."""
        if not all(each.waiting for each in self.members.values() if each.ready):
            return False
        for state in self.fragments:
            later = state.rounds.get(state.version)
            if later is None or later.step <= round_.step or state.phase != "open":
                continue
            missing = [
                self.members[each] for each in later.members - later.contributions.keys() if each in self.members
            ]
            if member.learner in later.contributions and all(each.step < later.step for each in missing):
                return True
        return False

    def _wake(self) -> list[Action]:
        """At the next deadline of anybody, whether a round waits for it or not."""
        return [WakeAt(min(map(self._deadline, self.members.values())))] if self.members else []

    # --- helpers ----------------------------------------------------------------------------------------------------------

    def _deadline(self, member: Member) -> float:
        lost_at = member.seen_at + self.deadlines.lost_after_s(member.step_s)
        return min(lost_at, member.progressed_at + self.deadlines.stalled_after_s(member.step_s))

    def _evict(self, now: float, learner: str, reason: str, *, replaced: bool) -> list[Action]:
        member = self.members[learner]
        self._remove(learner)
        return [Evict(learner, member.incarnation, reason, replaced)]

    def _remove(self, learner: str) -> None:
        """Acknowledged contributions stay, the rest of its pending tokens is lost; no round waits for it any more."""
        del self.members[learner]
        for fragment, ledger in enumerate(self.ledgers[learner]):
            ledger.lost += ledger.pending - self._acknowledged(learner, fragment)

    def _acknowledged(self, learner: str, fragment: int) -> int:
        """Tokens that its contributions here account for and its ledger does not count yet."""
        state = self.fragments[fragment]
        stored = state.version if state.phase == "storing" else None
        rounds = (round_ for number, round_ in state.rounds.items() if number != stored)
        return sum(c.accounted for round_ in rounds if (c := round_.contributions.get(learner)) is not None)

    def _is_counted(self, c: Contribution) -> bool:
        """Whether the tokens of a contribution are in the books already. All that its learner had trained when it was sent is in it
        or was accounted for before, so anything that is left uncounted is its own."""
        ledger = self.ledgers[c.learner][c.fragment]
        trained = self._settled_trained[c.learner] + c.trained
        uncounted = trained - (ledger.trained - ledger.pending) - self._acknowledged(c.learner, c.fragment)
        return uncounted < c.accounted

    def _alive(self, now: float, member: Member, step: int, tokens: int) -> None:
        """Heard of it, at this step; tokens are reported per incarnation and only ever grow."""
        member.seen_at, member.connected = now, True
        if step > member.step or member.waiting:
            member.progressed_at = now
        member.step, member.tokens = max(step, member.step), max(tokens, member.tokens)
        self.step = max(self.step, member.step)
        for ledger in self.ledgers[member.learner]:
            ledger.trained = max(ledger.trained, self._settled_trained[member.learner] + tokens)

    def _reject(self, c: Contribution, reason: str) -> Reject:
        if not self._is_counted(c):
            ledger = self.ledgers[c.learner][c.fragment]
            _count_discards(ledger, c)
            if reason != OUT_OF_STEP:
                ledger.discard(c.tokens, reason)
        return Reject(c, reason)

    @property
    def round_steps(self) -> list[int]:
        """Per fragment, the inner step of the round that its version came from; of the version that is being stored, if one is."""
        return [
            state.rounds[state.version].step if state.phase == "storing" else state.step for state in self.fragments
        ]

    def durable_ledgers(self) -> dict[str, list[Ledger]]:
        """Copies of the ledgers as they belong to the versions on disk: a round that is being stored does not count yet."""
        ledgers = deepcopy(self.ledgers)
        for fragment, state in enumerate(self.fragments):
            if state.phase == "storing":
                _count_merged(ledgers, state.rounds[state.version], fragment, sign=-1)
        return ledgers

    @property
    def run_tokens(self) -> int:
        """Tokens trained by all learners, living and gone."""
        return sum(books[0].trained for books in self.ledgers.values())

    def status(self, now: float) -> dict[str, Any]:
        """Plain values for people and programs: learners, rounds with the reason each waits, the ledger."""
        learners = {
            m.learner: {
                "incarnation": m.incarnation,
                "step": m.step,
                "tokens": self.ledgers[m.learner][0].trained,
                "healthy": m.healthy,
                "waiting": m.waiting,
                "step_s": m.step_s,
                "silent_s": max(0.0, now - m.seen_at),
                "given_up_in_s": max(0.0, self._deadline(m) - now),
            }
            for m in sorted(self.members.values(), key=lambda m: m.learner)
        }
        fragments = []
        for index, state in enumerate(self.fragments):
            decision = self.decision(now, index)
            round_ = state.rounds.get(state.version)
            fragments.append(
                {
                    "fragment": index,
                    "version": state.version,
                    "phase": state.phase,
                    "contributed": sorted(round_.contributions) if round_ else [],
                    "members": sorted(round_.members) if round_ else [],
                    "reason": decision.reason
                    if decision
                    else ("no contribution yet" if state.phase == "open" else state.phase),
                    "ledger": total(books[index] for books in self.ledgers.values()).as_dict(),
                }
            )
        return {"step": self.step, "tokens": self.run_tokens, "learners": learners, "fragments": fragments}


def _count_merged(ledgers: Mapping[str, Sequence[Ledger]], round_: Round, fragment: int, *, sign: int = 1) -> None:
    for learner, c in round_.contributions.items():
        ledgers[learner][fragment].merged += sign * c.tokens
        _count_discards(ledgers[learner][fragment], c, sign=sign)


def _count_discards(ledger: Ledger, c: Contribution, *, sign: int = 1) -> None:
    for reason, tokens in c.discarded:
        ledger.discard(sign * tokens, reason)
