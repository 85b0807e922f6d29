"""python -m tests.storms SEED                       the storm of one seed
python -m tests.storms SEED --faults 0,2          with some of its faults (none: '')
python -m tests.storms FIRST-LAST                 storms of many seeds, in two processes      (make storm SEEDS=1-1000)
python -m tests.storms FIRST-LAST --leased        the same with leased data
python -m tests.storms FIRST-LAST --standby       the same with two syncers
python -m tests.storms FIRST-LAST --goes-back     the same with runs that are restored from a backup, or repaired
python -m tests.storms FIRST-LAST --steered       the same with an operator's orders
python -m tests.storms FIRST-LAST --parts         the same with learners that train parts of a mixture
python -m tests.storms FIRST-LAST --held          the same with learners that hold parts, of a kind above that is drawn
python -m tests.storms FIRST-LAST --dealt         the same with such parts, of which the syncer deals most
python -m tests.storms FIRST-LAST --groups        the same with groups of reinforcement learning and their workers
python -m tests.storms FIRST-LAST --json          how many, how fast, which faults, and which storms failed, as JSON
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from tests.storms.plans import plan_of, told
from tests.storms.runs import failures, quiet, run

AT_ONCE = 20
"""Seeds that a process takes at a time."""


def said_of(seeds: list[int], *, kind: dict[str, bool]) -> tuple[list[str], Counter[str]]:
    """What there is to say of those that failed, and the faults that happened, by kind."""
    struck: Counter[str] = Counter()
    found = failures(seeds, **kind, struck=struck)
    return [str(each) for each in found if each is not None], struck


def main() -> int:
    """Run storms; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.storms")
    parser.add_argument("seeds", help="one seed, or FIRST-LAST")
    parser.add_argument("--faults", help="indices of the faults to keep, with commas")
    parser.add_argument("--leased", action="store_true", help="learners read leased data")
    parser.add_argument("--standby", action="store_true", help="a second syncer waits for its turn")
    parser.add_argument("--goes-back", action="store_true", help="the run goes back to an older state")
    parser.add_argument("--steered", action="store_true", help="an operator gives orders")
    parser.add_argument("--parts", action="store_true", help="learners train parts of a mixture")
    parser.add_argument("--held", action="store_true", help="learners hold parts of a mixture; draws the other kinds")
    parser.add_argument("--dealt", action="store_true", help="the syncer deals most of these parts; likewise")
    parser.add_argument("--groups", action="store_true", help="learners train groups of reinforcement learning")
    parser.add_argument("--processes", type=int, default=2, help="at a time; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    kinds = "leased", "standby", "goes_back", "steered", "parts", "groups", "held", "dealt"
    kind = {each: getattr(options, each) for each in kinds}
    if (options.held or options.dealt) and sum(kind.values()) > 1:
        parser.error("--held and --dealt draw the other kinds; give one alone")
    first, _, last = options.seeds.partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    if options.faults is not None:
        plan = plan_of(seeds[0], **kind)
        kept = [plan.faults[int(index)] for index in options.faults.split(",") if index]
        with quiet():
            failure = run(plan, kept)
        print(told(plan, kept) if failure is None else failure)
        return failure is not None
    began_s, failed, struck = time.monotonic(), list[str](), Counter[str]()
    parts = [seeds[begin : begin + AT_ONCE] for begin in range(0, len(seeds), AT_ONCE)]
    with ProcessPoolExecutor(options.processes) as pool:
        for said, faults in pool.map(partial(said_of, kind=kind), parts):
            failed += said
            struck += faults
            for each in said:
                print(each, flush=True, file=sys.stderr if options.json else sys.stdout)
    seconds = time.monotonic() - began_s
    if options.json:
        found: dict[str, Any] = {
            "storms": len(seeds),
            "first": seeds[0],
            **kind,
        }
        faults = dict(sorted(struck.items()))
        found |= {"processes": options.processes, "seconds": round(seconds, 1)}
        print(json.dumps({**found, "faults": faults, "failed": failed}))
    else:
        rate = 60 * len(seeds) / seconds
        print(f"{len(seeds)} storms in {seconds:.1f} s, {rate:.0f} a minute; {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
