"""`diloco evaluate`: held-out loss and task scores of exported models, side by side."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._shared import Json
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.evaluation.scores import ExportScores, Score


def command(
    exports: Annotated[list[Path], typer.Argument(help="Directories that `diloco export` wrote.", show_default=False)],
    tasks: Annotated[
        str | None, typer.Option(help="Names between commas: diloco_brackets, diloco_arithmetic, diloco_cloze, others.")
    ] = None,
    task_files: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="A directory of task files for lm-eval; repeatable.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Held-out text, for the loss and the cloze; repeatable.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN_FILE", help="The held-out data of this run, instead of --text.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value, instead of what --run says; repeatable.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=2, help="Of --text, spread evenly over it.")] = 256,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; default: what all exports take, up to 1024.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of each task, at most.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that a model is given at a time.")] = 16,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Give held-out loss and task scores of one or several exports, with intervals and paired differences."""
    if text and run is not None:
        raise ConfigError("--text and --run are two sources of held-out data; choose one")
    if overrides and run is None:
        raise ConfigError("--set has no effect without --run; drop it")
    if not (tasks or text or run):
        raise ConfigError("nothing to evaluate; give --tasks NAME,NAME, --text FILE or --run RUN_FILE")
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    from diloco.evaluation.evaluate import EvaluationRequest, evaluate_exports

    wanted = EvaluationRequest(
        tasks=tuple(dict.fromkeys(names)), task_files=tuple(task_files or ()), texts=tuple(text or ()), run=run,
        overrides=tuple(overrides or ()), sequences=sequences, context=context, limit=limit, batch=batch, device=device,
    )  # fmt: skip
    found = evaluate_exports(exports, wanted)
    if as_json:
        typer.echo(json.dumps(_plain(found), indent=2))
    else:
        _show(found)


def _plain(found: "list[ExportScores]") -> dict[str, object]:
    from dataclasses import asdict

    from diloco.evaluation.scores import differences

    return {
        "exports": [each.to_dict() for each in found],
        "differences": [
            {"export": other.export, "from": found[0].export, "result": name, **asdict(score)}
            for other in found[1:]
            for name, score in differences(other, found[0]).items()
        ],
    }


def _show(found: "list[ExportScores]") -> None:
    from rich.console import Console

    from diloco.cli._shared import make_table
    from diloco.evaluation.scores import differences

    first, *others = found
    paired = {each.export: differences(each, first) for each in others}
    rows = []
    for name in dict.fromkeys(name for each in found for name in each.results):
        label = name
        for each in found:
            if (result := each.results.get(name)) is None:
                continue
            arrow = {"higher": "↑", "lower": "↓"}[result.better]
            interval = "" if result.score.low is None else f"{result.score.low:.3f} to {result.score.high:.3f}"
            gap = paired.get(each.export, {}).get(name)
            rows.append([label and f"{label} {arrow}", each.export, f"{result.score.value:.3f}", interval, _gap(gap)])
            label = ""
    heads = ["", "export", "score", "95 % interval", *([f"minus {first.export}"] if others else [])]
    console = Console(markup=False)
    console.print(make_table(heads, [row[: len(heads)] for row in rows], num_text=2))
    notes = ["↑ higher is better, ↓ lower. Intervals are over documents, those of the loss over blocks of the text."]
    if others:
        notes.append("Differences are of pairs of the same documents, ± half of their 95 % interval.")
    console.print(" ".join(notes))


def _gap(score: "Score | None") -> str:
    if score is None:
        return ""
    return f"{score.value:+.3f}" + ("" if score.high is None else f" ± {score.high - score.value:.3f}")
