"""How `diloco plan utilization` shows its answers: a table, JSON, sentences, pictures."""

import json
import math
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from diloco.cli._output import make_table, say_written
from diloco.errors import ConfigError
from diloco.planning.explain import why
from diloco.planning.link_pictures import pictures
from diloco.planning.picture_pages import require, write
from diloco.planning.question import Question
from diloco.planning.settings import Setting
from diloco.planning.units import RATE, TIME
from diloco.planning.workload import Workload

Answers = list[dict[str, Any]]

DECOUPLED_COLUMNS = {
    "period_steps": "H achieved", "stale_steps": "answer's age, steps", "contributors": "learners in a merge"
}  # fmt: skip
"""By key of an answer: what it gives besides, where the learners are decoupled."""


def print_json(answers: Answers, workload: Workload, setting: Setting, convention: str, measure: str) -> None:
    """The answers, each with what was asked."""
    asked = {
        "measure": measure, "convention": convention, "model": workload.name, "parameters": workload.num_parameters,
        "layers": workload.num_layers, "step_s": workload.step_s, "method": setting.method,
        "sync_every": setting.sync_every, "overlap": setting.overlap, "fragments": setting.num_fragments,
        "codec": setting.up, "codec_down": setting.down, "latency_s": setting.latency_s,
    }  # fmt: skip
    typer.echo(json.dumps([{**answer, **asked} for answer in answers], indent=1))


def print_answers(
    answers: Answers, workload: Workload, setting: Setting, convention: str, measure: str, never: str = ""
) -> None:
    """A table, and below it why a target is never reached and the sentences of `why`, where there are such."""
    console = Console(highlight=False)
    console.print(
        f"[bold]{workload.name}[/], {setting}, steps of {TIME.show(workload.step_s)}, {convention}", soft_wrap=True
    )
    shown = [key for key in DECOUPLED_COLUMNS if measure == "pace" and any(key in answer for answer in answers)]
    rows, is_unreached = [], False
    for answer in answers:
        gbit_per_s = answer["gbit_per_s"]
        if "printed" in answer:
            link = f"{answer['printed']} Gbit/s"
        else:
            link = "never" if gbit_per_s is None else RATE.show(gbit_per_s * 1e9)
            is_unreached |= gbit_per_s is None
        more = (f"{answer[key]:.4g}" if key in answer else "" for key in shown)
        rows.append((f"{_percent(answer, measure):.4g} %", link, *more))
    heads = (measure, "link", *(DECOUPLED_COLUMNS[key] for key in shown))
    console.print(make_table(heads, rows, num_text=0))
    if is_unreached:
        console.print(f"never: {never}.")
    for sentence in answers[-1].get("why", ()):
        console.print(f"- {sentence}", soft_wrap=True)


def explained(answers: Answers, question: Question) -> Answers:
    """The answers with the sentences of `why`; a target that is never reached is explained on a link without limit."""
    rates = [math.inf if answer["gbit_per_s"] is None else 1e9 * answer["gbit_per_s"] for answer in answers]
    return [{**answer, "why": why(question, rate)} for answer, rate in zip(answers, rates, strict=True)]


def write_pictures(answers: Answers, question: Question, out: Path) -> None:
    """Write PNG files and a page. Raises ConfigError where no target is reached by any link."""
    require()
    reached = {
        f"{answer['target']:g} %" if "target" in answer else "this link": 1e9 * answer["gbit_per_s"]
        for answer in answers
        if answer["gbit_per_s"] is not None
    }
    if not reached:
        raise ConfigError("no target is reached by any link, so there is nothing to draw; lower --targets.")
    title = f"{question.workload.name}, {question.setting.method}"
    text = "What a link is worth, and what happens in one period. Made by diloco plan utilization."
    say_written(write(out, "utilization", title, text, pictures(question, reached)))


def _percent(answer: dict[str, Any], measure: str) -> float:
    """The target that was asked for, or the value of a given link."""
    percent: float = answer["target"] if "target" in answer else answer[measure]
    return percent
