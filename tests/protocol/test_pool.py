"""Pool schedules as values: sizes, and what is refused."""

from __future__ import annotations

import pytest

from diloco.config import dump_config, parse_config
from diloco.errors import ConfigError
from diloco.protocol.steering import Pool, PoolSchedule

RUN_FILE = """
run = {name = "pool", tokens = 100_000, learners = 8}
train = {global_batch = 8}
warm_start = {steps = 10}
"""


def sizes(schedule: PoolSchedule, learners: int, steps: int) -> list[int]:
    pool = Pool(schedule, learners, steps)
    return [pool.size(step) for step in range(steps)]


def test_the_sizes_of_the_papers_schedules() -> None:
    assert sizes("constant", 3, 4) == [3, 3, 3, 3]
    assert sizes("doubling", 8, 4) == [4, 4, 8, 8]
    assert sizes("halving", 8, 4) == [8, 8, 4, 4]
    assert sizes("ramp up", 4, 8) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert sizes("ramp down", 4, 8) == [4, 4, 3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize("steps", [8, 15, 100])
def test_a_schedule_and_its_mirror_take_the_same_compute(steps: int) -> None:
    assert sizes("doubling", 8, steps) == sizes("halving", 8, steps)[::-1]
    assert sizes("ramp up", 8, steps) == sizes("ramp down", 8, steps)[::-1]


def test_before_its_beginning_and_after_its_end_a_pool_has_the_size_of_these() -> None:
    up, down = Pool("ramp up", 4, end_step=28, begin_step=20), Pool("ramp down", 4, end_step=28, begin_step=20)
    assert [up.size(step) for step in (0, 20, 22, 27, 28, 1000)] == [1, 1, 2, 4, 4, 4]
    assert [down.size(step) for step in (0, 20, 22, 27, 28, 1000)] == [4, 4, 3, 1, 1, 1]
    assert [up.has_shrunk(step) for step in (0, 27, 1000)] == [False] * 3
    assert [down.has_shrunk(step) for step in (0, 21, 22, 1000)] == [False, False, True, True]
    assert (up.smallest, down.smallest, Pool("doubling", 6, 10).smallest) == (1, 1, 3)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (("ramp upp", 4, 8), "did you mean 'ramp up'"),
        (("doubling", 5, 8), "half of its 5 learners"),
        (("ramp up", 1, 8), "1 learners over 8 steps leave nothing"),
        (("ramp down", 9, 8), "9 steps or more"),
        (("constant", 0, 8), "at least 1, not 0"),
        (("constant", 4, 8, 8), "at least 9, not 8"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(values: tuple[PoolSchedule, int, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Pool(*values)


def test_a_run_file_says_the_schedule_and_its_other_tables_the_rest() -> None:
    config = parse_config(RUN_FILE + 'pool = {schedule = "ramp up"}\n')
    assert Pool.of(config.pool_values) == Pool("ramp up", 8, config.schedule_steps, begin_step=10)
    assert parse_config(dump_config(config)) == config
    own = parse_config(RUN_FILE + 'pool = {schedule = "halving", begin_step = 20, end_step = 60}\n')
    assert Pool.of(own.pool_values) == Pool("halving", 8, 60, begin_step=20)
    assert Pool.of(parse_config(RUN_FILE).pool_values) is None


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('{schedul = "halving"}', 'unknown key "pool.schedul"; did you mean "schedule"'),
        ('{schedule = "ramp"}', "'ramp' is not a known pool schedule; did you mean 'ramp up'"),
        ('{schedule = "ramp up", end_step = 12}', "8 learners over 2 steps"),
        ('{schedule = "halving", begin_step = 90, end_step = 90}', "at least 91, not 90"),
    ],
)
def test_a_pool_table_that_cannot_be_is_refused(table: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Pool.of(parse_config(f"{RUN_FILE}pool = {table}\n").pool_values)
