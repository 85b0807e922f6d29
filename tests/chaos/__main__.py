"""A whole run on this machine under a seeded schedule of faults, and what must hold of it afterwards.

A syncer and some learners run for real, with mutual TLS, leased data, a journal with all contributions, a copy of the
state every five seconds, and a relay before the syncer for each learner. They train undisturbed for a while, then
faults happen, several at a time, never two on one process or path. Afterwards every learner must be in merges again;
then all leave, the state is checked and the journals are replayed. A soak keeps the syncer alive, samples what its
processes and files hold, and has viewers poll it.

    make chaos                                                  a minute of faults on a small model
    make chaos SEED=7 MINUTES=20 LEARNERS=4                     longer; the same seed, the same faults
    make chaos FAULTS="cut transfer,cut" ARGS="--width 256"     chosen faults, on transfers worth resuming
    make chaos ARGS=--plan                                      the schedule, and nothing is run
    make soak HOURS=8                                           a soak; in a short one, only a fast leak is found
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

from tests.chaos.facts import read_facts
from tests.chaos.invariants import INVARIANTS, OF_A_SOAK, check
from tests.chaos.measures import lines, measured
from tests.chaos.plan import LOST_S, SOAK_FAULTS, WIDTH, ChaosPlan, kinds
from tests.chaos.run import run_chaos

from diloco.cli._signals import interrupted_by_signals
from diloco.config import load_config
from diloco.errors import ConfigError, DilocoError
from diloco.escaping import printable


def _wrapped(text: str) -> str:
    return fill(" ".join(text.split()), 118, initial_indent="  ", subsequent_indent="    ")


LEGEND = "\n".join((
    "faults, for --only:",
    *(f"  {each.name:22} {each.what}" for each in kinds(LOST_S)),
    "",
    "A fault counts where its process was there; of the network, where something was held, slowed, changed, swallowed,",
    "refused or cut.",
    "",
    "what must hold:",
    *(_wrapped(f"{name}: {found.__doc__}") for name, found, _ in (*INVARIANTS, *OF_A_SOAK)),
    "",
    "In --out: chaos.json, the result; faults.jsonl, with Unix times; logs/; syncer, the state at the end;",
    "syncer-1 and so on, states that a restored one replaced; stale-0, a copy of the state from before the faults;",
    "stale-1 and so on, what became of it when served; twins/, of second processes of a name; of a soak, sampled.json",
    "and viewers.json. Exit code 1: something does not hold. 130: interrupted by Ctrl-C, SIGTERM or SIGHUP.",
))  # fmt: skip


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, ChaosPlan]:
    """The options, and the plan that they make."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, epilog=LEGEND,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run_file", nargs="?", type=Path, help="the run, without keys (default: a small model's)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default: 0)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=1.0, help="how long faults happen (default: 1)")
    length.add_argument("--hours", type=float, help="the same in hours")
    parser.add_argument("--learners", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--every", type=float, help="mean seconds between two faults (default: 2; of a soak, 20)")
    parser.add_argument("--calm", type=float, default=10.0, help="seconds without faults before them (default: 10)")
    parser.add_argument("--only", default="", metavar="FAULTS", help="these kinds, with commas (default: all)")
    parser.add_argument("--soak", action="store_true", help=f"only {', '.join(SOAK_FAULTS)}; sample, and view")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the small model (default: %(default)s)")
    parser.add_argument("--slowness", type=float, default=1.0, help="factor on time limits (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/chaos"), help="an empty directory (default: %(default)s)"
    )
    parser.add_argument("--plan", action="store_true", help="print the schedule, and run nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    seconds = 3600 * options.hours if options.hours is not None else 60 * options.minutes
    only = tuple(each.strip() for each in options.only.split(",") if each.strip())
    plan = ChaosPlan(
        options.out, options.seed, seconds, options.learners, options.calm,
        options.every or (20.0 if options.soak else 2.0), only or (SOAK_FAULTS if options.soak else ()),
        options.width, options.soak, options.slowness,
    )  # fmt: skip
    return options, plan


def print_schedule(plan: ChaosPlan, run_file: Path | None, as_json: bool) -> None:
    """The faults of a seed."""
    faults = plan.faults(LOST_S if run_file is None else load_config(run_file).syncer.lost_floor_s)
    if as_json:
        print(json.dumps([vars(fault) for fault in faults]))
        return
    for fault in faults:
        print(f"{fault.at_s:8.1f} s  for {fault.seconds:5.1f} s  {fault.kind}: {fault.target}")


def run(plan: ChaosPlan, run_file: Path | None) -> dict[str, Any]:
    """Run and judge it; the result is in `chaos.json` too."""
    with interrupted_by_signals():
        record = run_chaos(plan, run_file, lambda text: print(printable(text), file=sys.stderr, flush=True))
        facts = read_facts(record)
        found = measured(record, facts, check(record, facts))
    (plan.directory / "chaos.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run chaos; returns the exit code."""
    options, plan = parse(arguments)
    try:
        plan.kinds(LOST_S)  # which checks their names
        if options.plan:
            print_schedule(plan, options.run_file, options.json)
            return 0
        found = run(plan, options.run_file)
    except DilocoError as error:
        print(f"chaos: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(found) if options.json else "\n".join((*map(printable, lines(found)), f"see {plan.directory}")))
    return not found["holds"]


if __name__ == "__main__":
    sys.exit(main())
