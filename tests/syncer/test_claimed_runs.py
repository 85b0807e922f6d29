"""A syncer whose run another one claims while it stops, loads the run, receives a contribution, or cannot read what the
other one has written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.processes import until
from tests.bucket_server import BucketServer
from tests.frames import frames
from tests.syncer.runs import RUN, Raw, layout, method, start

import diloco
from diloco import events
from diloco.demo.bucket_server import CREDENTIALS
from diloco.errors import DamagedObjectError, DilocoError, StandbyError, SwapRefusedError
from diloco.event_log import read_events
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.manifest import Manifest
from diloco.store.bucket import Bucket
from diloco.syncer.server import Syncer

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))

ALWAYS = 1 << 30

LONG_S = 600.0
"""A lease in which nothing is renewed before the test has ended."""


class Shared:
    """A run in a bucket, and syncers of this process over it."""

    def __init__(self, directory: Path, server: BucketServer, stack: ExitStack) -> None:
        self.server, self._directory, self._stack = server, directory, stack
        self.bucket = Bucket(server.url("run"))

    def start(self, lease_s: float) -> Syncer:
        return self._stack.enter_context(
            start(self._directory, method(), store=self.server.url("run"), lease_s=lease_s, standby=True)
        )

    def raw(self, syncer: Syncer, name: str = "raw") -> Raw:
        raw = Raw(syncer.address, name)
        self._stack.callback(raw.connection.close)
        return raw

    def manifest(self) -> Manifest:
        found = self.bucket.manifest()
        assert found is not None
        return Manifest.from_bytes(found.data, "the bucket")

    def swap(self, change: Callable[[Manifest], bytes]) -> None:
        """Replace the manifest, whatever the syncer swaps meanwhile."""
        while True:
            found = self.bucket.manifest()
            assert found is not None
            with suppress(SwapRefusedError):
                self.bucket.swap(change(Manifest.from_bytes(found.data, "the bucket")), found.token)
                return

    def stood(self) -> list[str]:
        """What the syncers were, one after the other."""
        told = read_events(self._directory / "state" / "events.jsonl")
        return [each.standing for each in told if isinstance(each, events.StandingChanged)]


def claimed(manifest: Manifest) -> Manifest:
    """As another syncer claims it."""
    return replace(manifest, epoch=manifest.epoch + 1, boot=7, serial=manifest.serial + 1, address="elsewhere:1")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with BucketServer() as server, ExitStack() as stack:
        yield Shared(tmp_path, server, stack)


def until_serving(syncer: Syncer) -> None:
    def serves() -> bool:
        with suppress(StandbyError):
            return syncer.driver is not None
        return False

    until(serves, "it does not serve the run")


def wait_for_its_end(syncer: Syncer) -> None:
    """`Syncer.wait`, which raises why it ends."""
    stop = threading.Event()
    limit = threading.Timer(300.0, stop.set)
    limit.start()
    try:
        syncer.wait(stop)
    finally:
        limit.cancel()


def test_a_syncer_ends_when_it_cannot_read_the_manifest_that_has_replaced_its_own(shared: Shared) -> None:
    syncer = shared.start(lease_s=3.0)
    until_serving(syncer)
    shared.swap(lambda manifest: claimed(manifest).to_bytes()[:-1])
    with pytest.raises(DamagedObjectError, match=r"the manifest of \S+ is damaged"):
        wait_for_its_end(syncer)
    assert syncer.standing == "fenced"


def test_a_syncer_that_is_closed_as_it_begins_again_claims_nothing(shared: Shared) -> None:
    """A version is being stored while another syncer claims the run: what waits for that waits for the store."""
    syncer = shared.start(LONG_S)
    until_serving(syncer)
    first, second = shared.raw(syncer, "first"), shared.raw(syncer, "second")
    first.initialise()
    first.join()
    syncer.driver.drain()  # what is put next is the version
    shared.server.fault("slow", path="")
    first.push(ONES)
    until(lambda: shared.server.num_waiting == 1, "no version is stored")
    shared.swap(lambda manifest: claimed(manifest).to_bytes())
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(second.join)  # its record is swapped in, and that is refused
        until(lambda: syncer.standing == "fenced", "it is not fenced")
        released = claimed(claimed(shared.manifest()))
        shared.swap(lambda _: replace(released, boot=0, address="").to_bytes())  # whoever waits may claim it at once
        closing = pool.submit(syncer.close)
        until(syncer._stopping.is_set, "it does not stop")
        shared.server.release()
        closing.result(timeout=300)
        with pytest.raises(DilocoError):
            joining.result(timeout=300)
    assert (syncer.standing, shared.manifest().epoch) == ("fenced", released.epoch)


@pytest.mark.slow
def test_a_syncer_that_is_deposed_while_it_loads_the_run_waits_for_its_turn(shared: Shared) -> None:
    """Another one has claimed the run, and deleted what this one was about to read."""
    first = shared.start(LONG_S)
    until_serving(first)
    shared.raw(first).initialise()
    first.close()
    [held, *_] = (versions[0].held for versions in shared.manifest().fragments)
    shared.server.fault("slow", method="GET", path=held)
    syncer = shared.start(lease_s=2.0)
    until(lambda: shared.server.num_waiting == 1, "it does not load the run")
    shared.server.fault("slow")
    until(lambda: shared.server.num_waiting == 2, "it swaps nothing")
    empty = Manifest(RUN)
    shared.swap(lambda manifest: claimed(replace(empty, epoch=manifest.epoch, serial=manifest.serial)).to_bytes())
    theirs = shared.manifest()
    shared.bucket.delete(shared.bucket.list())
    until(lambda: syncer.standing == "suspended", "it is not suspended")
    shared.server.release()
    until(lambda: "serving" in "-".join(shared.stood()).partition("fenced")[2], "it does not wait")
    assert syncer.versions() == ()
    assert shared.manifest().epoch == theirs.epoch + 1


@pytest.mark.slow
def test_a_contribution_that_comes_up_before_a_syncer_is_suspended_is_not_acknowledged_after_that(
    shared: Shared,
) -> None:
    syncer = shared.start(lease_s=3.0)
    until_serving(syncer)
    raw = shared.raw(syncer)
    raw.initialise()
    raw.join()

    def parts() -> Iterator[bytes]:
        header, *rest = frames(raw.header(ONES.numel()), bytes_of(ONES))
        yield header
        until(lambda: syncer.driver.ask(lambda driver: driver.status())["spooled_bytes"] > 0, "it makes no room")
        shared.server.fault("status", num=ALWAYS)
        until(lambda: syncer.standing == "suspended", "it is not suspended")
        yield from rest

    with pytest.raises(StandbyError, match="this syncer is without its store now"):
        raw.push_frames(parts())
    assert raw.beat().is_suspended
