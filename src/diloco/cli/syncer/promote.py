"""`diloco syncer promote ADDRESS`: a takeover by hand."""

from contextlib import closing
from typing import Annotated

import typer

from diloco.cli._options import Insecure, Json, Keys
from diloco.cli._output import print_result

ANSWER_TIMEOUT_S = 30.0
"""The syncer claims the run with one write to the bucket, and loads the model."""


def command(
    address: Annotated[str, typer.Argument(help="host:port of the standby that takes over.")],
    run: Annotated[str, typer.Option(help="The run's name.")],
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Let a standby serve the run at once, also while the other syncer works: that one publishes nothing from then on.
    Nothing is lost. Requires keys with the role admin."""
    from diloco.exchange.connection import Connection
    from diloco.exchange.wire import syncer_pb2 as pb

    with closing(Connection(address, keys=keys, insecure=insecure)) as connection:
        request = pb.PromoteRequest(run=run)
        reply = connection.call("control", "Promote", request, pb.PromoteReply, timeout_s=ANSWER_TIMEOUT_S)
    epoch, versions = reply.epoch, list(reply.versions)
    value = {"address": address, "epoch": epoch, "versions": versions}
    print_result(as_json, value, f"{address} serves run {run!r} in epoch {epoch}, at versions {versions}")
