"""What a recorded run says of its learners: how long their steps took, when they came, and when they were gone. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from diloco import events as ev
from diloco.errors import ConfigError


@dataclass(frozen=True)
class Recorded:
    """One learner of a recorded run. Times are seconds from the run's beginning.

    Attributes:
        name, shard: as it had them.
        start_s: when it first took part.
        paces: (steps, seconds of each) of stretches that follow one another, evaluations and checkpoints within them included and waiting
            left out; steps of a warm start are not among them.
        gone: from when to when its process was dead; None: to the end.
    """

    name: str
    shard: int
    start_s: float
    paces: tuple[tuple[int, float], ...]
    gone: tuple[tuple[float, float | None], ...]

    def step_s(self, step: int) -> float:
        """Seconds of its n-th step in the run (n from 0); as the last one, beyond what was recorded."""
        ends = list(accumulate(steps for steps, _ in self.paces))
        return self.paces[min(bisect_right(ends, step), len(ends) - 1)][1]


def read_tape(directory: Path) -> list[Recorded]:
    """The learners of the run whose directory this is, in the order of their shards.

    Raises:
        ConfigError: there is no run, or nothing that tells how long steps took.
        StoreError: an events file that cannot be read.
    """
    files = sorted(directory.glob("*/events.jsonl"))
    logs = {file.parent.name: ev.read_events(file) for file in files}
    learners = {name: log for name, log in logs.items() if _shard(log) is not None}
    if not learners:
        raise ConfigError(
            f"{directory} holds no learner's events.jsonl; name the directory of a run, such as runs/demo."
        )
    initialised = [each for log in logs.values() for each in log if isinstance(each, ev.Initialised)]
    warm_steps = initialised[0].step if initialised else 0
    began = min(log[0].t for log in learners.values())
    found = [_recorded(name, log, began, warm_steps) for name, log in learners.items()]
    return sorted(found, key=lambda each: each.shard)


def _shard(log: Sequence[ev.Event]) -> int | None:
    return next((each.shard for each in log if isinstance(each, ev.RunStarted) and each.role == "learner"), None)


def _recorded(name: str, log: Sequence[ev.Event], began: float, warm_steps: int) -> Recorded:
    starts = [place for place, each in enumerate(log) if isinstance(each, ev.RunStarted)]
    lives = [log[start:end] for start, end in zip(starts, [*starts[1:], len(log)], strict=True)]
    paces = [pace for life in lives for pace in _paces(life, warm_steps)]
    if not paces:
        raise ConfigError(f"the events of {name} do not tell how long its steps took; record at least two step events.")
    gone = [(life[-1].t - began, following[0].t - began) for life, following in pairwise(lives)]
    ended = isinstance(lives[-1][-1], ev.Finished)
    last = [] if ended else [(lives[-1][-1].t - began, None)]
    shard = _shard(log)
    assert shard is not None
    return Recorded(name, shard, lives[0][0].t - began, tuple(paces), (*gone, *last))


def _paces(life: Sequence[ev.Event], warm_steps: int) -> list[tuple[int, float]]:
    """Between two step events, without the waiting that is told right after the second one."""
    steps = [each for each in life if isinstance(each, ev.Stepped)]
    waited_s = {each.step: each.seconds for each in life if isinstance(each, ev.Waited)}
    return [
        (after.step - before.step, (after.t - before.t - waited_s.get(after.step, 0.0)) / (after.step - before.step))
        for before, after in pairwise(steps)
        if before.step >= warm_steps and after.step > before.step
    ]
