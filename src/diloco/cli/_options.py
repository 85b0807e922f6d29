"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(help="The run file (TOML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="table.key=value, instead of what the run file says; repeatable.")
]
LearnerName = Annotated[str | None, typer.Option(help="Name of this learner; default learner-<shard>.")]
Keys = Annotated[
    str | None,
    typer.Option(
        metavar="KEYS",
        help="The keys to show: a directory that `diloco keys` made. A line diloco1.… is taken too, and other users of "
        "this machine can see it in the list of processes: give it in the environment variable DILOCO_KEYS instead.",
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Plain text to another machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonSummary = Annotated[
    bool, typer.Option("--json", help="Print the summary as JSON; progress goes to standard error.")
]

Model = Annotated[
    str | None, typer.Option(help="1b, 10b, 100b, llama-405b, deepseek-v3, a .toml file or a transformers config.json.")
]
Parameters = Annotated[float | None, typer.Option(help="Instead of --model.")]
SyncEvery = Annotated[int, typer.Option(min=1, metavar="H", help="Inner steps between two synchronisations.")]
PicturesPage = Annotated[Path | None, typer.Option(metavar="FILE", help="Write pictures there: one HTML page.")]
