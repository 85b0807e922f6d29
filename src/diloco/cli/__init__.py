"""The command line: one file per command, imported when it is called.

A command is a typed function `command` in the file that bears its name, or a Typer `app` there if it has commands of
its own. `diloco --help` lists the summaries below without importing any of them.

Exit codes: 0 done, 1 failure (one sentence on standard error), 2 wrong use, 130 interrupted, 143 stopped by a signal
where a supervisor is to start it again (`diloco train --supervised`).
"""

import atexit
import gc
import importlib
import io
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from diloco.errors import ConfigError, DilocoError
from diloco.escaping import printable
from diloco.tracking import THREADS

COMMANDS = {
    "demo": (
        "Train with a syncer and three learners on this machine, kill one on the way, and compare with data parallel."
    ),
    "syncer": (
        "Serve the run that RUN_FILE describes until interrupted; a restart continues at the last published version."
    ),
    "doctor": "Say what is here (torch, GPU, disk, packages, the way to the syncer), what would fail, and what to do.",
    "train": "Train one learner's part of the run that RUN_FILE describes.",
    "status": "Show a live run: learners, rounds and the learners they wait for, tokens, bytes.",
    "admin": "Steer a live run: evict or drain a learner, pause the run, change its quorum, end it.",
    "page": "Ask a live run's syncer for a link to its page, which works once.",
    "report": (
        "Show a run that is over or under way, real or simulated: who took part, who was in which merge, losses, bytes."
    ),
    "replay": "Run all decisions of a syncer again from its journal, and all merges, and compare every digest.",
    "export": "Write the global model to a directory that transformers can load.",
    "evaluate": "Give held-out loss and task scores of one or several exports, with intervals and paired differences.",
    "keys": "Make and manage the keys of a run: certificates, as directories and as lines.",
    "plan": "Estimate a run in advance: utilisation, hours, bytes, money and failures, in a second and without torch.",
    "simulate": "Train the run that RUN_FILE describes in virtual time, over modelled links and faults.",
    "tokenize": "Make token shards of the texts that RUN_FILE describes; goes on where it was ended.",
    "methods": "List the methods with their resolved values and the papers they come from.",
}


class _LazyGroup(TyperGroup):
    """A group that knows its commands' summaries, and imports a command when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(str(name)), rest


def _load(name: str) -> Any:
    module = importlib.import_module(f"diloco.cli.{name}")
    if hasattr(module, "app"):
        return get_command(module.app)
    single = typer.Typer(add_completion=False)
    single.command(name)(module.command)
    return get_command(single)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"diloco {version('diloco')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one PyTorch model across islands of compute joined by ordinary internet links."""


def _placeholder() -> None:
    raise AssertionError("a command is resolved before it is called")


def _build() -> typer.Typer:
    app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(_placeholder)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line on `argv` (default: `sys.argv[1:]`). Ends in SystemExit; foreign errors propagate."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read at import; errors are said in a sentence of this package's
    atexit.register(gc.freeze)  # Python would look through all of torch's objects once more, for seconds
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where the terminal's encoding has no τ
    try:
        _run(argv)
    except BaseException as error:
        if any(thread.name.startswith(THREADS) for thread in threading.enumerate()):
            _end_now(error)
        raise


def _run(argv: Sequence[str] | None) -> None:
    try:
        _build()(args=None if argv is None else list(argv), prog_name="diloco")
    except ConfigError as error:
        _fail(error, exit_code=2)
    except DilocoError as error:
        _fail(error, exit_code=1)


def _fail(error: DilocoError, *, exit_code: int) -> None:
    text = "\n".join(map(printable, str(error).split("\n")))
    print(f"diloco: {text}", file=sys.stderr)
    raise SystemExit(exit_code) from error


def _end_now(error: BaseException) -> NoReturn:
    """End without exit handlers: the library of a tracker that was left alone would wait in its own for a network."""
    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
