"""A syncer: the driver behind a port, with its state directory, metrics, live page and backups."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from diloco import events
from diloco.core.method import Method
from diloco.errors import ConfigError, UnreachableError
from diloco.event_log import EventLog
from diloco.exchange.wire.address import socket_path, split_address
from diloco.exchange.wire.rpc import SERVER_OPTIONS
from diloco.protocol.contribution import Budget
from diloco.protocol.members import Deadlines
from diloco.protocol.session.heartbeat import HEARTBEAT_S
from diloco.protocol.steering import Pool
from diloco.run.journal.payloads import TensorPayloads
from diloco.run.journal.recorder import Recorder
from diloco.store.backup import BackupPlan, Backups
from diloco.store.journal_files import JournalFiles, PayloadFiles
from diloco.store.store import Store
from diloco.syncer.door.audit import Audit
from diloco.syncer.door.open_calls import CallDeadlines, CallGuard, OpenCalls, OpenTransfers
from diloco.syncer.door.receiving import IncomingModel
from diloco.syncer.door.service import Service
from diloco.syncer.hosting import HostedDriver
from diloco.syncer.journal import Journal
from diloco.syncer.keys.auth import Authenticator, check_binding
from diloco.syncer.keys.certificates import Caller
from diloco.syncer.keys.tls import server_credentials
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.page.live_page import LivePage
from diloco.syncer.ports import connections_for, port_refusal, raise_file_limit, why_unbound
from diloco.syncer.progress import EVERY_S, ProgressLog
from diloco.syncer.spool import Slot, Spool
from diloco.syncer.wire_bytes import WireBytes

log = logging.getLogger("diloco.syncer")

EVENTS = "events.jsonl"
"""The event log in the state directory."""

TRAFFIC_EVERY_S = 2.0


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
        pool: limits the number of learners that train; None: no limit.
        journal: keep a journal, from which `diloco replay` repeats all decisions.
        record_contributions: keep the payloads too, from which it repeats all merges.
        backup: the plan of snapshots; None: none are taken.
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
    deadlines: Deadlines = field(default_factory=Deadlines)
    pool: Pool | None = None
    journal: bool = True
    record_contributions: bool = False
    backup: BackupPlan | None = None


class Syncer:
    """A running syncer; a context manager that stops it.

    Attributes:
        driver: the run's.

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
        self.run = run
        self._options = options
        self._started_at = time.time()
        self._metrics = SyncerMetrics(run)
        self._metrics.standing_changed("serving")
        self._journal = JournalFiles(options.state_dir) if options.journal else None
        self._failure: BaseException | None = None
        with ExitStack() as refused:  # a failed start releases the directory
            self._store = refused.enter_context(Store(options.state_dir))
            self._events = refused.enter_context(EventLog(options.state_dir / EVENTS, who="syncer"))
            backup = options.backup
            self._backups = None if backup is None else Backups(backup, options.state_dir, self._events)
            self._observer = Journal(self._events, self._metrics)
            self.driver = HostedDriver(
                run, method, self._store, Spool(options.state_dir, options.spool_bytes), deadlines=options.deadlines,
                journal=self._observer, pool=options.pool, budget=options.budget, recorder=self._recorder(options),
            )  # fmt: skip
            refused.pop_all()
        num_connections = connections_for(raise_file_limit())
        self._server = grpc.server(
            ThreadPoolExecutor(1),  # unused: `Admission` gives each call its threads
            options=[*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", num_connections)],
        )
        self.port = _bind(self._server, options.address, credentials)
        path = socket_path(options.address)
        self.address = options.address if path else f"{split_address(options.address)[0]}:{self.port}"
        self._wire_bytes = WireBytes()
        self.page: LivePage | None = None
        self._audit = audit = Audit(self._events, self._metrics)
        self._calls = OpenCalls(auth, audit)
        self.progress = ProgressLog(self._events, self._metrics, self._run_status, options.budget.tokens)
        self._deadlines = CallDeadlines(options.deadlines.lost_floor_s)
        self.transfers = OpenTransfers(lambda: self.driver, self._deadlines)
        self._incoming = IncomingModel()
        guard = CallGuard(run, auth, self._calls, self._deadlines, audit, self._wire_bytes)
        service = Service(
            run, method, lambda: self.driver, guard=guard, transfers=self.transfers, incoming=self._incoming,
            audit=audit, lost_floor_s=options.deadlines.lost_floor_s, resumed=self._observer.resumed,
            status_extra=self._status_extra, reported=self.progress.record,
            page_url=self._page_url, promote=_serves_already,
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
        self._stopping = threading.Event()
        self._traffic = threading.Thread(target=self._report_traffic, name="syncer-traffic", daemon=True)
        for check in (self._calls, self._deadlines, self.transfers):
            check.start(self._failed)
        self._server.start()
        self._traffic.start()
        if self._backups is not None:
            self._backups.start()
        versions = self.versions()
        self._events.append(
            events.SyncerStarted(
                run=run, address=self.address, versions=versions, method=method.to_dict(),
                learners=options.num_learners, budget_tokens=options.budget.tokens,
            )
        )  # fmt: skip

    def _page_url(self, caller: Caller) -> str:
        if self.page is None:
            raise ConfigError("this syncer serves no page; start it with --page.")
        return self.page.url_for(caller)

    def versions(self) -> tuple[int, ...]:
        """The published version of each fragment."""
        return self.driver.ask(lambda driver: driver.state.versions)

    def _failed(self, error: BaseException) -> None:
        """Keep the first error of a thread, which `wait` raises."""
        self._failure = self._failure or error

    def _recorder(self, options: Options) -> Recorder[Slot] | None:
        if self._journal is None:
            return None
        keep = PayloadFiles(options.state_dir) if options.record_contributions else None
        return Recorder(self._journal, TensorPayloads(keep))

    def wait(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. Raises the error of the driver or of a thread, if one fails."""
        while not stop.wait(0.5):
            if self._failure is not None:
                raise self._failure
            self.driver.raise_failure()

    def close(self) -> None:
        """Finish merges in progress, notify the learners, and stop."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.progress.write()
        self.driver.stop()
        self._server.stop(grace=1.0).wait()
        self._deadlines.close()
        self.transfers.close()
        self._calls.close()
        self._audit.close()
        self._traffic.join()
        if self._backups is not None:
            self._backups.close()
        self._append_traffic()
        self._observer.merges.say(is_last=True)
        if self.driver.failure is None:
            step, tokens = self.driver.ask(lambda driver: (driver.state.step, driver.state.run_tokens))
            versions = self.versions()
            saved = f"versions {list(versions)}, step {step:,}, {tokens:,} tokens" if versions else "no model yet"
            log.info("stopped; saved in %s: %s", self._options.state_dir, saved)
            seconds = time.time() - self._started_at
            self._events.append(events.Finished(steps=step, tokens=tokens, seconds=seconds, reason="stopped"))
        if self.page is not None:
            self.page.close()
        self._metrics.close()
        if self._journal is not None:
            self._journal.close()
        self._events.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_status(self) -> dict[str, Any] | None:
        """`Driver.status`; None: the driver has failed."""
        try:
            return self.driver.ask(lambda driver: driver.status())
        except UnreachableError:
            return None

    def _status_extra(self) -> dict[str, Any]:
        """The syncer's part of its status: time, events that could not be written, bytes by learner and kind."""
        now = time.time()
        num_bytes: dict[str, dict[str, dict[str, int]]] = {}
        for (learner, kind, direction), count in self._wire_bytes.totals().items():
            num_bytes.setdefault(learner, {}).setdefault(kind, {})[direction] = count
        return {
            "time_s": now, "uptime_s": now - self._started_at, "missing_events": self._events.num_missing,
            "budget_tokens": self._options.budget.tokens, "num_bytes": num_bytes,
        }  # fmt: skip

    def _report_traffic(self) -> None:
        due_at = time.monotonic()
        while not self._stopping.wait(TRAFFIC_EVERY_S):
            self._append_traffic()
            self._incoming.drop_expired()
            if time.monotonic() >= due_at:
                due_at = time.monotonic() + EVERY_S
                self.progress.write()

    def _append_traffic(self) -> None:
        totals = self._wire_bytes.totals()
        self._metrics.set_bytes(totals)
        by_learner: dict[str, dict[str, dict[str, int]]] = {}
        for (learner, kind, direction), count in totals.items():
            by_learner.setdefault(learner, {"sent": {}, "received": {}})[direction][kind] = count
        for learner, counts in sorted(by_learner.items()):
            self._events.append(
                events.Traffic(learner=learner, sent_bytes=counts["sent"], received_bytes=counts["received"])
            )


def _serves_already() -> tuple[int, tuple[int, ...]]:
    raise ConfigError("this syncer already serves the run; promote the one that is to take over from it.")


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
