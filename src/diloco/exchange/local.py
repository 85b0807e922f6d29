"""Learners in one process: a syncer and M learners as threads that take turns in virtual time, reproducible to the bit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from torch import Tensor

from diloco.core.actions import Acknowledge
from diloco.core.contribution import Contribution
from diloco.core.fragments import Layout
from diloco.core.ledger import Ledger
from diloco.core.method import Method
from diloco.core.session.requests import Report
from diloco.errors import ConfigError, LayoutError
from diloco.exchange.base import Arrived, Event, Exchange, Model, Opened, required_method
from diloco.exchange.delivery import Direction
from diloco.exchange.virtual import Killed, StepSeconds, ThreadState
from diloco.exchange.world import Run, World, model_bytes

T = TypeVar("T")


def run_local(
    fn: Callable[[int, Exchange], T], *, learners: int, step_s: float | Sequence[float] | StepSeconds = 1.0,
    starts_s: Sequence[float] | None = None,
) -> list[T]:  # fmt: skip
    """Run `fn(index, exchange)` for each learner in this process and return the results in learner order.

    Every learner has a thread of its own but only one runs at a time; what happens when follows from virtual time, in which inner
    steps take the seconds given and everything else takes none. Each learner starts from the caller's random state (torch, `random`,
    and numpy where it is imported), which is put back afterwards. The parameters of the learner that starts first initialise the run.

    Arguments:
        fn: one learner's whole life: builds a model and an optimizer, attaches `diloco.Learner(…, exchange=exchange)`, trains.
        learners: M ≥ 1.
        step_s: seconds of virtual time that an inner step takes: one number, one for each learner, or a function of the learner's
            index and its number of steps so far. `exchange.now_s` is the time.
        starts_s: when each learner starts; default: all at 0. One that starts later joins the run as it is then.

    Raises:
        ConfigError: impossible numbers.
        The first exception that any learner raised; the others are stopped, one after the other.

    Example:
        >>> results = diloco.run_local(train, learners=4)
    """
    if learners < 1:
        raise ConfigError(f"learners={learners}; a run needs at least one.")
    names = [f"learner-{index:03d}" for index in range(learners)]
    ended = run_virtual(fn, Run(World(names, _step_seconds(step_s, learners), _starts(starts_s, learners))))
    return [result for result in ended if not isinstance(result, Lost)]


class Lost:
    """Stands for the result of a learner that was killed and did not come back."""


def run_virtual(fn: Callable[[int, Local], T], run: Run) -> list[T | Lost]:
    """`run_local` in a world with a network and faults. A learner that comes back calls `fn` again.

    Raises:
        As `run_local`.
    """
    before = ThreadState.capture()

    def life(index: int) -> T | Lost:
        finished = False
        try:
            result = _life(run, index, fn)
            finished = True
            return result
        finally:
            run.time.retire(index, failed=not finished)

    with ThreadPoolExecutor(len(run.names), thread_name_prefix="learner") as pool:
        futures = [pool.submit(life, index) for index in range(len(run.names))]
    before.restore()
    if run.time.failed is not None:
        futures[run.time.failed].result()
    run.finish()
    return [future.result() for future in futures]


def _life(run: Run, index: int, fn: Callable[[int, Local], T]) -> T | Lost:
    """Of one learner, from its start, and again whenever it is back."""
    try:
        run.time.begin(index)
        return _attend(run, index, fn)
    except Killed:
        pass
    while (back_s := run.back_s[index]) is not None:
        try:
            run.time.rest(index, back_s)
            return _attend(run, index, fn)
        except Killed:
            pass
    return Lost()


def _attend(run: Run, index: int, fn: Callable[[int, Local], T]) -> T:
    exchange = Local(run, index)
    result = fn(index, exchange)
    exchange.close()
    return result


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
        incarnation: 0 before it has joined and after it has left.
        initialises: whether its model may become the run's; one that may not waits until there is a run. To be set before it joins.
        initial_step, initial_tokens: what the learner that initialises the run has behind it; likewise.
        awaits_run: it does wait.
        has_model: the model that it has sent or fetched is there.
    """

    def __init__(self, run: Run, index: int) -> None:
        self._run, self._index, self._name = run, index, run.names[index]
        self.incarnation = 0
        self.initial_step = self.initial_tokens = 0
        self.initialises = True
        self.awaits_run = self.has_model = False
        self._tokens = 0
        self._num_bytes: Counter[str] = Counter()
        self._is_again = run.ends[index] is not None or run.back_s[index] is not None
        run.ends[index] = self
        run.dead.discard(index)

    @property
    def now_s(self) -> float:
        """Virtual time, in seconds."""
        return self._run.time.now

    @property
    def run_exists(self) -> bool:
        """Whether somebody has initialised the run."""
        return self._run.core is not None

    def rest(self, seconds: float) -> None:
        """Let virtual time pass, before joining."""
        self._run.time.rest(self._index, self.now_s + seconds)

    def method(self, given: Method | None) -> Method:
        return required_method(given)

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], Model], *, overlap: int | None = None
    ) -> Opened:
        run, name = self._run, self._name
        is_first = self._begin_run(layout, method, initial)
        assert run.core is not None
        if difference := run.method.difference(method):
            raise ConfigError(f"{run.first} and {name} use different methods: {difference}.")
        if difference := run.layout.first_difference(layout):
            raise LayoutError(f"{run.first} and {name} do not hold the same model: {difference}.")
        if not is_first:
            self._move("down", run.num_model_bytes)
        self.incarnation = run.join(self._index, again=self._is_again)
        run.core.members[name].overlap = overlap
        # Who was there when the run began begins with it, however long its model took to come: a scheduled round waits
        # for it.
        is_late = self._is_again or run.starts_s[self._index] > run.began_s or not run.method.wait
        step = run.core.start_step(name) if is_late else run.initial_step
        opened = Opened(
            name, self.incarnation, step, run.newest, run.static, self.run_tokens or 0,
            awaited=is_late and step < run.core.step,
        )  # fmt: skip
        run.mail[self._index].clear()  # it has the newest of everything
        return opened

    def _begin_run(self, layout: Layout, method: Method, initial: Callable[[], Model]) -> bool:
        """Until there is a run. Returns whether it has begun with this learner's model."""
        run = self._run
        self.awaits_run = True
        while run.core is None and not run.may_initialise(self):
            run.time.wait(self._index)
        self.awaits_run = False
        if run.core is not None:
            return False
        run.initialiser = self._index
        model = initial()
        self._move("up", model_bytes(model.fragments, model.static))
        run.start(self._name, layout, method, model, self.initial_step, self.initial_tokens)
        return True

    def _move(self, direction: Direction, num_bytes: int) -> None:
        """Over the network: the whole global model, from the first learner to the syncer or to a joiner."""
        self._num_bytes["joins"] += num_bytes
        self._run.delivery.carry(self._index, direction, num_bytes, self._got_model)
        while not self.has_model:
            self._run.time.wait(self._index)
            self._run.mail[self._index].clear()
        self.has_model = False

    def _got_model(self) -> None:
        self.has_model = True

    def receive(self, arrived: Arrived, num_bytes: int) -> None:
        """An update has come."""
        self._num_bytes["updates"] += num_bytes
        self._run.mail[self._index].append(arrived)

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        run, encoded = self._run, payload()
        self._num_bytes["contributions"] += encoded.numel()

        def deliver() -> None:
            assert run.core is not None
            if run.core.accounting.accounts[contribution.learner].incarnation == contribution.incarnation:
                run.payloads[contribution] = encoded
                staleness = run.core.fragments[contribution.fragment].version - contribution.base
                actions = run.core.contributed(run.time.now, contribution)
                if isinstance(actions[0], Acknowledge):
                    run.witness.contributed(contribution, encoded.numel(), staleness)
                run.carry_out(actions)

        run.delivery.carry(self._index, "up", encoded.numel(), deliver)

    def poll(self) -> Sequence[Event]:
        mail = self._run.mail[self._index]
        events = tuple(mail)
        mail.clear()
        return events

    def wait(self) -> None:
        self._run.time.wait(self._index)

    def report(self, report: Report) -> None:
        run = self._run
        self._tokens = report.tokens
        if run.core is not None and self.incarnation:
            step_s, incarnation = run.time.last_step_s[self._index], self.incarnation

            def deliver() -> None:
                assert run.core is not None
                if incarnation == self.incarnation:
                    run.carry_out(
                        run.core.heartbeat(run.time.now, self._name, incarnation, step=report.step, tokens=report.tokens,
                                           step_s=step_s, waiting=report.waiting, finished=report.finished)
                    )  # fmt: skip

            run.delivery.tell(self._index, deliver)

    def stepped(self) -> None:
        self._run.time.step(self._index)
        self._run.has_trained = True

    def boundary(self) -> bool:
        return self._run.time.linger(self._index)

    @property
    def num_live(self) -> int:
        return 1 if self._run.core is None else len(self._run.core.members)

    @property
    def sync_every(self) -> int | None:
        return None if self._run.core is None else self._run.core.rounds.sync_every(self._name)

    @property
    def run_tokens(self) -> int | None:
        return None if self._run.core is None else self._run.initial_tokens + self._run.core.accounting.run_tokens

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return self._num_bytes

    def state_dict(self) -> dict[str, Any]:
        """The global model as it stands, and this learner's books. Where the schedule calls rounds, all that was sent is in it; where
        not, what is on its way or in an open round is not, and its learner counts that work as pending again."""
        run, name = self._run, self._name
        assert run.core is not None
        member = run.core.members[name]
        fragments = {
            str(f): {
                **held.state_dict(),
                "ledger": asdict(run.core.accounting.accounts[name].ledgers[f]),
            }
            for f, held in enumerate(run.fragments)
        }
        rounds = {"run": run.core.rounds.saved(), "learner": run.core.rounds.saved_of(name)}
        return {"rounds": rounds, "step": member.step, "fragments": fragments}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Before any learner has trained, the run goes back to the state. Later its model and clock are the others' as well, and stay:
        a learner that is new to the run brings its own books to it, if the run's model is the state's. One that comes back has its
        books there already."""
        run, name = self._run, self._name
        assert run.core is not None
        member, ledgers = run.core.members[name], run.core.accounting.accounts[name].ledgers
        fragments = [state["fragments"][str(f)] for f in range(len(ledgers))]
        comes_back = self.incarnation > 1 and ledgers[0].trained > 0
        if comes_back or (run.has_trained and not run.stands_at(fragments)):
            member.step = max(member.step, state["step"])  # steps taken before do not move the clock
            return False
        if not run.has_trained:
            run.restore(state["rounds"]["run"], fragments)
        member.step = state["step"]
        for f, saved in enumerate(fragments):
            ledgers[f] = Ledger(**saved["ledger"])
        run.core.rounds.restore_of(name, state["rounds"]["learner"])
        return True

    def close(self) -> None:
        run, incarnation = self._run, self.incarnation
        if not incarnation:
            return

        def deliver() -> None:
            assert run.core is not None
            run.witness.left(self._name, incarnation, self._tokens)
            run.carry_out(run.core.left(run.time.now, self._name, incarnation, tokens=self._tokens))

        self.incarnation = 0
        run.delivery.carry(self._index, "up", 0, deliver)  # after what it has sent
