"""Retries of requests, stall timeouts, and when a connection is given up: arithmetic without a clock."""

from __future__ import annotations

import math

from diloco.errors import AuthError, BusyError, DilocoError, LineageError, NoRoomError, StandbyError, UnreachableError
from diloco.protocol.session import requests

FIRST_RETRY_S, LAST_RETRY_S = 0.2, 1.0
"""Pauses between tries. They must be shorter than a restarted syncer's shortest deadline."""

STALL_FACTOR = 8.0
"""The limit of a stall timeout is this multiple of the longest recent pause."""

STALL_DECAY = 0.9
"""The weight that a long pause loses with each later pause."""


Repeated = UnreachableError | NoRoomError | LineageError | AuthError
"""Errors after which a request is repeated; after `AuthError` only if it came from another syncer than the one that is
followed."""


class StallTimeout:
    """A measured stall timeout: a multiple of the longest recent pause.

    A pause that ran into the limit counts too, so the limit grows on a link that has become much slower.

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
        """As `paused`, for one of several connections: a dead connection does not mean a slow link, so the next limit
        is at most twice this one."""
        self.paused(min(pause_s, 2 * self.limit_s / STALL_FACTOR))


class Lane:
    """Requests of one kind, one at a time, repeated with growing pauses while the syncer is away or has no room.

    Attributes:
        is_busy: a request is under way.
        is_away: the last request did not reach a syncer.
        is_stopped: no more requests are made.
        ready_at: the time before which no request is made.
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
        """The syncer has answered: the next request is made at once."""
        self.ready_at, self._pause_s, self.is_away = -math.inf, FIRST_RETRY_S, False
        self._said.clear()

    def pause(self, now: float) -> None:
        """The next request waits, longer after each time."""
        self.ready_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, LAST_RETRY_S)

    def failed(self, now: float, error: Repeated) -> str | None:
        """The request will be repeated; returns a warning, once for each kind of error."""
        self.is_away = not isinstance(error, NoRoomError | StandbyError)
        self.pause(now)
        if type(error) in self._said:
            return None
        self._said.add(type(error))
        why = "cannot be reached" if self.is_away else "has no room yet"
        if isinstance(error, BusyError):
            why = "is still busy"
        elif isinstance(error, StandbyError):
            why = "does not serve the run now"
        elif isinstance(error, LineageError):
            why = "is not the one to follow"
        elif isinstance(error, AuthError):
            why = "at one of the addresses refuses this learner"
        return f"the syncer {why}, trying again: {error}"


class ControlConnection:
    """The connection for heartbeats and notices. Connections are numbered; each is dialled once, at its first use.

    A connection on which an answer did not arrive in time is not used again. The last one that carried an answer stays
    open until a new one has carried an answer: closing it would look like a failure to a syncer that is only slow.

    Connections are dialled to the run's addresses in turn. All other requests use the address of the last connection
    that carried an answer.

    Arguments:
        num_addresses: of syncers.

    Attributes:
        number: of the current connection.
    """

    def __init__(self, num_addresses: int) -> None:
        self.number = 1
        self._num_addresses = num_addresses
        self._answered: int | None = None
        self._dialled = 0

    @property
    def is_answered(self) -> bool:
        """Whether the current connection has carried an answer."""
        return self._answered == self.number

    def is_followed(self, connection: int) -> bool:
        """Whether a connection is to the address of the syncer that answered last."""
        return address_of(connection, self._num_addresses) == self._dialled

    @property
    def followed(self) -> int:
        """The current connection, or the next one to the address of the syncer that answered last."""
        return self.number + (self._dialled - address_of(self.number, self._num_addresses)) % self._num_addresses

    def failed(self, connection: int) -> list[requests.CloseConnection]:
        """A request over this connection failed."""
        if connection != self.number:
            return []
        self.number += 1
        return [requests.CloseConnection(connection)] if connection != self._answered else []

    def answered(self, connection: int) -> list[requests.CloseConnection | requests.Dial]:
        """A request over this connection was answered."""
        if connection != self.number or self.is_answered:
            return []
        actions = list[requests.CloseConnection | requests.Dial]()
        before, self._answered = self._answered, connection
        if before is not None:
            actions.append(requests.CloseConnection(before))
        if (address := address_of(connection, self._num_addresses)) != self._dialled:
            self._dialled = address
            actions.append(requests.Dial(address))
        return actions


def address_of(connection: int, num_addresses: int) -> int:
    """The index of the address that a control connection is dialled to."""
    return (connection - 1) % num_addresses


class Lanes:
    """The lanes of a session, and the control connection that some of them share."""

    def __init__(self, num_addresses: int) -> None:
        self.control, self.watch, self.receive, self.send, self.data = Lane(), Lane(), Lane(), Lane(), Lane()
        self.connection = ControlConnection(num_addresses)

    @property
    def all(self) -> tuple[Lane, ...]:
        """Every lane."""
        return self.control, self.watch, self.receive, self.send, self.data

    def of(self, request: requests.Request) -> Lane:
        """The lane of a request."""
        lane: Lane = getattr(self, request.lane)
        return lane

    def answered(self, request: requests.Describe | requests.Beat) -> list[requests.CloseConnection | requests.Dial]:
        """A control request was answered."""
        self.control.ended()
        if not self.connection.is_answered:
            self.watch.reset()
        return self.connection.answered(request.connection)

    def failed(self, now: float, request: requests.Request, error: Repeated) -> list[requests.SessionAction]:
        """A request is to be repeated."""
        text = self.of(request).failed(now, error)
        # A stream of notices fails with its connection, and heartbeats over the same one warn already; they also find
        # out whether to ask another syncer, and warn of a syncer that refuses the requests of a member.
        is_of_stream, is_idle = isinstance(request, requests.Watch), isinstance(error, StandbyError)
        is_known = is_of_stream or (is_idle and isinstance(request, requests.Fetch | requests.Push | requests.Lease))
        actions = list[requests.SessionAction]()
        if text is not None and not is_known:
            actions.append(requests.Warn(text))
        if isinstance(error, NoRoomError) or (is_of_stream and is_idle):
            return actions
        if isinstance(request, requests.Describe | requests.Beat | requests.Watch):
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
