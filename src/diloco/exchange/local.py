"""Learners in one process: a syncer and M learners as threads that take turns in virtual time, reproducible to the bit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from torch import Tensor

from diloco.core.contributions import encoded_of
from diloco.core.fragments import Layout, digest
from diloco.core.ledger import Ledger
from diloco.core.method import Method
from diloco.core.syncer import Accept, Call, Deadlines, Evict, Merge, Publish, Reject, Store, SyncerCore, WakeAt
from diloco.core.update import Closed, Contribution, Update, close_round, update_of
from diloco.errors import ConfigError, LayoutError
from diloco.exchange.base import Arrived, Called, Event, Exchange, Model, Opened, Rejected, Report, required_method
from diloco.exchange.virtual import StepSeconds, ThreadState, VirtualTime

T = TypeVar("T")

_NEVER = Deadlines(lost_floor_s=math.inf, lost_cap_s=math.inf, stalled_floor_s=math.inf, stalled_cap_s=math.inf)


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
    run = _Run(_starts(starts_s, learners), _step_seconds(step_s, learners))
    before = ThreadState.capture()

    def life(index: int) -> T:
        finished = False
        try:
            run.time.begin(index)
            exchange = Local(run, index)
            result = fn(index, exchange)
            exchange.close()
            finished = True
            return result
        finally:
            run.time.retire(index, failed=not finished)

    with ThreadPoolExecutor(learners, thread_name_prefix="learner") as pool:
        futures = [pool.submit(life, index) for index in range(learners)]
    before.restore()
    if run.time.failed is not None:
        futures[run.time.failed].result()
    return [future.result() for future in futures]


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


class _Run:
    """The syncer's part, in the same process: its state machine, the global fragments and everybody's mail."""

    def __init__(self, starts_s: Sequence[float], step_s: StepSeconds) -> None:
        self.mail: list[deque[Event]] = [deque() for _ in starts_s]
        self.time = VirtualTime(starts_s, step_s, has_news=lambda index: bool(self.mail[index]), on_alarm=self._tick)
        self.starts_s = starts_s
        self.first = ""
        self.core: SyncerCore | None = None
        self.method: Method
        self.layout: Layout
        self.static: Mapping[str, Tensor] = {}
        self.thetas: list[Tensor] = []
        self.outer_states: list[Mapping[str, Tensor]] = []
        self.residuals: list[Tensor | None] = []
        self.payloads: dict[Contribution, Tensor] = {}
        self.closed: dict[int, tuple[Update, Closed]] = {}
        """Merged and not yet published, by fragment."""

    def start(self, layout: Layout, method: Method, model: Model) -> None:
        """Once, by the learner that comes first. Those who start at the same time are members from the beginning."""
        self.method, self.layout, self.static = method, layout, model.static
        self.thetas = list(model.fragments)
        self.outer_states = [method.outer.init(theta.numel()) for theta in self.thetas]
        self.residuals = [None] * len(self.thetas)
        self.core = SyncerCore(method, [0] * len(self.thetas), deadlines=_NEVER)
        for index, start in enumerate(self.starts_s):
            if start <= self.time.now:
                self.core.joined(self.time.now, _name(index), ready=True)

    def join(self, index: int) -> int:
        """This learner's incarnation; a later one joins here."""
        assert self.core is not None
        name = _name(index)
        if name not in self.core.members:
            _, actions = self.core.joined(self.time.now, name)
            self.carry_out(actions)
        return self.core.members[name].incarnation

    def carry_out(self, actions: Sequence[object]) -> None:
        """What the state machine wants done; merging and storing take no time."""
        assert self.core is not None
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Merge() as merge:
                    todo.extend(self._merge(merge))
                case Store(fragment=fragment):
                    todo.extend(self.core.stored(self.time.now, fragment))
                case Publish(fragment=fragment):
                    self._publish(fragment)
                case Call(fragment=fragment, version=version, learners=learners):
                    for learner in learners:
                        self.mail[_index(learner)].append(Called(fragment, version))
                case Reject(contribution=c, reason=reason):
                    self.payloads.pop(c, None)
                    self.mail[_index(c.learner)].append(Rejected(c.fragment, c.round, reason))
                case WakeAt(at=at):
                    self.time.alarm(at)
                case Accept() | Evict() | _:
                    pass

    def _tick(self) -> None:
        assert self.core is not None
        self.carry_out(self.core.tick(self.time.now))

    def _merge(self, merge: Merge) -> Sequence[object]:
        assert self.core is not None
        f = merge.fragment
        payloads = [self.payloads.pop(c) for c in merge.contributions]
        encoded = encoded_of(merge.contributions, merge.weights, payloads, merge.round)
        closed = close_round(
            self.method, self.thetas[f], self.outer_states[f], self.residuals[f], encoded, self.layout.fragments[f].tensors,
            merge.scale,
        )  # fmt: skip
        update = update_of(self.method, f, merge.round, encoded, closed, merge.scale, digest(closed.theta))
        self.closed[f] = update, closed
        return self.core.merged(f, closed.refused)

    def _publish(self, f: int) -> None:
        assert self.core is not None
        update, closed = self.closed.pop(f)
        self.thetas[f], self.outer_states[f], self.residuals[f] = closed.theta, closed.outer_state, closed.residual
        mean = None
        if self.method.outer_at == "learners":
            mean = self.method.down.decode(closed.payload, closed.theta.numel())
        for learner, member in self.core.members.items():
            merged_round = self.core.merged_round(learner, member.incarnation, f)
            self.mail[_index(learner)].append(Arrived(update, closed.theta, merged_round, mean))


class Local(Exchange):
    """One learner's end of a run in one process; `run_local` makes them."""

    def __init__(self, run: _Run, index: int) -> None:
        self._run = run
        self._index = index
        self._incarnation = 0
        self._tokens = 0

    @property
    def now_s(self) -> float:
        """Virtual time, in seconds."""
        return self._run.time.now

    def method(self, given: Method | None) -> Method:
        return required_method(given)

    def open(self, layout: Layout, method: Method, initial: Callable[[], Model]) -> Opened:
        run, name = self._run, _name(self._index)
        if run.core is None:
            run.first = name
            run.start(layout, method, initial())
        assert run.core is not None
        if difference := run.method.difference(method):
            raise ConfigError(f"{run.first} and {name} use different methods: {difference}.")
        if difference := run.layout.first_difference(layout):
            raise LayoutError(f"{run.first} and {name} do not hold the same model: {difference}.")
        self._incarnation = run.join(self._index)
        versions = tuple(fragment.version for fragment in run.core.fragments)
        states = tuple(run.outer_states) if method.outer_at == "learners" else ()
        opened = Opened(
            name, self._incarnation, run.core.step, versions, Model(tuple(run.thetas), run.static), outer_states=states
        )
        run.mail[self._index].clear()  # it has the newest of everything
        run.time.first_step(self._index)
        return opened

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        run = self._run
        assert run.core is not None
        run.payloads[contribution] = payload()
        run.carry_out(run.core.contributed(run.time.now, contribution))

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
        if run.core is not None and self._incarnation:
            run.carry_out(
                run.core.heartbeat(run.time.now, _name(self._index), self._incarnation, step=report.step, tokens=report.tokens,
                                   step_s=run.time.last_step_s[self._index], waiting=report.waiting)
            )  # fmt: skip

    def boundary(self) -> bool:
        return self._run.time.next_step(self._index)

    @property
    def num_live(self) -> int:
        return 1 if self._run.core is None else len(self._run.core.members)

    @property
    def sync_every(self) -> int | None:
        return None if self._run.core is None else self._run.core.sync_every_of(_name(self._index))

    @property
    def run_tokens(self) -> int | None:
        return None if self._run.core is None else self._run.core.run_tokens

    def state_dict(self) -> dict[str, Any]:
        run, name = self._run, _name(self._index)
        assert run.core is not None
        fragments = {
            str(f): {
                "version": fragment.version,
                "theta": run.thetas[f],
                "outer": dict(run.outer_states[f]),
                "residual": run.residuals[f],
                "ledger": asdict(run.core.ledgers[name][f]),
            }
            for f, fragment in enumerate(run.core.fragments)
        }
        return {"clock": run.core.clock, "step": run.core.members[name].step, "fragments": fragments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        run, name = self._run, _name(self._index)
        assert run.core is not None
        run.core.wind(state["clock"])
        run.core.members[name].step = state["step"]
        for f, fragment in enumerate(run.core.fragments):
            saved = state["fragments"][str(f)]
            fragment.version = saved["version"]
            run.thetas[f], run.outer_states[f], run.residuals[f] = saved["theta"], saved["outer"], saved["residual"]
            run.core.ledgers[name][f] = Ledger(**saved["ledger"])

    def close(self) -> None:
        run = self._run
        if self._incarnation and run.core is not None:
            run.carry_out(run.core.left(run.time.now, _name(self._index), self._incarnation, tokens=self._tokens))
            self._incarnation = 0


def _name(index: int) -> str:
    return f"learner-{index:03d}"


def _index(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
