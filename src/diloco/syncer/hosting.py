"""The driver in a syncer's process: its lock, the clock and threads behind its ports, and calls that wait for
answers."""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import grpc
from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.core.method import Method
from diloco.errors import DilocoError, UnreachableError
from diloco.protocol.contribution import Budget
from diloco.protocol.members import Deadlines
from diloco.protocol.steering import Pool
from diloco.run.driver import Driver
from diloco.run.journal.recorder import Recorder
from diloco.run.ports import Ports, Work
from diloco.run.tensor_jobs import TensorJobs
from diloco.store.store import Store, checked_values
from diloco.syncer.journal import Journal
from diloco.syncer.spool import Slot, Spool

log = logging.getLogger("diloco.syncer")

IDLE_S = 1.0
"""The time between two ticks unless an earlier one is requested."""

SHORTEST_S = 0.01
"""The shortest time between two ticks."""


class Ticker:
    """The driver's clock: calls `tick(late_s)` at the last time given to `wake_at`, and at least once a second.

    Arguments:
        tick: gets the delay of the call; it is long if the whole process was suspended.
        clock: monotonic seconds.
    """

    def __init__(self, tick: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tick, self._clock = tick, clock
        self._wake_at = math.inf
        self._planned = math.inf
        self._changed = threading.Condition()
        self._began_at = math.inf
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="syncer-tick", daemon=True)
        self.failure: BaseException | None = None
        """The error that ended the ticks."""

    def start(self) -> None:
        """Start; the first tick comes within a second."""
        self._began_at = self._clock()
        self._thread.start()

    def now_s(self) -> float:
        """As `ports.ClockPort`."""
        return self._clock()

    def wake_at(self, at_s: float) -> None:
        """Tick at this time of the clock at the latest; replaces the earlier request."""
        with self._changed:
            self._wake_at = at_s
            if at_s < self._planned:
                self._changed.notify_all()

    def stop(self) -> None:
        """No tick begins after this returns."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        began_at = self._began_at
        while True:
            ended_at = self._clock()
            with self._changed:
                while not self._stopping and (left_s := self._plan(began_at, ended_at) - self._clock()) > 0:
                    self._changed.wait(left_s)
                if self._stopping:
                    return
                late_s = self._clock() - self._planned
                self._wake_at = math.inf
            began_at = self._clock()
            try:
                self._tick(late_s)
            except BaseException as error:
                log.critical("the tick thread failed", exc_info=error)
                self.failure = error
                return

    def _plan(self, began_at: float, ended_at: float) -> float:
        """Plan the tick after one from `began_at` to `ended_at`. A long tick delays the next."""
        self._planned = min(began_at + IDLE_S, max(ended_at + SHORTEST_S, self._wake_at))
        return self._planned


T = TypeVar("T")

SyncerDriver = Driver[GlobalFragment, Slot, Tensor]

NUM_CHECKERS = 4
"""Most threads that check payloads; each reads a contribution once."""


class JobThreads:
    """Executes jobs on threads; each result becomes an event of the driver.

    Arguments:
        event: executes an event of the driver, one at a time.
        failed: called with an unexpected error of a job.

    Attributes:
        is_stopping: no job is started any more.
    """

    def __init__(self, event: Callable[[Callable[[], None]], None], failed: Callable[[BaseException], None]) -> None:
        num_threads: dict[Work, int] = {"check": min(NUM_CHECKERS, os.cpu_count() or 1), "close": 1, "write": 1}
        self._pools = {
            what: ThreadPoolExecutor(number, thread_name_prefix=f"syncer-{what}")
            for what, number in num_threads.items()
        }
        self._event = event
        self._failed = failed
        self.is_stopping = False

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """As `ports.WorkerPort`."""

        def run() -> None:
            try:
                found = job()
                self._event(lambda: done(found))
            except BaseException as error:
                log.critical("a job of the syncer failed", exc_info=error)
                self._failed(error)

        if not self.is_stopping:
            self._pools[what].submit(run)

    def stop(self) -> None:
        """Finish the started jobs."""
        for pool in self._pools.values():
            pool.shutdown(wait=True)


KEEPALIVE_S = 0.5
"""Between two keepalives to the sender of a complete upload that waits for its answer."""


def while_waiting(answer: Future[Any]) -> Iterator[None]:
    """Yield at once, and every `KEEPALIVE_S` until there is an answer."""
    yield
    while not wait([answer], KEEPALIVE_S).done:
        yield


class HostedDriver:
    """The driver of one run, in this process. Any thread may call any method.

    Arguments:
        run: the run's id.
        method: the run's method; a stored run must have the same.
        store: makes the run durable.
        spool: holds contributions.
        deadlines: of silent learners.
        journal: observes the run.
        recorder: journals the driver's events; None: they are not kept.

    Attributes:
        jobs: the run's tensor jobs.

    Raises:
        UnknownRunError, AlreadyInitialisedError: the store holds another run, or one with another method. StoreError:
            the store is damaged.
    """

    def __init__(
        self,
        run: str,
        method: Method,
        store: Store,
        spool: Spool,
        *,
        deadlines: Deadlines,
        journal: Journal,
        pool: Pool | None = None,
        budget: Budget | None = None,
        recorder: Recorder[Slot] | None = None,
    ) -> None:
        self.method = method
        self._changed = threading.Condition(threading.RLock())
        self._asking: set[Future[Any]] = set()
        self._is_stopped = False
        self._failure: BaseException | None = None
        self.jobs = TensorJobs(method, in_place=True)
        self._threads = JobThreads(self._event, self._failed)
        self._ticker = Ticker(lambda late_s: self._event(lambda: self._driver.tick(late_s)))
        ports = Ports(self._ticker, spool, self.jobs, store, self._threads, journal)
        if recorder is not None:
            ports = recorder.around(ports)
        saved = store.load()
        with checked_values(store.path):
            self._driver = SyncerDriver(
                run, method, ports, boot=secrets.randbits(63) + 1, deadlines=deadlines,
                saved=None if saved is None else saved.begun(), pool=pool, budget=budget,
            )  # fmt: skip
        if recorder is not None:
            recorder.sync()
        if saved is not None:  # only now: a start that fails begins no epoch
            store.begin(saved)
        journal.set_aside(store.tidy(saved))
        self._ticker.start()

    # --- events -------------------------------------------------------------------------------------------------------

    def ask(self, event: Callable[[SyncerDriver], T]) -> T:
        """Execute one event of the driver; returns its result.

        Raises:
            DilocoError: the driver refuses. UnreachableError: the driver has failed, in this event or before. After an
                unexpected error an event may be half executed, so that no other may follow.
        """
        with self._changed:
            if self.failure is not None:
                raise _stopped()
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
        self, event: Callable[[SyncerDriver, Callable[[T], None]], None], context: grpc.ServicerContext | None = None,
    ) -> T:  # fmt: skip
        """Execute an event that is answered later, by a call of its second argument; waits for the answer.

        Raises:
            UnreachableError: the driver stops, or the call ends, before the answer. A disk may refuse for long; a
                caller that has given up must not hold a thread.
        """
        with self.asking(event) as future:
            if context is not None and not context.add_callback(partial(_fail, future)):
                _fail(future)
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

    # --- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until no work is in progress, except writes that the disk refuses."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or not self._driver.is_busy)

    def stop(self) -> None:
        """Finish merges and writes in progress, without waiting for a disk that refuses; then end connections and
        threads."""
        with self._changed:
            self._driver.stop()
        self.drain()
        self._ticker.stop()
        with self._changed:
            self._is_stopped = True
            self._threads.is_stopping = True
            self._driver.end()
            for future in self._asking:
                if not future.done():  # a future whose caller has not read the answer yet is done
                    future.set_exception(_stopped())
            self._asking.clear()
        self._threads.stop()

    def raise_failure(self) -> None:
        """Raise the error that ended the driver, if there is one."""
        if self.failure is not None:
            raise self.failure

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the driver, after which no round is merged and no learner evicted; None: it runs."""
        return self._failure or self._ticker.failure

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


def _stopped() -> UnreachableError:
    return UnreachableError("the syncer stops; repeat the call, which the run's next syncer answers.")


def _answer(future: Future[T], value: T) -> None:
    with suppress(InvalidStateError):  # the caller has given up
        future.set_result(value)


def _fail(future: Future[Any]) -> None:
    with suppress(InvalidStateError):  # the call was answered
        future.set_exception(UnreachableError("the call ended before its answer."))
