"""Compute utilisation of a method on a link: the share of time in which a learner computes, in the steady state.

The model is the papers': inner steps are a graph of compute nodes and reductions, executed event by event, for equal
learners that do everything at the same time. A learner's processor executes one node at a time: forward through layers
1..L, then for l = L..1 the backward pass by activations (not for l = 1) and by parameters. Each of these 3L − 1 nodes
takes u seconds, a step C = (3L − 1)·u. The reduction of a layer is queued when its backward pass by parameters ends;
the link is first-in-first-out. A reduction of layer l launched in step t must complete before layer l's forward pass of
step t + 1 + τ, which waits for it.

Streaming DiLoCo, arXiv 2501.18512, section 3.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco.core.codecs.formats import wire_format
from diloco.errors import ConfigError, DilocoError
from diloco.planning.settings import Setting
from diloco.planning.workload import Workload
from diloco.report.drawing import Kind, Span

ROUNDING = 1e-10
"""Relative rounding error of a period: times are sums of many floats."""
MAX_PERIODS = 2000
LONGEST_CYCLE = 100
"""Most periods in one cycle of the state; in practice a small whole number."""


@dataclass(frozen=True)
class Pattern:
    """The layers that are reduced after each step, periodically.

    Attributes:
        period: in steps.
        layers_after: by step (1..period), the layers (1..L) launched in it, in the order of the backward pass, L first.
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
        """Reductions in a period."""
        return sum(map(len, self.layers_after.values()))


@dataclass(frozen=True)
class Costs:
    """Durations of the nodes, in seconds.

    Attributes:
        num_layers: L.
        node_s: u, of a compute node.
        up_s: of sending one layer.
        down_s: of returning its result on the other direction of the link; 0: a reduction is one pass.
        latency_s: of each pass; it does not occupy the link.
    """

    num_layers: int
    node_s: float
    up_s: float
    down_s: float = 0.0
    latency_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Compute time of an inner step: C."""
        return (3 * self.num_layers - 1) * self.node_s

    def launch_s(self, layer: int) -> float:
        """Time from the end of the forward pass to the end of the layer's backward pass by parameters."""
        return (2 * (self.num_layers - layer + 1) - (layer == 1)) * self.node_s


class Execution:
    """The execution of the graph, step by step.

    Attributes:
        now_s: end of the newest step.
        step: its number.
        waited_s: total time in which forward passes waited for reductions.
        trace: transfers and waiting so far; None: not traced.
    """

    def __init__(self, pattern: Pattern, costs: Costs, *, traced: bool = False) -> None:
        self.pattern, self.costs = pattern, costs
        self.now_s = 0.0
        self.step = 0
        self.waited_s = 0.0
        self.trace: list[Span] | None = [] if traced else None
        self._up_free_s = 0.0
        self._down_free_s = 0.0
        self._due: dict[int, list[tuple[int, float]]] = {}  # by step: (layer, completion time), layers ascending

    def advance(self) -> None:
        """Execute one inner step."""
        self.step += 1
        forward_ends_s = self._forward(self._due.pop(self.step, ()))
        costs = self.costs
        launched = self.pattern.launched(self.step)
        arrivals = [(layer, self._reduce(layer, forward_ends_s + costs.launch_s(layer))) for layer in launched]
        if arrivals:
            self._due[self.step + 1 + self.pattern.overlap] = arrivals[::-1]
        self.now_s = forward_ends_s + costs.launch_s(1)

    def _note(self, kind: Kind, begin_s: float, end_s: float) -> None:
        if self.trace is not None:
            self.trace.append(Span(begin_s, end_s, kind))

    def advance_to(self, step: int) -> None:
        """Execute up to the end of inner step `step`; steps without a launch or a due reduction are skipped at once."""
        launches = sorted(self.pattern.layers_after)
        while self.step < step:
            position = self.step % self.pattern.period
            launch = next((each for each in launches if each > position), self.pattern.period + launches[0])
            idle = min([self.step - position + launch, step + 1, *self._due]) - self.step - 1
            if idle > 0:
                self.step += idle
                self.now_s += idle * self.costs.step_s
            if self.step < step:
                self.advance()

    def _forward(self, arrivals: Sequence[tuple[int, float]]) -> float:
        """Return the end of a forward pass, some layers of which wait for their reductions."""
        now_s, done, node_s = self.now_s, 0, self.costs.node_s
        for layer, at_s in arrivals:
            now_s += (layer - 1 - done) * node_s
            done = layer - 1
            if at_s > now_s:
                self._note("waiting", now_s, at_s)
                self.waited_s += at_s - now_s
                now_s = at_s
        return now_s + (self.costs.num_layers - done) * node_s

    def _reduce(self, layer: int, ready_s: float) -> float:
        """Queue a layer's reduction, ready at `ready_s`; return its completion time."""
        costs, start_s = self.costs, max(self._up_free_s, ready_s)
        self._up_free_s = start_s + costs.up_s
        self._note("up", start_s, self._up_free_s)
        sent_s = self._up_free_s + costs.latency_s
        if not costs.down_s:
            return sent_s
        start_s = max(self._down_free_s, sent_s)
        self._down_free_s = start_s + costs.down_s
        self._note("down", start_s, self._down_free_s)
        return self._down_free_s + costs.latency_s

    def ends_s(self) -> float:
        """Time at which the newest step has ended and every reduction due at the start of the next one is complete."""
        due = (at_s for step, arrivals in self._due.items() if step <= self.step + 1 for _, at_s in arrivals)
        return max([self.now_s, *due])

    def state(self) -> tuple[float, ...]:
        """The times that determine the future, in an order that depends only on the step's position in the period."""
        due = (at_s for _, arrivals in sorted(self._due.items()) for _, at_s in arrivals)
        return (self.now_s, self._up_free_s, *((self._down_free_s,) if self.costs.down_s else ()), *due)


def run_utilization(pattern: Pattern, costs: Costs, num_steps: int) -> float:
    """Compute ÷ wall clock over the first `num_steps` steps, including the reductions that the next step waits for."""
    execution = Execution(pattern, costs)
    execution.advance_to(num_steps)
    return num_steps * costs.step_s / execution.ends_s()


def steady_utilization(pattern: Pattern, costs: Costs) -> float:
    """Compute ÷ wall clock of an endless run.

    All times are maxima of sums of earlier ones, so the state x (`Execution.state`) becomes periodic: after some
    periods it grows by λ in each. For every x, min_i (x_i(k + j) − x_i(k)) / j ≤ λ ≤ max_i (…) / j (Collatz and
    Wielandt), and λ is at least a period's compute time and its time on either direction of the link. The execution
    stops when the bounds meet.

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
                break  # other reductions were in flight then
            growths = [later - sooner for later, sooner in zip(newest, earlier, strict=True)]
            least_s, most_s = max(least_s, min(growths) / back), min(most_s, max(growths) / back)
            if most_s - least_s <= ROUNDING * most_s:
                is_hidden = execution.waited_s == waited_s and most_s - compute_s <= ROUNDING * most_s
                return 1.0 if is_hidden else compute_s / max(most_s, compute_s)
        states.appendleft(newest)
    raise DilocoError(f"the utilisation did not converge in {MAX_PERIODS} periods; change the bandwidth a little.")


# --- patterns and costs of a method -----------------------------------------------------------------------------------


def strided(num_layers: int, num_fragments: int) -> list[tuple[int, ...]]:
    """The layers (1..L) of each fragment in the order of the backward pass: fragment i has i + 1, i + 1 + P, …."""
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
        raise ConfigError(f"a link of {bit_per_s:g} bit/s transfers nothing; give more than 0.")
    layer_values, num_layers = workload.num_parameters / workload.num_layers, workload.num_layers
    up_s, down_s = (
        0.0 if codec is None else wire_format(codec).bits_per_value * layer_values / bit_per_s
        for codec in (setting.up, setting.down)
    )
    return Costs(num_layers, workload.step_s / (3 * num_layers), up_s, down_s, setting.latency_s)


def utilization(workload: Workload, setting: Setting, bit_per_s: float) -> float:
    """The share of time in which a learner computes, 0 to 1, on links of `bit_per_s`; infinity leaves only latency.

    Raises:
        ConfigError: a bandwidth that is not above 0, or decoupled learners, which never wait (see `prediction.py`).
    """
    if setting.method == "decoupled":
        raise ConfigError("decoupled learners never wait; their links limit the pace of the syncer's merges instead.")
    return steady_utilization(pattern_of(workload.num_layers, setting), costs_of(workload, setting, bit_per_s))
