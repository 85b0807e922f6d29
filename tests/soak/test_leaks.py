"""A leak that was planted is found, and none in noise, steps and saw teeth."""

from __future__ import annotations

from random import Random

import pytest
from tests.soak.__main__ import STUCK_S, note, stuck
from tests.soak.leaks import growth

from diloco.events import Contributed, Published

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


def test_a_fragment_that_never_gets_a_version_is_stuck() -> None:
    newest: dict[int, float] = {}
    work = {"learner": "a", "round": 0, "base": 0, "tokens": 1, "steps": 1, "num_bytes": 1}
    note([Contributed(t=float(t), fragment=fragment, **work) for t in (1, 5) for fragment in (0, 1)], newest)
    note([Published(t=8.0, fragment=0, version=1, digest="d", num_bytes=1)], newest)
    assert newest == {0: 8.0, 1: 1.0}
    assert stuck(newest, 1.5 + STUCK_S) == ["fragment 1 has no new version for 120 s"]
    assert stuck(newest, 0.5 + STUCK_S) == []
