"""Followers of a syncer and of a store."""

from __future__ import annotations

import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.bucket_server import BucketServer
from tests.chaos.relay import Relay
from tests.following.published import METHODS, RUN, PublishedRun, RecordedSource, published_run
from tests.syncer.runs import Net, status_of, versions_of
from tests.syncer.test_cut_transfers import Cutter
from tests.syncer.test_doors import DAY

import diloco
from diloco.core.codecs import SEGMENT_ELEMENTS
from diloco.core.shards import Segments
from diloco.demo.bucket_server import CREDENTIALS
from diloco.errors import AuthError, ConfigError, DilocoError, LineageError, StandbyError, StoreError, UnknownRunError
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import Dialler
from diloco.exchange.remote.transfers import Receiver
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.following.follower import FollowedModel, Follower, follow, newest_model
from diloco.following.sources import READ_BYTES, open_source
from diloco.protocol.contribution import Budget
from diloco.protocol.manifest import Manifest
from diloco.store.blobs import ObjectHead
from diloco.store.bucket import Bucket
from diloco.store.objects import open_store, read_manifest
from diloco.syncer.keys.keyring import Keyring

SOURCES = ("syncer", "store")


def place_of(kind: str, run: PublishedRun, tmp_path: Path) -> str:
    return run.syncer.address if kind == "syncer" else str(tmp_path / "state")


def manifest_of(tmp_path: Path) -> Manifest:
    return read_manifest(open_store(tmp_path / "state"))


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("method", METHODS)
def test_every_version_has_the_syncers_bits(method: str, kind: str, tmp_path: Path) -> None:
    with published_run(tmp_path, METHODS[method]) as run:
        source = RecordedSource(open_source(place_of(kind, run, tmp_path), RUN))
        with Follower(source, RUN) as follower:
            run.require_same(first := follower.newer())
            assert first is not None
            assert (first.run, first.number, first.step) == (RUN, 0, 0)
            assert follower.newer() is None
            before = [theta.clone() for theta in first.thetas]
            for fragment in (0, 1, 1, 0, 0):
                source.reads.clear()
                run.publish(fragment)
                named = run.syncer.driver.manifest.fragments[fragment][0]
                run.require_same(model := follower.newer())
                assert model is not None
                status = status_of(run.syncer)
                assert (model.step, model.tokens) == (status["step"], status["tokens"])
                read = {name for name, _ in source.reads} - {run.syncer.driver.manifest.record}
                assert read == {named.update or named.held}
            assert all(map(torch.equal, first.thetas, before))  # a model is not changed later
            state = model.state_dict()
            assert {name: tuple(value.shape) for name, value in state.items()} == {
                "layers.0.weight": (8, 4), "layers.0.bias": (8,), "layers.1.weight": (3, 8), "layers.1.bias": (3,),
            }  # fmt: skip


@pytest.mark.parametrize("kind", SOURCES)
def test_a_slow_follower_skips_to_the_newest_version(kind: str, tmp_path: Path) -> None:
    with published_run(tmp_path, METHODS["4 bits"]) as run:
        source = RecordedSource(open_source(place_of(kind, run, tmp_path), RUN))
        with Follower(source, RUN) as follower:
            assert follower.newer() is not None
            run.publish(0, 0)
            source.reads.clear()
            run.require_same(follower.newer())
            newest, second = run.syncer.driver.manifest.fragments[0]
            assert {newest.update, second.update} <= {name for name, _ in source.reads}  # two updates lead there
            run.publish(0, 0, 0, 1)
            source.reads.clear()
            run.require_same(follower.newer())
            assert run.syncer.driver.manifest.fragments[0][0].held in {name for name, _ in source.reads}


def test_a_follower_reads_only_the_global_model_of_a_version(tmp_path: Path) -> None:
    """The residual and the outer state are as long again each."""
    with published_run(tmp_path, METHODS["4 bits"], width=20_000) as run:
        run.publish(0)
        source = RecordedSource(open_source(tmp_path / "state", RUN))
        with Follower(source, RUN) as follower:
            run.require_same(follower.newer())
        held = run.syncer.driver.manifest.fragments[0][0].held
        assert 400_000 <= sum(num_bytes for name, num_bytes in source.reads if name == held) < 500_000


def test_every_nth_version(tmp_path: Path) -> None:
    with published_run(tmp_path, METHODS["lossless"]) as run:
        numbers: list[int] = []
        with follow(run.syncer.address, run=RUN, every=3, poll_s=0.01) as follower:
            for number in range(8):
                model = follower.newer()
                numbers += [] if model is None else [model.number]
                run.publish(number % 2)
        assert numbers == [0, 3, 6]


@pytest.mark.parametrize("kind", SOURCES)
def test_the_iteration_ends_with_the_run(kind: str, tmp_path: Path) -> None:
    """With the last version, also where it is not the next n-th one."""
    with published_run(tmp_path, METHODS["lossless"]) as run:
        found: list[FollowedModel] = []
        place = place_of(kind, run, tmp_path)
        with follow(place, run=RUN, every=5, poll_s=0.01, callback=found.append) as follower:
            until(lambda: len(found) == 1, "no model comes")
            run.publish(0, 1)
            seen = run.raw.beat(4, 20).lineage
            run.raw.beat(4, 20, finished=True, seen=seen)
            assert follower.wait(300)
            run.require_same(found[-1])
            assert [model.number for model in found] == [0, 2]


def test_a_store_says_that_its_run_is_over_and_not_that_it_is_stopped(tmp_path: Path) -> None:
    budget = {"budget": Budget(steps=10)}
    with published_run(tmp_path, METHODS["lossless"], **budget) as run:
        run.publish(0, 1)
        run.raw.beat(4, 20, finished=True, seen=run.raw.beat(4, 20).lineage)  # its own end
        run.raw.leave(20)
    stopped = manifest_of(tmp_path)
    assert (stopped.versions, stopped.boot, stopped.is_over) == ((1, 1), 0, False)
    with published_run(tmp_path, METHODS["lossless"], **budget) as run:
        run.publish(0, 0)
        assert not manifest_of(tmp_path).is_over
        run.raw.leave(run.raw.beat(10, 50).standing.run_tokens)
    with published_run(tmp_path, METHODS["lossless"], joins=False, **budget):
        assert manifest_of(tmp_path).is_over  # a start alone does not make it go on
    assert [model.versions for model in follow(tmp_path / "state", run=RUN)] == [(3, 1)]
    with published_run(tmp_path, METHODS["lossless"], **budget):
        assert not manifest_of(tmp_path).is_over


def test_no_learner_yet_is_not_the_end(tmp_path: Path) -> None:
    with published_run(tmp_path, METHODS["lossless"], joins=False) as run:
        with follow(run.syncer.address, run=RUN, poll_s=0.01) as follower:
            assert next(follower).number == 0
            found: list[FollowedModel] = []
            waiting = threading.Thread(target=lambda: found.append(next(follower)))
            waiting.start()
            run.raw.join()
            run.publish(0)
            waiting.join()
            run.require_same(found[0])


def test_a_follower_ends_when_it_is_closed(tmp_path: Path) -> None:
    with published_run(tmp_path, METHODS["lossless"]) as run:
        run.require_same(newest_model(run.syncer.address, run=RUN))
        follower = follow(run.syncer.address, run=RUN, callback=lambda _: follower.close())
        assert follower.wait(300)
        assert list(follower) == []


def test_an_error_of_the_callback_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    def fail(model: FollowedModel) -> None:
        raise ValueError(f"no room for version {model.number}")

    with published_run(tmp_path, METHODS["lossless"]) as run:
        with follow(run.syncer.address, run=RUN, callback=fail) as follower:
            with pytest.raises(ValueError, match="no room for version 0"):
                assert follower.wait(300)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_read_goes_on_after_cuts(tmp_path: Path) -> None:
    """Of 16 MB, a cut repeats at most the pieces that were on their way."""
    with published_run(tmp_path, METHODS["4 bits"], width=800_000) as run:
        cutter = Cutter(3)
        with Relay(run.syncer.port, cutter, cutter) as relay:
            with follow(relay.address, run=RUN, poll_s=0.01) as follower:
                run.require_same(next(follower))
            assert cutter.left == 0
            received = sum(link.down_bytes for link in relay.links)
        num_bytes = 4 * sum(theta.numel() for theta in (held.theta for held in run.held()))
        assert num_bytes <= received < num_bytes + 3 * READ_BYTES


def test_a_follower_outlives_a_restart_of_the_syncer(tmp_path: Path) -> None:
    with published_run(tmp_path, METHODS["4 bits"]) as run:
        follower = follow(run.syncer.address, run=RUN, poll_s=0.01)
        run.publish(0)
        run.require_same(next(follower))
        address = run.syncer.address
    with closing(follower), published_run(tmp_path, METHODS["4 bits"], address=address) as run:
        run.publish(0)
        run.require_same(next(follower))


def test_a_read_goes_on_at_another_address(tmp_path: Path) -> None:
    """Of which the syncer before has sent the manifest, and then nothing more."""
    with published_run(tmp_path, METHODS["4 bits"]) as run, Relay(run.syncer.port) as relay:
        with closing(open_source(f"{relay.address},{run.syncer.address}", RUN)) as source:
            manifest = read_manifest(source)
            relay.close()
            name = manifest.fragments[0][0].held
            assert source.get(name, 0, 100) == open_store(tmp_path / "state").get(name, 0, 100)


def test_a_run_that_went_back_is_followed_and_an_older_state_is_not(tmp_path: Path) -> None:
    """Versions 2 and 3 of fragment 0 come twice, with other bits."""
    state, saved, newer = tmp_path / "state", tmp_path / "saved", tmp_path / "newer"
    with published_run(tmp_path, METHODS["4 bits"]) as run:
        run.publish(0)
    shutil.copytree(state, saved)
    with follow(state, run=RUN) as follower:
        with published_run(tmp_path, METHODS["4 bits"]) as run:
            run.publish(0, 0)
            run.require_same(follower.newer())
        shutil.move(state, newer)
        shutil.copytree(saved, state)
        assert follower.newer() is None  # an older manifest than the one before
        for _ in range(2):  # two epochs on
            with published_run(tmp_path, METHODS["4 bits"], seed=2) as run:
                pass
        with published_run(tmp_path, METHODS["4 bits"], seed=2) as run:
            run.publish(0, 0)
            run.require_same(follower.newer())


def test_another_run_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with published_run(tmp_path, METHODS["4 bits"]):
        pass
    with follow(tmp_path / "state", run=RUN) as follower:
        assert follower.newer() is not None
        shutil.rmtree(tmp_path / "state")
        with published_run(tmp_path, METHODS["4 bits"]):
            pass
        with pytest.raises(LineageError, match=f"serves another run '{RUN}' than before"):
            follower.newer()


# --- learners ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOURCES)
def test_followers_change_nothing_of_the_run(kind: str, tmp_path: Path) -> None:
    ledgers = []
    for number in (0, 3):
        with published_run(tmp_path / str(number), METHODS["4 bits"]) as run:
            place = place_of(kind, run, tmp_path / str(number))
            followers = [follow(place, run=RUN, poll_s=0.001, callback=lambda _: None) for _ in range(number)]
            run.publish(0, 1, 0, 1)
            for each in followers:
                each.close()
                assert each.wait(300)
            status = status_of(run.syncer)
            bits = [it.digest for it in run.held()]
            ledgers.append((versions_of(run.syncer), bits, status["fragments"], status["tokens"]))
    assert ledgers[0] == ledgers[1]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_in_one_sentence(tmp_path: Path) -> None:
    Keyring.new(
        tmp_path / "keys", RUN, ["127.0.0.1"], [("raw", "learner"), ("eye", "viewer"), ("eva", "evaluator")], DAY
    )
    (tmp_path / "empty").mkdir()
    keys = tmp_path / "keys"
    with published_run(tmp_path, METHODS["4 bits"], keys=keys / "syncer") as run:
        address, state = run.syncer.address, tmp_path / "state"
        assert newest_model(address, run=RUN, keys=keys / "eye").versions == (0, 0)
        assert newest_model(address, run=RUN, keys=keys / "eva").versions == (0, 0)
        wrong: list[tuple[dict[str, object], type[DilocoError], str]] = [
            ({"source": address, "run": "other", "keys": keys / "eye"}, UnknownRunError, "serves run 'tiny'"),
            ({"source": state, "run": "other"}, ConfigError, "holds run 'tiny', not 'other'"),
            ({"source": address, "run": RUN}, AuthError, "keys"),
            ({"source": tmp_path / "none", "run": RUN}, ConfigError, "there is no store in"),
            ({"source": tmp_path / "empty", "run": RUN}, ConfigError, "there is no run in"),
            ({"source": state, "run": RUN, "keys": keys / "eye"}, ConfigError, "is a store, which takes no keys"),
            ({"source": address, "run": RUN, "keys": keys / "eye", "every": 0}, ConfigError, "every=0"),
        ]
        for arguments, kind, words in wrong:
            with pytest.raises(kind, match=words) as caught:
                next(follow(**arguments))  # type: ignore[arg-type]
            assert "\n" not in str(caught.value)


# --- a bucket ---------------------------------------------------------------------------------------------------------


def sent(run: PublishedRun, kind: str) -> int:
    """Bytes that the syncer itself has sent."""
    totals = run.syncer._wire_bytes.totals()
    return sum(number for (_, it, way), number in totals.items() if (it, way) == (kind, "sent"))


@pytest.fixture(scope="module")
def bucket() -> Iterator[BucketServer]:
    with BucketServer() as bucket:
        yield bucket


@contextmanager
def run_in(
    bucket: BucketServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: diloco.Method,
    width: int,
    **options: Any,
) -> Iterator[tuple[PublishedRun, str]]:
    """A run, and the URL of its store."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    url = bucket.url(tmp_path.name)
    with published_run(tmp_path, method, store=url, width=width, **options) as run:
        yield run, url


def test_a_store_that_has_never_answered_is_not_waited_for(
    bucket: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be misnamed."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    nobody = bucket.url("run", "http://127.0.0.1:1")  # nothing listens there
    with follow(nobody, run=RUN) as follower, pytest.raises(StoreError, match="check the bucket, its endpoint"):
        next(follower)


def test_a_suspended_syncer_answers_no_follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may have published since."""
    with (
        BucketServer() as bucket,
        run_in(bucket, tmp_path, monkeypatch, METHODS["4 bits"], 8, lease_s=3.0) as (run, url),
        closing(open_source(run.syncer.address, RUN)) as source,
    ):
        name = read_manifest(open_store(url)).fragments[0][0].held
        bucket.fault("status", num=1_000_000)
        until(lambda: run.syncer.standing == "suspended", "the syncer is not suspended")
        for read in (source.manifest, lambda: source.get(name, 0, 100)):
            with pytest.raises(StandbyError, match="is without its store now"):
                read()


def hide_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """From readers of URLs."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.setenv("no_grpc_proxy", "127.0.0.1")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it would keep the proxies of its first use


@pytest.mark.parametrize("is_reachable", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_syncer_refers_to_its_bucket_and_sends_itself_what_cannot_be_read_there(
    is_reachable: bool,
    bucket: BucketServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with run_in(bucket, tmp_path, monkeypatch, METHODS["4 bits"], 2000) as (run, _):
        run.publish(0)
        for name in CREDENTIALS:
            monkeypatch.delenv(name)  # a follower has none
        if not is_reachable:
            hide_the_bucket(monkeypatch)
        with follow(run.syncer.address, run=RUN) as follower:
            run.require_same(follower.newer())
            run.publish(1, 0, 0)
            run.require_same(follower.newer())
        assert (sent(run, "reads") > 4 * sum(each.theta.numel() for each in run.held())) is not is_reachable
        said = [record.message for record in caplog.records if "bytes come from the syncer itself" in record.message]
        assert len(said) == (0 if is_reachable else 1)


@pytest.mark.parametrize(
    "how",
    [
        "from the store",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("unreachable", "damaged", "outer steps on learners")),
    ],
)
def test_a_joiner_takes_the_model_from_the_bucket(
    how: str,
    bucket: BucketServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Or from the syncer, where the URL cannot be read, the object is damaged, or outer state belongs to the model."""
    method = METHODS["outer steps on learners" if how.startswith("outer") else "4 bits"]
    with run_in(bucket, tmp_path, monkeypatch, method, 2000) as (run, url):
        run.publish(0, 1, 0)
        if how == "damaged":
            versions = run.syncer.driver.manifest.fragments
            for name, tensor in ((versions[0][0].held, "theta"), (run.syncer.driver.manifest.frozen, "static")):
                data = bytearray(Bucket(url).get(str(name)))
                num_bytes = 8 + int.from_bytes(data[:8], "little")
                data[num_bytes + ObjectHead.from_bytes(bytes(data[:num_bytes])).entries[tensor].first] ^= 1
                Bucket(url).put(str(name), [data])
        for name in CREDENTIALS:
            monkeypatch.delenv(name)
        if how == "unreachable":
            hide_the_bucket(monkeypatch)
        before, (first, second) = sent(run, "joins"), (each.theta for each in run.held())
        model = Net(2000)
        exchange = diloco.connect(run.syncer.address, run=RUN, learner="joiner")
        with diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange) as learner:
            state = learner.global_state_dict()
        found = [torch.cat([state[f"layers.{n}.{it}"].flatten() for it in ("weight", "bias")]) for n in (0, 1)]
        assert sorted(found[0].tolist()) == sorted(first.tolist())
        assert sorted(found[1].tolist()) == sorted(second.tolist())
        num_bytes = sent(run, "joins") - before
        whole = first.numel() + second.numel()
        of = {"from the store": 0, "damaged": first.numel(), "unreachable": whole}.get(how, 2 * whole)
        assert 4 * of <= num_bytes < 4 * of + 4000  # headers
        said = [it.message for it in caplog.records if "from the syncer itself" in it.message]
        assert len(said) == {"damaged": 2, "unreachable": 1}.get(how, 0), said


def test_a_rank_reads_its_shard_from_the_bucket(
    bucket: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_in(bucket, tmp_path, monkeypatch, METHODS["4 bits"], SEGMENT_ELEMENTS) as (run, _):
        run.publish(0)
        before, theta = sent(run, "joins"), run.held()[0].theta
        shards = [Segments(1, 3), Segments(0, 0)]
        with closing(Connection(run.syncer.address)) as connection:
            receiver = Receiver(Dialler([connection]), RUN, run.raw.layout, METHODS["4 bits"], shards)
            request = pb.PullRequest(
                run=RUN, learner=run.raw.name, incarnation=run.raw.incarnation, base=-1, joining=True, fragment=0
            )
            advanced = receiver.pull(request).advanced
        assert advanced is not None
        assert torch.equal(advanced.held.theta, theta[SEGMENT_ELEMENTS : 3 * SEGMENT_ELEMENTS])
        assert sent(run, "joins") - before < 4000
