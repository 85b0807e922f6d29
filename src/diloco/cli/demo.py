"""`diloco demo`: a whole run on this machine, with a learner killed on the way."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.cli._options import JsonSummary
from diloco.cli._signals import interrupted_by_signals
from diloco.errors import ConfigError, StoreError, translated


def command(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where everything is written; an earlier demo there is replaced.")
    ] = Path("runs/demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: fewer steps, and no isolated learner.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the model and the data order.")] = 0,
    as_json: JsonSummary = False,
) -> None:
    """Train with a syncer and three learners on this machine, kill one on the way, and compare with data parallel."""
    for package in ("transformers", "matplotlib"):
        if find_spec(package) is None:
            raise ConfigError(f"the demo needs {package}; pip install 'diloco[demo]'")

    from diloco.demo.display import Display
    from diloco.demo.plan import FULL, QUICK
    from diloco.demo.story import tell
    from diloco.demo.summary import summarise

    with interrupted_by_signals(), Display(to_stderr=as_json) as display:
        result = tell(directory, QUICK if quick else FULL, seed, display.show)
    summary = summarise(result)
    display.say("writing the report")
    from diloco.demo.result_page import write_report

    with translated(OSError, StoreError, f"cannot write the report to {directory}", "free disk space"):
        (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        write_report(directory / "report.html", result, summary)
    typer.echo(json.dumps(summary) if as_json else _sentences(summary, directory))


def _sentences(summary: dict[str, Any], directory: Path) -> str:
    it, isolated = summary, summary["isolated_loss"]
    alone = "" if isolated is None else f", isolated learner {isolated:.4f}"
    return (
        f"held-out loss in nats per byte: global model {it['global_loss']:.4f}, data parallel "
        f"{it['baseline_loss']:.4f} "
        f"({it['loss_gap_percent']:+.1f} %){alone}\n"
        f"bytes on the wire: {it['wire_bytes']:,} against {it['baseline_wire_bytes']:,}, "
        f"{it['bytes_ratio']:.0f} times fewer\n"
        f"killed and back: {', '.join(it['killed']) or 'none'}; {it['merges']} merges, {it['tokens']:,} tokens, "
        f"{it['seconds']:.0f} s\nsee {directory / 'report.html'} and {directory / 'summary.json'}"
    )
