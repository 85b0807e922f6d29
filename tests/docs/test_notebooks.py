"""The notebooks run from the first cell to the last, and what they find is so."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from tests.docs.blocks import ROOT

NOTEBOOKS = ROOT / "examples" / "notebooks"


def run(name: str, directory: Path, *asked: str) -> list[Any]:
    """Execute a notebook; the values of these expressions at its end."""
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code"), "execute it, and keep that"
    assert path.stat().st_size < 100_000, "keep its outputs small"
    question = f"import json; print(json.dumps([{', '.join(asked)}]))"
    notebook.cells.append(nbformat.v4.new_code_cell(question))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(directory)}}).execute()
    found: list[Any] = json.loads(notebook.cells[-1].outputs[0]["text"])
    return found


@pytest.fixture(autouse=True)
def _in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")


def test_every_notebook_is_executed_here() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {"one-process", "plan-a-link", "read-a-run"}


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    final, curves = run("one-process", tmp_path, "final", "curves")
    assert all(curve[-1][1] < 0.8 * curve[0][1] for curve in curves.values())  # the loss fell
    assert final["DiLoCo, H = 20"][0] < final["Local SGD, H = 20"][0]
    loss, num_bytes = final["Streaming DiLoCo, 4 bits"]
    parallel_loss, parallel_bytes = final["data parallel"]
    assert loss < 1.5 * parallel_loss
    assert num_bytes < parallel_bytes / 100


@pytest.mark.slow
def test_plan_a_link(tmp_path: Path) -> None:
    needed, computing, titles, hours = run(
        "plan-a-link", tmp_path, "needed", "computing", "[each.setting.title for each in ranked]",
        "[each.hours for each in ranked]",
    )  # fmt: skip
    assert needed["Streaming, 4 bits"] < needed["Streaming"] < needed["DiLoCo"] < needed["data parallel"]
    for shares in computing.values():
        assert all(later > earlier - 1e-6 for earlier, later in pairwise(shares))  # more bandwidth, less waiting
    assert "Streaming DiLoCo" in titles
    assert hours[0] < hours[titles.index("data parallel")]


@pytest.mark.slow
def test_read_a_run(tmp_path: Path) -> None:
    judged, members, merged, trained = run(
        "read-a-run", tmp_path, "[each.loss for each in judged]", "[each.contributors for each in merges]",
        "list(merged.values())", "trained",
    )  # fmt: skip
    assert judged[-1] < judged[0] - 0.3
    assert members
    assert all(each == ["learner-0", "learner-1"] for each in members)
    assert trained == 131_072
    assert all(0.5 * trained < tokens < trained for tokens in merged)
