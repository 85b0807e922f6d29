"""`diloco plan advise`: the methods for the sites of a site file, ranked by cost."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from diloco.cli._output import make_table, print_result, say_written
from diloco.errors import ConfigError, StoreError, translated
from diloco.planning.advice import RankBy, advice_inputs, advise, penalty_status, run_file
from diloco.planning.pictures import Ranked, advice_pictures, mark, numbers
from diloco.planning.run_estimate import AdviceInputs, RunEstimate
from diloco.planning.site import load_site
from diloco.planning.units import TIME, significant
from diloco.report.drawing import short
from diloco.report.frame import write_drawings
from diloco.whole_files import write_whole

RUN_FILE = "run.toml"


def command(
    site_file: Annotated[Path, typer.Argument(help="The site file (TOML): sites, links, prices, model, budget.")],
    by: Annotated[RankBy, typer.Option(help="Rank the methods with an acceptable loss penalty by this.")] = "hours",
    everything: Annotated[
        bool, typer.Option("--all", help="Show all settings, not only the best of each method.")
    ] = False,
    choose: Annotated[int, typer.Option(min=1, help="Write the run file of this rank.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the run file and pictures into this directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every setting and the run file.")] = False,
) -> None:
    """Rank the methods for the sites of SITE_FILE by hours, bytes, money and loss; write a run file for the best."""
    inputs = advice_inputs(load_site(site_file))
    ranked = advise(inputs, by)
    if choose > len(ranked):
        raise ConfigError(f"--choose {choose} does not exist; choose one of the {len(ranked)} settings of --all")
    chosen = ranked[choose - 1]
    text = run_file(inputs, chosen.setting)
    best = {each.setting.method: each for each in reversed(ranked)}
    picked = [(rank, each) for rank, each in enumerate(ranked, 1) if each in best.values() or rank == choose]
    if out is not None:
        _write(out, text, inputs, picked, choose)

    def show_text() -> None:
        _print(inputs, list(enumerate(ranked, 1)) if everything else picked, choose)
        _print_choice(inputs, ranked, choose, out)

    candidates = [_plain(inputs, rank, each) for rank, each in enumerate(ranked, 1)]
    print_result(as_json, {"candidates": candidates, "chosen": choose, "run_file": text}, show_text, indent=1)


def _plain(inputs: AdviceInputs, rank: int, estimate: RunEstimate) -> dict[str, Any]:
    it, num, penalty = estimate.setting, len(inputs.learners), estimate.penalty
    return {
        "rank": rank, "method": it.method, "sync_every": it.sync_every, "overlap": it.overlap,
        "fragments": it.num_fragments, "codec": it.up, "utilization_percent": 100 * inputs.utilization(estimate),
        "hours": estimate.hours, "up_bytes_per_learner": estimate.up_bytes / num,
        "down_bytes_per_learner": estimate.down_bytes / num, "total_bytes": estimate.total_bytes, "usd": estimate.usd,
        "loss_penalty_percent": penalty.percent, "loss_penalty_sources": penalty.sources,
        "loss_penalty_unknown": penalty.unknown, "standing": penalty_status(inputs, estimate),
    }  # fmt: skip


def _print(inputs: AdviceInputs, shown: Ranked, choose: int) -> None:
    rows, notes = list[tuple[str | Text, ...]](), []
    for rank, each in shown:
        role = mark(rank, choose)
        heading = (each.setting.title, "bold"), f" ({role})" if role else ""
        name = Text.assemble(*heading, "\n", (each.setting.detail, "dim"))
        rows.append((str(rank), name, *numbers(inputs, each, no_price="?")))
        unknown = each.penalty.unknown
        notes.append(f"{rank}: {f'unknown: {unknown}' if unknown else '; '.join(each.penalty.sources)}")
    table = make_table(("", "method", "busy", "hours", "bytes", "USD", "loss"), rows, num_text=2)
    table.show_edge = False
    table.columns[0].no_wrap = True
    table.columns[1].overflow = "fold"  # in a narrow terminal, names wrap and numbers stay whole
    console = Console(highlight=False)
    console.print(f"{_headline(inputs)}\n")
    console.print(table)
    console.print()
    legend = "bytes: all learners, both directions. loss: expected increase over data parallel at equal tokens."
    for line in (legend, *notes):
        console.print(line, style="dim")


def _headline(inputs: AdviceInputs) -> str:
    workload, budget = inputs.workload, inputs.budget
    slowest = TIME.show(max(learner.step_s for learner in inputs.learners))
    return (
        f"{len(inputs.learners)} learner{'s' * (len(inputs.learners) > 1)}, {short(workload.num_parameters, 3)} "
        f"parameters, {short(budget.tokens, 3)} tokens in {inputs.num_steps:,.0f} steps of {slowest} at the slowest; a "
        f"loss penalty of up to {budget.loss_penalty_percent:g} % is allowed"
    )


def _print_choice(inputs: AdviceInputs, ranked: list[RunEstimate], choose: int, out: Path | None) -> None:
    chosen = ranked[choose - 1]
    where = f"its run file is {out / RUN_FILE}" if out is not None else "--out DIR writes its run file"
    typer.echo(f"\nTake {chosen.setting.label}; {where}.")
    unmeasured = [each for each in ranked if penalty_status(inputs, each) == "not known"]
    faster = [each for each in unmeasured if each.hours < 0.9 * chosen.hours]
    if faster:
        best = min(faster, key=lambda each: each.hours)
        typer.echo(
            f"{best.setting.label} (rank {ranked.index(best) + 1}) would take {significant(best.hours)} h, but no "
            "experiment has measured its loss."
        )


def _write(directory: Path, text: str, inputs: AdviceInputs, shown: Ranked, choose: int) -> None:
    page = directory / "advice.html"
    write_drawings(page, "Which method, at what cost", _headline(inputs) + ".", advice_pictures(inputs, shown, choose))
    with translated(OSError, StoreError, f"cannot write {directory / RUN_FILE}", "name another directory with --out"):
        write_whole(directory / RUN_FILE, text)
    say_written(page, directory / RUN_FILE)
