"""`diloco evaluate`: held-out loss and task scores of exported models, side by side."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Json
from diloco.cli._output import make_table, print_result
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.evaluation.scores import ExportScores, Score


def command(
    exports: Annotated[list[Path], typer.Argument(help="Directories that `diloco export` wrote.", show_default=False)],
    tasks: Annotated[
        str | None, typer.Option(help="diloco_brackets, diloco_arithmetic, diloco_cloze, …; comma-separated.")
    ] = None,
    task_files: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Task files of lm-eval; repeatable.")
    ] = None,
    text: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Held-out text; repeatable.")] = None,
    run: Annotated[Path | None, typer.Option(metavar="RUN_FILE", help="Held-out data of a run.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Overrides a key of --run: table.key=value.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=2, help="Sequences of --text, evenly spread.")] = 256,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence; default: up to 1024.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most documents of each task.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a forward pass.")] = 16,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Evaluate exports: held-out loss and task scores, with confidence intervals and paired differences."""
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
    print_result(as_json, _plain(found), lambda: _show(found), indent=2)


def _plain(found: "list[ExportScores]") -> dict[str, object]:
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
    notes = ["↑: higher is better, ↓: lower. Intervals are over documents; those of the loss over blocks of the text."]
    if others:
        notes.append("Differences are paired by document, ± half of their 95 % interval.")
    console.print(" ".join(notes))


def _gap(score: "Score | None") -> str:
    if score is None:
        return ""
    return f"{score.value:+.3f}" + ("" if score.high is None else f" ± {score.high - score.value:.3f}")
