"""Compute utilisation of a method on a link: the part of the time in which a learner computes, in the long run.

The model is the papers' graph of compute nodes and reductions (`dag.py`), with equal learners that do everything at the
same time. Where the long run has a closed form it is used; elsewhere the graph is run until it is periodic. Every
reduction is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from diloco.core.codecs.formats import wire_format
from diloco.errors import ConfigError
from diloco.planning.dag import Costs, Pattern, steady_utilization
from diloco.planning.settings import Setting
from diloco.planning.workload import Workload

PRECISION = 1e-6
"""Of a bandwidth that is searched for, relative."""
_WIDEST = 2.0**30
"""Times the bandwidth that carries a period's bits in a period's compute: what is not reached with it is never
reached."""


def strided(num_layers: int, num_fragments: int) -> list[tuple[int, ...]]:
    """The layers (1..L) of each fragment in the order of the backward pass; fragment i has i + 1, i + 1 + P, …."""
    return [
        tuple(range(num_layers, 0, -1)[(num_layers - 1 - i) % num_fragments :: num_fragments])
        for i in range(num_fragments)
    ]


def pattern_of(num_layers: int, setting: Setting) -> Pattern:
    """The pattern of `diloco.core.schedule`: each fragment once in H steps, spread evenly."""
    schedule, fragments = setting.schedule, strided(num_layers, setting.num_fragments)
    layers_after = {
        step: sorted((layer for p in schedule.sends(step) for layer in fragments[p]), reverse=True)
        for step in sorted(set(schedule.offsets or ()))
    }
    return Pattern(setting.sync_every, layers_after, setting.overlap)


def costs_of(workload: Workload, setting: Setting, bit_per_s: float, down_bit_per_s: float | None = None) -> Costs:
    """Durations of the nodes on a link of `bit_per_s`; down `down_bit_per_s`, the same by default."""
    if not bit_per_s > 0 or (down_bit_per_s is not None and not down_bit_per_s > 0):
        raise ConfigError(
            f"a link of {min(bit_per_s, down_bit_per_s or bit_per_s):g} bit/s carries nothing; give more than 0."
        )
    num_values, L = workload.num_parameters / workload.num_layers, workload.num_layers  # noqa: N806 - the papers' name
    up_s = wire_format(setting.up).bits_per_value * num_values / bit_per_s
    down_s = (
        0.0
        if setting.down is None
        else wire_format(setting.down).bits_per_value * num_values / (down_bit_per_s or bit_per_s)
    )
    return Costs(L, workload.step_s / (3 * L), up_s, down_s, setting.latency_s)


def utilization(workload: Workload, setting: Setting, bit_per_s: float, down_bit_per_s: float | None = None) -> float:
    """The part of the time in which a learner computes, 0 to 1.

    Arguments:
        workload, setting: the model and the method.
        bit_per_s: what the link carries; infinite: only latency counts.
        down_bit_per_s: the other direction, where answers have a codec of their own; None: the same.

    Raises:
        ConfigError: a bandwidth that is not above 0, or decoupled learners, which never wait (`star.py`).
    """
    if setting.method == "decoupled":
        raise ConfigError("decoupled learners never wait; what they need of a link is a matter of their syncer's pace.")
    costs = costs_of(workload, setting, bit_per_s, down_bit_per_s)
    pattern = pattern_of(workload.num_layers, setting)
    return closed_form(pattern, costs) if has_closed_form(pattern) else steady_utilization(pattern, costs)


def required_bit_per_s(workload: Workload, setting: Setting, target: float) -> float:
    """The smallest bandwidth with a utilisation of at least `target` (0 to 1); infinite where there is none."""
    period_s = setting.sync_every * workload.step_s
    bits = workload.num_parameters * wire_format(setting.up).bits_per_value
    return smallest_rate(lambda rate: utilization(workload, setting, rate), target, start=bits / period_s)


def smallest_rate(value: Callable[[float], float], target: float, start: float, precision: float = PRECISION) -> float:
    """The smallest rate where a rising `value` is at least `target`, by bisection; infinite where it is never.

    Raises:
        ConfigError: a target that is not above 0 and at most 1.
    """
    if not 0 < target <= 1:
        raise ConfigError(f"a target of {100 * target:g} % cannot be; give percentages above 0 and up to 100.")
    if value(math.inf) < target:
        return math.inf
    high = start
    while value(high) < target:
        high *= 4
        if high > start * _WIDEST:
            return math.inf
    low = high / 4
    while value(low) >= target:
        low, high = low / 4, low
    while high > low * (1 + precision):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if value(middle) >= target else (middle, high)
    return high


# --- closed forms -----------------------------------------------------------------------------------------------------


def has_closed_form(pattern: Pattern) -> bool:
    """Whether there is no overlap, or the whole model is sent at once."""
    return pattern.overlap == 0 or len(pattern.layers_after) == 1


def closed_form(pattern: Pattern, costs: Costs) -> float:
    """Compute ÷ wall clock of an endless run.

    The period λ of H steps, where what is launched in step t would be there s_t after the end of that step (as its
    lowest layer's forward pass sees it), on a link that was free:

        τ = 0    λ = H·C + Σ_t max(0, s_t): all that is launched is waited for at once
        one t    λ = max(H·C, L·c_up, L·c_down, (s + ((m + 1)·H − τ)·C) / (m + 1)),  m = ⌊τ / H⌋: compute alone, the
                 link alone, or from a launch over the forward pass that waits for it to the next launch but m

    Raises:
        ConfigError: neither holds.
    """
    compute_s, tau = pattern.period * costs.step_s, pattern.overlap
    if tau == 0:
        stalls = (max(0.0, late_s(costs, layers)) for layers in pattern.layers_after.values())
        return compute_s / (compute_s + sum(stalls))
    if len(pattern.layers_after) != 1:
        raise ConfigError(
            f"launches in {len(pattern.layers_after)} steps of a period with an overlap of {tau} steps have no closed "
            "form; run the graph."
        )
    [layers] = pattern.layers_after.values()
    turns = tau // pattern.period + 1
    loop_s = (late_s(costs, layers) + (turns * pattern.period - tau) * costs.step_s) / turns
    return compute_s / max(compute_s, len(layers) * max(costs.up_s, costs.down_s), loop_s)


def late_s(costs: Costs, layers: Sequence[int]) -> float:
    """How long after its turn in the next step's forward pass the lowest of these layers is there, if nothing else is
    on the link.

    The first of a burst of k may hold up the others: with b_i the time at which the i-th is launched, n = k − i + 1,

        max_i b_i + max(c_up + n·c_down, n·c_up + c_down) + 2·latency
        max_i b_i + n·c_up + latency                                       where a reduction is one pass

    It is linear in the layers between that two passes may change over at, so one of the ends is the worst.
    """
    up, down, k = costs.up_s, costs.down_s, len(layers)
    there_s = -math.inf
    for n, layer in zip(range(k, 0, -1), layers, strict=True):
        passes_s = max(up + n * down, n * up + down) if down else n * up
        there_s = max(there_s, costs.launch_s(layer) + passes_s)
    there_s += costs.latency_s * (2 if down else 1)
    return there_s - costs.launch_s(1) - (layers[-1] - 1) * costs.node_s
