"""Which syncer a command talks to, and as whom: from a run file, from options, or both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.exchange.dialling import Dialler

OptionalRunFile = Annotated[
    Path | None, typer.Argument(help="The run file, for the address, the run's name and the keys.")
]
Address = Annotated[str | None, typer.Option(help="host:port of the syncer.")]
RunName = Annotated[str | None, typer.Option(help="The run's name.")]


@dataclass(frozen=True)
class Reach:
    """One run's syncer, or its syncers with commas between the addresses.

    Attributes:
        keys: to show; None: what DILOCO_KEYS holds.
        insecure: plain text to another machine is accepted.
    """

    address: str
    run: str
    keys: str | None = field(repr=False)
    insecure: bool

    def dial(self) -> Dialler:
        """Connections to it."""
        from diloco.exchange.dialling import dialler

        return dialler(self.address, keys=self.keys, insecure=self.insecure)


def reach(
    run_file: Path | None, address: str | None, run: str | None, keys: str | None, insecure: bool
) -> Reach:  # fmt: skip
    """What the options say, and where they say nothing the run file.

    Raises:
        ConfigError: that names no syncer or no run.
    """
    if run_file is not None:
        from diloco.config import load_config

        if ":" in run_file.name and not run_file.exists():
            raise ConfigError(f"there is no run file {run_file}; a syncer's address goes with --address.")
        config = load_config(run_file)
        address, run = address or config.syncer.address, run or config.run.name
        keys, insecure = keys or config.syncer.keys, insecure or config.syncer.insecure
    if address is None or run is None:
        raise ConfigError("no run is named; pass a run file, or --address and --run.")
    return Reach(address, run, keys, insecure)
