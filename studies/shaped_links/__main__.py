"""Prediction against measurement on shaped links.

    python -m studies.shaped_links     everything, about twenty minutes; writes results and dev/shaped-links.md
        --quick                        one rate, short runs; prints
        --rate 20mbit --method int4    part of it; prints
        --show                         tables, picture and page again, from the results

A real syncer (TLS, tokens, a disk) and two real learners, each in a network namespace of its own; a learner's link is
shaped in both directions. Steps of a model of 4M parameters are padded to 50 ms. Beside each measurement stands what
`diloco.planning` says, which is told sizes, the rate, the step time, and what is measured before on links that are not
shaped: the latency, and how long the syncer takes for a round. Needs root, `ip` and `tc` (Linux), and a machine that
has nothing else to do, or before which it comes: `chrt -r 1 python …`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence

from studies.shaped_links import report
from studies.shaped_links.cases import CASES, LONG, QUICK
from studies.shaped_links.links import bit_per_s
from studies.shaped_links.measure import Wanted, measure

RATES = ("20mbit", "50mbit", "100mbit", "400mbit")
IN_TURNS_RATES = ("20mbit", "50mbit")
PEER_RATES = ("10mbit", "20mbit", "50mbit", "100mbit", "200mbit", "400mbit")
"""With those at which torchft was measured before."""

QUICK_RATES = ("100mbit",)
EVERYTHING = Wanted(CASES, RATES, IN_TURNS_RATES, PEER_RATES, PEER_RATES, LONG)
COLLECTIVE, TORCHFT = "collective", "torchft"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.shaped_links", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join([*(case.name for case in CASES), COLLECTIVE, TORCHFT])
    parser.add_argument("--rate", action="append", help="of every link, as tc writes it; repeat for more")
    parser.add_argument("--method", action="append", help=f"part of a name: {names}; repeat for more")
    parser.add_argument("--quick", action="store_true", help="one rate and short runs, to see that it works")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--show", action="store_true", help="write tables, picture and page again, and run nothing")
    given = parser.parse_args(arguments)
    if given.show:
        report.show(report.results())
        return
    try:
        wanted = chosen(given.rate, given.method, quick=given.quick)
    except ValueError as error:
        parser.error(str(error))
    if os.geteuid() != 0:
        sys.exit("shaped_links: network namespaces need root; run it as root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started
    values = measure(wanted)
    if wanted == EVERYTHING:
        report.write(values)
    print(json.dumps(values, indent=1) if given.json else report.markdown(values))


def chosen(rates: Sequence[str] | None, methods: Sequence[str] | None, *, quick: bool = False) -> Wanted:
    """What the options ask for; everything where none is given.

    Raises:
        ValueError: a rate that is none, a method that there is not.
    """
    if not rates and not methods and not quick:
        return EVERYTHING
    rates = tuple(rates or (QUICK_RATES if quick else RATES))
    for rate in rates:
        bit_per_s(rate)
    wanted = [method.lower() for method in methods or [""]]
    cases = tuple(case for case in CASES if any(each in case.name.lower() for each in wanted))
    collective, torchft = (rates if any(each in name for each in wanted) else () for name in (COLLECTIVE, TORCHFT))
    if not cases and not collective and not torchft:
        raise ValueError(
            f"no method is called {', '.join(wanted)}; there are {', '.join(case.name for case in CASES)}, "
            f"{COLLECTIVE}, {TORCHFT}"
        )
    return Wanted(cases, rates, (), collective, torchft, QUICK if quick else LONG)


if __name__ == "__main__":
    main()
