"""The graph of compute and reductions: against formulas where they are known, identities, and the search for a
bandwidth."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.planning.bandwidth import GraphLinkModel
from diloco.planning.bandwidth import required_bit_per_s as required
from diloco.planning.graph import (
    Costs,
    Execution,
    Pattern,
    costs_of,
    pattern_of,
    run_utilization,
    steady_utilization,
    strided,
    utilization,
)
from diloco.planning.settings import Setting, setting_for
from diloco.planning.workload import PRESETS, Workload

ONE_B = PRESETS["1b"]
SMALL = Workload("small", 1e6, 6, 0.017)


def required_bit_per_s(workload: Workload, setting: Setting, target: float) -> float:
    return required(GraphLinkModel(workload, setting), [target])[0]


@st.composite
def situations(draw: st.DrawFn) -> tuple[Pattern, Costs]:
    """Small graphs at all ratios of link to compute, so that each of them is the bottleneck of some."""
    num_layers = draw(st.integers(1, 9))
    num_fragments = draw(st.integers(1, num_layers))
    every = draw(st.integers(1, 20))
    tau = draw(st.one_of(st.just(0), st.integers(1, every), st.just(2 * every)))
    layer_s = 10 ** draw(st.floats(-3, 3))
    costs = Costs(
        num_layers,
        1.0,
        layer_s,
        draw(st.sampled_from([0.0, 0.3, 1.7])) * layer_s,
        draw(st.sampled_from([0.0, 0.4, 60.0])),
    )
    return pattern_of(num_layers, Setting("streaming", every, tau, num_fragments)), costs


@given(situations())
def test_the_long_run_is_what_events_come_to(situation: tuple[Pattern, Costs]) -> None:
    pattern, costs = situation
    execution, periods = Execution(pattern, costs), 150
    for _ in range(periods * pattern.period):
        execution.advance()
    half_s = execution.now_s
    for _ in range(periods * pattern.period):
        execution.advance()
    measured = periods * pattern.period * costs.step_s / (execution.now_s - half_s)
    # within a turn of the longest loop, at most three periods, at each end of the window
    assert steady_utilization(pattern, costs) == pytest.approx(measured, rel=0.02)


@given(situations())
def test_idle_stretches_are_passed_at_once(situation: tuple[Pattern, Costs]) -> None:
    one_by_one, at_once = Execution(*situation), Execution(*situation)
    for steps in (1, 7, 50):
        for _ in range(steps):
            one_by_one.advance()
        at_once.advance_to(at_once.step + steps)
        assert at_once.step == one_by_one.step
        assert at_once.state() == pytest.approx(one_by_one.state(), rel=1e-12)


def test_long_intervals_are_no_longer_to_plan() -> None:
    setting = setting_for(
        ONE_B, "streaming", sync_every=10**7, overlap=1
    )  # ten million steps one by one would take minutes
    assert required_bit_per_s(ONE_B, setting, 0.5) == pytest.approx(16e9 / (10**7 * 71 / 72 * 0.1), rel=0.01)


def late_s(costs: Costs, layers: Sequence[int]) -> float:
    """How long after its turn in the next step's forward pass the lowest of these layers is back, if nothing else is
    on the link: any of a burst may hold up those after it."""
    up, down, k = costs.up_s, costs.down_s, len(layers)
    back_s = -math.inf
    for n, layer in zip(range(k, 0, -1), layers, strict=True):
        passes_s = max(up + n * down, n * up + down) if down else n * up
        back_s = max(back_s, costs.launch_s(layer) + passes_s)
    return back_s + costs.latency_s * (2 if down else 1) - costs.launch_s(1) - (layers[-1] - 1) * costs.node_s


@given(situations())
def test_where_a_formula_is_known_events_come_to_it(situation: tuple[Pattern, Costs]) -> None:
    """Without overlap all that is launched is waited for at once. Of one launch in a period, compute alone, the link
    alone, or the way from it over the forward pass that waits for it to the next launch but m decides."""
    pattern, costs = situation
    compute_s, tau = pattern.period * costs.step_s, pattern.overlap
    if tau == 0:
        period_s = compute_s + sum(max(0.0, late_s(costs, layers)) for layers in pattern.layers_after.values())
    elif len(pattern.layers_after) == 1:
        [layers] = pattern.layers_after.values()
        turns = tau // pattern.period + 1
        loop_s = (late_s(costs, layers) + (turns * pattern.period - tau) * costs.step_s) / turns
        period_s = max(compute_s, len(layers) * max(costs.up_s, costs.down_s), loop_s)
    else:
        return
    # ROUNDING of a period, and of the sums of a few hundred floats in it
    assert steady_utilization(pattern, costs) == pytest.approx(compute_s / period_s, rel=1e-8)


def test_two_layers_by_hand() -> None:
    # u = 1: forward 1, 2; backward of layer 2 by activations, then by parameters (4), of layer 1 by parameters (5).
    # Layer 2 is on the link from 4 to 7 and layer 1 from 7 to 10: the next forward pass waits from 5 to 10.
    pattern = Pattern(1, {1: (2, 1)}, 0)
    execution = Execution(pattern, Costs(2, 1.0, 3.0), traced=True)
    execution.advance()
    assert (execution.now_s, execution.ends_s()) == (5.0, 10.0)
    execution.advance()
    assert execution.now_s == 15.0
    assert execution.trace is not None
    up, waiting = ((4.0, 7.0), (7.0, 10.0), (14.0, 17.0)), (5.0, 10.0)
    assert [(each.begin_s, each.end_s) for each in execution.trace if each.kind == "up"][:3] == list(up)
    assert next((each.begin_s, each.end_s) for each in execution.trace if each.kind == "waiting") == waiting
    assert steady_utilization(pattern, Costs(2, 1.0, 3.0)) == pytest.approx(0.5)
    # There and back: layer 2 is up from 4 to 7 and down from 8 to 10, layer 1 up from 7 to 10, down from 11 to 13;
    # there at 14.
    assert run_utilization(pattern, Costs(2, 1.0, 3.0, 2.0, 1.0), 1) == pytest.approx(5 / 14)


def test_a_free_link_costs_nothing_and_latency_is_paid_once_a_wait() -> None:
    step_s = 71 / 72 * 0.1  # 3L − 1 nodes of the printed step's 3L
    for method, latency_s, expected in [
        ("data-parallel", step_s, 1 / 2), ("diloco", step_s, 100 / 101), ("streaming", 0.0, 1.0), ("eager", 5.0, 1.0),
    ]:  # fmt: skip
        setting = setting_for(ONE_B, method, latency_s=latency_s)
        assert utilization(ONE_B, setting, math.inf) == pytest.approx(expected, rel=1e-12), method


def test_identities() -> None:
    for rate in (1e8, 1e9, 1e10, 1e11):
        whole = utilization(ONE_B, setting_for(ONE_B, "diloco"), rate)
        assert utilization(ONE_B, setting_for(ONE_B, "streaming", num_fragments=1), rate) == whole
        every_step = utilization(ONE_B, setting_for(ONE_B, "data-parallel"), rate)
        assert utilization(ONE_B, setting_for(ONE_B, "diloco", sync_every=1), rate) == every_step
        # half the bits on half the link, and a model and a step twice as large on the same link
        assert utilization(ONE_B, setting_for(ONE_B, "diloco", up="fp32"), 2 * rate) == pytest.approx(whole, rel=1e-12)
        twice = Workload("twice", 2e9, 24, 0.2)
        assert utilization(twice, setting_for(twice, "diloco"), rate) == pytest.approx(whole, rel=1e-12)


def test_more_bandwidth_and_more_overlap_never_hurt() -> None:
    rates = [1e6 * 2**i for i in range(8)]
    for overlap in range(9):
        setting = setting_for(SMALL, "streaming", sync_every=8, overlap=overlap, num_fragments=3)
        values = [utilization(SMALL, setting, rate) for rate in rates]
        assert values == sorted(values)
        if overlap:
            less = setting_for(SMALL, "streaming", sync_every=8, overlap=overlap - 1, num_fragments=3)
            # the same but for rounding where the link alone decides
            assert all(
                value >= utilization(SMALL, less, rate) - 1e-9 for value, rate in zip(values, rates, strict=True)
            )


def test_the_smallest_bandwidth_reaches_the_target_and_a_little_less_does_not() -> None:
    for method in ("data-parallel", "diloco", "streaming", "eager"):
        setting = setting_for(ONE_B, method)
        for target in (0.5, 0.8, 0.99):
            rate = required_bit_per_s(ONE_B, setting, target)
            assert utilization(ONE_B, setting, rate) >= target > utilization(ONE_B, setting, rate * (1 - 2e-6)), method


def test_a_target_that_is_never_reached_is_infinite() -> None:
    setting = setting_for(ONE_B, "data-parallel", latency_s=0.1)
    assert required_bit_per_s(ONE_B, setting, 0.49) < math.inf
    assert required_bit_per_s(ONE_B, setting, 0.51) == math.inf
    assert (
        required_bit_per_s(ONE_B, setting_for(ONE_B, "diloco"), 1.0) == math.inf
    )  # the last layer is always waited for
    hidden = required_bit_per_s(ONE_B, setting_for(ONE_B, "eager", num_fragments=1), 1.0)
    assert hidden == pytest.approx(16e9 / (100 * 0.1 * 71 / 72), rel=1e-5)  # the model once in 100 steps
    overlapped = required_bit_per_s(ONE_B, setting_for(ONE_B, "streaming", overlap=1), 1.0)
    assert utilization(ONE_B, setting_for(ONE_B, "streaming", overlap=1), overlapped) == 1.0


def test_every_reduction_of_an_eager_run_is_waited_for() -> None:
    # FP4 over a long run: about twice what is printed in arXiv 2502.12996, where half of the reductions come after the
    # end
    rates = [
        required_bit_per_s(ONE_B, setting_for(ONE_B, "eager", up="e3m0"), target) / 1e9 for target in (0.5, 0.8, 0.99)
    ]
    assert rates == pytest.approx(
        [0.2125, 0.34, 0.42], rel=0.02
    )  # target · 4.25 bits a value; compute catches up a little


def test_strided_fragments_hold_every_layer_once() -> None:
    for num_layers in range(1, 20):
        for num_fragments in range(1, num_layers + 1):
            fragments = strided(num_layers, num_fragments)
            assert sorted(layer for fragment in fragments for layer in fragment) == [*range(1, num_layers + 1)]
            for i, fragment in enumerate(fragments):
                assert fragment == tuple(sorted(fragment, reverse=True))
                assert {(layer - 1) % num_fragments for layer in fragment} == {i}


def test_cost_of_directions() -> None:
    setting = setting_for(SMALL, "diloco", up="e3m0", down="bf16", latency_s=0.5)
    costs = costs_of(SMALL, setting, 1e6)
    assert costs.up_s == pytest.approx(4.25 / 6)
    assert costs.down_s == pytest.approx(16 / 6)
    assert costs.step_s == pytest.approx(17 / 18 * SMALL.step_s)  # L − 1 of the 3L nodes are backward by activations


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("streming", {}, 'did you mean "streaming"'),
        ("streaming", {"num_fragments": 25}, "25 fragments do not fit a model of 24 layers"),
        ("streaming", {"num_fragments": 0}, "P = 0"),
        ("streaming", {"overlap": 101}, "longer than H = 100"),
        ("streaming", {"overlap": -1}, "an overlap of -1"),
        ("diloco", {"sync_every": 0}, "H = 0"),
        ("diloco", {"num_fragments": 2}, "use --method streaming"),
        ("data-parallel", {"sync_every": 100}, "use --method diloco"),
        ("data-parallel", {"overlap": 1}, "cannot overlap"),
        ("eager", {"overlap": 1}, "a whole outer step"),
        ("diloco", {"up": "fp4"}, "there is no codec 'fp4'"),
        ("diloco", {"latency_s": -1.0}, "0 or more"),
    ],
)
def test_settings_that_cannot_be(method: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        setting_for(ONE_B, method, **options)  # type: ignore[arg-type]


def test_bandwidths_and_targets_that_cannot_be() -> None:
    setting = setting_for(ONE_B, "diloco")
    for rate in (0.0, -1e9, math.nan):
        with pytest.raises(ConfigError, match="give more than 0"):
            utilization(ONE_B, setting, rate)
    for target in (0.0, 1.1, -0.5):
        with pytest.raises(ConfigError, match="up to 100"):
            required_bit_per_s(ONE_B, setting, target)


def test_near_a_change_of_bottleneck_the_long_run_is_still_found() -> None:
    rng = random.Random(0)
    setting = setting_for(SMALL, "streaming", sync_every=12, overlap=6, num_fragments=3)
    equal_s = 12 * costs_of(SMALL, setting, 1.0).step_s
    for _ in range(50):  # the link's time of a period is that of its compute, but for a hair
        rate = 1e6 * 16 / equal_s * (1 + rng.choice([-1, 1]) * 10 ** rng.uniform(-12, -2))
        assert 0.97 < utilization(SMALL, setting, rate) <= 1
