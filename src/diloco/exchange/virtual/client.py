"""A learner's end of a syncer in virtual time: executes the actions of `SessionCore`, over any wire."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from diloco.core.global_fragment import AppliedUpdate, GlobalFragment
from diloco.core.layout import Layout
from diloco.core.update import Update
from diloco.errors import DilocoError, UnreachableError
from diloco.exchange.base import Arrived
from diloco.exchange.virtual.syncer import Replicas, SimulatedDriver, SyncerProcess
from diloco.protocol.contribution import CallForWork, Contribution, Drained, Hold, Rejection, Settled, Standing
from diloco.protocol.leases import Ask, Grant
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Report
from diloco.protocol.session import requests
from diloco.protocol.session.session_core import SessionCore
from diloco.run.global_model import FragmentAnswer
from diloco.run.memory import MemorySlot
from diloco.run.ports import ClockPort, InitialModel
from diloco.run.uploads import Upload

log = logging.getLogger("diloco")

News = requests.TellStart | Arrived | CallForWork | Rejection | Grant | Drained | Hold | Settled | requests.Fail
"""The actions of `SessionCore` that its learner receives."""

_CONTROL = (requests.TimedCall, requests.Describe, requests.Watch)

Input = Callable[[float], Sequence[requests.SessionAction]]
"""An event of `SessionCore` as a function of the time."""

Reply = Callable[..., None]
"""Is called with the event of a request's answer, or a DilocoError, and with its size in bytes if that is not small."""


class Wire(Protocol):
    """The connections of one learner to its syncer, or to several. All messages of one call are lost together."""

    def up(self, call: requests.Request, num_bytes: int, arrive: Callable[[SyncerProcess], None]) -> None:
        """Send this many bytes to the syncer; `arrive` is called with the process that receives them."""

    def down(self, call: requests.Request, num_bytes: int, arrive: Callable[[], None]) -> None:
        """Send this many bytes from the syncer; `arrive` is called when they have arrived."""

    def on_break(self, call: requests.Request, broken: Callable[[], None]) -> None:
        """Call `broken` when the syncer notices that the connection of the call is broken."""

    def dial(self, address: int) -> None:
        """Send calls other than control ones to the syncer at this address from now on; those in flight to another
        address fail."""

    def hang_up(self, connection: int) -> None:
        """Close a control connection."""

    def ended(self, call: requests.Request) -> None:
        """The call is over at the learner."""


@dataclass(eq=False)
class _Open:
    """A call in flight. `deadline_s`: when it fails without an answer."""

    call: requests.Request
    deadline_s: float


class SessionClient:
    """One process's end of a run.

    Arguments:
        core: its state machine.
        wire: its connections.
        clock: makes its clock, from the function to call when it rings.
        layout: of its model.
        replicas: the decoded versions, shared by the learners of a run.
        initial: returns this learner's model for the run.
        ready: whether rounds wait for its first incarnation from the start (`SyncerCore.joined`).
        overlap: the learner's own τ; None: the method's.
        held: the fragments that it holds (`SyncerCore.joined`), as its state machine has them.
        is_dealt: whether it was dealt its groups of experts.
        on_news: is called with each action for the learner, in order.

    Attributes:
        held: the newest received version of each fragment; None: nothing yet, or it does not hold the fragment.
        static: the tensors that training does not change, as bytes.
        num_bytes: payload bytes by kind.
        is_closed: whether it has left the run.
        on_closed: called when it has.
    """

    def __init__(
        self, core: SessionCore, wire: Wire, clock: Callable[[Callable[[], None]], ClockPort], layout: Layout,
        replicas: Replicas,
        *, initial: Callable[[], InitialModel[GlobalFragment]], ready: bool, overlap: int | None = None,
        held: Collection[int] | None = None, is_dealt: bool = False, on_news: Callable[[News], None],
    ) -> None:  # fmt: skip
        self.core = core
        self.held: list[GlobalFragment | None] = [None] * len(layout.fragments)
        self.static = b""
        self.num_bytes: Counter[str] = Counter()
        self.is_closed = False
        self.on_closed: Callable[[], object] = lambda: None
        self._wire, self._layout, self._replicas = wire, layout, replicas
        self._clock = clock(self._wake)
        self._initial, self._ready, self._overlap, self._on_news = initial, ready, overlap, on_news
        self._fragments, self._is_dealt = None if held is None else tuple(sorted(held)), is_dealt
        self._payloads: dict[tuple[int, int, int], Tensor] = {}  # by incarnation, fragment and number
        self._open: list[_Open] = []
        self._hung_up: list[_Open] = []
        self._pushes: dict[_Open, tuple[SimulatedDriver, Upload[MemorySlot]]] = {}  # in flight at the syncer
        self._last: tuple[Update, AppliedUpdate] | None = None  # of the last fetch

    # --- the learner, and time ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start to join the run."""
        self._do(self.core.begin(self._now))

    def offer(self, c: Contribution, payload: Tensor) -> None:
        """Send a contribution."""
        self._payloads[c.incarnation, c.fragment, c.number] = payload
        self._do(self.core.offered(self._now, c))

    def ask(self, incarnation: int, ask: Ask) -> None:
        """Request units of data."""
        self._do(self.core.asked(self._now, incarnation, ask))

    def report(self, incarnation: int, report: Report) -> None:
        """Set the learner's newest report."""
        self._do(self.core.report(self._now, incarnation, report))

    def restore(self, fragments: Sequence[GlobalFragment]) -> None:
        """Replace the fragments by those of a checkpoint to which the run has gone back."""
        its = range(len(fragments)) if self._fragments is None else self._fragments
        for index in its:
            self.held[index] = self._replicas.as_learners_hold(fragments[index])
        self.core.restored([each.version for each in fragments])

    def leave(self) -> None:
        """Leave the run once all contributions are sent."""
        self._do(self.core.leave(self._now))

    def lost(self, call: requests.Request, error: UnreachableError) -> None:
        """Fail a call whose connection is broken."""
        for each in [each for each in self._open if each.call is call]:
            self.finish(each, error)

    @property
    def _now(self) -> float:
        return self._clock.now_s()

    def _wake(self) -> None:
        for each in [each for each in self._open if each.deadline_s <= self._now]:
            self.finish(each, UnreachableError("the syncer did not answer in time; is the link up?"))
        self._do(self.core.tick(self._now))

    # --- actions ------------------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[requests.SessionAction]) -> None:
        for action in actions:
            match action:
                case requests.CloseConnection(connection=connection):
                    self._wire.hang_up(connection)
                    self._hung_up += [each for each in self._open if _connection_of(each.call) == connection]
                case requests.Drop(contribution=c):
                    self._payloads.pop((c.incarnation, c.fragment, c.number), None)
                case requests.Warn(text=text):
                    log.warning("%s", text)
                case requests.Close():
                    self.is_closed = True
                    self.on_closed()
                case requests.TellArrival(merged=merged):
                    assert self._last is not None
                    self._on_news(Arrived.of(*self._last, merged))
                case requests.Dial(address=address):
                    self._wire.dial(address)
                case (
                    requests.TellStart() | requests.Fail() | CallForWork() | Rejection() | Grant() | Drained() | Hold()
                    | Settled()
                ):  # fmt: skip
                    self._on_news(action)
                case _:
                    self._call(action)
        while self._hung_up:
            self.finish(self._hung_up.pop(0), UnreachableError("the connection was closed."))
        timeout_s = min((each.deadline_s for each in self._open), default=math.inf)
        self._clock.wake_at(math.inf if self.is_closed else min(timeout_s, self.core.wake_at))

    def _call(self, call: requests.Request) -> None:
        timeout_s = call.timeout_s if isinstance(call, requests.TimedCall) else math.inf
        open_ = _Open(call, self._now + timeout_s)
        self._open.append(open_)
        match call:
            case requests.Push():
                self._push(open_, call)
            case requests.Initialise():
                model = self._initial()
                num_bytes = len(model.static) + sum(4 * each.theta.numel() for each in model.fragments)
                self.num_bytes["joins"] += num_bytes
                self._ask(open_, partial(self._initialise, model), num_bytes)
            case _:
                self._ask(open_, lambda door, reply: self._request(door, open_, call, reply))

    def _ask(self, open_: _Open, request: Callable[[SyncerProcess, Reply], None], num_bytes: int = 0) -> None:
        """Send a request to the syncer, and its answer back."""

        def reply(answer: Input | DilocoError, num_bytes: int = 0) -> None:
            self._wire.down(open_.call, num_bytes, lambda: self.finish(open_, answer))

        def arrive(door: SyncerProcess) -> None:
            try:
                request(door, reply)
            except DilocoError as error:
                reply(error)

        self._wire.up(open_.call, num_bytes, arrive)

    def _initialise(self, model: InitialModel[GlobalFragment], door: SyncerProcess, reply: Reply) -> None:
        door.driver.initialise(model, lambda error: reply(error or self.core.initialised))

    def _request(self, door: SyncerProcess, open_: _Open, call: requests.Request, reply: Reply) -> None:
        """Handle a request that has arrived at the syncer."""
        core, driver, lineage = self.core, door.driver, door.driver.lineage
        match call:
            case requests.Describe():
                reply(partial(core.described, describe=call, lineage=lineage, initialised=driver.state.is_initialised))
            case requests.Join(claim=claim):
                ready, self._ready = self._ready and not claim.incarnation, False  # a learner that joins again is late
                driver.join(
                    claim,
                    self._layout,
                    lambda number: reply(partial(core.joined, join=call, lineage=driver.lineage, incarnation=number)),
                    ready=ready,
                    overlap=self._overlap,
                    held=self._fragments,
                    dealt=self._is_dealt,
                )
            case requests.Fetch(claim=claim, fragment=None):
                driver.core.check(claim.learner, claim.incarnation, claim.process)
                static = driver.state.model.static
                reply(partial(self._take, fetch=call, lineage=lineage, answer=static), len(static))
            case requests.Fetch(claim=claim, fragment=int(fragment), base=base):
                fetched = driver.fetch(fragment, base, claim)
                answer = partial(self._take, fetch=call, lineage=lineage, answer=fetched)
                reply(answer, self._replicas.num_bytes(fetched))
            case requests.Watch(claim=claim):
                stream = _Stream(self, self._wire, open_, call, lineage)
                driver.connected(claim, stream)
                self._wire.on_break(call, lambda: driver.disconnected(claim, stream))
            case requests.Beat(claim=claim, report=report):
                standing = driver.heartbeat(claim, report)
                is_suspended = door.is_suspended
                reply(partial(core.beaten, beat=call, lineage=lineage, standing=standing, is_suspended=is_suspended))
            case requests.Lease(claim=claim, ask=ask):
                driver.lease(claim, ask, lambda grant: reply(partial(core.leased, lease=call, grant=grant)))
            case requests.Leave(claim=claim, report=report):
                driver.leave(claim, report, partial(reply, core.left))

    def _push(self, open_: _Open, call: requests.Push) -> None:
        """Send the header of a push, then its payload; a push that is cut in between never becomes complete."""
        c = call.contribution
        payload = self._payloads[c.incarnation, c.fragment, c.number]
        self.num_bytes["contributions"] += payload.numel()

        def reply(error: DilocoError | None) -> None:
            self._wire.down(call, 0, lambda: self.finish(open_, error or partial(self.core.pushed, push=call)))

        def begin(door: SyncerProcess) -> None:
            try:
                driver = door.driver
                push = driver.begin_push(c, payload.numel(), boot=call.boot, process=call.claim.process)
                self._pushes[open_] = driver, push
            except DilocoError as error:
                reply(error)
            else:
                self._wire.on_break(call, cut)

        def cut() -> None:
            if (begun := self._pushes.pop(open_, None)) is not None:
                begun[0].cut_push(begun[1], received=payload.numel() // 2)

        def complete(door: SyncerProcess) -> None:
            begun = self._pushes.pop(open_, None)
            if begun is None:
                return
            if not door.serves or begun[0] is not door.driver:
                reply(UnreachableError("the syncer was started again."))
                return
            push = begun[1]
            push.slot.tensor = payload
            begun[0].complete_push(push, reply)

        self._wire.up(call, 0, begin)
        self._wire.up(call, payload.numel(), complete)

    # --- answers ------------------------------------------------------------------------------------------------------

    def finish(self, open_: _Open, answer: Input | DilocoError) -> None:
        """End a call with its answer or error."""
        if open_ not in self._open:
            return
        self._open.remove(open_)
        self._wire.ended(open_.call)
        if isinstance(answer, DilocoError):
            answer = partial(self.core.failed, request=open_.call, error=answer)
        self._do(answer(self._now))

    def _take(
        self, now: float, fetch: requests.Fetch, lineage: Lineage, answer: Any
    ) -> Sequence[requests.SessionAction]:  # fmt: skip
        if (distrust := self.core.distrusts(lineage)) is not None:
            return self.core.failed(now, fetch, distrust)
        kind = "joins" if fetch.joining else "updates"
        if fetch.fragment is None:
            self.static = answer
            self.num_bytes[kind] += len(answer)
            return self.core.fetched(now, fetch, lineage, 0)
        fetched: FragmentAnswer[GlobalFragment, Tensor] = answer
        self.num_bytes[kind] += self._replicas.num_bytes(fetched)
        try:
            advanced = self._replicas.fetched(self.held[fetch.fragment], fetched)
        except DilocoError as error:
            return self.core.failed(now, fetch, error)
        self.held[fetch.fragment] = advanced.held
        self._last = fetched.update, advanced
        return self.core.fetched(now, fetch, lineage, advanced.held.version, fetched.verdicts)

    def noticed(self, open_: _Open, hear: Input) -> None:
        """Receive a notice of an open stream."""
        if open_ in self._open:
            self._do(hear(self._now))


class _Stream:
    """A stream of notices, at the syncer's end (`ports.ConnectionPort`)."""

    def __init__(
        self, client: SessionClient, wire: Wire, open_: _Open, watch: requests.Watch, lineage: Lineage
    ) -> None:  # fmt: skip
        self._client, self._wire, self._open, self._watch, self._lineage = client, wire, open_, watch, lineage
        self._has_begun = False

    def standing(self, standing: Standing) -> None:
        """As `ports.ConnectionPort`."""
        hear = self._client.core.heard if self._has_begun else self._client.core.welcomed
        self._has_begun = True
        self._send(partial(hear, watch=self._watch, lineage=self._lineage, standing=standing))

    def evicted(self, reason: str, *, replaced: bool) -> None:
        """As `ports.ConnectionPort`."""
        self._send(partial(self._client.core.evicted, watch=self._watch, reason=reason, replaced=replaced))

    def end(self) -> None:
        """As `ports.ConnectionPort`."""
        ended = partial(self._client.core.ended, watch=self._watch)
        self._wire.down(self._watch, 0, lambda: self._client.finish(self._open, ended))

    def _send(self, hear: Input) -> None:
        self._wire.down(self._watch, 0, lambda: self._client.noticed(self._open, hear))


def _connection_of(call: requests.Request) -> int | None:
    """The control connection of a call; None: it goes over another one."""
    return call.connection if isinstance(call, _CONTROL) else None
