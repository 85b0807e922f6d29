"""Events for the training thread, and the error that ends it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from diloco.errors import StoppedError
from diloco.exchange.base import Event, Interrupted, StartingState

STOPPED = "this learner was told to stop before it had joined the run."


class Inbox:
    """Any thread may call any method."""

    def __init__(self) -> None:
        self._start: StartingState | None = None
        self._has_started = False
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def put(self, event: Event) -> None:
        """Add an event."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def clear(self) -> None:
        """Drop unread events."""
        with self._changed:
            self._events.clear()

    def start(self, opened: StartingState) -> None:
        """The learner starts for the first time."""
        with self._changed:
            self._start = opened
            self._changed.notify_all()

    def interrupt(self) -> None:
        """End the learner's waiting for its start or for events."""
        if self._has_started:
            self.put(Interrupted())
        else:
            self.fail(StoppedError(STOPPED))

    def fail(self, error: BaseException) -> None:
        """Record the first failure; later reads and waits raise it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait_for_start(self) -> StartingState:
        """Block until the learner starts. Raises the recorded failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._start is not None or self._failure is not None)
            if self._start is None:
                self._raise()
            opened, self._start, self._has_started = self._start, None, True
        assert opened is not None
        return opened

    def take(self) -> Sequence[Event]:
        """The events since the last call. Raises the recorded failure."""
        with self._changed:
            self._raise()
            events = tuple(self._events)
            self._events.clear()
            return events

    def wait(self, timeout_s: float) -> None:
        """Block until `take` has an event or an error, or `timeout_s` have passed."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._failure is not None, timeout_s)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure
