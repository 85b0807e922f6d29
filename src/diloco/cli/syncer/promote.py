"""`diloco syncer promote ADDRESS`: a syncer that does not serve the run takes it over, by hand."""

import json
from contextlib import closing
from typing import Annotated

import typer

from diloco.cli._shared import Insecure, Json, Keys

ANSWER_TIMEOUT_S = 30.0
"""The syncer answers once the other one has heard of it, or some seconds later."""


def command(
    address: Annotated[str, typer.Argument(help="host:port of the syncer that is to serve the run.")],
    run: Annotated[str, typer.Option(help="The run's name.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also where the other syncer still answers it. What that one has published and this one does not have "
            "is lost, and learners that do not reach this one may train on with that one.",
        ),
    ] = False,
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Let a standby serve the run without the votes of learners, for when most of them are gone. It needs the role
    admin. Stop the other syncer before: this one cannot know whether that one still publishes."""
    from diloco.exchange.connection import Connection
    from diloco.exchange.wire import syncer_pb2 as pb

    connection = Connection(address, keys=keys, insecure=insecure)
    with closing(connection):
        request = pb.PromoteRequest(run=run, force=force)
        reply = connection.call("control", "Promote", request, pb.PromoteReply, timeout_s=ANSWER_TIMEOUT_S)
    epoch, versions = reply.epoch, list(reply.versions)
    if as_json:
        typer.echo(json.dumps({"address": address, "epoch": epoch, "versions": versions, "fenced": reply.fenced}))
        return
    typer.echo(f"{address} serves run {run!r} in epoch {epoch}, at versions {versions}")
    if reply.fenced:
        typer.echo("the other syncer has heard of it and serves the run no more")
    else:
        typer.echo(
            "the other syncer was not reached: make sure that it is stopped, or learners that reach only that one go "
            "on with it",
            err=True,
        )
