"""docs/reliability.md: what a run survives, from results that the commands below have left in benchmarks/results/.

    python -m benchmarks.reliability                     write the page from what is there
    python -m benchmarks.reliability chaos 11 --minutes 20 --learners 4 --every 1     a run of `diloco chaos`
    python -m benchmarks.reliability chaos 11 --minutes 20 --standby                  the same with two syncers
    python -m benchmarks.reliability storms 1-100000                                  storms in virtual time
    python -m benchmarks.reliability floods                                           `python -m benchmarks.floods`
    python -m benchmarks.reliability restart                                          `python -m benchmarks.restart`
    python -m benchmarks.reliability control                                          `python -m benchmarks.control`
    python -m benchmarks.reliability stopping                                         `python -m benchmarks.stopping`
    make fuzz ARGS="--json benchmarks/results/fuzz.json"                              then the first line again

Each keeps its numbers and writes the page again. What was not measured is said to be that.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.reliability_page import page

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "reliability.md"

ALONE = ("restart", "stopping", "floods", "control")
"""Modules of this package that print the result of that name."""


def read_results() -> dict[str, Any]:
    """All that is in benchmarks/results."""
    found: dict[str, Any] = {"chaos": [], "storms": []}
    for path in sorted(RESULTS.glob("*.json")):
        kind, values = path.stem.partition("-")[0], json.loads(path.read_text())
        if kind in ("chaos", "storms"):
            found[kind].append(values)
        else:
            found[kind] = values
    return found


def keep(name: str, values: object) -> None:
    """Keep results under a name, in place of those of that name."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")


def _output(*command: str) -> Any:
    """What a command prints as JSON; what it says otherwise goes to this one's standard error."""
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, check=False, cwd=ROOT)
    if not done.stdout:
        print(f"{' '.join(command)} has printed nothing", file=sys.stderr)
        raise SystemExit(done.returncode or 1)
    return json.loads(done.stdout)


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("chaos", "storms", *ALONE))
    parser.add_argument("which", nargs="?", help="the seed of chaos, or FIRST-LAST of storms")
    chosen, more = parser.parse_known_args()
    match chosen.what:
        case "chaos":
            directory = tempfile.mkdtemp(prefix="diloco-chaos-")
            run = _output("diloco", "chaos", "--seed", chosen.which, "--out", f"{directory}/out", "--json", *more)
            keep(f"chaos-{chosen.which}{'-standby' if '--standby' in more else ''}", run)
            if run["holds"]:
                shutil.rmtree(directory)
            else:
                print(f"not everything holds; the run is kept in {directory}", file=sys.stderr)
        case "storms":
            kinds = "".join(f"-{kind}" for kind in ("leased", "standby", "goes-back") if f"--{kind}" in more)
            keep(f"storms-{chosen.which}{kinds}", _output("tests.storms", chosen.which, "--json", *more))
        case name if name in ALONE:
            keep(chosen.what, _output(f"benchmarks.{chosen.what}", "--json", *more))
    PAGE.write_text(page(read_results()), encoding="utf-8")


if __name__ == "__main__":
    main()
