"""`StateRelay`: who is asked for an inner state, when it is given up, and what a joiner is told. Time is a number."""

from __future__ import annotations

import math

import pytest

from diloco.core.state_relay import (
    AGAIN_S,
    ANSWER_CAP_S,
    ANSWER_FLOOR_S,
    HELD_S,
    SILENT_S,
    UPLOAD_S,
    HealAnswer,
    Peer,
    Relayed,
    StateRelay,
)
from diloco.errors import PayloadError

DIGEST, OTHER, SHA = "d" * 64, "e" * 64, "5" * 64
OLD, YOUNG = Peer("old", 1, 900, 1.0), Peer("young", 4, 30, 8.0)
PEERS = (YOUNG, OLD, Peer("joiner", 1, 5000, 1.0))  # its incarnation before, which the syncer has not missed yet
MOST = 1000


def wanted(relay: StateRelay, now: float, peers: tuple[Peer, ...] = PEERS, joiner: str = "joiner") -> HealAnswer:
    return relay.wanted(now, joiner, 77, DIGEST, peers)


def asked(now: float = 0.0) -> tuple[StateRelay, int]:
    relay = StateRelay(boot=100)
    assert wanted(relay, now) == HealAnswer("wait")
    assert relay.asks == ("old", 1)  # it has trained the most
    return relay, relay.number_for("old", 1)


def held() -> tuple[StateRelay, int]:
    relay, number = asked()
    relay.began(1.0, "old", 1, number, DIGEST, 600, MOST)
    assert (relay.asks, relay.held) == (None, number)
    relay.completed(2.0, "old", 1, number, SHA)
    return relay, number


def test_a_state_goes_from_the_oldest_healthy_learner_to_the_joiner() -> None:
    relay, number = held()
    assert wanted(relay, 2.5) == HealAnswer("ready", number, 600, SHA, "old")
    relay.fetches(3.0, "joiner", 77, number)
    relay.tick(3.0 + SILENT_S + 1, PEERS)  # it is busy fetching
    assert relay.held == number
    relay.fetch_ended(30.0, "joiner", 77, number)
    relay.took(30.1, "joiner", 77, number)
    assert (relay.held, relay.wake_at, relay.ended()) == (0, math.inf, [Relayed("joiner", "old", 600, 30.1)])
    assert relay.ended() == []
    answer = wanted(relay, 31.0)
    assert (answer.state, relay.asks) == ("refused", None)
    assert "given a state 1 s ago" in answer.reason
    assert wanted(relay, 31.0, joiner="another") == HealAnswer("wait")


def test_after_a_while_a_learner_may_ask_again() -> None:
    relay, number = held()
    relay.took(3.0, "joiner", 77, number)
    assert wanted(relay, 3.0 + AGAIN_S) == HealAnswer("wait")
    assert relay.number_for("old", 1) not in (0, number)


def test_requests_of_two_drivers_have_different_numbers() -> None:
    relays = [StateRelay(boot=boot) for boot in (5, 9)]
    for relay in relays:
        wanted(relay, 0.0)
    assert relays[0].number_for("old", 1) != relays[1].number_for("old", 1)


@pytest.mark.parametrize(
    ("peer", "answer_s"),
    [
        (Peer("old", 1, 900, None), ANSWER_FLOOR_S),
        (Peer("old", 1, 900, 4.0), 20.0),
        (Peer("old", 1, 900, 1e6), ANSWER_CAP_S),
    ],
)
def test_a_peer_has_its_own_time_to_answer_and_then_the_next_one_is_asked(peer: Peer, answer_s: float) -> None:
    relay, peers = StateRelay(boot=1), (peer, YOUNG)
    now = 0.0
    while now < answer_s - 0.6:
        wanted(relay, now, peers)
        now += 0.5
    assert relay.asks == ("old", 1)
    assert relay.wake_at <= answer_s
    relay.tick(answer_s, peers)
    assert relay.asks == ("young", 4)


def test_a_silent_peer_that_answers_too_late_is_refused() -> None:
    relay, number = asked()
    wanted(relay, 9.0)
    relay.tick(ANSWER_FLOOR_S, PEERS)
    with pytest.raises(PayloadError, match="was not asked"):
        relay.began(11.0, "old", 1, number, DIGEST, 600, MOST)


@pytest.mark.parametrize(
    ("digest", "num_bytes", "said"),
    [(OTHER, 600, "another inner optimizer"), (DIGEST, MOST + 1, "1001 bytes"), (DIGEST, 0, "0 bytes")],
)
def test_a_state_that_cannot_be_the_joiners_is_refused_before_it_is_sent(
    digest: str, num_bytes: int, said: str
) -> None:
    relay, number = asked()
    with pytest.raises(PayloadError):
        relay.began(1.0, "old", 1, number, digest, num_bytes, MOST)
    assert (relay.held, relay.asks, relay.wake_at) == (0, None, 1.0)
    relay.tick(1.0, PEERS)
    assert relay.asks == ("young", 4)
    relay.declined(2.0, "young", 4, relay.number_for("young", 4), "its parameters are sharded")
    relay.tick(2.0, PEERS)
    answer = wanted(relay, 2.5)
    assert answer.state == "refused"
    assert said in answer.reason
    assert "young cannot give its state: its parameters are sharded" in answer.reason
    (ended,) = relay.ended()
    assert (ended.peer, ended.num_bytes, ended.reason) == (None, 0, answer.reason)


def test_only_who_is_asked_may_offer_and_only_once() -> None:
    relay, number = asked()
    for peer, incarnation, this in (("young", 4, number), ("old", 2, number), ("old", 1, number + 1), ("old", 1, 0)):
        with pytest.raises(PayloadError, match="was not asked"):
            relay.began(1.0, peer, incarnation, this, DIGEST, 600, MOST)
        with pytest.raises(PayloadError, match="was not asked"):
            relay.declined(1.0, peer, incarnation, this, "no")
    relay.began(1.0, "old", 1, number, DIGEST, 600, MOST)
    with pytest.raises(PayloadError, match="was not asked"):
        relay.began(1.1, "old", 1, number, DIGEST, 600, MOST)
    relay.cut(1.2, "young", 4, number)  # not its upload
    assert relay.held == number
    with pytest.raises(PayloadError, match="not wanted any more"):
        relay.completed(1.3, "young", 4, number, SHA)
    with pytest.raises(PayloadError, match="no inner state"):
        relay.fetches(1.4, "joiner", 77, number)  # it is not whole yet


def test_a_peer_that_breaks_off_or_dies_is_followed_by_the_next() -> None:
    relay, number = asked()
    relay.began(1.0, "old", 1, number, DIGEST, 600, MOST)
    relay.cut(2.0, "old", 1, number)
    relay.tick(2.0, PEERS)
    assert (relay.held, relay.asks) == (0, ("young", 4))
    relay.tick(3.0, (OLD,))  # young was evicted
    assert "young is not healthy any more" in wanted(relay, 3.5).reason

    relay, number = asked()
    relay.began(1.0, "old", 1, number, DIGEST, 600, MOST)
    relay.tick(2.0, (YOUNG, Peer("old", 2, 0, 1.0)))  # another incarnation of it
    assert relay.asks == ("young", 4)
    with pytest.raises(PayloadError, match="not wanted any more"):
        relay.completed(3.0, "old", 1, number, SHA)


def test_an_upload_has_its_time() -> None:
    relay, number = asked()
    relay.began(1.0, "old", 1, number, DIGEST, 600, MOST)
    now = 1.0
    while now < UPLOAD_S:
        wanted(relay, now)
        relay.tick(now, PEERS)
        now += 10
    assert relay.held == number
    wanted(relay, UPLOAD_S + 1.0)
    relay.tick(UPLOAD_S + 1.0, PEERS)
    assert relay.asks == ("young", 4)


def test_a_joiner_that_goes_silent_frees_the_place() -> None:
    relay, number = held()
    assert wanted(relay, 5.0, joiner="another") == HealAnswer("wait")  # one at a time
    assert relay.wake_at == SILENT_S  # of the joiner's only word, at 0
    relay.tick(SILENT_S, PEERS)
    assert (relay.held, relay.ended()[0].reason) == (0, "it gave up")
    wanted(relay, 16.0, (YOUNG, OLD), joiner="another")
    assert relay.asks == ("old", 1)
    with pytest.raises(PayloadError, match="no inner state"):
        relay.fetches(17.0, "joiner", 77, number)


def test_a_state_is_not_held_for_good() -> None:
    relay, number = held()
    relay.fetches(3.0, "joiner", 77, number)
    relay.tick(3.0 + HELD_S, PEERS)
    assert relay.held == 0
    assert "in time" in relay.ended()[0].reason


def test_a_joiner_that_is_started_again_begins_anew() -> None:
    relay, number = held()
    assert relay.wanted(3.0, "joiner", 78, DIGEST, PEERS) == HealAnswer("wait")
    assert relay.number_for("old", 1) not in (0, number)
    assert "another process" in relay.ended()[0].reason


@pytest.mark.parametrize("ends", ["by silence", "by another process"])
def test_a_joiner_that_takes_no_state_gets_none_for_a_while(ends: str) -> None:
    relay, _ = asked()
    if ends == "by silence":
        relay.tick(SILENT_S, PEERS)
    assert relay.wanted(SILENT_S, "joiner", 78, DIGEST, PEERS) == HealAnswer("wait")  # it was started again
    assert relay.asks == ("old", 1)
    if ends == "by silence":
        relay.tick(2 * SILENT_S, PEERS)
    answer = relay.wanted(2 * SILENT_S, "joiner", 79, DIGEST, PEERS)
    assert (answer.state, relay.asks) == ("refused", None)
    assert "asked for it 2 times within 60 s, and it took no state" in answer.reason
    assert wanted(relay, 2 * SILENT_S, joiner="another") == HealAnswer("wait")
    relay.tick(3 * SILENT_S, PEERS)
    assert relay.wanted(SILENT_S + AGAIN_S, "joiner", 80, DIGEST, PEERS) == HealAnswer("wait")
    assert relay.asks == ("old", 1)


def test_without_a_healthy_learner_the_joiner_is_refused_at_once() -> None:
    relay = StateRelay(boot=1)
    answer = wanted(relay, 0.0, (Peer("joiner", 1, 5000, 1.0),))
    assert (answer.state, answer.reason) == ("refused", "no healthy learner can be asked")
    assert wanted(relay, 1.0).state == "wait"  # a refusal is not a gift: it may ask again
