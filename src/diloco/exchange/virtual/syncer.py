"""A syncer in virtual time, whose jobs and writes take no time, and the interface that learners call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from diloco.core.global_fragment import AppliedUpdate, GlobalFragment, apply_update
from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.exchange.virtual.delivery import Alarm, Delivery
from diloco.protocol.contribution import Budget
from diloco.protocol.members import Deadlines
from diloco.protocol.steering import Pool
from diloco.run.driver import Driver
from diloco.run.global_model import FragmentAnswer
from diloco.run.memory import MemorySlot, MemorySpool, MemoryStore
from diloco.run.ports import Observer, Ports, SavedRun, T, Work
from diloco.run.tensor_jobs import TensorJobs

SimulatedDriver = Driver[GlobalFragment, MemorySlot, Tensor]


class SyncerProcess(Protocol):
    """A syncer's process, as learners reach it."""

    @property
    def serves(self) -> bool:
        """Whether it serves the run."""

    @property
    def is_suspended(self) -> bool:
        """Whether it serves the run, but does not reach its store: it only answers heartbeats."""

    @property
    def driver(self) -> SimulatedDriver:
        """The driver of the run. Raises StandbyError: this syncer does not serve the run."""


class InstantWorker:
    """Runs jobs in no time, each as an event of its own, as long as its driver serves the run."""

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
        store: the durable state of the run.
    """

    serves, is_suspended = True, False

    def __init__(
        self, run: str, method: Method, delivery: Delivery, *, observer: Observer, deadlines: Deadlines,
        pool: Pool | None = None, budget: Budget | None = None,
    ) -> None:  # fmt: skip
        self.run, self.method = run, method
        self.jobs = TensorJobs(method, seconds=None)
        self._delivery, self._observer, self._deadlines = delivery, observer, deadlines
        self._pool, self._budget = pool, budget
        self._boot = 0
        self.store = self._new_store(None)
        self._alarm = Alarm(delivery, lambda: None)
        self.driver = self._start(None)

    def restart(self, saved: SavedRun[GlobalFragment]) -> None:
        """Replace the driver by one that continues from `saved`; learners connect to the new one."""
        before = self.driver
        self._alarm.stop()
        self.store = self._new_store(saved)
        self.driver = self._start(self.store.begin(saved))
        before.end()

    def _new_store(self, saved: SavedRun[GlobalFragment] | None) -> MemoryStore[GlobalFragment, Tensor]:
        def later(done: Callable[[], None]) -> None:
            boot = self._boot
            self._delivery.at(self._delivery.now_s(), lambda: done() if boot == self._boot else None)

        return MemoryStore(later, saved)

    def _start(self, saved: SavedRun[GlobalFragment] | None) -> SimulatedDriver:
        self._boot += 1
        boot = self._boot
        self._alarm = Alarm(self._delivery, lambda: self.driver.tick())  # noqa: PLW0108 - of the newest driver
        worker = InstantWorker(self._delivery, lambda: boot == self._boot)
        ports = Ports(self._alarm, MemorySpool(), self.jobs, self.store, worker, self._observer)
        return Driver(
            self.run, self.method, ports, boot=boot, deadlines=self._deadlines, saved=saved,
            pool=self._pool, budget=self._budget,
        )  # fmt: skip


KEPT_RESULTS = 8
"""Results kept per fragment; with an overlap of two intervals, learners are two versions apart."""


class Replicas:
    """The versions that fetched updates lead to, each decoded once for all learners of a run."""

    def __init__(self, method: Method, layout: Layout) -> None:
        self._method, self._layout = method, layout
        self._results: dict[int, OrderedDict[tuple[int, str, int, str], AppliedUpdate]] = {}

    def fetched(self, held: GlobalFragment | None, fetched: FragmentAnswer[GlobalFragment, Tensor]) -> AppliedUpdate:
        """Apply a fetched update to the version `held` by a learner; None: it holds none.

        Raises:
            VersionError, DigestError: as `apply_update`.
        """
        update, payload = fetched.update, fetched.payload
        if payload is None:  # the whole fragment, losslessly
            return AppliedUpdate(self.as_learners_hold(fetched.held))
        assert held is not None
        results = self._results.setdefault(update.fragment, OrderedDict())
        key = held.version, held.digest, update.version, update.digest
        if key not in results:
            results[key] = apply_update(
                self._method.for_fragment(update.fragment),
                held,
                update,
                payload,
                self._layout.fragments[update.fragment].tensors,
            )
            if len(results) > KEPT_RESULTS:
                results.popitem(last=False)
        return results[key]

    def as_learners_hold(self, held: GlobalFragment) -> GlobalFragment:
        """The fragment without the state that only the syncer needs."""
        outer_state = held.outer_state if self._method.outer_at == "learners" else {}
        return replace(held, outer_state=outer_state, residual=None)

    def num_bytes(self, fetched: FragmentAnswer[GlobalFragment, Tensor]) -> int:
        """The size of an update on the network."""
        if fetched.payload is not None:
            return fetched.payload.numel()
        held = self.as_learners_hold(fetched.held)
        return sum(4 * each.numel() for each in (held.theta, *held.outer_state.values()))
