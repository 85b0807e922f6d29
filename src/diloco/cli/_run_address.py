"""The run and the syncer that a command talks to, from its options or a run file."""

import inspect
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from diloco.cli._options import Insecure, Keys
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from diloco.config import RunConfig

R = TypeVar("R", bound="Message")


@dataclass(frozen=True)
class RunAddress:
    """The address of a run's syncer, and the credentials of the caller.

    Attributes:
        address: host:port; comma-separated for several syncers of one run.
        keys: of the caller; None: those of DILOCO_KEYS.
        insecure: allow plain text to another machine.
    """

    address: str
    run: str
    keys: str | None = field(repr=False)
    insecure: bool

    def call(self, method: str, request: "Message", kind: type[R], timeout_s: float | None = None) -> R:
        """Call the syncer that serves the run, as `Connection.call`."""
        from diloco.exchange.dialling import dialler, found

        with closing(dialler(self.address, keys=self.keys, insecure=self.insecure)) as syncers:
            found(syncers, self.run)
            return syncers.current.call("control", method, request, kind, timeout_s=timeout_s)


def address_from(
    config: "RunConfig | None", address: str | None, run: str | None, keys: str | None, insecure: bool
) -> RunAddress | None:
    """The run address from the options, with the run file as default; None: neither names a syncer and a run."""
    if config is not None:
        address, run = address or config.syncer.address, run or config.run.name
        keys, insecure = keys or config.syncer.keys, insecure or config.syncer.insecure
    return None if address is None or run is None else RunAddress(address, run, keys, insecure)


def run_address(
    run_file: Annotated[Path | None, typer.Argument(help="The run file: its address, run name and keys.")] = None,
    address: Annotated[str | None, typer.Option(help="host:port of the syncer.")] = None,
    run: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    keys: Keys = None,
    insecure: Insecure = False,
) -> RunAddress:
    """The run address of a command. Raises ConfigError if neither the options nor the run file name a syncer."""
    from diloco.config import load_config

    if run_file is not None and ":" in run_file.name and not run_file.exists():
        raise ConfigError(f"there is no run file {run_file}; pass a syncer's address with --address.")
    found = address_from(None if run_file is None else load_config(run_file), address, run, keys, insecure)
    if found is None:
        raise ConfigError("no run is named; pass a run file, or --address and --run.")
    return found


def takes_run_address(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter `at: RunAddress` is replaced by the parameters of `run_address`. With `store` it is
    None: the command reads the run without a syncer."""
    options = inspect.signature(run_address).parameters
    parameters = list[inspect.Parameter]()
    for each in inspect.signature(command).parameters.values():
        parameters += options.values() if each.name == "at" else [each]

    @wraps(command)
    def called(**values: Any) -> None:
        given = {name: values.pop(name) for name in options if name in values}
        if (store := values.get("store")) is not None and any(given.values()):
            raise ConfigError(
                f"--store {store} reads the run without its syncer; drop the run file, --address, --run, --keys and "
                "--insecure."
            )
        command(at=None if store is not None else run_address(**given), **values)

    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    called.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return called
