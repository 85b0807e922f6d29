"""What rounds compute, by torch and by compiled loops, in wall time as a ratio to a memory copy of as many bytes.

    python -m benchmarks.arithmetic [--quick]

A fragment has tensors of a transformer's sizes. A syncer closes rounds of it in place; a learner encodes its outer
gradient, with and without error feedback, and advances to the next version. The ways take turns, each beside a copy of
the fragment in fp32 by one thread; a ratio is the median over the turns, with the lowest and the highest. Where a way
computes with all cores, so does the code that is measured. The last rows are of a process of its own: from a round's
arithmetic being called first until it is ready, with no compiled loop on the disk, and with all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import diloco
from benchmarks.merges import places_of
from diloco.compute.threads import ThreadMap, num_cores
from diloco.core import arithmetic
from diloco.core.codecs import E3M0, FP32, Codec, compress
from diloco.core.global_fragment import GlobalFragment, apply_lossless_update, apply_update, close
from diloco.core.memory import Each, one_by_one
from diloco.core.merges import Encoded
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.learner.device import DeviceQueue, Displacement

NUM_ELEMENTS = 32_000_000
NUM_LEARNERS = 8
MEAN = diloco.DiLoCo(sync_every=1, codec="e3m0")
RADIAL = replace(MEAN, merge=diloco.RadialDirectional())
_WAYS: dict[str, tuple[arithmetic.Arithmetic, bool]] = {
    "torch, one thread": ("torch", False),
    "compiled, one thread": ("compiled", False),
    "compiled, all cores": ("compiled", True),
}


@dataclass(frozen=True)
class _Case:
    """Something that is computed. `goal`: in copies, of its last way. `threaded`: all cores can compute it."""

    name: str
    goal: float
    action: Callable[[Each], object]
    threaded: bool = True


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for 32 million elements, `quick` for 4, and for the first use."""
    return [*measure(NUM_ELEMENTS // 8 if quick else NUM_ELEMENTS, repeats=5), *first_uses()]


def measure(num_elements: int, repeats: int) -> list[dict[str, Any]]:
    """One row per case and way: name, value (seconds per GB of fp32), unit, ratio to a copy's time (median; low, high),
    target, met."""
    rows: list[dict[str, Any]] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    threads = ThreadMap(num_cores())
    try:
        for case in _cases(num_elements):
            rows += _measured(case, num_elements, repeats, threads)
    finally:
        threads.close()
        arithmetic.choose("auto")
        torch.set_num_threads(num_threads)
    return rows


def _measured(case: _Case, num_elements: int, repeats: int, threads: Each) -> Iterator[dict[str, Any]]:
    source, copied = torch.randn(num_elements), torch.zeros(num_elements)
    ways = {way: how for way, how in _WAYS.items() if case.threaded or not how[1]}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, (computes, all_cores) in ways.items():
            arithmetic.choose(computes)
            copy_s = min(_seconds(lambda: copied.copy_(source)) for _ in range(3))
            own_s = _seconds(partial(case.action, threads if all_cores else one_by_one))
            if turn:  # the first one warms up
                seconds[way].append(own_s)
                ratios[way].append(own_s / copy_s)
    for way in ways:
        goal = case.goal if way == list(ways)[-1] else None
        value = statistics.median(seconds[way]) / (4e-9 * num_elements)
        yield _row(f"{case.name}: {way}", value, "s/GB", goal, ratios[way])


def _cases(num_elements: int) -> Iterator[_Case]:
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(num_elements, generator=generator)
    places = places_of(num_elements)

    def closing(method: Method, codec: Codec, num_learners: int) -> Callable[[Each], object]:
        residual = None if method.down.lossless else torch.zeros(num_elements)
        held = replace(GlobalFragment.first(method, 0, theta), residual=residual)
        encoded = [
            Encoded(f"learner-{i}", (codec.encode(0.01 * torch.randn(num_elements, generator=generator)),), 1.0 + i / 8)
            for i in range(num_learners)
        ]
        return lambda each: close(method, held, encoded, places, in_place=True, each=each)

    yield _Case(f"close of {NUM_LEARNERS}, e3m0 mean", 14, closing(MEAN, E3M0(), NUM_LEARNERS))
    yield _Case(f"close of {NUM_LEARNERS}, e3m0 radial", 20, closing(RADIAL, E3M0(), NUM_LEARNERS))
    yield _Case("close of 1, e3m0 mean", 8, closing(MEAN, E3M0(), 1))
    full = diloco.DiLoCo(sync_every=1)
    yield _Case(f"close of {NUM_LEARNERS}, fp32 mean", 14, closing(full, FP32(), NUM_LEARNERS))

    held, codec = GlobalFragment.first(MEAN, 0, theta).bare, E3M0()
    payload = codec.encode(0.01 * theta)
    update = Update(0, 0, 1, (), (), 1.0, "", lossless=False)
    advance = partial(apply_update, MEAN, held, update, payload, places, verify=False)
    yield _Case("advance, e3m0", 4, lambda each: advance(each=each))
    residual, anchor = 0.001 * theta, 1.01 * theta
    sent = Displacement(DeviceQueue(torch.device("cpu")), theta, None, anchor, ())
    yield _Case("encode, e3m0 with error feedback", 5, lambda _: sent.compress(codec, residual, 1.0), threaded=False)
    yield _Case("encode, e3m0", 3, lambda _: codec.encode(theta, payload), threaded=False)
    whole = replace(update, lossless=True)
    hashed = partial(apply_lossless_update, whole, theta.view(torch.uint8), num_elements, {}, verify=False)
    yield _Case("digest", 2.5, lambda each: hashed(each=each))  # which is all that it computes


def first_uses() -> list[dict[str, Any]]:
    """Rows of the first round of a process, without and with compiled loops on the disk."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.arithmetic", "--first-use"]
        return [
            _row(f"first use, {cached}", _first_use(command, cache), "s")
            for cached in ("nothing compiled", "all compiled before")
        ]


def _first_use(command: list[str], cache: str) -> float:
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    root = Path(__file__).parents[1]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=root)
    return float(ended.stdout)


def _use_first() -> float:
    """Seconds of this process's first round, of few elements: a close, encoding and advancing."""
    torch.set_num_threads(1)
    num_elements = 1 << 16
    theta, places = torch.randn(num_elements), places_of(num_elements)
    began_s = time.perf_counter()
    arithmetic.choose("compiled")
    encoded = [Encoded("learner", compress(E3M0(), theta, theta)[:1], 1.0)]
    held = GlobalFragment.first(RADIAL, 0, theta)
    published = close(RADIAL, held, encoded, places, in_place=True)
    apply_update(RADIAL, held.bare, published.update, published.payload, places)
    return time.perf_counter() - began_s


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _row(
    name: str, value: float, unit: str, target: float | None = None, ratios: list[float] | None = None
) -> dict[str, Any]:
    ratio = None if ratios is None else statistics.median(ratios)
    met = None if target is None or ratio is None else ratio <= target
    spread = {} if ratios is None else {"low": min(ratios), "high": max(ratios)}
    return {"name": name, "value": value, "unit": unit, "ratio": ratio, "target": target, "met": met, **spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the elements")
    parser.add_argument("--first-use", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.first_use:
        print(_use_first())
        return
    for row in run(chosen.quick):
        ratio = "" if row["ratio"] is None else f"{row['ratio']:8.1f} copies [{row['low']:.1f}, {row['high']:.1f}]"
        goal = "" if row["target"] is None else f"  goal {row['target']:g}"
        print(f"{row['name']:56s}{row['value']:8.2f} {row['unit']:5s}{ratio}{goal}")


if __name__ == "__main__":
    main()
