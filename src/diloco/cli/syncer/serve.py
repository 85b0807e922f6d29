"""`diloco syncer RUN_FILE`: serve one run."""

import ctypes
import logging
import threading
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli._signals import ending_by_signals
from diloco.config import load_config
from diloco.errors import ConfigError, translated
from diloco.escaping import log_plainly
from diloco.whole_files import write_whole

log = logging.getLogger("diloco.syncer")

M_ARENA_MAX = -8
"""Of glibc's malloc.h."""

NUM_ARENAS = 2
"""Threads would get up to eight for each core, each with holes of its own."""


def command(
    run_file: Annotated[Path, typer.Argument(help="The run file; its \\[syncer] table says where and how to serve.")],
    address: Annotated[str | None, typer.Option(help="host:port to bind, instead of the run file's.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the run lives, instead of the run file's.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Loopback port for Prometheus; 0 chooses one.")] = None,
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="Serve the live page of the run on a loopback port. Default: where the syncer itself is reached from "
            "this machine only.",
        ),
    ] = None,
    page_port: Annotated[int | None, typer.Option(help="Loopback port of the live page; 0 chooses one.")] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The directory of the syncer's keys, instead of the run file's; where neither names one, DILOCO_KEYS.",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Bind beyond this machine without TLS. It exposes everything: the model and contributions can be read "
            "and changed on the way, and every host that reaches the port may do everything.",
        ),
    ] = False,
    follow: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Be the standby of the run's other syncer: keep all that it publishes, and take the run over when it "
            "is gone.",
        ),
    ] = None,
    record_contributions: Annotated[
        bool,
        typer.Option("--record-contributions", help="Keep all contributions: `diloco replay` merges again."),
    ] = False,
    port_file: Annotated[Path | None, typer.Option(help="Write the bound port here once it serves.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: --set syncer.spool_bytes=1000000")
    ] = None,
) -> None:
    """Serve the run that RUN_FILE describes until interrupted; a restart continues at the last published version."""
    from diloco.core.presets import method_from_table
    from diloco.exchange.key_pair import find_keys
    from diloco.protocol.members import Deadlines
    from diloco.protocol.steering import Pool
    from diloco.store.backup import BackupPlan
    from diloco.syncer.server import EVENTS, Options, Syncer
    from diloco.syncer.standby.following import StandbyCredentials
    from diloco.tracking.feed import SyncerFeed, open_feed
    from diloco.tracking.trackers import require_packages

    log_plainly()
    _share_arenas()
    config = load_config(run_file, set_ or ())
    table = config.syncer
    is_insecure = insecure or table.insecure
    own = find_keys(keys or table.keys, address or table.address, insecure=is_insecure)
    require_packages(config.track.trackers)
    port = metrics_port if metrics_port is not None else table.metrics_port
    options = Options(
        address=address or table.address,
        state_dir=state_dir or config.state_dir,
        keys=None if own is None else own.required_directory(),
        insecure=is_insecure,
        metrics_address=None if port is None else f"127.0.0.1:{port}",
        page_address=_page_address(
            table.page if page is None else page,
            table.page_port if page_port is None else page_port,
            address or table.address,
        ),
        num_learners=config.run.learners,
        budget_tokens=config.run.tokens,
        spool_bytes=table.spool_bytes,
        pool=Pool.of(config.pool_values),
        journal=table.journal or record_contributions,
        record_contributions=table.record_contributions or record_contributions,
        backup=None if table.backup is None else BackupPlan(table.backup, table.backup_every_s, table.backup_keep),
        follow=follow or table.follow,
        follow_with=StandbyCredentials(own, is_insecure),
        durable=table.durable,
        deadlines=Deadlines(**{field.name: getattr(table, field.name) for field in fields(Deadlines)}),
    )
    stop = threading.Event()
    method = method_from_table(config.method)
    opened = partial(open_feed, config, "syncer")
    tracked = SyncerFeed(options.state_dir / EVENTS, opened) if config.track.trackers else nullcontext()
    with tracked, ending_by_signals(stop.set, None), Syncer(config.run.name, method, options) as it:
        metrics = "" if it.metrics_port is None else f", metrics at http://127.0.0.1:{it.metrics_port}/metrics"
        state = _state(it.pairing.standing, list(it.versions()), options.follow)
        log.info("syncer for run %r at %s (%s)%s", config.run.name, it.address, state, metrics)
        if it.page is not None:
            log.info("watch the run at %s", it.page.url)
        if port_file is not None:
            _write_port(port_file, it.port)
        it.wait(stop)
        log.info("stopping; finishing what is being merged; again: quit at once")


def _page_address(wanted: bool | None, port: int, address: str) -> str | None:
    """Where the live page is served; None: nowhere. `wanted`: None where nothing was said."""
    from diloco.exchange.wire.address import is_local
    from diloco.syncer.page.live_page import missing_packages

    if wanted or (wanted is None and is_local(address) and not missing_packages()):
        return f"127.0.0.1:{port}"
    return None


def _state(standing: str, versions: list[int], other: str | None) -> str:
    """What the syncer does, in words."""
    if standing == "alone":
        return f"at versions {versions}" if versions else "waiting for a learner with --initialise"
    if standing == "following":
        return f"following the one at {other}"
    return f"at versions {versions}, waiting for its standby, or for most learners, to agree that it serves the run"


def _share_arenas() -> None:
    """Let threads share their heaps: glibc gives up to eight to each core, and over weeks each of them comes to be full
    of holes. Other C libraries are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, NUM_ARENAS)


def _write_port(path: Path, port: int) -> None:
    """Write the port at once: a reader sees the whole number or no file."""
    with translated(OSError, ConfigError, f"cannot write --port-file {path}", "choose another file"):
        write_whole(path, str(port))
