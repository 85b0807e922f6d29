"""`diloco chaos`: a whole run on this machine under a seeded schedule of faults."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.cli._options import JsonSummary
from diloco.cli._output import make_table
from diloco.cli._signals import interrupted_by_signals
from diloco.errors import ConfigError, StoreError, translated
from diloco.escaping import printable

if TYPE_CHECKING:
    from diloco.chaos.plan import ChaosPlan


def command(
    run_file: Annotated[
        Path | None, typer.Argument(help="The run to torment; default: a small model on this package's own source.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the schedule: the same seed, the same faults.")] = 0,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="How long faults happen; default 60.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="The same in minutes.")] = None,
    learners: Annotated[int, typer.Option(min=1, max=16, help="How many.")] = 3,
    every: Annotated[float, typer.Option(min=0.05, help="Mean seconds from one fault to the next.")] = 2.0,
    calm: Annotated[float, typer.Option(min=0.5, help="Seconds without faults, to compare goodput with.")] = 10.0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="FAULT", help="This kind of fault, as --plan names it; repeatable.")
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="A second syncer follows the first, and faults hit them both.")
    ] = False,
    width: Annotated[
        int, typer.Option(min=32, max=1024, help="Of the model without RUN_FILE; 256 has transfers worth resuming.")
    ] = 32,
    out: Annotated[Path, typer.Option(help="Where everything is written; must be empty.")] = Path("runs/chaos"),
    plan_only: Annotated[bool, typer.Option("--plan", help="Print the schedule, and run nothing.")] = False,
    as_json: JsonSummary = False,
) -> None:
    """Run one or two syncers and learners for real, break what can break, and check that nothing was lost.

    Kills, pauses, partitions, half-open, slow and corrupted links, cut transfers, full disks, damaged state, restored
    backups, older copies, second processes of a name and, with --standby, takeovers happen by a schedule that --seed
    decides. Exit code 1: something does not hold. Ctrl-C, SIGTERM and SIGHUP end all processes. See docs/chaos.md.
    """
    from diloco.chaos.plan import LOST_S, ChaosPlan

    if seconds is not None and minutes is not None:
        raise ConfigError("--seconds and --minutes are the same in two units; give one of them")
    length_s = 60.0 * minutes if minutes is not None else seconds if seconds is not None else 60.0
    plan = ChaosPlan(out, seed, length_s, learners, calm, every, tuple(only or ()), standby, width)
    plan.kinds(LOST_S)  # which checks their names
    if plan_only:
        _print_plan(plan, run_file, as_json)
        return
    if run_file is None and find_spec("transformers") is None:
        raise ConfigError("chaos trains a transformers model; pip install 'diloco[train]'")
    with interrupted_by_signals():
        found = _run(plan, run_file)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _print(found, plan)
    if not found["holds"]:
        raise typer.Exit(1)


def _run(plan: "ChaosPlan", run_file: Path | None) -> dict[str, Any]:
    from diloco.chaos.facts import read_facts
    from diloco.chaos.invariants import check
    from diloco.chaos.measures import measured
    from diloco.chaos.page import write_page
    from diloco.chaos.story import tell

    told = tell(plan, run_file, lambda text: typer.echo(printable(text), err=True))
    facts = read_facts(plan.directory, told.state_dirs, plan.names, told.stale_dirs)
    found = measured(told, facts, check(told, facts))
    with translated(OSError, StoreError, f"cannot write to {plan.directory}", "free disk space"):
        (plan.directory / "chaos.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_page(plan.directory / "chaos.html", told, facts, found)
    return found


def _print_plan(plan: "ChaosPlan", run_file: Path | None, as_json: bool) -> None:
    from diloco.chaos.plan import LOST_S

    lost_s = LOST_S
    if run_file is not None:
        from diloco.config import load_config

        lost_s = load_config(run_file).syncer.lost_floor_s
    faults = plan.faults(lost_s)
    if as_json:
        typer.echo(json.dumps([vars(fault) for fault in faults]))
        return
    from rich.console import Console

    rows = [(fault.kind, fault.target, f"{fault.at_s:.1f}", f"{fault.seconds:.1f}") for fault in faults]
    Console(highlight=False, markup=False).print(make_table(("fault", "on", "at, s", "for, s"), rows, ruled=False))


def _print(found: dict[str, Any], plan: "ChaosPlan") -> None:
    from rich.console import Console

    from diloco.chaos.page import headline, recovery_rows

    console = Console(highlight=False, markup=False)
    console.print(headline(found))
    for name, broken in found["invariants"].items():
        console.print(printable(f"{'holds ' if not broken else 'BROKEN'}  {name} ({found['seen'][name]})"))
        for each in broken[:10]:
            console.print(printable(f"        {each}"))
    console.print(make_table(("seconds to come back", "times", "median", "worst"), recovery_rows(found), ruled=False))
    console.print(f"see {plan.directory / 'chaos.html'} and {plan.directory / 'chaos.json'}")
