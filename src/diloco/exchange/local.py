"""Learners in one process: a syncer and M learners as threads that take turns in virtual time, reproducible bits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from safetensors.torch import load, save
from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.errors import CheckpointError, ConfigError, DilocoError
from diloco.exchange.base import Arrived, Event, Exchange, FlatModel, Overview, Rejoined, StartingState
from diloco.exchange.virtual.client import News, SessionClient
from diloco.exchange.virtual.delivery import Alarm
from diloco.exchange.virtual.run import RUN, VirtualRun
from diloco.exchange.virtual.turns import Killed, StepSeconds, ThreadState
from diloco.protocol.contribution import Budget, CallForWork, Contribution, Drained, Hold, Rejection, Settled
from diloco.protocol.leases import Ask, Grant
from diloco.protocol.members import Claim, Report
from diloco.protocol.session.requests import Fail, TellStart
from diloco.protocol.session.session_core import SessionCore
from diloco.protocol.steering import Pool
from diloco.run.ports import InitialModel

T = TypeVar("T")


def run_local(
    fn: Callable[[int, Exchange], T], *, learners: int, step_s: float | Sequence[float] | StepSeconds = 1.0,
    starts_s: Sequence[float] | None = None, pool: Pool | None = None, tokens: int | None = None,
) -> list[T]:  # fmt: skip
    """Run `fn(index, exchange)` for each learner in this process and return the results in learner order.

    Every learner has a thread of its own, and one thread runs at a time, in an order that follows from virtual time:
    inner steps take the seconds given and everything else takes none. Each learner starts from the caller's random
    state (torch, `random`, and numpy if it is imported), which is restored afterwards. The parameters of the learner
    that starts first initialise the run.

    Arguments:
        fn: builds a model and an optimizer, attaches `diloco.Learner(…, exchange=exchange)` and trains.
        learners: M ≥ 1.
        step_s: seconds of virtual time that an inner step takes: one number, one for each learner, or a function of the
            learner's index and its number of steps so far. `exchange.now_s` is the time.
        starts_s: when each learner starts; default: all at 0. A learner that starts later joins the run under way.
        pool: how many of them may train at a time; None: all. A learner without a place in the pool asks again about
            once a second of virtual time; a drained one has `learner.drained` and must finish; one that joins after the
            pool has shrunk fails (`DrainedError`).
        tokens: of all learners together, after which `learner.done` is true; None: the loop itself knows its end.

    Raises:
        ConfigError: impossible numbers, or a pool that is at times too small for a round.
        Exception: the first error of any learner; the others are stopped, one after the other.

    Example:
        >>> results = diloco.run_local(train, learners=4)
    """
    if learners < 1:
        raise ConfigError(f"learners={learners}; a run needs at least one.")
    names = [f"learner-{index:03d}" for index in range(learners)]
    run = VirtualRun(
        names, _step_seconds(step_s, learners), _starts(starts_s, learners), pool=pool, budget=Budget(tokens)
    )
    ended = run_virtual(fn, run)
    return [result for result in ended if not isinstance(result, Lost)]


class Lost:
    """The result of a learner that was killed and not started again."""


def run_virtual(fn: Callable[[int, Local], T], run: VirtualRun) -> list[T | Lost]:
    """`run_local` with a network and faults. `fn` is called again for a learner that starts again.

    Raises:
        As `run_local`.
    """
    before = ThreadState.capture()

    def thread(index: int) -> T | Lost:
        finished = False
        try:
            result = _run_learner(run, index, fn)
            finished = True
            return result
        finally:
            run.time.end(index, failed=not finished)

    with ThreadPoolExecutor(len(run.names), thread_name_prefix="learner") as pool:
        futures = [pool.submit(thread, index) for index in range(len(run.names))]
    before.restore()
    if run.time.failed is not None:
        futures[run.time.failed].result()
    run.finish()
    return [future.result() for future in futures]


def _run_learner(run: VirtualRun, index: int, fn: Callable[[int, Local], T]) -> T | Lost:
    """Run a learner from its start, and again each time that it starts after a kill."""
    begin: Callable[[], None] = partial(run.time.take_turn, index)
    while True:
        try:
            begin()
            exchange = Local(run, index)
            result = fn(index, exchange)
            exchange.close()
            return result
        except Killed:
            if (back_s := run.back_s[index]) is None:
                return Lost()
            begin = partial(run.time.sleep, index, back_s)


def _starts(starts_s: Sequence[float] | None, learners: int) -> tuple[float, ...]:
    starts = (0.0,) * learners if starts_s is None else tuple(map(float, starts_s))
    if len(starts) != learners or not all(math.isfinite(start) and start >= 0 for start in starts):
        raise ConfigError(f"starts_s={starts_s!r} needs one time of 0 s or later for each of the {learners} learners.")
    return starts


def _step_seconds(step_s: float | Sequence[float] | StepSeconds, learners: int) -> StepSeconds:
    if callable(step_s):
        return step_s
    each = tuple(map(float, step_s)) if isinstance(step_s, Sequence) else (float(step_s),) * learners
    if len(each) != learners or not all(math.isfinite(seconds) and seconds > 0 for seconds in each):
        raise ConfigError(f"step_s={step_s!r} needs one time above 0 s for each of the {learners} learners.")
    return lambda index, _: each[index]


class Local(Exchange):
    """One learner's end of a run in one process; `run_local` makes them.

    Attributes:
        initialises: whether its model may initialise the run; otherwise the learner waits until the run has a model.
            Set it before the learner joins.
        initial_step, initial_tokens: inner steps and tokens of the model that initialises the run; likewise.
    """

    has_syncer = True
    remind_after_s = math.inf  # in virtual time learners wait for each other all the time

    def __init__(self, run: VirtualRun, index: int) -> None:
        self._run, self._index, self._name = run, index, run.names[index]
        self.initial_step = self.initial_tokens = 0
        self.initialises = True
        self._client: SessionClient | None = None
        self._newest: list[SessionClient] = []  # of this learner, if any; `again` has the same list
        self._opened: StartingState | None = None
        self._inbox: deque[Event] = deque()
        self._failure: DilocoError | None = None
        self._incarnation = 0  # as which the learner reports
        run.exchanges[index] = self

    @property
    def now_s(self) -> float:
        """Virtual time, in seconds."""
        return self._run.time.now

    @property
    def run_exists(self) -> bool:
        """Whether the run has a model."""
        return self._run.has_model

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass: before joining, or before leaving."""
        self._run.time.sleep(self._index, self.now_s + seconds)

    # --- joining ------------------------------------------------------------------------------------------------------

    def deal(self, method: Method, size: int) -> tuple[int, ...]:
        return self._run.syncer_of(self._name, method).driver.deal(self._name, size)

    def again(self) -> Local:
        """A new exchange of the same learner, which has left the run and joins again."""
        again = Local(self._run, self._index)
        again._newest = self._newest
        return again

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], FlatModel], *, overlap: int | None = None
    ) -> StartingState:
        run, name = self._run, self._name
        for former in self._newest:
            former.on_closed = partial(run.time.notified.add, self._index)
            while not former.is_closed:  # its last work is on its way
                run.time.wait(self._index)
        syncer = run.serve(name, method, layout)
        if not self.is_dealt:  # else the syncer sees to it that every expert has a holder
            run.declare(self._index, self.trained)
        initialises = run.initialises(self._index, may_initialise=self.initialises and self.has_whole)
        core = SessionCore(
            RUN, Claim(name, process=run.next_process()), len(layout.fragments), at_least=method.quorum.at_least,
            reports_every_step=True, initialises=initialises, heartbeat_s=math.inf, shortest_s=0.0, held=self.held,
        )  # fmt: skip
        model = initial() if initialises else None  # in this learner's turn

        def initial_model() -> InitialModel[GlobalFragment]:
            assert model is not None
            static = save(dict(model.static)) if model.static else b""
            return syncer.jobs.initial(
                layout, model.fragments, static, learner=name, source="learner", run_id=RUN,
                step=self.initial_step, tokens=self.initial_tokens,
            )  # fmt: skip

        clock = partial(Alarm, run.delivery, learner=self._index)
        self._client = SessionClient(
            core, run.wires[self._index], clock, layout, run.replicas, initial=initial_model,
            ready=run.is_founder(self._index), overlap=overlap, held=self.held, is_dealt=self.is_dealt,
            on_news=self._news,
        )  # fmt: skip
        self._newest[:] = [self._client]
        self._client.begin()
        while self._opened is None:
            run.time.wait(self._index)
            self._raise_failure()
        self._incarnation = self._opened.incarnation
        return self._opened

    def _news(self, news: News) -> None:
        """Receive a message of the state machine for this learner."""
        if self._is_over:
            return
        match news:
            case TellStart() as start:
                self._inbox.clear()
                client = self._joined
                opened = StartingState.of(start, client.held, load(client.static) if client.static else {})
                if start.reason is None:
                    self._opened = opened
                else:
                    self._inbox.append(Rejoined(opened, start.reason))
            case Fail(error=error):
                self._failure = error
            case Arrived() | CallForWork() | Rejection() | Grant() | Drained() | Hold() | Settled():
                self._inbox.append(news)
        self._run.time.notified.add(self._index)

    @property
    def _joined(self) -> SessionClient:
        assert self._client is not None, "the learner has not joined"
        return self._client

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- training -----------------------------------------------------------------------------------------------------

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self._joined.offer(contribution, payload())

    def ask(self, ask: Ask) -> None:
        self._joined.ask(self._incarnation, ask)

    def poll(self) -> Sequence[Event]:
        self._raise_failure()
        events = tuple(self._inbox)
        self._inbox.clear()
        self._run.time.notified.discard(self._index)
        return events

    def rejoined(self, incarnation: int) -> None:
        self._incarnation = incarnation

    def wait(self, timeout_s: float) -> None:
        if not self._inbox:
            self._run.time.wait(self._index)

    def report(self, report: Report) -> None:
        step_s = self._run.time.last_step_s[self._index] or None
        self._joined.report(self._incarnation, replace(report, step_s=step_s))

    def stepped(self) -> None:
        self._run.time.step(self._index)
        self._run.has_trained = True

    def boundary(self) -> bool:
        return self._run.time.wait_within_instant(self._index)

    @property
    def overview(self) -> Overview:
        """The syncer's newest message. Without a network, the run's tokens are the current ones, not those of the last
        heartbeat: a budget of tokens then ends learners in lock step after the same step."""
        overview = Overview.of(None if self._client is None else self._client.core.last_standing)
        driver = self._run.driver
        if driver is None or self._run.delivery.takes_time:
            return overview
        return replace(overview, run_tokens=driver.state.run_tokens)

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return {} if self._client is None else self._client.num_bytes

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The global fragments that this learner holds, and the syncer's accounts of it. Where the schedule calls
        rounds, all contributions are part of it; elsewhere, contributions in flight or in an open round are not, and
        their learner counts that work as pending again. Empty for a learner that was drained after an eviction."""
        driver, name = self._run.driver, self._name
        assert driver is not None
        if name not in driver.core.members:
            return {}
        held = range(len(driver.state.versions)) if self.held is None else self.held
        fragments = {str(f): driver.state.model.held(f).state_dict() for f in held}
        return {"fragments": fragments, "core": driver.core.saved_of(name)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Before any learner has trained, the run goes back to the state. Later the run's model and clock stay: a
        learner that is new to the run adds its own ledger, if the run's model is that of the state. The ledger of a
        learner that starts again is in the run already.

        Raises:
            CheckpointError: the checkpoint is of a run with leased data.
        """
        run, name = self._run, self._name
        assert run.driver is not None
        account = run.driver.core.accounting.accounts[name]
        comes_back = account.incarnation > 1 and account.tokens > 0
        if not state or comes_back or (run.has_trained and not run.matches(state)):
            return False
        if state["core"]["has_leases"]:
            raise CheckpointError(
                "a run in one process cannot go back to a checkpoint with leased data, which all its learners share; "
                "deal fixed shards, or run it over a syncer."
            )
        self._joined.restore(run.restore(name, state))
        return True

    # --- leaving ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._client is not None and not self._is_over:
            self._run.exchanges[self._index] = None
            self._client.leave()

    @property
    def _is_over(self) -> bool:
        """Whether this exchange was closed, or its learner was killed."""
        return self._run.exchanges[self._index] is not self
