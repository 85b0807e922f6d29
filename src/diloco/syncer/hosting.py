"""The run in a syncer's process: its store, and its driver while the run is this syncer's. One lock for the events of
both, the clocks and threads behind their ports, and calls that wait for answers."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
from torch import Tensor

from diloco.compute.threads import ThreadMap, num_cores
from diloco.core.global_fragment import GlobalFragment
from diloco.core.method import Method
from diloco.errors import ConfigError, DilocoError, StandbyError, StoreError, UnreachableError
from diloco.escaping import MALFORMED
from diloco.protocol.contribution import Budget
from diloco.protocol.manifest import Manifest
from diloco.protocol.members import Deadlines
from diloco.protocol.publishing import RETRY_S, Publisher, Standing
from diloco.protocol.steering import Pool
from diloco.run.driver import Driver
from diloco.run.journal.recorder import Recorder
from diloco.run.objects import Objects
from diloco.run.ports import Ports, SavedRun
from diloco.run.published import PublishedStore
from diloco.run.run_state import RunState
from diloco.run.tensor_jobs import TensorJobs
from diloco.store.format import TensorFormat
from diloco.store.reading import NOT_WHOLE
from diloco.syncer.journal import Journal
from diloco.syncer.spool import Slot, Spool
from diloco.syncer.threads import JobThreads, Ticker

log = logging.getLogger("diloco.syncer")

PROMOTED_S = 20.0
"""A promotion is answered within this time, also where the store does not answer."""

T = TypeVar("T")

SyncerDriver = Driver[GlobalFragment, Slot, Tensor]

Saved = SavedRun[GlobalFragment]

KEEPALIVE_S = 0.5
"""Between two keepalives to the sender of a complete upload that waits for its answer."""


def while_waiting(answer: Future[Any]) -> Iterator[None]:
    """Yield at once, and every `KEEPALIVE_S` until there is an answer."""
    yield
    while not wait([answer], KEEPALIVE_S).done:
        yield


def since_boot_s() -> float:
    """Seconds, including those of a suspension of the machine: the clock of leases."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Sharing:
    """How a run in a bucket is shared with other syncers.

    Attributes:
        address: of this syncer, for people.
        former: the boot of this syncer's last process, which has ended; None: not known.
        lease_s: a standby claims the run when the manifest has not moved for this long.
        is_standby: wait while another syncer serves the run; otherwise that is an error.
        holds: a standby keeps the newest model in memory.
    """

    address: str = ""
    former: int | None = None
    lease_s: float = 10.0
    is_standby: bool = False
    holds: bool = False


class HostedDriver:
    """One run in this process, from `start` until it is stopped, refused or fenced. Any thread may call any method.

    Arguments:
        run: the run's id.
        method: the run's method; a stored run must have the same.
        objects: the place of the run's objects.
        spool: holds contributions.
        deadlines: of silent learners.
        journal: observes the run.
        sharing: with other syncers; None: no other process can have the place.
        keep_s: how long objects stay that were superseded.
        stands: called with each standing, its epoch and the reason.
        claimed: called with the manifest that this process has claimed, before the run is loaded from it.
        recorder: journals the driver's events; None: they are not kept.
        num_threads: that close a round; None: one for each core.

    Attributes:
        jobs: the run's tensor jobs.
        store: the run's.
        refusal: the error that ended the start, or a later load; None: there is none.
    """

    def __init__(
        self, run: str, method: Method, objects: Objects, spool: Spool, *, deadlines: Deadlines, journal: Journal,
        sharing: Sharing | None = None, keep_s: float = 600.0,
        stands: Callable[[Standing, int, str], None] = lambda *_: None,
        claimed: Callable[[Manifest], None] = lambda _: None, pool: Pool | None = None, budget: Budget | None = None,
        recorder: Recorder[Slot] | None = None, num_threads: int | None = None,
    ) -> None:  # fmt: skip
        self.run, self.method = run, method
        self._objects, self._spool = objects, spool
        self._is_shared, self._sharing = sharing is not None, sharing or Sharing(lease_s=math.inf)
        mine = self._sharing
        self._boot, self._format = secrets.randbits(63) + 1, TensorFormat()
        self._publisher = Publisher(
            run, boot=self._boot, former=mine.former, address=mine.address, is_standby=mine.is_standby,
            lease_s=mine.lease_s, keep_s=keep_s,
            shortest_swap_s=objects.shortest_swap_s,
        )  # fmt: skip
        self._deadlines, self._pool, self._budget = deadlines, pool, budget or Budget()
        self._journal, self._stands, self._claimed, self._recorder = journal, stands, claimed, recorder
        self._changed = threading.Condition(threading.RLock())
        self._asking: set[Future[Any]] = set()
        self._is_stopped = False
        self._failure: BaseException | None = None
        self.refusal: DilocoError | None = None
        self._is_loading = False
        self._driver: SyncerDriver | None = None
        self._runs = ThreadMap(num_threads or num_cores())
        self.jobs = TensorJobs(method, in_place=True, each=self._runs)
        self._threads = JobThreads(self._event, self._failed)
        self._ticker = Ticker(lambda late_s: self._event(lambda: self._tick(late_s)))
        self._leases = Ticker(lambda _: self._event(self.store.tick), since_boot_s)
        before_commit = (lambda: None) if recorder is None else recorder.sync
        self.store: PublishedStore[GlobalFragment, Tensor] = PublishedStore(
            objects, self._format, self._publisher, self._threads, self._leases, self, before_commit
        )

    # --- the start ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Claim the run, as soon as no other process has it.

        Raises:
            UnknownRunError, AlreadyInitialisedError: the store holds another run, or one with another method.
            StoreError: it is damaged, or refuses. Nothing was changed.
        """
        if not self._sharing.is_standby:
            self._preload()
        with self._changed:
            self._leases.start()
            self.store.start()
            if self._is_shared:
                return
            self._changed.wait_for(lambda: self._driver is not None or self.refusal or self.failure)
            if self.refusal is not None:
                raise self.refusal
        self.raise_failure()

    def _preload(self) -> None:
        """Load the run before it is claimed, so that a start that fails changes nothing."""
        if (found := self._objects.manifest()) is None:
            return
        manifest = Manifest.from_bytes(found.data, self._objects.name)
        if manifest.run == self.run and manifest.run_id:
            saved = self._format.read(self._objects, manifest)
            with self._checked():
                state = RunState[GlobalFragment, Tensor](
                    self.run, self.method, self._deadlines, self._pool, self._budget
                )
                state.restore(saved, 0.0)

    def promote(self) -> tuple[int, tuple[int, ...]]:
        """Claim the run at once, by an operator's decision; returns the epoch and the newest versions.

        Raises:
            ConfigError: this process serves the run. UnreachableError: the store does not answer.
        """
        with self._changed:
            if self._publisher.standing != "waiting":
                raise ConfigError(
                    f"this syncer is {self._publisher.standing}, so it cannot be promoted; promote one that waits as a "
                    "standby."
                )
            self.store.promote()
            ends = lambda: self._driver is not None or self.refusal or self.failure or self._is_stopped  # noqa: E731
            self._changed.wait_for(ends, PROMOTED_S)
            if self._driver is None:
                raise self.refusal or UnreachableError(
                    f"{self._objects.name} has not answered for {PROMOTED_S:g} s; this syncer takes over once it does."
                )
            return self._driver.lineage.epoch, self._driver.state.versions

    # --- the store's host: called within its events -------------------------------------------------------------------

    def stands(self, standing: Standing, why: str) -> None:
        """As `StoreHost`."""
        self._stands(standing, self.manifest.epoch, why)

    def serve(self, manifest: Manifest) -> None:
        """As `StoreHost`."""
        self._threads.submit("close", None, partial(self._load, manifest, True), partial(self._begin, manifest))

    def saw(self, manifest: Manifest | None) -> None:
        """As `StoreHost`."""
        if not self._sharing.holds or self._is_loading or manifest is None or not manifest.run_id:
            return
        if self._publisher.standing == "waiting" and not self._format.holds(manifest):
            self._is_loading = True
            self._threads.submit("check", None, partial(self._load, manifest, False), self._looked)

    def refused(self, error: DilocoError) -> None:
        """As `StoreHost`."""
        self.refusal = self.refusal or error

    def waits(self, what: str, error: StoreError) -> None:
        """As `StoreHost`."""
        self._journal.waits_for_store(what, error)
        if self._driver is None and not self._is_shared:
            self.refused(error)

    def _load(self, manifest: Manifest, is_claimed: bool) -> Saved | DilocoError | None:
        """Load the run, one that was claimed as soon as its place answers; None: it has no model."""
        if is_claimed:
            self._claimed(manifest)
        if not manifest.run_id:
            return None
        while True:
            try:
                return self._format.read(self._objects, manifest)
            except DilocoError as error:
                # another process may have claimed the run of a suspended one, and have deleted objects
                is_final = not isinstance(error, StoreError) or (isinstance(error, NOT_WHOLE) and not self.is_suspended)
                if is_final or not is_claimed or not self._publisher.is_serving or self._is_stopped:
                    return error
                log.warning("the run cannot be loaded yet: %s", error)
                time.sleep(RETRY_S)

    def _looked(self, _: Saved | DilocoError | None) -> None:
        self._is_loading = False
        if self._publisher.standing != "waiting":  # this process serves the run, or is about to load it
            self._format.forget()

    def _begin(self, manifest: Manifest, saved: Saved | DilocoError | None) -> None:
        """The run was loaded: serve it."""
        self._format.forget()
        if not self._publisher.is_serving:  # fenced, or about to stop
            return
        if isinstance(saved, DilocoError):
            self.refused(saved)
            return
        ports = Ports(self._ticker, self._spool, self.jobs, self.store, self._threads, self._journal)
        if self._recorder is not None:
            ports = self._recorder.around(ports)
        begun = None if saved is None else saved.begun(manifest.epoch)
        try:
            with self._checked():
                self._driver = SyncerDriver(
                    self.run, self.method, ports, boot=self._boot, deadlines=self._deadlines, saved=begun,
                    pool=self._pool, budget=self._budget, epoch=manifest.epoch,
                    commit_every_s=self._objects.shortest_swap_s,
                )  # fmt: skip
        except DilocoError as error:
            self.refused(error)
            return
        self.store.begun(manifest.run_id, () if begun is None else begun.epochs)
        self._ticker.start()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise StoreError for a record with invalid values: its digest covers only its bytes."""
        try:
            yield
        except DilocoError:
            raise
        except MALFORMED as error:
            place = self._objects.name
            raise StoreError(
                f"the record in {place} is damaged ({error!r}); nothing was changed, and `diloco syncer check {place}` "
                "says what can still be served."
            ) from error

    # --- events -------------------------------------------------------------------------------------------------------

    def require(self, *, reaches_store: bool = False) -> None:
        """Check that this process serves the run, or is suspended. `reaches_store`: and not suspended.

        Raises:
            StandbyError: it does not now.
        """
        with self._changed:
            may_serve = self._driver is not None and not (self.is_suspended and reaches_store)
            standing, manifest = self._publisher.standing, self._publisher.manifest
            if may_serve and self._publisher.is_serving:
                return
            at = f" at {manifest.address}" if manifest is not None and manifest.address else ""
        said = {
            "waiting": f"a standby of the syncer{at}, which serves run {self.run!r}; call that one",
            "suspended": "without its store now, so that it can make nothing durable; repeat the call, which it or the "
            "run's next syncer answers",
            "fenced": f"fenced: the syncer{at} serves run {self.run!r}; call that one",
            "released": "about to stop; repeat the call, which the run's next syncer answers",
        }
        raise StandbyError(f"this syncer is {said.get(standing, f'about to serve run {self.run!r}; repeat the call')}.")

    @property
    def is_suspended(self) -> bool:
        """Whether this process does not know whether another one serves the run."""
        with self._changed:
            # After a suspension, a call may come before the clock's thread.
            if not self._is_stopped and self.failure is None and since_boot_s() >= self._publisher.wake_at:
                self.store.tick()
            return self._publisher.standing == "suspended"

    @property
    def standing(self) -> Standing:
        """As in `Publisher`."""
        return self._publisher.standing

    @property
    def manifest(self) -> Manifest:
        """The newest manifest that is known: of a run that this process serves, the newest that is confirmed."""
        return self._publisher.manifest or Manifest(self.run)

    def store_status(self) -> dict[str, Any]:
        """Plain values for `diloco status`."""
        with self._changed:
            manifest = self.manifest
            return {
                "standing": self._publisher.standing, "is_shared": self._is_shared, "epoch": manifest.epoch,
                "serial": manifest.serial, "address": manifest.address, "versions": list(manifest.versions),
                "is_refusing": self.store.is_refusing, "holds": self._format.holds(manifest),
            }  # fmt: skip

    def until_ended(self) -> None:
        """Wait until it will not serve the run any more, or has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.refusal is not None or self.failure is not None or self._is_stopped
                or self.standing in ("fenced", "released")
            )  # fmt: skip

    def ask(self, event: Callable[[SyncerDriver], T]) -> T:
        """Execute one event of the driver; returns its result.

        Raises:
            DilocoError: the driver refuses. StandbyError: there is no driver. UnreachableError: the driver has failed,
                in this event or before. After an unexpected error an event may be half executed, so that no other may
                follow.
        """
        with self._changed:
            if self.failure is not None:
                raise _stopped()
            if self._driver is None:
                self.require()
            assert self._driver is not None
            try:
                answer = event(self._driver)
            except DilocoError:
                raise
            except BaseException as error:
                log.critical("an event of the syncer failed", exc_info=error)
                self._failed(error)
                raise _stopped() from error
            self._changed.notify_all()
            return answer

    def wait_for(
        self, event: Callable[[SyncerDriver, Callable[[Any], None]], None], context: grpc.ServicerContext | None = None,
    ) -> Any:  # fmt: skip
        """Execute an event that is answered later, by a call of its second argument; waits for the answer.

        Raises:
            UnreachableError: the driver stops, or the call ends, before the answer. A store may refuse for long; a
                caller that has given up must not hold a thread.
        """
        with self.asking(event) as future:
            ended = partial(_fail, future, UnreachableError("the call ended before its answer."))
            if context is not None and not context.add_callback(ended):
                ended()
            return future.result()

    def until_done(
        self, event: Callable[[SyncerDriver, Callable[[DilocoError | None], None]], None]
    ) -> Iterator[None]:  # fmt: skip
        """Yield every `KEEPALIVE_S` until an event is answered. Raises the answer if it is a refusal."""
        with self.asking(event) as answer:
            yield from while_waiting(answer)
            refusal = answer.result()
        if refusal is not None:
            raise refusal

    @contextmanager
    def asking(self, event: Callable[[SyncerDriver, Callable[[T], None]], None]) -> Iterator[Future[T]]:
        """As `wait_for`; gives a future of the answer."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_stopped:
                raise _stopped()
            self._asking.add(future)
            try:
                self.ask(lambda driver: event(driver, partial(_answer, future)))
            except BaseException:
                self._asking.remove(future)
                raise
        try:
            yield future
        finally:
            with self._changed:
                self._asking.discard(future)

    def _event(self, event: Callable[[], None]) -> None:
        with self._changed:
            if not self._is_stopped and self.failure is None:
                event()
            self._changed.notify_all()

    def _tick(self, late_s: float) -> None:
        assert self._driver is not None
        self._driver.tick(late_s)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until no work is in progress, except what the store refuses."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or self._driver is None or not self._publisher.is_serving
                or not self._driver.is_busy
            )  # fmt: skip

    def stop(self) -> None:
        """Finish merges and commits in progress, without waiting for a store that refuses, and release the run; then
        end connections and threads. Does nothing after the first time."""
        with self._changed:
            if self._is_stopped:
                return
            if self._driver is not None:
                self._driver.stop()
        self.drain()
        with self._changed:
            if self.failure is None:
                self.store.release()
            self._changed.wait_for(
                lambda: self.failure is not None or self._publisher.standing in ("fenced", "released")
                or self._publisher.is_retrying
            )  # fmt: skip
        for ticker in (self._ticker, self._leases):
            ticker.stop()
        with self._changed:
            self._is_stopped = True
            self._threads.is_stopping = True
            if self._driver is not None:
                self._driver.end()
            for future in self._asking:
                _fail(future, _stopped())
            self._asking.clear()
            self._changed.notify_all()
        self._threads.stop()
        self._runs.close()

    def raise_failure(self) -> None:
        """Raise the error that ended the driver, if there is one."""
        if self.failure is not None:
            raise self.failure

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the driver, after which no round is merged and no learner evicted; None: it runs."""
        return self._failure or self._ticker.failure or self._leases.failure

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


def _stopped() -> UnreachableError:
    return UnreachableError("the syncer stops; repeat the call, which the run's next syncer answers.")


def _answer(future: Future[T], value: T) -> None:
    with suppress(InvalidStateError):  # the caller has given up
        future.set_result(value)


def _fail(future: Future[Any], error: UnreachableError) -> None:
    with suppress(InvalidStateError):  # the call was answered, and its caller may not have read that yet
        future.set_exception(error)
