"""A leak that was planted is found, and none in noise, steps and saw teeth."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from random import Random

import pytest
from tests.chaos.leaks import Sampler, growth, growths, leaks

MB = 1e6


def series(seed: int, leak_per_hour: float, *, saw: float = 0.0, jump: float = 0.0) -> list[tuple[float, float]]:
    """An hour of resident memory, a sample each 10 s: a fast rise at first, then noise of 2 MB."""
    random = Random(seed)
    found = []
    for index in range(360):
        at_s = 10.0 * index
        value = 300 * MB + min(at_s, 300) * 0.2 * MB + leak_per_hour * at_s / 3600 + random.gauss(0, 2 * MB)
        found.append((at_s, value + saw * (index % 40) / 40 + (jump if index > 180 else 0)))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_leak_is_found(seed: int) -> None:
    assert growth(series(seed, 20 * MB), 600).is_leak(5 * MB, 4 * MB)
    assert growth(series(seed, 20 * MB, saw=10 * MB), 600).is_leak(5 * MB, 4 * MB)
    assert growth([(at, float(int(at // 100))) for at in range(0, 3600, 10)], 600).is_leak(1.0, 3.0)  # handles


@pytest.mark.parametrize("seed", range(5))
def test_no_leak_is_found_where_there_is_none(seed: int) -> None:
    assert not growth(series(seed, 0.0), 600).is_leak(0.0, 4 * MB)
    assert not growth(series(seed, 0.0, saw=50 * MB), 600).is_leak(5 * MB, 4 * MB)
    assert not growth([(float(at), 40.0 + (at == 500)) for at in range(0, 3600, 10)], 600).is_leak(0.0, 0.0)


def test_too_few_samples_say_nothing() -> None:
    assert growth([(0.0, 1.0), (10.0, 100.0)], 0).per_hour == 0


def test_a_history_that_grows_by_more_than_its_versions_is_found() -> None:
    curves = {"disk journal_bytes": [(10.0 * index, 1e5 * index) for index in range(360)]}
    assert list(leaks(curves, 2000)) == []
    assert list(leaks(curves, 1000)) == ["disk journal_bytes are 3.59e+07 of 1000 versions"]


def test_a_process_that_was_there_for_less_than_half_of_the_time_is_not_judged() -> None:
    curves = {
        "syncer (1) handles": [(10.0 * index, 40.0) for index in range(360)],
        "learner-0 (2) handles": [(10.0 * index, float(index)) for index in range(100)],
    }
    assert set(growths(curves)) == {"syncer (1) handles"}
    assert list(leaks(curves, 1)) == []


def test_what_this_process_and_a_directory_hold_is_sampled(tmp_path: Path) -> None:
    state, backups = tmp_path / "syncer", tmp_path / "copies"
    (state / "journal").mkdir(parents=True)
    (state / "journal" / "part").write_bytes(bytes(700))
    (state / "events.jsonl").write_bytes(bytes(30))
    sampler = Sampler(state, backups, every_s=3600.0)
    sampler.sample({"syncer": os.getpid(), "ended": ended_pid()})
    sampler.sample({"syncer": os.getpid()})  # it is not time yet
    pid = os.getpid()
    values = {name: value for name, [(_, value)] in sampler.curves.items()}
    assert set(values) == {
        *(f"syncer ({pid}) {what}" for what in ("memory_bytes", "handles", "threads")),
        *(f"disk {what}_bytes" for what in ("spool", "objects", "journal", "events", "copies")),
    }
    assert values[f"syncer ({pid}) memory_bytes"] > 1e6
    assert values[f"syncer ({pid}) threads"] >= 1
    assert (values["disk journal_bytes"], values["disk events_bytes"], values["disk copies_bytes"]) == (700, 30, 0)


def ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid
