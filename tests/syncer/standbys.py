"""Two syncers as processes, which share a run in a bucket; each reaches the bucket by a relay of its own."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from benchmarks.processes import until
from tests.bucket_server import BucketServer
from tests.chaos.relay import Relay
from tests.processes import ForkedSyncer
from tests.syncer.runs import RUN
from tests.syncer.test_faults import RUN_FILE

from diloco import events
from diloco.demo.bucket_server import CREDENTIALS
from diloco.errors import DilocoError
from diloco.event_log import read_events
from diloco.exchange.dialling import fetch_status
from diloco.protocol.manifest import Manifest
from diloco.store.bucket import Bucket
from diloco.store.format import TensorFormat

PREFIX = "run"

LEASE_S = 3.0


class SharingSyncer(ForkedSyncer):
    """One of two syncers. `way`: to the bucket."""

    environment = CREDENTIALS

    def __init__(self, directory: Path, run_file: str, way: Relay) -> None:
        self.way = way
        super().__init__(directory, run_file)

    def standing(self) -> str | None:
        """How it stands; None: it does not answer."""
        try:
            store: Any = fetch_status(self.address, run=RUN)["store"]
        except DilocoError:
            return None
        return str(store["standing"])

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, "it does not stop")

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM, and wait for its end."""
        os.kill(self.pid, signal.SIGTERM)
        until(self.has_ended, "it does not end")

    def cut_off(self) -> None:
        """It does not reach the bucket: what it sends is not answered."""
        self.way.refuse()
        self.way.cut()

    def heal(self) -> None:
        """It reaches the bucket again."""
        self.way.heal()

    def told(self, kind: type[events.Event]) -> list[Any]:
        """Its events of a kind."""
        path = self.directory / "state" / "events.jsonl"
        return [each for each in read_events(path) if isinstance(each, kind)] if path.exists() else []


class Pair:
    """A bucket, and two syncers that start as standbys, "a" first; a context manager.

    Attributes:
        addresses: as learners dial them.
    """

    def __init__(
        self, path: Path, *, lease_s: float = LEASE_S, at_least: int = 2, lost_floor_s: float = 60.0, more: str = ""
    ) -> None:
        self._stack = ExitStack()
        self.server = self._stack.enter_context(BucketServer())
        environment = self._stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        self.syncers = dict[str, SharingSyncer]()
        self._path, self._lease_s, self._more = path, lease_s, more
        self._at_least, self._lost_floor_s = at_least, lost_floor_s
        self.a = self.start("a")
        until(lambda: self.a.standing() == "serving", "the first does not serve")
        self.b = self.start("b")
        until(lambda: self.b.standing() == "waiting", "the second does not wait")
        self.addresses = f"{self.a.address},{self.b.address}"

    def start(self, name: str, *, standby: bool = True) -> SharingSyncer:
        """Start one of the two for the first time."""
        way = self._stack.enter_context(Relay(self.server.port))
        place = self.server.url(PREFIX, f"http://{way.address}")
        more = f'store = "{place}"\nlease_s = {self._lease_s}\nkeep_s = 60\n{self._more}\n'
        more += "standby = true\n" if standby else ""
        (self._path / name).mkdir()
        run_file = RUN_FILE.format(at_least=self._at_least, lost_floor_s=self._lost_floor_s, more=more)
        self.syncers[name] = it = SharingSyncer(self._path / name, run_file, way)
        return it

    def other(self, syncer: SharingSyncer) -> SharingSyncer:
        """The other one."""
        return self.b if syncer is self.a else self.a

    def until_serving(self, syncer: SharingSyncer) -> None:
        """Wait until it serves the run."""
        until(lambda: syncer.standing() == "serving", "it does not serve the run")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for syncer in self.syncers.values():
            syncer.kill()
        self._stack.close()

    def bucket(self) -> Bucket:
        """The store of the run."""
        return Bucket(self.server.url(PREFIX))

    # --- what must hold -----------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """In the bucket now."""
        found = self.bucket().manifest()
        assert found is not None
        return Manifest.from_bytes(found.data, "the bucket")

    @staticmethod
    def _served(syncer: SharingSyncer) -> set[int]:
        """The epochs in which it published."""
        epoch, found = 0, set[int]()
        for each in syncer.told(events.Event):
            match each:
                case events.StandingChanged(standing="serving", epoch=number):
                    epoch = number
                case events.Published():
                    found.add(epoch)
        return found

    def check(self) -> tuple[int, ...]:
        """No version was lost, and none published twice; returns the newest versions in the bucket.

        A version that was swapped in by a syncer that was killed before it could say so is in no event log.
        """
        manifest = self.manifest()
        saved = TensorFormat().read(self.bucket(), manifest)
        published: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for syncer in self.syncers.values():
            for each in syncer.told(events.Published):
                published[each.fragment, each.version].append(each.digest)
        for (fragment, version), digests in published.items():
            assert len(digests) == 1, f"version {version} of fragment {fragment} was published {len(digests)} times"
            assert version <= manifest.versions[fragment], f"version {version} of fragment {fragment} is lost"
            if version == manifest.versions[fragment]:
                assert digests[0] == saved.fragments[fragment].digest
        epochs = [each.number for each in saved.epochs]
        assert epochs == sorted(set(epochs))
        served = [self._served(syncer) for syncer in self.syncers.values()]
        assert not set[int]().union(*served) - set(epochs)
        assert sum(map(len, served)) == len(set[int]().union(*served)), f"an epoch was served by both: {served}"
        return manifest.versions
