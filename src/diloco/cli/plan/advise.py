"""`diloco plan advise`: which method to take at the sites of a site file, and what each would cost."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from diloco.planning.outcomes import Case, Outcome

RUN_FILE = "run.toml"


class By(StrEnum):
    """What to rank by."""

    HOURS = "hours"
    USD = "usd"
    BYTES = "bytes"


def command(
    site_file: Annotated[Path, typer.Argument(help="The site file (TOML): sites, links, prices, model, budget.")],
    by: Annotated[
        By, typer.Option(help="What to rank by, among the methods whose loss penalty is allowed.")
    ] = By.HOURS,
    everything: Annotated[
        bool, typer.Option("--all", help="Every setting that was compared, not the best of each method.")
    ] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Explain every number of the rows: its formula with the values.")
    ] = False,
    choose: Annotated[int, typer.Option(min=1, help="Write the run file of this rank.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the run file and pictures into this directory.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: every setting, explained, and the run file.")
    ] = False,
) -> None:
    """Rank the methods for the sites of SITE_FILE by hours, bytes, money and loss, and write the run file of the
    best."""
    from diloco.planning.ranking import advise, case_of
    from diloco.planning.runfile import run_file
    from diloco.planning.site import load_site

    case = case_of(load_site(site_file))
    ranked = advise(case, by.value)
    if choose > len(ranked):
        raise ConfigError(f"--choose {choose} does not exist; there are {len(ranked)} settings, see --all")
    chosen = ranked[choose - 1]
    text = run_file(case, chosen.candidate)
    if out is not None:
        _write(out, text, case, ranked)
    if as_json:
        typer.echo(json.dumps({
            "candidates": [_plain(case, rank, each) for rank, each in enumerate(ranked, 1)], "chosen": choose, "run_file": text,
        }, indent=1))  # fmt: skip
        return
    shown = [(rank, each) for rank, each in enumerate(ranked, 1) if everything or _is_best(ranked, each)]
    _print(case, shown)
    if why:
        _print_why(case, shown)
    _print_choice(case, ranked, choose, out)


def _is_best(ranked: "list[Outcome]", outcome: "Outcome") -> bool:
    """Of its method."""
    method = outcome.candidate.setting.method
    return outcome is next(each for each in ranked if each.candidate.setting.method == method)


def _plain(case: "Case", rank: int, outcome: "Outcome") -> dict[str, Any]:
    from diloco.planning.ranking import STANDINGS, standing
    from diloco.planning.reasons import explain

    it, num = outcome.candidate.setting, len(case.learners)
    return {
        "rank": rank, "method": it.method, "sync_every": it.sync_every, "overlap": it.overlap, "fragments": it.num_fragments,
        "codec": it.up, "utilization_percent": 100 * case.utilization(outcome), "hours": outcome.hours,
        "up_bytes_per_learner": outcome.up_bytes / num, "down_bytes_per_learner": outcome.down_bytes / num,
        "total_bytes": outcome.up_bytes + outcome.down_bytes, "usd": outcome.usd, "loss_penalty_percent": outcome.penalty.percent,
        "loss_penalty_sources": outcome.penalty.sources, "loss_penalty_unknown": outcome.penalty.unknown,
        "standing": STANDINGS[standing(case, outcome)], "why": explain(case, outcome),
    }  # fmt: skip


def _print(case: "Case", shown: "list[tuple[int, Outcome]]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from diloco.planning.units import SIZE, significant

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("method", overflow="fold")  # where the terminal is narrow this gives way, and no number
    for title in ("busy", "hours", "bytes", "USD", "loss"):
        table.add_column(title, justify="right", no_wrap=True)
    for rank, outcome in shown:
        table.add_row(
            str(rank), f"[bold]{outcome.candidate.title}[/]\n[dim]{outcome.candidate.detail}[/]",
            f"{100 * case.utilization(outcome):.1f} %", significant(outcome.hours), SIZE.show(outcome.up_bytes + outcome.down_bytes),
            "?" if outcome.usd is None else f"{outcome.usd:,.0f}", _loss(outcome),
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(_headline(case))
    console.print()
    console.print(table)
    console.print()
    console.print(
        "bytes: of all learners, both ways. loss: expected above data parallel's at equal tokens.", style="dim"
    )
    for rank, outcome in shown:
        unknown = f"unknown: {outcome.penalty.unknown}" if outcome.penalty.unknown else ""
        console.print(f"{rank}: {unknown or '; '.join(outcome.penalty.sources)}", style="dim")


def _loss(outcome: "Outcome") -> str:
    percent = outcome.penalty.percent
    return "unknown" if percent is None else f"{percent:+.1f} %"


def _headline(case: "Case") -> str:
    from diloco.planning.units import TIME

    workload, budget = case.workload, case.budget
    steps = budget.tokens / budget.tokens_per_step
    slowest = max(learner.step_s for learner in case.learners)
    return (
        f"{len(case.learners)} learner{'s' * (len(case.learners) > 1)}, {_count(workload.num_parameters)} parameters, "
        f"{_count(budget.tokens)} tokens in {steps:,.0f} steps of {TIME.show(slowest)} at the slowest; a loss penalty of up to "
        f"{budget.loss_penalty_percent:g} % is allowed"
    )


def _count(number: float) -> str:
    """As the field writes it: 1.3e9 is 1.3B."""
    for suffix, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.3g}"


def _print_why(case: "Case", shown: "list[tuple[int, Outcome]]") -> None:
    from rich.console import Console

    from diloco.planning.reasons import explain

    console = Console(highlight=False, markup=False)
    for rank, outcome in shown:
        console.print(f"\n{rank}: {outcome.candidate.title}, {outcome.candidate.detail}", style="bold")
        for line in explain(case, outcome):
            console.print(f"  {line}")


def _print_choice(case: "Case", ranked: "list[Outcome]", choose: int, out: Path | None) -> None:
    from diloco.planning.ranking import standing
    from diloco.planning.units import significant

    chosen = ranked[choose - 1]
    where = f"its run file is {out / RUN_FILE}" if out is not None else "--out DIR writes its run file"
    typer.echo(f"\nTake {chosen.candidate.title}, {chosen.candidate.detail}; {where}.")
    faster = [each for each in ranked if standing(case, each) == 2 and each.hours < 0.9 * chosen.hours]
    if faster:
        best = min(faster, key=lambda each: each.hours)
        typer.echo(
            f"{best.candidate.title}, {best.candidate.detail} (rank {ranked.index(best) + 1}), would take {significant(best.hours)} h, "
            "at a loss that nobody has measured."
        )


def _write(directory: Path, text: str, case: "Case", ranked: "list[Outcome]") -> None:
    from diloco.planning import pictures

    pictures.require()
    shown = [each for each in ranked if _is_best(ranked, each)]
    drawn = _pictures(case, shown)
    files = pictures.write(directory, "advice", "Which method, at what cost", _headline(case) + ".", drawn)
    try:
        (directory / RUN_FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot write {directory / RUN_FILE} ({error.strerror}); name another directory with --out"
        ) from error
    for file in (*files, directory / RUN_FILE):
        typer.echo(f"wrote {file}", err=True)


def _pictures(case: "Case", shown: "list[Outcome]") -> list[Any]:
    from diloco.planning.pictures import Axis, Bars, Picture, bars
    from diloco.planning.ranking import STANDINGS, standing
    from diloco.planning.units import SIZE, significant

    marks = {STANDINGS[0]: "", STANDINGS[1]: "\n(loss not allowed)", STANDINGS[2]: "\n(loss not known)"}
    names = [each.candidate.title + marks[STANDINGS[standing(case, each)]] for each in shown]
    heads = ("method", "computing", "hours", "bytes in all", "USD", "loss")
    rows = [
        (f"{each.candidate.title}, {each.candidate.detail}", f"{100 * case.utilization(each):.1f} %", significant(each.hours),
         SIZE.show(each.up_bytes + each.down_bytes), "" if each.usd is None else f"{each.usd:,.0f}", _loss(each))
        for each in shown
    ]  # fmt: skip
    hours = bars(
        names, [Bars("hours", [each.hours for each in shown])], Axis("hours until the tokens are trained", log=True)
    )
    used = bars(names, [Bars("computing", [100 * case.utilization(each) for each in shown])],
                Axis("computing, % of the time of all accelerators", low=0.0, high=100.0))  # fmt: skip
    return [
        Picture("hours", "Hours", "The best setting of each method; first those whose loss penalty is allowed.", hours, heads, rows),
        Picture("computing", "Utilisation", "What part of the time the accelerators compute.", used, heads[:2], [row[:2] for row in rows]),
    ]  # fmt: skip
