"""Threads that take turns in virtual time, so that a run of several learners in one process is reproducible to the bit.

Only one thread runs at a time. Whose turn it is follows from virtual time alone: an inner step of a learner takes the seconds it was
said to take, everything else takes none, and nothing depends on the operating system's scheduling. At one instant inner steps end
first, in learner order, then whoever has news takes it in until all is quiet, then alarms go off. Each learner's random state and
thread count stay its own.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from diloco.errors import ExchangeError

StepSeconds = Callable[[int, int], float]
"""Learner index and its number of steps so far → seconds that its next one takes."""


class ThreadState:
    """Random state and thread count of the running learner."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values

    @classmethod
    def capture(cls) -> ThreadState:
        """As they are now."""
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
        return cls((torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None, cuda,
                    torch.get_num_threads()))  # fmt: skip

    def restore(self) -> None:
        """Put them back."""
        torch_state, python_state, numpy_state, cuda_state, num_threads = self._values
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state_all(cuda_state)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


class StoppedError(ExchangeError):
    """Ends a learner's thread because another one failed."""


@dataclass
class _Turn:
    """What a thread waits for: to start, for the end of its next inner step, or for news. `since`: when it began to."""

    kind: Literal["start", "step", "news", "gone"]
    since: float
    at: float = math.inf


class VirtualTime:
    """Whose turn it is, and what time.

    Arguments:
        starts_s: when each learner starts.
        step_s: how long inner steps take.
        has_news: whether there is something for a learner to take in.
        on_alarm: called when the alarm goes off.
    """

    def __init__(
        self,
        starts_s: Sequence[float],
        step_s: StepSeconds,
        has_news: Callable[[int], bool],
        on_alarm: Callable[[], None],
    ) -> None:
        self.now = min(starts_s)
        self.failed: int | None = None
        """The learner that raised first."""
        self.last_step_s = [0.0] * len(starts_s)
        self._step_s, self._has_news, self._on_alarm = step_s, has_news, on_alarm
        self._turns = [_Turn("start", at, at) for at in starts_s]
        self._num_steps = [0] * len(starts_s)
        self._alarm_at = math.inf
        self._running: int | None = None
        self._condition = threading.Condition()
        self._states = [ThreadState.capture()] * len(starts_s)
        self._stuck: str | None = None
        self._pass_on()

    def begin(self, index: int) -> None:
        """The thread of this learner is there; blocks until its start."""
        self._take(index)

    def next_step(self, index: int) -> bool:
        """Blocks until there is news at this very instant (True), or the learner's next inner step has ended (False).

        The thread computes that step afterwards; in virtual time it is over.
        """
        turn = self._turns[index]
        if turn.kind != "step":
            turn = self._turns[index] = _Turn("step", self.now, self.now + self._next_step_s(index))
        self._hand_on(index)
        if self.now < turn.at:
            return True
        self._end_step(index)
        return False

    def first_step(self, index: int) -> None:
        """Blocks until the learner's first inner step has ended; news have to wait for its boundary."""
        self._turns[index] = _Turn("start", self.now, self.now + self._next_step_s(index))
        self._hand_on(index)
        self._end_step(index)

    def wait(self, index: int) -> None:
        """Blocks until there is news."""
        self._turns[index] = _Turn("news", self.now)
        self._hand_on(index)

    def retire(self, index: int, *, failed: bool) -> None:
        """This learner, whose turn it is, is done; if it failed, the others stop at their next turn."""
        self._turns[index] = _Turn("gone", self.now)
        if failed and self.failed is None:
            self.failed = index
        self._pass_on()

    def alarm(self, at: float) -> None:
        """`on_alarm` is called at this time; a newer alarm replaces it."""
        self._alarm_at = at

    def _next_step_s(self, index: int) -> float:
        seconds = self._step_s(index, self._num_steps[index])
        if not 0 < seconds < math.inf:
            raise ExchangeError(f"step_s gave {seconds!r} s for learner {index}; a step takes more than 0.")
        return seconds

    def _end_step(self, index: int) -> None:
        turn = self._turns[index]
        self.last_step_s[index] = turn.at - turn.since
        self._num_steps[index] += 1
        self._turns[index] = _Turn("news", self.now)

    def _hand_on(self, index: int) -> None:
        self._states[index] = ThreadState.capture()
        self._pass_on()
        self._take(index)

    def _take(self, index: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._running == index)
        self._states[index].restore()
        if self._stuck is not None:
            raise ExchangeError(self._stuck)
        if self.failed is not None:
            raise StoppedError(f"learner {self.failed} failed.")

    def _pass_on(self) -> None:
        next_ = self._next()
        with self._condition:
            self._running = next_
            self._condition.notify_all()

    def _next(self) -> int | None:
        alive = [i for i, turn in enumerate(self._turns) if turn.kind != "gone"]
        if not alive or self.failed is not None or self._stuck is not None:
            return alive[0] if alive else None
        while True:
            for i in alive:  # steps that end now
                if self._turns[i].at <= self.now:
                    return i
            for i in alive:  # news: for those that are blocked, and those that rest at this instant
                turn = self._turns[i]
                if (turn.kind == "news" or (turn.kind == "step" and turn.since == self.now)) and self._has_news(i):
                    return i
            at = min(self._turns[i].at for i in alive)
            if self._alarm_at <= self.now or self._alarm_at < at:
                self.now, self._alarm_at = max(self.now, self._alarm_at), math.inf
                self._on_alarm()
            elif at < math.inf:
                self.now = at
            else:
                waiting = ", ".join(map(str, alive))
                self._stuck = (
                    f"learners {waiting} all wait and nobody can go on; do all of them take the same number of steps?"
                )
                return alive[0]
