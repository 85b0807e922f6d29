"""`diloco syncer promote ADDRESS`: a manual takeover by a standby."""

from contextlib import closing
from typing import Annotated

import typer

from diloco.cli._options import Insecure, Json, Keys
from diloco.cli._output import print_result

ANSWER_TIMEOUT_S = 30.0
"""The syncer answers after it has notified the other syncer, or some seconds later."""


def command(
    address: Annotated[str, typer.Argument(help="host:port of the syncer that takes over.")],
    run: Annotated[str, typer.Option(help="The run's name.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Take over even if the other syncer still answers. Versions that only the other one has are lost, and "
            "learners that cannot reach this one may continue with the other one.",
        ),
    ] = False,
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Let a standby serve the run without the votes of learners, if most of them are lost. Requires keys with the role
    admin. Stop the other syncer first: the standby cannot know whether it still publishes."""
    from diloco.exchange.connection import Connection
    from diloco.exchange.wire import syncer_pb2 as pb

    with closing(Connection(address, keys=keys, insecure=insecure)) as connection:
        request = pb.PromoteRequest(run=run, force=force)
        reply = connection.call("control", "Promote", request, pb.PromoteReply, timeout_s=ANSWER_TIMEOUT_S)
    epoch, versions = reply.epoch, list(reply.versions)
    value = {"address": address, "epoch": epoch, "versions": versions, "fenced": reply.fenced}
    print_result(as_json, value, f"{address} serves run {run!r} in epoch {epoch}, at versions {versions}")
    if as_json:
        return
    if reply.fenced:
        typer.echo("the other syncer is notified and no longer serves the run")
    else:
        typer.echo(
            "the other syncer was not reached: make sure that it is stopped; learners that reach only that one would "
            "continue with it",
            err=True,
        )
