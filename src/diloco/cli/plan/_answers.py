"""How `diloco plan utilization` shows its answers: a table, JSON, sentences, pictures."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.planning.question import Question
    from diloco.planning.settings import Setting
    from diloco.planning.workload import Workload

Answers = list[dict[str, Any]]


def print_answers(
    answers: Answers,
    workload: "Workload",
    setting: "Setting",
    convention: str,
    measure: str,
    *,
    as_json: bool,
    never: str = "",
) -> None:
    """A table, or JSON with the question in every object."""
    if as_json:
        described = {
            "measure": measure, "convention": convention, "model": workload.name, "parameters": workload.num_parameters,
            "layers": workload.num_layers, "step_s": workload.step_s, "method": setting.method, "sync_every": setting.sync_every,
            "overlap": setting.overlap, "fragments": setting.num_fragments, "codec": setting.up, "codec_down": setting.down,
            "latency_s": setting.latency_s,
        }  # fmt: skip
        typer.echo(json.dumps([{**answer, **described} for answer in answers], indent=1))
        return
    from rich.console import Console

    from diloco.planning.units import TIME

    console = Console(highlight=False)
    console.print(
        f"[bold]{workload.name}[/], {setting.method}, H = {setting.sync_every}, τ = {setting.overlap}, P = {setting.num_fragments}, "
        f"{setting.up}, steps of {TIME.show(workload.step_s)}, {convention}",
        soft_wrap=True,
    )
    _print_table(console, answers, measure, never)


def _print_table(console: Any, answers: Answers, measure: str, never: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from diloco.planning.units import RATE

    more = {"period_steps": "H achieved", "stale_steps": "answer's age, steps", "contributors": "learners in a merge"}
    shown = [key for key in more if measure == "pace" and any(key in answer for answer in answers)]
    table = Table(box=SIMPLE_HEAD)
    for title in (measure, "link", *(more[key] for key in shown)):
        table.add_column(title, justify="right")
    for answer in answers:
        if "printed" in answer:
            link = f"{answer['printed']} Gbit/s"
        else:
            link = "never" if answer["gbit_per_s"] is None else RATE.show(answer["gbit_per_s"] * 1e9)
        extra = (f"{answer[key]:.4g}" if key in answer else "" for key in shown)
        table.add_row(f"{answer.get('target', answer.get(measure)):.4g} %", link, *extra)
    console.print(table)
    if any(answer["gbit_per_s"] is None and "printed" not in answer for answer in answers):
        console.print(f"never: {never}.")
    for sentence in answers[-1].get("why", ()):
        console.print(f"- {sentence}", soft_wrap=True)


def _reached(answers: Answers, measure: str) -> list[tuple[float, float]]:
    """(bit/s, value) of the answers that have a link."""
    found = [(answer["gbit_per_s"], answer.get("target", answer.get(measure))) for answer in answers]
    return [
        (1e9 * gbit_per_s, percent / 100)
        for gbit_per_s, percent in found
        if gbit_per_s is not None and percent is not None
    ]


def explained(answers: Answers, question: "Question") -> Answers:
    """The answers with the sentences of `why`; a target that is never reached is explained on a link without limit."""
    from diloco.planning.explain import why

    rates = [math.inf if answer["gbit_per_s"] is None else 1e9 * answer["gbit_per_s"] for answer in answers]
    return [{**answer, "why": why(question, rate)} for answer, rate in zip(answers, rates, strict=True)]


def write_pictures(answers: Answers, question: "Question", out: Path) -> None:
    """PNG files and a page; says what was written on standard error."""
    from diloco.planning.link_pictures import pictures
    from diloco.planning.pictures import require, write

    require()
    reached = _reached(answers, question.measure)
    if not reached:
        raise ConfigError("no target is reached by any link, so there is nothing to draw; lower --targets.")
    title = f"{question.workload.name}, {question.setting.method}"
    text = "What a link is worth, and what happens in one period. Made by diloco plan utilization."
    for file in write(out, "utilization", title, text, pictures(question, reached, reached[-1][0])):
        typer.echo(f"wrote {file}", err=True)
