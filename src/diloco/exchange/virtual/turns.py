"""Threads that take turns in virtual time, so that a run of several learners in one process is reproducible to the bit.

Only one thread runs at a time. The next thread follows from virtual time alone: an inner step of a learner takes the
seconds that `step_s` gives, all other work of a thread takes none, and nothing depends on the operating system's
scheduling. At one instant inner steps end first, in learner order; then notified learners receive their events, until
there are none; then the next external event fires (a message arrives, a learner is killed, an alarm rings). Each
learner has its own random state and thread count.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from diloco.errors import ExchangeError

StepSeconds = Callable[[int, int], float]
"""Learner index and its number of steps so far → seconds that its next one takes."""


Watch = Callable[[Literal["compute", "up", "down"], int, float, float], None]
"""Is called with the kind of an activity, its learner, its beginning and its end."""


class ThreadState:
    """Random state and thread count of the running learner."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values

    @classmethod
    def capture(cls) -> ThreadState:
        """The current state."""
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
        return cls((torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None, cuda,
                    torch.get_num_threads()))  # fmt: skip

    def restore(self) -> None:
        """Set the state."""
        torch_state, python_state, numpy_state, cuda_state, num_threads = self._values
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state_all(cuda_state)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


class LearnersEndedError(ExchangeError):
    """Ends a learner's thread because another one failed."""


class Killed(BaseException):
    """Ends a learner's thread at once, as `kill -9` ends a process."""


class Source(Protocol):
    """A source of external events in virtual time."""

    @property
    def next_s(self) -> float:
        """When the next event is due; infinite: none is."""

    def fire(self, now_s: float) -> None:
        """Execute the events that are due now."""


@dataclass
class _Turn:
    """The condition for a thread's next turn: a time, an event, an event or the end of this instant; or never."""

    kind: Literal["time", "event", "instant", "never"]
    at: float = math.inf


class VirtualTime:
    """The scheduler of the learners' threads, and the virtual clock.

    Arguments:
        starts_s: when each learner starts.
        step_s: how long inner steps take.
        sources: of external events; of events at the same time, those of the first source fire first.
        watch: is called for every step.

    Attributes:
        now: the virtual time.
        notified: learners that have events to receive.
        failed: the first learner that raised an error.
    """

    def __init__(self, starts_s: Sequence[float], step_s: StepSeconds, sources: Sequence[Source], watch: Watch) -> None:
        self.now = min(starts_s)
        self.failed: int | None = None
        self.notified: set[int] = set()
        self.last_step_s = [0.0] * len(starts_s)
        self._step_s, self._sources, self._watch = step_s, sources, watch
        self._turns = [_Turn("time", at) for at in starts_s]
        self._num_steps = [0] * len(starts_s)
        self._killed: set[int] = set()
        self._gates = [threading.Semaphore(0) for _ in starts_s]
        self._states = [ThreadState.capture()] * len(starts_s)
        self._stuck: str | None = None
        self._open_gate(self._next())

    def take_turn(self, index: int) -> None:
        """Block the learner's thread until its next turn; a new thread until its start."""
        self._gates[index].acquire()
        self._states[index].restore()
        self._check(index)

    def step(self, index: int) -> None:
        """Block until the learner's inner step has ended, which the thread has computed already. Events wait for the
        boundary."""
        seconds = self._step_s(index, self._num_steps[index])
        if not 0 < seconds < math.inf:
            raise ExchangeError(f"step_s returned {seconds!r} s for learner {index}; return a time above 0 s.")
        began_s = self.now
        self._block(index, _Turn("time", began_s + seconds))
        self._watch("compute", index, began_s, self.now)
        self.last_step_s[index] = seconds
        self._num_steps[index] += 1

    def wait_within_instant(self, index: int) -> bool:
        """Block until the learner is notified at this instant (True), or the instant is over (False)."""
        self._block(index, _Turn("instant"))
        return index in self.notified

    def wait(self, index: int) -> None:
        """Block until the learner is notified."""
        self._block(index, _Turn("event"))
        self.notified.discard(index)

    def sleep(self, index: int, until_s: float) -> None:
        """Block until this time, also if the learner is notified."""
        self._block(index, _Turn("time", until_s))

    def end(self, index: int, *, failed: bool) -> None:
        """End the running learner's thread; if it failed, the others stop at their next turn."""
        self._turns[index] = _Turn("never")
        if failed and self.failed is None:
            self.failed = index
        self._open_gate(self._next())

    def kill(self, index: int) -> None:
        """Raise `Killed` in the learner's thread, where it blocks, unless the thread has ended."""
        if self._turns[index].kind != "never":
            self._killed.add(index)

    def _block(self, index: int, turn: _Turn) -> None:
        self._turns[index] = turn
        next_ = self._next()
        if next_ == index:
            self._check(index)
            return
        self._states[index] = ThreadState.capture()
        self._open_gate(next_)
        self.take_turn(index)

    def _check(self, index: int) -> None:
        """Raise the error that ends the running learner's thread, if there is one."""
        if index in self._killed:
            self._killed.remove(index)
            raise Killed
        if self._stuck is not None:
            raise ExchangeError(self._stuck)
        if self.failed is not None:
            raise LearnersEndedError(f"learner {self.failed} failed.")

    def _open_gate(self, index: int | None) -> None:
        if index is not None:
            self._gates[index].release()

    def _next(self) -> int | None:
        alive = [i for i, turn in enumerate(self._turns) if turn.kind != "never"]
        if not alive or self.failed is not None or self._stuck is not None:
            return alive[0] if alive else None
        step_s = min(self._turns[i].at for i in alive)
        while True:
            if self._killed:
                return min(self._killed)
            if step_s <= self.now:  # an inner step ends now
                return next(i for i in alive if self._turns[i].at <= self.now)
            for i in sorted(self.notified):
                if self._turns[i].kind in ("event", "instant"):
                    return i
            source = min(self._sources, key=lambda each: each.next_s)
            if source.next_s <= self.now:
                source.fire(self.now)
                continue
            for i in alive:  # the instant is over
                if self._turns[i].kind == "instant":
                    return i
            if source.next_s < step_s:
                self.now = source.next_s
            elif step_s < math.inf:
                self.now = step_s
            else:
                waiting = ", ".join(map(str, alive))
                self._stuck = (
                    f"learners {waiting} all wait and none of them can continue; do all of them take the same "
                    "number of steps?"
                )
                return alive[0]
