"""A leak that was planted is found, and none in noise, steps and saw teeth."""

from __future__ import annotations

from random import Random

import pytest
from tests.soak.__main__ import STUCK_S, judge, stuck
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


def test_a_fragment_that_gets_no_version_is_stuck() -> None:
    work = {"learner": "a", "round": 0, "base": 0, "tokens": 1, "steps": 1, "num_bytes": 1}

    def contributed(fragment: int, t: float) -> Contributed:
        return Contributed(t=t, fragment=fragment, **work)

    def published(fragment: int, t: float) -> Published:
        return Published(t=t, fragment=fragment, version=1, digest="d", num_bytes=1)

    good = [contributed(0, 1), contributed(1, 1), published(0, 5), published(1, 5)]
    assert stuck(good) == []
    assert stuck([*good, contributed(0, 4 + STUCK_S), published(0, 900)]) == ["fragment 0 had no new version for 895 s"]
    assert stuck([*good, contributed(1, 6 + STUCK_S)]) == ["fragment 1 had no new version for 121 s"]
    assert stuck([contributed(0, 1), contributed(0, 2 + STUCK_S)]) == ["fragment 0 had no new version for 121 s"]


def test_a_history_that_grows_by_more_than_its_versions_is_found() -> None:
    curves = {"disk journal_bytes": [(10.0 * index, 1e5 * index) for index in range(360)]}
    assert judge(curves, 3590, 2000)[1] == []
    assert judge(curves, 3590, 1000)[1] == ["disk journal_bytes are 3.59e+07 of 1000 versions"]
