"""A run in one process and in virtual time, without its learners: what they live in, and the syncer's part."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from diloco.core.actions import (
    Evict,
    MergeRound,
    PersistRecord,
    PersistVersion,
    Publish,
    Reject,
    Tell,
    WakeAt,
)
from diloco.core.contribution import Contribution
from diloco.core.fragments import Layout
from diloco.core.held import Closed, HeldFragment, close, published_mean
from diloco.core.members import Deadlines
from diloco.core.merges import encoded_of
from diloco.core.method import Method
from diloco.core.syncer import SyncerCore
from diloco.core.update import Update
from diloco.exchange.base import Arrived, CallForWork, Event, Model, Rejected
from diloco.exchange.delivery import Alarm, Delivery, Fault, Faults, Links
from diloco.exchange.virtual import StepSeconds, VirtualTime, Watch
from diloco.watching import only_watching

_NEVER = Deadlines(lost_floor_s=math.inf, lost_cap_s=math.inf, stalled_floor_s=math.inf, stalled_cap_s=math.inf)
"""A learner's silence means nothing between two boundaries; who is killed is given up by `Run`."""


class Witness(Protocol):
    """Is told what the syncer's part of a run does. `diloco.syncer.journal.Journal` is one."""

    def initialised(
        self, learner: str, source: str, layout: Layout, step: int, tokens: int, num_static_bytes: int
    ) -> None:
        """The run has its model."""
        return

    def joined(self, learner: str, incarnation: int, step: int) -> None:
        """A learner is live."""
        return

    def left(self, learner: str, incarnation: int, tokens: int) -> None:
        """It said goodbye."""
        return

    def evicted(self, action: Evict) -> None:
        """It was given up."""
        return

    def contributed(self, c: Contribution, num_bytes: int, staleness: int) -> None:
        """A contribution was accepted."""
        return

    def rejected(self, action: Reject) -> None:
        """A contribution will not be merged."""
        return

    def merged(self, action: MergeRound, update: Update, members: Collection[str], merge_s: float) -> None:
        """The outer step was taken."""
        return

    def published(self, update: Update, num_live: int, num_bytes: int, *, merge_s: float, persist_s: float) -> None:
        """A version is visible."""
        return


class Nobody(Witness):
    """Keeps nothing."""


@dataclass(frozen=True)
class World:
    """What the learners of a run in virtual time live in.

    Attributes:
        names: of the learners; merges go in the order of names.
        step_s: seconds that an inner step takes.
        starts_s: when each learner starts. The first one's parameters initialise the run.
        links: the network between learners and syncer; None: everything arrives at once.
        faults: who is killed, and when; deadlines are those of a syncer that measures step times (`Deadlines`).
        witness: is told what the syncer's part does.
        watch: is told what takes time.
    """

    names: Sequence[str]
    step_s: StepSeconds
    starts_s: Sequence[float]
    links: Links | None = None
    faults: Sequence[Fault] = ()
    witness: Witness = Nobody()
    watch: Watch = lambda *_: None


class End(Protocol):
    """A learner's end of a run."""

    incarnation: int
    has_model: bool
    initialises: bool
    awaits_run: bool

    def receive(self, arrived: Arrived, num_bytes: int) -> None:
        """An update has come."""


def model_bytes(tensors: Sequence[Tensor], static: Mapping[str, Tensor]) -> int:
    """As they go over the network."""
    return sum(each.numel() * each.element_size() for each in (*tensors, *static.values()))


class Run:
    """The syncer's part, in the same process: its state machine, the global fragments and everybody's mail. For one run.

    Attributes:
        time: who goes on when; `time.now` is the time.
    """

    def __init__(self, world: World) -> None:
        self.names, self.starts_s = tuple(world.names), world.starts_s
        self.witness = only_watching(world.witness)
        self.indices = {name: index for index, name in enumerate(self.names)}
        self.mail: list[deque[Event]] = [deque() for _ in self.names]
        self.delivery = Delivery(world.links, lambda: self.time.now, world.watch)
        self.alarm = Alarm(self._tick)
        self.back_s: list[float | None] = [None] * len(self.names)
        self.ends: list[End | None] = [None] * len(self.names)
        """Each learner's end of the run, while it is alive."""
        self.dead: set[int] = set()
        sources = (self.delivery, Faults(world.faults, self._lose), self.alarm)
        self.time = VirtualTime(world.starts_s, world.step_s, self._has_news, sources, world.watch)
        self.first = ""
        self.initialiser: int | None = None
        """Who is sending the model that the run begins with."""
        self.core: SyncerCore | None = None
        self.method: Method
        self.layout: Layout
        self.static: Mapping[str, Tensor] = {}
        self.fragments: list[HeldFragment] = []
        self.payloads: dict[Contribution, Tensor] = {}
        self.closed: dict[int, Closed] = {}
        """Merged and not yet published, by fragment."""
        self.initial_step = self.initial_tokens = 0
        self.began_s = 0.0
        self.has_trained = False
        """Whether any learner has taken a step in the run."""

    def _has_news(self, index: int) -> bool:
        end = self.ends[index]
        return bool(self.mail[index]) or (
            end is not None
            and (end.has_model or (end.awaits_run and (self.core is not None or self.may_initialise(end))))
        )

    def may_initialise(self, end: End) -> bool:
        """Whether the run may begin with this learner's model: nobody else's is there, or on its way."""
        return self.core is None and self.initialiser is None and end.initialises

    def start(self, name: str, layout: Layout, method: Method, model: Model, step: int, tokens: int) -> None:
        """Once, by the learner that comes first, when its model is here. Those who have started by then are members from the beginning."""
        self.first, self.method, self.layout, self.static = name, method, layout, model.static
        self.fragments = [HeldFragment.first(method, f, theta) for f, theta in enumerate(model.fragments)]
        self.initial_step, self.initial_tokens, self.began_s = step, tokens, self.time.now
        self.core = SyncerCore(
            method.rules(len(self.fragments)), [0] * len(self.fragments), deadlines=_NEVER, step=step
        )
        num_static_bytes = sum(each.numel() * each.element_size() for each in model.static.values())
        self.witness.initialised(name, "learner", layout, step, tokens, num_static_bytes)
        for each, start in zip(self.names, self.starts_s, strict=True):
            if start <= self.time.now and self.indices[each] not in self.dead:
                incarnation, _ = self.core.joined(self.time.now, each, ready=True)
                self.witness.joined(each, incarnation, step)

    @property
    def num_model_bytes(self) -> int:
        """Of the global model as a joiner fetches it."""
        newest = self.newest
        return model_bytes([each for held in newest for each in (held.theta, *held.outer_state.values())], self.static)

    @property
    def newest(self) -> tuple[HeldFragment, ...]:
        """The global model, as learners hold it."""
        steps = self.method.outer_at == "learners"
        return tuple(replace(held, residual=None) if steps else held.bare for held in self.fragments)

    def join(self, index: int, *, again: bool) -> int:
        """This learner's incarnation; a later one joins here."""
        assert self.core is not None
        name = self.names[index]
        if again or name not in self.core.members:
            incarnation, actions = self.core.joined(self.time.now, name)
            self.witness.joined(name, incarnation, self.core.step)
            self.carry_out(actions)
        return self.core.members[name].incarnation

    def restore(self, rounds: Mapping[str, Any], fragments: Sequence[Mapping[str, Any]]) -> None:
        """Take the run back to a checkpoint: its rounds, and for each fragment "version", "theta", "outer" and "residual"."""
        assert self.core is not None
        self.core.rounds.restore(rounds)
        for f, saved in enumerate(fragments):
            self.core.fragments[f].version = saved["version"]
            self.fragments[f] = HeldFragment.from_state_dict(f, saved)

    def stands_at(self, fragments: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the run's model is a checkpoint's, in version and bits."""
        assert self.core is not None
        return all(
            held.version == saved["version"] and torch.equal(held.theta, saved["theta"])
            for held, saved in zip(self.fragments, fragments, strict=True)
        )

    def _lose(self, fault: Fault) -> None:
        """A learner is killed, which breaks its connection; the syncer gives it up when its deadline is over, unless it is back by then."""
        index, end = fault.learner, self.ends[fault.learner]
        self.time.kill(index)
        if self.initialiser == index:
            self.initialiser = None
        self.back_s[index] = fault.back_s
        self.delivery.forget(index)
        self.mail[index].clear()
        self.ends[index] = None
        self.dead.add(index)
        if end is not None:
            end.incarnation = 0  # it can say nothing more
        name = self.names[index]
        if self.core is None or (member := self.core.members.get(name)) is None:
            return
        incarnation, away_s = member.incarnation, Deadlines().reconnect_after_s(member.step_s)

        def give_up() -> None:
            assert self.core is not None
            member = self.core.members.get(name)
            if member is not None and member.incarnation == incarnation:
                reason = f"its connection broke {away_s:.1f} s ago and it did not come back"
                self.witness.evicted(Evict(name, incarnation, reason, replaced=False))
                self.carry_out(self.core.left(self.time.now, name, incarnation, tokens=member.tokens))

        self.delivery.later(self.time.now + away_s, give_up)

    def finish(self) -> None:
        """Everybody is gone: what they sent last still arrives."""
        while self.delivery.next_s < math.inf:
            self.time.now = max(self.time.now, self.delivery.next_s)
            self.delivery.happen(self.time.now)

    def carry_out(self, actions: Sequence[object]) -> None:
        """What the state machine wants done; merging and storing take no time."""
        assert self.core is not None
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case MergeRound() as merge:
                    todo.extend(self._merge(merge))
                case PersistVersion(fragment=fragment):
                    todo.extend(self.core.stored(self.time.now, fragment, self.core.saved(fragment).serial))
                case PersistRecord():
                    todo.extend(self.core.recorded(self.time.now, self.core.saved().serial))
                case Publish(fragment=fragment):
                    self._publish(fragment)
                case Tell(learners=learners):
                    for learner in learners:
                        self._tell(learner)
                case Reject(contribution=c) as reject:
                    self.payloads.pop(c, None)
                    self.witness.rejected(reject)
                case WakeAt(at=at):
                    self.alarm.next_s = at
                case Evict() as evict:
                    self.witness.evicted(evict)
                case _:
                    pass

    def _tell(self, learner: str) -> None:
        """A learner's standing: calls, and rejections."""
        assert self.core is not None
        index = self.indices[learner]
        end = self.ends[index]
        if end is None or learner not in self.core.members:
            return
        standing, incarnation = self.core.standing(learner), self.core.members[learner].incarnation
        if incarnation != end.incarnation:
            return
        news: list[Event] = [CallForWork(fragment, version) for fragment, version in standing.calls]
        news += [Rejected(it.fragment, it.number, it.reason) for it in standing.verdicts if it.reason is not None]
        self.delivery.tell(index, lambda: self.mail[index].extend(news))

    def _tick(self) -> None:
        assert self.core is not None
        self.carry_out(self.core.tick(self.time.now))

    def _merge(self, merge: MergeRound) -> Sequence[object]:
        assert self.core is not None
        f = merge.fragment
        payloads = [self.payloads.pop(c) for c in merge.contributions]
        encoded = encoded_of(merge.contributions, merge.weights, payloads, merge.round)
        closed = self.closed[f] = close(
            self.method, self.fragments[f], encoded, self.layout.fragments[f].tensors, merge.scale
        )
        self.witness.merged(merge, closed.update, merge.members, 0.0)
        return self.core.merged(self.time.now, f, closed.refused)

    def _publish(self, f: int) -> None:
        assert self.core is not None
        closed = self.closed.pop(f)
        self.fragments[f], update, new = closed.held, closed.update, closed.held.bare
        mean = published_mean(self.method, closed.payload, new.theta.numel())
        num_bytes = closed.payload.numel()
        self.witness.published(update, len(self.core.members), num_bytes, merge_s=0.0, persist_s=0.0)
        for learner in self.core.members:
            self._tell(learner)
            verdicts = self.core.verdicts(learner, f, update.version)
            merged = max((it.number for it in verdicts if it.reason is None), default=0)
            self._send(self.indices[learner], Arrived(update, new, merged, mean), num_bytes)

    def _send(self, index: int, arrived: Arrived, num_bytes: int) -> None:
        """A notice, the learner's request, and what it asked for."""
        end, delivery = self.ends[index], self.delivery
        if end is None or not end.incarnation:
            return

        def fetch() -> None:
            delivery.carry(index, "down", num_bytes, lambda: end.receive(arrived, num_bytes))

        delivery.tell(index, lambda: delivery.tell(index, fetch))
