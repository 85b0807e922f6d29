"""What each role may do at a syncer with a standby, with real certificates: who votes, leases, follows, promotes."""

from __future__ import annotations

import datetime as dt
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.syncer.runs import RUN, Raw, method, start, status_of

from diloco import errors, events
from diloco.event_log import read_events
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Syncer

NAMES: list[tuple[str, Any]] = [
    ("site-a", "learner"), ("site-b", "learner"), ("eye", "viewer"), ("me", "admin"), ("second", "standby"),
]  # fmt: skip

Door = Callable[[Raw, str], object]

LEARNERS_DOORS: dict[str, Door] = {
    "vote": lambda it, name: it.connection.call(
        "control", "Vote", pb.VoteRequest(run=RUN, learner=name), pb.VoteReply
    ),
    "lease": lambda it, name: it.connection.call(
        "control", "Lease", pb.LeaseRequest(run=RUN, learner=name), pb.LeaseReply
    ),
}  # fmt: skip


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    Keyring.new(tmp_path / "keys", RUN, ["127.0.0.1"], NAMES, dt.timedelta(days=1))
    return tmp_path / "keys"


@pytest.fixture
def syncer(tmp_path: Path, keys: Path) -> Iterator[Syncer]:
    with start(tmp_path, method(), keys=keys / "syncer") as it:
        yield it


@pytest.fixture
def callers(syncer: Syncer, keys: Path) -> Iterator[dict[str, Raw]]:
    found = {name: Raw(syncer.address, name, keys=keys / name) for name, _ in NAMES}
    found["site-a"].initialise()
    found["site-a"].join()
    yield found
    for each in found.values():
        each.connection.close()


@pytest.mark.parametrize("door", LEARNERS_DOORS)
def test_only_a_learner_votes_and_leases_and_as_itself_only(door: str, callers: dict[str, Raw], syncer: Syncer) -> None:
    call = LEARNERS_DOORS[door]
    for name in ("eye", "second"):
        with pytest.raises(errors.AuthError, match="this needs 'learner'"):
            call(callers[name], "site-a")
    with pytest.raises(errors.AuthError, match="may speak for learner 'site-b' only"):
        call(callers["site-b"], "site-a")
    with pytest.raises(errors.PayloadError, match="a learner cannot be called") as caught:
        call(callers["site-b"], "[/x]\x1b[2J")
    assert str(caught.value).isprintable()
    assert list(status_of(syncer)["learners"]) == ["site-a"]


def test_only_an_admin_promotes(callers: dict[str, Raw], syncer: Syncer) -> None:
    for name in ("site-a", "eye", "second"):
        with pytest.raises(errors.AuthError, match="this needs 'admin'"):
            callers[name].connection.call("control", "Promote", pb.PromoteRequest(run=RUN, force=True), pb.PromoteReply)
    assert syncer.pairing.standing == "alone"


def test_a_stream_that_may_not_follow_is_refused_before_it_says_anything(
    callers: dict[str, Raw], syncer: Syncer
) -> None:
    """There are few threads for standbys: streams of learners that say nothing would keep a standby out."""
    says_nothing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for name in ("site-a", "site-b", "eye"):
        for _ in range(3):
            with pytest.raises(errors.AuthError, match="this needs 'standby'"):
                next(callers[name].connection.follow("standby", iter(says_nothing.get, None)))
            says_nothing.put(None)
    hello = pb.FollowHello(run=RUN, boot=5).SerializeToString()
    stream = callers["second"].connection.follow("standby", iter([hello]))
    assert next(stream)
    stream.close()
    refused = [it for it in read_events(syncer._store.path / "events.jsonl") if isinstance(it, events.Refused)]
    assert {it.call for it in refused} == {"Follow"}


def test_one_certificate_of_a_standby_holds_one_place(callers: dict[str, Raw], syncer: Syncer, keys: Path) -> None:
    """Streams of a stolen one that say nothing, as many as there are threads and more, keep no standby out."""
    thief = Raw(syncer.address, "second", keys=keys / "second")
    says_nothing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    ended: queue.SimpleQueue[errors.DilocoError] = queue.SimpleQueue()

    def follow() -> None:
        try:
            next(thief.connection.follow("standby", iter(says_nothing.get, None)))
        except errors.DilocoError as error:
            ended.put(error)

    threads = [threading.Thread(target=follow) for _ in range(9)]
    for each in threads:
        each.start()
    for _ in threads[1:]:  # each but one is ended by another one
        assert isinstance(ended.get(timeout=300), errors.UnreachableError)
    hello = pb.FollowHello(run=RUN, boot=5).SerializeToString()
    goes_on: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    goes_on.put(hello)
    stream = callers["second"].connection.follow("standby", iter(goes_on.get, None))
    assert next(stream)
    ended.get(timeout=300)
    for _ in range(2):  # each is ended by the next, and what was let in is not
        threads.append(threading.Thread(target=follow))
        threads[-1].start()
    ended.get(timeout=300)
    assert next(stream)
    for _ in threads:
        says_nothing.put(None)
    goes_on.put(None)
    thief.connection.close()
    for each in threads:
        each.join(300)


def test_what_a_standby_says_of_itself_is_escaped(callers: dict[str, Raw], syncer: Syncer) -> None:
    """It reaches the log, the events and the other end."""
    hello = pb.FollowHello(run=RUN, boot=5, run_id="[/x]\x1b[2J\n" * 500)
    with pytest.raises(errors.UnknownRunError, match="another run of this name") as caught:
        next(callers["second"].connection.follow("standby", iter([hello.SerializeToString()])))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 5000
    log = (syncer._store.path / "events.jsonl").read_text()
    assert "\x1b" not in log


def test_a_revoked_learner_is_refused_by_both_syncers(syncer: Syncer, keys: Path, tmp_path: Path) -> None:
    """Each by its own list: the operator copies it to both."""
    raw = Raw(syncer.address, "site-a", keys=keys / "site-a")
    raw.initialise()
    raw.join()
    theirs = tmp_path / "site-b"
    shutil.copytree(keys / "site-b", theirs)  # a thief's copy
    with start(tmp_path / "second", method(), keys=keys / "second", follow=syncer.address) as second:
        until(lambda: second.pairing.standing == "following", "it does not follow")
        at_both = [Raw(it.address, "site-b", keys=theirs) for it in (syncer, second)]
        at_both[0].join()
        with pytest.raises(errors.StandbyError):
            at_both[1].join()
        Keyring.read(keys).revoke("site-b")
        for each in at_both:
            with pytest.raises(errors.AuthError, match="the certificate of 'site-b' was revoked"):
                each.join()
            each.connection.close()
        raw.beat()
        raw.connection.close()
        assert second.pairing.standing == "following"
