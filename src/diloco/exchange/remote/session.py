"""Threads around `SessionCore`: one for each lane of requests, and one for its clock."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, get_args

from google.protobuf.message import Message

from diloco.errors import DilocoError, ExchangeError
from diloco.escaping import MAX_REASON, printable
from diloco.exchange.base import Arrived, Rejoined, StartingState
from diloco.exchange.dialling import Dialler
from diloco.exchange.remote import messages
from diloco.exchange.remote.entry import Entry
from diloco.exchange.remote.inbox import Inbox
from diloco.exchange.remote.transfers import FetchResult, Receiver, Sender, key_of, num_bytes_of
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.values import value_of
from diloco.protocol.contribution import CallForWork, Drained, Hold, Rejection, Settled
from diloco.protocol.leases import Grant
from diloco.protocol.lineage import Lineage
from diloco.protocol.session import requests
from diloco.protocol.session.joining import GONE_TIMEOUT_S, LEAVE_TIMEOUT_S
from diloco.protocol.session.requests import SessionAction
from diloco.protocol.session.session_core import SessionCore

log = logging.getLogger("diloco")

Input = Callable[[float], Sequence[SessionAction]]
"""An event of `SessionCore` as a function of the time."""

R = TypeVar("R", bound=Message)
UnaryCall = requests.Describe | requests.Beat | requests.Lease | requests.Leave
"""A request with one answer on a control connection."""

RequestQueue = queue.SimpleQueue[requests.Request | None]
"""Requests to make, in order; None ends the queue."""


class Session:
    """Makes the requests of `SessionCore`, and passes its events to the training thread.

    Events enter the state machine one at a time, under a lock, and its actions are executed before the next event.
    Threads are daemons: they do not keep the process alive.

    Arguments:
        core: the state machine.
        entry, sender, receiver: make the requests to join, to push, and to fetch.

    Attributes:
        inbox: the events for the training thread.
        sender: the payloads of contributions.
        receiver: the newest global fragments.
    """

    def __init__(self, core: SessionCore, dialler: Dialler, entry: Entry, sender: Sender, receiver: Receiver) -> None:
        self.core = core
        self.inbox, self.sender, self.receiver = Inbox(), sender, receiver
        self._dialler, self._entry = dialler, entry
        self._changed = threading.Condition()
        self._is_over = False
        self._arriving: FetchResult | None = None
        self._lanes: dict[str, RequestQueue] = {name: queue.SimpleQueue() for name in get_args(requests.LaneName)}
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Start to join the run."""
        for name, lane in self._lanes.items():
            if name != "leave":  # the thread that closes makes that request
                self._start(f"diloco-{name}", partial(self._run, lane))
        self._start("diloco-clock", self._wake)
        self.enter(self.core.begin)

    def enter(self, event: Input) -> None:
        """Pass an event to the state machine, and execute its actions. Any thread may call this."""
        with self._changed:
            if self._is_over:
                return
            wake_at = self.core.wake_at
            for action in event(time.monotonic()):
                self._execute(action)
            if self.core.wake_at != wake_at:
                self._changed.notify_all()

    @property
    def num_bytes(self) -> dict[str, int]:
        """Payload bytes by kind, sent and received."""
        sent = num_bytes_of(self.sender, self.receiver)
        return {**sent, "joins": sent["joins"] + self._entry.num_bytes}

    @property
    def resumed_bytes(self) -> int:
        """Payload bytes that resumed transfers did not send again."""
        return self.sender.resumed_bytes + self.receiver.resumed_bytes + self._entry.resumed_bytes

    def close(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Leave the run, if the syncer answers in time, and end the threads.

        Arguments:
            timeout_s: how long to wait until the syncer has all contributions, and again at most for its answer to the
                request to leave.
        """
        self.enter(partial(self.core.leave, timeout_s=timeout_s))
        give_up_at = time.monotonic() + timeout_s + min(timeout_s, GONE_TIMEOUT_S)
        while not self._is_over:
            try:
                call = self._lanes["leave"].get(timeout=max(0.0, give_up_at - time.monotonic()))
            except queue.Empty:
                break
            if call is not None:
                self._make(call)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._dialler.close()
        self.inbox.fail(ExchangeError("this learner's exchange was closed; connect again to train on."))
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join()

    # --- actions ------------------------------------------------------------------------------------------------------

    def _execute(self, action: SessionAction) -> None:
        match action:
            case requests.CloseConnection(connection=number):
                self._dialler.control(number).close_channel(_control(number))
            case requests.Dial(address=address):
                self._dialler.dial(address)
            case requests.Drop(contribution=c):
                self.sender.drop(key_of(c))
            case requests.Warn(text=text):
                log.warning(text)
            case requests.Close():
                self._is_over = True
                self._lanes["leave"].put(None)
            case requests.Fail(error=error):
                self.inbox.fail(error)
            case requests.TellStart():
                self._tell_start(action)
            case requests.TellArrival(merged=merged):
                arriving, self._arriving = self._arriving, None
                assert arriving is not None
                assert arriving.advanced is not None
                self.inbox.put(Arrived.of(arriving.update, arriving.advanced, merged))
            case CallForWork() | Rejection() | Grant() | Drained() | Hold() | Settled():
                self.inbox.put(action)
            case _:
                self._lanes[action.lane].put(action)

    def _tell_start(self, start: requests.TellStart) -> None:
        self._dialler.current.close_channel("joins")
        opened = StartingState.of(start, self.receiver.fragments, self.receiver.static)
        self.inbox.clear()
        if start.reason is None:
            self.inbox.start(opened)
        else:
            self.inbox.put(Rejoined(opened, start.reason))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _run(self, lane: RequestQueue) -> None:
        while (call := lane.get()) is not None:
            self._make(call)

    def _make(self, call: requests.Request) -> None:
        """Make a request, and pass its result or error to the state machine."""
        try:
            event = self._made(call)
        except DilocoError as error:
            event = partial(self.core.failed, request=call, error=error)
        self.enter(event)

    def _made(self, call: requests.Request) -> Input:
        core = self.core
        match call:
            case requests.Describe():
                description = self._ask(call, "Describe", pb.DescribeRequest(run=core.run), pb.DescribeReply)
                lineage = value_of(Lineage, description.lineage)
                return partial(core.described, describe=call, lineage=lineage, initialised=description.initialised)
            case requests.Initialise():
                self._entry.initialise(call)
                return core.initialised
            case requests.Join():
                joined = self._entry.join(call)
                lineage = value_of(Lineage, joined.lineage)
                return partial(core.joined, join=call, lineage=lineage, incarnation=joined.incarnation)
            case requests.Fetch():
                return partial(self._fetched, fetch=call, fetched=self.receiver.fetch(call))
            case requests.Push():
                self.sender.push(call)
                return partial(core.pushed, push=call)
            case requests.Beat():
                request = messages.heartbeat_request(core.run, call)
                beaten = self._ask(call, "Heartbeat", request, pb.HeartbeatReply)
                lineage, standing = value_of(Lineage, beaten.lineage), messages.standing_of(beaten.standing)
                return partial(
                    core.beaten, beat=call, lineage=lineage, standing=standing, is_suspended=beaten.is_suspended
                )
            case requests.Lease():
                leased = self._ask(call, "Lease", messages.lease_request(core.run, call), pb.LeaseReply)
                number = 0 if leased.repeat else call.ask.number
                return partial(core.leased, lease=call, grant=value_of(Grant, leased, number=number))
            case requests.Watch():
                self._listen(call)
                return partial(core.ended, watch=call)
            case requests.Leave():
                goodbye = messages.request_of(pb.LeaveRequest, core.run, call.claim, call.report)
                self._ask(call, "Leave", goodbye, pb.LeaveReply)
                return core.left

    def _ask(self, call: UnaryCall, method: str, request: Message, kind: type[R]) -> R:
        connection, channel = self._dialler.control(call.connection), _control(call.connection)
        timeout_s = None if isinstance(call, requests.Describe) else call.timeout_s
        return connection.call(channel, method, request, kind, timeout_s=timeout_s)

    def _fetched(self, now: float, fetch: requests.Fetch, fetched: FetchResult) -> Sequence[SessionAction]:
        if (error := self.core.distrusts(fetched.lineage)) is not None:
            return self.core.failed(now, fetch, error)
        self.receiver.take(fetched)
        self._arriving = fetched
        return self.core.fetched(now, fetch, fetched.lineage, fetched.update.version, fetched.verdicts)

    def _listen(self, watch: requests.Watch) -> None:
        """Receive the notices of a stream until it ends."""
        core, lineage = self.core, Lineage("", 0, 0)
        connection, channel = self._dialler.control(watch.connection), _control(watch.connection)
        for notice in connection.watch(channel, messages.request_of(pb.WatchRequest, core.run, watch.claim)):
            match notice.WhichOneof("what"):
                case "welcome":
                    welcome = notice.welcome
                    lineage, standing = value_of(Lineage, welcome.lineage), messages.standing_of(welcome.standing)
                    self.enter(partial(core.welcomed, watch=watch, lineage=lineage, standing=standing))
                case "standing":
                    standing = messages.standing_of(notice.standing)
                    self.enter(partial(core.heard, watch=watch, lineage=lineage, standing=standing))
                case "evicted":
                    evicted = notice.evicted
                    reason = printable(evicted.reason, MAX_REASON)
                    self.enter(partial(core.evicted, watch=watch, reason=reason, replaced=evicted.replaced))

    # --- threads ------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Call the state machine at the times that it has set."""
        with self._changed:
            while not self._is_over:
                left_s = self.core.wake_at - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s if left_s < math.inf else None)
                else:
                    self.enter(self.core.tick)

    def _start(self, name: str, body: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:  # a defect: the training thread must not wait without end
                self.inbox.fail(error)
                raise

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


def _control(connection: int) -> str:
    """The name of a control connection's channel."""
    return f"control {connection}"
