"""Decoupled learners that meet in rounds and may wait for each other, round by round and in many independent runs at
once.

In every array a row is a run and a column a learner. A learner's state is the time of its next contribution, which is
in the future of those that are late or stand still; a round is closed by comparing these times, so that nothing has to
be replayed step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.errors import ConfigError
from diloco.planning.fleet import Fleet, RoundRules

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LEARNER_STEPS = 600_000
MIN_STEPS, MIN_ROUNDS, MIN_RUNS = 300, 12, 32
MOST_STEPS, MOST_LEARNER_STEPS = 200_000, 200_000_000
"""Of a run one after the other, and of all learners in all runs."""
MOST_STOPS = 16  # of one learner on the way to one contribution that are remembered


@dataclass(frozen=True)
class RunShares:
    """Of one simulated run: shares of the time for work and waiting, and the running learners' share in a round."""

    goodput: float
    waiting: float
    participation: float | None = None


def simulate_rounds(fleet: Fleet, seed: int) -> list[RunShares]:
    """Simulate decoupled learners that meet in rounds, in independent runs.

    Arguments: the fleet; a seed of the random numbers.

    Raises:
        ConfigError: so many steps between rounds, or learners, that it would take minutes.
    """
    import numpy as np

    every, overlap = fleet.rounds.sync_every, fleet.rounds.overlap
    # Which round's answer is needed, after how many of the steps to the next contribution.
    behind, after = divmod(overlap, every)
    period = max(every, math.ceil(fleet.rounds.sync_s / fleet.times.step_s / (behind + 1)))
    num_rounds = max(MIN_ROUNDS, math.ceil(MIN_STEPS / period)) + behind
    num_runs = max(MIN_RUNS, LEARNER_STEPS // (fleet.learners * num_rounds * period))
    num_steps = num_rounds * period
    if num_steps > MOST_STEPS or num_steps * fleet.learners * num_runs > MOST_LEARNER_STEPS:
        raise ConfigError(
            f"{num_rounds:,} rounds of {period:,} steps of {fleet.learners:,} learners are too many to simulate; lower "
            "the steps from one round to the next, the overlap, the time of a synchronisation or the learners."
        )
    learners = _Learners(fleet, num_runs, np.random.default_rng([seed, 2]))
    answers = [np.full(num_runs, -np.inf) for _ in range(behind + 1)]
    warm_up, quorum_s = max(4 + behind, num_rounds // 8), np.zeros(num_runs)
    begin_s = end_s = joined = np.zeros(num_runs)
    for number in range(num_rounds):
        learners.contribute(after, answers[-1 - behind])
        while learners.leave_the_late_behind(number):
            learners.contribute(after, answers[-1 - behind])
        closed_s, quorum_s, in_time = learners.close(fleet.rounds, number, quorum_s)
        if number >= warm_up:
            joined = joined + in_time
        else:
            begin_s = closed_s
            learners.forget()
        end_s = closed_s
        answers = [*answers[1:], closed_s + fleet.rounds.sync_s]
    goodput, waiting = learners.shares(end_s - begin_s)
    participation = joined / (num_rounds - warm_up)
    return [RunShares(*map(float, each)) for each in zip(goodput, waiting, participation, strict=True)]


class _Learners:
    """What every learner of every run is doing: when it will have made its contribution, what is broken, what it did so
    far."""

    def __init__(self, fleet: Fleet, num_runs: int, rng: np.random.Generator) -> None:
        import numpy as np

        self._np, self._rng, self._times, self._elastic = np, rng, fleet.times, fleet.elastic_learners
        self._speeds = np.array(fleet.relative_speeds)
        self._step_s = fleet.times.step_s / self._speeds
        self._variance = fleet.speeds.jitter**2
        self._rate = fleet.chips / fleet.learners / fleet.times.mtbi_s
        self._every, self._waits = fleet.rounds.sync_every, fleet.rounds.wait
        shape = (num_runs, fleet.learners)
        self._at_s = -rng.random(shape) * self._step_s * self._every
        self._repaired_s = np.full(shape, np.inf)
        slots = min(self._every, 2 + math.ceil(4 * self._rate * float(self._step_s.max()) * self._every), MOST_STOPS)
        self._stops_s = np.full((*shape, slots), np.inf)  # when its newest stops begin
        self._returns_s = np.full((*shape, slots), -np.inf)  # and end
        self._num_stops = np.zeros(shape, dtype=int)
        self._goes_on = np.ones(shape, dtype=bool)  # the others hold a contribution that no round has taken yet
        self._number = np.full(shape, -1)  # the round that the contribution is made for
        self._closed_s = np.full(num_runs, -np.inf)  # the last round
        self._begin_anywhere()
        self.forget()

    def forget(self) -> None:
        """Count from now on."""
        self._steps = self._np.zeros(self._at_s.shape)
        self._waited_s = self._np.zeros(self._at_s.shape)

    def _begin_anywhere(self) -> None:
        """Draw stops and repairs as they are at a random moment of a long run, so that short runs start there."""
        np, times = self._np, self._times
        shape, run_s = self._at_s.shape, self._step_s / -np.expm1(-self._rate * self._step_s)
        at, into = self._rng.random(shape), self._rng.random(shape)
        if not self._elastic:
            out_s = times.repair_s + times.up_s
            self._stop(at < out_s / (run_s + out_s), into * out_s)
            return
        cycle_s = run_s + times.repair_s + times.up_s
        coming_up = at < times.up_s / cycle_s
        repairing = ~coming_up & (at < (times.up_s + times.repair_s) / cycle_s)
        going_down = repairing & (self._rng.random(shape) < times.down_s / (run_s + times.down_s))
        self._repaired_s = np.where(repairing, into * times.repair_s, np.inf)
        self._stop(coming_up, into * times.up_s)
        self._stop(going_down, self._rng.random(shape) * times.down_s)

    def _stop(self, who: NDArray[np.bool_], for_s: Floats) -> None:
        where = self._np.nonzero(who)
        begins_s = self._at_s[where]
        self._at_s[where] = ends_s = begins_s + for_s[where]
        slot = (*where, self._num_stops[where] % self._stops_s.shape[2])
        self._stops_s[slot], self._returns_s[slot] = begins_s, ends_s
        self._num_stops[where] += 1

    def contribute(self, after: int, answered_s: Floats) -> None:
        """Make the steps to the next contribution; the answer is needed after the first `after` of them."""
        np, need_s, going = self._np, answered_s[:, None], self._goes_on
        self._step(after)
        if self._waits:
            until_s = np.where(going, np.maximum(self._at_s, need_s), self._at_s)
            self._waited_s += until_s - self._at_s
            self._at_s = until_s
        while (early := going & (self._at_s < need_s)).any():  # they train on without the answer
            self._goes_on = early
            self._step(1)
            self._steps += early
        self._goes_on = going
        self._step(self._every - after)
        self._number += going

    def _step(self, number: int) -> None:
        """Make steps; at the end of each, failures are noticed and repaired chips taken in."""
        np, times = self._np, self._times
        for _ in range(number):
            took_s = np.broadcast_to(self._step_s, self._at_s.shape)
            if self._variance:
                took_s = took_s * self._rng.gamma(1 / self._variance, self._variance, self._at_s.shape)
            self._at_s += self._goes_on * took_s
            failed = self._goes_on & (self._rng.random(self._at_s.shape) < -np.expm1(-self._rate * took_s))
            if not self._elastic:
                self._stop(failed, failed * (times.repair_s + times.up_s))
                continue
            self._repaired_s[failed] = np.minimum(self._repaired_s[failed], self._at_s[failed] + times.repair_s)
            back = self._goes_on & (self._repaired_s <= self._at_s + failed * times.down_s)
            self._stop(failed | back, failed * times.down_s + back * times.up_s)
            self._repaired_s[back] = np.inf

    def leave_the_late_behind(self, number: int) -> bool:
        """Let learners go on whose contribution was made before the round opened. Returns whether there are any."""
        np = self._np
        opened_s = np.where(self._number >= number, self._at_s, np.inf).min(1)
        late = self._at_s < opened_s[:, None]
        self._number[late] = np.maximum(self._number[late], number - 1)
        self._go_on(late)
        return bool(late.any())

    def close(self, rules: RoundRules, number: int, quorum_s: Floats) -> tuple[Floats, Floats, Floats]:
        """Close a round; those that are in it go on.

        Returns when it closed, the moving average of what a quorum takes to form, and the share of the running learners
        that are in it.
        """
        from diloco.core.rounds.called import EMA

        np, at_s = self._np, self._at_s
        all_s = self._all_contributed()
        formed_s = np.minimum(np.partition(at_s, rules.quorum - 1, axis=1)[:, rules.quorum - 1], all_s)
        quorum_s = (1 - EMA) * quorum_s + EMA * (formed_s - at_s.min(1))
        slack_s = rules.overlap * float(np.median(self._step_s)) - quorum_s - rules.sync_s
        grace_s = np.clip(rules.grace * slack_s, 0, rules.grace_cap_s)
        self._closed_s = np.maximum(self._closed_s, np.minimum(formed_s + grace_s, all_s))
        contributed = at_s <= self._closed_s[:, None]
        in_time = contributed.sum(1) / (contributed | ~self._standing(self._closed_s)).sum(1)
        self._number = np.where(contributed, np.maximum(self._number, number), self._number)
        self._go_on(contributed)
        return self._closed_s, quorum_s, in_time

    def _all_contributed(self) -> Floats:
        """The earliest time at which every learner has contributed or stands still."""
        np = self._np
        now_s: Floats = self._at_s.min(1)
        while True:
            at = now_s[:, None]
            stops_s = np.where(self._stops_s > at[..., None], self._stops_s, np.inf).min(2)
            done = (self._at_s <= at) | self._standing(now_s)
            later_s = np.where(done, at, np.minimum(self._at_s, stops_s)).max(1)
            if not (later_s > now_s).any():
                return now_s
            now_s = later_s

    def _standing(self, now_s: Floats) -> NDArray[np.bool_]:
        at = now_s[:, None, None]
        found: NDArray[np.bool_] = self._np.logical_or.reduce((self._stops_s <= at) & (at < self._returns_s), axis=2)
        return found

    def _go_on(self, who: NDArray[np.bool_]) -> None:
        self._goes_on = who
        self._steps += self._every * who

    def shares(self, span_s: Floats) -> tuple[Floats, Floats]:
        """Shares of work done and of waiting in the time since `forget`, for each run."""
        ideal = span_s * self._speeds.sum()
        nominal_s = float((self._step_s * self._speeds)[0])
        return self._steps.sum(1) * nominal_s / ideal, (self._waited_s * self._speeds).sum(1) / ideal
