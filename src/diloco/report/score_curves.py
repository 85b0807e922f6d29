"""Scores in tasks against tokens, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diloco import events as ev
from diloco.report.series import Numbers, Series

MAX_CURVES = 64


class ScoreCurves:
    """A curve for each task and each process that had its scores; those beyond `MAX_CURVES` are left out."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._curves: dict[tuple[str, str], Series] = {}
        self._seen: dict[tuple[str, str], tuple[int, ev.TaskScore]] = {}

    def take(self, who: str, tokens: int, scores: Mapping[str, ev.TaskScore]) -> None:
        """Scores of a global model; the syncer's log and the learner's own may both have them."""
        for task, score in scores.items():
            key, before = (task, who), self._seen.get((task, who))
            is_old = before is not None and tokens <= before[0]
            if is_old or not math.isfinite(score.score) or (before is None and len(self._seen) >= MAX_CURVES):
                continue
            self._seen[key] = (tokens, score)
            self._curves.setdefault(key, Series(self._numbers)).add(tokens, score.score)

    def since(self, number: int, names: Mapping[str, str]) -> list[dict[str, Any]]:
        """Each curve's new points and newest score, by task. `names`: what a process is called, where not its name."""
        return [
            {
                "task": task, "who": names.get(who, who), "points": self._curves[task, who].since(number),
                "tokens": tokens, **score.model_dump(),
            }
            for (task, who), (tokens, score) in sorted(self._seen.items(), key=lambda it: it[0])
        ]  # fmt: skip
