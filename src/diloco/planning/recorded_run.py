"""Step times, arrivals and absences of the learners of a recorded run. Torch-free."""

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
"""The syncer's address in the events of a run in virtual time."""

Paces = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RecordedLearner:
    """One learner of a recorded run. Times are seconds from the run's beginning.

    Attributes:
        name, shard: as it had them.
        start_s: when it first took part.
        paces: (steps, seconds of each) of stretches that follow one another, evaluations and checkpoints within them
            included and waiting left out.
        gone: from when to when its process was dead; None: to the end.
        warm_paces: likewise, of the warm start, if it made one.
    """

    name: str
    shard: int
    start_s: float
    paces: Paces
    gone: tuple[tuple[float, float | None], ...]
    warm_paces: Paces = ()

    def step_s(self, step: int) -> float:
        """Seconds of its n-th step in the run (n from 0); as the last one, beyond what was recorded."""
        return _pace_at(self.paces, step)

    def warm_step_s(self, step: int) -> float | None:
        """Seconds of the n-th step of the warm start; None where there was none."""
        return _pace_at(self.warm_paces, step) if self.warm_paces else None


def _pace_at(paces: Paces, step: int) -> float:
    ends = list(accumulate(steps for steps, _ in paces))
    return paces[min(bisect_right(ends, step), len(ends) - 1)][1]


def read_recorded_run(directory: Path) -> list[RecordedLearner]:
    """The learners of the run whose directory this is, in the order of their shards.

    Raises:
        ConfigError: there is no run, or nothing that tells how long steps took.
        StoreError: an events file that cannot be read.
    """
    files = sorted(directory.glob("*/events.jsonl"))
    logs = {file.parent.name: read_events(file) for file in files}
    learners = {name: log for name, log in logs.items() if _shard(log) is not None}
    if not learners:
        raise ConfigError(f"{directory} holds no learner's events.jsonl; name the directory of a run.")
    told = [each for log in logs.values() for each in log]
    warm_steps = next((each.step for each in told if isinstance(each, ev.Initialised)), 0)
    joined_s = {
        name: [each.t for each in told if isinstance(each, ev.Joined) and each.learner == name] for name in learners
    }
    began_s = min(log[0].t for log in learners.values())
    found = [_learner(name, log, began_s, warm_steps, joined_s[name]) for name, log in learners.items()]
    return sorted(found, key=lambda each: each.shard)


def is_simulation(directory: Path) -> bool:
    """Whether this is the directory of a run in virtual time, ended or broken off, and not of a real one."""
    log = directory / "syncer" / "events.jsonl"
    events = read_events(log) if log.is_file() else []
    return any(isinstance(each, ev.SyncerStarted) and each.address == SIMULATED for each in events)


def _shard(log: Sequence[ev.Event]) -> int | None:
    return next((each.shard for each in log if isinstance(each, ev.RunStarted) and each.role == "learner"), None)


def _learner(
    name: str, log: Sequence[ev.Event], began_s: float, warm_steps: int, joined_s: Sequence[float]
) -> RecordedLearner:
    starts = [place for place, each in enumerate(log) if isinstance(each, ev.RunStarted)]
    lives = [log[start:end] for start, end in zip(starts, [*starts[1:], len(log)], strict=True)]
    paces = [pace for life in lives for pace in _paces(life, warm_steps, math.inf, joined_s)]
    if not paces:
        raise ConfigError(f"the events of {name} do not tell how long its steps took; record at least two step events.")
    warm_paces = _paces(lives[0], 0, warm_steps, ())
    gone = [(life[-1].t - began_s, following[0].t - began_s) for life, following in pairwise(lives)]
    ended = isinstance(lives[-1][-1], ev.Finished)
    last = [] if ended else [(lives[-1][-1].t - began_s, None)]
    shard = _shard(log)
    assert shard is not None
    return RecordedLearner(name, shard, lives[0][0].t - began_s, tuple(paces), (*gone, *last), tuple(warm_paces))


def _paces(life: Sequence[ev.Event], first: int, last: float, joined_s: Sequence[float]) -> list[tuple[int, float]]:
    """Step times between two step events, steps `first` to `last`, without the waiting reported after the second.

    What lies between the warm start and joining, such as the transfer of the model, is no part of a step.
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
