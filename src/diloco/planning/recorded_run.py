"""Step times, arrivals and absences of the learners of a recorded run, read without torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from diloco import events as ev
from diloco.errors import ConfigError
from diloco.event_log import read_events

SIMULATED = "simulated"
"""The syncer's address in the events of a simulated run."""

StepTimes = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RecordedLearner:
    """One learner of a recorded run. Times are seconds from the start of the run.

    Attributes:
        start_s: its first start.
        step_times: (steps, seconds per step) of successive intervals, with evaluations and checkpoints, without
            waiting.
        absences: intervals in which its process was dead; None: until the end.
        warm_step_times: step times of the warm start; empty: it made none.
    """

    name: str
    shard: int
    start_s: float
    step_times: StepTimes
    absences: tuple[tuple[float, float | None], ...]
    warm_step_times: StepTimes = ()

    def step_s(self, step: int) -> float:
        """Seconds of its n-th step in the run (n from 0); beyond the recording, of the last one."""
        return _step_s_at(self.step_times, step)

    def warm_step_s(self, step: int) -> float | None:
        """Seconds of the n-th step of the warm start; None: it made none."""
        return _step_s_at(self.warm_step_times, step) if self.warm_step_times else None


def _step_s_at(step_times: StepTimes, step: int) -> float:
    ends = list(accumulate(steps for steps, _ in step_times))
    return step_times[min(bisect_right(ends, step), len(ends) - 1)][1]


def read_recorded_run(directory: Path) -> list[RecordedLearner]:
    """Read the learners of the run in this directory, in the order of their shards.

    Raises:
        ConfigError: the directory has no run, or its events have no step times.
        StoreError: an events file that cannot be read.
    """
    files = sorted(directory.glob("*/events.jsonl"))
    logs = {file.parent.name: read_events(file) for file in files}
    learners = {name: log for name, log in logs.items() if _shard(log) is not None}
    if not learners:
        raise ConfigError(f"{directory} has no events.jsonl of a learner; name the directory of a run.")
    events = [each for log in logs.values() for each in log]
    warm_steps = next((each.step for each in events if isinstance(each, ev.Initialised)), 0)
    joined_s = {
        name: [each.t for each in events if isinstance(each, ev.Joined) and each.learner == name] for name in learners
    }
    began_s = min(log[0].t for log in learners.values())
    found = [_learner(name, log, began_s, warm_steps, joined_s[name]) for name, log in learners.items()]
    return sorted(found, key=lambda each: each.shard)


def is_simulation(directory: Path) -> bool:
    """Return whether this is the directory of a simulated run, complete or not."""
    log = directory / "syncer" / "events.jsonl"
    events = read_events(log) if log.is_file() else []
    return any(isinstance(each, ev.SyncerStarted) and each.address == SIMULATED for each in events)


def _shard(log: Sequence[ev.Event]) -> int | None:
    return next((each.shard for each in log if isinstance(each, ev.RunStarted) and each.role == "learner"), None)


def _learner(
    name: str, log: Sequence[ev.Event], began_s: float, warm_steps: int, joined_s: Sequence[float]
) -> RecordedLearner:
    starts = [index for index, each in enumerate(log) if isinstance(each, ev.RunStarted)]
    lives = [log[start:end] for start, end in zip(starts, [*starts[1:], len(log)], strict=True)]
    step_times = [each for life in lives for each in _step_times(life, warm_steps, math.inf, joined_s)]
    if not step_times:
        raise ConfigError(f"the events of {name} have no step times; record at least two step events.")
    warm_step_times = _step_times(lives[0], 0, warm_steps, ())
    absences = [(life[-1].t - began_s, following[0].t - began_s) for life, following in pairwise(lives)]
    ended = isinstance(lives[-1][-1], ev.Finished)
    last = [] if ended else [(lives[-1][-1].t - began_s, None)]
    shard = _shard(log)
    assert shard is not None
    return RecordedLearner(
        name, shard, lives[0][0].t - began_s, tuple(step_times), (*absences, *last), tuple(warm_step_times)
    )


def _step_times(
    life: Sequence[ev.Event], first: int, last: float, joined_s: Sequence[float]
) -> list[tuple[int, float]]:
    """Step times between successive step events, for steps `first` to `last`, without the waiting reported at the
    later.

    The time between the warm start and joining, such as the transfer of the model, is not part of a step.
    """
    steps = [each for each in life if isinstance(each, ev.Stepped)]
    waited_s = {each.step: each.seconds for each in life if isinstance(each, ev.Waited)}
    found = []
    for before, after in pairwise(steps):
        num = after.step - before.step
        begin_s = max([before.t, *(at_s for at_s in joined_s if at_s < after.t)])
        seconds = after.t - begin_s - waited_s.get(after.step, 0.0)
        if before.step >= first and after.step <= last and num > 0 and seconds > 0:
            found.append((num, seconds / num))
    return found
