"""A store in a bucket, against a server that is atomic: conditions, races, answers that are lost, requests that land
late."""

from __future__ import annotations

import random
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.bucket_server import BucketServer
from tests.store.small_run import SmallRun

import diloco
from diloco.cli import main
from diloco.demo.bucket_server import CREDENTIALS
from diloco.errors import ConfigError, DilocoError, MissingObjectError, StoreError, SwapRefusedError
from diloco.protocol.manifest import FORMAT, MOST_BYTES
from diloco.run.objects import Objects
from diloco.store import bucket as module
from diloco.store import directory as directory_module
from diloco.store.bucket import PART_BYTES, Bucket
from diloco.store.directory import Directory
from diloco.store.inspection import check
from diloco.store.objects import open_store, opened
from diloco.syncer.server import Options, Syncer


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    with BucketServer() as running:
        yield running


@pytest.fixture
def bucket(server: BucketServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return Bucket(server.url(re.sub(r"\W+", "-", request.node.name)))


def test_an_object_is_read_as_it_was_put_whole_and_in_part(bucket: Bucket) -> None:
    first, second, third = (f"{place}-{64 * digit}" for place, digit in (("1/1", "a"), ("2/1", "b"), ("2/2", "c")))
    large = random.Random(1).randbytes(2 * PART_BYTES + 5)
    parts = [large[:3], memoryview(large)[3 : PART_BYTES + 1], memoryview(large)[PART_BYTES + 1 :]]
    bucket.put(first, parts)
    bucket.put(second, [b"small"])
    bucket.put(third, [])
    assert bucket.get(first) == large
    assert bucket.get(first, 10, 20) == large[10:20]
    assert bucket.get(first, PART_BYTES) == large[PART_BYTES:]
    assert bucket.get(first, len(large) - 2, len(large) + 5) == large[-2:]
    assert bucket.get(second, 5, 7) == bucket.get(second, 9) == bucket.get(third) == b""
    assert bucket.list() == [first, second, third]
    assert bucket.get(third, 0, 9) == b""
    bucket.delete([first, "2/9-dd"])
    bucket.delete([])
    assert bucket.list() == [second, third]
    with pytest.raises(MissingObjectError, match=f"has no {first}"):
        bucket.get(first)


def test_other_keys_beside_the_objects_are_left_alone(bucket: Bucket) -> None:
    """As a file of the people who keep the bucket."""
    for name in ("README.txt", "1/notes", "1/1-aa/part"):
        bucket.put(name, [b"notes"])
    run = make_run(bucket)
    assert set(bucket.list()) == run.manifest.names
    assert (check(bucket).starts, check(bucket).problems) == (True, [])
    assert bucket.get("README.txt") == b"notes"


def test_a_signed_url_reads_one_object_without_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("1/1-aa", [b"content"])
    url = bucket.sign("1/1-aa", 60)
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.read() == b"content"
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in url


def test_a_manifest_is_swapped_only_for_the_one_that_was_read(bucket: Bucket) -> None:
    assert bucket.manifest() is None
    with pytest.raises(SwapRefusedError):
        bucket.swap(b"x", '{"e_tag": "\\"abc\\""}')
    first = bucket.swap(b"1", None)
    with pytest.raises(SwapRefusedError):
        bucket.swap(b"x", None)
    found = bucket.manifest()
    assert found is not None
    assert (found.data, found.token) == (b"1", first)
    second = bucket.swap(b"2", first)
    with pytest.raises(SwapRefusedError):
        bucket.swap(b"x", first)
    assert bucket.swap(b"3", second)
    found = bucket.manifest()
    assert found is not None
    assert found.data == b"3"


def test_a_manifest_that_is_too_large_is_not_read(bucket: Bucket) -> None:
    bucket.swap(bytes(MOST_BYTES + 1), None)
    found = bucket.manifest()
    assert found is not None
    assert found.data == b""
    assert bucket.swap(b"mended", found.token)


@pytest.mark.slow
def test_of_two_writers_one_wins(bucket: Bucket, server: BucketServer) -> None:
    """400 races: the first swap of each prefix, and one from a common token."""
    both = threading.Barrier(2)
    won = 0

    def swapped(name: str, writer: int, token: str | None) -> str | None:
        both.wait(60)
        try:
            return Bucket(server.url(name)).swap(f"{token} by {writer}".encode(), token)
        except SwapRefusedError:
            return None

    with ThreadPoolExecutor(2) as pool:
        for race in range(200):
            token: str | None = None
            for _ in range(2):
                names = [f"race-{race}"] * 2
                found = [each for each in pool.map(swapped, names, range(2), [token] * 2) if each is not None]
                assert len(found) == 1
                token, won = found[0], won + 1
    assert won == 400


@pytest.mark.parametrize("status", [409, 429, 500, 503])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_swap_that_the_bucket_does_not_decide_has_an_unknown_fate(
    bucket: Bucket, server: BucketServer, status: int, is_first: bool
) -> None:
    token = None if is_first else bucket.swap(b"1", None)
    server.fault("status", status=status)
    with pytest.raises(StoreError, match=str(status)) as refused:
        bucket.swap(b"2", token)
    assert not isinstance(refused.value, SwapRefusedError)
    assert server.num_pending == 0, "nothing is repeated here"
    bucket.swap(b"2", token)


def test_a_swap_whose_answer_is_lost_is_refused_when_it_is_repeated(bucket: Bucket, server: BucketServer) -> None:
    token = bucket.swap(b"1", None)
    server.fault("lost")
    with pytest.raises(StoreError, match="cannot write manifest.json") as unknown:
        bucket.swap(b"2", token)
    assert not isinstance(unknown.value, SwapRefusedError)
    with pytest.raises(SwapRefusedError):
        bucket.swap(b"2", token)
    found = bucket.manifest()
    assert found is not None
    assert found.data == b"2"


def test_a_swap_that_lands_late_is_refused_after_its_repetition(
    server: BucketServer, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MANIFEST_TIMEOUT_S", 0.5)
    impatient = Bucket(bucket.name)
    token = bucket.swap(b"1", None)
    server.fault("late")
    with pytest.raises(StoreError, match="cannot write manifest.json"):
        impatient.swap(b"2", token)
    until(lambda: server.num_waiting == 1, "the request does not arrive")
    again = bucket.swap(b"2", token)
    bucket.swap(b"3", again)
    server.release()
    until(lambda: server.num_waiting == 0, "the request does not land")
    found = bucket.manifest()
    assert found is not None
    assert found.data == b"3"


def test_a_start_tries_the_conditions_and_leaves_nothing(bucket: Bucket, server: BucketServer) -> None:
    bucket.require_conditions()
    assert bucket.manifest() is None
    server.fault("status", path="", num=1, status=429)
    with pytest.raises(StoreError, match="429"):
        bucket.require_conditions()
    bucket.require_conditions()
    assert bucket._paths("probe/") == []


@pytest.mark.parametrize("num_obeyed", [0, 1])
def test_a_bucket_that_ignores_a_condition_is_refused(bucket: Bucket, server: BucketServer, num_obeyed: int) -> None:
    class Sloppy(Bucket):
        """Whose server ignores the conditions of all writes after the first so many refusals."""

        def _is_accepted(self, path: str, token: str | None, *, again: bool = False) -> bool:
            nonlocal num_obeyed
            if num_obeyed == 0:
                server.fault("ignored", path=path)
            num_obeyed -= 1
            return super()._is_accepted(path, token, again=again)

    with pytest.raises(StoreError, match="ignores the conditions"):
        Sloppy(bucket.name).require_conditions()
    assert bucket._paths("probe/") == []


def test_credentials_that_may_not_write_are_refused_in_one_sentence(bucket: Bucket, server: BucketServer) -> None:
    server.fault("status", path="", status=403)
    with pytest.raises(StoreError, match=r"cannot write probe/\w+ in s3://.* \(403 Forbidden\); check .*\.$"):
        bucket.require_conditions()
    assert (bucket.manifest(), bucket.list()) == (None, [])


@pytest.mark.parametrize(
    ("url", "kind", "match"),
    [
        ("s3://missing/run?endpoint={}", StoreError, "there is no bucket for s3://missing"),
        ("s3://bucket/run?endpoint=http://127.0.0.1:9", StoreError, "check the bucket, its endpoint"),
        ("ftp://bucket/run", ConfigError, "not the URL of a bucket"),
        ("memory:///run", ConfigError, "not the URL of a bucket"),
        ("s3://", ConfigError, "not the URL of a bucket"),
        ("s3://bucket/run?secret_access_key=x", ConfigError, "credentials are set in the environment"),
    ],
)
def test_a_store_that_cannot_be_is_refused_in_one_sentence(
    bucket: Bucket, server: BucketServer, url: str, kind: type[DilocoError], match: str
) -> None:
    with pytest.raises(kind, match=match) as refused:
        Bucket(url.format(server.endpoint)).require_conditions()
    assert str(refused.value).count("\n") == 0
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    "url",
    [
        "gs://bucket/run",
        "https://account.blob.core.windows.net/container/run",
        "https://account.r2.cloudflarestorage.com/bucket/run",
    ],
)
def test_the_other_clouds_have_their_urls(bucket: Bucket, url: str) -> None:
    assert Bucket(url).name == url


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:SECRET@bucket/run",
        "s3://KEY:SEC/RET@bucket/run?endpoint=http://127.0.0.1:1",
        "https://KEY:SECRET@account.r2.cloudflarestorage.com/bucket/run",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--store", url])
    said = capsys.readouterr().err
    assert (ended.value.code, "has credentials before its @; set them in the environment" in said) == (2, True)
    assert "SEC" not in said


# --- `diloco syncer` on a store that it cannot serve ------------------------------------------------------------------

RUN_FILE = """
[run]
name = "demo"
tokens = 1_000_000
[method]
preset = "DiLoCo"
sync_every = 30
[syncer]
store = "{}"
"""


def make_run(objects: Objects, run: str = "demo") -> SmallRun:
    it = SmallRun(objects)
    it.initialise(run)
    it.publish(0, 1)
    it.release()
    return it


def shorten(objects: Objects) -> None:
    name = make_run(objects).manifest.fragments[0][0].held
    objects.put(name, [bytes(objects.get(name))[:-8]])


def make_later(objects: Objects) -> None:
    run = make_run(objects)
    with pytest.MonkeyPatch.context() as later:
        later.setattr("diloco.protocol.manifest.FORMAT", FORMAT + 1)
        run.release()


PREPARED: dict[str, tuple[Callable[[Objects], object], str]] = {
    "another run": (lambda it: make_run(it, "other"), r"the store holds run 'other', not 'demo'; use another place"),
    "a short object": (shorten, r"version 1\) is damaged \(its size differs from the \d+ bytes .*\); `diloco syncer"),
    "a later format": (make_later, rf"has format {FORMAT + 1} and this version reads {FORMAT}; upgrade diloco"),
}  # fmt: skip
"""Of a directory as of a bucket: what is there, and what is said."""

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "ignores conditions": ({"kind": "ignored"}, r"ignores the conditions .*; use another bucket, or a directory"),
    "may not write": ({"kind": "status", "status": 403}, r"cannot write probe/\w+ .* \(403 \w+\); check the bucket"),
}  # fmt: skip


def refusal(store: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (directory / "run.toml").write_text(RUN_FILE.format(store))
    arguments = ["--address", "127.0.0.1:0", "--no-page", "--set", f"run.dir={directory}/dir"]
    with pytest.raises(SystemExit, match="1"):
        main(["syncer", str(directory / "run.toml"), *arguments])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.splitlines()[-1]


def contents(objects: Objects) -> dict[str, bytes]:
    found = objects.manifest()
    assert found is not None
    return {"manifest": found.data} | {name: bytes(objects.get(name)) for name in objects.list()}


@pytest.mark.parametrize("kind", PREPARED)
@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_a_syncer_refuses_what_is_not_its_run_and_changes_nothing(
    place: str, kind: str, bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, match = PREPARED[kind]
    store = bucket.name if place == "bucket" else str(tmp_path / "state")
    with opened(store, lock=True) as objects:
        prepare(objects)
        before = contents(objects)
    assert re.search(match, refusal(store, tmp_path, capsys))
    assert contents(open_store(store)) == before


@pytest.mark.parametrize("kind", FAULTS)
def test_a_syncer_refuses_a_bucket_that_cannot_be_its_store_and_changes_nothing(
    kind: str, bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault, match = FAULTS[kind]
    with BucketServer() as server:
        store = server.url("run")
        make_run(Bucket(store))
        before = contents(Bucket(store))
        server.fault(**fault, path="", num=1 << 30)
        assert re.search(match, refusal(store, tmp_path, capsys))
        assert contents(Bucket(store)) == before


def test_a_syncer_refuses_a_directory_that_is_served_or_on_a_network_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "state"
    with Directory(store) as objects:
        make_run(objects)
        before = contents(objects)
        assert re.search(r"is in use by process \d+ .*; ", refusal(str(store), tmp_path, capsys))
        assert contents(objects) == before
    (tmp_path / "mounts").write_text(f"server:/export {store.resolve()} nfs rw 0 0\n")
    monkeypatch.setattr(directory_module, "MOUNTS", tmp_path / "mounts")
    said = refusal(str(store), tmp_path, capsys)
    assert re.search(r"network file system \(nfs\).*use a directory on a disk of this machine, or a bucket", said)
    assert contents(Directory(store, lock=False)) == before


@pytest.mark.parametrize(("sync_every", "place"), [(1, "bucket"), (100, "bucket"), (1, "directory")])
def test_a_method_that_waits_for_answers_more_often_than_a_bucket_swaps_is_told_so(
    sync_every: int, place: str, bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = bucket.name if place == "bucket" else None
    options = Options("127.0.0.1:0", tmp_path / "state", store=store)
    with Syncer("tiny", diloco.DiLoCo(sync_every=sync_every), options):
        pass
    is_told = "learners wait for an answer every 1 steps, and a bucket publishes at most once a second" in caplog.text
    assert is_told == (sync_every == 1 and place == "bucket")
