"""`diloco page`: a link to the live page of a run, which works once."""

import json
from contextlib import closing
from urllib.parse import urlsplit

import typer

from diloco.cli._reach import Address, OptionalRunFile, RunName, reach
from diloco.cli._shared import Insecure, Json, Keys


def command(
    run_file: OptionalRunFile = None,
    address: Address = None,
    run: RunName = None,
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Ask a live run's syncer for a link to its page, which works once.

    The browser that opens it within ten minutes may watch, and with an admin's keys steer, until the syncer ends."""
    from diloco.exchange.dialling import found
    from diloco.exchange.wire import syncer_pb2 as pb
    from diloco.exchange.wire.address import is_local

    where = reach(run_file, address, run, keys, insecure)
    with closing(where.dial()) as syncers:
        found(syncers, where.run)
        url = syncers.current.call("control", "OpenPage", pb.OpenPageRequest(run=where.run), pb.OpenPageReply).url
    if as_json:
        typer.echo(json.dumps({"url": url}))
        return
    typer.echo(url)
    if not is_local(where.address.partition(",")[0]):
        port = urlsplit(url).port
        typer.echo(
            f"that is on the syncer's machine: first ssh -L {port}:127.0.0.1:{port} HOST, in another window", err=True
        )
