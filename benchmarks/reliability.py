"""dev/reliability.md: what a run survives, from results that the commands below have left in benchmarks/results/.

    python -m benchmarks.reliability                     write the page from what is there
    python -m benchmarks.reliability chaos 11 --minutes 20 --learners 4 --every 1     a run of `tests.chaos`
    python -m benchmarks.reliability standby 7 --faults 200                           one of `tests.chaos.standby`
    python -m benchmarks.reliability roles 7 --faults 100                             one of `tests.chaos.roles`
    python -m benchmarks.reliability soak 1                                           a soak of an hour
    python -m benchmarks.reliability storms 1-100000                                  storms in virtual time
    python -m benchmarks.reliability groups 1-10000                                   of groups' machine alone
    python -m benchmarks.reliability again                                            those of them that have failed
    python -m benchmarks.reliability floods                                           `python -m benchmarks.floods`
    python -m benchmarks.reliability restart                                          `python -m benchmarks.restart`
    python -m benchmarks.reliability control                                          `python -m benchmarks.control`
    python -m benchmarks.reliability stopping                                         `python -m benchmarks.stopping`
    python -m benchmarks.reliability fuzz FILE       what  make fuzz ARGS="--json FILE"  has found

Each keeps its numbers with the commit they were measured at, and writes the page again. A run of chaos, of two syncers,
of roles or of storms is not kept in place of another one: remove that first. What was not measured is said to be that.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.reliability_page import STORMS, page

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "dev" / "reliability.md"

ALONE = ("restart", "stopping", "floods", "control")
"""Modules of this package that print the result of that name."""


def read_results() -> dict[str, Any]:
    """All that is in benchmarks/results. "made": of each, its name, commit and day."""
    found: dict[str, Any] = {"chaos": [], "standby": [], "roles": [], "groups": [], "storms": [], "made": []}
    for path in sorted(RESULTS.glob("*.json")):
        kind, kept = path.stem.partition("-")[0], json.loads(path.read_text())
        found["made"].append((path.stem, kept["commit"], kept["on"]))
        values = kept["result"]
        if isinstance(found.get(kind), list):
            found[kind].append(values)
        else:
            found[kind] = values
    return found


def commit() -> str:
    """What is measured; with "+" where files of the tree have changed since, but for results."""
    kept = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    head = _git("rev-parse", "--short=10", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *kept)
    return f"{head}{'+' if changed else ''}"


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], capture_output=True, check=True, cwd=ROOT, text=True).stdout.strip()


def keep(name: str, values: object, measured: str) -> None:
    """Keep results under a name, in place of those of that name. `measured`: at this commit."""
    kept = {"commit": measured, "on": datetime.now(UTC).date().isoformat(), "result": values}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def require_new(name: str) -> str:
    """Exit where there are results of this name: a run that broke is not to vanish behind one that did not."""
    if (path := RESULTS / f"{name}.json").exists():
        print(f"{path} is there already; remove it, or choose another seed", file=sys.stderr)
        raise SystemExit(2)
    return name


def _output(*command: str) -> Any:
    """What a command prints as JSON; what it says otherwise goes to this one's standard error."""
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, check=False, cwd=ROOT)
    if not done.stdout:
        print(f"{' '.join(command)} has printed nothing", file=sys.stderr)
        raise SystemExit(done.returncode or 1)
    return json.loads(done.stdout)


def failed_again(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The storms that have failed, run again: `tried` and `failed`, by seed."""
    tried, failed = list[int](), list[int]()
    for each in results:
        kinds = [f"--{kind.replace('_', '-')}" for kind in STORMS if each.get(kind)]
        for text in each["failed"]:
            seed = text.removeprefix("seed ").partition(":")[0]
            tried.append(int(seed))
            if _output("tests.storms", seed, "--json", *kinds)["failed"]:
                failed.append(int(seed))
    return {"tried": sorted(tried), "failed": sorted(failed)}


def chaos(*arguments: str) -> Any:
    """The result of `tests.chaos`; the directory of a run that broke is kept."""
    directory = tempfile.mkdtemp(prefix="diloco-chaos-")
    run = _output("tests.chaos", "--out", f"{directory}/out", "--json", *arguments)
    if run["holds"]:
        shutil.rmtree(directory)
    else:
        print(f"not everything holds; the run is kept in {directory}", file=sys.stderr)
    return run


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whats = ("chaos", "standby", "roles", "soak", "storms", "groups", "again", "fuzz", *ALONE)
    parser.add_argument("what", nargs="?", choices=whats)
    parser.add_argument(
        "which", nargs="?", help="the seed of chaos, standby or roles, hours of a soak, FIRST-LAST of storms, or a file"
    )
    chosen, more = parser.parse_known_args()
    measured = commit()
    match chosen.what:
        case "chaos":
            name = require_new(f"chaos-{chosen.which}")
            keep(name, chaos("--seed", chosen.which, *more), measured)
        case "standby" | "roles":
            name = require_new(f"{chosen.what}-{chosen.which}")
            keep(name, _output(f"tests.chaos.{chosen.what}", "--json", "--seed", chosen.which, *more), measured)
        case "soak":
            keep("soak", chaos("--soak", "--hours", chosen.which, *more), measured)
        case "storms":
            kinds = "".join(f"-{kind}" for kind in (it.replace("_", "-") for it in STORMS) if f"--{kind}" in more)
            name = require_new(f"storms-{chosen.which}{kinds}")
            keep(name, _output("tests.storms", chosen.which, "--json", *more), measured)
        case "groups":
            name = require_new(f"groups-{chosen.which}")
            keep(name, _output("tests.protocol.group_storms", chosen.which, "--json"), measured)
        case "again":
            keep("again", failed_again(read_results()["storms"]), measured)
        case name if name in ALONE:
            keep(name, _output(f"benchmarks.{name}", "--json", *more), measured)
        case "fuzz":
            found = json.loads(Path(chosen.which).read_text())
            keep("fuzz", found, found.pop("commit"))
    PAGE.write_text(page(read_results()), encoding="utf-8")


if __name__ == "__main__":
    main()
