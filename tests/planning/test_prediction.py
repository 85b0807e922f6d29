"""Learners around a syncer: against sums by hand, identities, and what queues and unequal learners do."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core.quorum import Called
from diloco.core.schedule import Schedule
from diloco.errors import ConfigError
from diloco.planning.bandwidth import SyncerLinkModel
from diloco.planning.exchange_plan import ExchangePlan, Merging, exchange_of
from diloco.planning.prediction import predict, star_network
from diloco.planning.settings import ExpertSetting, setting_for
from diloco.planning.workload import PRESETS, Workload

ONE_B = PRESETS["1b"]
MEGABYTE = 1e6


def whole(every: int = 10, tau: int = 0, merging: Merging | None = None) -> ExchangePlan:
    """One fragment, one megabyte up and two down."""
    return ExchangePlan(Schedule(every, 1, tau), [MEGABYTE], [2 * MEGABYTE], merging or Merging())


def test_a_round_trip_by_hand() -> None:
    # 8 Mbit/s: 1 s up, 2 s down; four latencies; a merge of 0.1 s and 2 MB at 20 MB/s
    network = star_network(2, 8e6, 8e6, latency_s=0.05)
    found = predict(network, [0.2, 0.2], whole(merging=Merging(0.1, 20e6)))
    assert found.utilization == pytest.approx([2 / (2 + 1 + 2 + 4 * 0.05 + 0.2)] * 2, rel=1e-12)
    assert (found.period_steps, found.stale_steps, found.contributors) == (10, 0, 2)


def test_overlap_hides_what_fits_into_it_and_no_more() -> None:
    trip_s = 3.0 + 4 * 0.05
    for tau in range(11):
        network = star_network(2, 8e6, 8e6, latency_s=0.05)
        found = predict(network, [0.4, 0.4], whole(tau=tau))
        # τ = H: an answer is waited for a whole interval after its send, which is at the end of the wait for the one
        # before
        turns = tau // 10 + 1
        period_s = max(4.0, (trip_s + (10 * turns - tau) * 0.4) / turns)
        assert found.utilization == pytest.approx([4.0 / period_s] * 2, rel=1e-12), tau


def test_the_slowest_learner_sets_the_pace() -> None:
    network = star_network(3, math.inf, math.inf)
    found = predict(network, [0.1, 0.2, 0.4], whole(tau=3))
    assert found.utilization == pytest.approx([0.25, 0.5, 1.0], rel=1e-12)


def test_the_syncers_link_is_shared() -> None:
    # 4 learners of 8 Mbit/s on a syncer of 16: 4 Mbit/s each
    network = star_network(4, 8e6, 8e6, syncer_bit_per_s=16e6)
    found = predict(network, [0.1] * 4, whole())
    assert found.utilization == pytest.approx([1 / (1 + 2 + 4)] * 4, rel=1e-12)


def test_fragments_queue_on_a_learners_connection() -> None:
    # Both fragments are sent at one boundary, and the second push begins when the first is acknowledged: 1 + 2·0.5
    # later.
    # Its answer is the last: 1 s up, 0.5 to the syncer, 0.5 notice, 0.5 request, 2 s down (the link is free by then),
    # 0.5 back.
    exchange = ExchangePlan(Schedule(10, 2, 0, (10, 10)), [MEGABYTE] * 2, [2 * MEGABYTE] * 2)
    found = predict(star_network(1, 8e6, 8e6, 0.5), [0.1], exchange)
    first_down_ends_s = 1 + 0.5 + 0.5 + 0.5 + 2 + 0.5
    second_asked_s = max(1 + 1.0 + 1 + 0.5 + 0.5, first_down_ends_s)
    assert found.utilization[0] == pytest.approx(1 / (1 + second_asked_s + 0.5 + 2 + 0.5), rel=1e-12)


def test_merges_are_one_after_the_other() -> None:
    exchange = ExchangePlan(Schedule(10, 2, 0, (10, 10)), [MEGABYTE] * 2, [MEGABYTE] * 2, Merging(fixed_s=3.0))
    found = predict(star_network(1, math.inf, math.inf), [0.1], exchange)
    assert found.utilization[0] == pytest.approx(1 / (1 + 6), rel=1e-12)


@settings(max_examples=25)
@given(
    method=st.sampled_from(["diloco", "streaming", "eager", "decoupled"]), rate=st.sampled_from([3e5, 2e6, 2e7]),
    latency_s=st.sampled_from([0.0, 0.03]), syncer=st.sampled_from([math.inf, 3e6]), num=st.integers(1, 4),
)  # fmt: skip
def test_equal_learners_are_one_that_stands_for_all(
    method: str, rate: float, latency_s: float, syncer: float, num: int
) -> None:
    workload = Workload("small", 1e5, 6, 0.05)
    setting = setting_for(workload, method, sync_every=12, latency_s=latency_s)
    merging = Merging(0.01, 1e7)
    one = SyncerLinkModel(workload, setting, (1.0,) * num, syncer, merging).predict(rate)
    network = star_network(num, rate, rate, latency_s, syncer)
    all_ = predict(network, [0.05] * num, exchange_of(workload, setting, merging))
    assert one.utilization[0] == pytest.approx(all_.mean_utilization, rel=1e-9)
    assert (one.period_steps, one.stale_steps) == pytest.approx(
        (all_.period_steps, all_.stale_steps), rel=0.1
    )  # whole steps
    assert one.contributors == all_.contributors == num


def test_a_run_of_a_few_steps_begins_with_nothing_in_flight() -> None:
    network = star_network(1, 8e6, 8e6)
    found = predict(network, [0.1], whole(every=10, tau=10), num_steps=25)
    # the send after step 10 is due after step 20, one second later: two seconds short; nothing else is due
    assert found.utilization[0] == pytest.approx(2.5 / 4.5, rel=1e-12)


def test_activities_fill_a_learners_time() -> None:
    network = star_network(2, 8e6, 8e6, latency_s=0.05)
    found = predict(network, [0.2, 0.3], whole(), num_steps=40)
    for spans in found.spans:
        own = sorted((each.begin_s, each.end_s) for each in spans if each.kind in ("compute", "waiting"))
        assert own[0][0] == 0.0
        assert all(before[1] == pytest.approx(after[0]) for before, after in pairwise(own))
        on_the_wire = [each for each in spans if each.kind == "up"]
        assert [each.end_s - each.begin_s for each in on_the_wire] == pytest.approx([1.0] * len(on_the_wire))


# --- called rounds ----------------------------------------------------------------------------------------------------


def called(every: int = 12, num_fragments: int = 4, quorum: Called | None = None) -> ExchangePlan:
    size = [MEGABYTE] * num_fragments
    return ExchangePlan(Schedule(every, num_fragments, 2), size, size, called=quorum or Called())


def test_on_a_fast_network_a_fragment_is_merged_every_h_steps_and_an_answer_is_a_step_old() -> None:
    found = predict(star_network(3, 1e12, 1e12, 0.001), [0.1] * 3, called())
    assert found.utilization == (1.0,) * 3
    assert found.period_steps == pytest.approx(12, rel=0.02)
    assert found.stale_steps == 1
    assert found.contributors == 3


def test_on_a_slow_network_the_link_sets_the_period() -> None:
    # 4 MB at 0.8 Mbit/s are 40 s, 400 steps of 0.1 s
    found = predict(star_network(2, 8e5, 8e5), [0.1] * 2, called())
    assert found.period_steps == pytest.approx(400, rel=0.05)
    assert found.stale_steps == pytest.approx(
        found.period_steps, rel=0.05
    )  # all the time there is something on its way
    assert found.utilization == (1.0, 1.0)


def test_a_slow_learner_holds_nobody_up() -> None:
    found = predict(star_network(3, 1e12, 1e12), [0.1, 0.1, 5.0], called(quorum=Called(grace=0.0)))
    assert found.period_steps == pytest.approx(12, rel=0.1)  # of the mean learner
    assert 2 < found.contributors < 3  # late work is in the next merge
    waited_for = predict(star_network(3, 1e12, 1e12), [0.1, 0.1, 5.0], called(quorum=Called(at_least=3)))
    assert waited_for.contributors == 3
    assert waited_for.period_steps > found.period_steps


def test_a_link_that_carries_next_to_nothing_is_given_up() -> None:
    found = predict(star_network(1, 10.0, 10.0), [0.1], called())
    assert (found.period_steps, found.stale_steps, found.contributors) == (math.inf, math.inf, 0.0)


def test_pace_is_what_a_link_is_judged_by() -> None:
    setting = setting_for(ONE_B, "decoupled")
    fast, slow = (SyncerLinkModel(ONE_B, setting, (1.0,) * 8).value(rate) for rate in (1e13, 16e9 / 4.8))
    assert fast == 1.0
    assert slow == pytest.approx(0.5, rel=0.03)
    streaming = setting_for(ONE_B, "streaming", overlap=5)
    assert SyncerLinkModel(ONE_B, streaming, (1.0, 0.5)).value(1e13) == pytest.approx(0.75, rel=1e-3)


def test_bytes_are_those_of_the_codecs() -> None:
    workload = Workload("small", 900, 9, 0.1)
    exchange = exchange_of(workload, setting_for(workload, "streaming", num_fragments=3, up="e3m0", down="bf16"))
    assert exchange.up_bytes == [300 // 2 + 5 * 2] * 3
    assert exchange.down_bytes == [600] * 3
    assert exchange_of(workload, setting_for(workload, "diloco", up="bf16")).down_bytes == [1800]


def test_experts_apart_are_sent_less_often_by_those_who_train_them_and_received_by_all() -> None:
    workload = Workload("mixture", 900, 9, 0.1, expert_parameters=600)
    experts = ExpertSetting(groups=4, every=2, trained=1, codec="fp32")
    exchange = exchange_of(workload, setting_for(workload, "diloco", up="bf16", experts=experts))
    assert exchange.up_bytes == [600 / 4] * 4 + [600]  # each of the four groups by a quarter of the learners
    assert exchange.down_bytes == [600.0] * 4 + [600]
    assert exchange.schedule.multiples == (2, 2, 2, 2, 1)
    assert exchange.per_interval(exchange.up_bytes) == 600 / 2 + 600
    assert exchange.per_interval(exchange.down_bytes) == 4 * 600 / 2 + 600


def test_a_fragment_that_is_sent_half_as_often_is_waited_for_half_as_often() -> None:
    # 8 Mbit/s: 1 s up, 2 s down. After step 10 both fragments, the second up while the first comes down; after 20 one.
    schedule = Schedule(10, 2, multiples=(2, 1))
    exchange = ExchangePlan(schedule, [MEGABYTE] * 2, [2 * MEGABYTE] * 2)
    found = predict(star_network(2, 8e6, 8e6), [0.2, 0.2], exchange)
    assert found.utilization == pytest.approx([4 / (4 + 5 + 3)] * 2, rel=1e-12)
    called_ = ExchangePlan(Schedule(24, 2, 2, multiples=(4, 1)), [MEGABYTE] * 2, [MEGABYTE] * 2, called=Called())
    assert predict(star_network(2, 1e12, 1e12), [0.1] * 2, called_).period_steps == pytest.approx(24, rel=0.05)


def test_experts_that_are_not_held_are_neither_sent_nor_received_nor_waited_for() -> None:
    workload = Workload("mixture", 900, 9, 0.1, expert_parameters=600)
    held = ExpertSetting(groups=4, held=0.5)
    exchange = exchange_of(workload, setting_for(workload, "diloco", up="bf16", down="fp32", experts=held))
    assert exchange.held == [{0, 1, 4}, {2, 3, 4}]
    assert exchange.up_bytes == [150.0] * 4 + [600]  # each of the four groups by half of the learners
    assert exchange.per_interval(exchange.down_bytes) == 2 * 600 + 1200
    assert len(exchange_of(workload, setting_for(workload, "diloco", experts=replace(held, held=0.75))).held) == 4


def test_holders_of_a_group_wait_for_it_and_the_others_for_them_at_the_trunk() -> None:
    # 8 Mbit/s: 1 s up, 1 s down. Sent after steps 3 and 6 by one learner each, after 10 by both.
    sets = [frozenset({0, 2}), frozenset({1, 2})]
    sizes = [MEGABYTE / 2, MEGABYTE / 2, MEGABYTE]
    once = ExchangePlan(Schedule(10, 3), sizes, sizes, held=sets)
    assert predict(star_network(2, 8e6, 8e6), [0.2, 0.2], once).utilization == pytest.approx([2 / 6] * 2, rel=1e-12)
    # After steps 6 and 13 of 20: each learner loses 2 s once, and waits as long for the other at the trunk.
    rarely = ExchangePlan(Schedule(10, 3, multiples=(2, 2, 1)), sizes, sizes, held=sets)
    assert predict(star_network(2, 8e6, 8e6), [0.2, 0.2], rarely).utilization == pytest.approx([4 / 12] * 2, rel=1e-12)


def test_equal_learners_that_hold_the_same_are_one() -> None:
    workload = Workload("mixture", 900, 9, 0.1, expert_parameters=600)
    setting = setting_for(workload, "diloco", sync_every=10, down="bf16", experts=ExpertSetting(groups=2, held=0.5))
    one_each, four = (SyncerLinkModel(workload, setting, (1.0,) * num, num * 5e3) for num in (2, 4))
    assert four.value(1e4) == pytest.approx(one_each.value(1e4), rel=1e-9)
    three = SyncerLinkModel(workload, setting, (1.0,) * 3, 15e3)
    assert len(three.predict(1e4).utilization) == 3


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="data parallel has no syncer"):
        exchange_of(ONE_B, setting_for(ONE_B, "data-parallel"))
    with pytest.raises(ConfigError, match="give speeds above 0"):
        SyncerLinkModel(ONE_B, setting_for(ONE_B, "diloco"), (1.0, 0.0))
    with pytest.raises(ConfigError, match="give --learners 1 or more"):
        SyncerLinkModel(ONE_B, setting_for(ONE_B, "diloco"), ())
