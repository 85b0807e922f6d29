"""Leaks of a soak: samples of its processes and directories, and their growth after a warm-up, robust against steps,
spikes and noise."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import psutil

Curve = list[tuple[float, float]]
"""Samples: seconds, value."""

WARM_UP = 0.25
"""Share of the time in which caches fill."""

LEAST_LIFE = 0.5
"""Share of the time that a process must have lived to be judged; a learner that was killed began anew."""

ALLOWED = {  # per hour, and in all
    "memory_bytes": (8e6, 16e6),
    "handles": (2.0, 8.0),
    "threads": (2.0, 8.0),
    "spool_bytes": (1e6, 1e6),
    "objects_bytes": (1e6, 4e6),
    "copies_bytes": (1e6, 8e6),
}
"""Growth that is no leak."""

ALLOWED_A_VERSION = {"journal_bytes": 20e3, "events_bytes": 2e3}
"""Sizes of files that hold the history of the run, for each version: in the journal the contributions of three
learners, 4.8 kB each, with some 50 entries."""

MOST_POINTS = 200
"""Samples that are compared pairwise; more are thinned out evenly."""

SIGNIFICANT = 5.0
"""Standard errors by which the rises must outnumber the falls: once in some million series without a trend."""


@dataclass(frozen=True)
class Growth:
    """Of one measure.

    Attributes:
        per_hour: the median of the slopes between all pairs of samples (Theil and Sen).
        total: what that is over the time that was looked at.
        standard_errors: by which rises outnumber falls (Kendall).
    """

    per_hour: float
    total: float
    standard_errors: float

    def is_leak(self, allowed_per_hour: float, allowed: float) -> bool:
        """Whether it grows, and faster than is allowed for it, by more than `allowed` in all."""
        is_large = self.per_hour > allowed_per_hour and self.total > allowed
        return is_large and self.standard_errors > SIGNIFICANT


def growth(samples: Sequence[tuple[float, float]], warm_up_s: float) -> Growth:
    """Of samples (seconds, value) in ascending order, without those of the first `warm_up_s`."""
    kept = [each for each in samples if each[0] >= samples[0][0] + warm_up_s] if samples else []
    kept = kept[:: max(1, math.ceil(len(kept) / MOST_POINTS))]
    if len(kept) < 8:
        return Growth(0.0, 0.0, 0.0)
    pairs = [
        (later[0] - first[0], later[1] - first[1]) for first, later in combinations(kept, 2) if later[0] > first[0]
    ]
    per_s = statistics.median(rise / seconds for seconds, rise in pairs)
    num = len(kept)
    excess = sum((rise > 0) - (rise < 0) for _, rise in pairs)
    error = math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
    return Growth(3600 * per_s, per_s * (kept[-1][0] - kept[0][0]), excess / error)


class Sampler:
    """Samples processes, and files of the syncer.

    Attributes:
        curves: by names such as "syncer (4711) handles" and "disk journal_bytes".
    """

    def __init__(self, state_dir: Path, copies: Path, every_s: float) -> None:
        self.curves: dict[str, Curve] = defaultdict(list)
        self._paths = {each: state_dir / each for each in ("spool", "objects", "journal")}
        self._paths |= {"events": state_dir / "events.jsonl", "copies": copies}
        self._every_s, self._began_s, self._due_s = every_s, time.monotonic(), 0.0

    def sample(self, pids: Mapping[str, int]) -> None:
        """Sample, if it is time to. `pids`: of the processes that run, by name."""
        at_s = time.monotonic() - self._began_s
        if at_s < self._due_s:
            return
        self._due_s = at_s + self._every_s
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                values = (process.memory_info().rss, process.num_fds(), process.num_threads())
            except psutil.Error:  # it has ended
                continue
            for what, value in zip(("memory_bytes", "handles", "threads"), values, strict=True):
                self.curves[f"{name} ({pid}) {what}"].append((at_s, float(value)))
        for name, path in self._paths.items():
            self.curves[f"disk {name}_bytes"].append((at_s, float(size_of(path))))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    total = 0
    for each in (path, *path.rglob("*")):
        try:
            total += each.stat().st_size if each.is_file() else 0
        except OSError:  # it was removed meanwhile
            continue
    return total


def _judged(curves: Mapping[str, Curve]) -> Iterator[tuple[str, Curve, Growth]]:
    """The curves that are long enough."""
    times = [at for curve in curves.values() for at, _ in curve]
    seconds = max(times, default=0.0) - min(times, default=0.0)
    for name, curve in sorted(curves.items()):
        if curve[-1][0] - curve[0][0] >= LEAST_LIFE * seconds:
            yield name, curve, growth(curve, WARM_UP * seconds)


def growths(curves: Mapping[str, Curve]) -> dict[str, dict[str, float]]:
    """Of every curve that is long enough, as plain values."""
    return {name: asdict(each) for name, _, each in _judged(curves)}


def leaks(curves: Mapping[str, Curve], num_versions: int) -> Iterator[str]:
    """The curves that grow by more than is allowed, in a run of so many versions."""
    for name, curve, each in _judged(curves):
        what = name.rpartition(" ")[2]
        if (most := ALLOWED_A_VERSION.get(what)) is not None:
            if (num_bytes := curve[-1][1]) > most * num_versions:
                yield f"{name} are {num_bytes:.3g} of {num_versions} versions"
        elif each.is_leak(*ALLOWED[what]):
            yield f"{name} grows by {each.per_hour:.3g} an hour, {each.total:.3g} so far"
