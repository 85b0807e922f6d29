"""Called rounds: the syncer calls a fragment by the run clock, K learners answer, then a grace window runs.

    Decoupled DiLoCo, arXiv 2604.21428

Called rounds are paced by a run clock, the inner steps that an average live learner has taken: it grows by newly
reported steps ÷ live learners. A fragment falls due when the clock passes its steps of the schedule, so that a fast
network does not shorten H, and is called once the round before is published. A learner answers at its next boundary,
with all its work since it adopted the fragment. A late answer joins the next round. A fragment that no learner holds
skips its turns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from diloco.core.quorum import Called
from diloco.protocol.contribution import LATE, VERSION, Contribution
from diloco.protocol.in_flight import FragmentWork
from diloco.protocol.members import Member
from diloco.protocol.rounds import late_contributions as late
from diloco.protocol.rounds.base import ClosedRound, Decision, LearnerRounds, Rules, RunView
from diloco.protocol.rounds.late_contributions import LateRounds, OpenRound

EMA = 0.2
"""Weight of the newest measurement in the moving averages that size the grace window."""

ROUNDING = 1e-6
"""The sum of steps ÷ learners may be below a whole number by rounding."""


@dataclass
class Pace:
    """Moving averages of the parts of a synchronisation, in seconds; None: not measured yet.

    Attributes:
        step_s: ξ_step, an inner step of the median live learner.
        quorum_s: ξ_quorum, from a call to its K-th answer.
        sync_s: ξ_sync, from closing a round to publishing it.
    """

    step_s: float | None = None
    quorum_s: float | None = None
    sync_s: float | None = None

    def slack_s(self, overlap: int) -> float | None:
        """τ·ξ_step − ξ_quorum − ξ_sync; None: not measured yet."""
        if self.step_s is None or self.quorum_s is None or self.sync_s is None:
            return None
        return overlap * self.step_s - (self.quorum_s + self.sync_s)

    def measured(
        self, *, step_s: float | None = None, quorum_s: float | None = None, sync_s: float | None = None
    ) -> None:
        """Update the averages with new measurements."""
        for name, value in (("step_s", step_s), ("quorum_s", quorum_s), ("sync_s", sync_s)):
            if value is not None:
                old = getattr(self, name)
                setattr(self, name, value if old is None else (1 - EMA) * old + EMA * value)


@dataclass
class _Call:
    """An open call. `enough_at`: when the K-th answer arrived."""

    opened_at: float
    enough_at: float | None = None


@dataclass
class _Turns:
    """A fragment's rounds.

    Attributes:
        turn: the run clock at which the fragment is called next.
        begun: the turn of the round under way, from its call until its version is published; None: none is under way.
        open: the round that follows the version; while that round is merged or stored, the round after it.
        call: the open call.
    """

    turn: int
    begun: int | None = None
    open: OpenRound | None = None
    call: _Call | None = None


class CalledSyncer(LateRounds):
    """The syncer's half.

    Attributes:
        clock: inner steps that an average live learner has taken.
        pace: the measurements that size the grace window.
    """

    def __init__(self, quorum: Called, run: RunView) -> None:
        super().__init__(run)
        self._quorum = quorum
        self.clock = float(run.step)
        self.pace = Pace()
        self._fragments = [_Turns(self._next_turn(f)) for f in range(len(run.fragments))]

    def _next_turn(self, fragment: int) -> int:
        """The fragment's next step of the schedule after the clock, allowing for rounding."""
        return self._run.rules.schedule.next_send(fragment, self.clock + ROUNDING)

    def admit(self, now: float, c: Contribution) -> str | None:
        state, turns = self._run.fragments[c.fragment], self._fragments[c.fragment]
        if not 0 <= c.base <= state.version or c.round != c.base:
            return VERSION
        if self._quorum.late == "drop" and c.base < state.version + (state.phase != "open"):
            return LATE
        if turns.open is None:
            turns.open = OpenRound(c.step)
        turns.open.take(c)
        if turns.call is not None:
            turns.open.fresh.add(c.learner)
        self.sent(c)
        return None

    def update(self, now: float) -> set[str]:
        """Call the fragments that are due, and record which calls have enough answers."""
        run, is_called = self._run, set(self.open_fragments())
        due = [fragment for fragment, turns in enumerate(self._fragments) if self.clock > turns.turn - ROUNDING]
        called = set[str]()
        for fragment in due if late.ready(run) else ():
            if fragment in is_called or run.fragments[fragment].phase != "open":
                continue
            if late.ready(run, fragment) or self._fragments[fragment].open is not None:  # work that came late waits
                self._call(now, fragment)
                called.update(learner for learner, member in run.members.items() if member.holds(fragment))
            else:
                self._fragments[fragment].turn = self._next_turn(fragment)
        for fragment in self.open_fragments():
            turns = self._fragments[fragment]
            assert turns.open is not None
            assert turns.call is not None
            needed = late.num_needed(run.at_least, late.ready(run, fragment))
            if turns.call.enough_at is None and len(turns.open.fresh) >= needed:
                turns.call.enough_at = now
                self.pace.measured(quorum_s=now - turns.call.opened_at)
        return called

    def _call(self, now: float, fragment: int) -> None:
        """Open a call; late contributions measured from this version answer it."""
        turns, version = self._fragments[fragment], self._run.fragments[fragment].version
        turns.open = turns.open or OpenRound(self._run.step)
        turns.open.fresh = {c.learner for c in turns.open.newest.values() if c.base == version}
        turns.call, turns.begun, turns.turn = _Call(now), turns.turn, self._next_turn(fragment)

    def open_fragments(self) -> list[int]:
        return [fragment for fragment, turns in enumerate(self._fragments) if turns.call is not None]

    def decision(self, now: float, fragment: int) -> Decision | None:
        turns, state = self._fragments[fragment], self._run.fragments[fragment]
        if turns.open is None or state.phase != "open":
            return None
        if turns.call is None:
            num_late = len(turns.open.newest)
            return Decision(None, None, f"late work of {num_late} waits for the fragment's next turn")
        grace_s = self._quorum.grace_s(self.pace.slack_s(self._run.rules.schedule.overlap))
        return late.decide(
            now, turns.open.newest, turns.open.fresh, late.ready(self._run, fragment), self._run.at_least,
            enough_at=turns.call.enough_at, grace_s=grace_s,
        )  # fmt: skip

    def close(self, now: float, fragment: int) -> ClosedRound:
        turns = self._fragments[fragment]
        assert turns.open is not None
        closed = turns.open.closed(self._run.fragments[fragment].version, late.ready(self._run, fragment), now)
        turns.open = turns.call = None
        return closed

    def stored(self, now: float, fragment: int, closed: ClosedRound) -> None:
        self._fragments[fragment].begun = None
        self.pace.measured(sync_s=now - closed.closed_at)

    def abandoned(self, fragment: int, closed: ClosedRound) -> Sequence[tuple[Contribution, str]]:
        self._fragments[fragment].begun = None
        return ()  # late work stays for the fragment's next turn

    def roster(self, fragment: int) -> tuple[Sequence[str], Sequence[str]]:
        turns = self._fragments[fragment]
        is_open = turns.open is not None and self._run.fragments[fragment].phase == "open"
        return (sorted(turns.open.newest), late.ready(self._run, fragment)) if is_open and turns.open else ((), ())

    def heard(self, member: Member, steps: int) -> bool:
        ready = [each for each in self._run.members.values() if each.ready or each is member]
        if steps:
            self.clock += steps / len(ready)
            step_times = [each.step_s for each in ready if each.step_s]
            if step_times:
                self.pace.measured(step_s=median(step_times))
        return any(map(self._is_due, self._fragments))

    def _is_due(self, turns: _Turns) -> bool:
        """Whether progress alone may call the fragment, or end its grace window, which the pace shortens."""
        if turns.call is not None:
            return turns.call.enough_at is not None
        return turns.begun is None and self.clock > turns.turn - ROUNDING

    def calls(self, learner: str) -> tuple[tuple[int, int], ...]:
        member = self._run.members[learner]
        return tuple(
            (fragment, self._run.fragments[fragment].version)
            for fragment in filter(member.holds, self.open_fragments())
            if (round_ := self._fragments[fragment].open) is not None and learner not in round_.fresh
        )

    def ends(self, now: float) -> Sequence[float]:
        calls = ((fragment, turns.call) for fragment, turns in enumerate(self._fragments))
        decisions = (self.decision(now, f) for f, call in calls if call is not None and call.enough_at is not None)
        return [it.wait_until for it in decisions if it is not None and it.wait_until is not None]

    def was_suspended(self, seconds: float) -> None:
        for turns in self._fragments:
            if (call := turns.call) is not None:
                call.opened_at += seconds
                call.enough_at = None if call.enough_at is None else call.enough_at + seconds

    def saved(self, storing: Collection[int]) -> dict[str, Any]:
        turns = [
            each.turn if each.begun is None or fragment in storing else each.begun
            for fragment, each in enumerate(self._fragments)
        ]
        return {"clock": self.clock, "turns": turns, "pace": asdict(self.pace)}

    def restore(self, values: Mapping[str, Any]) -> None:
        self.clock, self.pace = values["clock"], Pace(**values["pace"])
        for turns, turn in zip(self._fragments, values["turns"], strict=True):
            turns.turn = turn


class CalledLearner(LearnerRounds):
    """The learner's half: every version is adopted at the first boundary after it was received."""

    def __init__(self, quorum: Called, rules: Rules, fragments: Sequence[FragmentWork], step: int) -> None:
        self.fragments = fragments
        self._sends_late = quorum.late == "merge"
        self._asked: list[int | None] = [None] * len(fragments)
        """By fragment, the version of a call that could not be answered when it arrived; None: there is none."""

    def due(self, step: int) -> Sequence[int]:
        return [
            fragment
            for fragment, version in enumerate(self._asked)
            if version is not None and self._can_answer(self.fragments[fragment], version)
        ]

    def next_round(self, fragment: int) -> int | None:
        work = self.fragments[fragment]
        return None if late.is_answered(work) else work.version

    def sent(self, fragment: int, step: int, sync_every: int | None) -> None:
        self._asked[fragment] = None

    def called(self, fragment: int, version: int) -> bool:
        """A call may arrive before the learner has work or, if late work is dropped, before its version. It is answered
        after a later step then."""
        work = self.fragments[fragment]
        if work.pending_steps > 0 and self._can_answer(work, version):
            return True
        if version > work.version or not late.is_answered(work):
            self._asked[fragment] = version
        return False

    def _can_answer(self, work: FragmentWork, version: int) -> bool:
        """Whether no contribution was measured from the adopted version yet, and one may be merged into the round that
        is called at `version`."""
        return not late.is_answered(work) and (self._sends_late or version <= work.version)

    def adoption(self, fragment: int, step: int) -> int | None:
        return max(self.fragments[fragment].received, default=None)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": list(self._asked)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._asked = list(state["asked"])
