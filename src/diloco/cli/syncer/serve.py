"""`diloco syncer RUN_FILE`: serve one run."""

import ctypes
import logging
import threading
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Overrides
from diloco.cli._signals import ending_by_signals
from diloco.config import SyncerTable, load_config, require_holders
from diloco.errors import ConfigError, translated
from diloco.escaping import log_plainly
from diloco.whole_files import write_whole

if TYPE_CHECKING:
    from diloco.protocol.publishing import Standing
    from diloco.syncer.server import Options

log = logging.getLogger("diloco.syncer")

M_ARENA_MAX = -8
"""Constant of glibc's malloc.h."""

NUM_ARENAS = 2
"""Heaps of the process. glibc's default is eight for each core, and each heap fragments by itself."""


def command(
    run_file: Annotated[Path, typer.Argument(help="The run file; its \\[syncer] table configures the syncer.")],
    address: Annotated[str | None, typer.Option(help="host:port to bind, instead of the run file's.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="The state directory, instead of the run file's.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Loopback port for Prometheus; 0: any free port.")
    ] = None,
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="Serve the live page of the run on a loopback port. Default: only if the syncer's own address is "
            "loopback.",
        ),
    ] = None,
    page_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Loopback port of the live page; 0: any free port.")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The directory of the syncer's keys. Default: the run file's, or else DILOCO_KEYS."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Bind beyond this machine without TLS. It exposes everything: the model and contributions can be read "
            "and changed in transit, and every host that reaches the port has all rights.",
        ),
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Wait while another syncer serves the run from the same bucket, and take over if it fails.",
        ),
    ] = False,
    record_contributions: Annotated[
        bool,
        typer.Option("--record-contributions", help="Keep all contributions, so that `diloco replay` can merge again."),
    ] = False,
    port_file: Annotated[Path | None, typer.Option(help="Write the bound port to this file.")] = None,
    overrides: Overrides = None,
) -> None:
    """Serve the run that RUN_FILE describes until interrupted; a restart continues at the last published version."""
    from diloco.core.arithmetic import choose
    from diloco.core.presets import method_from_table
    from diloco.exchange.key_pair import find_keys
    from diloco.protocol.contribution import Budget
    from diloco.protocol.members import Deadlines
    from diloco.protocol.steering import Pool
    from diloco.store.copying import CopyPlan
    from diloco.syncer.server import EVENTS, Options, Syncer
    from diloco.tracking.feed import SyncerFeed, open_feed
    from diloco.tracking.trackers import require_packages

    log_plainly()
    _share_arenas()
    config = load_config(run_file, overrides or ())
    choose(config.run.arithmetic)
    require_holders(config, str(run_file))
    given = {
        "address": address or None, "state_dir": state_dir, "metrics_port": metrics_port, "page": page,
        "page_port": page_port, "keys": keys or None, "insecure": insecure or None, "standby": standby or None,
        "record_contributions": record_contributions or None,
    }  # fmt: skip
    table = config.syncer.model_copy(update={key: value for key, value in given.items() if value is not None})
    own = find_keys(table.keys, table.address, insecure=table.insecure)
    require_packages(config.track.trackers)
    options = Options(
        address=table.address,
        state_dir=table.state_dir or config.state_dir,
        keys=None if own is None else own.required_directory(),
        insecure=table.insecure,
        metrics_address=None if table.metrics_port is None else f"127.0.0.1:{table.metrics_port}",
        page_address=_page_address(table),
        num_learners=config.run.learners,
        budget=Budget(config.run.tokens, config.run.steps),
        spool_bytes=table.spool_bytes,
        threads=table.threads,
        pool=Pool.of(config.pool_values),
        journal=table.journal or table.record_contributions,
        record_contributions=table.record_contributions,
        store=table.store,
        lease_s=table.lease_s,
        keep_s=table.keep_s,
        standby=table.standby,
        hold=table.hold,
        copies=None if table.copy_to is None else CopyPlan(table.copy_to, table.copy_every_s),
        deadlines=Deadlines(**{field.name: getattr(table, field.name) for field in fields(Deadlines)}),
    )
    stop = threading.Event()
    method = method_from_table(config.method, str(run_file))
    opened = partial(open_feed, config, "syncer")
    tracked = SyncerFeed(options.state_dir / EVENTS, opened) if config.track.trackers else nullcontext()
    with tracked, ending_by_signals(stop.set, None), Syncer(config.run.name, method, options) as it:
        metrics = "" if it.metrics_port is None else f", metrics at http://127.0.0.1:{it.metrics_port}/metrics"
        state = _state(it.standing, list(it.versions()), options)
        log.info("syncer for run %r at %s (%s)%s", config.run.name, it.address, state, metrics)
        if it.page is not None:
            log.info("watch the run at %s", it.page.url)
        if port_file is not None:
            with translated(OSError, ConfigError, f"cannot write --port-file {port_file}", "choose another file"):
                write_whole(port_file, str(it.port))
        it.wait(stop)
        log.info("stopping; finishing open merges; a second signal quits at once")


def _page_address(table: SyncerTable) -> str | None:
    """The address of the live page; None: it is not served."""
    from diloco.exchange.wire.address import is_local
    from diloco.syncer.page.live_page import missing_packages

    by_default = table.page is None and is_local(table.address) and not missing_packages()
    return f"127.0.0.1:{table.page_port}" if table.page or by_default else None


def _state(standing: "Standing", versions: list[int], options: "Options") -> str:
    """The state of the syncer, for its first log message."""
    if standing == "serving":
        return f"at versions {versions}" if versions else "waiting for a learner that initialises it"
    if options.standby:
        return f"a standby: it takes over once {options.place} has not been written for {options.lease_s:g} s"
    return f"it serves the run once {options.place} has not been written for {options.lease_s:g} s"


def _share_arenas() -> None:
    """Limit the heaps of glibc: with one heap for each thread, memory fragments over weeks. Other C libraries have no
    such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, NUM_ARENAS)
