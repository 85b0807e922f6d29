"""The command line: one module per command, imported when the command runs.

A command is a typed function `command` in the module of its name, or a Typer `app` if it has subcommands.
`diloco --help` prints the summaries below without importing a command.

Exit codes: 0 done, 1 failure (one sentence on standard error), 2 wrong use, 130 interrupted, 143 stopped by a signal
and to be restarted by the supervisor (`diloco train --supervised`).
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

from diloco.errors import ConfigError, DilocoError, StoreError, first_line
from diloco.escaping import printable
from diloco.tracking import THREADS

COMMANDS = {
    "demo": "Train with a syncer and three learners on this machine, kill one learner, and compare with data parallel.",
    "syncer": (
        "Serve the run that RUN_FILE describes until interrupted; a restart continues at the last published version."
    ),
    "doctor": "Check this machine (torch, GPU, disk, packages, connection to the syncer): what would fail, what to do.",
    "train": "Train one learner's part of the run that RUN_FILE describes.",
    "rl": "Reinforcement learning: generate, reward or train in the run that RUN_FILE describes.",
    "status": "Show a live run: learners, rounds and the learners they wait for, tokens, bytes.",
    "admin": "Steer a live run: evict or drain a learner, pause the run, change its quorum, end it.",
    "page": "Ask a live run's syncer for a single-use link to its page.",
    "report": "Report on a run, finished or live, real or simulated: presence of learners, merges, losses, bytes.",
    "replay": "Repeat all decisions of a syncer from its journal, and all merges, and compare every digest.",
    "copy": "Copy a run, served or not, to another store: each object verified, in one consistent state.",
    "export": "Write the global model: a directory that transformers can load, or one safetensors file (--raw).",
    "follow": "Keep a copy of a run's newest model in a folder, from its syncer or its store.",
    "evaluate": "Evaluate exports, or each version of a run: held-out loss and task scores, with intervals.",
    "keys": "Make and manage the keys of a run: certificates, as directories and as lines.",
    "plan": "Plan a run before training: utilisation, hours, bytes, money and failures, in seconds and without torch.",
    "simulate": "Train the run that RUN_FILE describes in virtual time, over modelled links and faults.",
    "tokenize": "Make token shards of the texts that RUN_FILE describes; continues after an interruption.",
    "methods": "List the methods with their resolved values and the papers they come from.",
}


class _LazyGroup(TyperGroup):
    """A group of commands that are imported when they run; help needs only their summaries."""

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
    """Run the command line on `argv` (default: `sys.argv[1:]`). Raises SystemExit; foreign errors propagate."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported; this package reports its errors
    atexit.register(gc.freeze)  # otherwise a last garbage collection of torch's objects takes seconds
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals whose encoding lacks τ
    try:
        _run(argv)
    except BaseException as error:
        if any(thread.name.startswith(THREADS) for thread in threading.enumerate()):
            _exit_now(error)
        raise


def _run(argv: Sequence[str] | None) -> None:
    try:
        _build()(args=None if argv is None else list(argv), prog_name="diloco")
    except ConfigError as error:
        _fail(error, exit_code=2)
    except DilocoError as error:
        _fail(error, exit_code=1)
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "tokenizers", "datasets"):
            raise
        _fail(ConfigError(f"{error.name} is not installed here; pip install 'diloco[train]'."), exit_code=2)
    except OSError as error:
        try:
            print(flush=True)  # fails again if standard output cannot be written
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the exit flushes and fails, too
            output = StoreError(f"cannot write to standard output ({first_line(error)}); redirect it elsewhere.")
            _fail(output, exit_code=1)
        raise


def _fail(error: DilocoError, *, exit_code: int) -> None:
    text = "\n".join(map(printable, str(error).split("\n")))
    print(f"diloco: {text}", file=sys.stderr)
    raise SystemExit(exit_code) from error


def _exit_now(error: BaseException) -> NoReturn:
    """Exit without exit handlers: those of a tracker's library may wait for a dead network."""
    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
