"""The benchmarks run and their rows have the one form that the table reads; what they measure is for `make bench` to
say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import __main__ as bench
from benchmarks import arithmetic, fragments, gpu, memory, plan, rounds, store, transfer, versions
from rich.console import Console

import diloco


@pytest.fixture(scope="module")
def transfer_rows() -> list[dict[str, Any]]:
    return transfer.measure(num_bytes=1 << 20, rounds=1)


@pytest.mark.slow
def test_every_transfer_has_a_row(transfer_rows: list[dict[str, Any]]) -> None:
    names = [row["name"] for row in transfer_rows]
    assert names[:4] == ["push, TLS", "pull, TLS", "push, plain", "pull, plain"]
    assert len(set(names)) == len(names)
    for row in transfer_rows:
        assert set(row) == {"name", "value", "unit", "ratio", "target", "met"}
        assert math.isfinite(row["value"])
        assert row["value"] > 0
        assert (row["target"] is None) == (row["met"] is None)
    assert [row["name"] for row in transfer_rows if row["target"]] == ["push, TLS"]


@pytest.mark.slow
def test_the_table_shows_every_row_with_its_verdict(transfer_rows: list[dict[str, Any]]) -> None:
    step = {"name": "a step", "ratio": 1.2, "low": 1.1, "high": 1.3, "bare_step_s": 0.05, "target": 1.1, "met": False}
    codec = {"name": "e3m0 decode", "gb_per_s": 4.2, "ratio": 0.5, "target": 0.4, "met": True}
    console = Console(record=True, width=140)
    bench.show({"transfer": transfer_rows, "codecs": [codec], "step": [step]}, console)
    text = console.export_text()
    assert all(row["name"] in text for row in transfer_rows)
    line = {row["name"]: next(line for line in text.splitlines() if row["name"] in line) for row in (step, codec)}
    assert line["a step"].split()[-6:] == ["1.200", "[1.100,", "1.300]", "≤", "1.10", "missed"]
    assert line["e3m0 decode"].split()[-5:] == ["GB/s", "0.500", "≥", "0.40", "met"]


def test_what_a_fragment_costs_has_a_row_each() -> None:
    rows = fragments.measure(1 << 18, repeats=1)
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(0 < row["ratio"] < math.inf and 0 < row["value"] < math.inf for row in rows)
    console = Console(record=True, width=140)
    bench.show({"fragments": rows}, console)
    assert all(row["name"] in console.export_text(clear=False) for row in rows)


@pytest.mark.slow
def test_the_arithmetic_of_rounds_has_a_row_for_each_way_and_its_spread() -> None:
    rows = arithmetic.measure(1 << 18, repeats=2)
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(0 < row["low"] <= row["ratio"] <= row["high"] < math.inf and row["value"] > 0 for row in rows)
    assert {row["name"].split(": ")[1] for row in rows if row["target"]} <= {
        "compiled, all cores",
        "compiled, one thread",
    }


def test_what_publishing_costs_has_a_row_for_each_size_and_wire() -> None:
    rows = store.measure([1], repeats=2)
    assert [row["name"].split(",")[0] for row in rows] == ["published", "read"] * 2
    assert all(0 < row["ratio"] < math.inf and 0 < row["value"] < math.inf for row in rows)


@pytest.mark.slow
def test_a_syncers_peak_memory_is_measured_in_a_process_of_its_own() -> None:
    row = memory.row_of(memory.Case("mean, int4 down", num_fragments=2, num_learners=2, num_parameters=1 << 21))
    assert 1 < row["value"] < 100
    assert row["met"] == (row["value"] <= row["target"])


@pytest.mark.slow
def test_a_served_model_has_rows_of_its_pace_and_of_its_syncers_memory(tmp_path: Path) -> None:
    pace, peak = versions.serve(24 << 10, tmp_path)
    assert pace["value"] > 0
    assert peak["value"] > 0


@pytest.mark.slow
def test_a_round_over_torchft_is_timed_beside_one_over_a_fixed_group() -> None:
    pytest.importorskip("torchft")
    row = rounds.row_of("e3m0", rounds.measure("e3m0", rounds=2))
    assert 0 < row["low"] <= row["ratio"] <= row["high"]
    console = Console(record=True, width=140)
    bench.show({"rounds": [row]}, console)
    assert row["name"] in console.export_text()


def test_json_names_the_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(transfer, "run", lambda quick: [{"quick": quick}])
    bench.main(["--json", "--quick", "--only", "transfer"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == {"transfer": [{"quick": True}]}
    assert {"cpu", "cores", "torch"} <= set(printed["machine"])


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[pytest.mark.slow] if number else []) for number, each in enumerate(plan.QUESTIONS)],
)
def test_the_planner_answers_what_it_is_asked(command: str) -> None:
    row = plan.row_of(command, num_runs=1)
    assert row["value"] > 0
    assert row["ratio"] > 0


@pytest.mark.slow
def test_make_gpu_says_that_no_gpu_was_found(tmp_path: Path) -> None:
    """By its exit code, on its page and in a line; it is no success."""
    page = tmp_path / "gpu" / "page.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--page", str(page)], cwd=Path(__file__).parents[1],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert gpu.NO_GPU in done.stderr
    text = page.read_text()
    assert gpu.NO_GPU in text
    assert "GB/s" not in text
    assert "passed" not in text


def test_the_page_of_a_gpu_has_every_figure_and_check() -> None:
    """Measured on the CPU, where the same code runs without streams and pinned memory."""
    device, small = torch.device("cpu"), gpu.Workload(width=16, layers=1, tokens=16, pairs=1)
    [in_flight] = diloco.run_local(lambda _, exchange: gpu.in_flight(device, small, exchange, steps=2), learners=1)
    assert in_flight["exchanges"] > 0
    figures = [*gpu.encoding(device, 1 << 17, repeats=1), in_flight]
    report = """<testsuites><testsuite><testcase name="a"/>
        <testcase name="b"><skipped message="no CUDA device"/></testcase>
        <testcase name="c"><failure message="not the same">at line 3</failure></testcase></testsuite></testsuites>"""
    checks = list(gpu.outcomes(report))
    assert checks == [("a", "passed", ""), ("b", "skipped", "no CUDA device"), ("c", "failed", "not the same")]
    text = gpu.page(checks, figures, device)
    assert all(f"| {row['name']} |" in text for row in figures)
    assert "1 passed, 1 failed, 1 skipped." in text
    assert "- failed: `c` (not the same)" in text
