"""Retries of requests, stall timeouts, and when a connection is given up: arithmetic without a clock."""

from __future__ import annotations

import math

from diloco.errors import AuthError, BusyError, DilocoError, LineageError, NoRoomError, UnreachableError
from diloco.protocol.session import requests

FIRST_RETRY_S, LAST_RETRY_S = 0.2, 1.0
"""Pauses between tries. They must be shorter than a restarted syncer's shortest deadline."""

STALL_FACTOR = 8.0
"""The limit of a stall timeout is this multiple of the longest recent pause."""

STALL_DECAY = 0.9
"""What a long pause counts for after each later one."""


Repeated = UnreachableError | NoRoomError | LineageError | AuthError
"""After these a request is repeated; after the last one where another syncer than the one that is followed refuses."""


class StallTimeout:
    """A measured stall timeout: a multiple of the longest recent pause.

    A pause that ran into the limit counts too, so that a link which has become much slower is given more and more time.

    Arguments:
        floor_s: the limit before anything is known, and the lowest.
        cap_s: the highest.
    """

    def __init__(self, floor_s: float, cap_s: float) -> None:
        self.floor_s, self.cap_s = floor_s, cap_s
        self._longest_s = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds."""
        return min(self.cap_s, max(self.floor_s, STALL_FACTOR * self._longest_s))

    def paused(self, pause_s: float) -> None:
        """A pause of this length has ended, by progress or by the limit."""
        self._longest_s = max(pause_s, STALL_DECAY * self._longest_s)

    def waited(self, pause_s: float) -> None:
        """As `paused`, of one connection among many: one that died does not make a link slow, so that the next limit is
        at most twice this one."""
        self.paused(min(pause_s, 2 * self.limit_s / STALL_FACTOR))


class Lane:
    """Requests of one kind, one at a time, repeated with growing pauses while the syncer is away or has no room.

    Attributes:
        is_busy: a request is under way.
        is_away: the last request did not reach the syncer.
        is_stopped: no request follows.
        ready_at: the next request waits until then.
    """

    def __init__(self) -> None:
        self.is_busy = self.is_away = self.is_stopped = False
        self.ready_at = -math.inf
        self._pause_s = FIRST_RETRY_S
        self._said = set[type[DilocoError]]()

    def is_free(self, now: float) -> bool:
        """Whether the next request may begin."""
        return not self.is_busy and not self.is_stopped and now >= self.ready_at

    def ended(self) -> None:
        """The request under way was answered."""
        self.is_busy = False
        self.reset()

    def reset(self) -> None:
        """The syncer is there: the next request waits for nothing."""
        self.ready_at, self._pause_s, self.is_away = -math.inf, FIRST_RETRY_S, False
        self._said.clear()

    def pause(self, now: float) -> None:
        """The next request waits, longer after each time."""
        self.ready_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, LAST_RETRY_S)

    def failed(self, now: float, error: Repeated) -> str | None:
        """The request is repeated; returns what to warn of, once for each kind of error."""
        self.is_away = not isinstance(error, NoRoomError)
        self.pause(now)
        if type(error) in self._said:
            return None
        self._said.add(type(error))
        why = "cannot be reached" if self.is_away else "has no room yet"
        if isinstance(error, BusyError):
            why = "is still busy"
        elif isinstance(error, LineageError):
            why = "is not the one to follow"
        elif isinstance(error, AuthError):
            why = "at one of the addresses refuses this learner"
        return f"the syncer {why}, trying again: {error}"


class ControlConnection:
    """Which connection heartbeats and notices go over. They are numbered; each is dialled once, when it is first used.

    A connection over which an answer did not come is not used again. The last one that carried an answer stays open
    until the new one has carried one: hanging up would look like death to a syncer that is only slow to answer.

    Connections go to the run's addresses in turn, and all other requests to the address of the last one that carried an
    answer.

    Arguments:
        num_addresses: of syncers.

    Attributes:
        number: of the one to use.
    """

    def __init__(self, num_addresses: int) -> None:
        self.number = 1
        self._num_addresses = num_addresses
        self._answered: int | None = None
        self._dialled = 0

    @property
    def is_answered(self) -> bool:
        """Whether the one to use has carried an answer."""
        return self._answered == self.number

    def is_followed(self, connection: int) -> bool:
        """Whether it goes to the address of the syncer that has answered last."""
        return address_of(connection, self._num_addresses) == self._dialled

    def failed(self, connection: int) -> list[requests.HangUp]:
        """A request over it failed."""
        if connection != self.number:
            return []
        self.number += 1
        return [requests.HangUp(connection)] if connection != self._answered else []

    def answered(self, connection: int) -> list[requests.HangUp | requests.Dial]:
        """A request over it was answered."""
        if connection != self.number or self.is_answered:
            return []
        actions = list[requests.HangUp | requests.Dial]()
        before, self._answered = self._answered, connection
        if before is not None:
            actions.append(requests.HangUp(before))
        if (address := address_of(connection, self._num_addresses)) != self._dialled:
            self._dialled = address
            actions.append(requests.Dial(address))
        return actions


def address_of(connection: int, num_addresses: int) -> int:
    """Which of the addresses a control connection goes to."""
    return (connection - 1) % num_addresses


class Lanes:
    """All requests of a session: one lane for each kind, and the control connection that some of them share."""

    def __init__(self, num_addresses: int) -> None:
        self.control, self.watch, self.receive, self.send, self.data = Lane(), Lane(), Lane(), Lane(), Lane()
        self.connection = ControlConnection(num_addresses)

    @property
    def all(self) -> tuple[Lane, ...]:
        """Every lane."""
        return self.control, self.watch, self.receive, self.send, self.data

    def of(self, request: requests.Request) -> Lane:
        """The lane of a request."""
        names = ("control", "watch", "receive", "send", "data")
        return dict(zip(names, self.all, strict=True))[request.lane]

    def answered(self, request: requests.Describe | requests.Beat) -> list[requests.HangUp | requests.Dial]:
        """A control request was answered."""
        self.control.ended()
        if not self.connection.is_answered:
            self.watch.reset()
        return self.connection.answered(request.connection)

    def failed(self, now: float, request: requests.Request, error: Repeated) -> list[requests.SessionAction]:
        """A request is to be repeated."""
        text = self.of(request).failed(now, error)
        # A stream of notices breaks with its connection, of which the heartbeats say enough.
        actions = list[requests.SessionAction]()
        if text is not None and not isinstance(request, requests.Watch):
            actions.append(requests.Warn(text))
        if isinstance(request, requests.Describe | requests.Beat | requests.Vote | requests.Watch) and not isinstance(
            error, NoRoomError
        ):
            actions += self.connection.failed(request.connection)
        return actions

    @property
    def is_away(self) -> bool:
        """Whether a request is being repeated because the syncer was not reached."""
        return self.control.is_away or self.receive.is_away or self.send.is_away

    def next_at(self, now: float) -> float:
        """When a pause ends next."""
        pauses = (lane.ready_at for lane in self.all if not lane.is_busy and not lane.is_stopped)
        return min((ready_at for ready_at in pauses if ready_at > now), default=math.inf)
