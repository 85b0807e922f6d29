"""`diloco demo`: the story of a run, on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where everything is written; an earlier demo there is replaced.")
    ] = Path("runs/demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: fewer steps, and no isolated learner.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the model and the data order.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; progress goes to standard error.")
    ] = False,
) -> None:
    """Train with a syncer and three learners on this machine, kill one on the way, and compare with data parallel."""
    from diloco.demo.display import Display
    from diloco.demo.report import write_report
    from diloco.demo.story import FULL, QUICK, tell
    from diloco.demo.summary import summarise

    with Display(to_stderr=as_json) as display:
        outcome = tell(directory, QUICK if quick else FULL, seed, display.say)
    summary = summarise(outcome)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(directory / "report.html", outcome, summary)
    if as_json:
        typer.echo(json.dumps(summary))
        return
    isolated = "" if summary["isolated_loss"] is None else f", isolated learner {summary['isolated_loss']:.4f}"
    typer.echo(
        f"held-out loss: global model {summary['global_loss']:.4f}, data parallel {summary['baseline_loss']:.4f} "
        f"({summary['loss_gap_percent']:+.1f} %){isolated}\n"
        f"bytes on the wire: {summary['wire_bytes']:,} against {summary['baseline_wire_bytes']:,}, "
        f"{summary['bytes_ratio']:.0f} times fewer\n"
        f"{summary['kills_survived']} kill(s) survived, {summary['merges']} merges, {summary['tokens']:,} tokens, "
        f"{summary['seconds']:.0f} s\nsee {directory / 'report.html'} and {directory / 'summary.json'}"
    )
