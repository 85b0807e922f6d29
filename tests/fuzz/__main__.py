"""python -m tests.fuzz --seconds 60 --target run-file,events --json FILE        (make fuzz SECONDS=60 TARGET=run-file)

Fuzzes readers, one after the other, each in a process of its own, and tells how many inputs were tried and what broke.
Ends with exit code 1 where anything did.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.reliability import commit
from tests.fuzz.targets import TARGETS

LOG = "log.txt"


def fuzz(name: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Fuzz one reader; returns what its process has said, and what it covers (`covered`: edges of `diloco`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.engine", name, str(seconds), str(folder)]
    with (folder / LOG).open("wb") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False, timeout=10 * seconds + 300).returncode
    said = (folder / LOG).read_text(errors="replace")
    if code or not (folder / "result.json").exists():
        return {"target": name, "tried": 0, "found": {f"the process ended with {code}": said[-2000:]}}
    covered = re.findall(r"cov: (\d+)", said)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return {**result, "covered": int(covered[-1]) if covered else None}


def main() -> int:
    """Fuzz what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (default: 60)")
    parser.add_argument("--target", default=",".join(TARGETS), help=f"with commas (default: {', '.join(TARGETS)})")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="where inputs are kept (default: .fuzz)")
    parser.add_argument("--json", type=Path, help="write the counts there")
    options, measured = parser.parse_args(), commit()
    results = []
    for name in options.target.split(","):
        if name not in TARGETS:
            parser.error(f"{name!r} is none of {', '.join(TARGETS)}")
        result = fuzz(name, options.seconds, options.folder / name)
        results.append(result)
        print(
            f"{name:12} {result['tried']:>9,} inputs, {result.get('read', 0):>8,} read, "
            f"{result.get('refused', 0):>8,} refused, {result.get('covered')} edges, "
            f"{len(result['found'])} ways to break it", flush=True,
        )  # fmt: skip
        for place, text in result["found"].items():
            print(f"  {place}: {text}", flush=True)
    total = {"tried": sum(each["tried"] for each in results), "found": sum(len(each["found"]) for each in results)}
    print(f"{total['tried']:,} inputs tried, {total['found']} ways to break a reader")
    if options.json is not None:
        options.json.write_text(json.dumps({"commit": measured, **total, "targets": results}, indent=1))
    return total["found"] > 0


if __name__ == "__main__":
    sys.exit(main())
