"""Check and measure the CUDA path on the GPU that is here, and write a page about it: `make gpu`.

    python -m benchmarks.gpu [--page runs/gpu/page.md]

Exit code 0: every check passed; 1: one failed; 2: there is no GPU, so nothing was checked or measured, as the page then
says.
"""

from __future__ import annotations

import argparse
import math
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import torch
from torch import nn

import diloco
from benchmarks.step import beside_a_syncer, interleaved, row_of
from diloco import Learner, Method
from diloco.core.codecs import codec_from_name
from diloco.exchange.base import Exchange
from diloco.learner.device import DeviceQueue, DeviceUploads, Displacement

ROOT = Path(__file__).parents[1]
NO_GPU = "No GPU was found: nothing was checked and nothing was measured."
CHECKS = (
    "tests/core/test_codecs_chunked.py", "tests/core/test_codecs_triton.py", "tests/learner/test_cuda.py",
    "tests/learner/test_device.py", "tests/learner/test_snapshot.py", "tests/exchange/test_group.py",
)  # fmt: skip
CHECKED = "cuda or devices or kernels or own_process_group"
CODECS = ("e3m0", "int4", "int8", "bf16", "fp32")
GOAL = 1.02
"""A step with an exchange in flight ÷ a bare step."""


@dataclass(frozen=True)
class Workload:
    """What is trained: a transformer of about `layers` · 12 · `width`² parameters, on `tokens` a step.

    An exchange is in flight for `window_s`.
    """

    width: int = 768
    layers: int = 8
    tokens: int = 8 * 1024
    window_s: float = 5.0
    pairs: int = 8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, default=ROOT / "runs" / "gpu" / "page.md", help="where the page goes")
    chosen = parser.parse_args(arguments)
    chosen.page.parent.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        chosen.page.write_text("\n".join(["# The CUDA path", "", f"**{NO_GPU}**", "", *facts()]) + "\n")
        print(f"{NO_GPU} ({chosen.page})", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    checks = run_checks()
    figures = [*encoding(device, 1 << 28, repeats=15), in_flight(device, Workload())]
    text = page(checks, figures, device)
    chosen.page.write_text(text)
    print(text)
    return int(any(outcome not in ("passed", "skipped") for _, outcome, _ in checks) or not checks)


# - checks -----------------------------------------------------------------------------------------------------------


def run_checks() -> list[tuple[str, str, str]]:
    """(name, outcome, reason) of each test of the CUDA path."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-W",
            "default",
            f"--junitxml={report}",
            "-k",
            CHECKED,
        ]
        subprocess.run([*command, *CHECKS], cwd=ROOT, check=False)
        return list(outcomes(report.read_text())) if report.exists() else []


def outcomes(report: str) -> Iterator[tuple[str, str, str]]:
    """(name, outcome, reason) of each test in a JUnit report."""
    for case in ET.fromstring(report).iter("testcase"):
        outcome, reason = "passed", ""
        for kind in ("failure", "error", "skipped"):
            if (found := case.find(kind)) is not None:
                outcome, reason = kind if kind == "skipped" else "failed", found.get("message", "").split("\n")[0]
        yield case.get("name", ""), outcome, reason


# - figures ----------------------------------------------------------------------------------------------------------


def encoding(device: torch.device, num_elements: int, repeats: int) -> list[dict[str, Any]]:
    """Rows as in benchmarks/codecs.py: GB/s of fp32 and copy time ÷ own time, a copy on the device before each; then
    of a fragment's way to a payload with error feedback, anchor and residual on the host, and of an upload."""
    x = torch.randn(num_elements, device=device, generator=torch.Generator(device).manual_seed(0))
    out = torch.empty_like(x)
    actions: dict[str, Callable[[], object]] = {}
    for name in CODECS:
        codec = codec_from_name(name)
        payload = codec.encode(x)
        actions[f"{name} encode"] = partial(codec.encode, x, payload)
        actions[f"{name} decode"] = partial(codec.decode, payload, num_elements, out)
    anchor = torch.zeros(num_elements // 4)
    displacement = Displacement(DeviceQueue(device), x[: len(anchor)], None, anchor, ())
    actions["e3m0 with error feedback, from the host's anchor"] = partial(
        displacement.compress, codec_from_name("e3m0"), anchor, 1.0
    )
    actions["upload of a new global value"] = partial(DeviceUploads(device).copy, anchor)
    rows, copied = [], [_seconds(device, lambda: out.copy_(x))]
    for name, action in actions.items():
        action()
        copied.clear()
        own = []
        for _ in range(repeats):
            copied.append(_seconds(device, lambda: out.copy_(x)))
            own.append(_seconds(device, action))
        elements = num_elements if name.endswith(("encode", "decode")) else len(anchor)
        share = elements / num_elements
        ratio = statistics.median(copy * share / mine for copy, mine in zip(copied, own, strict=True))
        rows.append({"name": name, "gb_per_s": elements * 4e-9 / statistics.median(own), "ratio": ratio})
    copy_row = {"name": "memory copy", "gb_per_s": num_elements * 4e-9 / statistics.median(copied), "ratio": 1.0}
    return [copy_row, *rows]


def in_flight(
    device: torch.device, workload: Workload, exchange: Exchange | None = None, steps: int | None = None
) -> dict[str, Any]:
    """A row as in benchmarks/step.py: sending, the steps until the answer is due, adopting it, against bare steps.

    `exchange`: another than the one with a syncer in another process; `steps`: how many, instead of the window's.
    """
    training = _Training(device, workload)
    if steps is None:
        training.step()
        step_s = statistics.median(_seconds(device, training.step) for _ in range(5))
        steps = max(4, math.ceil(workload.window_s / step_s))
    if exchange is None:
        with beside_a_syncer(method(steps)) as exchange:
            return _in_flight(device, workload, training, exchange, steps)
    return _in_flight(device, workload, training, exchange, steps)


def method(steps: int) -> Method:
    """Sent after the first of every `steps` + 1 steps, the whole model at once, adopted after the last."""
    return diloco.StreamingDiLoCo(
        sync_every=steps + 1, overlap=steps, offsets=(1,), fragments=diloco.Whole(), codec="e3m0", error_feedback=True
    )


def _in_flight(
    device: torch.device, workload: Workload, training: _Training, exchange: Exchange, steps: int
) -> dict[str, Any]:
    with Learner(training.model, training.inner, exchange=exchange, method=method(steps)) as learner:

        def bare() -> None:
            for _ in range(steps):
                training.step()
            _synchronize(device)

        def attached() -> None:
            learner.step(tokens=workload.tokens)
            for _ in range(steps):
                training.step()
                learner.step(tokens=workload.tokens)
            _synchronize(device)

        bare_s, attached_s = interleaved(bare, attached, workload.pairs)
        metrics = learner.metrics()
    row = row_of("a step with an exchange in flight", bare_s, attached_s, target=GOAL, num_steps=steps)
    numbers = {"exchanges": metrics["merges"], "blocked_s": metrics["blocked_s"]}
    return row | numbers | {"parameters": sum(p.numel() for p in training.model.parameters()), "steps": steps}


class _Training:
    """fp32 parameters under bf16 autocast, AdamW."""

    def __init__(self, device: torch.device, workload: Workload) -> None:
        torch.manual_seed(0)
        width = workload.width
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, workload.layers, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Embedding(256, width), encoder, nn.Linear(width, 256)).to(device)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(0, 256, (8, workload.tokens // 8 + 1)).to(device)

    def step(self) -> None:
        self.inner.zero_grad()
        with torch.autocast(self.batch.device.type, torch.bfloat16):
            logits = self.model(self.batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten())
        loss.backward()
        self.inner.step()


def _seconds(device: torch.device, action: Callable[[], object]) -> float:
    _synchronize(device)
    start = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# - the page ---------------------------------------------------------------------------------------------------------


def facts(device: torch.device | None = None) -> list[str]:
    """What the page is about, as list items."""
    known = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "triton": metadata.version("triton") if find_spec("triton") else "none: torch operations encode",
        "python": platform.python_version(),
    }
    if device is not None:
        properties = torch.cuda.get_device_properties(device)
        known |= {
            "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
            f"{properties.major}.{properties.minor}; {torch.cuda.device_count()} here",
            "driver": _driver(),
        }
    return [f"- {name}: {value}" for name, value in known.items()]


def _driver() -> str:
    if (tool := shutil.which("nvidia-smi")) is None:
        return "unknown (no nvidia-smi)"
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def page(checks: Sequence[tuple[str, str, str]], figures: Sequence[dict[str, Any]], device: torch.device) -> str:
    """The page, in Markdown."""
    *encoded, step = figures
    counts = ", ".join(
        f"{sum(outcome == each for _, outcome, _ in checks)} {each}" for each in ("passed", "failed", "skipped")
    )
    lines = ["# The CUDA path", "", *(facts(device) if device.type == "cuda" else facts()), ""]
    lines += ["## Figures", "", "| | value | ratio | goal |", "| --- | ---: | ---: | --- |"]
    lines += [
        f"| {row['name']} | {row['gb_per_s']:.1f} GB/s | {row['ratio']:.3f} of a memory copy | |" for row in encoded
    ]
    verdict = "met" if step["met"] else "missed"
    lines.append(
        f"| {step['name']} | {step['bare_step_s'] * 1e3:.1f} ms bare | {step['ratio']:.3f} [{step['low']:.3f}, "
        f"{step['high']:.3f}] | ≤ {step['target']:.2f} {verdict} |"
    )
    measured = (
        f"GB/s are of fp32. {step['parameters'] / 1e6:.0f} million parameters; {step['steps']} steps an exchange, "
        f"{step['pairs']} pairs, {step['exchanges']} exchanges, blocked for {step['blocked_s']:.2f} s in all."
    )
    lines += ["", measured, "", "## Checks", "", counts + ".", ""]
    lines += [f"- {outcome}: `{name}`" + (f" ({reason})" if reason else "") for name, outcome, reason in checks]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
