"""What a syncer writes down of its callers, however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco import events
from diloco.errors import AuthError, CorruptPayloadError, NoRoomError, StaleIncarnationError
from diloco.event_log import EventLog, read_events
from diloco.syncer.door.audit import AGAIN_S, MAX_SENDERS, MAX_TEXT, Audit
from diloco.syncer.keys.certificates import UNKNOWN, Caller
from diloco.syncer.metrics import SyncerMetrics

BAD = AuthError("the token is not one of this syncer's.")


class World:
    """An audit whose time passes when it is told."""

    def __init__(self, path: Path) -> None:
        self.now, self.path = 0.0, path
        self.metrics = SyncerMetrics("demo")
        self.log = EventLog(path, who="syncer")
        self.audit = Audit(self.log, self.metrics, clock=lambda: self.now)

    @property
    def refused(self) -> list[events.Refused]:
        return [it for it in read_events(self.path) if isinstance(it, events.Refused)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    it = World(tmp_path / "events.jsonl")
    with it.log:
        yield it


def test_who_was_let_in(world: World) -> None:
    world.audit.admitted("Join", Caller("site-a", "learner", "site-a", key="ab" * 20), "site-a", "ipv4:10.0.0.7:5")
    (event,) = read_events(world.path)
    assert event == events.Admitted(
        t=event.t, who="syncer", call="Join", learner="site-a", name="site-a", role="learner", key="ab" * 8,
        peer="ipv4:10.0.0.7:5",
    )  # fmt: skip


def test_a_flood_of_one_sender_is_a_line_and_a_number(world: World) -> None:
    for port in range(10_000):
        world.audit.refused("Join", None, f"ipv4:10.0.0.7:{port}", BAD)
    assert [(it.peer, it.reason, it.text, it.times) for it in world.refused] == [
        ("ipv4:10.0.0.7:0", "AuthError", str(BAD), 1)
    ]
    world.audit.flush()
    assert len(world.refused) == 1
    world.now += AGAIN_S
    world.audit.flush()
    assert [(it.peer, it.times) for it in world.refused[1:]] == [("ipv4:10.0.0.7:9999", 9999)]
    assert world.metrics.registry.get_sample_value(
        "diloco_refused_calls_total", {"call": "Join", "reason": "AuthError"}
    ) == 10_000  # fmt: skip


def test_a_flood_of_many_senders_is_bounded_and_adds_up(world: World) -> None:
    for sender in range(10_000):
        world.audit.refused("Join", None, f"ipv4:10.0.{sender // 250}.{sender % 250}:1", BAD)
    assert len(world.refused) == MAX_SENDERS + 1
    world.audit.flush(after_s=0.0)
    assert sum(it.times for it in world.refused) == 10_000
    assert len(world.refused) == MAX_SENDERS + 2


def test_senders_are_told_apart_by_their_keys_where_they_have_any(world: World) -> None:
    peers = ("ipv4:10.0.0.7:1", "ipv4:10.0.0.7:2")
    for name in ("site-a", "site-b"):
        for peer in peers:
            world.audit.refused("Push", Caller(name, "learner", name), peer, CorruptPayloadError("x" * 10_000))
    for peer in peers:
        world.audit.refused("Push", UNKNOWN, peer, BAD)
    world.audit.flush(after_s=0.0)
    assert [(it.name, it.times) for it in world.refused] == [
        ("site-a", 1), ("site-b", 1), ("anyone", 1), ("site-a", 1), ("site-b", 1), ("anyone", 1)
    ]  # fmt: skip
    assert max(len(it.text) for it in world.refused) == MAX_TEXT


def test_what_is_the_runs_own_affair_is_no_refusal(world: World) -> None:
    for error in (NoRoomError("full."), StaleIncarnationError("join again.")):
        world.audit.refused("Push", Caller("a", "learner", "a"), "ipv4:10.0.0.7:1", error)
    world.audit.flush(after_s=0.0)
    assert not world.refused
