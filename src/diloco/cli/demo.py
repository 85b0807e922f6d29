"""`diloco demo`: a complete run on this machine, during which a process is killed."""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from diloco.cli._options import JsonSummary
from diloco.cli._output import print_result
from diloco.cli._signals import interrupted_by_signals
from diloco.errors import ConfigError, StoreError, translated

NEEDS = ("transformers", "starlette", "uvicorn")


def command(
    directory: Annotated[Path, typer.Option("--dir", help="Output directory; replaces an earlier demo.")] = Path(
        "runs/demo"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute on two cores: fewer steps, no isolated learner.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the model and the data order.")] = 0,
    opens: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Open the live page and the report in a browser. Default: in a terminal with a display, not in CI.",
        ),
    ] = None,
    store: Annotated[
        Literal["directory", "bucket"],
        typer.Option(
            help="bucket: two syncers share a bucket of this machine; the first is killed instead of a learner, and "
            "the other one takes over."
        ),
    ] = "directory",
    reinforced: Annotated[
        bool,
        typer.Option(
            "--rl",
            help="Reinforcement learning of sums instead: two trainers, two rollout workers, of which one is killed, "
            "and a reward worker; three minutes.",
        ),
    ] = False,
    as_json: JsonSummary = False,
) -> None:
    """Train with a syncer and three learners on this machine, kill one learner, and compare with data parallel."""
    from diloco.demo import bucket_server

    is_shared = store == "bucket"
    if reinforced and (quick or is_shared):
        raise ConfigError(f"--rl has one size and one syncer; drop {'--quick' if quick else '--store'}")
    extras = f"demo{',demo-bucket' * is_shared}{',rl' * reinforced}"
    for package in (*NEEDS, *bucket_server.NEEDS * is_shared, *("reasoning_gym",) * reinforced):
        if find_spec(package) is None:
            raise ConfigError(f"the demo needs {package}; pip install 'diloco[{extras}]'")

    from diloco.demo.display import Display, is_wanted, open_page
    from diloco.demo.plan import FULL, QUICK, RlPlan, prepared
    from diloco.demo.story import tell
    from diloco.demo.summary import describe, summarise, write_report

    if opens is None:
        opens = is_wanted(os.environ, is_terminal=sys.stdout.isatty())
    plan = RlPlan() if reinforced else QUICK if quick else FULL
    report, numbers = directory / "report.html", directory / "summary.json"
    with ExitStack() as opened:
        opened.enter_context(interrupted_by_signals())
        bucket = None
        if is_shared:
            port, bucket = opened.enter_context(bucket_server.serving("demo"))
            plan = replace(QUICK if quick else FULL, bucket=f"s3://demo/run?endpoint=http://127.0.0.1:{port}")
        config = opened.enter_context(prepared(directory, plan, seed))
        ports = enumerate(plan.syncers, start=config.syncer.page_port)
        page_urls = {name: f"http://127.0.0.1:{port}/" for port, name in ports}
        with Display(plan.steps, page_urls, opens=opens, to_stderr=as_json) as display:
            if isinstance(plan, RlPlan):
                from diloco.demo import rl_story

                told = rl_story.tell(config, plan, display)
                display.say("the models answer, the report is written")
                summary = rl_story.summarise(told)
                text, write = rl_story.describe(summary), partial(rl_story.write_report, report, told)
            else:
                outcome = tell(config, plan, display.show)
                display.say("writing the report")
                summary = summarise(outcome, bucket)
                text, write = describe(summary), partial(write_report, report, outcome)
        with translated(OSError, StoreError, f"cannot write the report to {directory}", "free disk space"):
            numbers.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            write(summary)
    print_result(as_json, summary, f"\n{summary['headline']}\n\n{text}\nsee {report} and {numbers}")
    if opens:
        open_page(report.resolve().as_uri())
