"""Predicted utilisation, merge interval and staleness of learners around one syncer.

The papers' graph (`graph.py`) has equal learners and a reduction in one pass, layer by layer. This model follows a run
with a syncer: every learner uploads a fragment's encoded bytes, the syncer merges and notifies, every learner requests
and downloads the update, over its own links and with their latency, beside its other transfers. The predictions are
compared with runs of the real system.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.errors import ConfigError
from diloco.planning.exchange_plan import ExchangePlan
from diloco.planning.network import Network, Route
from diloco.planning.simulated_rounds import SimulatedRounds
from diloco.report.drawing import Span

SETTLED = 1e-9
"""Relative difference of window durations that counts as rounding."""
MAX_WINDOWS = 40
CALLED_ROUNDS = (3, 5)
"""Rounds per fragment, in the mean: skipped at the start, then measured."""
MOST_STEPS = 500_000
"""Most inner steps, of all learners, for which called rounds are simulated."""
CALLED_PERIODS = 1000
"""Periods of H steps of the slowest learner after which the simulation of called rounds ends, on a very slow link."""


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a run.

    Attributes:
        utilization: compute ÷ wall clock of each learner.
        period_steps: mean number of inner steps between two merges of one fragment; H where the network keeps up.
        stale_steps: mean number of inner steps between sending a fragment and adopting the answer.
        contributors: mean number of learners in a merge.
        spans: activities of every simulated learner.
    """

    utilization: tuple[float, ...]
    period_steps: float
    stale_steps: float
    contributors: float
    spans: Sequence[Sequence[Span]] = ()

    @property
    def mean_utilization(self) -> float:
        """Mean utilisation of the learners."""
        return sum(self.utilization) / len(self.utilization)


def predict(
    network: Network, step_s: Sequence[float], exchange: ExchangePlan, *, num_steps: int | None = None, copies: int = 1
) -> Prediction:
    """Predict the steady state of a run, or its first `num_steps` steps.

    Arguments:
        network: all links, idle.
        step_s: duration of an inner step, of each learner.
        exchange: schedule, sizes and the syncer's time.
        num_steps: length of the run, for scheduled rounds only; None: the steady state.
        copies: number of equal learners that each one represents.
    """
    if exchange.called is not None:
        return _called(SimulatedRounds(network, step_s, exchange, copies=copies), exchange)
    simulation = SimulatedRounds(network, step_s, exchange, copies=copies, stop_at=num_steps)
    if num_steps is None:
        simulation.run(lambda: _is_settled(simulation))
        # In the steady state faster learners wait for the slowest.
        windows_s = [max(_window_s(simulation, i) for i in range(len(step_s)))] * len(step_s)
    else:
        simulation.run(lambda: min(map(len, simulation.left_s)) > 1)
        windows_s = [ended_s for _, ended_s in simulation.left_s]
    utilization = [simulation.window * each_s / all_s for each_s, all_s in zip(step_s, windows_s, strict=True)]
    every, tau = exchange.schedule.sync_every, exchange.schedule.overlap
    assert isinstance(every, int)
    return Prediction(tuple(utilization), every, tau, len(step_s) * copies, simulation.spans)


def _is_settled(simulation: SimulatedRounds) -> bool:
    """Whether the last three windows of every learner took equally long, or enough windows were simulated."""
    if min(map(len, simulation.left_s)) > MAX_WINDOWS:
        return True
    for left_s in simulation.left_s:
        if len(left_s) < 5:
            return False
        a, b, c, d = left_s[-4:]
        if max(b - a, c - b, d - c) - min(b - a, c - b, d - c) > SETTLED * (d - c):
            return False
    return True


def _window_s(simulation: SimulatedRounds, i: int) -> float:
    """Duration of the last window; the mean of the later half of all windows where they never settled."""
    left_s = simulation.left_s[i]
    windows = 1 if len(left_s) <= MAX_WINDOWS else len(left_s) // 2
    return (left_s[-1] - left_s[-1 - windows]) / windows


def _called(simulation: SimulatedRounds, exchange: ExchangePlan) -> Prediction:
    every, num = exchange.schedule.sync_every, len(simulation.learners)
    per_interval = exchange.per_interval([1.0] * len(exchange.up_bytes))
    assert isinstance(every, int)
    intervals = math.lcm(*exchange.schedule.multiples)  # after which the pattern of sends repeats
    slowest_s = max(each.step_s for each in simulation.learners)
    num_steps = sum(CALLED_ROUNDS) * intervals * every * sum(slowest_s / each.step_s for each in simulation.learners)
    if num_steps > MOST_STEPS:
        raise ConfigError(
            f"called rounds at H = {every} are {num_steps:.3g} inner steps to simulate, more than {MOST_STEPS:,}; "
            "lower H, or leave out learners that are far faster than the others."
        )
    until_s = CALLED_PERIODS * every * slowest_s
    skipped, measured = (round(rounds * intervals * per_interval) for rounds in CALLED_ROUNDS)
    simulation.run(lambda: simulation.num_merges >= skipped or simulation.now_s >= until_s)
    before = _counts(simulation)
    simulation.run(lambda: simulation.num_merges >= skipped + measured or simulation.now_s >= until_s)
    steps, merges, contributions, stale, adoptions = (b - a for a, b in zip(before, _counts(simulation), strict=True))
    return Prediction(
        (1.0,) * num,
        steps / num / (merges / per_interval) if merges else math.inf,
        stale / adoptions if adoptions else math.inf,
        contributions / merges if merges else 0.0,
        simulation.spans,
    )


def _counts(simulation: SimulatedRounds) -> tuple[int, ...]:
    """Steps, merges, contributions, stale steps and adoptions so far."""
    steps, merges = sum(learner.core.step for learner in simulation.learners), simulation.num_merges
    return steps, merges, simulation.num_contributions, simulation.stale_steps, simulation.num_adoptions


def star_network(
    num_learners: int,
    up_bit_per_s: float,
    down_bit_per_s: float,
    latency_s: float = 0.0,
    syncer_bit_per_s: float = math.inf,
) -> Network:
    """Return a network of equal learner links and the syncer's own link, which has one rate in both directions."""
    links = {"syncer up": syncer_bit_per_s, "syncer down": syncer_bit_per_s}
    paths = []
    for i in range(num_learners):
        links |= {f"learner {i} up": up_bit_per_s, f"learner {i} down": down_bit_per_s}
        paths.append(Route((f"learner {i} up", "syncer down"), (f"learner {i} down", "syncer up"), latency_s))
    return Network(links, paths)
