"""Scheduled rounds: every learner that trains contributes to every round, and may block on its answer.

    DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512; eager updates, arXiv 2502.12996

The first contribution opens a round, with all learners that train at that moment as members; the set only shrinks
(eviction, departure). While one round of a fragment is merged or stored, contributions to the next are kept.

Learners block on the rounds they contributed to, so rounds of several fragments must not wait for each other in a
cycle. All learners send the fragments in the order of the inner steps. But a learner that joins may be behind the
others, or ahead of them:

    behind: it contributes at a step at which the others contributed to the previous round. The contribution is rejected
            as out of step, its work stays pending, and the learner continues to the step of the others.
    ahead: it passed the step of a round before it counted as training. That round does not wait for it.

Learners that joined at other steps, or whose position a restarted syncer does not know, may still form a cycle. All
learners are then blocked with nothing in flight, and a round stops waiting for learners that are blocked in a round of
the same or a later step: they have sent all that precedes it. At least one such round exists, since steps cannot only
descend around a cycle.

A round with fewer than `at_least` members waits for a joiner, which therefore starts before that round's step. Where
learners of the run do not hold the round's fragment, K is at most the number of those that do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from diloco.core.quorum import AllLive
from diloco.protocol.contribution import (
    ABANDONED,
    DROPPED,
    MISSED,
    NOT_FINITE,
    OUT_OF_STEP,
    OUTLIER,
    TWICE,
    VERSION,
    Contribution,
)
from diloco.protocol.in_flight import FragmentWork, InFlight
from diloco.protocol.members import Member
from diloco.protocol.rounds.base import ClosedRound, Decision, LearnerRounds, Rules, RunView, SyncerRounds


def decide(
    now: float,
    contributed: Collection[str],
    members: Collection[str],
    deadlines: Mapping[str, float],
    at_least: int = 1,
    ended: Collection[str] = (),
) -> Decision:
    """Decide a scheduled round: merge it, or name the learners that it waits for.

    Arguments:
        now: seconds of the caller's clock.
        contributed: learners whose contribution to the round was acknowledged.
        members: learners that the round waits for, without those evicted or departed.
        deadlines: for each live learner, when it is evicted if no more messages arrive.
        at_least: the fewest learners to merge.
        ended: learners without a contribution that count for `at_least`.

    Returns:
        A `Decision`; contributions are merged in learner-id order, whatever the order of their arrival.
    """
    missing = sorted(set(members) - set(contributed))
    if missing:
        first = min(missing, key=lambda learner: deadlines[learner])
        names = ", ".join(missing)
        return Decision(
            None,
            deadlines[first],
            f"waiting for {names}; {first} is given up in {max(0.0, deadlines[first] - now):.1f} s",
        )
    which = f"; {', '.join(sorted(ended))} ended at its step or later" if ended else ""
    if len(contributed) + len(ended) < at_least:
        return Decision(None, None, f"{len(contributed)} of at least {at_least} learners have contributed{which}")
    reason = f"all {len(contributed)} learners of the round have contributed{which}"
    return Decision(tuple(sorted(contributed)), None, reason)


@dataclass
class _Round:
    """An open round, or one that is being merged.

    Attributes:
        step: the earliest inner step after which one of its contributions was sent.
        members: the learners that it waits for.
        left_out: contributions that its version will not contain, with the reasons. They are rejected once the version
            is stored: after an earlier crash the round opens again and waits for them.
    """

    step: int
    members: set[str]
    contributions: dict[str, Contribution] = field(default_factory=dict)
    left_out: list[tuple[Contribution, str]] = field(default_factory=list)


class ScheduledSyncer(SyncerRounds):
    """The syncer's half."""

    def __init__(self, quorum: AllLive, run: RunView) -> None:
        self._quorum, self._run = quorum, run
        self._rounds: list[dict[int, _Round]] = [{} for _ in run.fragments]  # by the version that a round starts from

    def admit(self, now: float, c: Contribution) -> str | None:
        run, rounds = self._run, self._rounds[c.fragment]
        state = run.fragments[c.fragment]
        if not 0 <= c.base <= state.version or not 0 <= c.round - c.base <= self._intervals_in_flight(c.learner):
            return VERSION
        if c.round < state.version or (c.round == state.version and state.phase != "open"):
            return self._too_late(c)
        if c.round == state.version:
            after_step: float = state.step
        else:  # to a round after the open one, by a learner that must have contributed to the previous round
            after_step = rounds[c.round - 1].step if c.round - 1 in rounds else math.inf
        if c.step <= after_step:
            return OUT_OF_STEP
        holders = {learner for learner, member in run.members.items() if member.holds(c.fragment)}
        round_ = rounds.setdefault(c.round, _Round(c.step, holders))
        if c.learner in round_.contributions:
            round_.left_out.append((c, TWICE))
            return None
        round_.contributions[c.learner] = c
        round_.step = min(round_.step, c.step)
        return None

    def _intervals_in_flight(self, learner: str) -> int:
        """The most answers that may be outstanding when the learner sends, by its own τ if it has one (arXiv
        2501.18512)."""
        schedule, overlap = self._run.rules.schedule, self._run.members[learner].overlap
        return schedule.intervals_in_flight if overlap is None else schedule.intervals_in(overlap)

    def _too_late(self, c: Contribution) -> str | None:
        """A contribution to a closed round is `MISSED`, also if it would have been dropped: its learner may have
        adopted the round's version already, and discarded the work."""
        if c.round < self._run.fragments[c.fragment].version:
            return MISSED
        self._rounds[c.fragment][c.round].left_out.append((c, MISSED))
        return None

    def update(self, now: float) -> set[str]:
        """Remove from every open round members that left, were evicted or cannot contribute to it any more."""
        for state, rounds in zip(self._run.fragments, self._rounds, strict=True):
            for number, round_ in rounds.items():
                if number == state.version and state.phase != "open":
                    continue  # it is closed
                later = [other.contributions.keys() for after, other in rounds.items() if after > number]
                gone = set[str]().union(*later) - round_.contributions.keys()  # contributions come in order
                round_.members = {learner for learner in round_.members - gone if self._belongs(learner, round_)}
        return set()

    def _belongs(self, learner: str, round_: _Round) -> bool:
        """Whether the round still waits for a member. A broken connection does not matter: the learner may reconnect
        until its deadline, and still has its work."""
        member = self._run.members.get(learner)
        if member is None or learner in round_.contributions:
            return member is not None
        return member.ready and member.ready_step < round_.step and not self._is_in_circle(member, round_)

    def _is_in_circle(self, member: Member, round_: _Round) -> bool:
        """Whether all learners are blocked, and this one on a round that cannot close before `round_`: a round that
        lacks learners, or to which it contributed at the step of `round_` or later."""
        if not self._are_all_blocked:
            return False
        for fragment in range(len(self._rounds)):
            other = self._open(fragment)
            if other is None or other is round_ or member.learner not in other.contributions:
                continue
            if self._lacks_learners(fragment, other) or other.contributions[member.learner].step >= round_.step:
                return True
        return False

    @property
    def _are_all_blocked(self) -> bool:
        """Whether all learners are blocked at the published versions, none of which is about to change."""
        states = self._run.fragments
        versions = tuple(state.version for state in states)
        return all(state.phase == "open" for state in states) and all(
            each.is_blocked_at(versions) for each in self._run.members.values() if each.ready
        )

    def open_fragments(self) -> list[int]:
        return [fragment for fragment, rounds in enumerate(self._rounds) if rounds and self._open(fragment)]

    def decision(self, now: float, fragment: int) -> Decision | None:
        round_ = self._open(fragment)
        if round_ is None:
            return None
        deadlines = {learner: self._run.deadlines.ends_at(member) for learner, member in self._run.members.items()}
        at_least, ended = self._at_least(fragment, round_.step), self._ended(fragment, round_)
        return decide(now, round_.contributions, round_.members, deadlines, at_least, ended)

    def close(self, now: float, fragment: int) -> ClosedRound:
        """`AllLive(drop=…)` rejects contributions here, but never so many that fewer than K remain.

        They are not rejected on arrival: if the other learners left before they contributed, no contribution would
        close the round. A contribution of a departed learner is kept, since its work cannot become pending again.
        """
        number = self._run.fragments[fragment].version
        round_ = self._rounds[fragment][number]
        kept, at_least = dict(sorted(round_.contributions.items())), self._at_least(fragment, round_.step)
        for learner, c in sorted(round_.contributions.items()):
            member = self._run.members.get(learner)
            is_there = member is not None and member.incarnation == c.incarnation
            if is_there and len(kept) > at_least and self._quorum.drops(learner, fragment, number):
                round_.left_out.append((kept.pop(learner), DROPPED))
        return ClosedRound(number, tuple(kept.values()), round_.step, frozenset(round_.members), now)

    def stored(self, now: float, fragment: int, closed: ClosedRound) -> None:
        del self._rounds[fragment][closed.number]

    def abandoned(self, fragment: int, closed: ClosedRound) -> Sequence[tuple[Contribution, str]]:
        """Contributions to later rounds of the fragment assume this round's result, so they are rejected too. The work
        of those left out stays pending, and their learners contribute to the round again."""
        rounds, self._rounds[fragment] = self._rounds[fragment], {}
        left_out = [(c, ABANDONED) for c, _ in rounds.pop(closed.number).left_out]
        later = [[*round_.contributions.values(), *(c for c, _ in round_.left_out)] for round_ in rounds.values()]
        return [*left_out, *((c, NOT_FINITE) for each in later for c in each)]

    def left_out(self, fragment: int) -> Sequence[tuple[Contribution, str]]:
        return self._rounds[fragment][self._run.fragments[fragment].version].left_out

    def roster(self, fragment: int) -> tuple[Sequence[str], Sequence[str]]:
        round_ = self._open(fragment)
        return (sorted(round_.contributions), sorted(round_.members)) if round_ else ((), ())

    def heard(self, member: Member, steps: int) -> bool:
        return member.waiting or member.finished

    def start_step(self, learner: str) -> int | None:
        """The run's step, or the send before the earliest round that would not reach its `at_least`.

        The joiner's first send then belongs to that round. After a later one it would stay a round ahead, and at the
        end of training the others would wait in a round that no learner joins. Learners that are disconnected, or have
        not trained since they joined, are not expected to contribute (after a restart rounds still wait for them).
        """
        run = self._run
        if run.at_least == 1:
            return None
        schedule, others = run.rules.schedule, [it for name, it in run.members.items() if name != learner]
        starts = [run.step]
        for fragment, state in enumerate(run.fragments):
            if not run.members[learner].holds(fragment):
                continue
            connected = {
                it.learner for it in run.members.values() if it.healthy and it.tokens > 0 and it.holds(fragment)
            }
            is_closing, rounds = state.phase != "open", self._rounds[fragment]
            number = state.version + is_closing
            step = rounds[state.version].step if is_closing else state.step
            while True:
                round_ = rounds.get(number)
                if round_ is None and others and not any(it.holds(fragment) for it in others):
                    break  # no holder was there to reach it
                if round_ is None:  # a contribution may be in flight
                    step, present = schedule.next_send(fragment, step), connected
                else:
                    step, present = round_.step, round_.contributions.keys() | (round_.members & connected)
                if step > run.step:
                    break
                if len(present | self._ended_holders(fragment, step)) < self._at_least(fragment, step):
                    starts.append(schedule.last_send(before=step))
                    break
                number += 1
        return min(starts)

    def lacks_learners(self, fragment: int) -> int | None:
        round_ = self._open(fragment)
        return len(round_.contributions) if round_ is not None and self._lacks_learners(fragment, round_) else None

    def _lacks_learners(self, fragment: int, round_: _Round) -> bool:
        """Whether a round has contributions of all its members, and they are not enough."""
        is_complete = round_.contributions.keys() >= round_.members
        present = len(round_.contributions) + len(self._ended(fragment, round_))
        return is_complete and present < self._at_least(fragment, round_.step)

    def _at_least(self, fragment: int, step: int) -> int:
        """K of a fragment's round at this step. Where a learner that has joined, or has ended, does not hold the
        fragment, at most the number of those that do. A holder counts before its first step: the round waits for it."""
        run, at_least = self._run, self._run.at_least
        if at_least == 1:
            return 1
        there = {learner for learner, it in run.members.items() if not it.finished} | run.accounting.ended(step)
        num_holders = sum(run.accounting.accounts[learner].holds(fragment) for learner in there)
        return at_least if num_holders == len(there) else max(1, min(at_least, num_holders))

    def _ended(self, fragment: int, round_: _Round) -> set[str]:
        """Learners that count for a round's `at_least` without a contribution, if it has too few contributions."""
        if len(round_.contributions) >= self._run.at_least:
            return set()
        ended, members = self._ended_holders(fragment, round_.step), self._run.members.values()
        if self._are_all_blocked:
            ended |= {it.learner for it in members if it.ready and it.step >= round_.step and it.holds(fragment)}
        return ended - round_.contributions.keys()

    def _ended_holders(self, fragment: int, step: int) -> set[str]:
        """Learners that ended at this step or later, and held the fragment."""
        accounting = self._run.accounting
        return {learner for learner in accounting.ended(step) if accounting.accounts[learner].holds(fragment)}

    def _open(self, fragment: int) -> _Round | None:
        """The open round that follows the fragment's version."""
        state = self._run.fragments[fragment]
        return self._rounds[fragment].get(state.version) if state.phase == "open" else None


class ScheduledLearner(LearnerRounds):
    """The learner's half: a version is adopted τ steps after the send that it answers."""

    def __init__(self, quorum: AllLive, rules: Rules, fragments: Sequence[FragmentWork], step: int) -> None:
        self._rules, self.fragments = rules, fragments

    def due(self, step: int) -> Sequence[int]:
        return self._rules.schedule.sends(step)

    @property
    def sends_together(self) -> bool:
        return self._rules.wait and self._rules.schedule.sends_together

    def next_round(self, fragment: int) -> int | None:
        """With an overlap of whole intervals, that many answers may be outstanding at a send. With more outstanding,
        the work stays pending until the next send."""
        work = self.fragments[fragment]
        round_ = work.in_flight[-1].round + 1 if work.in_flight else work.version
        return round_ if round_ - work.version <= self._rules.schedule.intervals_in_flight else None

    def waiting(self, step: int) -> tuple[tuple[int, int], ...]:
        if not self._rules.wait:
            return ()
        due = ((f, self._due(work, step)) for f, work in enumerate(self.fragments))
        return tuple(
            (f, version)
            for f, version in due
            if version is not None and not any(v >= version for v in self.fragments[f].received)
        )

    def adoption(self, fragment: int, step: int) -> int | None:
        """With a contribution in flight, adopt exactly the version of its round, when it is due. With none in flight (a
        joiner, a rejected contribution) adopt the newest version; so too if the due version was skipped: a newer one
        was received, of a round without a contribution of this learner."""
        work = self.fragments[fragment]
        due, newest = self._due(work, step), max(work.received, default=None)
        if due is not None and due in work.received:
            return due
        is_overtaken = due is not None and newest is not None and newest > due
        return newest if not work.in_flight or is_overtaken else None

    def completes(self, flight: InFlight, version: int) -> bool:
        return flight.round < version

    def rejected(self, fragment: int, flight: InFlight, reason: str) -> bool:
        """If the round continues without the contribution, the learner waits for its version: without waiting it would
        be late again."""
        if reason not in (DROPPED, MISSED, TWICE, OUTLIER):
            return False
        flight.tokens, flight.kept = 0, reason == DROPPED
        return True

    def keeps_own(self, fragment: int, version: int) -> bool:
        """After a dropped contribution the learner keeps its parameters, and only its anchor changes."""
        return any(flight.kept and flight.round + 1 == version for flight in self.fragments[fragment].in_flight)

    def answer_to(self, flight: InFlight) -> int | None:
        return flight.round + 1

    @staticmethod
    def _due(work: FragmentWork, step: int) -> int | None:
        """The version that is due for the oldest contribution in flight."""
        return work.in_flight[0].round + 1 if work.in_flight and work.in_flight[0].apply_at <= step else None
