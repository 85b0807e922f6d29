"""A run of two fragments in a store, published without a syncer, for the tests of what is durable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import diloco
from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Layout, TensorSpec, digest, place
from diloco.core.update import Update
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import Manifest, NamedVersion
from diloco.protocol.members import Report
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore
from diloco.run.objects import Blob, Objects
from diloco.run.ports import InitialModel, SavedRun
from diloco.store.directory import Directory
from diloco.store.format import TensorFormat
from diloco.store.objects import read_manifest, repeated

NUM_ELEMENTS = 1000
STATIC = safetensors.torch.save({"rope.inv_freq": torch.arange(4.0)})
METHOD = diloco.DiLoCo(sync_every=30)
RUN_ID = "0" * 32


def layout_of(num_elements: int) -> Layout:
    return Layout(tuple(place(f, [TensorSpec("ab"[f], (num_elements,), "float32")]) for f in (0, 1)), ())


def theta_of(fragment: int, version: int, num_elements: int = NUM_ELEMENTS) -> torch.Tensor:
    return torch.arange(num_elements, dtype=torch.float32) + 1000.0 * fragment + version / 8


def held_of(fragment: int, version: int, num_elements: int = NUM_ELEMENTS) -> GlobalFragment:
    theta = theta_of(fragment, version, num_elements)
    if version == 0:
        return GlobalFragment(fragment, 0, theta, {}, None, digest(theta))
    state = {"momentum": -theta, "steps": torch.tensor(version)}
    return GlobalFragment(fragment, version, theta, state, theta / 3, digest(theta))


def update_of(held: GlobalFragment) -> Update:
    if held.version == 0:
        return Update(held.fragment, 0, 0, (), (), 1.0, held.digest, lossless=True)
    names, weights = ("site-a", "site-b"), (1.0, 0.5)
    return Update(held.fragment, held.version - 1, held.version, names, weights, 1.0, held.digest, lossless=False)


def payload_of(held: GlobalFragment) -> torch.Tensor:
    return torch.full((held.theta.numel() // 2,), held.version, dtype=torch.uint8)


class SmallRun:
    """Puts and swaps as a syncer does, in the epoch that it has claimed.

    Attributes:
        manifest: the last one that was swapped.
        num_versions: that its manifests name, of each fragment.
    """

    format = TensorFormat()

    def __init__(self, objects: Objects, num_elements: int = NUM_ELEMENTS, *, deletes: bool = True) -> None:
        self.objects, self._num_elements, self._deletes = objects, num_elements, deletes
        found = objects.manifest()
        self.manifest = Manifest("demo") if found is None else Manifest.from_bytes(found.data, objects.name)
        self._token = None if found is None else found.token
        self._num_names = 0

    def claim(self, boot: int = 7) -> None:
        self.swap(replace(self.manifest, epoch=self.manifest.epoch + 1, boot=boot, origin=None, copied_at=None))

    def release(self) -> None:
        self.swap(replace(self.manifest, boot=0))

    def initialise(self, run: str = "demo", run_id: str = RUN_ID, static: bytes = STATIC) -> None:
        if self.manifest.epoch == 0:
            self.manifest = Manifest(run)
            self.claim()
        held = (held_of(0, 0, self._num_elements), held_of(1, 0, self._num_elements))
        model = InitialModel(layout_of(self._num_elements), held, static, "site-a", "seed 17", run_id, step=3, tokens=5)
        frozen = self.put(self.format.frozen(run, METHOD, model))
        record = self.put(self.format.record(None, (Epoch(self.manifest.epoch, (0, 0)),)))
        versions = (self.put(self.format.version(run_id, each, update_of(each), 0)) for each in held)
        fragments = tuple((NamedVersion(0, name),) for name in versions)
        self.swap(replace(self.manifest, run_id=run_id, frozen=frozen, record=record, fragments=fragments))

    def publish(self, fragment: int, version: int, record: Mapping[str, Any] | None = None) -> None:
        """By two learners, of 32 and 64 tokens."""
        held = held_of(fragment, version, self._num_elements)
        update = update_of(held)
        name = self.put(self.format.version(self.manifest.run_id, held, update, 96))
        encoded = self.format.update(self.manifest.run_id, update, payload_of(held))
        assert encoded is not None
        named = NamedVersion(version, name, self.put(encoded))
        self.save_record(record_at(version) if record is None else record, {fragment: named})

    def save_record(self, record: Mapping[str, Any], published: Mapping[int, NamedVersion] | None = None) -> None:
        name = self.put(self.format.record(record, (Epoch(self.manifest.epoch, (0, 0)),)))
        self.swap(replace(self.manifest.with_versions(published or {}), record=name))

    def put(self, blob: Blob) -> str:
        self._num_names += 1
        name = f"{self.manifest.epoch}/{self._num_names}-{blob.hash}"
        self.objects.put(name, blob.parts)
        return name

    def swap(self, manifest: Manifest) -> None:
        following = replace(manifest, serial=self.manifest.serial + 1)
        self._token = self.objects.swap(following.to_bytes(), self._token)
        before, self.manifest = self.manifest, following
        if self._deletes:
            self.objects.delete(sorted(before.names - following.names))


def make_run(path: Path, versions: int = 3, run_id: str = RUN_ID) -> None:
    """A run that was stopped at these versions of fragment 0."""
    with Directory(path) as objects:
        run = SmallRun(objects)
        run.initialise(run_id=run_id)
        for version in range(1, versions + 1):
            run.publish(0, version)
        run.release()


def record_at(step: int) -> dict[str, Any]:
    """As a run's with a learner that has trained."""
    core = SyncerCore(Rules.of(METHOD, 2), [0, 0])
    core.joined(0.0, "site-a")
    core.heartbeat(0.0, "site-a", 1, Report(step=step, steps=step, tokens=5 * step, step_s=1.0))
    return dict(core.saved().values)


def check_versions(objects: Objects, versions: dict[int, int], num_elements: int = NUM_ELEMENTS) -> None:
    saved = read_newest(objects)
    assert {fragment.fragment: fragment.version for fragment in saved.fragments} == versions
    for index, fragment in enumerate(saved.fragments):
        assert torch.equal(fragment.theta, theta_of(index, fragment.version, num_elements))
        assert fragment.digest == digest(fragment.theta)
        if fragment.version:
            assert torch.equal(fragment.outer_state["momentum"], -fragment.theta)
            assert fragment.outer_state["steps"].item() == fragment.version
            assert fragment.residual is not None
            assert torch.equal(fragment.residual, fragment.theta / 3)


def started(path: Path, num_elements: int = NUM_ELEMENTS) -> dict[int, int]:
    """The versions that a start serves, all of them verified. Raises StoreError."""
    with Directory(path) as objects:
        saved = read_newest(objects)
        core = SyncerCore(Rules.of(saved.method, 2), [each.version for each in saved.fragments])
        if saved.record is not None:
            core.restore(0.0, saved.record)
        versions = {each.fragment: each.version for each in saved.fragments}
        check_versions(objects, versions, num_elements)
        SmallRun(objects, num_elements).claim()
        return versions


def objects_of(path: Path) -> list[str]:
    """The files of objects, but for temporary ones."""
    return sorted(f"{each.parent.name}/{each.name}" for each in (path / "objects").glob("*/*"))


def flip(position: float) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(position * (len(data) - 1))] ^= 4
        path.write_bytes(data)

    return damage


def contents(path: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def read_newest(objects: Objects) -> SavedRun[GlobalFragment]:
    """The run in a store, which a syncer may serve meanwhile."""
    return repeated(lambda: TensorFormat().read(objects, read_manifest(objects)))
