"""What exchanging costs: codecs, merges and the work on a fragment against a memory copy, a syncer's peak memory in
models, transfers against a socket, a training step against the bare step, a round over torchft against one over a fixed
process group, virtual time against bare steps, the planner's answers against its imports.

    python -m benchmarks [--quick] [--only GROUP] [--json]      (`make bench`)

Every ratio is of times measured in the same run, in turns. Nothing is written but this table; timings belong to the
machine they were measured on, which is named above it, and mean little where other work runs beside them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

GROUPS = {
    "codecs": "Codecs, fp32 bytes a second; ratio: memory copy ÷ own time (higher is better)",
    "fragments": "A fragment, processor time; ratio: own time ÷ memory copy (lower is better)",
    "arithmetic": "A round by torch and by compiled loops; ratio: own time ÷ memory copy (lower is better)",
    "merges": "Eight learners' outer gradients into one, processor time; ratio: own time ÷ memory copy (lower is "
    "better)",
    "store": "A version made durable in a directory, and read; ratio: ÷ a plain file (lower is better)",
    "memory": "A syncer's peak in models (fp32), the spool apart (lower is better)",
    "versions": "A syncer's rounds of eight learners, durable in a directory (higher is better), and its peak",
    "islands": "A rank of an FSDP2 island, for exchanging: host memory in models (fp32), and bytes (lower is better)",
    "transfer": "A real syncer; ratio: socket's time ÷ own time (higher is better)",
    "step": "A training step; ratio: with a Learner ÷ without (lower is better)",
    "rounds": "A round between two processes; ratio: over torchft ÷ over Collective (lower is better)",
    "virtual": "A step in virtual time, processor time; ratio: ÷ a bare step (lower is better)",
    "plan": "An answer, processor time after import, met under 1 s; ratio: ÷ the import (lower is better)",
}
"""Modules of this package with `run(quick) -> rows`, and what their ratios mean."""

LOWER_IS_BETTER = (
    "arithmetic",
    "fragments",
    "islands",
    "memory",
    "merges",
    "step",
    "rounds",
    "store",
    "versions",
    "virtual",
    "plan",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller and fewer measurements")
    parser.add_argument("--only", choices=tuple(GROUPS), action="append", help="this group; repeat for more")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    for group in chosen.only or GROUPS:
        print(f"measuring: {group} …", file=sys.stderr)
        results[group] = importlib.import_module(f"benchmarks.{group}").run(chosen.quick)
    if chosen.json:
        print(json.dumps({"machine": machine(), "rows": results}, indent=1))
    else:
        show(results, Console())


def show(results: Mapping[str, Sequence[Mapping[str, Any]]], console: Console) -> None:
    """Print one table of all groups."""
    console.print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    table = Table("", "value", "ratio", "target", "", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for group, rows in results.items():
        table.add_section()
        table.add_row(f"[bold]{GROUPS[group]}[/bold]")
        for row in rows:
            table.add_row(row["name"], _value(row), _ratio(row), _target(group, row), _verdict(row))
    console.print(table)


def machine() -> dict[str, Any]:
    """What the timings belong to."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _value(row: Mapping[str, Any]) -> str:
    if "value" in row:
        return f"{row['value']:.2f} {row['unit']}"
    if "gb_per_s" in row:
        return f"{row['gb_per_s']:.2f} GB/s"
    return f"{row['bare_step_s'] * 1e3:.0f} ms bare"


def _ratio(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return ""
    interval = f" [{row['low']:.3f}, {row['high']:.3f}]" if "low" in row else ""
    return f"{row['ratio']:.3f}{interval.replace('[', chr(92) + '[')}"


def _target(group: str, row: Mapping[str, Any]) -> str:
    return "" if row["target"] is None else f"{'≤' if group in LOWER_IS_BETTER else '≥'} {row['target']:.2f}"


def _verdict(row: Mapping[str, Any]) -> str:
    if row["met"] is None:
        return ""
    return "[green]met[/green]" if row["met"] else "[red]missed[/red]"


if __name__ == "__main__":
    main()
