"""Pushed rounds: every learner pushes after H of its own steps; a round merges as soon as K learners have pushed.

    Asynchronous local SGD, arXiv 2401.09135

If the outer optimizer takes outer gradients one at a time (Delayed Nesterov), each push has its own round and version.
A learner adopts the newest version once a version contains its last push.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.core.quorum import Pushed
from diloco.protocol.contribution import LATE, VERSION, Contribution
from diloco.protocol.in_flight import FragmentWork, InFlight
from diloco.protocol.members import Member
from diloco.protocol.rounds import late_contributions as late
from diloco.protocol.rounds.base import ClosedRound, Decision, LearnerRounds, Rules, RunView
from diloco.protocol.rounds.late_contributions import LateRounds, OpenRound


class PushedSyncer(LateRounds):
    """The syncer's half."""

    def __init__(self, quorum: Pushed, run: RunView) -> None:
        super().__init__(run)
        self._quorum = quorum
        self._rounds: list[dict[int, OpenRound]] = [{} for _ in run.fragments]  # by the version they start from

    def admit(self, now: float, c: Contribution) -> str | None:
        state, rounds = self._run.fragments[c.fragment], self._rounds[c.fragment]
        if not 0 <= c.base <= state.version or c.round != c.base:
            return VERSION
        number = state.version + (state.phase != "open")
        while self._run.rules.one_at_a_time and number in rounds:
            number += 1
        if self._quorum.late == "drop" and c.base < number:
            return LATE
        round_ = rounds.setdefault(number, OpenRound(c.step))
        round_.take(c)
        round_.fresh.add(c.learner)
        self.sent(c)
        return None

    def open_fragments(self) -> list[int]:
        return [fragment for fragment, rounds in enumerate(self._rounds) if rounds and self._open(fragment)]

    def decision(self, now: float, fragment: int) -> Decision | None:
        round_ = self._open(fragment)
        if round_ is None:
            return None
        members, everyone = late.ready(self._run, fragment), late.ready(self._run)
        if self._is_circle(everyone):
            merge = tuple(sorted(round_.newest))
            return Decision(merge, None, f"all {len(everyone)} live learners wait, for rounds that lack learners")
        return late.decide(now, round_.newest, round_.fresh, members, self._run.at_least, enough_at=now, grace_s=0.0)

    def _is_circle(self, members: Sequence[str]) -> bool:
        """Whether all learners are blocked, each on a round that lacks learners, so that none of them can push again.
        This happens to learners that wait for answers and push several fragments, each at its own pace or from its own
        start."""
        pushed = {learner for rounds in self._rounds for round_ in rounds.values() for learner in round_.newest}
        return bool(members) and all(learner in pushed and self._run.members[learner].waiting for learner in members)

    def close(self, now: float, fragment: int) -> ClosedRound:
        number = self._run.fragments[fragment].version
        return self._rounds[fragment].pop(number).closed(number, late.ready(self._run, fragment), now)

    def work_of(self, absent: Member, fragment: int) -> tuple[int, int]:
        """Its pending work at the last heartbeat, or its last push if that has more tokens."""
        pending, last = super().work_of(absent, fragment), self._last[absent.learner][fragment]
        return (last.tokens, last.steps) if last.tokens > pending[0] else pending

    def abandoned(self, fragment: int, closed: ClosedRound) -> Sequence[tuple[Contribution, str]]:
        later = self._rounds[fragment]  # each takes the number before its own
        self._rounds[fragment] = {number - 1: round_ for number, round_ in later.items()}
        return ()

    def roster(self, fragment: int) -> tuple[Sequence[str], Sequence[str]]:
        round_ = self._open(fragment)
        return (sorted(round_.newest), late.ready(self._run, fragment)) if round_ else ((), ())

    def sync_every(self, learner: str) -> int | None:
        """⌊v/v_max · H⌋ by measured speed, if the steps are dynamic."""
        if not self._quorum.dynamic_steps:
            return None
        every = self._run.rules.schedule.sync_every_at(self._run.step + 1)
        member = self._run.members.get(learner)
        step_times = [each.step_s for each in self._run.members.values() if each.step_s]
        step_s = None if member is None else member.step_s
        return max(1, int(min(step_times) / step_s * every)) if step_s else every

    def _open(self, fragment: int) -> OpenRound | None:
        """The open round that follows the fragment's version."""
        state = self._run.fragments[fragment]
        return self._rounds[fragment].get(state.version) if state.phase == "open" else None


class PushedLearner(LearnerRounds):
    """The learner's half: the newest version is adopted once the learner's last push is merged or rejected."""

    def __init__(self, quorum: Pushed, rules: Rules, fragments: Sequence[FragmentWork], step: int) -> None:
        self._rules, self.fragments = rules, fragments
        self._sends_late = quorum.late == "merge"
        self._push_at = [rules.schedule.next_send(fragment, step) for fragment in range(len(fragments))]
        self._push_every = [0] * len(fragments)
        """Inner steps from the last push to `_push_at`."""
        self._answered = [False] * len(fragments)
        """By fragment: the last push is merged or rejected, so the newest version may be adopted."""

    def due(self, step: int) -> Sequence[int]:
        return [fragment for fragment, at in enumerate(self._push_at) if at <= step]

    def next_round(self, fragment: int) -> int | None:
        """The adopted version, unless a push that was measured from it is unanswered. If late pushes are dropped, a
        newer version that may be adopted is adopted first."""
        work = self.fragments[fragment]
        is_late = self._answered[fragment] and bool(work.received) and not self._sends_late
        return None if is_late or late.is_answered(work) else work.version

    def sent(self, fragment: int, step: int, sync_every: int | None) -> None:
        schedule = self._rules.schedule
        every = sync_every and sync_every * schedule.multiples[fragment]
        self._push_every[fragment] = every or schedule.sync_every_at(step + 1, fragment)
        self._push_at[fragment] = step + self._push_every[fragment]
        self._answered[fragment] = False

    def waiting(self, step: int) -> tuple[tuple[int, int], ...]:
        if not self._rules.wait:
            return ()
        return tuple(
            (fragment, work.version + 1)
            for fragment, work in enumerate(self.fragments)
            if work.in_flight and not (self._answered[fragment] and work.received)
        )

    def adoption(self, fragment: int, step: int) -> int | None:
        return max(self.fragments[fragment].received, default=None) if self._answered[fragment] else None

    def listed(self, fragment: int) -> None:
        self._answered[fragment] = True

    def rejected(self, fragment: int, flight: InFlight, reason: str) -> bool:
        self._answered[fragment] = True
        return False

    def adopted(self, fragment: int, step: int, *, overwritten: bool) -> None:
        """Restart the push interval if adoption discards the work; otherwise the next push would contain little."""
        self._answered[fragment] = False
        if overwritten:
            self._push_at[fragment] = step + self._push_every[fragment]

    def newest(self, fragment: int) -> int:
        """Received versions whose adoption waits for the answer to this learner's push count too."""
        work = self.fragments[fragment]
        return max(work.received, default=work.version)

    def state_dict(self) -> dict[str, Any]:
        return {"push_at": list(self._push_at), "push_every": list(self._push_every), "answered": list(self._answered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._push_at, self._push_every = list(state["push_at"]), list(state["push_every"])
        self._answered = list(state["answered"])
