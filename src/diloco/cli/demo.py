"""`diloco demo`: a whole run on this machine, with a learner killed on the way."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli._shared import JsonSummary
from diloco.cli._signals import interrupted_by_signals
from diloco.errors import ConfigError, StoreError, translated

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

    from diloco.demo.display import Display, is_wanted, open_page
    from diloco.demo.plan import FULL, QUICK, prepared
    from diloco.demo.story import tell
    from diloco.demo.summary import describe, summarise, write_report

    if opens is None:
        opens = is_wanted(os.environ, is_terminal=sys.stdout.isatty())
    plan = QUICK if quick else FULL
    report, numbers = directory / "report.html", directory / "summary.json"
    with interrupted_by_signals(), prepared(directory, plan, seed) as config:
        page_url = f"http://127.0.0.1:{config.syncer.page_port}/"
        with Display(plan.steps, page_url, opens=opens, to_stderr=as_json) as display:
            outcome = tell(config, plan, display.show)
            display.say("writing the report")
        summary = summarise(outcome)
        with translated(OSError, StoreError, f"cannot write the report to {directory}", "free disk space"):
            numbers.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            write_report(report, outcome, summary)
    sentences = f"\n{summary['headline']}\n\n{describe(summary)}\nsee {report} and {numbers}"
    typer.echo(json.dumps(summary) if as_json else sentences)
    if opens:
        open_page(report.resolve().as_uri())
