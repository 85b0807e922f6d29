"""`diloco doctor`: what this machine has and what would fail, before a run is started.

findings.py   what is said of one thing     machine.py   the machine by itself     pytorch.py    torch, GPU, gloo, NCCL
packages.py   dependencies and extras       network.py   the way to the syncer, the port that a syncer would serve
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Authority, Insecure, Json, Keys, Overrides, TokenFile
from diloco.cli.doctor.findings import Finding
from diloco.cli.doctor.network import Access
from diloco.errors import ConfigError
from diloco.escaping import printable

if TYPE_CHECKING:
    from diloco.cli.doctor.network import Syncer
    from diloco.config import RunConfig

MARKS = {"ok": "", "absent": "note", "missing": "FAILS"}


def command(
    run_file: Annotated[
        Path | None, typer.Argument(help="A run file: look at what this run needs, and at the way to its syncer.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="host:port of the syncer, instead of the run file's.")] = None,
    run: Annotated[str | None, typer.Option(help="The run's name, with --address and without a run file.")] = None,
    name: Annotated[str | None, typer.Option(help="The learner whose table of the run file and keys count.")] = None,
    keys: Keys = None,
    token_file: TokenFile = None,
    ca: Authority = None,
    insecure: Insecure = False,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="This is the syncer's machine: could it serve here?")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the run would write; default: run.dir, or this directory.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Say what is here (torch, GPU, network, clock, disk, packages), what would fail, and what to do.

    Ends with exit code 1 where something that is needed is missing.
    """
    from diloco.config import load_config

    config = None if run_file is None else load_config(run_file, overrides or (), learner=name)
    if config is None and overrides:
        raise ConfigError("--set overrides a run file, and none is given")
    if serve is not None and config is None:
        raise ConfigError("--serve looks at the [syncer] table of a run file; give one")
    access = Access(keys, token_file, ca, insecure)
    syncer = None if serve is not None else _syncer(config, address, run, name, access)
    findings = []
    for finding in _look(config, directory, syncer, serve):
        findings.append(finding)
        if not as_json:
            _print(finding)
    missing = sum(finding.state == "missing" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not missing, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        typer.echo(
            "\nnothing that is needed is missing" if not missing else f"\n{missing} needed and missing: see FAILS"
        )
    if missing:
        raise typer.Exit(1)


def _syncer(
    config: "RunConfig | None", address: str | None, run: str | None, name: str | None, access: Access
) -> "Syncer | None":
    """The syncer to look for; None: none is named."""
    from diloco.cli.doctor.network import Syncer

    if config is not None:
        table = config.syncer
        access = Access(
            access.keys or table.keys, access.token_file or table.token_file, access.ca or table.ca,
            access.insecure or table.insecure,
        )  # fmt: skip
        return Syncer(address or table.address, run or config.run.name, access, name)
    if (address is None) != (run is None):
        raise ConfigError("--address and --run belong together; give both, or a run file")
    return None if address is None or run is None else Syncer(address, run, access, name)


def _look(
    config: "RunConfig | None", directory: Path | None, syncer: "Syncer | None", serve: str | None
) -> Iterator[Finding]:
    """Everything that is looked at, in order."""
    from diloco.cli.doctor.machine import look_at_machine
    from diloco.cli.doctor.network import look_at_port, look_at_way
    from diloco.cli.doctor.packages import look_at_packages
    from diloco.cli.doctor.pytorch import look_at_torch

    store = directory or (Path() if config is None else config.state_dir if serve is not None else config.dir)
    yield from look_at_machine(store)
    yield from look_at_torch(needs_cuda=config is not None and serve is None and config.train.device == "cuda")
    yield from look_at_packages()
    if config is not None and serve is not None:
        yield from look_at_port(serve, config.run.name, config.syncer)
    if syncer is not None:
        yield from look_at_way(syncer)


def _print(finding: Finding) -> None:
    """One line, and a second one with the advice."""
    colour = {"ok": None, "absent": "yellow", "missing": "red"}[finding.state]
    mark = typer.style(f"{MARKS[finding.state]:5}", fg=colour)
    typer.echo(f"{mark} {finding.what:15} {printable(finding.found)}")
    if finding.advice:
        typer.echo(f"{'':21} {finding.advice}")
