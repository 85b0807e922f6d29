"""What it takes to make a version of a fragment durable in a directory, and to read it back, against a plain file.

    python -m benchmarks.store [--quick]

A version has Θ and a momentum of as many bytes; with a lossy wire also a residual, and an update of an eighth of Θ's
bytes. Publishing is its objects, the record, and the manifest that names them, all synced; reading verifies every byte.
The ratio is to one file of as many bytes that is written and synced, or read, in turns. What is superseded is deleted
in between: a syncer deletes it minutes later.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import diloco
from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Layout, TensorSpec, digest, place
from diloco.core.update import Update
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import Manifest, NamedVersion
from diloco.run.objects import Blob
from diloco.run.ports import InitialModel
from diloco.store.directory import Directory
from diloco.store.format import TensorFormat

RUN_ID = "0" * 32


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for fragments of 4 and 64 MB, `quick` for the first only."""
    return measure([4] if quick else [4, 64], repeats=8 if quick else 24)


def measure(sizes_mb: list[int], repeats: int) -> list[dict[str, Any]]:
    """Two rows for each size and kind of wire: name, value, unit, ratio (medians over the repeats)."""
    rows = []
    for size_mb in sizes_mb:
        for wire in ("lossless", "lossy"):
            with tempfile.TemporaryDirectory() as folder, Directory(folder) as store:
                run = _Run(store, size_mb << 18, is_lossy=wire == "lossy")
                turns = [run.turn() for _ in range(repeats)]
            for index, what in enumerate(("published", "read")):
                seconds, plain_s = (statistics.median(turn[of][index] for turn in turns) for of in (0, 1))
                rows.append(_row(f"{what}, {size_mb} MB, {wire}", 1e3 * seconds, seconds / plain_s))
    return rows


class _Run:
    """A run of one fragment, which is published without a syncer."""

    def __init__(self, store: Directory, num_elements: int, *, is_lossy: bool) -> None:
        self._store, self._format, self._num_names = store, TensorFormat(), 0
        theta = torch.randn(num_elements)
        residual = torch.randn(num_elements) if is_lossy else None
        self._held = GlobalFragment(0, 0, theta, {"momentum": torch.randn(num_elements)}, residual, digest(theta))
        self._payload = torch.zeros(num_elements // 2, dtype=torch.uint8)
        self._update = Update(0, 0, 0, ("a", "b"), (1.0, 1.0), 1.0, self._held.digest, lossless=not is_lossy)
        layout = Layout((place(0, [TensorSpec("x", (num_elements,), "float32")]),), ())
        model = InitialModel(layout, (self._held,), b"", "", "nothing", RUN_ID)
        frozen = self._put(self._format.frozen("benchmark", diloco.DiLoCo(sync_every=4), model))
        self._manifest = Manifest("benchmark", RUN_ID, 1, 7, 0, "", frozen)
        self._token: str | None = None
        self._publish(0)

    def turn(self) -> tuple[list[float], list[float]]:
        """Seconds to publish a version and to read it, and those of a plain file."""
        before, began = self._manifest, time.perf_counter()
        self._publish(before.fragments[0][0].version + 1)
        published = time.perf_counter()
        self._format.read(self._store, self._manifest)
        read = time.perf_counter()
        self._store.delete(sorted(before.names - self._manifest.names))
        named = self._manifest.fragments[0][0]
        data = bytearray(b"".join(bytes(self._store.get(name)) for name in (named.held, named.update) if name))
        return [published - began, read - published], _plain(self._store.path / "file", data)

    def _publish(self, version: int) -> None:
        held, update = replace(self._held, version=version), replace(self._update, base=version - 1, version=version)
        name = self._put(self._format.version(RUN_ID, held, update, 1))
        encoded = None if update.lossless else self._put(self._format.update(RUN_ID, update, self._payload))
        named = NamedVersion(version, name, encoded)
        record = self._put(self._format.record({"members": {}, "step": version}, (Epoch(1, (0,)),)))
        fragments = ((named, *(self._manifest.fragments[0][:1] if version else ())),)
        self._manifest = replace(self._manifest, serial=version + 1, record=record, fragments=fragments)
        self._token = self._store.swap(self._manifest.to_bytes(), self._token)

    def _put(self, blob: Blob) -> str:
        self._num_names += 1
        name = f"1/{self._num_names}-{blob.hash}"
        self._store.put(name, blob.parts)
        return name


def _plain(path: Path, data: bytearray) -> list[float]:
    """Seconds to write and sync a file, and to read it."""
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter()
    path.read_bytes()
    return [written - began, time.perf_counter() - written]


def _row(name: str, milliseconds: float, ratio: float) -> dict[str, Any]:
    return {"name": name, "value": milliseconds, "unit": "ms", "ratio": ratio, "target": None, "met": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 MB only, and fewer repeats")
    print(f"{'':32s}{'ms':>8s}{'ratio':>8s}")
    for row in run(parser.parse_args().quick):
        print(f"{row['name']:32s}{row['value']:8.1f}{row['ratio']:8.2f}")


if __name__ == "__main__":
    main()
