"""What the parts of one learner's exchange share: who it is, its connection, its news, and threads that never hold up the process."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.errors import DilocoError, NoRoomError
from diloco.exchange.base import Event, Opened, Rejoined
from diloco.exchange.connection import Connection

log = logging.getLogger("diloco")

T = TypeVar("T")


class Inbox:
    """News for the training thread, and the error that ends it. Any thread may call any method.

    News belong to an incarnation: what is told of an older one is dropped.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._incarnation = 0
        self._failure: BaseException | None = None

    def tell(self, event: Event, incarnation: int) -> None:
        """Add a piece of news."""
        with self._changed:
            if incarnation == self._incarnation:
                self._events.append(event)
                self._changed.notify_all()

    def start_over(self, incarnation: int, *events: Event) -> None:
        """A new incarnation: what was not read is void."""
        with self._changed:
            self._incarnation = incarnation
            self._events = deque(events)
            self._changed.notify_all()

    def take_rejoined(self) -> Opened | None:
        """What a new incarnation starts from, if that is the next piece of news."""
        with self._changed:
            first = self._events[0] if self._events else None
            if not isinstance(first, Rejoined):
                return None
            self._events.popleft()
            return first.opened

    def fail(self, error: BaseException) -> None:
        """Everybody who reads or waits raises this from now on; the first one counts."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wake(self) -> None:
        """Have `wait_until` look again."""
        with self._changed:
            self._changed.notify_all()

    def take(self) -> tuple[Event, ...]:
        """Everything told since the last time. Raises what `fail` was given."""
        with self._changed:
            self._raise()
            events = tuple(self._events)
            self._events.clear()
            return events

    def wait(self) -> None:
        """Until `take` has something to say."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._failure is not None)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Until `condition()`, which is looked at after each `wake`; returns whether it holds. Raises what `fail` was given."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_s)
            self._raise()
            return condition()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure


class Session:
    """One learner in one run.

    Attributes:
        process: a number of this exchange's own, by which the syncer tells it from another one with the same name.
        incarnation: the newest; 0 before it has joined.
        boot: names the syncer's process that was last heard of.
        layout, method: set when the learner opens the exchange.
        given_up: what to do when the syncer has given an incarnation up, and why; set by `Remote`.
        num_bytes: payload bytes by kind.
    """

    layout: Layout
    method: Method
    given_up: Callable[[int, str], None]

    def __init__(self, connection: Connection, *, run: str, learner: str) -> None:
        self.connection = connection
        self.run = run
        self.learner = learner
        self.process = secrets.randbits(64)
        self.incarnation = 0
        self.boot = 0
        self.inbox = Inbox()
        self.num_bytes: dict[str, int] = {"contributions": 0, "updates": 0, "joins": 0}

    @property
    def is_closing(self) -> bool:
        return self.connection.closing.is_set()

    def retry(
        self, action: Callable[[], T], *, waiting_for: str = "the syncer cannot be reached", give_up_after_s: float | None = None
    ) -> T:  # fmt: skip
        """Until the syncer is back, and has room; says each once."""
        said: set[type[DilocoError]] = set()

        def say(error: DilocoError) -> None:
            if type(error) not in said and not self.is_closing:
                why = "the syncer has no room" if isinstance(error, NoRoomError) else waiting_for
                log.warning("%s yet, trying again: %s", why, error)
                said.add(type(error))

        return self.connection.retrying(action, on_retry=say, give_up_after_s=give_up_after_s)

    def start(self, name: str, body: Callable[[], None]) -> threading.Thread:
        """Run `body` in a thread of its own; what ends it early reaches the training thread."""
        thread = threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
        thread.start()
        return thread

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except DilocoError as error:
            if not self.is_closing:
                self.inbox.fail(error)
        except BaseException as error:  # a defect: the training thread must not wait for what will never come
            self.inbox.fail(error)
            raise


class Worker:
    """A thread that runs jobs in order, until one fails or the session is closed. It does not keep the process alive."""

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_open = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run it after those before it; never, where the session is closing."""
        with self._changed:
            self._num_open += 1
            if self._thread is None:
                self._thread = self._session.start(self._name, self._run)
        self._jobs.put(job)

    def wait_until_idle(self, timeout_s: float, or_else: Callable[[], bool]) -> bool:
        """Until every job is done, or `or_else()` (looked at ten times a second), or the time is over; returns the first."""
        with self._changed:
            for _ in range(round(10 * timeout_s)):
                if self._changed.wait_for(lambda: self._num_open == 0, 0.1) or or_else() or not self._is_alive():
                    break
            return self._num_open == 0

    def _is_alive(self) -> bool:
        """A job that failed ends it."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Drop what has not begun and wait for what has, which is no longer than its call: the connection is closed before."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._session.is_closing:
                job()
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()
