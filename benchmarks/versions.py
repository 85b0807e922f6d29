"""How fast a syncer closes and publishes rounds, by torch on one thread and by compiled loops on all.

    python -m benchmarks.versions [--quick | --parameters 1000000000]

Each case is a process of its own (`benchmarks.memory`): a driver is given all contributions of a round from eight
learners as fast as it takes them, in e3m0, for all fragments; it checks and merges them, takes the outer step, and
makes the new versions durable in a directory. Wall time of three versions of each fragment.

With `--parameters`, a syncer of its own serves a model of this size in 24 fragments to two learners on this machine,
which send what they do not train, wait for each version, and fetch its update; ten versions of each fragment. Its
memory is then the whole process's, the spool and the interpreter too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import diloco
from benchmarks.memory import METHODS, NUM_PARAMETERS, Case, Taken, job_seconds, layout_of, peak_row, taken
from benchmarks.transfer import WireLearner, serving
from diloco.core import arithmetic

NUM_LEARNERS = 8
NUM_FRAGMENTS = 24
_NUM_ROUNDS = 10
_WAYS: tuple[tuple[str, arithmetic.Arithmetic, int | None], ...] = (
    ("torch, one thread", "torch", 1), ("compiled, all cores", "compiled", None),
)  # fmt: skip


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for 124 million parameters, `quick` for 16 million."""
    rows: list[dict[str, Any]] = []
    for name, case in _cases(NUM_PARAMETERS // 8 if quick else NUM_PARAMETERS):
        its = taken(case)
        rows += [_row(name, its, case.num_parameters // case.num_fragments), peak_row(name, its)]
    return rows


def _cases(num_parameters: int) -> Iterator[tuple[str, Case]]:
    for method in ("mean, e3m0", "radial, e3m0"):
        for num_fragments in (1, NUM_FRAGMENTS):
            for way, computes, num_threads in _WAYS:
                name = f"{method}, fragments: {num_fragments}: {way}"
                yield name, Case(method, num_fragments, NUM_LEARNERS, num_parameters, computes, num_threads)


def _row(name: str, its: Taken, num_elements: int) -> dict[str, Any]:
    all_s, merge_s, persist_s = (each / (4e-9 * num_elements) for each in (its.version_s, its.merge_s, its.persist_s))
    unit = f"versions/s ({all_s:.1f} s/GB; closing {merge_s:.1f}, until durable {persist_s:.1f})"
    return {"name": name, "value": 1 / its.version_s, "unit": unit, "ratio": None, "target": None, "met": None}


def serve(num_parameters: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of a syncer that serves a model of this size to two learners."""
    size = num_parameters // NUM_FRAGMENTS
    method = replace(METHODS["radial, e3m0"], quorum=diloco.AllLive(2))
    payloads = [method.up.encode(0.01 * torch.randn(size)) for _ in range(2)]
    with serving(method, folder, None) as syncer, ThreadPoolExecutor(2) as threads:
        learners = syncer.learners(layout_of(NUM_FRAGMENTS, size), torch.randn(size), 2)
        began_s = time.monotonic()
        list(threads.map(_take_part, learners, payloads))
        version_s = (time.monotonic() - began_s) / (_NUM_ROUNDS * NUM_FRAGMENTS)
        peak = syncer.memory_bytes("VmHWM") / (4 * num_parameters)
    its = Taken(peak, version_s, *job_seconds(folder / "events.jsonl"))
    name = f"served: {num_parameters:,} parameters, radial, e3m0, learners: 2"
    return [_row(name, its, size), peak_row(name, its)]


def _take_part(learner: WireLearner, payload: Tensor) -> None:
    """Send each fragment as soon as the version before is there and fetched."""
    for round_ in range(_NUM_ROUNDS + 1):
        began_s = time.monotonic()
        for fragment in range(NUM_FRAGMENTS):
            learner.wait_for(round_, fragment)
            if round_:
                learner.pull(round_ - 1, fragment)
            if round_ < _NUM_ROUNDS:
                learner.push(round_, payload, fragment)
        print(f"{learner.name}: round {round_} after {time.monotonic() - began_s:.1f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="an eighth of the parameters")
    size.add_argument(
        "--parameters", type=int, help="serve a model of this size instead; 1e9 need 20 GB and 60 on a disk"
    )
    chosen = parser.parse_args()
    if chosen.parameters:
        with tempfile.TemporaryDirectory() as folder:
            rows = serve(chosen.parameters, Path(folder))
    else:
        rows = run(chosen.quick)
    for row in rows:
        print(f"{row['name']:64s}{row['value']:8.2f} {row['unit']}", flush=True)


if __name__ == "__main__":
    main()
