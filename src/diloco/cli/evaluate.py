"""`diloco evaluate`: held-out loss and task scores of exported models, side by side."""

from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Every, Insecure, Json, Keys
from diloco.cli._output import make_table, print_result
from diloco.cli._signals import ending_by_signals
from diloco.config import load_config
from diloco.errors import ConfigError
from diloco.evaluation.scores import ExportScores, Score, differences

if TYPE_CHECKING:
    from diloco.evaluation.evaluate import EvaluationRequest


def command(
    exports: Annotated[
        list[Path] | None, typer.Argument(help="Directories that `diloco export` wrote.", show_default=False)
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--follow", metavar="SOURCE", help="Versions of a live run, from its syncer or its store."),
    ] = None,
    every: Every = 1,
    report_to: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Report to this syncer; default: SOURCE, if it is one.")
    ] = None,
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
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Evaluate exports, or each version of a run: held-out loss and task scores, with intervals.

    Exports are compared by paired differences. With --follow, each N-th version of a live run is evaluated, and the
    results are reported to its syncer, with keys of the role evaluator: into its events, its page and its trackers.
    """
    if bool(exports) == (source is not None):
        raise ConfigError("give either exports, or a run with --follow SOURCE")
    if text and run is not None:
        raise ConfigError("--text and --run are two sources of held-out data; choose one")
    if overrides and run is None:
        raise ConfigError("--set has no effect without --run; drop it")
    if report_to is not None and source is None:
        raise ConfigError("--report-to has no effect without --follow; drop it")
    if not (tasks or text or run):
        raise ConfigError("nothing to evaluate; give --tasks NAME,NAME, --text FILE or --run RUN_FILE")
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    from diloco.evaluation.evaluate import EvaluationRequest, evaluate_exports

    wanted = EvaluationRequest(
        tasks=tuple(dict.fromkeys(names)), task_files=tuple(task_files or ()), texts=tuple(text or ()), run=run,
        overrides=tuple(overrides or ()), sequences=sequences, context=context, limit=limit, batch=batch, device=device,
    )  # fmt: skip
    if source is not None:
        _follow(source, every, report_to, wanted, keys, as_json, insecure=insecure)
        return
    found = evaluate_exports(exports or [], wanted)
    print_result(as_json, _plain(found), lambda: _show(found), indent=2)


def _follow(
    source: str, every: int, report_to: str | None, wanted: "EvaluationRequest", keys: str | None, as_json: bool, *,
    insecure: bool,
) -> None:  # fmt: skip
    """Evaluate each version, print a line for it, and report it to a syncer if there is one."""
    from diloco.evaluation.followed import Reporter, evaluate_versions
    from diloco.following.follower import follow
    from diloco.following.sources import is_address

    if wanted.run is None:
        raise ConfigError("--follow needs the model and the data of the run; give --run RUN_FILE")
    config = load_config(wanted.run, wanted.overrides)
    run, keys, insecure = config.run.name, keys or config.syncer.keys, insecure or config.syncer.insecure
    has_syncer = is_address(source)
    syncer = report_to or (source if has_syncer else None)
    of_source = keys if has_syncer else None
    follower = follow(source, run=run, every=every, keys=of_source, insecure=insecure and has_syncer)
    with ExitStack() as opened:
        opened.enter_context(follower)
        reporter = None if syncer is None else Reporter(syncer, run, follower.closing, keys=keys, insecure=insecure)
        if reporter is not None:
            opened.enter_context(closing(reporter))
        opened.enter_context(ending_by_signals(follower.close, "after the version that is being evaluated"))
        for model, scores in evaluate_versions(follower, wanted, config):
            if reporter is not None:
                reporter.report(model, scores)
            results = ", ".join(f"{it.name} {it.score.value:.4f}" for it in scores.results.values())
            print_result(as_json, {**model.describe(), "results": scores.to_dict()["results"]}, f"{model}: {results}")


def _plain(found: list[ExportScores]) -> dict[str, object]:
    return {
        "exports": [each.to_dict() for each in found],
        "differences": [
            {"export": other.export, "from": found[0].export, "result": name, **asdict(score)}
            for other in found[1:]
            for name, score in differences(other, found[0]).items()
        ],
    }


def _show(found: list[ExportScores]) -> None:
    from rich.console import Console

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


def _gap(score: Score | None) -> str:
    if score is None:
        return ""
    return f"{score.value:+.3f}" + ("" if score.high is None else f" ± {score.high - score.value:.3f}")
