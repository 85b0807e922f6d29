"""Scores with 95 % intervals, and paired differences of two models on the same documents. Plain values, no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

HELD_OUT = "held-out loss, nats per token"
"""`TaskResult.name` of a held-out loss."""

Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Score:
    """A mean over documents.

    Attributes:
        value: the mean.
        error: its standard error; None if unknown.
        num: number of documents (for a held-out loss, of blocks of text).
        low, high: 95 % interval; None if unknown.
    """

    value: float
    error: float | None
    num: int
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """The mean of the values of all documents, of which there is at least one.

        Values that are all 0 or 1 get Wilson's interval, whose width is positive even if all are 1; other values get
        Student's.
        """
        value, num = statistics.fmean(values), len(values)
        if num < 2:
            return cls(value, None, num, None, None)
        error = statistics.stdev(values) / math.sqrt(num)
        if all(each in (0.0, 1.0) for each in values):
            return cls(value, error, num, *wilson_interval(value, num))
        return cls.with_error(value, error, num)

    @classmethod
    def with_error(cls, value: float, error: float | None, num: int) -> Score:
        """A mean with a known standard error, with Student's interval."""
        half = None if error is None else t_quantile(num - 1) * error if num > 1 else None
        return cls(value, error, num, None if half is None else value - half, None if half is None else value + half)


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """The 95 % interval of a share of `num` documents (Wilson 1927)."""
    square = Z * Z / num
    centre = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / num + square / (4 * num)) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: half of a 95 % interval ÷ the standard error.

    By the expansion about the normal quantile, to 0.1 % from 6 degrees of freedom on (Abramowitz and Stegun 26.7.5);
    below, from a table.
    """
    if freedom in _FEW:
        return _FEW[freedom]
    z, n = Z, freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / math.pow(n, place + 1) for place, term in enumerate(terms))


_FEW = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}


@dataclass(frozen=True)
class TaskResult:
    """One measure of one model.

    Attributes:
        task: "held-out loss", or the name of a task or of a group of tasks.
        metric: "nats per token", or a metric of the task.
        better: "higher" or "lower".
        score: the mean over documents.
        documents: identity of each scored document; empty if the values of single documents are unknown.
        values: values of the documents, in the same order.
    """

    task: str
    metric: str
    better: str
    score: Score
    documents: tuple[str, ...] = field(default=(), repr=False)
    values: tuple[float, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """The task and its metric."""
        return f"{self.task}, {self.metric}"


@dataclass(frozen=True)
class ExportScores:
    """The scores of one export.

    Attributes:
        results: by `TaskResult.name`, in display order.
    """

    export: str
    num_parameters: int
    results: Mapping[str, TaskResult]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the values of single documents."""
        return {
            "export": self.export,
            "num_parameters": self.num_parameters,
            "results": [
                {"task": it.task, "metric": it.metric, "better": it.better, **asdict(it.score)}
                for it in self.results.values()
            ],
        }


def difference(other: TaskResult, first: TaskResult) -> Score | None:
    """`other` minus `first`, paired by document; None unless both were scored on the same documents."""
    if not other.documents or other.documents != first.documents or other.metric != first.metric:
        return None
    pairs = [theirs - ours for theirs, ours in zip(other.values, first.values, strict=True)]
    if len(pairs) < 2:
        return Score(pairs[0], None, 1, None, None)
    return Score.with_error(statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs)), len(pairs))


def differences(other: ExportScores, first: ExportScores) -> dict[str, Score]:
    """The paired differences of two exports by `TaskResult.name`, where they exist."""
    found = {
        name: difference(result, first.results[name]) for name, result in other.results.items() if name in first.results
    }
    return {name: each for name, each in found.items() if each is not None}
