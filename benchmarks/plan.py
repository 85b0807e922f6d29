"""How long the planner takes to answer once its modules are imported: processor time, so that other work on the machine
tells less.

Every answer is asked of a process of its own, as a user asks it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 1.0

SITE = Path(__file__).parent.parent / "examples" / "site.toml"

QUESTIONS = {
    "utilization": ("--model", "100b", "--overlap", "1"),
    "goodput": ("--chips", "2400000", "--learners", "8"),
    "wallclock": ("--model", "1b", "--chips", "256", "--batch-tokens", "1e6"),
    "scaling": ("--parameters", "4e9", "--learners", "2"),
    "advise": (str(SITE),),
}
"""By command of `diloco plan`: what is asked of it."""

_PROGRAM = """
import contextlib, io, sys, time
started_s = time.thread_time()
from diloco.cli import main
import diloco.cli.plan, numpy, rich.console, rich.table, pydantic
for name in {modules!r}:
    __import__(name)
imported_s = time.thread_time()
with contextlib.redirect_stdout(io.StringIO()):
    try:
        main(['plan', *{arguments!r}])
    except SystemExit as ended:
        assert not ended.code, ended.code
answered_s = time.thread_time()
print(imported_s - started_s, answered_s - imported_s)
"""

_MODULES = ("advice", "published_tables", "goodput", "workload", "bandwidth", "scaling_laws", "site", "training_time")


def run(quick: bool) -> list[dict[str, Any]]:
    """One row per command: seconds to answer, and their ratio to the seconds that importing takes."""
    return [row_of(command, num_runs=1 if quick else 5) for command in QUESTIONS]


def row_of(command: str, num_runs: int) -> dict[str, Any]:
    times = [_timed(command, QUESTIONS[command]) for _ in range(num_runs)]
    answer_s = statistics.median(answer_s for _, answer_s in times)
    ratio = statistics.median(answer_s / import_s for import_s, answer_s in times)
    return {
        "name": f"plan {command}",
        "value": answer_s,
        "unit": "s",
        "ratio": ratio,
        "target": None,
        "met": answer_s < LIMIT_S,
    }


def _timed(command: str, arguments: tuple[str, ...]) -> tuple[float, float]:
    """Seconds of the processor that the imports take, and the answer, in the main thread: one that numpy's import has
    started may still spin when the answer begins."""
    modules = [f"diloco.planning.{name}" for name in _MODULES]
    program = _PROGRAM.format(modules=modules, arguments=[command, *arguments])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"diloco plan {command} does not answer: {done.stderr}")
    import_s, answer_s = map(float, done.stdout.split())
    return import_s, answer_s
