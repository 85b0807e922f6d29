"""A second syncer: versions on both disks, takeovers, partitions, the old one back, promotion by hand."""

from __future__ import annotations

import datetime as dt
import errno
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from benchmarks.processes import until
from tests.chaos.relay import Relay
from tests.syncer.pairs import PATIENT, learners, on_disk, serve, serves, standing, trains
from tests.syncer.runs import RUN, LearnerThreads, Raw, method, train, versions_of
from tests.syncer.test_faults import syncer_process
from tests.syncer.test_replay import replayed

import diloco
from diloco import events
from diloco.cli import main
from diloco.errors import AuthError, ConfigError, CorruptPayloadError, PayloadError, StandbyError, StoreError
from diloco.event_log import read_events
from diloco.exchange.dialling import fetch_status
from diloco.exchange.key_pair import Keys
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.pair.values import Contents
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Syncer
from diloco.syncer.standby.following import StandbyCredentials
from diloco.syncer.standby.replica import ReplicatedState

pytestmark = pytest.mark.timeout(900)


def begin(syncer: Syncer) -> None:
    raw = Raw(syncer.address)
    raw.initialise()
    raw.connection.close()


def are_paired(first: Syncer, second: Syncer) -> bool:
    return (standing(first), standing(second)) == ("paired", "following") and first.pairing.core.link is not None


def electorate(*syncers: Syncer) -> list[int]:
    return [len(each.pairing.succession.electorate) for each in syncers]


def test_what_is_published_is_on_both_disks_with_the_same_digests(tmp_path: Path) -> None:
    with serve(tmp_path / "a", deadlines=PATIENT) as first:
        begin(first)
        with learners("x", [first.address]) as group:
            until(lambda: group[0].witness.seen is not None, "it does not join")
            trains(first, group, until)
            with serve(tmp_path / "b", follow=first.address, deadlines=PATIENT) as second:
                until(lambda: are_paired(first, second), "they do not pair")
                for version in (2, 3, 4):
                    assert trains(first, group, until) == version
                    assert on_disk(tmp_path / "b") == on_disk(tmp_path / "a")
                status = second.pairing.status()
                assert status is not None
                assert status["versions_behind"] == 0
                raw = Raw(second.address)
                with pytest.raises(StandbyError, match="follows"):
                    raw.join()
                raw.connection.close()
        files = [sorted(each.name for each in (tmp_path / name / "tensors").iterdir()) for name in "ab"]
        assert set(files[1]) <= set(files[0])


def test_the_standby_takes_over_when_the_first_is_gone(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(serve(tmp_path / "a", deadlines=PATIENT))
        begin(first)
        second = stack.enter_context(serve(tmp_path / "b", follow=first.address))
        until(lambda: are_paired(first, second), "they do not pair")
        group = stack.enter_context(learners("x y z", [first.address, second.address]))
        until(lambda: electorate(first, second) == [3, 3], "the learners do not become electors")
        trains(first, group, until)
        published = on_disk(tmp_path / "a")
        first.close()
        until(lambda: standing(second) == "alone", "it does not take over")
        assert on_disk(tmp_path / "b") == published
        until(lambda: all(each.follows == second.address for each in group), "the learners do not follow")
        assert trains(second, group, until) == 2


class Pair:
    """A first and its standby, which reach each other through a relay, and learners that reach both."""

    def __init__(self, tmp_path: Path, names: str = "x y z", **more: Any) -> None:
        self.path, self.stack = tmp_path, ExitStack()
        self.first = self.stack.enter_context(serve(tmp_path / "a", **more))
        begin(self.first)
        self.relay = self.stack.enter_context(Relay(self.first.port))
        self.second = self.stack.enter_context(serve(tmp_path / "b", follow=self.relay.address))
        until(lambda: are_paired(self.first, self.second), "they do not pair")
        self.group = self.stack.enter_context(learners(names, [self.first.address, self.second.address]))
        num = len(self.group)
        until(lambda: electorate(self.first, self.second) == [num, num], "the learners do not become electors")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def split(self) -> None:
        """The two syncers do not reach each other."""
        self.relay.refuse()
        self.relay.cut()

    def heal(self) -> None:
        self.relay.accept()


def test_a_partition_between_the_two_leaves_the_run_with_the_first(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        trains(pair.first, pair.group, until)
        pair.split()
        until(lambda: standing(pair.first) == "alone", "it does not go on alone")
        assert trains(pair.first, pair.group, until) == 2
        assert standing(pair.second) == "following"
        assert on_disk(tmp_path / "b")[0][0][0] == 1
        pair.heal()
        until(lambda: are_paired(pair.first, pair.second), "they do not pair again")
        assert on_disk(tmp_path / "b") == on_disk(tmp_path / "a")
        assert trains(pair.first, pair.group, until) == 3


def test_a_first_without_its_standby_and_most_learners_publishes_nothing_and_learns_that_it_has_lost(
    tmp_path: Path,
) -> None:
    with Pair(tmp_path) as pair:
        trains(pair.first, pair.group, until)
        pair.split()
        for each in pair.group[:2]:
            each.cut.add(pair.first.address)
        until(lambda: standing(pair.second) == "alone", "the standby does not take over")
        until(lambda: standing(pair.first) == "proposing", "the first goes on")
        assert versions_of(pair.first)[0] == 1
        assert trains(pair.second, pair.group[:2], until) == 2
        pair.heal()
        until(lambda: standing(pair.first) == "fenced", "the first does not learn it")
        raw = Raw(pair.first.address)
        with pytest.raises(StandbyError, match="lost the run"):
            raw.join()
        raw.connection.close()
        assert on_disk(tmp_path / "a")[0][0][0] == 1
        pair.group[2].cut.add(pair.first.address)
        until(lambda: pair.group[2].follows == pair.second.address, "the third does not follow")


def test_a_partition_of_the_first_from_half_of_the_learners_changes_nothing_while_its_standby_answers(
    tmp_path: Path,
) -> None:
    with Pair(tmp_path, "w x y z") as pair:
        for each in pair.group[:2]:
            each.cut.add(pair.first.address)
        until(lambda: len(pair.first.driver.ask(lambda driver: driver.core.members)) == 2, "nobody is evicted")
        assert trains(pair.first, pair.group[2:], until) == 1
        until(lambda: are_paired(pair.first, pair.second), "they part")


def test_the_old_first_comes_back_serves_nothing_and_becomes_the_standby_of_the_new_one(tmp_path: Path) -> None:
    with Pair(tmp_path, deadlines=PATIENT) as pair:
        trains(pair.first, pair.group, until)
        until(lambda: not pair.first.driver.ask(lambda driver: driver.is_busy), "it writes on and on")
        pair.split()
        for each in pair.group:
            each.push(1, 0.5)
        until(lambda: on_disk(tmp_path / "a")[0][0][0] == 2, "the first does not write")
        assert versions_of(pair.first)[0] == 1, "it is not at the standby"
        pair.first.close()
        until(lambda: standing(pair.second) == "alone", "the standby does not take over")
        trains(pair.second, pair.group, until)
        line = on_disk(tmp_path / "b")
        assert line[0][0] != on_disk(tmp_path / "a")[0][0]
        with serve(tmp_path / "a") as old:
            assert standing(old) == "waiting"
            raw = Raw(old.address)
            with pytest.raises(StandbyError, match="was restarted"):
                raw.join()
            raw.connection.close()
        with serve(tmp_path / "a", follow=pair.second.address) as old:
            until(lambda: are_paired(pair.second, old), "it does not become the standby")
            assert on_disk(tmp_path / "a") == line
            aside = [each.name for each in (tmp_path / "a" / "set-aside").iterdir()]
            assert any("f00000-v000000002" in name for name in aside), "what it alone had is kept"
            assert trains(pair.second, pair.group, until) == 3
            assert on_disk(tmp_path / "a") == on_disk(tmp_path / "b")


def test_a_standby_that_dies_pauses_the_run_for_the_patience_and_catches_up_when_it_returns(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        trains(pair.first, pair.group, until)
        pair.second.close()
        until(lambda: standing(pair.first) == "alone", "it does not go on alone")
        trains(pair.first, pair.group, until)
        with serve(tmp_path / "b", follow=pair.first.address) as second:
            until(lambda: are_paired(pair.first, second), "they do not pair again")
            assert on_disk(tmp_path / "b") == on_disk(tmp_path / "a")
            assert trains(pair.first, pair.group, until) == 3


def test_a_full_disk_at_the_standby_stops_it_and_not_the_run(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        trains(pair.first, pair.group, until)
        with files_at(pair.second, "received"):
            until(lambda: pair.second.pairing.core.link is not None, "it is not connected")
            for each in pair.group:
                each.push(1)
            until(lambda: standing(pair.first) == "alone", "it does not go on alone")
            until(lambda: versions_of(pair.first)[0] == 2, "nothing is published")
            assert on_disk(tmp_path / "b")[0][0][0] == 1
        until(lambda: are_paired(pair.first, pair.second), "they do not pair again")
        assert on_disk(tmp_path / "b") == on_disk(tmp_path / "a")


def test_both_journals_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a first that has begun an epoch while it served, and of a standby that has taken over."""
    with Pair(tmp_path) as pair:
        trains(pair.first, pair.group, until)
        pair.split()
        until(lambda: standing(pair.first) == "alone", "it does not go on alone")
        trains(pair.first, pair.group, until)
        pair.heal()
        until(lambda: are_paired(pair.first, pair.second), "they do not pair again")
        pair.first.close()
        until(lambda: standing(pair.second) == "alone", "the standby does not take over")
        trains(pair.second, pair.group, until)
    for name in "ab":
        code, found = replayed(capsys, str(tmp_path / name))
        assert (code, found["difference"]) == (0, None)
        assert found["decisions_equal"] == found["events"] > 0


def test_both_started_again_agree_without_a_learner(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        trains(pair.first, pair.group, until)
    with (
        serve(tmp_path / "a", deadlines=PATIENT) as first,
        serve(tmp_path / "b", follow=first.address, deadlines=PATIENT) as second,
    ):
        until(lambda: are_paired(first, second), "they do not agree")
        until(lambda: first.pairing.succession.epoch == 2, "no epoch is begun")
        until(lambda: serves(first), "it does not serve")
        assert first.driver.ask(lambda driver: driver.lineage.epoch) == 2


def test_promotion_by_hand_is_refused_while_the_first_answers_and_fences_it_where_it_is_forced(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        trains(pair.first, pair.group, until)
        raw = Raw(pair.second.address)

        def promote(*, force: bool) -> pb.PromoteReply:
            request = pb.PromoteRequest(run=RUN, force=force)
            return raw.connection.call("control", "Promote", request, pb.PromoteReply)

        with pytest.raises(ConfigError, match="is connected"):
            promote(force=False)
        reply = promote(force=True)
        assert (reply.epoch, list(reply.versions), reply.fenced) == (2, [1, 0], True)
        assert (standing(pair.first), standing(pair.second)) == ("fenced", "alone")
        until(lambda: all(each.follows == pair.second.address for each in pair.group), "the learners do not follow")
        assert trains(pair.second, pair.group, until) == 2
        raw.connection.close()
        pair.first.close()
        with serve(tmp_path / "a") as old:
            assert standing(old) == "waiting", "it stays fenced"


def test_versions_may_be_published_before_the_standby_has_them_where_the_operator_says_so(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(serve(tmp_path / "a", durable="one"))
        begin(first)
        relay = stack.enter_context(Relay(first.port))
        stack.enter_context(serve(tmp_path / "b", follow=relay.address))
        group = stack.enter_context(learners("x", [first.address]))
        until(lambda: group[0].witness.seen is not None, "it does not join")
        trains(first, group, until)
        until(lambda: on_disk(tmp_path / "b") == on_disk(tmp_path / "a"), "the standby does not follow")
        relay.refuse()
        relay.cut()
        trains(first, group, until)
        assert standing(first) == "alone"
        assert on_disk(tmp_path / "b")[0][0][0] == 1


def test_only_a_standby_may_follow_and_only_an_admin_promotes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    Keyring.new(keys, RUN, ["127.0.0.1"], [("raw", "learner"), ("second", "standby")], dt.timedelta(days=1))
    with serve(tmp_path / "a", keys=keys / "syncer") as first:
        learner, standby = (Raw(first.address, keys=keys / name) for name in ("raw", "second"))
        with pytest.raises(AuthError, match="'standby'"):
            next(learner.connection.follow("standby", iter([pb.FollowHello(run=RUN).SerializeToString()])))
        for raw in (learner, standby):
            with pytest.raises(AuthError, match="'admin'"):
                raw.connection.call("control", "Promote", pb.PromoteRequest(run=RUN), pb.PromoteReply)
            raw.connection.close()


def test_a_standby_shows_its_own_certificate_and_says_how_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    Keyring.new(keys, RUN, ["127.0.0.1"], [("second", "standby"), ("me", "admin")], dt.timedelta(days=1))
    with serve(tmp_path / "a", keys=keys / "syncer", deadlines=PATIENT) as first:
        raw = Raw(first.address, keys=keys / "me")
        raw.initialise()
        raw.connection.close()
        shown = StandbyCredentials(Keys(keys / "second"))
        given: dict[str, Any] = {"keys": keys / "second", "follow_with": shown, "deadlines": PATIENT}
        with serve(tmp_path / "b", follow=first.address, **given) as second:
            until(lambda: are_paired(first, second), "they do not pair")
            for syncer, text in ((first, "paired in epoch 1"), (second, "following in epoch 1")):
                said = told(capsys, "status", "--address", syncer.address, "--run", RUN, "--keys", str(keys / "me"))
                assert text in " ".join(said.split())
            promoting = ("syncer", "promote", second.address, "--run", RUN, "--keys", str(keys / "me"), "--json")
            assert json.loads(told(capsys, *promoting, "--force")) == {
                "address": second.address, "epoch": 2, "versions": [0, 0], "fenced": True
            }  # fmt: skip
        admitted = [it.call for it in read_events(tmp_path / "a" / "events.jsonl") if it.kind == "admitted"]
        assert "Follow" in admitted
    stands = [it for it in read_events(tmp_path / "b" / "events.jsonl") if isinstance(it, events.StandingChanged)]
    assert [it.standing for it in stands][-1] == "alone"


def test_a_run_has_one_standby(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(tmp_path / "a", deadlines=PATIENT) as first:
        begin(first)
        with serve(tmp_path / "b", follow=first.address, deadlines=PATIENT) as second:
            until(lambda: are_paired(first, second), "they do not pair")
            with serve(tmp_path / "c", follow=first.address) as third:
                until(lambda: "a run has one" in caplog.text, "it is not refused")
                assert are_paired(first, second)
                assert third.versions() == ()


def test_a_first_that_was_fenced_becomes_the_standby_where_it_knows_the_other_one(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = stack.enter_context(Pair(tmp_path))
        trains(pair.first, pair.group, until)
        pair.first.close()
        until(lambda: standing(pair.second) == "alone", "the standby does not take over")
        old = stack.enter_context(serve(tmp_path / "a", pair.first.port, follow=pair.second.address))
        until(lambda: are_paired(pair.second, old), "it does not become the standby")
        old.pairing.promote(force=True)
        until(lambda: are_paired(old, pair.second), "the other one does not become the standby")
        trains(old, pair.group, until)
        assert on_disk(tmp_path / "a") == on_disk(tmp_path / "b")


def test_a_standby_knows_the_epochs_of_its_first_before_it_has_its_versions(tmp_path: Path) -> None:
    """One that is promoted before it is brought up to date begins a later one: two of one number fence neither."""
    with serve(tmp_path / "a") as first:
        begin(first)
        first.pairing.succession.next_epoch(6)
        raw = Raw(first.address)
        stream = raw.connection.follow("standby", iter([pb.FollowHello(run=RUN, boot=5).SerializeToString()]))
        told_first = pb.FollowPart.FromString(next(stream))
        stream.close()
        raw.connection.close()
        assert told_first.epoch == 7
        first.pairing.note_epoch(9)
        assert first.pairing.succession.next_epoch(0) == 10
        with pytest.raises(PayloadError, match="as an epoch of the run"):
            first.pairing.note_epoch(2**60)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0
    return capsys.readouterr().out


@contextmanager
def files_at(syncer: Syncer, point: str) -> Iterator[None]:
    """Inside, the syncer's disk is full at this point of every write."""

    def full(reached: str) -> None:
        if reached == point:
            raise OSError(errno.ENOSPC, "No space left on device")

    store = syncer._store
    before = store._at, store._files._at
    store._at = store._files._at = full
    try:
        yield
    finally:
        store._at, store._files._at = before


def test_kill_9_of_the_first_under_learners_keeps_every_version_and_every_bit(tmp_path: Path) -> None:
    """Processes and learners as users have them; compared with a run in one process without faults."""
    steps, kill_at = 32, (9, 21)
    given = diloco.Method.from_dict(method(at_least=2, codec="e3m0").to_dict())
    undisturbed = diloco.run_local(lambda index, exchange: train(index, exchange, given, steps), learners=2)
    reached, go = [threading.Event() for _ in kill_at], [threading.Event() for _ in kill_at]

    def at_step(step: int) -> None:
        if step in kill_at:
            reached[kill_at.index(step)].set()
            go[kill_at.index(step)].wait(300)

    for name in "ab":
        (tmp_path / name).mkdir()
    with ExitStack() as stack:
        first = stack.enter_context(syncer_process(tmp_path / "a", lost_floor_s=15.0))
        more = f'follow = "{first.address}"'
        second = stack.enter_context(syncer_process(tmp_path / "b", lost_floor_s=15.0, more=more))
        addresses = f"{first.address},{second.address}"
        pool = stack.enter_context(LearnerThreads(2))
        lives = [
            pool.submit(
                train, index, pool.connect(addresses, learner=f"learner-{index}", initialise=index == 0),
                None, steps, at_step,
            )
            for index in range(2)
        ]  # fmt: skip

        def stands(address: str, standing: str) -> bool:
            status = fetch_status(address, run=RUN)["standby"]
            return isinstance(status, dict) and status["standing"] == standing and len(status["electorate"]) == 2

        until(reached[0].is_set, "no learner gets there")
        until(lambda: stands(second.address, "following"), "the electorate is not there")
        go[0].set()
        until(reached[1].is_set, "no learner gets there")
        published = on_disk(tmp_path / "a" / "state")
        first.kill()
        go[1].set()
        until(lambda: stands(second.address, "alone"), "it does not take over")
        results = [life.result(timeout=300) for life in lives]
        final = on_disk(tmp_path / "b" / "state")
    assert all(set(published[fragment]) <= set(final[fragment]) for fragment in published), "a version is lost"
    for (mine, metrics), (theirs, _) in zip(results, undisturbed, strict=True):
        assert metrics["incarnation"] == 1
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_first_copy_that_was_broken_off_is_gone_on_with(tmp_path: Path) -> None:
    """A standby that is killed between a file and the state that names it."""
    with serve(tmp_path / "a") as first:
        begin(first)
        with learners("x", [first.address]) as group:
            until(lambda: group[0].witness.seen is not None, "it does not join")
            trains(first, group, until)
            with serve(tmp_path / "b", follow=first.address) as second, files_at(second, "inserted"):
                until(lambda: any((tmp_path / "b" / "tensors").glob("f00000-v000000001-*")), "no file comes")
            with serve(tmp_path / "b", follow=first.address) as second:
                until(lambda: are_paired(first, second), "they do not pair")
                assert trains(first, group, until) == 2


def test_a_first_that_was_alone_goes_on_by_the_votes_of_its_learners_where_it_knows_another_one(
    tmp_path: Path,
) -> None:
    """Its standby never had all versions, and is gone."""
    with ExitStack() as stack:
        first = stack.enter_context(serve(tmp_path / "a"))
        begin(first)
        relay = stack.enter_context(Relay(first.port))
        group = stack.enter_context(learners("x y", [first.address]))
        with serve(tmp_path / "b", follow=relay.address) as second, files_at(second, "inserted"):
            until(lambda: all(each.witness.seen is not None for each in group), "they do not join")
            version = trains(first, group, until)
            while electorate(first) != [2]:  # it moves with what is written while a standby is there
                version = trains(first, group, until)
        port = first.port
        first.close()
        first = stack.enter_context(serve(tmp_path / "a", port, follow=relay.address))
        until(lambda: standing(first) == "alone", "its learners do not agree")
        assert trains(first, group, until) == version + 1


def test_a_state_that_is_none_is_refused(tmp_path: Path) -> None:
    """What a standby is sent names columns and files: no others than those that a store has."""
    with serve(tmp_path / "a") as first:
        begin(first)
        lacking = first._store.lacking(Contents())
        assert lacking is not None
        lacking.close()
        state = lacking.state
    assert ReplicatedState.from_json(state.to_json()) == state
    plain = json.loads(state.to_json())
    newest = plain["versions"][0]
    for wrong in (
        {**plain, "row": {**plain["row"], "x) VALUES (1); DROP TABLE run; --": 1}},
        {**plain, "row": {**plain["row"], "static_file": "../../static"}},
        {**plain, "versions": [{**newest, "file": "../f00000-v000000000-00.safetensors"}]},
        {**plain, "epochs": [[1, 2]]},
        [],
    ):
        with pytest.raises(CorruptPayloadError, match="invalid state"):
            ReplicatedState.from_json(json.dumps(wrong))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"place": "king", "is_paired": true, "base": 1, "electorate": []}'])
def test_a_damaged_position_serves_nothing(tmp_path: Path, text: str) -> None:
    """It says whether this syncer may serve."""
    with serve(tmp_path / "a") as first:
        begin(first)
    (tmp_path / "a" / "standby.json").write_text(text)
    with pytest.raises(StoreError, match="damaged"):
        serve(tmp_path / "a")
