"""What the objects of a run hold.

version   `theta`, `residual`, `outer.<name>` of one version of one fragment; its update, run id and trained tokens
update    `payload`, as sent over the wire; its update and run id
frozen    `static`, a safetensors file of what training does not change; run, run id, method, layout, source, …
record    JSON: `SyncerCore.saved`, and the epochs of the run; its hash is SHA-256 of its bytes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.core.update import Update
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import Manifest
from diloco.run.objects import Blob, Objects
from diloco.run.ports import InitialModel, Json, RunMethod, SavedRun
from diloco.store.blobs import new_blob
from diloco.store.reading import OUTER, READERS, ObjectReader, require_one_run

T = TypeVar("T")


class TensorFormat:
    """`run.objects.ObjectFormat` of a run with tensors. Blobs are views of the tensors' memory, without copies. What
    was read is kept, so that the next `read` reads only other objects, also after a `read` that failed."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def forget(self) -> None:
        """Drop what was read."""
        self._kept.clear()

    def holds(self, manifest: Manifest) -> bool:
        """Whether all that `read` returns is kept."""
        newest = {versions[0].held for versions in manifest.fragments}
        return {manifest.frozen, manifest.record, *newest} <= self._kept.keys()

    def version(self, run_id: str, held: GlobalFragment, update: Update, tokens: int) -> Blob:
        """As `ObjectFormat.version`."""
        tensors = {"theta": held.theta, **{OUTER + name: value for name, value in held.outer_state.items()}}
        if held.residual is not None:
            tensors["residual"] = held.residual
        described = {"run_id": run_id, "update": update.as_dict(), "tokens": tokens}
        return new_blob(tensors, described, {"theta": held.digest})

    def update(self, run_id: str, update: Update, payload: Tensor) -> Blob:
        """As `ObjectFormat.update`."""
        return new_blob({"payload": payload}, {"run_id": run_id, "update": update.as_dict()}, {})

    def frozen(self, run: str, method: RunMethod, model: InitialModel[GlobalFragment]) -> Blob:
        """As `ObjectFormat.frozen`."""
        described = {
            "run": run, "run_id": model.run_id, "method": method.to_dict(), "layout": model.layout.to_dict(),
            "source": model.source, "step": model.step, "tokens": model.tokens,
        }  # fmt: skip
        static = torch.frombuffer(bytearray(model.static), dtype=torch.uint8) if model.static else torch.empty(0).byte()
        return new_blob({"static": static}, described, {})

    def record(self, record: Json | None, epochs: Sequence[Epoch]) -> Blob:
        """As `ObjectFormat.record`."""
        plain = {"record": record, "epochs": [[each.number, list(each.versions)] for each in epochs]}
        data = json.dumps(plain, separators=(",", ":")).encode()
        return Blob(hashlib.sha256(data).hexdigest(), (data,))

    def read(self, objects: Objects, manifest: Manifest) -> SavedRun[GlobalFragment]:
        """As `ObjectFormat.read`, at the newest versions. No older version takes the place of one that is not whole."""
        assert manifest.frozen is not None
        assert manifest.record is not None
        self._kept = {name: found for name, found in dict(self._kept).items() if name in manifest.names}
        with ObjectReader(objects) as reader, ThreadPoolExecutor(READERS) as readers:
            frozen = self._read(manifest.frozen, reader.frozen)
            require_one_run(frozen, manifest, objects.name)
            record, epochs = self._read(manifest.record, lambda name: reader.record(name, len(manifest.fragments)))
            named = [versions[0] for versions in manifest.fragments]

            def version(index: int) -> tuple[GlobalFragment, Update]:
                return self._read(named[index].held, lambda _: reader.version(named[index], index, frozen))

            versions = list(readers.map(version, range(len(named))))
        contributors = tuple(update.contributors for _, update in versions)
        fragments = tuple(held for held, _ in versions)
        return SavedRun(**vars(frozen), fragments=fragments, contributors=contributors, epochs=epochs, record=record)

    def _read(self, name: str, read: Callable[[str], T]) -> T:
        found: T | None = self._kept.get(name)
        if found is None:
            found = self._kept[name] = read(name)
        return found
