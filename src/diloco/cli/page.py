"""`diloco page`: a single-use link to the live page of a run."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from diloco.cli._options import Json, Store
from diloco.cli._output import print_result
from diloco.cli._run_address import RunAddress, takes_run_address
from diloco.errors import ConfigError


@takes_run_address
def command(
    at: RunAddress | None,
    store: Store = None,
    out: Annotated[Path | None, typer.Option(help="With --store: the file to write; default run.html.")] = None,
    as_json: Json = False,
) -> None:
    """Ask a live run's syncer for a single-use link to its page.

    The browser that opens the link within ten minutes may watch until the syncer ends; with an admin's keys it may also
    steer the run. With --store, write a page of what the store of a run without its syncer has: `diloco status`."""
    if at is None:
        from diloco.cli._status_view import write_page
        from diloco.following.stored_status import stored_status

        page = out or Path("run.html")
        write_page(stored_status(str(store)), page)
        print_result(as_json, {"file": str(page)}, f"see {page}")
        return
    if out is not None:
        raise ConfigError(
            "--out has no effect on a link to a live page; name the run's place with --store, or drop it."
        )
    from diloco.exchange.wire import syncer_pb2 as pb
    from diloco.exchange.wire.address import is_local

    url = at.call("OpenPage", pb.OpenPageRequest(run=at.run), pb.OpenPageReply).url
    print_result(as_json, {"url": url}, url)
    if not as_json and not is_local(at.address.partition(",")[0]):
        port = urlsplit(url).port
        typer.echo(
            f"the link is for the syncer's machine: first run ssh -L {port}:127.0.0.1:{port} HOST in another terminal",
            err=True,
        )
