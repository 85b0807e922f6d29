"""Learners, links and a syncer in virtual time: the two state machines without tensors, and everything that goes wrong between them.

A queue of (time, what happens) is the whole world. Links deliver in order but take their time; learners have their own speeds, are
killed, come back, lose their connection; the syncer takes time to merge and to store, and crashes. All of it is seeded.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from diloco.core.contribution import Contribution
from diloco.core.in_flight import Send
from diloco.core.learner import LearnerCore, mode_of
from diloco.core.ledger import Ledger
from diloco.core.members import Deadlines, Member
from diloco.core.method import Method
from diloco.core.rounds import Acknowledge, Action, Call, Evict, Merge, Publish, Reject, Store, WakeAt
from diloco.core.status import status_of
from diloco.core.syncer import SyncerCore
from diloco.errors import StaleIncarnationError

DEADLINES = Deadlines(lost_floor_s=6.0, stalled_floor_s=60.0)
HEARTBEAT_S = 1.0
LATENCY_S = 0.05


@dataclass(frozen=True)
class Weather:
    """How fast things are, and how often they break (events per learner, or syncer, and virtual second)."""

    step_s: tuple[float, float] = (0.05, 0.3)
    upload_s: tuple[float, float] = (0.05, 1.0)
    download_s: tuple[float, float] = (0.05, 1.0)
    model_s: tuple[float, float] = (0.5, 8.0)
    merge_s: tuple[float, float] = (0.0, 0.3)
    kills: float = 0.0
    blips: float = 0.0
    syncer_crashes: float = 0.0
    outliers: float = 0.0  # of contributions, by chance


@dataclass
class Published:
    """One version as everybody may see it."""

    version: int
    merged_rounds: dict[
        str, tuple[int, int]
    ]  # by learner: incarnation and newest round that is in it or an earlier one


@dataclass
class Node:
    """One learner's process, and what its exchange remembers."""

    name: str
    speed_s: float
    core: LearnerCore | None = None
    incarnation: int = 0
    life: int = 0  # a process that was killed does nothing any more
    connected: bool = True
    waiting: bool = False
    done: bool = False
    known: list[int] = field(default_factory=list)  # newest version asked for, by fragment
    offered: dict[tuple[int, int], Contribution] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)
    up_free_at: float = 0.0
    down_free_at: float = 0.0


class World:
    """One run to its end; `run` raises AssertionError where anything that must hold does not."""

    def __init__(
        self,
        method: Method,
        *,
        num_fragments: int,
        learners: int,
        steps: int,
        seed: int = 0,
        weather: Weather = Weather(),
        starts_s: Sequence[float] = (),
        limit_s: float = 3000.0,
    ) -> None:
        self.method, self.num_fragments, self.steps, self.weather, self.limit_s = (
            method,
            num_fragments,
            steps,
            weather,
            limit_s,
        )
        self.random = random.Random(seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.merges: list[Merge] = []
        self.kills = self.crashes = self.evictions = self.rejections = 0
        self.rejected: dict[str, int] = {}
        self.history: list[list[Published]] = [[] for _ in range(num_fragments)]
        self.syncer: SyncerCore | None = SyncerCore(method, [0] * num_fragments, deadlines=DEADLINES)
        self.syncer_life = 0
        self.tick_at = 0.0
        self.disk = self._saved(deepcopy(self.syncer.books.ledgers))
        self.nodes = {f"learner-{i}": Node(f"learner-{i}", self._between(weather.step_s)) for i in range(learners)}
        for i, node in enumerate(self.nodes.values()):
            self._in(starts_s[i] if i < len(starts_s) else 0.0, lambda node=node: self._start(node))
            self._plan(weather.kills, lambda node=node: self._kill(node))
            self._plan(weather.blips, lambda node=node: self._blip(node))
        self._plan(weather.syncer_crashes, self._crash)

    # --- time -------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until every learner is done."""
        while not all(node.done for node in self.nodes.values()):
            assert self.queue, "nothing will ever happen again"
            self.now, _, happens = heapq.heappop(self.queue)
            assert self.now < self.limit_s, f"stuck: {self.report()}"
            happens()
        if self.syncer is not None:
            self.check_books()

    def at(self, seconds: float, happens: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self._in(seconds - self.now, happens)

    def report(self) -> object:
        """Where everybody is, for a failure's message."""
        status = status_of(self.syncer, self.now) if self.syncer else "the syncer is down"
        return status, {n.name: (n.core.step if n.core else None, n.waiting, n.done) for n in self.nodes.values()}

    def _in(self, seconds: float, happens: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + seconds, self.count, happens))

    def _between(self, span: tuple[float, float]) -> float:
        return self.random.uniform(*span)

    def _plan(self, rate: float, happens: Callable[[], None]) -> None:
        """Again and again, at random times, for the first two thirds of a run."""
        if rate == 0.0 or self.now > 200:
            return

        def once() -> None:
            happens()
            self._plan(rate, happens)

        self._in(self.random.expovariate(rate), once)

    # --- a learner's process ----------------------------------------------------------------------------------------------

    def _start(self, node: Node) -> None:
        node.life += 1
        node.core, node.waiting, node.connected = None, False, True
        self._join(node, None)
        self._beat(node, node.life)

    def _join(self, node: Node, core: LearnerCore | None) -> None:
        """A new incarnation: fetch the model, then train on. While it is fetched, heartbeats go on."""
        if self.syncer is None or not node.connected:
            self._live(node, 0.5, lambda: self._join(node, core))
            return
        node.offered.clear()
        node.waiting = False
        node.incarnation, actions = self.syncer.joined(self.now, node.name)
        incarnation = node.incarnation
        self._save_roster()
        self._carry_out(actions)
        versions = [fragment.version for fragment in self.syncer.fragments]
        node.known = list(versions)
        stale_step = self.syncer.step  # as unlucky as can be: the run goes on while the model is fetched

        def fetched() -> None:
            if node.incarnation != incarnation:
                return
            if core is None:
                node.core = LearnerCore(
                    self.method.schedule(self.num_fragments), versions, wait=self.method.wait,
                    keeps_pending=self.method.adopt.keeps_pending, step=stale_step, mode=mode_of(self.method),
                )  # fmt: skip
            else:
                core.rejoined(versions, stale_step)
                node.core = core
            self._train(node)

        node.core = None
        self._live(node, self._between(self.weather.model_s), fetched)

    def _live(self, node: Node, seconds: float, happens: Callable[[], None]) -> None:
        """If the process still lives then."""
        life = node.life
        self._in(seconds, lambda: happens() if node.life == life and not node.done else None)

    def _train(self, node: Node) -> None:
        incarnation = node.incarnation
        taken_s = node.speed_s * self.random.uniform(0.8, 1.3)
        self._live(node, taken_s, lambda: self._stepped(node) if node.incarnation == incarnation else None)

    def _stepped(self, node: Node) -> None:
        core = node.core
        if core is None:  # given up meanwhile, and joining again
            return
        for send in core.stepped(self.random.randint(1, 100)):
            self._send(node, core, send)
        calls, node.calls = node.calls, []
        for fragment in calls:
            if (answer := core.called(fragment)) is not None:
                self._send(node, core, answer)
        if core.mode == "called":
            self._say(node)  # every step is reported
        self._settle(node)

    def _send(self, node: Node, core: LearnerCore, send: Send) -> None:
        c = Contribution(
            node.name, node.incarnation, send.fragment, send.round, send.base, send.tokens, send.steps, core.tokens,
            send.discarded, step=core.step,
        )  # fmt: skip
        node.offered[c.fragment, c.round] = c
        self._upload(node, c)

    def _settle(self, node: Node) -> None:
        core = node.core
        assert core is not None
        first = node.waiting is False
        node.waiting = bool(core.waiting())
        if node.waiting:
            if first:
                self._say(node)
            return
        for fragment, version in core.adoptions():
            held = core.versions[fragment]
            assert version > held
            flights = [f.round for f in core.books[fragment].flights]
            core.adopted(fragment, version)
            if core.mode == "scheduled":
                assert version >= [*flights, held][0] + 1
        self._check_learner(node)
        if core.step >= self.steps:
            self._leave(node)
        else:
            self._train(node)

    def _leave(self, node: Node) -> None:
        """Once the syncer hears it; one that was given up meanwhile joins again first."""
        if node.core is None:
            return
        if self.syncer is None or not node.connected:
            self._live(node, 0.5, lambda: self._leave(node))
            return
        if node.up_free_at > self.now:  # what is on its way arrives first
            self._live(node, node.up_free_at - self.now + 2 * LATENCY_S, lambda: self._leave(node))
            return
        try:
            self._carry_out(self.syncer.left(self.now, node.name, node.incarnation, tokens=node.core.tokens))
            self._save_roster()
        except StaleIncarnationError:
            pass
        node.done = True

    def _take(self, node: Node, incarnation: int, event: Callable[[LearnerCore], object]) -> None:
        """News for this incarnation."""
        if node.incarnation != incarnation or node.done:
            return
        if node.core is None:  # it is still fetching the model: the news waits
            self._live(node, 0.2, lambda: self._take(node, incarnation, event))
            return
        event(node.core)
        if node.waiting:
            self._settle(node)

    # --- the links --------------------------------------------------------------------------------------------------------

    def _upload(self, node: Node, c: Contribution) -> None:
        """In order, one at a time; lost with the connection, and offered again when it is back."""
        node.up_free_at = max(node.up_free_at, self.now) + self._between(self.weather.upload_s)
        self._live(node, node.up_free_at - self.now, lambda: self._arrives(node, c))

    def _arrives(self, node: Node, c: Contribution) -> None:
        if not node.connected or self.syncer is None or c.incarnation != node.incarnation:
            return
        if (c.fragment, c.round) not in node.offered:
            return
        try:
            answer, *actions = self.syncer.contributed(self.now, c)
        except StaleIncarnationError:
            self._in(LATENCY_S, lambda: self._given_up(node, c.incarnation))
            return
        if self.random.random() > 0.05 or self.weather.blips == 0.0:  # else the answer is lost, with the connection
            if isinstance(answer, Reject):
                self._rejected(answer)
            else:
                assert isinstance(answer, Acknowledge)
        else:
            self._blip(node)
        self._carry_out(actions)
        self._check_syncer()

    def _rejected(self, reject: Reject) -> None:
        c = reject.contribution
        node = self.nodes[c.learner]
        self.rejected[reject.reason] = self.rejected.get(reject.reason, 0) + 1

        def told() -> None:
            if node.incarnation == c.incarnation:
                node.offered.pop((c.fragment, c.round), None)
            self._take(node, c.incarnation, lambda core: core.rejected(c.fragment, c.round, reject.reason))

        self._live(node, LATENCY_S, told)

    def _download(self, node: Node, fragment: int) -> None:
        """Every version that the node has not asked for, in order."""
        incarnation = node.incarnation
        for published in self.history[fragment]:
            if published.version > node.known[fragment]:
                node.known[fragment] = published.version
                node.down_free_at = max(node.down_free_at, self.now) + self._between(self.weather.download_s)
                merged_in, merged = published.merged_rounds.get(node.name, (0, -1))
                merged = merged if merged_in == incarnation else -1
                self._live(
                    node, node.down_free_at - self.now,
                    lambda v=published.version, merged=merged: self._downloaded(node, incarnation, fragment, v, merged),
                )  # fmt: skip

    def _downloaded(self, node: Node, incarnation: int, fragment: int, version: int, merged: int) -> None:
        if node.incarnation == incarnation:
            passed = version if self.method.quorum.scheduled else merged + 1
            for key in [k for k in node.offered if k[0] == fragment and k[1] < passed]:
                del node.offered[key]
        self._take(node, incarnation, lambda core: core.received(fragment, version, merged))

    def _beat(self, node: Node, life: int) -> None:
        if node.life != life or node.done:
            return
        self._say(node)
        self._in(HEARTBEAT_S, lambda: self._beat(node, life))

    def _say(self, node: Node) -> None:
        """A heartbeat, as of now; it arrives a little later."""
        core, incarnation = node.core, node.incarnation
        step, tokens = (core.step, core.tokens) if core else (0, 0)
        waiting, speed_s = node.waiting, node.speed_s

        def arrives() -> None:
            if self.syncer is None or not node.connected or node.incarnation != incarnation:
                return
            try:
                actions = self.syncer.heartbeat(
                    self.now, node.name, incarnation, step=step, tokens=tokens, step_s=speed_s, waiting=waiting
                )
            except StaleIncarnationError:
                self._given_up(node, incarnation)
                return
            self._carry_out(actions)
            for fragment in range(self.num_fragments):  # a notice may have been lost
                self._download(node, fragment)

        self._live(node, LATENCY_S, arrives)

    def _given_up(self, node: Node, incarnation: int) -> None:
        if node.incarnation == incarnation and not node.done and node.core is not None:
            core, node.core = node.core, None
            self._join(node, core)

    # --- what breaks ------------------------------------------------------------------------------------------------------

    def _kill(self, node: Node) -> None:
        if node.done or node.life == 0:
            return
        self.kills += 1
        node.life += 1
        node.core, node.waiting = None, False
        node.offered.clear()
        self.hang_up(node)
        life = node.life
        self._in(self._between((0.2, 30.0)), lambda: self._start(node) if node.life == life else None)

    def _blip(self, node: Node) -> None:
        if node.done or not node.connected:
            return
        node.connected = False
        self.hang_up(node)

        def back() -> None:
            node.connected = True
            self._live(node, 0.0, lambda: self._reconnected(node))

        self._in(self._between((0.1, 9.0)), back)

    def hang_up(self, node: Node) -> None:
        if self.syncer is not None and self.random.random() < 0.7:  # else the syncer does not notice
            self._carry_out(self.syncer.disconnected(self.now, node.name, node.incarnation))

    def _reconnected(self, node: Node) -> None:
        self._say(node)
        for c in list(node.offered.values()):
            self._upload(node, c)

    def _crash(self) -> None:
        if self.syncer is None:
            return
        self.crashes += 1
        self.syncer, self.syncer_life = None, self.syncer_life + 1
        self._in(self._between((0.5, 10.0)), self._restart)

    def _restart(self) -> None:
        saved = deepcopy(self.disk)
        roster = [
            Member(m.learner, m.incarnation, m.step, self.now, self.now, connected=False, ready=True, tokens=m.tokens)
            for m in saved["roster"]
        ]
        self.syncer = SyncerCore(
            self.method, saved["versions"], deadlines=DEADLINES, roster=roster, incarnations=saved["incarnations"],
            ledgers=saved["ledgers"], step=saved["step"], round_steps=saved["round_steps"],
            clock=saved["clock"], merged_rounds=saved["merged_rounds"],
        )  # fmt: skip
        self.tick_at = 0.0
        self._carry_out(self.syncer.tick(self.now))
        for node in self.nodes.values():
            if node.connected and node.life and not node.done:
                self._live(node, self._between((0.0, 3.0)), lambda node=node: self._reconnected(node))

    # --- the syncer's hands -----------------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        life = self.syncer_life

        def later(seconds: float, happens: Callable[[], None]) -> None:
            self._in(seconds, lambda: happens() if self.syncer is not None and self.syncer_life == life else None)

        for action in actions:
            match action:
                case Merge():
                    self._check_merge(action)
                    later(self._between(self.weather.merge_s), lambda f=action.fragment: self._merged(f))
                case Store(fragment=fragment):
                    later(self._between(self.weather.merge_s), lambda f=fragment: self._stored(f))
                case Publish():
                    for node in self.nodes.values():
                        if node.connected and node.life and node.known and not node.done:
                            self._download(node, action.fragment)
                case Call(fragment=fragment, learners=learners):
                    for node in (self.nodes[learner] for learner in learners):
                        if node.connected and node.life and not node.done:
                            self._live(node, LATENCY_S, lambda n=node, f=fragment: n.calls.append(f))
                case Reject():
                    self._rejected(action)
                case Evict():
                    self.evictions += 1
                    self._save_roster()
                    node = self.nodes[action.learner]
                    if not action.replaced and node.connected:
                        self._live(node, LATENCY_S, lambda n=node, i=action.incarnation: self._given_up(n, i))
                case WakeAt(at=at):
                    if not self.now < self.tick_at <= at:
                        self.tick_at = at
                        later(max(0.0, at - self.now), self._tick)
                case Acknowledge():
                    raise AssertionError("an acknowledgement is the first answer to a contribution and nothing else")

    def _tick(self) -> None:
        assert self.syncer is not None
        self._carry_out(self.syncer.tick(self.now))

    def _merged(self, fragment: int) -> None:
        assert self.syncer is not None
        state = self.syncer.fragments[fragment]
        brought = sorted(state.rounds[state.version].contributions)
        refused = [
            learner for learner in brought[1:] if self.weather.outliers and self.random.random() < self.weather.outliers
        ]
        self._carry_out(self.syncer.merged(fragment, refused))
        self._check_syncer()

    def _stored(self, fragment: int) -> None:
        """Durable, then visible."""
        syncer = self.syncer
        assert syncer is not None
        state = syncer.fragments[fragment]
        assert state.phase == "storing"
        actions = syncer.stored(self.now, fragment)
        publish = next(action for action in actions if isinstance(action, Publish))
        assert publish.version == len(self.history[fragment]) + 1, "versions go up by one"
        self.disk = self._saved(syncer.books.durable_ledgers())
        merged_rounds = {learner: rounds[fragment] for learner, rounds in syncer.books.merged_rounds.items()}
        self.history[fragment].append(Published(publish.version, merged_rounds))
        self._carry_out(actions)
        self._check_syncer()

    def _saved(self, ledgers: dict[str, list[Ledger]]) -> dict[str, object]:
        syncer = self.syncer
        assert syncer is not None
        return deepcopy({
            "versions": [f.version for f in syncer.fragments], "ledgers": ledgers, "step": syncer.step,
            "round_steps": [f.step for f in syncer.fragments], "roster": list(syncer.members.values()),
            "incarnations": syncer.incarnations, "clock": syncer.clock, "merged_rounds": syncer.books.merged_rounds,
        })  # fmt: skip

    def _save_roster(self) -> None:
        assert self.syncer is not None
        new = self._saved(self.syncer.books.durable_ledgers())
        self.disk = {**self.disk, **{key: new[key] for key in ("ledgers", "roster", "incarnations")}}

    # --- what must hold ---------------------------------------------------------------------------------------------------

    def _check_merge(self, merge: Merge) -> None:
        assert self.syncer is not None
        names = [c.learner for c in merge.contributions]
        assert names == sorted(names)
        assert len(merge.weights) == len(set(names))
        if self.method.quorum.scheduled:
            assert len(names) == len(set(names)) >= self.method.quorum.at_least
            assert all(c.round == merge.round for c in merge.contributions)
        else:
            assert 0 < merge.scale <= 1
            assert all(c.base <= merge.round for c in merge.contributions)
            assert len(names) == 1 or not self.method.outer.one_at_a_time
        self.merges.append(merge)

    def _check_learner(self, node: Node) -> None:
        assert node.core is not None
        for book in node.core.books:
            in_flight = sum(flight.tokens for flight in book.flights if not flight.listed)
            assert book.ledger.trained == node.core.tokens
            assert book.ledger.pending == book.pending_tokens + in_flight
            assert book.ledger.pending >= 0

    def _check_syncer(self) -> None:
        assert self.syncer is not None
        for learner, books in self.syncer.books.ledgers.items():
            for fragment, ledger in enumerate(books):
                assert ledger.pending >= self.syncer.books.acknowledged(learner, fragment), (learner, fragment, ledger)
                assert min(ledger.merged, ledger.lost, *ledger.discarded.values(), 0) == 0
                if learner not in self.syncer.members:
                    assert ledger.pending == self.syncer.books.acknowledged(learner, fragment)

    def check_books(self) -> None:
        """After the last goodbye every token is merged, discarded or lost, or acknowledged and not merged yet."""
        self._check_syncer()

    def check_agreement(self) -> None:
        """Where nothing went wrong, a learner's own books and the syncer's say the same; at the end the rest is lost with it."""
        assert self.syncer is not None
        for node in self.nodes.values():
            assert node.core is not None
            for fragment, theirs in enumerate(self.syncer.books.ledgers[node.name]):
                book = node.core.books[fragment]
                state = self.syncer.fragments[fragment]
                rounds = [r for n, r in state.rounds.items() if n != state.version or state.phase != "storing"]
                held = [c for r in rounds for c in r.everything if c.learner == node.name]
                given_up = sum(c.accounted - c.tokens for c in held) + book.overwritten
                assert theirs.trained == book.ledger.trained == node.core.tokens
                assert theirs.merged + sum(c.tokens for c in held) == book.ledger.merged + sum(
                    flight.tokens for flight in book.flights if not flight.listed
                )
                assert sum(theirs.discarded.values()) + given_up == sum(book.ledger.discarded.values())
                assert theirs.pending == sum(c.accounted for c in held)
