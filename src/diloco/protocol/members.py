"""Membership of a run: the claims and reports of learners, members as their syncer sees them, and their deadlines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.core.choices import positive
from diloco.errors import ConfigError
from diloco.protocol.lineage import Lineage


@dataclass(frozen=True)
class Claim:
    """The identity and knowledge that a learner claims with a request; the driver checks both before it acts.

    Attributes:
        incarnation: given by the syncer at each join; 0 before the first, and of a learner whose incarnations are out.
        process: a random number of the learner's process. A run that was taken back to an older state may have given
            the same incarnation to another process since.
        seen: the syncer that the learner follows; None: none yet.
        versions: by fragment, the newest that the learner has from there (`NOTHING`: none, or it does not hold the
            fragment); empty: it does not say.
    """

    learner: str
    incarnation: int = 0
    process: int = 0
    seen: Lineage | None = None
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """The global model's loss on held-out data.

    Attributes:
        loss: nats per token.
        run_tokens: tokens trained by the run when it was evaluated, as the learner knew.
    """

    loss: float
    run_tokens: int


@dataclass(frozen=True)
class Report:
    """The content of a heartbeat: the state of a learner, as it reports it.

    Attributes:
        step: inner steps taken, as the run counts them.
        tokens: trained by this incarnation.
        step_s: seconds of an inner step; None: not measured yet.
        waiting: it is blocked on an answer.
        finished: it takes no more steps.
        steps: inner steps taken by this incarnation.
        blocked_with: the newest versions that it had when it began to wait for others: it sends nothing before there is
            another one. Empty: it does not wait for a version.
        earlier_tokens: trained by earlier incarnations of this process.
        training_loss: of the newest inner step that the learner logged, nats per token; None: it logs none.
        evaluation: its newest; None: it has made none.
        blocked_s: seconds in total that the training thread of this process has waited for answers.
        confirmed: by fragment, the learner knows the verdicts on all its contributions up to this number.
    """

    step: int = 0
    tokens: int = 0
    step_s: float | None = None
    waiting: bool = False
    finished: bool = False
    steps: int = 0
    blocked_with: tuple[int, ...] = ()
    earlier_tokens: int = 0
    training_loss: float | None = None
    evaluation: Evaluation | None = None
    blocked_s: float = 0.0
    confirmed: tuple[int, ...] = ()

    @property
    def all_tokens(self) -> int:
        """Trained by this process."""
        return self.earlier_tokens + self.tokens


@dataclass
class Member:
    """A learner that joined and neither left nor was evicted.

    Attributes:
        overlap: τ, inner steps between its sends and applications; None: the method's.
        tokens_per_step: the most that it trains in an inner step, as it declared; None: it did not.
        waiting: by its last report, it is blocked on an answer.
        blocked_with: the versions that it had when it began to wait for another one, with no contribution in flight.
            Empty: it has not reported so since its last contribution.
        broken_at: when its connection broke; None: it is connected, or a message has arrived since.
        ready: it has trained since it joined, and has not finished. A member that is not ready delays no round.
        finished: it takes no more steps. It is never ready again, and never stalled.
        presumed: the syncer was restarted; the member counts as ready until its first message.
        ready_step: the inner step known when it became ready; rounds sent at or before that step do not wait for it.
        tokens: trained by this incarnation.
        held: the fragments that this incarnation holds; None: all of them.
    """

    learner: str
    incarnation: int
    step: int
    seen_at: float
    progressed_at: float
    overlap: int | None = None
    tokens_per_step: int | None = None
    step_s: float | None = None
    waiting: bool = False
    blocked_with: tuple[int, ...] = ()
    connected: bool = True
    broken_at: float | None = None
    ready: bool = False
    presumed: bool = False
    finished: bool = False
    ready_step: int = 0
    tokens: int = 0
    held: frozenset[int] | None = None

    def saved(self, *, sends_again: bool) -> dict[str, Any]:
        """This member in a record, as plain values. `sends_again`: it will send an open contribution again, so a
        restarted syncer must wait for it even if it has finished."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "overlap": self.overlap,
            "tokens_per_step": self.tokens_per_step,
            "step_s": self.step_s,
            "ready": self.ready and not self.presumed,
            "finished": self.finished and not sends_again,
        }

    @classmethod
    def restored(
        cls, learner: str, incarnation: int, saved: Mapping[str, Any], now: float, held: frozenset[int] | None
    ) -> Member:  # fmt: skip
        """A member of a record, which has until its deadline to reconnect."""
        is_finished = saved["finished"]
        return cls(
            learner, incarnation, saved["step"], now, now, saved["overlap"], saved["tokens_per_step"], saved["step_s"],
            connected=False, ready=not is_finished, finished=is_finished, tokens=saved["tokens"],
            presumed=not is_finished and not saved["ready"],  # it may have begun to train since the record
            held=held,
        )  # fmt: skip

    @property
    def healthy(self) -> bool:
        """Connected and ready."""
        return self.connected and self.ready

    def holds(self, fragment: int) -> bool:
        """Whether this incarnation holds a fragment."""
        return self.held is None or fragment in self.held

    def is_blocked_at(self, versions: Sequence[int]) -> bool:
        """Whether it waits for a version after these, of the fragments that it holds."""
        has = self.blocked_with
        return len(has) == len(versions) and all(has[f] == v for f, v in enumerate(versions) if self.holds(f))

    def heard(self, now: float, step: int, tokens: int, steps: int) -> int:
        """A message from the member, which is at this step. Returns the number of new steps.

        `tokens`, `steps`: trained and taken by this incarnation. Steps before these do not count: the member may have
        started from another step than it joined at, or have trained elsewhere. The same holds for a message from before
        its first step that arrives late.
        """
        self.seen_at, self.connected, self.broken_at = now, True, None
        if self.presumed:
            self.presumed, self.ready = False, max(tokens, self.tokens) > 0
        if self.tokens == 0 < tokens:
            self.step = step - steps
        self.tokens = max(tokens, self.tokens)
        new = max(0, step - self.step) if tokens > 0 else 0
        if new > 0 or self.waiting:
            self.progressed_at = now
        self.step += new
        return new

    def trains(self, step: int) -> None:
        """The member has work since this step: rounds wait for it from now on, unless it has finished."""
        if not self.ready and not self.finished:
            self.ready, self.ready_step = True, step


@dataclass(frozen=True)
class Deadlines:
    """When a silent learner is evicted: a multiple of its own measured step time, within a floor and a cap.

    Attributes:
        lost_steps, lost_floor_s, lost_cap_s: no message arrived (no heartbeat) for this many of its steps.
        reconnect_steps, reconnect_floor_s: its connection broke, as it does when the process dies, and it did not
            reconnect for this many of its steps; at most the deadline of silence.
        stalled_steps, stalled_floor_s, stalled_cap_s: heartbeats arrive, but no step was taken, although it does not
            wait for an answer.
    """

    lost_steps: float = 20.0
    lost_floor_s: float = 6.0
    lost_cap_s: float = 120.0
    reconnect_steps: float = 5.0
    reconnect_floor_s: float = 3.0
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
            positive(f"{kind}_steps", getattr(self, f"{kind}_steps"))
        for name in ("reconnect_steps", "reconnect_floor_s"):
            positive(name, getattr(self, name))

    def lost_after_s(self, step_s: float | None) -> float:
        """Seconds of silence after which a learner with this step time is lost."""
        return min(self.lost_cap_s, max(self.lost_floor_s, self.lost_steps * (step_s or 0.0)))

    def reconnect_after_s(self, step_s: float | None) -> float:
        """Seconds after which a learner with this step time is lost if its connection broke and it did not
        reconnect."""
        return min(self.lost_after_s(step_s), max(self.reconnect_floor_s, self.reconnect_steps * (step_s or 0.0)))

    def stalled_after_s(self, step_s: float | None) -> float:
        """Seconds without a step after which a learner with this step time is stalled; None gives the cap."""
        return (
            self.stalled_cap_s
            if step_s is None
            else min(self.stalled_cap_s, max(self.stalled_floor_s, self.stalled_steps * step_s))
        )

    def ends_at(self, member: Member) -> float:
        """When a member is evicted unless a message from it arrives before."""
        ends = [member.seen_at + self.lost_after_s(member.step_s)]
        if member.broken_at is not None:
            ends.append(member.broken_at + self.reconnect_after_s(member.step_s))
        if not member.finished:
            ends.append(member.progressed_at + self.stalled_after_s(member.step_s))
        return min(ends)

    def passed(self, now: float, member: Member) -> str | None:
        """The reason to evict a member now; None: there is none."""
        if now < self.ends_at(member):
            return None
        if member.broken_at is not None and now - member.broken_at >= self.reconnect_after_s(member.step_s):
            return f"its connection broke {now - member.broken_at:.1f} s ago and was not restored"
        if now - member.seen_at >= self.lost_after_s(member.step_s):
            return f"nothing heard for {now - member.seen_at:.1f} s"
        return f"no step for {now - member.progressed_at:.1f} s"


NO_DEADLINES = Deadlines(lost_floor_s=math.inf, lost_cap_s=math.inf, stalled_floor_s=math.inf, stalled_cap_s=math.inf)
"""A learner is evicted some time after its connection has broken, and never for its silence: for a run in virtual time,
where messages are not lost, and a learner sends one only when its state changes."""
