"""The common part of called and pushed rounds: late contributions, and the contributing part of the live weight.

Learners do not block on these rounds. A contribution names the version that it was measured from, and joins the round
that is open when it arrives. Several contributions of one learner to a round are added up: displacements, tokens and
steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.core.weights import weights_of
from diloco.protocol.contribution import Contribution
from diloco.protocol.in_flight import FragmentWork, require_whole_numbers
from diloco.protocol.members import Member
from diloco.protocol.rounds.base import ClosedRound, Decision, RunView, SyncerRounds


@dataclass
class OpenRound:
    """A round that takes contributions.

    Attributes:
        step: the earliest inner step after which one of them was sent.
        newest: the newest contribution of each learner.
        earlier: older contributions of learners that have a newer one in the round.
        fresh: learners that answered the round's call, or pushed since the previous round was closed.
    """

    step: int
    newest: dict[str, Contribution] = field(default_factory=dict)
    earlier: list[Contribution] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)

    def take(self, c: Contribution) -> None:
        """Add a contribution. Retransmissions may arrive in any order."""
        known = [self.newest[c.learner]] if c.learner in self.newest else []
        *older, self.newest[c.learner] = sorted((*known, c), key=_when_sent)
        self.earlier += older
        self.step = min(self.step, c.step)

    def closed(self, number: int, members: Iterable[str], now: float) -> ClosedRound:
        """The round as it is merged."""
        late = sorted(self.earlier, key=_when_sent)
        by_learner = sorted((*late, *self.newest.values()), key=lambda c: c.learner)
        return ClosedRound(number, tuple(by_learner), self.step, frozenset(members), now)


def _when_sent(c: Contribution) -> tuple[int, int]:
    return c.incarnation, c.number


def ready(run: RunView, fragment: int | None = None) -> list[str]:
    """The live learners that train and hold a fragment, in order; None: whatever they hold."""
    members = run.members.values()
    return sorted(it.learner for it in members if it.ready and (fragment is None or it.holds(fragment)))


def num_needed(at_least: int, members: Collection[str]) -> int:
    """The number of learners that a round needs: K, or all if fewer are live."""
    return min(at_least, max(1, len(members)))


def decide(
    now: float, contributed: Collection[str], fresh: Collection[str], members: Collection[str], at_least: int,
    *, enough_at: float | None, grace_s: float,
) -> Decision:  # fmt: skip
    """Decide a called or pushed round: merge it, or say what it waits for.

    Arguments:
        now: seconds of the caller's clock.
        contributed: learners with work in the round, late work included.
        fresh: those of them that answered this round's call, or pushed since it opened.
        members: live learners that train and hold the fragment.
        at_least: K; fewer are enough if fewer are live.
        enough_at: when the K-th fresh contribution arrived; None: not yet.
        grace_s: how long the round stays open after that.
    """
    needed = num_needed(at_least, members)
    missing = sorted(set(members) - set(fresh))
    merge = tuple(sorted(contributed))
    if not contributed:
        return Decision(None, None, f"no learner has contributed; {needed} of {len(members)} are needed")
    if not missing:
        return Decision(merge, None, f"all {len(members)} live learners have contributed")
    names = ", ".join(missing)
    if len(fresh) < needed or enough_at is None:
        return Decision(None, None, f"{len(fresh)} of {needed} have contributed; {names} may still")
    ends_at = enough_at + grace_s
    if now < ends_at:
        left = f"the grace window is open for {names} for {ends_at - now:.2f} s"
        return Decision(None, ends_at, f"{len(fresh)} have contributed; {left}")
    after = f"{grace_s:.2f} s of grace" if grace_s else "no grace"
    return Decision(merge, None, f"{len(fresh)} have contributed, {needed} were needed; after {after} without {names}")


@dataclass(frozen=True)
class LastSent:
    """A learner's last contribution of a fragment: the inner step after which it was sent (the one at which the learner
    joined, if it has sent none), and the work in it."""

    step: int
    tokens: int = 0
    steps: int = 1


class LateRounds(SyncerRounds):
    """The base of the syncer's halves of called and pushed rounds, with the last contribution of each learner to each
    fragment. The work of a learner absent from a round counts from it."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._last: dict[str, list[LastSent]] = {}

    def joined(self, learner: str) -> None:
        self._last[learner] = [LastSent(self._run.step)] * len(self._run.fragments)

    def removed(self, learner: str) -> None:
        del self._last[learner]

    def sent(self, c: Contribution) -> None:
        """A contribution was acknowledged. Retransmissions may arrive in any order."""
        if c.step >= self._last[c.learner][c.fragment].step:
            self._last[c.learner][c.fragment] = LastSent(c.step, c.tokens, max(1, c.steps))

    def work_of(self, absent: Member, fragment: int) -> tuple[int, int]:
        """The tokens and inner steps, at least 1, with which an absent learner counts: those since its last
        contribution, by its last heartbeat."""
        steps = absent.step - self._last[absent.learner][fragment].step
        return self._run.accounting.accounts[absent.learner].ledgers[fragment].pending, max(1, steps)

    def scale(self, fragment: int, closed: ClosedRound, weights: Sequence[float]) -> float:
        """Contributing ÷ live weight of a round; 1 for `partial="full"`."""
        run = self._run
        if run.rules.partial == "full":
            return 1.0
        absent = sorted(closed.members - {c.learner for c in closed.contributions})
        work = [self.work_of(run.members[learner], fragment) for learner in absent if learner in run.members]
        tokens, steps = [each for each, _ in work], [each for _, each in work]
        contributed = sum(weights)
        return contributed / (contributed + sum(weights_of(run.rules.weight, tokens, steps, [0] * len(work))))

    def saved_of(self, learner: str) -> dict[str, Any]:
        return {"last": [[each.step, each.tokens, each.steps] for each in self._last[learner]]}

    def restore_of(self, learner: str, values: Mapping[str, Any]) -> None:
        require_whole_numbers(*(number for each in values["last"] for number in each))
        self._last[learner] = [LastSent(*each) for each in values["last"]]


def is_answered(work: FragmentWork) -> bool:
    """Whether the learner's newest contribution in flight was measured from the adopted version."""
    return bool(work.in_flight) and work.in_flight[-1].base == work.version
