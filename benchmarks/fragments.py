"""What a fragment costs in memory traffic and hashing, processor time as a ratio to a memory copy of as many bytes.

    python -m benchmarks.fragments [--quick]

Adoption is what a learner's training thread pays, the outer step what the syncer pays to close a round, publishing what
it pays to make a version with its momentum durable in a temporary directory. The copy is measured beside each, in
turns, on one thread.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import diloco
from diloco.core.fragments import make_layout
from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import digest
from diloco.core.memory import flush_denormals
from diloco.core.outer import OUTER_OPTIMIZERS, Adam
from diloco.core.update import Update
from diloco.learner.partition import partition_of
from diloco.learner.pieces import Units
from diloco.learner.tensors import LearnerTensors
from diloco.protocol.manifest import Manifest, NamedVersion
from diloco.store.directory import Directory
from diloco.store.format import TensorFormat

WIDTH = 4096
METHOD = diloco.DiLoCo(sync_every=4, overlap=1)


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for 256 MiB of fp32, `quick` for 32."""
    return measure((32 if quick else 256) << 18, repeats=3 if quick else 5)


def measure(num_elements: int, repeats: int) -> list[dict[str, Any]]:
    """One row per case: name, value (processor seconds per GB), unit, ratio to a memory copy (median over the
    repeats)."""
    source, target = torch.randn(num_elements), torch.zeros(num_elements)
    rows = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, action in _cases(source):
            action()
            seconds, ratios = [], []
            for _ in range(repeats):
                copy_s = _seconds(lambda: target.copy_(source))
                seconds.append(_seconds(action))
                ratios.append(seconds[-1] / copy_s)
            rows.append(_row(name, statistics.median(seconds) / (4e-9 * num_elements), statistics.median(ratios)))
    finally:
        torch.set_num_threads(num_threads)
    return rows


def _cases(theta: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    other = torch.randn(theta.numel())
    for dtype in (torch.float32, torch.bfloat16):
        for how in (diloco.Replace(), diloco.Mix(0.5), diloco.KeepDisplacement()):
            values = _values(theta.numel(), dtype, how, origin=other)
            name = f"adoption, {type(how).__name__}, {str(dtype).removeprefix('torch.')}"
            yield name, partial(values.adopt, 0, theta, just_sent=False)
    for kind in OUTER_OPTIMIZERS:
        outer = Adam(0.1) if kind is Adam else kind(0.7)  # type: ignore[call-arg]
        delta = other.clone()
        yield f"outer step, {kind.__name__}", partial(outer.step, outer.init(theta.numel()), theta, delta, out=delta)
    yield "flush of denormals", partial(flush_denormals, other)
    with tempfile.TemporaryDirectory() as folder, Directory(folder) as store:
        yield "digest and publishing, with momentum", _publishing(store, theta, {"momentum": other})


def _values(num_elements: int, dtype: torch.dtype, how: Any, origin: Tensor) -> LearnerTensors:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(num_elements // WIDTH, WIDTH, dtype=dtype))
    layout = make_layout(model, diloco.Whole())
    units = Units(layout)
    partition = partition_of(layout, dict(model.named_parameters()), units)
    values = LearnerTensors(model, layout, replace(METHOD, adopt=how), partition, units)
    values.anchors = [origin]
    return values


def _publishing(store: Directory, theta: Tensor, outer_state: Mapping[str, Tensor]) -> Callable[[], None]:
    versions, format_ = itertools.count(1), TensorFormat()
    token: str | None = None

    def publish() -> None:
        nonlocal token
        version = next(versions)
        held = GlobalFragment(0, version, theta, outer_state, None, digest(theta))
        update = Update(0, version - 1, version, (), (), 1.0, held.digest, lossless=True)
        blobs = [format_.version("0" * 32, held, update, 0), format_.record({}, ())]
        named, record = (f"1/{2 * version + index}-{blob.hash}" for index, blob in enumerate(blobs))
        for name, blob in zip((named, record), blobs, strict=True):
            store.put(name, blob.parts)
        fragments = ((NamedVersion(version, named),),)
        manifest = Manifest("benchmark", "0" * 32, serial=version, frozen=named, record=record, fragments=fragments)
        token = store.swap(manifest.to_bytes(), token)

    return publish


def _seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def _row(name: str, seconds_per_gb: float, ratio: float) -> dict[str, Any]:
    return {"name": name, "value": seconds_per_gb, "unit": "s/GB", "ratio": ratio, "target": None, "met": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the elements and fewer repeats")
    print(f"{'':44s}{'s/GB':>8s}{'ratio':>8s}")
    for row in run(parser.parse_args().quick):
        print(f"{row['name']:44s}{row['value']:8.3f}{row['ratio']:8.2f}")


if __name__ == "__main__":
    main()
