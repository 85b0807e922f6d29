"""The driver of a run in one process: jobs and writes take no time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from diloco.core.held import HeldFragment
from diloco.core.members import Deadlines
from diloco.core.method import Method
from diloco.core.pool import Pool
from diloco.exchange.virtual.client import SimulatedDriver
from diloco.exchange.virtual.delivery import Alarm, Delivery
from diloco.run.driver import Driver
from diloco.run.ports import Observer, Ports, SavedRun
from diloco.run.simulated import MemorySlot, MemorySpool, MemoryStore, SimulatedDisk, SimulatedWorker
from diloco.run.tensor_jobs import TensorJobs


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
        self.driver = self._start()

    def restart(self, saved: SavedRun[HeldFragment]) -> None:
        """Another driver serves the run from here on, as it was saved; learners connect to it."""
        before = self.driver
        self._alarm.stop()
        self.store = MemoryStore(saved=saved)
        self.driver = self._start()
        before.end()

    def _start(self) -> SimulatedDriver:
        self._boot += 1
        boot = self._boot

        def later(what: str, fragment: int | None, do: Callable[[], None]) -> None:
            self._delivery.at(self._delivery.now_s(), lambda: do() if boot == self._boot else None)

        self._alarm = Alarm(self._delivery, lambda: self.driver.tick())  # noqa: PLW0108 - of the driver as it is then
        worker = SimulatedWorker[HeldFragment, MemorySlot, Tensor](self.jobs, later)
        ports = Ports(self._alarm, MemorySpool(), worker, SimulatedDisk(self.store, later), self._observer)
        return Driver(
            self.run, self.method, ports, boot=boot, deadlines=self._deadlines, saved=self.store.load(),
            pool=self._pool,
        )  # fmt: skip
