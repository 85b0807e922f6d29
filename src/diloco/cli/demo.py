"""`diloco demo`: a whole run on this machine, with a learner killed on the way."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.cli._shared import JsonSummary
from diloco.cli._signals import interrupted_by_signals
from diloco.errors import ConfigError, StoreError, translated

if TYPE_CHECKING:
    from diloco.demo.story import DemoState

NEEDS = ("transformers", "starlette", "uvicorn")


def command(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where everything is written; an earlier demo there is replaced.")
    ] = Path("runs/demo"),
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: fewer steps, and no isolated learner.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the model and the data order.")] = 0,
    opens: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Open the live page in a browser, and the report at the end. Default: at a terminal with a display, "
            "not in CI.",
        ),
    ] = None,
    as_json: JsonSummary = False,
) -> None:
    """Train with a syncer and three learners on this machine, kill one on the way, and compare with data parallel."""
    for package in NEEDS:
        if find_spec(package) is None:
            raise ConfigError(f"the demo needs {package}; pip install 'diloco[demo]'")

    from diloco.demo import browser
    from diloco.demo.display import Display
    from diloco.demo.plan import FULL, QUICK
    from diloco.demo.story import tell
    from diloco.demo.summary import summarise

    if opens is None:
        opens = browser.is_wanted(os.environ, is_terminal=sys.stdout.isatty())
    opened = not opens

    def show(state: "DemoState") -> None:
        nonlocal opened
        display.show(state)
        if not opened and browser.is_served(state.page_url):
            opened = True
            if not browser.show(state.page_url):
                display.say(f"found no browser to open; open {state.page_url} yourself")

    with interrupted_by_signals(), Display(to_stderr=as_json) as display:
        result = tell(directory, QUICK if quick else FULL, seed, show)
    summary = summarise(result)
    display.say("writing the report")
    from diloco.demo.page import write_report

    report = directory / "report.html"
    with translated(OSError, StoreError, f"cannot write the report to {directory}", "free disk space"):
        (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        write_report(report, result, summary)
    typer.echo(json.dumps(summary) if as_json else _sentences(summary, directory))
    if opens:
        browser.show(report.resolve().as_uri())


def _sentences(summary: dict[str, Any], directory: Path) -> str:
    it, isolated = summary, summary["isolated_loss"]
    alone = "" if isolated is None else f", isolated learner {isolated:.4f}"
    return (
        f"\n{it['headline']}\n\n"
        f"held-out loss: {it['global_loss']:.4f} nats per byte, data parallel {it['baseline_loss']:.4f} "
        f"({it['loss_gap_percent']:+.1f} %){alone}\n"
        f"on the wire: {it['wire_bytes'] / 1e6:,.1f} MB, data parallel {it['baseline_wire_bytes'] / 1e6:,.1f} MB\n"
        f"{it['merges']} merges, {it['tokens']:,} tokens, {it['seconds']:.0f} s\n"
        f"see {directory / 'report.html'} and {directory / 'summary.json'}"
    )
