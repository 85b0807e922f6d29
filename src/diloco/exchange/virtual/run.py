"""A run in one process and in virtual time: its syncer, its network and its scheduler, without the learners."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.errors import ConfigError, LayoutError
from diloco.exchange.base import require_experts_trained
from diloco.exchange.virtual.delivery import Delivery, Fault, Faults, Links
from diloco.exchange.virtual.syncer import Replicas, SimulatedDriver, SyncerProcess, VirtualSyncer
from diloco.exchange.virtual.turns import StepSeconds, VirtualTime, Watch
from diloco.protocol.contribution import Budget
from diloco.protocol.members import NO_DEADLINES
from diloco.protocol.records import rewound
from diloco.protocol.session import requests
from diloco.protocol.steering import Pool
from diloco.run.ports import NullObserver, Observer

RUN = "local"


class VirtualRun:
    """The syncer and the network of one run, in the process of its learners.

    Arguments:
        names: of the learners; merges go in the order of names.
        step_s: seconds that an inner step takes.
        starts_s: when each learner starts. The first one's parameters initialise the run.
        links: the network between learners and syncer; None: everything arrives at once.
        faults: which learners are killed, and when. The syncer evicts those that do not come back
            (`Deadlines.reconnect_steps`).
        observer: receives the syncer's events.
        watch: is called for each step and transfer.
        pool: how many learners may train; None: as many as start.
        budget: when the run ends; None: the learners know.

    Attributes:
        time: the scheduler of the learners' threads; `time.now` is the virtual time.
        delivery: the network.
        back_s: when each learner that was killed starts again; None: never.
        exchanges: the open exchange of each learner; None: it was closed, or its learner was killed.
        initialiser: the learner that is uploading the run's first model.
        has_trained: whether any learner has taken a step in the run.
    """

    def __init__(
        self, names: Sequence[str], step_s: StepSeconds, starts_s: Sequence[float], links: Links | None = None,
        faults: Sequence[Fault] = (), observer: Observer | None = None, watch: Watch = lambda *_: None,
        pool: Pool | None = None, budget: Budget | None = None,
    ) -> None:  # fmt: skip
        self.names, self.starts_s = tuple(names), starts_s
        self.back_s: list[float | None] = [None] * len(self.names)
        self.exchanges: list[object | None] = [None] * len(self.names)
        self.initialiser: int | None = None
        self.has_trained = False
        self.delivery = Delivery(links, lambda: self.time.now, watch)
        self.time = VirtualTime(starts_s, step_s, (self.delivery, Faults(faults, self._kill)), watch)
        self._observer = observer or NullObserver()  # type: ignore[abstract] # its methods do nothing
        self._pool, self._budget = pool, budget
        self.wires = [RunWire(self, index) for index in range(len(self.names))]
        self._awaiting: set[int] = set()  # learners that wait for the run to have a model
        self._began_s = math.inf
        self._num_processes = 0
        self._trained: dict[int, Sequence[tuple[int, ...] | None]] = {}
        self.syncer: VirtualSyncer | None = None
        self._layout: Layout | None = None
        self._first = ""

    # --- the syncer ---------------------------------------------------------------------------------------------------

    def serve(self, learner: str, method: Method, layout: Layout) -> VirtualSyncer:
        """The run's syncer, which has the method of the first learner that joins.

        Raises:
            ConfigError: this learner has another method, or the pool is at times too small for a round.
            LayoutError: it has another model.
        """
        syncer = self.syncer_of(learner, method)
        if self._layout is None:
            self._layout, self.replicas = layout, Replicas(method, layout)
        if difference := self._layout.first_difference(layout, f"on {self._first}", f"on {learner}"):
            raise LayoutError(f"learners do not hold the same model: {difference}.")
        return syncer

    def syncer_of(self, learner: str, method: Method) -> VirtualSyncer:
        """As `serve`, before the model of any learner is known."""
        if self.syncer is None:
            if self._pool is not None:
                self._pool.require(method.quorum.at_least)
            self._first = learner
            self.syncer = VirtualSyncer(
                RUN, method, self.delivery, observer=self._observer, deadlines=NO_DEADLINES, pool=self._pool,
                budget=self._budget,
            )  # fmt: skip
        if difference := self.syncer.method.difference(method, f"on {self._first}", f"on {learner}"):
            raise ConfigError(f"learners use different methods: {difference}.")
        return self.syncer

    def declare(self, index: int, trained: Sequence[tuple[int, ...] | None]) -> None:
        """Record what a learner trains (`Exchange.trained`). Raises ConfigError if the last one leaves an expert that
        no learner trains."""
        self._trained[index] = trained
        if len(self._trained) == len(self.names):
            assert self.syncer is not None
            assert self._layout is not None
            require_experts_trained(self.syncer.method, self._layout, list(self._trained.values()))

    @property
    def driver(self) -> SimulatedDriver | None:
        """The driver of the run; None before the first learner joins. The run may have no model yet."""
        return None if self.syncer is None else self.syncer.driver

    @property
    def has_model(self) -> bool:
        """Whether learners can join."""
        return self.driver is not None and self.driver.state.is_initialised

    def initialises(self, index: int, *, may_initialise: bool) -> bool:
        """Block until the run has a model (False), or until this learner is to initialise it (True)."""
        while not self.has_model:
            if self.initialiser is None and may_initialise:
                self.initialiser = index
                return True
            self._awaiting.add(index)
            self.time.wait(index)
        return False

    def wake_waiting(self) -> None:
        """Wake learners that wait for the model: the run has one, or its initialiser was killed."""
        if self.has_model:
            self._began_s = min(self._began_s, self.time.now)
        self.time.notified |= self._awaiting
        self._awaiting.clear()

    def is_founder(self, index: int) -> bool:
        """Whether a learner had started when the run was initialised: rounds wait for it from the start. (Otherwise
        learners in lock step would merge a round after their first step without those that report a moment later; over
        a network `at_least` prevents that.)"""
        return self.starts_s[index] <= self._began_s and self.back_s[index] is None

    def next_process(self) -> int:
        """The number of a learner's new process."""
        self._num_processes += 1
        return self._num_processes

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def restore(self, name: str, state: Mapping[str, Any]) -> Sequence[GlobalFragment]:
        """Restore a learner's accounts from its checkpoint (`Local.state_dict`), and, before any learner has
        trained, the fragments that it holds, and the rounds of the run. Returns the run's fragments."""
        assert self.syncer is not None
        core, model = self.syncer.driver.core, self.syncer.driver.state.model
        saved = self.syncer.store.load()
        assert saved is not None
        back = set() if self.has_trained else {int(f) for f in state["fragments"]}
        record = rewound(core.saved().values, name, state["core"], fragments=back)
        fragments = tuple(
            _held(model.held(f), state["fragments"][str(f)]) if f in back else model.held(f)
            for f in range(len(model.versions))
        )
        contributors = tuple(model.contributors)
        self.syncer.restart(replace(saved, fragments=fragments, contributors=contributors, record=record))
        return fragments

    def matches(self, state: Mapping[str, Any]) -> bool:
        """Whether the run's model has the versions and bits of a checkpoint, as far as its learner holds it."""
        assert self.driver is not None
        model = self.driver.state.model
        pairs = ((model.held(int(f)), saved) for f, saved in state["fragments"].items())
        return all(each.version == at["version"] and torch.equal(each.theta, at["theta"]) for each, at in pairs)

    # --- faults, and the end ------------------------------------------------------------------------------------------

    def _kill(self, fault: Fault) -> None:
        """Kill a learner, which breaks its connections; the syncer evicts it after a while unless it has returned."""
        index = fault.learner
        self.time.kill(index)
        self.back_s[index] = fault.back_s
        self.exchanges[index] = None
        self._awaiting.discard(index)
        self.delivery.drop(index)
        self.wires[index].break_all()
        if self.initialiser == index:
            self.initialiser = None
            self.wake_waiting()

    def finish(self) -> None:
        """Deliver the last messages, after all learners have ended."""
        while self.delivery.next_s < math.inf:
            self.time.now = max(self.time.now, self.delivery.next_s)
            self.delivery.fire(self.time.now)


def _held(own: GlobalFragment, saved: Mapping[str, Any]) -> GlobalFragment:
    """A fragment of a checkpoint, of the same model and method as the run's own."""
    found = GlobalFragment.from_state_dict(own.fragment, saved)
    shapes = [
        {"": each.theta.shape, **{name: value.shape for name, value in each.outer_state.items()}}
        for each in (found, own)
    ]
    if shapes[0] != shapes[1] or (found.residual is not None and found.residual.shape != own.theta.shape):
        raise ValueError(f"fragment {own.fragment} has {shapes[0]}, and the model's {shapes[1]}")
    return found


class RunWire:
    """One learner's connections, over the run's network (`client.Wire`)."""

    def __init__(self, run: VirtualRun, index: int) -> None:
        self._run, self._index = run, index
        self._broken: dict[requests.Request, Callable[[], None]] = {}

    def up(self, call: requests.Request, num_bytes: int, arrive: Callable[[SyncerProcess], None]) -> None:
        """As `Wire`."""

        def arrives() -> None:
            assert self._run.syncer is not None
            arrive(self._run.syncer)

        self._run.delivery.send(self._index, "up", num_bytes, arrives)

    def down(self, call: requests.Request, num_bytes: int, arrive: Callable[[], None]) -> None:
        """As `Wire`."""
        self._run.delivery.send(self._index, "down", num_bytes, arrive)

    def on_break(self, call: requests.Request, broken: Callable[[], None]) -> None:
        """As `Wire`."""
        self._broken[call] = broken

    def dial(self, address: int) -> None:
        """As `Wire`."""
        raise AssertionError(f"a run in one process has one syncer, which does not have address {address}")

    def hang_up(self, connection: int) -> None:
        """As `Wire`."""
        for call in [
            each for each in self._broken if isinstance(each, requests.Watch) and each.connection == connection
        ]:
            self._run.delivery.send(self._index, "up", 0, self._broken.pop(call))

    def ended(self, call: requests.Request) -> None:
        """As `Wire`. Other learners learn with the initialiser that the run has a model."""
        self._broken.pop(call, None)
        if isinstance(call, requests.Initialise):
            self._run.wake_waiting()

    def break_all(self) -> None:
        """Break all connections; the syncer notices at once."""
        broken, self._broken = list(self._broken.values()), {}
        for each in broken:
            each()
