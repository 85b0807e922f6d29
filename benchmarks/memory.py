"""A syncer's peak memory while it merges, stores and publishes, in models: fp32 sizes of all trained parameters.

    python -m benchmarks.memory [--quick]

Each case is a process of its own: a driver with its store and spool, as behind the gRPC service, is given a model and
takes rounds of contributions from every learner until the number of updates that it keeps no longer grows. The peak is
what the kernel says (`VmHWM`). Left out are the spool, whose budget is a setting and is full here, and what the process
took before it had a model (interpreter, torch).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

import diloco
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
from diloco.syncer.spool import Spool

NUM_PARAMETERS = 124_000_000
GOAL_MODELS = 5.0
ROUNDS = 4
"""Of every fragment: one more than the updates that are kept."""
RUN = "benchmark"
_NEVER = Deadlines(lost_floor_s=math.inf, lost_cap_s=math.inf, stalled_floor_s=math.inf, stalled_cap_s=math.inf)
"""Nothing is heard of the learners but their contributions."""

METHODS = {
    "mean, fp32 down": diloco.DiLoCo(sync_every=1, codec=("int8", "fp32")),
    "mean, int4 down": diloco.DiLoCo(sync_every=1, codec=("int8", "int4")),
    "radial, bf16 down": replace(diloco.DiLoCo(sync_every=1, codec=("int8", "bf16")), merge=diloco.RadialDirectional()),
}


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for 124 million parameters, `quick` for 16 million: there the interpreter's own growth counts more."""
    num_parameters = NUM_PARAMETERS // 8 if quick else NUM_PARAMETERS
    cases = [(name, num_fragments, 2) for name in METHODS for num_fragments in (1, 4)]
    if not quick:
        cases += [("mean, fp32 down", num_fragments, 16) for num_fragments in (1, 4)]
    return [row_of(*case, num_parameters) for case in cases]


def row_of(name: str, num_fragments: int, num_learners: int, num_parameters: int) -> dict[str, Any]:
    case = json.dumps([name, num_fragments, num_learners, num_parameters])
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--case", case], check=True, capture_output=True, text=True
    )
    peak = float(ended.stdout.split()[-1]) / (4 * num_parameters)
    return {
        "name": f"{name}, fragments: {num_fragments}, learners: {num_learners}",
        "value": peak,
        "unit": "models",
        "ratio": None,
        "target": GOAL_MODELS,
        "met": peak <= GOAL_MODELS,
    }


def measure(name: str, num_fragments: int, num_learners: int, num_parameters: int) -> int:
    """Peak bytes of this process over what it has now, the spool apart."""
    torch.set_num_threads(1)
    method = replace(METHODS[name], quorum=diloco.AllLive(num_learners))
    size = num_parameters // num_fragments
    layout = Layout(tuple(place(f, [TensorSpec(f"w{f}", (size,), "float32")]) for f in range(num_fragments)), ())
    spool_bytes = num_learners * method.up.encoded_bytes(size)
    learners = [f"learner-{index:02d}" for index in range(num_learners)]
    before = status_bytes("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with Directory(directory) as store, EventLog(directory / "events.jsonl", who="syncer") as log:
            journal = Journal(log, SyncerMetrics(RUN))
            spool = Spool(directory, spool_bytes)
            driver = HostedDriver(RUN, method, store, spool, deadlines=_NEVER, journal=journal)
            driver.start()
            _take_rounds(driver, method, layout, learners)
            driver.stop()
            driver.raise_failure()
    return status_bytes("VmHWM") - before - spool_bytes


def _take_rounds(driver: HostedDriver, method: Method, layout: Layout, learners: Sequence[str]) -> None:
    _initialise(driver, layout)
    for learner in learners:
        _join(driver, learner, layout)
    for round_ in range(ROUNDS):
        for fragment in layout.fragments:
            for learner in learners:
                _contribute(driver, method, learner, fragment, round_)
            driver.drain()
    assert driver.ask(lambda it: it.state.versions) == (ROUNDS,) * len(layout.fragments)


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


def _contribute(driver: HostedDriver, method: Method, learner: str, fragment: Fragment, round_: int) -> None:
    number = round_ + 1
    c = Contribution(learner, 1, fragment.index, number, round_, round_, 10, 1, 10 * number, step=number)
    num_bytes = method.up.encoded_bytes(fragment.numel)
    push = driver.ask(lambda it: it.begin_push(c, num_bytes, boot=it.boot))
    _write_contribution(method, push.slot.buffer, fragment.numel)

    def event(it: SyncerDriver, done: Callable[[DilocoError | None], None]) -> None:
        it.complete_push(push, done)

    _require(driver.wait_for(event))


def _require(error: DilocoError | None) -> None:
    if error is not None:
        raise error


def _write_contribution(method: Method, buffer: memoryview, num_elements: int) -> None:
    """A random outer gradient, a segment at a time, so that making it takes no memory."""
    start = 0
    for first in range(0, num_elements, SEGMENT_ELEMENTS):
        payload = bytes_of(method.up.encode(torch.randn(min(SEGMENT_ELEMENTS, num_elements - first)) * 0.01))
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
        print(measure(*json.loads(chosen.case)))
        return
    print(f"{'':56s}{'models':>8s}")
    for row in run(chosen.quick):
        print(f"{row['name']:56s}{row['value']:8.2f}", flush=True)


if __name__ == "__main__":
    main()
