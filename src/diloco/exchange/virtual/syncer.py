"""The driver of a run in one process: jobs and writes take no time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from diloco.core.held import HeldFragment
from diloco.core.method import Method
from diloco.exchange.virtual.delivery import Alarm, Delivery
from diloco.exchange.virtual.doors import SimulatedDriver
from diloco.protocol.members import Deadlines
from diloco.protocol.pool import Pool
from diloco.run.driver import Driver
from diloco.run.memory import MemorySpool, MemoryStore
from diloco.run.ports import Observer, Ports, SavedRun, T, Work
from diloco.run.tensor_jobs import TensorJobs


class InstantWorker:
    """Does jobs in no time, each as an event of its own, while its driver serves the run."""

    def __init__(self, delivery: Delivery, is_serving: Callable[[], bool]) -> None:
        self._delivery, self._is_serving = delivery, is_serving

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """As `ports.WorkerPort`."""
        self._delivery.at(self._delivery.now_s(), lambda: done(job()) if self._is_serving() else None)


class VirtualSyncer:
    """One run's syncer.

    Attributes:
        driver: serves the run.
        jobs: its tensor jobs.
        store: what is durable of the run.
    """

    def __init__(
        self, run: str, method: Method, delivery: Delivery, *, observer: Observer, deadlines: Deadlines,
        pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self.run, self.method = run, method
        self.jobs = TensorJobs(method, seconds=None)
        self._delivery, self._observer, self._deadlines = delivery, observer, deadlines
        self._pool = pool
        self.store = MemoryStore[HeldFragment, Tensor]()
        self._boot = 0
        self._alarm = Alarm(delivery, lambda: None)
        self.driver = self._start(None)

    def restart(self, saved: SavedRun[HeldFragment]) -> None:
        """Another driver serves the run from here on, as it was saved; learners connect to it."""
        before = self.driver
        self._alarm.stop()
        self.store = MemoryStore(saved=saved)
        self.driver = self._start(self.store.begin(saved))
        before.end()

    def _start(self, saved: SavedRun[HeldFragment] | None) -> SimulatedDriver:
        self._boot += 1
        boot = self._boot
        self._alarm = Alarm(self._delivery, lambda: self.driver.tick())  # noqa: PLW0108 - of the driver as it is then
        worker = InstantWorker(self._delivery, lambda: boot == self._boot)
        ports = Ports(self._alarm, MemorySpool(), self.jobs, self.store, worker, self._observer)
        return Driver(
            self.run, self.method, ports, boot=boot, deadlines=self._deadlines, saved=saved,
            pool=self._pool,
        )  # fmt: skip
