"""The driver of a run in one process: jobs and writes take no time, and nothing is kept."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from diloco.core.held import HeldFragment
from diloco.core.members import Deadlines
from diloco.core.method import Method
from diloco.exchange.virtual.client import SimulatedDriver
from diloco.exchange.virtual.delivery import Alarm, Delivery
from diloco.run.driver import Driver
from diloco.run.ports import Done, InitialModel, Json, MergedRound, Observer, Ports, RunMethod, SavedRun
from diloco.run.simulated import Later, MemorySlot, MemorySpool, SimulatedWorker
from diloco.run.tensors import TensorJobs


class VolatileDisk:
    """Keeps nothing: a run in one process is over with it."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def initialise(self, run: str, method: RunMethod, model: InitialModel[HeldFragment], done: Done) -> None:
        """As `ports.DiskPort`."""
        self._later("written", None, lambda: done(None))

    def persist_version(self, merged: MergedRound[HeldFragment, Tensor], record: Json, done: Done) -> None:
        """As `ports.DiskPort`."""
        self._later("written", merged.update.fragment, lambda: done(None))

    def persist_record(self, record: Json, done: Done) -> None:
        """As `ports.DiskPort`."""
        self._later("written", None, lambda: done(None))


class VirtualSyncer:
    """One run's syncer.

    Attributes:
        driver: serves the run.
        jobs: its tensor jobs.
    """

    def __init__(
        self, run: str, method: Method, delivery: Delivery, *, observer: Observer, deadlines: Deadlines
    ) -> None:
        self.run, self.method = run, method
        self.jobs = TensorJobs(method, seconds=None)
        self._delivery, self._observer, self._deadlines = delivery, observer, deadlines
        self._boot = 0
        self._alarm = Alarm(delivery, lambda: None)
        self.driver = self._start(None)

    def restart(self, saved: SavedRun[HeldFragment]) -> None:
        """Another driver serves the run from here on, as it was saved; learners connect to it."""
        before = self.driver
        self._alarm.stop()
        self.driver = self._start(saved)
        before.end()

    def _start(self, saved: SavedRun[HeldFragment] | None) -> SimulatedDriver:
        self._boot += 1
        boot = self._boot

        def later(what: str, fragment: int | None, do: Callable[[], None]) -> None:
            self._delivery.at(self._delivery.now_s(), lambda: do() if boot == self._boot else None)

        self._alarm = Alarm(self._delivery, lambda: self.driver.tick())  # noqa: PLW0108 - the driver of then
        worker = SimulatedWorker[HeldFragment, MemorySlot, Tensor](self.jobs, later)
        ports = Ports(self._alarm, MemorySpool(), worker, VolatileDisk(later), self._observer)
        return Driver(self.run, self.method, ports, boot=boot, deadlines=self._deadlines, saved=saved)
