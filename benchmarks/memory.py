"""A syncer's peak memory while it merges, stores and publishes, in models: fp32 sizes of all trained parameters.

    python -m benchmarks.memory [--quick]

Each case is a process of its own: a driver with its store and spool, as behind the gRPC service, is given a model and
takes rounds of contributions from every learner until the number of updates that it keeps no longer grows. The peak is
what the kernel says (`VmHWM`). Left out are the spool, whose budget is a setting, and what the process took before it
had a model (interpreter, torch). `benchmarks.versions` tells the time of the same rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

import diloco
from diloco.core import arithmetic
from diloco.core.codecs import SEGMENT_ELEMENTS
from diloco.core.layout import Fragment, Layout, TensorSpec, place
from diloco.core.method import Method
from diloco.errors import DilocoError
from diloco.event_log import EventLog
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.contribution import Contribution
from diloco.protocol.members import Claim, Deadlines
from diloco.store.directory import Directory
from diloco.syncer.hosting import HostedDriver, SyncerDriver
from diloco.syncer.journal import Journal
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.spool import Slot, Spool

NUM_PARAMETERS = 124_000_000
GOAL_MODELS = 4.5
ROUNDS = 4
"""Of every fragment: one more than the updates that are kept."""
RUN = "benchmark"
_NEVER = Deadlines(lost_floor_s=math.inf, lost_cap_s=math.inf, stalled_floor_s=math.inf, stalled_cap_s=math.inf)
"""Nothing is heard of the learners but their contributions."""

METHODS = {
    "mean, fp32 down": diloco.DiLoCo(sync_every=1, codec=("int8", "fp32")),
    "mean, int4 down": diloco.DiLoCo(sync_every=1, codec=("int8", "int4")),
    "radial, bf16 down": replace(diloco.DiLoCo(sync_every=1, codec=("int8", "bf16")), merge=diloco.RadialDirectional()),
    "mean, e3m0": diloco.DiLoCo(sync_every=1, codec="e3m0"),
    "radial, e3m0": replace(diloco.DiLoCo(sync_every=1, codec="e3m0"), merge=diloco.RadialDirectional()),
}


@dataclass(frozen=True)
class Case:
    """A run of a syncer. `num_threads`: that close a round; None: one for each core."""

    method: str
    num_fragments: int
    num_learners: int
    num_parameters: int
    computes: arithmetic.Arithmetic = "auto"
    num_threads: int | None = None


@dataclass(frozen=True)
class Taken:
    """What a case took.

    Attributes:
        peak: memory, in models.
        version_s: from one durable version to the next, the first of each fragment apart.
        merge_s: closing a round, on average.
        persist_s: from there until the version is durable, which may take as long as the next ones are closed.
    """

    peak: float
    version_s: float
    merge_s: float
    persist_s: float


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for 124 million parameters, `quick` for 16 million: there the interpreter's own growth counts more."""
    num_parameters = NUM_PARAMETERS // 8 if quick else NUM_PARAMETERS
    names = [name for name in METHODS if "e3m0" not in name]
    cases = [Case(name, num_fragments, 2, num_parameters) for name in names for num_fragments in (1, 4)]
    if not quick:
        cases += [Case("mean, fp32 down", num_fragments, 16, num_parameters) for num_fragments in (1, 4)]
    return [row_of(case) for case in cases]


def row_of(case: Case) -> dict[str, Any]:
    """A row with the peak of a case."""
    name = f"{case.method}, fragments: {case.num_fragments}, learners: {case.num_learners}"
    return peak_row(name, taken(case))


def peak_row(name: str, its: Taken) -> dict[str, Any]:
    """A row with a peak that was measured."""
    met = its.peak <= GOAL_MODELS
    return {"name": name, "value": its.peak, "unit": "models", "ratio": None, "target": GOAL_MODELS, "met": met}


def taken(case: Case) -> Taken:
    """What a case takes, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--case", json.dumps(asdict(case))]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return Taken(**json.loads(ended.stdout.splitlines()[-1]))


def measure(case: Case) -> Taken:
    """What a case takes in this process, beyond the memory that it has now."""
    torch.set_num_threads(1)
    arithmetic.choose(case.computes)
    method = replace(METHODS[case.method], quorum=diloco.AllLive(case.num_learners))
    size = case.num_parameters // case.num_fragments
    layout = layout_of(case.num_fragments, size)
    before = status_bytes("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with Directory(directory) as store, EventLog(directory / "events.jsonl", who="syncer") as log:
            spool = _FilledSpool(directory, case.num_learners * case.num_fragments * method.up.encoded_bytes(size))
            driver = HostedDriver(
                RUN, method, store, spool, deadlines=_NEVER, journal=Journal(log, SyncerMetrics(RUN)),
                num_threads=case.num_threads,
            )  # fmt: skip
            driver.start()
            version_s = _take_rounds(driver, method, layout, [f"learner-{i:02d}" for i in range(case.num_learners)])
            driver.stop()
            driver.raise_failure()
        seconds = job_seconds(directory / "events.jsonl")
    peak_bytes = status_bytes("VmHWM") - before - spool.most_bytes
    return Taken(peak_bytes / (4 * case.num_parameters), version_s, *seconds)


def job_seconds(log: Path) -> tuple[float, float]:
    """`Taken.merge_s` and `persist_s` of an event log, the first version of each fragment apart."""
    of_versions = [each for each in map(json.loads, log.read_text().splitlines()) if each.get("version", 0) > 1]
    merge_s, persist_s = (
        statistics.fmean(each[name] for each in of_versions if name in each) for name in ("merge_s", "persist_s")
    )
    return merge_s, persist_s


def layout_of(num_fragments: int, num_elements: int) -> Layout:
    """Fragments of one tensor each."""
    return Layout(tuple(place(f, [TensorSpec(f"w{f}", (num_elements,), "float32")]) for f in range(num_fragments)), ())


class _FilledSpool(Spool):
    """Knows the most bytes that it has held, and so keeps."""

    most_bytes = 0

    def allocate(self, num_bytes: int) -> Slot:
        slot = super().allocate(num_bytes)
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return slot


def _take_rounds(driver: HostedDriver, method: Method, layout: Layout, learners: Sequence[str]) -> float:
    """Seconds per version, the first of each fragment apart."""
    _initialise(driver, layout)
    for learner in learners:
        _join(driver, learner, layout)
    segments = [0.01 * torch.randn(SEGMENT_ELEMENTS) for _ in learners]
    began_s = 0.0
    for round_ in range(ROUNDS):
        if round_ == 1:
            began_s = time.monotonic()
        for fragment in layout.fragments:
            for number, learner in enumerate(learners):
                _contribute(driver, method, learner, fragment, round_, segments[number:] + segments[:number])
        driver.drain()
    took_s = time.monotonic() - began_s
    assert driver.ask(lambda it: it.state.versions) == (ROUNDS,) * len(layout.fragments)
    return took_s / ((ROUNDS - 1) * len(layout.fragments))


def _initialise(driver: HostedDriver, layout: Layout) -> None:
    thetas = [torch.randn(fragment.numel) for fragment in layout.fragments]
    model = driver.jobs.initial(layout, thetas, save({}), learner="benchmark", source="random numbers", run_id="0" * 32)

    def event(it: SyncerDriver, done: Callable[[DilocoError | None], None]) -> None:
        it.initialise(model, done)

    _require(driver.wait_for(event))


def _join(driver: HostedDriver, learner: str, layout: Layout) -> None:
    def event(it: SyncerDriver, done: Callable[[int], None]) -> None:
        it.join(Claim(learner), layout, done)

    driver.wait_for(event)


def _contribute(
    driver: HostedDriver, method: Method, learner: str, fragment: Fragment, round_: int, segments: Sequence[Tensor]
) -> None:
    number = round_ + 1
    c = Contribution(learner, 1, fragment.index, number, round_, round_, 10, 1, 10 * number, step=number)
    num_bytes = method.up.encoded_bytes(fragment.numel)
    push = driver.ask(lambda it: it.begin_push(c, num_bytes, boot=it.boot))
    _write_contribution(method, push.slot.buffer, fragment.numel, segments)

    def event(it: SyncerDriver, done: Callable[[DilocoError | None], None]) -> None:
        it.complete_push(push, done)

    _require(driver.wait_for(event))


def _require(error: DilocoError | None) -> None:
    if error is not None:
        raise error


def _write_contribution(method: Method, buffer: memoryview, num_elements: int, segments: Sequence[Tensor]) -> None:
    """An outer gradient of these segments again and again, so that making it takes neither memory nor time."""
    payloads = itertools.cycle([bytes_of(method.up.encode(each)) for each in segments])
    last = bytes_of(method.up.encode(segments[0][: num_elements % SEGMENT_ELEMENTS]))
    start = 0
    for payload in itertools.chain(itertools.islice(payloads, num_elements // SEGMENT_ELEMENTS), [last]):
        buffer[start : start + len(payload)] = payload
        start += len(payload)


def status_bytes(key: str) -> int:
    """A number of bytes that the kernel says of this process, such as VmRSS."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {key}; this benchmark needs Linux.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the parameters, and two learners only")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(asdict(measure(Case(**json.loads(chosen.case))))))
        return
    print(f"{'':56s}{'models':>8s}")
    for row in run(chosen.quick):
        print(f"{row['name']:56s}{row['value']:8.2f}", flush=True)


if __name__ == "__main__":
    main()
