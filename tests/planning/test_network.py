"""Transfers over shared links in virtual time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.planning.network import Network, Route, Transfer

MBIT = 1e6


def star(*up: float, syncer: float = math.inf, latency_s: float = 0.0) -> Network:
    """Learners with an uplink each; all share the syncer's way in."""
    links = {f"up-{i}": rate for i, rate in enumerate(up)} | {"syncer": syncer}
    return Network(links, [Route((f"up-{i}", "syncer"), (), latency_s) for i in range(len(up))])


def drain(network: Network) -> list[Transfer]:
    found = []
    while (at := network.next_s) < math.inf:
        found += network.arrived(at)
    return found


def test_a_transfer_takes_its_bits_over_the_rate_and_the_latency() -> None:
    network = star(8 * MBIT, latency_s=0.25)
    number = network.send(1.0, 0, "up", 2e6)
    assert network.next_s == 3.0  # leaves the link
    assert network.arrived(3.0) == []
    assert network.next_s == 3.25
    [it] = network.arrived(3.25)
    assert (it.number, it.learner, it.direction, it.num_bytes) == (number, 0, "up", 2e6)
    assert (it.began_s, it.ended_s, it.arrived_s) == (1.0, 3.0, 3.25)
    assert network.next_s == math.inf


def test_transfers_of_one_learner_queue_and_directions_do_not() -> None:
    network = Network({"up": 8 * MBIT, "down": 8 * MBIT}, [Route(("up",), ("down",))])
    for direction in ("up", "up", "down"):
        network.send(0.0, 0, direction, 1e6)  # type: ignore[arg-type]
    assert [(each.number, each.began_s, each.arrived_s) for each in drain(network)] == [(0, 0, 1), (2, 0, 1), (1, 1, 2)]


def test_a_shared_link_is_shared_fairly_and_what_one_cannot_use_goes_to_the_others() -> None:
    network = star(2 * MBIT, 100 * MBIT, 100 * MBIT, syncer=10 * MBIT)
    for learner in range(3):
        network.send(0.0, learner, "up", 1e6)  # 2, 4 and 4 Mbit/s
    assert [(each.learner, each.arrived_s) for each in drain(network)] == [(1, 2.0), (2, 2.0), (0, 4.0)]


def test_rates_change_when_somebody_comes_and_goes() -> None:
    network = star(math.inf, math.inf, syncer=8 * MBIT)
    network.send(0.0, 0, "up", 2e6)
    network.send(1.0, 1, "up", 0.5e6)  # half the link each from 1 s: done at 2 s, when the first has 0.5 MB left
    assert [(each.learner, each.arrived_s) for each in drain(network)] == [(1, 2.0), (0, 2.5)]


def test_nothing_and_no_limit_take_no_time() -> None:
    network = star(math.inf, latency_s=0.5)
    network.send(1.0, 0, "up", 0)
    network.send(1.0, 0, "up", 1e12)
    assert [each.arrived_s for each in drain(network)] == [1.5, 1.5]


def test_what_is_dropped_never_arrives_and_frees_its_share() -> None:
    network = star(math.inf, math.inf, syncer=8 * MBIT, latency_s=1.0)
    network.send(0.0, 0, "up", 1e6)
    network.send(0.0, 1, "up", 1e6)
    network.drop(1.0, 0)
    assert [(each.learner, each.ended_s) for each in drain(network)] == [(1, 1.5)]


@given(
    rates=st.lists(st.floats(1e5, 1e9), min_size=1, max_size=5),
    syncer=st.floats(1e5, 1e9),
    sends=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 4), st.floats(0, 1e7)), min_size=1, max_size=12),
)
def test_no_link_carries_more_than_it_can_and_is_not_idle_while_it_could(
    rates: list[float], syncer: float, sends: list[tuple[float, int, float]]
) -> None:
    network = star(*rates, syncer=syncer)
    found, sent = [], sorted((at, learner % len(rates), size) for at, learner, size in sends)
    for at, learner, size in sent:
        while network.next_s <= at:
            found += network.arrived(network.next_s)
        network.send(at, learner, "up", size)
    found += drain(network)
    assert len(found) == len(sent)
    assert [each.arrived_s for each in found] == sorted(each.arrived_s for each in found)
    rounding, tick_s = (
        1 + 1e-9,
        1e-12,
    )  # of sums and quotients of a dozen numbers; times of tens of seconds have 16 digits
    for each in found:
        narrow = min(rates[each.learner], syncer)
        assert (each.ended_s - each.began_s + tick_s) * narrow * rounding >= 8 * each.num_bytes
    total, begins, ends = sum(8 * size for *_, size in sent), sent[0][0], max(each.ended_s for each in found)
    assert (ends - begins + tick_s) * syncer * rounding >= total
    alone = sum(8 * size / min(rates[learner], syncer) for _, learner, size in sent)
    assert ends <= (sent[-1][0] + alone) * rounding + tick_s  # at worst all go one after the other


@pytest.mark.parametrize(
    ("links", "path", "words"),
    [
        ({"a": 0.0}, Route(("a",), ()), "link a carries 0.0 bit/s"),
        ({"a": -5.0}, Route(("a",), ()), "needs more than 0"),
        ({"a": math.nan}, Route(("a",), ()), "link a carries nan"),
        ({"a": 1.0}, Route(("b",), ()), "over the link b; known links: a"),
        ({"a": 1.0}, Route(("a",), (), -0.1), "latency of -0.1 s"),
    ],
)
def test_impossible_networks_are_refused(links: dict[str, float], path: Route, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        Network(links, [path])
