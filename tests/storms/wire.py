"""The connections of one learner's process to the syncer: messages take their time, in order on one connection, and
connections break."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from diloco.errors import DilocoError, UnreachableError
from diloco.exchange.virtual.syncer import SyncerProcess
from diloco.protocol.session import requests
from diloco.protocol.session.lanes import address_of

if TYPE_CHECKING:
    from tests.storms.learners import Process
    from tests.storms.world import Storm

STALL_S = 12.0
"""After so long without a byte, a transfer gives its connection up, and a syncer a learner's."""


BYTE_S = 0.002
"""That each byte takes."""


class _Connection:
    """One connection to one process of a syncer.

    Attributes:
        address: of the syncer.
        boot: names its process.
        is_open: bytes can be sent on it.
        is_silent: what is sent on it is lost, and neither end knows.
    """

    def __init__(self, address: int, boot: int) -> None:
        self.address, self.boot = address, boot
        self.is_open, self.is_silent = True, False
        self.calls: list[requests.Request] = []
        self.broken: dict[int, Callable[[], None]] = {}  # by the call's identity
        self.free_s = {"up": 0.0, "down": 0.0}


class StormWire:
    """As `client.Wire`. Each control connection is one, and transfers of one kind share one."""

    def __init__(self, storm: Storm, process: Process, latency_s: float) -> None:
        self._storm, self._process, self._latency_s = storm, process, latency_s
        self._name = process.name
        self._connections: dict[str, _Connection] = {}
        self._of: dict[int, _Connection] = {}  # by the identity of the call that is open on it
        self._frozen_until_s = 0.0
        self._address = 0  # of the syncer that calls other than control ones go to

    # --- messages -----------------------------------------------------------------------------------------------------

    def up(self, call: requests.Request, num_bytes: int, arrive: Callable[[SyncerProcess], None]) -> None:
        goes_on = id(call) in self._of  # also an upload of no bytes
        connection = self._dial(call)
        if connection is None:
            self._storm.after(self._delay("refused", 0), lambda: self._process.client.lost(call, gone()))
            return

        is_heartbeat = isinstance(call, requests.Beat | requests.Watch) or goes_on

        def arrives() -> None:
            if self._storm.now_s < (until_s := self._storm.asleep_until_s(connection.address)):
                self._storm.at(until_s, arrives)
                return
            door = self._storm.door(connection.address, is_heartbeat=is_heartbeat)
            is_there = door is not None and self._storm.boot_at(connection.address) == connection.boot
            if connection.is_open and not connection.is_silent and door is not None and is_there:
                self._storm.touched()
                self._storm.heard(self._name, connection.address)
                arrive(door)

        self._carry(connection, "up", num_bytes, arrives)
        if self._repeats(call, num_bytes):
            self._storm.after(self._delay("again", 0), lambda: self._again(connection, call, arrive))

    def down(self, call: requests.Request, num_bytes: int, arrive: Callable[[], None]) -> None:
        connection = self._of.get(id(call))
        if connection is None or not connection.is_open or connection.is_silent:
            return

        def arrives() -> None:
            is_there = self._process.is_alive or self._process.is_leaving
            if connection.is_open and not connection.is_silent and is_there:
                self._process.touched()
                arrive()

        self._carry(connection, "down", num_bytes, arrives)
        if isinstance(call, requests.Watch) and self._repeats(call, num_bytes):
            self._storm.after(self._delay("again", 0), arrives)

    def _repeats(self, call: requests.Request, num_bytes: int) -> bool:
        """Whether a message arrives once more. Of a push that is its end, which comes with its payload."""
        repeats = self._storm.plan.repeats
        if repeats == 0:
            return False
        is_one = isinstance(call, requests.Beat | requests.Watch) or (isinstance(call, requests.Push) and num_bytes > 0)
        return is_one and self._storm.draws.unit(f"{self._name} repeats") < repeats

    def _again(self, connection: _Connection, call: requests.Request, arrive: Callable[[SyncerProcess], None]) -> None:
        """A request arrives once more, be it from a connection that is broken by now."""
        door = self._storm.door(connection.address, is_heartbeat=isinstance(call, requests.Beat | requests.Watch))
        if door is None or self._storm.boot_at(connection.address) != connection.boot:
            return
        if self._storm.now_s < self._storm.asleep_until_s(connection.address):
            return
        self._storm.touched()
        self._storm.heard(self._name, connection.address)
        if not isinstance(call, requests.Push):
            arrive(door)
            return
        payload = self._storm.accounts.payload(call.contribution)
        try:
            driver = door.driver
            upload = driver.begin_push(call.contribution, payload.numel(), boot=call.boot, process=call.claim.process)
        except DilocoError:
            return
        upload.slot.tensor = payload
        driver.complete_push(upload, lambda _: None)

    def _carry(self, connection: _Connection, direction: str, num_bytes: int, arrives: Callable[[], None]) -> None:
        at_s = max(self._storm.now_s, self._frozen_until_s) + self._delay(direction, num_bytes)
        at_s = connection.free_s[direction] = max(at_s, connection.free_s[direction])
        self._storm.at(at_s, arrives)

    def _delay(self, direction: str, num_bytes: int) -> float:
        draws = self._storm.draws
        jitter_s = draws.between(f"{self._name} {direction}", 0.0, self._latency_s)
        is_slow = draws.unit(f"{self._name} {direction} is slow") < 0.03
        slow_s = draws.between(f"{self._name} {direction} slow", 0.0, 2.0) if is_slow else 0.0
        return self._latency_s + jitter_s + slow_s + BYTE_S * num_bytes

    def on_break(self, call: requests.Request, broken: Callable[[], None]) -> None:
        if (connection := self._of.get(id(call))) is not None:
            connection.broken[id(call)] = broken

    def ended(self, call: requests.Request) -> None:
        connection = self._of.pop(id(call), None)
        if connection is not None:
            connection.calls = [each for each in connection.calls if each is not call]
            if isinstance(call, requests.Push):
                connection.broken.pop(id(call), None)

    def hang_up(self, connection: int) -> None:
        if (it := self._connections.pop(f"control {connection}", None)) is not None:
            self._break(it, knows_s=0.0)

    def dial(self, address: int) -> None:
        self._address = address
        for channel in [each for each in self._connections if not each.startswith("control")]:
            if self._connections[channel].address != address:
                self._break(self._connections.pop(channel), knows_s=0.0)

    def _dial(self, call: requests.Request) -> _Connection | None:
        channel = _channel(call)
        connection = self._connections.get(channel)
        if connection is None or not connection.is_open:
            address = self._address
            if channel.startswith("control"):
                address = address_of(int(channel.split()[1]), self._storm.num_addresses)
            if not self._storm.reaches(self._process.index, address):
                return None
            connection = self._connections[channel] = _Connection(address, self._storm.boot_at(address))
        if id(call) not in self._of:
            self._of[id(call)] = connection
            connection.calls.append(call)
        return connection

    # --- faults -------------------------------------------------------------------------------------------------------

    def _break(self, connection: _Connection, *, knows_s: float) -> None:
        """The connection is gone. `knows_s`: after which time the learner knows; the syncer knows some time after."""
        if not connection.is_open:
            return
        connection.is_open = False
        open_calls, connection.calls = connection.calls, []
        for call in open_calls:
            self._storm.after(knows_s, lambda call=call: self._process.lost(call))  # type: ignore[misc]
        broken, connection.broken = list(connection.broken.values()), {}
        is_silent, boot, address = connection.is_silent, connection.boot, connection.address
        delay_s = STALL_S if is_silent else self._storm.draws.between(f"{self._name} syncer knows", 0.0, 1.0)

        def tell() -> None:
            if self._storm.door(address) is not None and self._storm.boot_at(address) == boot:
                self._storm.touched()
                for each in broken:
                    each()

        self._storm.after(delay_s, tell)

    def cut(self) -> None:
        """All connections break."""
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            self._break(connection, knows_s=self._storm.draws.between(f"{self._name} learner knows", 0.0, 0.5))

    def go_silent(self) -> None:
        """All connections are half open."""
        for connection in self._connections.values():
            connection.is_silent = True
            self._storm.after(STALL_S, partial(self._break, connection, knows_s=0.0))

    def freeze(self, seconds: float) -> None:
        """Messages stand still for some seconds."""
        self._frozen_until_s = max(self._frozen_until_s, self._storm.now_s + seconds)

    def lose(self, address: int, *, is_silent: bool) -> None:
        """This syncer is out of reach. `is_silent`: neither end hears of it."""
        for channel, connection in list(self._connections.items()):
            if connection.address == address and is_silent:
                connection.is_silent = True
                self._storm.after(STALL_S, partial(self._break, connection, knows_s=0.0))
            elif connection.address == address:
                del self._connections[channel]
                self._break(connection, knows_s=self._latency_s)

    def syncer_died(self, address: int) -> None:
        """Its connections are gone, and the learner hears of it at once."""
        for channel, connection in list(self._connections.items()):
            if connection.address == address:
                del self._connections[channel]
                connection.broken = {}
                self._break(connection, knows_s=self._latency_s)


def gone() -> UnreachableError:
    """What a call over a connection that is gone fails with."""
    return UnreachableError("the connection is gone.")


def _channel(call: requests.Request) -> str:
    match call:
        case requests.Describe() | requests.Watch() | requests.Beat() | requests.Leave():
            return f"control {call.connection}"
        case requests.Push():
            return "contributions"
        case requests.Fetch(joining=False):
            return "updates"
    return "joins"
