"""Compute utilisation of a method on a link: the part of the time in which a learner computes, in the long run.

The model is the papers': inner steps as a graph of compute nodes and reductions, run event by event, with equal
learners that do everything at the same time. A learner's processor does one thing at a time: forward through layers
1..L, then for l = L..1 the backward pass by activations (not for l = 1) and by parameters. Each of these 3L − 1 nodes
takes u seconds, a step C = (3L − 1)·u. The reduction of a layer is queued when its backward pass by parameters ends;
its link is first-in-first-out. What step t launched for layer l has to be there before layer l's forward pass of step
t + 1 + τ. Every reduction is waited for.

Streaming DiLoCo, arXiv 2501.18512, section 3.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from diloco.core.codecs.formats import wire_format
from diloco.errors import ConfigError, DilocoError
from diloco.planning.settings import Setting
from diloco.planning.workload import Workload

ROUNDING = 1e-10
"""Of a period: times are sums of many floats."""
MAX_PERIODS = 2000
LONGEST_CYCLE = 100
"""Periods after which the state may repeat; small whole numbers in practice."""


@dataclass(frozen=True)
class Pattern:
    """The layers that are reduced after each step, repeating.

    Attributes:
        period: steps after which it repeats.
        layers_after: step 1..period → the layers (1..L) launched in it, in the order of the backward pass, L first.
        overlap: τ.
    """

    period: int
    layers_after: Mapping[int, Sequence[int]]
    overlap: int

    def launched(self, step: int) -> Sequence[int]:
        """The layers launched in inner step `step` ≥ 1."""
        return self.layers_after.get((step - 1) % self.period + 1, ())

    @property
    def num_launched(self) -> int:
        """Reductions of a period."""
        return sum(map(len, self.layers_after.values()))


@dataclass(frozen=True)
class Costs:
    """Durations of the nodes, in seconds.

    Attributes:
        num_layers: L.
        node_s: u, a compute node.
        up_s: one layer on the link.
        down_s: its result on the other direction of the link, once it is reduced; 0: a reduction is one pass.
        latency_s: of each pass; does not occupy the link.
    """

    num_layers: int
    node_s: float
    up_s: float
    down_s: float = 0.0
    latency_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Compute of an inner step: C."""
        return (3 * self.num_layers - 1) * self.node_s

    def launch_s(self, layer: int) -> float:
        """Time from the end of the forward pass to the end of the layer's backward pass by parameters."""
        return (2 * (self.num_layers - layer + 1) - (layer == 1)) * self.node_s


IntervalKind = Literal["compute", "wait", "up", "down"]


class Interval(NamedTuple):
    """One interval of a run: the processor computes or waits, or a layer is on the link; `step` is the newest one."""

    kind: IntervalKind
    start_s: float
    end_s: float
    step: int
    layer: int


class Execution:
    """A run from its first step on.

    Attributes:
        now_s: when the newest step ended.
        step: its number.
        waited_s: how long forward passes have waited for reductions.
        trace: what happened, where it is asked for.
    """

    def __init__(self, pattern: Pattern, costs: Costs, *, traced: bool = False) -> None:
        self.pattern, self.costs = pattern, costs
        self.now_s = 0.0
        self.step = 0
        self.waited_s = 0.0
        self.trace: list[Interval] | None = [] if traced else None
        self._up_free_s = 0.0
        self._down_free_s = 0.0
        self._due: dict[int, list[tuple[int, float]]] = {}  # by step: (layer, when it is there), layers ascending

    def advance(self) -> None:
        """Run one more inner step."""
        self.step += 1
        start_s = self.now_s
        forward_ends_s = self._forward(self._due.pop(self.step, ()))
        costs = self.costs
        launched = self.pattern.launched(self.step)
        arrivals = [(layer, self._reduce(layer, forward_ends_s + costs.launch_s(layer))) for layer in launched]
        if arrivals:
            self._due[self.step + 1 + self.pattern.overlap] = arrivals[::-1]
        self.now_s = forward_ends_s + costs.launch_s(1)
        self._note("compute", start_s, self.now_s)

    def _note(self, kind: IntervalKind, start_s: float, end_s: float, layer: int = 0) -> None:
        if self.trace is not None:
            self.trace.append(Interval(kind, start_s, end_s, self.step, layer))

    def advance_to(self, step: int) -> None:
        """Run to the end of inner step `step`; stretches in which nothing is launched or due are skipped at once."""
        launches = sorted(self.pattern.layers_after)
        while self.step < step:
            place = self.step % self.pattern.period
            launch = next((each for each in launches if each > place), self.pattern.period + launches[0])
            idle = min([self.step - place + launch, step + 1, *self._due]) - self.step - 1
            if idle > 0:
                begin_s, self.step = self.now_s, self.step + idle
                self.now_s += idle * self.costs.step_s
                self._note("compute", begin_s, self.now_s)
            if self.step < step:
                self.advance()

    def _forward(self, arrivals: Sequence[tuple[int, float]]) -> float:
        """When the forward pass ends, of which some layers wait for their reduction."""
        now_s, done, node_s = self.now_s, 0, self.costs.node_s
        for layer, at_s in arrivals:
            now_s += (layer - 1 - done) * node_s
            done = layer - 1
            if at_s > now_s:
                self._note("wait", now_s, at_s, layer)
                self.waited_s += at_s - now_s
                now_s = at_s
        return now_s + (self.costs.num_layers - done) * node_s

    def _reduce(self, layer: int, ready_s: float) -> float:
        """When a layer's reduction that may begin at `ready_s` is there."""
        costs, start_s = self.costs, max(self._up_free_s, ready_s)
        self._up_free_s = start_s + costs.up_s
        self._note("up", start_s, self._up_free_s, layer)
        there_s = self._up_free_s + costs.latency_s
        if not costs.down_s:
            return there_s
        start_s = max(self._down_free_s, there_s)
        self._down_free_s = start_s + costs.down_s
        self._note("down", start_s, self._down_free_s, layer)
        return self._down_free_s + costs.latency_s

    def ends_s(self) -> float:
        """When the newest step has ended and all that the next step waits for at its start is there."""
        due = (at_s for step, arrivals in self._due.items() if step <= self.step + 1 for _, at_s in arrivals)
        return max([self.now_s, *due])

    def state(self) -> tuple[float, ...]:
        """The times that determine what follows, in an order that depends on the step's place in the period alone."""
        due = (at_s for _, arrivals in sorted(self._due.items()) for _, at_s in arrivals)
        return (self.now_s, self._up_free_s, *((self._down_free_s,) if self.costs.down_s else ()), *due)


def run_utilization(pattern: Pattern, costs: Costs, num_steps: int) -> float:
    """Compute ÷ wall clock over the first `num_steps` steps, and what the step after them waits for at its start."""
    execution = Execution(pattern, costs)
    for _ in range(num_steps):
        execution.advance()
    return num_steps * costs.step_s / execution.ends_s()


def steady_utilization(pattern: Pattern, costs: Costs) -> float:
    """Compute ÷ wall clock of an endless run.

    All times are maxima of sums of earlier ones, so the state x (what `Execution.state` gives) becomes periodic: after
    some periods it grows by λ in each. Whatever x is, min_i (x_i(k + j) − x_i(k)) / j ≤ λ ≤ max_i (…) / j (Collatz and
    Wielandt), and λ is no less than a period's compute, or its time on either direction of the link. The run ends when
    the bounds meet.

    Baccelli, Cohen, Olsder, Quadrat 1992, Synchronization and Linearity, chapter 3.

    Raises:
        DilocoError: the bounds do not meet in two thousand periods.
    """
    execution = Execution(pattern, costs)
    compute_s = pattern.period * costs.step_s
    least_s, most_s = max(compute_s, pattern.num_launched * max(costs.up_s, costs.down_s)), math.inf
    states: deque[tuple[float, ...]] = deque(maxlen=LONGEST_CYCLE)
    for _ in range(MAX_PERIODS):
        waited_s = execution.waited_s
        execution.advance_to(execution.step + pattern.period)
        newest = execution.state()
        for back, earlier in enumerate(states, start=1):
            if len(earlier) != len(newest):
                break  # from before as much was in flight as there is now
            growths = [later - sooner for later, sooner in zip(newest, earlier, strict=True)]
            least_s, most_s = max(least_s, min(growths) / back), min(most_s, max(growths) / back)
            if most_s - least_s <= ROUNDING * most_s:
                is_hidden = execution.waited_s == waited_s and most_s - compute_s <= ROUNDING * most_s
                return 1.0 if is_hidden else compute_s / max(most_s, compute_s)
        states.appendleft(newest)
    raise DilocoError(f"the utilisation did not settle in {MAX_PERIODS} periods; change the bandwidth a little.")


# --- of a method ------------------------------------------------------------------------------------------------------


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


def costs_of(workload: Workload, setting: Setting, bit_per_s: float) -> Costs:
    """Durations of the nodes on a link of `bit_per_s`, up and down."""
    if not bit_per_s > 0:
        raise ConfigError(f"a link of {bit_per_s:g} bit/s carries nothing; give more than 0.")
    layer_values, num_layers = workload.num_parameters / workload.num_layers, workload.num_layers
    up_s, down_s = (
        0.0 if codec is None else wire_format(codec).bits_per_value * layer_values / bit_per_s
        for codec in (setting.up, setting.down)
    )
    return Costs(num_layers, workload.step_s / (3 * num_layers), up_s, down_s, setting.latency_s)


def utilization(workload: Workload, setting: Setting, bit_per_s: float) -> float:
    """The part of the time in which a learner computes, 0 to 1, on links of `bit_per_s`; infinite: only latency counts.

    Raises:
        ConfigError: a bandwidth that is not above 0, or decoupled learners, which never wait (`star.py`).
    """
    if setting.method == "decoupled":
        raise ConfigError("decoupled learners never wait; what they need of a link is a matter of their syncer's pace.")
    return steady_utilization(pattern_of(workload.num_layers, setting), costs_of(workload, setting, bit_per_s))
