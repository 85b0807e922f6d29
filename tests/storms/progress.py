"""That a storm goes on: learners take steps, rounds are closed, versions rise, and members that are gone are evicted.

It is looked at once a second.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.versions import BrokenInvariantError, require
from tests.storms.wire import BYTE_S

from diloco.core.quorum import AllLive
from diloco.protocol.members import Deadlines
from diloco.protocol.rounds.base import Rules
from diloco.protocol.rounds.late_contributions import num_needed

if TYPE_CHECKING:
    from tests.storms.learners import Process
    from tests.storms.world import Storm

PATIENCE_S = 120.0
"""Bound of what may take time after the last fault: a learner's next step, and the end of a round that has enough
contributions."""

RISES_S = 12.0
"""Bound, together with a number of inner steps, of the time to the next version of a fragment, while no fault happens
and the syncer knows who trains: that a call is heard and answered, that the grace window ends, that work is merged and
stored, with messages that take up to two seconds more than others. What the bytes themselves take comes on top."""

LOOK_S = 1.0


@dataclass(frozen=True)
class _Quiet:
    """A time without faults and changes of the members.

    Attributes:
        at: version of the fragment, and the learners that train.
        since_s: when it began.
        steps: of each learner, then.
    """

    at: tuple[object, ...]
    since_s: float
    steps: dict[str, int]


class Progress:
    """Of one storm.

    Attributes:
        is_stranded: of a scheduled run those that are left are too few to end a round.
        heard_s: when anything of a learner's newest process arrived last.
    """

    def __init__(self, storm: Storm) -> None:
        self.is_stranded = False
        self.heard_s: dict[str, float] = {}
        self._storm = storm
        self._quorum = storm.plan.method.quorum
        self._still: dict[object, tuple[object, float]] = {}
        """What stands still: the learner or fragment, the step or version that it is at, and since when."""
        self._quiet: dict[int, _Quiet] = {}
        self._leaving: dict[Process, tuple[int, float]] = {}
        """Of those that were dealt other groups than they hold: their step then, and when that was."""
        rules = Rules.of(storm.plan.method, len(storm.plan.sizes))
        overlaps = [rules.schedule.overlap, *(overlap for overlap in storm.plan.overlaps if overlap is not None)]
        self._rise_steps = 2 * max(rules.schedule.multiples) * storm.plan.method.sync_every + max(overlaps) + 2
        """Inner steps of the slowest learner in which each fragment gets a version."""
        sent_bytes = sum(itertools.starmap(storm.jobs.contribution_bytes, enumerate(storm.plan.sizes)))
        self._rises_s = RISES_S + 2 * BYTE_S * sent_bytes  # the first that a learner sends may be too late

    def look(self) -> None:
        """Raises BrokenInvariantError."""
        storm = self._storm
        for learner in storm.learners:
            core = learner.core
            self._moves(learner.name, None if learner.has_finished else (id(core), core.step if core else 0))
        if storm.driver is None or not storm.driver.state.is_initialised:
            self._quiet.clear()
            return
        core = storm.driver.core
        running = {
            learner.name: learner.core.step
            for learner in storm.learners
            if learner.core is not None and learner.process.client.core.phase == "running"
        }
        for fragment, version in enumerate(storm.driver.state.versions):
            contributors, members = core.rounds.roster(fragment)
            at_least = self._quorum.at_least
            needed = self._needed(fragment) if isinstance(self._quorum, AllLive) else num_needed(at_least, members)
            is_made = core.fragments[fragment].phase != "open"  # the next version, which has to become durable too
            self._moves(fragment, version if is_made or len(contributors) >= needed else None)
            if not is_made:
                self._rises(fragment, version, running)
        for learner in storm.learners:
            if learner.name in running:
                self._leaves(learner.process, running[learner.name], core.dealing.of(learner.name))
        storm.accounts.check_confirmed(core, storm.now_s, storm.quiet_s, tuple(running))
        self.check_members()

    def _needed(self, fragment: int) -> int:
        """Contributions with which a scheduled round ends: at most as many as learners hold the fragment, where one of
        those that are there or have ended does not."""
        storm, at_least = self._storm, self._quorum.at_least
        assert storm.driver is not None
        core = storm.driver.core
        there = {learner for learner, member in core.members.items() if not member.finished} | core.accounting.ended(0)
        processes = [core.accounting.accounts[learner].process or 0 for learner in there]
        holders = [process for process in processes if fragment in storm.ledger.held_by[process]]
        return at_least if len(holders) == len(there) else max(1, min(at_least, len(holders)))

    def check_members(self) -> None:
        """Members of which nothing was heard for longer than their deadline have been evicted."""
        storm, deadlines = self._storm, Deadlines()
        assert storm.driver is not None
        for member in storm.driver.core.members:
            heard_s = max(self.heard_s.get(member, 0.0), storm.began_s)
            lost_s = deadlines.lost_after_s(storm.plan.step_s[int(member.removeprefix("learner-"))])
            require(
                storm.now_s - heard_s <= lost_s + 2 * LOOK_S,
                f"{member} is a member, and nothing was heard of it since {heard_s:.1f} s",
            )

    def _rises(self, fragment: int, version: int, running: dict[str, int]) -> None:
        """While all learners train, versions rise."""
        storm = self._storm
        assert storm.driver is not None
        ready = {learner for learner, member in storm.driver.core.members.items() if member.ready}
        is_scheduled = isinstance(self._quorum, AllLive)
        if (
            not storm.may_publish
            or storm.plan.workers  # a learner that gets fewer groups than others falls far behind their rounds
            or not running
            or ready != running.keys()
            or (is_scheduled and len(running) < self._quorum.at_least)
            or not any(fragment in learner.process.held for learner in storm.learners if learner.name in running)
        ):
            self._quiet.pop(fragment, None)
            return
        at = version, id(storm.driver), *sorted(running)
        quiet = self._quiet.get(fragment)
        if quiet is None or quiet.at != at or storm.quiet_s > quiet.since_s:
            if storm.quiet_s <= storm.now_s:
                self._quiet[fragment] = _Quiet(at, storm.now_s, running)
            return
        # In a scheduled run, what was contributed before the fragment's own step is out of step.
        base_step = storm.driver.core.fragments[fragment].step if is_scheduled else 0
        steps = min(step - max(quiet.steps[learner], base_step) for learner, step in running.items())
        if steps >= self._rise_steps and storm.now_s - quiet.since_s >= self._rises_s:
            raise BrokenInvariantError(
                f"fragment {fragment} is at version {version} since {quiet.since_s:.1f} s, and all learners have taken "
                f"{steps} steps or more: {storm.standstill()}"
            )

    def _leaves(self, process: Process, step: int, dealt: tuple[int, ...]) -> None:
        """A learner that was dealt other groups leaves for them, once all is quiet and its work is sent; where work is
        dropped, that may take long."""
        storm = self._storm
        if isinstance(self._quorum, AllLive) and self._quorum.drop:
            return
        if not process.was_dealt_others(dealt) or not storm.may_publish or storm.quiet_s > storm.now_s:
            self._leaving.pop(process, None)
            return
        first, since_s = self._leaving.setdefault(process, (step, storm.now_s))
        if storm.quiet_s > since_s:
            self._leaving[process] = step, storm.now_s
        elif step - first >= self._rise_steps and storm.now_s - since_s >= self._rises_s:
            raise BrokenInvariantError(f"{process.name} was dealt {dealt} at step {first}, and is there at step {step}")

    def _moves(self, what: object, at: object) -> None:
        """`at`: where it is; None: it need not go on."""
        storm = self._storm
        before, since_s = self._still.get(what, (None, 0.0))
        if at is None or at != before:
            self._still[what] = at, storm.now_s
        elif storm.now_s - max(since_s, storm.calm_s) > PATIENCE_S * (3 if storm.plan.workers else 1):  # others' groups
            if storm.lacks_a_goodbye:
                self.is_stranded = True
                return
            raise BrokenInvariantError(f"{what} does not go on: {storm.standstill()}")
