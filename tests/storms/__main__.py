"""python -m tests.storms SEED                       the storm of one seed
python -m tests.storms SEED --faults 0,2          with some of its faults (none: '')
python -m tests.storms FIRST-LAST                 storms of many seeds, in two processes      (make storm SEEDS=1-1000)
python -m tests.storms FIRST-LAST --leased        the same with leased data
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.storms.plans import plan_of, told
from tests.storms.runs import failures, quiet, run

AT_ONCE = 20
"""Seeds that a process takes at a time."""


def storm_of(seeds: list[int], *, leased: bool) -> list[str]:
    """What there is to say of those that failed."""
    return [str(each) for each in failures(seeds, leased=leased) if each is not None]


def main() -> int:
    """Run storms; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.storms")
    parser.add_argument("seeds", help="one seed, or FIRST-LAST")
    parser.add_argument("--faults", help="indices of the faults to keep, with commas")
    parser.add_argument("--leased", action="store_true", help="learners read leased data")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    if options.faults is not None:
        plan = plan_of(seeds[0], leased=options.leased)
        kept = [plan.faults[int(index)] for index in options.faults.split(",") if index]
        with quiet():
            failure = run(plan, kept)
        print(told(plan, kept) if failure is None else failure)
        return failure is not None
    began_s, num_failed = time.monotonic(), 0
    parts = [seeds[begin : begin + AT_ONCE] for begin in range(0, len(seeds), AT_ONCE)]
    with ProcessPoolExecutor(2) as pool:
        for said in pool.map(partial(storm_of, leased=options.leased), parts):
            num_failed += len(said)
            for each in said:
                print(each, flush=True)
    seconds = time.monotonic() - began_s
    print(f"{len(seeds)} storms in {seconds:.1f} s, {60 * len(seeds) / seconds:.0f} a minute; {num_failed} failed")
    return num_failed > 0


if __name__ == "__main__":
    sys.exit(main())
