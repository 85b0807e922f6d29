"""A run with numbers for tensors, whose effects happen one at a time: a driver, the store that outlives it, and two
learners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.run.memory import LaterWorker, LimitedSpool
from tests.run.simulated import CopyFormat, Place, SimulatedObjects

import diloco
from diloco.core.layout import Layout, TensorSpec, place
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import DilocoError, NonFiniteError, PayloadError, StoreError
from diloco.protocol.actions import MergeRound
from diloco.protocol.contribution import Contribution, Standing
from diloco.protocol.manifest import Manifest
from diloco.protocol.members import Claim, Deadlines, Report
from diloco.protocol.publishing import Publisher
from diloco.protocol.publishing import Standing as StoreStanding
from diloco.protocol.steering import Pool
from diloco.run.driver import Driver
from diloco.run.memory import MemorySlot
from diloco.run.ports import InitialModel, MergedRound, NullObserver, Observer, Ports, SavedRun
from diloco.run.published import PublishedStore
from diloco.run.uploads import Upload

RUN = "toy"

RUN_ID = "0" * 32
LAYOUT = Layout(tuple(place(index, [TensorSpec(f"w{index}", (2,), "float32")]) for index in range(2)), ())
NUM_BYTES = 8
NEVER = Deadlines(lost_floor_s=1e6, lost_cap_s=1e6, stalled_floor_s=1e6, stalled_cap_s=1e6)


def scheduled(at_least: int = 2, **keywords: Any) -> Method:
    """Two fragments, every 4 steps; a round needs both learners."""
    return diloco.StreamingDiLoCo(
        sync_every=4, overlap=1, fragments=diloco.Named([["w0"], ["w1"]]), codec="fp32",
        quorum=diloco.AllLive(at_least=at_least), **keywords,
    )  # fmt: skip


@dataclass(frozen=True)
class Number:
    """A fragment at a version: the sum of all work in it."""

    version: int
    value: int

    @property
    def digest(self) -> str:
        return f"{self.version}:{self.value}"


class Sums:
    """The tensor jobs of numbers. A payload below 0 is not finite; a round whose sum is above `most` has no result."""

    most = 10**9
    lossless = True

    def contribution_bytes(self, fragment: int, num_elements: int) -> int:
        return 4 * num_elements

    def check(self, slot: MemorySlot, fragment: int, num_elements: int) -> PayloadError | None:
        return NonFiniteError("it is not finite.") if slot.tensor < 0 else None

    def close(
        self, action: MergeRound, layout: Any, held: Number, slots: Sequence[MemorySlot]
    ) -> MergedRound[Number, int] | PayloadError:
        value = sum(slot.tensor for slot in slots)
        if value > self.most:
            return NonFiniteError("the sum is too large.")
        new = Number(held.version + 1, held.value + value)
        learners = tuple(dict.fromkeys(c.learner for c in action.contributions))
        update = Update(
            action.fragment,
            held.version,
            new.version,
            learners,
            action.weights,
            action.scale,
            new.digest,
            lossless=self.lossless,
        )
        return MergedRound(action, update, new, value, NUM_BYTES)


@dataclass(eq=False)
class Line:
    """A connection: what was sent on it, in order."""

    heard: list[Standing] = field(default_factory=list)
    evicted_for: str | None = None
    has_ended: bool = False

    def standing(self, standing: Standing) -> None:
        assert not self.has_ended
        assert not self.heard or standing.order > self.heard[-1].order
        self.heard.append(standing)

    def evicted(self, reason: str, *, replaced: bool) -> None:
        self.evicted_for = reason

    def end(self) -> None:
        self.has_ended = True


class Alarm:
    """A clock of a scene (`ports.ClockPort`). `at_s`: when it rings."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.at_s = 0.0

    def now_s(self) -> float:
        return self._scene.now

    def wake_at(self, at_s: float) -> None:
        self.at_s = at_s


class Scene:
    """One driver after the other, over one store. Effects wait in `todo` until they are let happen.

    Attributes:
        place: outlives the drivers.
        store: of the driver that is there.
        alarm: of that driver.
        todo: (what, fragment, call), oldest first. "answer": of the request to the store before.
        done: what has happened.
        refuse: whether the place refuses a request of this kind.
        said: what the store waited for.
    """

    def __init__(
        self, method: Method | None = None, *, deadlines: Deadlines = NEVER, observer: Observer | None = None,
        pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.method = method or scheduled()
        self.deadlines = deadlines
        self.observer = observer or NullObserver()
        self.now = 0.0
        self.todo: list[tuple[str, int | None, Callable[[], None]]] = []
        self.done: list[tuple[str, int | None]] = []
        self.refuse: Callable[[str], bool] = lambda _: False
        self.place = Place()
        self.said: list[str] = []
        self.boot = 0
        self.driver = self.restart()

    def _reach(self, what: str, request: Callable[[], Any]) -> Any:
        if self.refuse(what):
            raise StoreError(f"the place refuses to {what}.")
        return request()

    def saved(self) -> SavedRun[Number] | None:
        """What is durable; None: there is no model."""
        manifest = self.place.manifest
        has_model = manifest is not None and manifest.record is not None
        return CopyFormat().read(SimulatedObjects(self.place), manifest) if manifest and has_model else None

    # as `run.published.StoreHost`

    def stands(self, standing: StoreStanding, why: str) -> None:
        """As `run.published.StoreHost`."""

    def saw(self, manifest: Manifest | None) -> None:
        """As `run.published.StoreHost`."""

    def refused(self, error: DilocoError) -> None:
        raise error

    def waits(self, what: str, error: StoreError) -> None:
        self.said.append(what)

    def serve(self, manifest: Manifest) -> None:
        saved = self.saved()
        if saved is not None:
            saved = saved.begun(manifest.epoch)
            self.store.begun(saved.run_id, saved.epochs)
        ports = Ports[Number, MemorySlot, int](
            self.alarm, self.spool, Sums(), self.store, LaterWorker(self._later), self.observer
        )
        self.driver = Driver(
            RUN, self.method, ports, boot=self.boot, deadlines=self.deadlines, pool=self.pool, saved=saved,
            epoch=manifest.epoch,
        )  # fmt: skip

    # what happens

    def restart(self) -> Driver[Number, MemorySlot, int]:
        """The driver is gone with all that was under way; the next one continues from the store."""
        self.todo.clear()
        self.boot += 1
        self.spool = LimitedSpool()
        self.alarm, self._store_alarm = Alarm(self), Alarm(self)
        before, self.refuse = self.refuse, lambda _: False
        self.store = PublishedStore[Number, int](
            SimulatedObjects(self.place, self._reach), CopyFormat(), Publisher(RUN, boot=self.boot),
            LaterWorker(self._later), self._store_alarm, self,
        )  # fmt: skip
        self.store.start()
        for _ in range(4):  # the manifest is read, and claimed
            self.todo.pop(0)[2]()
        self.refuse = before
        return self.driver

    def _later(self, what: str, fragment: int | None, do: Callable[[], None]) -> None:
        self.todo.append((what, fragment, do))

    def next(self, what: str | None = None) -> str:
        """Let the oldest effect happen, which is of this kind."""
        kind, fragment, do = self.todo.pop(0)
        assert what in (None, kind), f"{kind} is next, and not {what}: {[each[:2] for each in self.todo]}"
        self.done.append((kind, fragment))
        do()
        return kind

    def settle(self) -> None:
        """Let all that is under way happen."""
        while self.todo:
            self.next()

    def wait(self, seconds: float) -> None:
        """Let time pass; the driver is woken when it asked for that."""
        until = self.now + seconds
        while min(self.alarm.at_s, self._store_alarm.at_s) <= until:
            self.now = max(self.now, min(self.alarm.at_s, self._store_alarm.at_s))
            if self._store_alarm.at_s <= self.now:
                self.store.tick()
            if self.alarm.at_s <= self.now:
                self.driver.tick()
            self.settle()
        self.now = until

    # what learners do

    def initialise(self) -> DilocoError | None:
        """The run gets its model; returns the answer."""
        answers: list[DilocoError | None] = []
        model = InitialModel(LAYOUT, (Number(0, 0), Number(0, 0)), b"", "a", "test", RUN_ID)
        self.driver.initialise(model, answers.append)
        self.settle()
        return answers[0]

    def join(self, learner: str, overlap: int | None = None) -> int:
        """A learner joins; returns its incarnation."""
        answers: list[int] = []
        self.driver.join(Claim(learner), LAYOUT, answers.append, overlap=overlap)
        self.settle()
        return answers[0]

    def listen(self, learner: str, incarnation: int = 1) -> Line:
        """A learner opens a connection."""
        line = Line()
        self.driver.connected(Claim(learner, incarnation), line)
        return line

    def beat(self, learner: str, step: int, incarnation: int = 1, **fields: Any) -> Standing:
        """A heartbeat, at ten tokens a step. `fields`: of the claim and the report."""
        claimed = {key: fields.pop(key) for key in ("process", "seen", "versions") if key in fields}
        claim = Claim(learner, incarnation, **{"seen": self.driver.lineage, **claimed})
        report = Report(**{"step": step, "steps": step, "tokens": 10 * step, "step_s": 1.0, **fields})
        return self.driver.heartbeat(claim, report)

    def begin(self, c: Contribution, payload: int = 1, process: int = 0) -> Upload[MemorySlot]:
        """A push that has come up whole."""
        num_bytes = 0 if c.is_empty else NUM_BYTES
        push = self.driver.begin_push(c, num_bytes, boot=self.boot, process=process)
        push.slot.tensor = payload
        return push

    def push(self, c: Contribution, payload: int = 1) -> DilocoError | None:
        """A push, checked; returns the answer. Other effects that wait stay where they are."""
        answers: list[DilocoError | None] = []
        self.driver.complete_push(self.begin(c, payload), answers.append)
        checks = [index for index, each in enumerate(self.todo) if each[0] == "check"]
        self.todo.pop(checks[-1])[2]()
        return answers[0]


def contribution(
    learner: str, number: int = 1, fragment: int = 0, *, round_: int | None = None, step: int | None = None,
    incarnation: int = 1,
) -> Contribution:  # fmt: skip
    """Number n is meant for round n − 1 of its fragment, with ten tokens for each of up to four steps on that
    version."""
    version = number - 1 if round_ is None else round_
    sent_at = 4 * version + 2 * (fragment + 1) if step is None else step
    steps = min(4, sent_at)
    return Contribution(
        learner, incarnation, fragment, number, version, version, 10 * steps, steps, 10 * sent_at, step=sent_at
    )


def started(*learners: str, method: Method | None = None, **fields: Any) -> Scene:
    """A run whose learners have joined and trained for a step."""
    scene = Scene(method, **fields)
    assert scene.initialise() is None
    for learner in learners:
        assert scene.join(learner) == 1
        scene.beat(learner, 1)
    scene.settle()
    return scene


class Player:
    """A learner of the scheduled toy run that makes `num_rounds` contributions to each fragment, and sends again what
    has no verdict whenever the driver is another one."""

    def __init__(self, scene: Scene, name: str, num_rounds: int) -> None:
        self.scene, self.name, self.num_rounds = scene, name, num_rounds
        self.line = Line()
        self.boot = 0
        self.is_part = self.is_joining = False
        self.open: dict[tuple[int, int], Contribution] = {}  # by fragment and number
        self.numbers, self.versions = [0, 0], [0, 0]
        self.merged: list[tuple[int, int]] = []

    @property
    def has_finished(self) -> bool:
        return not self.open and self.numbers == [self.num_rounds] * 2

    def act(self) -> None:
        """Connect, hear, and send what is due."""
        if self.boot != self.scene.boot:
            self.boot, self.is_joining = self.scene.boot, False
            if self.is_part:
                self._connect()
        if not self.is_part:
            if not self.is_joining:
                self.is_joining = True
                self.scene.driver.join(Claim(self.name), LAYOUT, self._joined)
            return
        self._hear(self.line.heard[-1])
        for fragment in (0, 1):
            number = self.numbers[fragment] + 1
            is_due = number <= min(self.num_rounds, self._turn(fragment), self.versions[fragment] + 1)
            if is_due and not any(key[0] == fragment for key in self.open):
                self.numbers[fragment] = number
                self.open[fragment, number] = contribution(self.name, number, fragment)
                self._send(self.open[fragment, number])

    def _turn(self, fragment: int) -> int:
        """In the order of the schedule: fragment 0, fragment 1, fragment 0, …"""
        return self.numbers[1] + 1 if fragment == 0 else self.numbers[0]

    def _joined(self, incarnation: int) -> None:
        assert incarnation == 1 or self.scene.boot > 1
        self.is_part, self.incarnation = True, incarnation
        self._connect()

    def _connect(self) -> None:
        self.line = self.scene.listen(self.name, self.incarnation)
        for key in sorted(self.open, key=lambda key: self.open[key].step):
            self._send(self.open[key])

    def _send(self, c: Contribution) -> None:
        c = self.open[c.fragment, c.number] = replace(c, incarnation=self.incarnation)
        self.scene.driver.complete_push(self.scene.begin(c), self._acknowledged)

    def _acknowledged(self, error: DilocoError | None) -> None:
        assert error is None

    def _hear(self, standing: Standing) -> None:
        assert all(new >= old for new, old in zip(standing.versions, self.versions, strict=True))
        self.versions = list(standing.versions)
        for verdict in standing.verdicts:
            if self.open.pop((verdict.fragment, verdict.number), None) is not None:
                assert verdict.reason is None
                self.merged.append((verdict.fragment, verdict.number))
