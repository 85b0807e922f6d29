"""Learners in one process: threads that hand a baton around, so that a run is reproducible to the bit.

Only the thread that holds the baton runs. It is handed on, in learner order, at every step boundary and whenever a learner waits,
so nothing depends on the operating system's scheduling. Each learner's random state and thread count stay its own.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor

from diloco.core.fragments import Layout, digest
from diloco.core.ledger import Ledger
from diloco.core.merge import encoded_of
from diloco.core.method import Method
from diloco.core.syncer import Accept, Merge, Publish, Reject, Store, SyncerCore
from diloco.core.update import Contribution, Update, close_round
from diloco.errors import ConfigError, ExchangeError, LayoutError
from diloco.exchange.base import Arrived, Event, Exchange, Model, Opened, Rejected, Report, required_method

T = TypeVar("T")


def run_local(fn: Callable[[int, Exchange], T], *, learners: int) -> list[T]:
    """Run `fn(index, exchange)` for each learner in this process and return the results in learner order.

    Every learner has a thread of its own but only one runs at a time. Each starts from the caller's random state (torch, `random`,
    and numpy where it is imported), which is put back afterwards. Learner 0's parameters initialise the run.

    Arguments:
        fn: one learner's whole life: builds a model and an optimizer, attaches `diloco.Learner(…, exchange=exchange)`, trains.
        learners: M ≥ 1.

    Raises:
        The first exception that any learner raised; the others are stopped, one after the other.

    Example:
        >>> results = diloco.run_local(train, learners=4)
    """
    if learners < 1:
        raise ConfigError(f"learners={learners}; a run needs at least one.")
    run = _Run(learners)
    before = _ThreadState.capture()

    def life(index: int) -> T:
        finished = False
        try:
            run.baton.take(index)
            exchange = Local(run, index)
            result = fn(index, exchange)
            exchange.close()
            finished = True
            return result
        finally:
            run.baton.retire(index, failed=not finished)

    with ThreadPoolExecutor(learners, thread_name_prefix="learner") as pool:
        futures = [pool.submit(life, index) for index in range(learners)]
    before.restore()
    if run.baton.failed is not None:
        futures[run.baton.failed].result()
    return [future.result() for future in futures]


class _ThreadState:
    """Random state and thread count of the running learner."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values

    @classmethod
    def capture(cls) -> _ThreadState:
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
        return cls((torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None, cuda,
                    torch.get_num_threads()))  # fmt: skip

    def restore(self) -> None:
        torch_state, python_state, numpy_state, cuda_state, num_threads = self._values
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state_all(cuda_state)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


class _StoppedError(ExchangeError):
    """Ends a learner's thread because another one failed."""


class _Baton:
    """Whose turn it is. Learners go round in index order; one that waits is passed over until it has news."""

    def __init__(self, num_learners: int) -> None:
        self._turn: int | None = 0
        self._condition = threading.Condition()
        self._alive = [True] * num_learners
        self._ready: list[Callable[[], bool] | None] = [None] * num_learners
        start = _ThreadState.capture()
        self._states = [start] * num_learners
        self._stuck: str | None = None
        self.failed: int | None = None
        """The learner that raised first."""

    def take(self, index: int) -> None:
        """Block until it is this learner's turn, and bring its random state back.

        Raises:
            ExchangeError: the run ends here, because a learner failed or all of them wait.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._turn == index)
        self._states[index].restore()
        if self._stuck is not None:
            raise ExchangeError(self._stuck)
        if self.failed is not None:
            raise _StoppedError(f"learner {self.failed} failed.")

    def hand_on(self, index: int, ready: Callable[[], bool] | None = None) -> None:
        """Let the others run; comes back when it is this learner's turn again and `ready()` holds."""
        self._states[index] = _ThreadState.capture()
        self._ready[index] = ready
        self._pass_from(index)
        self.take(index)
        self._ready[index] = None

    def retire(self, index: int, failed: bool) -> None:
        """This learner, whose turn it is, is done; if it failed, the others stop at their next turn."""
        self._alive[index] = False
        if failed and self.failed is None:
            self.failed = index
        self._pass_from(index)

    def _pass_from(self, index: int) -> None:
        with self._condition:
            n = len(self._alive)
            order = [(index + k) % n for k in range(1, n + 1)]
            alive = [i for i in order if self._alive[i]]
            ending = self._stuck is not None or self.failed is not None
            runnable = [i for i in alive if ending or (check := self._ready[i]) is None or check()]
            if alive and not runnable:
                waiting = ", ".join(map(str, sorted(alive)))
                self._stuck = (
                    f"learners {waiting} all wait and nobody can go on; do all of them take the same number of steps?"
                )
                runnable = alive
            self._turn = runnable[0] if runnable else None
            self._condition.notify_all()


class _Run:
    """The syncer's part, in the same process: its state machine, the global fragments and everybody's mail."""

    def __init__(self, num_learners: int) -> None:
        self.baton = _Baton(num_learners)
        self.num_learners = num_learners
        self.mail: list[deque[Event]] = [deque() for _ in range(num_learners)]
        self.core: SyncerCore | None = None
        self.method: Method
        self.layout: Layout
        self.static: Mapping[str, Tensor] = {}
        self.thetas: list[Tensor] = []
        self.outer_states: list[Mapping[str, Tensor]] = []
        self.residuals: list[Tensor | None] = []
        self.payloads: dict[Contribution, Tensor] = {}

    def start(self, layout: Layout, method: Method, model: Model) -> None:
        """Once, by learner 0."""
        self.method, self.layout, self.static = method, layout, model.static
        self.thetas = list(model.fragments)
        self.outer_states = [method.outer.init(theta.numel()) for theta in self.thetas]
        self.residuals = [None] * len(self.thetas)
        self.core = SyncerCore(method, [0] * len(self.thetas))
        for index in range(self.num_learners):
            self.core.joined(0.0, _name(index), ready=True)

    def carry_out(self, actions: Sequence[object]) -> None:
        assert self.core is not None
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Merge() as merge:
                    update = self._merge(merge)
                    todo.extend(self.core.merged(merge.fragment))
                    for mail in self.mail:
                        mail.append(Arrived(update, self.thetas[merge.fragment]))
                case Store(fragment=fragment):
                    todo.extend(self.core.stored(0.0, fragment))
                case Reject(contribution=c, reason=reason):
                    self.payloads.pop(c, None)
                    self.mail[_index(c.learner)].append(Rejected(c.fragment, c.round, reason))
                case Accept() | Publish() | _:
                    pass

    def _merge(self, merge: Merge) -> Update:
        f = merge.fragment
        payloads = [self.payloads.pop(c) for c in merge.contributions]
        closed = close_round(
            self.method, self.thetas[f], self.outer_states[f], self.residuals[f],
            encoded_of(merge.contributions, merge.weights, payloads), self.layout.fragments[f].tensors, merge.scale,
        )  # fmt: skip
        self.thetas[f], self.outer_states[f], self.residuals[f] = closed.theta, closed.outer_state, closed.residual
        contributors = tuple(c.learner for c in merge.contributions)
        return Update(f, merge.round, merge.round + 1, contributors, merge.weights, merge.scale, digest(closed.theta),
                      self.method.down.lossless)  # fmt: skip


class Local(Exchange):
    """One learner's end of a run in one process; `run_local` makes them."""

    def __init__(self, run: _Run, index: int) -> None:
        self._run = run
        self._index = index
        self._open = False
        self._tokens = 0

    def method(self, given: Method | None) -> Method:
        return required_method(given)

    def open(self, layout: Layout, method: Method, initial: Callable[[], Model]) -> Opened:
        run = self._run
        if self._index == 0 and run.core is None:
            run.start(layout, method, initial())
        elif run.core is None:
            run.baton.hand_on(self._index, ready=lambda: run.core is not None)
        assert run.core is not None
        if difference := run.method.difference(method):
            raise ConfigError(f"{_name(0)} and {_name(self._index)} use different methods: {difference}.")
        if difference := run.layout.first_difference(layout):
            raise LayoutError(f"{_name(0)} and {_name(self._index)} do not hold the same model: {difference}.")
        self._open = True
        versions = tuple(fragment.version for fragment in run.core.fragments)
        return Opened(_name(self._index), 1, 0, versions, Model(tuple(run.thetas), run.static))

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        run = self._run
        assert run.core is not None
        run.payloads[contribution] = payload()
        run.carry_out(run.core.contributed(0.0, contribution))

    def poll(self) -> Sequence[Event]:
        mail = self._run.mail[self._index]
        events = tuple(mail)
        mail.clear()
        return events

    def wait(self) -> None:
        self._run.baton.hand_on(self._index, ready=lambda: bool(self._run.mail[self._index]))

    def report(self, report: Report) -> None:
        self._tokens = report.tokens
        if self._run.core is not None and self._open:
            self._run.core.heartbeat(0.0, _name(self._index), 1, step=report.step, tokens=report.tokens, step_s=None,
                                     waiting=report.waiting)  # fmt: skip

    def boundary(self) -> None:
        self._run.baton.hand_on(self._index)

    @property
    def run_tokens(self) -> int | None:
        return None if self._run.core is None else self._run.core.run_tokens

    def state_dict(self) -> dict[str, Any]:
        run = self._run
        assert run.core is not None
        return {
            str(f): {
                "version": fragment.version,
                "theta": run.thetas[f],
                "outer": dict(run.outer_states[f]),
                "residual": run.residuals[f],
                "ledger": asdict(run.core.ledgers[_name(self._index)][f]),
            }
            for f, fragment in enumerate(run.core.fragments)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        run = self._run
        assert run.core is not None
        for f, fragment in enumerate(run.core.fragments):
            saved = state[str(f)]
            fragment.version = saved["version"]
            run.thetas[f], run.outer_states[f], run.residuals[f] = saved["theta"], saved["outer"], saved["residual"]
            run.core.ledgers[_name(self._index)][f] = Ledger(**saved["ledger"])

    def close(self) -> None:
        if self._open and self._run.core is not None:
            self._open = False
            self._run.carry_out(self._run.core.left(0.0, _name(self._index), 1, tokens=self._tokens))


def _name(index: int) -> str:
    return f"learner-{index:03d}"


def _index(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
