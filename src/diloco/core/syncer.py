"""What a syncer does when: sans-I/O bookkeeping of members, rounds and versions.

    events:   joined · left · heartbeat · disconnected · contributed · merged · stored · tick        (each with the time)
    actions:  Accept · Reject · Merge · Store · Publish · Evict · WakeAt                             (values, carried out by the caller)

The life of a round: the first contribution opens it, with the healthy learners of that moment as members; the set only shrinks
(eviction, departure). When `decide()` says so it is merged; the result is stored; only then is it published and visible. While one
round of a fragment is merged or stored, contributions to the next are kept.

No tensor, clock, socket or thread is in here. `exchange.local` and the syncer process drive it, in lock step or under a lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from diloco.core.ledger import Ledger, total
from diloco.core.merge import weights_of
from diloco.core.method import Method
from diloco.core.quorum import Decision, decide
from diloco.core.update import Contribution
from diloco.errors import ConfigError, StaleIncarnationError


@dataclass(frozen=True)
class Deadlines:
    """When a silent learner is given up: a multiple of its own measured step time, within a floor and a cap.

    Attributes:
        lost_steps, lost_floor_s, lost_cap_s: nothing was heard of it (connection lost, no heartbeat) for this many of its steps.
        stalled_steps, stalled_floor_s, stalled_cap_s: heartbeats arrive, but no step was taken, and it does not wait for an answer.
    """

    lost_steps: float = 20.0
    lost_floor_s: float = 6.0
    lost_cap_s: float = 120.0
    stalled_steps: float = 50.0
    stalled_floor_s: float = 60.0
    stalled_cap_s: float = 3600.0

    def __post_init__(self) -> None:
        for kind in ("lost", "stalled"):
            floor, cap = getattr(self, f"{kind}_floor_s"), getattr(self, f"{kind}_cap_s")
            if not 0 < floor <= cap:
                raise ConfigError(
                    f"{kind}_floor_s={floor} and {kind}_cap_s={cap} leave no deadline; use 0 < floor <= cap."
                )

    def lost_after_s(self, step_s: float | None) -> float:
        """Seconds of silence after which a learner with this step time is lost."""
        return min(self.lost_cap_s, max(self.lost_floor_s, self.lost_steps * (step_s or 0.0)))

    def stalled_after_s(self, step_s: float | None) -> float:
        """Seconds without a step after which it is stalled; the cap before there is a measured step time."""
        return (
            self.stalled_cap_s
            if step_s is None
            else min(self.stalled_cap_s, max(self.stalled_floor_s, self.stalled_steps * step_s))
        )


@dataclass
class Member:
    """A live learner."""

    learner: str
    incarnation: int
    step: int
    seen_at: float
    progressed_at: float
    step_s: float | None = None
    waiting: bool = False
    connected: bool = True
    ready: bool = False
    tokens: int = 0

    @property
    def healthy(self) -> bool:
        """Connected and ready (it has trained since it joined): a learner that is still starting up delays nobody."""
        return self.connected and self.ready


@dataclass
class Round:
    """An open round: who is waited for, and what has come in."""

    number: int
    opened_at: float
    members: set[str]
    contributions: dict[str, Contribution] = field(default_factory=dict)


@dataclass
class FragmentState:
    """One fragment as the syncer sees it. `phase` is "open", "merging" (tensor work under way) or "storing"."""

    version: int
    phase: Literal["open", "merging", "storing"] = "open"
    rounds: dict[int, Round] = field(default_factory=dict)


@dataclass(frozen=True)
class Accept:
    """Acknowledge the contribution: it belongs to the syncer now. `duplicate`: its bytes are here already."""

    contribution: Contribution
    duplicate: bool


@dataclass(frozen=True)
class Reject:
    """Tell the learner that the contribution will not be merged, and why."""

    contribution: Contribution
    reason: str


@dataclass(frozen=True)
class Merge:
    """Close the round: merge these contributions (in learner-id order) and take the outer step; then call `merged`."""

    fragment: int
    round: int
    contributions: tuple[Contribution, ...]
    weights: tuple[float, ...]
    scale: float


@dataclass(frozen=True)
class Store:
    """Make the new version durable; then call `stored`."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Publish:
    """The version is durable: show it to everybody."""

    fragment: int
    version: int
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Evict:
    """Tell this incarnation that it is out. `replaced`: a newer one has its place, so it must not come back."""

    learner: str
    incarnation: int
    reason: str
    replaced: bool


@dataclass(frozen=True)
class WakeAt:
    """Call `tick` at this time at the latest."""

    at: float


Action = Accept | Reject | Merge | Store | Publish | Evict | WakeAt


class SyncerCore:
    """The bookkeeping of one run.

    Arguments:
        method: the run's.
        versions: the version of each fragment.
        deadlines: when a silent learner is given up.
        roster: learners that were live before a restart; they have until their deadline to come back.
        incarnations: the last incarnation given to each learner ever.
        ledgers: tokens by learner id, one ledger per fragment, as stored.
        step: the highest inner step known.
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
    ) -> None:
        self.method = method
        self.deadlines = deadlines or Deadlines()
        self.fragments = [FragmentState(version) for version in versions]
        self.members: dict[str, Member] = {member.learner: member for member in roster}
        self.incarnations: dict[str, int] = dict(incarnations or {})
        self.ledgers: dict[str, list[Ledger]] = {learner: list(books) for learner, books in (ledgers or {}).items()}
        self.step = step
        self._settled_trained: dict[str, int] = {}  # tokens of a learner's earlier incarnations
        for learner, books in self.ledgers.items():
            tokens = self.members[learner].tokens if learner in self.members else 0
            self._settled_trained[learner] = books[0].trained - tokens

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
        member.seen_at, member.connected = now, True
        if step > member.step or waiting:
            member.progressed_at = now
        member.step, member.waiting, member.step_s = max(step, member.step), waiting, step_s or member.step_s
        self.step = max(self.step, member.step)
        self._trained(learner, tokens)
        return [WakeAt(self._deadline(member))]

    def disconnected(self, now: float, learner: str, incarnation: int) -> list[Action]:
        """Its connection broke; it has until its lost deadline to come back."""
        member = self.members.get(learner)
        if member is None or member.incarnation != incarnation:
            return []
        member.connected, member.seen_at = False, now
        return self._look_again(now)

    def left(self, now: float, learner: str, incarnation: int, *, tokens: int) -> list[Action]:
        """It says goodbye. What it was acknowledged for stays; what it had pending is lost with it."""
        self.check(learner, incarnation)
        self._trained(learner, tokens)
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
        """A complete, valid contribution is here.

        Raises:
            StaleIncarnationError: from an incarnation that was evicted or replaced.
        """
        self.check(c.learner, c.incarnation)
        member = self.members[c.learner]
        member.seen_at, member.connected = now, True
        member.ready = True
        self._trained(c.learner, c.trained)
        ledger = self.ledgers[c.learner][c.fragment]
        fragment = self.fragments[c.fragment]
        if c.round < fragment.version or (c.round == fragment.version and fragment.phase != "open"):
            known = fragment.rounds.get(c.round)
            if known is not None and known.contributions.get(c.learner) == c:
                return [Accept(c, duplicate=True)]
            return [self._reject(c, ledger, "missed")]
        if c.round > fragment.version + 1 or not 0 <= c.round - c.base <= 1:
            return [self._reject(c, ledger, "version")]
        round_ = fragment.rounds.get(c.round)
        if round_ is None:
            members = {m.learner for m in self.members.values() if m.healthy}
            round_ = fragment.rounds[c.round] = Round(c.round, now, members)
        earlier = round_.contributions.get(c.learner)
        if earlier is not None:
            return [Accept(c, duplicate=True)] if earlier == c else [self._reject(c, ledger, "twice in one round")]
        round_.contributions[c.learner] = c
        return [Accept(c, duplicate=False), *self._look_again(now)]

    def merged(self, fragment: int) -> list[Action]:
        """The tensor work of the fragment's round is done; its tokens count as merged in the ledgers that are stored with it."""
        state = self.fragments[fragment]
        state.phase = "storing"
        for learner, c in state.rounds[state.version].contributions.items():
            ledger = self.ledgers[learner][fragment]
            ledger.merged += c.tokens
            _count_discards(ledger, c)
        return [Store(fragment, state.version + 1)]

    def abandoned(self, now: float, fragment: int, reason: str) -> list[Action]:
        """The round cannot be merged (its result is not finite): reject what is in it and stay at the version."""
        state = self.fragments[fragment]
        round_ = state.rounds.pop(state.version)
        state.phase = "open"
        rejects: list[Action] = [self._reject(c, self.ledgers[c.learner][fragment], reason) for c in round_.contributions.values()]
        return [*rejects, *self._look_again(now)]

    def stored(self, now: float, fragment: int) -> list[Action]:
        """The new version is durable: publish it and go on with the next round."""
        state = self.fragments[fragment]
        round_ = state.rounds.pop(state.version)
        state.version += 1
        state.phase = "open"
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
            decision = self.decision(now, index)
            if decision is None:
                continue
            if decision.merge is not None:
                state.phase = "merging"
                contributions = tuple(state.rounds[state.version].contributions[learner] for learner in decision.merge)
                weights = weights_of(self.method.weight, contributions)
                actions.append(Merge(index, state.version, contributions, tuple(weights), 1.0))
            elif decision.wait_until is not None:
                actions.append(WakeAt(decision.wait_until))
        return actions

    # --- helpers ----------------------------------------------------------------------------------------------------------

    def _deadline(self, member: Member) -> float:
        lost = member.seen_at + self.deadlines.lost_after_s(member.step_s)
        if member.waiting or not member.connected:
            return lost
        return min(lost, member.progressed_at + self.deadlines.stalled_after_s(member.step_s))

    def _evict(self, now: float, learner: str, reason: str, *, replaced: bool) -> list[Action]:
        member = self.members[learner]
        self._remove(learner)
        return [Evict(learner, member.incarnation, reason, replaced)]

    def _remove(self, learner: str) -> None:
        """Out of every round's member set; acknowledged contributions stay, the rest of its pending tokens is lost."""
        del self.members[learner]
        for index, state in enumerate(self.fragments):
            held = 0
            for number, round_ in state.rounds.items():
                round_.members.discard(learner)
                counted = number == state.version and state.phase == "storing"
                if learner in round_.contributions and not counted:
                    held += round_.contributions[learner].tokens
            ledger = self.ledgers[learner][index]
            ledger.lost += ledger.pending - held

    def _trained(self, learner: str, tokens: int) -> None:
        """Tokens are reported per incarnation and only ever grow."""
        trained = self._settled_trained[learner] + tokens
        member = self.members[learner]
        member.tokens = max(tokens, member.tokens)
        member.ready = member.ready or tokens > 0
        for ledger in self.ledgers[learner]:
            ledger.trained = max(ledger.trained, trained)

    def _reject(self, c: Contribution, ledger: Ledger, reason: str) -> Reject:
        _count_discards(ledger, c)
        ledger.discard(c.tokens, reason)
        return Reject(c, reason)

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


def _count_discards(ledger: Ledger, c: Contribution) -> None:
    for reason, tokens in c.discarded:
        ledger.discard(tokens, reason)
