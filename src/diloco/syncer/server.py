"""A syncer: the run behind a port, with its store, state directory, metrics and live page."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from diloco import events
from diloco.closing import Closing
from diloco.core.method import Method
from diloco.errors import ConfigError, DilocoError, FencedError, StandbyError, UnreachableError
from diloco.event_log import EventLog
from diloco.exchange.wire.address import socket_path, split_address
from diloco.exchange.wire.rpc import SERVER_OPTIONS
from diloco.protocol.contribution import Budget
from diloco.protocol.manifest import Manifest
from diloco.protocol.members import Deadlines
from diloco.protocol.publishing import Standing
from diloco.protocol.session.heartbeat import HEARTBEAT_S
from diloco.protocol.steering import Pool
from diloco.run.journal.payloads import TensorPayloads
from diloco.run.journal.recorder import Recorder
from diloco.run.ports import only_watching
from diloco.store.copying import Copies, CopyPlan
from diloco.store.directory import Directory, lock_directory
from diloco.store.journal_files import JournalFiles, PayloadFiles
from diloco.store.objects import is_same, is_url, open_store, require_manifest
from diloco.syncer.door.audit import Audit
from diloco.syncer.door.followers import FollowerCalls, SignedObjects
from diloco.syncer.door.open_calls import CallDeadlines, CallGuard, OpenCalls, OpenTransfers
from diloco.syncer.door.receiving import IncomingModel
from diloco.syncer.door.service import Service
from diloco.syncer.hosting import HostedDriver, Sharing
from diloco.syncer.journal import Journal
from diloco.syncer.keys.auth import Authenticator, check_binding
from diloco.syncer.keys.certificates import Caller
from diloco.syncer.keys.tls import server_credentials
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.page.live_page import LivePage
from diloco.syncer.ports import connections_for, port_refusal, raise_file_limit, why_unbound
from diloco.syncer.progress import EVERY_S, ProgressLog
from diloco.syncer.spool import Slot, Spool
from diloco.syncer.threads import Ticker
from diloco.syncer.wire_bytes import WireBytes
from diloco.whole_files import write_whole

log = logging.getLogger("diloco.syncer")

EVENTS = "events.jsonl"
"""The event log in the state directory."""

BOOT = "boot"
"""The boot of the last claim from the state directory, which one process has locked: its process has ended."""

TRAFFIC_EVERY_S = 2.0

FEW_STEPS = 10
"""A method that waits for answers more often may be slowed down by a bucket."""


@dataclass(frozen=True)
class Options:
    """Options of a syncer.

    Attributes:
        address: "host:port", where port 0 chooses a free one, or "unix:/path".
        state_dir: the directory of the run's durable state.
        keys: this syncer's directory of keys. With it the port uses TLS, and callers show certificates of the run.
        insecure: bind beyond this machine without TLS, on purpose.
        page_address: of the live page, loopback only; None: there is no page.
        num_learners: planned, for the live page and reports; None: not known.
        budget: when the run ends.
        metrics_address: for Prometheus, loopback only; None: there are no metrics.
        spool_bytes: memory for contributions; beyond it they go to disk.
        threads: that close a round; None: one for each core.
        pool: limits the number of learners that train; None: no limit.
        journal: keep a journal, from which `diloco replay` repeats all decisions.
        record_contributions: keep the payloads too, from which it repeats all merges.
        store: where the run's objects are: a directory, or the URL of a bucket; None: the state directory.
        lease_s: a standby takes over when the manifest of a bucket has not moved for this long.
        keep_s: how long objects stay that the manifest does not name any more.
        standby: wait while another syncer serves the run, and take over.
        hold: a standby keeps the newest model in memory.
        copies: the plan of copies of the store; None: none are made.
    """

    address: str
    state_dir: Path
    keys: Path | None = None
    insecure: bool = False
    metrics_address: str | None = None
    page_address: str | None = None
    num_learners: int | None = None
    budget: Budget = field(default_factory=Budget)
    spool_bytes: int = 1 << 30
    threads: int | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    pool: Pool | None = None
    journal: bool = True
    record_contributions: bool = False
    store: str | None = None
    lease_s: float = 10.0
    keep_s: float = 600.0
    standby: bool = False
    hold: bool = False
    copies: CopyPlan | None = None

    @property
    def place(self) -> str:
        """Of the run's objects."""
        return self.store or str(self.state_dir)


class Syncer(Closing):
    """A running syncer; a context manager that stops it.

    Raises:
        ConfigError: an unsafe binding, an unreadable certificate. RunError: a port that is in use.
        StoreError: the state directory is in use or damaged.
    """

    def __init__(self, run: str, method: Method, options: Options) -> None:
        check_binding(options.address, keys=options.keys is not None, insecure=options.insecure)
        credentials = None if options.keys is None else server_credentials(options.keys)
        auth = Authenticator(run, keys=options.keys)
        if method.exchanged == "gradients":
            raise ConfigError(
                "a syncer cannot run DataParallel on gradients: it would never hold the model, so no learner could "
                "rejoin; use Collective over a process group, or a method that exchanges outer gradients."
            )
        if options.deadlines.lost_floor_s < 2 * HEARTBEAT_S:
            raise ConfigError(
                f"lost_floor_s={options.deadlines.lost_floor_s:g} evicts learners between two heartbeats, which "
                f"are sent every {HEARTBEAT_S:g} s; use at least {2 * HEARTBEAT_S:g}."
            )
        if options.pool is not None:
            options.pool.require(method.quorum.at_least)
        _check_store(method, options)
        self.run = run
        self._method, self._options = method, options
        self._started_at = time.time()
        self._metrics = SyncerMetrics(run)
        self._failure: BaseException | None = None
        self._stopping, self._beginning = threading.Event(), threading.Lock()
        num_connections = connections_for(raise_file_limit())
        self._server = grpc.server(
            ThreadPoolExecutor(1),  # unused: `Admission` gives each call its threads
            options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", num_connections)],
        )
        self.port = _bind(self._server, options.address, credentials)
        path = socket_path(options.address)
        self.address = options.address if path else f"{split_address(options.address)[0]}:{self.port}"
        with ExitStack() as opened:  # closed in reverse order, also by a start that fails
            self._open_store(opened)
            self._events = opened.enter_context(EventLog(options.state_dir / EVENTS, who="syncer"))
            self._journal = JournalFiles(options.state_dir) if options.journal else None
            if self._journal is not None:
                opened.callback(self._journal.close)
            self._observer = Journal(self._events, self._metrics)
            plan = options.copies
            self._copies = None if plan is None else Copies(plan, self._objects, self._events)
            self._hosted = self._begin(is_standby=options.standby)
            opened.callback(lambda: self._hosted.stop())  # noqa: PLW0108 - of the newest one
            self._open_door(auth)
            self._opened = opened.pop_all()
        self._events.append(
            events.SyncerStarted(
                run=run, address=self.address, versions=self.versions(), method=method.to_dict(),
                learners=options.num_learners, budget_tokens=options.budget.tokens,
            )
        )  # fmt: skip
        if self._copies is not None:
            self._copies.start(lambda: self.standing == "serving")
        self._standing = threading.Thread(target=self._follow_standing, name="syncer-standing", daemon=True)
        self._standing.start()

    def _open_store(self, opened: ExitStack) -> None:
        """Open the place of the run's objects, and lock the state directory."""
        options = self._options
        if options.store is not None and not is_same(options.store, options.state_dir):
            opened.enter_context(lock_directory(options.state_dir))
        self._objects = open_store(options.place, lock=True)
        if isinstance(self._objects, Directory):
            opened.callback(self._objects.close)
        else:
            self._objects.require_conditions()
        require_manifest(self._objects)
        self._former: int | None = None
        with suppress(OSError, ValueError):  # absent, or lost by its disk
            self._former = int((options.state_dir / BOOT).read_text())

    def _begin(self, *, is_standby: bool) -> HostedDriver:
        """Claim the run, now or once no other syncer has it.

        Raises:
            DilocoError: the run cannot be served.
        """
        options = self._options
        is_shared = is_url(options.place)
        sharing = Sharing(self.address, self._former, options.lease_s, is_standby, holds=is_standby and options.hold)
        hosted = HostedDriver(
            self.run, self._method, self._objects, Spool(options.state_dir, options.spool_bytes),
            deadlines=options.deadlines, journal=self._observer, sharing=sharing if is_shared else None,
            keep_s=options.keep_s, stands=self._stands if is_shared else lambda *_: None, claimed=self._claimed,
            pool=options.pool, budget=options.budget, recorder=self._recorder(options),
            num_threads=options.threads,
        )  # fmt: skip
        try:
            hosted.start()
        except BaseException:
            hosted.stop()
            raise
        return hosted

    def _open_door(self, auth: Authenticator) -> None:
        """Answer calls."""
        options = self._options
        self._wire_bytes = WireBytes()
        self._traffic_at_s = self._progress_at_s = time.monotonic() + TRAFFIC_EVERY_S
        self.page: LivePage | None = None
        self._audit = audit = Audit(self._events, self._metrics)
        self._calls = OpenCalls(auth, audit)
        self.progress = ProgressLog(self._events, self._metrics, self._run_status, options.budget.tokens)
        self._deadlines = CallDeadlines(options.deadlines.lost_floor_s)
        self.transfers = OpenTransfers(lambda: self.driver, self._deadlines)
        self._incoming = IncomingModel()
        signed = SignedObjects(self._objects, options.keep_s)
        guard = CallGuard(self.run, auth, self._calls, self._deadlines, audit, self._wire_bytes)
        service = Service(
            self.run, self._method, lambda: self.driver, guard=guard, transfers=self.transfers,
            incoming=self._incoming, audit=audit, lost_floor_s=options.deadlines.lost_floor_s,
            resumed=self._observer.resumed, status_extra=self._status_extra, reported=self.progress.record,
            page_url=self._page_url, take_over=lambda: self._hosted.promote(),  # noqa: PLW0108 - of the newest one

            followers=FollowerCalls(lambda: service.driver, self._objects, signed, guard, self.progress.evaluated),
        )  # fmt: skip
        self._server.add_generic_rpc_handlers((service.handlers(),))
        self.metrics_port = None if options.metrics_address is None else self._metrics.serve(options.metrics_address)
        if options.page_address is not None:
            is_open = options.keys is None
            self.page = LivePage(
                options.page_address, self._events.path, self.progress.newest, is_open=is_open,
                steer=lambda order, caller: service.execute(order, caller, "page"),
                check=auth.check,
            )  # fmt: skip
        self._checks, self._reports = Ticker(self._check), Ticker(only_watching(self)._report)
        self._checks.start()
        self._server.start()
        self._reports.start()

    @property
    def driver(self) -> HostedDriver:
        """The run's driver, also while this syncer is suspended.

        Raises:
            StandbyError: this syncer does not serve the run now.
        """
        hosted = self._hosted
        hosted.require()
        return hosted

    @property
    def standing(self) -> Standing:
        """As in `Publisher`."""
        return self._hosted.standing

    def _page_url(self, caller: Caller) -> str:
        if self.page is None:
            raise ConfigError("this syncer serves no page; start it with --page.")
        return self.page.url_for(caller)

    def versions(self) -> tuple[int, ...]:
        """The newest durable version of each fragment, as far as this syncer knows."""
        return self._hosted.manifest.versions

    def _claimed(self, manifest: Manifest) -> None:
        """Remember a claim. A disk that refuses costs the next start a lease."""
        self._former = manifest.boot
        try:
            write_whole(self._options.state_dir / BOOT, str(manifest.boot))
        except OSError as error:
            log.warning("%s cannot be written (%s)", self._options.state_dir / BOOT, error)

    def _stands(self, standing: Standing, epoch: int, why: str) -> None:
        """Log the new standing of this syncer."""
        log.log(logging.INFO if standing in ("claiming", "serving") else logging.WARNING,
                "this syncer is %s, epoch %d: %s", standing, epoch, why)  # fmt: skip
        self._events.append(events.StandingChanged(standing=standing, epoch=epoch, why=why))
        self._metrics.standing_changed(standing)

    def _follow_standing(self) -> None:
        """Begin again as a standby after another syncer has claimed the run, or fail."""
        while True:
            hosted = self._hosted
            hosted.until_ended()
            if self._stopping.is_set() or hosted.failure is not None:
                return
            try:
                hosted.stop()
                if hosted.refusal is not None:
                    raise hosted.refusal
                if not self._options.standby:
                    raise FencedError(
                        f"another syncer serves run {self.run!r} from {self._objects.name} now, so this one ends; "
                        "start it with --standby to wait for its turn."
                    )
                with self._beginning:
                    if self._stopping.is_set():
                        return
                    self._hosted = self._begin(is_standby=True)
            except BaseException as error:
                if not isinstance(error, DilocoError):
                    log.critical("this syncer cannot begin again", exc_info=error)
                self._failure = error
                return

    def _recorder(self, options: Options) -> Recorder[Slot] | None:
        if self._journal is None:
            return None
        keep = PayloadFiles(options.state_dir) if options.record_contributions else None
        return Recorder(self._journal, TensorPayloads(keep))

    def wait(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. Raises the error of the driver or of a thread, if one fails."""
        while not stop.wait(0.5):
            if (failure := self._failure or self._checks.failure) is not None:
                raise failure
            self._hosted.raise_failure()

    def close(self) -> None:
        """Finish merges in progress, notify the learners, and stop."""
        if self._stopping.is_set():
            return
        with self._beginning:
            self._stopping.set()
        hosted = self._hosted
        self.progress.write()
        hosted.stop()
        self._standing.join()
        self._server.stop(grace=1.0).wait()
        self._checks.stop()
        self._audit.flush(after_s=0.0)
        self._reports.stop()
        if self._copies is not None:
            self._copies.close()
        self._append_traffic()
        self._observer.merges.say(is_last=True)
        with suppress(StandbyError, UnreachableError):  # it has not served the run, or has failed
            step, tokens = hosted.ask(lambda driver: (driver.state.step, driver.state.run_tokens))
            versions = self.versions()
            saved = f"versions {list(versions)}, step {step:,}, {tokens:,} tokens" if versions else "no model yet"
            if hosted.store_status()["is_refusing"]:
                lacks = "so it may lack what is newer than these versions, and learners keep that"
                log.warning("stopped; %s does not answer, %s: %s", self._objects.name, lacks, saved)
            else:
                log.info("stopped; saved in %s: %s", self._objects.name, saved)
            seconds = time.time() - self._started_at
            self._events.append(events.Finished(steps=step, tokens=tokens, seconds=seconds, reason="stopped"))
        if self.page is not None:
            self.page.close()
        self._metrics.close()
        self._opened.close()

    def _run_status(self) -> dict[str, Any] | None:
        """`Driver.status`; None: this syncer does not serve the run now."""
        try:
            return self.driver.ask(lambda driver: driver.status())
        except (StandbyError, UnreachableError):
            return None

    def _status_extra(self) -> dict[str, Any]:
        """The syncer's part of its status: time, events that could not be written, bytes by learner and kind."""
        now = time.time()
        return {
            "time_s": now, "uptime_s": now - self._started_at, "missing_events": self._events.num_missing,
            "budget_tokens": self._options.budget.tokens, "num_bytes": self._wire_bytes.by_learner(),
            "store": {"place": self._objects.name, **self._hosted.store_status()},
        }  # fmt: skip

    def _check(self, _late_s: float) -> None:
        for each in (self._calls, self._deadlines, self.transfers):
            each.check()
        self._incoming.drop_expired()

    def _report(self, _late_s: float) -> None:
        """Report traffic and progress; called once a second."""
        now_s = time.monotonic()
        if now_s >= self._traffic_at_s:
            self._traffic_at_s = now_s + TRAFFIC_EVERY_S
            self._append_traffic()
        if now_s >= self._progress_at_s:
            self._progress_at_s = now_s + EVERY_S
            self.progress.write()

    def _append_traffic(self) -> None:
        self._metrics.set_bytes(self._wire_bytes.totals())
        for learner, kinds in sorted(self._wire_bytes.by_learner().items()):
            sent, received = ({kind: it[to] for kind, it in kinds.items() if to in it} for to in ("sent", "received"))
            self._events.append(events.Traffic(learner=learner, sent_bytes=sent, received_bytes=received))


def _check_store(method: Method, options: Options) -> None:
    """Raise ConfigError for a standby without a bucket, or copies to the store itself; warn of a method that a bucket
    slows down."""
    if options.copies is not None and is_same(options.copies.place, options.place):
        raise ConfigError(f"copy_to = {options.copies.place} is the store of the run itself; name another place.")
    if not is_url(options.place):
        if options.standby:
            raise ConfigError(
                f"a standby needs a store that both syncers reach, and {options.place} is a directory of this machine; "
                'set store in [syncer] to the URL of a bucket, such as "s3://bucket/run".'
            )
        return
    steps = min(each[1] for each in method.sync_every) if isinstance(method.sync_every, tuple) else method.sync_every
    if method.wait and steps < FEW_STEPS:
        log.warning(
            "learners wait for an answer every %d steps, and a bucket publishes at most once a second, so no learner "
            "takes more than %d steps a second; keep the run in a directory, or raise sync_every", steps, steps,
        )  # fmt: skip


def _bind(server: grpc.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Bind the address; returns the port, or 0 for a unix socket, which only this user may use."""
    path = socket_path(address)
    before = os.umask(0o177) if path else None
    try:
        port = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        choice = "choose another address with --address"
        raise port_refusal(address, why_unbound(address), what="a syncer", choice=choice) from error
    finally:
        if before is not None:
            os.umask(before)
    return 0 if path else port
