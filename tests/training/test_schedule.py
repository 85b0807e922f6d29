"""The inner learning rate, against its formulas, and the estimate of a run's tokens between two reports."""

import math

import pytest

from diloco.config import ScheduleTable, parse_config
from diloco.training.optimizers import learning_rate, lr_factor
from diloco.training.state import TokenEstimate


def test_warm_up_is_linear_from_the_first_step() -> None:
    schedule = ScheduleTable(kind="constant", warmup_steps=4)
    assert [lr_factor(schedule, 10, k) for k in (1, 2, 3, 4, 5, 10, 11)] == [0.25, 0.5, 0.75, 1, 1, 1, 1]


def test_cosine_goes_from_the_peak_to_the_final_fraction_and_stays() -> None:
    def factor(step: int) -> float:
        return lr_factor(ScheduleTable(kind="cosine", warmup_steps=10, final_fraction=0.2), 110, step)

    assert factor(10) == 1.0
    assert factor(60) == pytest.approx(0.6)
    assert factor(35) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert factor(110) == factor(500) == pytest.approx(0.2)


def test_wsd_is_stable_and_then_linear() -> None:
    schedule = ScheduleTable(kind="wsd", warmup_steps=2, final_fraction=0.0, decay_fraction=0.25)
    factors = [lr_factor(schedule, 20, k) for k in (1, 2, 15, 16, 18, 20, 25)]
    assert factors == pytest.approx([0.5, 1, 1, 0.8, 0.4, 0, 0])


def test_a_run_scales_the_peak_and_sets_the_length_by_its_tokens() -> None:
    config = parse_config('[run]\nname="x"\ntokens=614_400\n[inner]\nlr=0.01\n[schedule]\nfinal_fraction=0.5\n')
    assert learning_rate(config, 50) == 0.01
    assert learning_rate(config, 600) == pytest.approx(0.005)


def test_reports_at_every_step_are_taken_as_they_are() -> None:
    budget = TokenEstimate(own=0, reported=0)
    assert [budget.now(own=k, reported=3 * k) for k in range(5)] == [0, 3, 6, 9, 12]


def test_between_reports_the_others_go_on_at_their_pace() -> None:
    budget = TokenEstimate(own=0, reported=0)
    assert budget.now(own=10, reported=0) == 10  # nothing heard yet: at least what it did itself
    assert budget.now(own=10, reported=30) == 30
    assert [budget.now(own=own, reported=30) for own in (12, 15)] == [36, 45]
    assert budget.now(own=20, reported=40) == 40  # two learners have gone
    assert budget.now(own=24, reported=40) == 44


def test_a_jump_without_own_steps_does_not_change_the_pace() -> None:
    budget = TokenEstimate(own=10, reported=100)
    assert budget.now(own=10, reported=500) == 500
    assert budget.now(own=12, reported=500) == 502


def test_the_first_steps_after_a_wait_for_the_others_do_not_end_the_run() -> None:
    budget = TokenEstimate(own=0, reported=0)
    assert budget.now(own=100, reported=200) == 200
    assert budget.now(own=101, reported=250) == 250  # the others trained while this learner waited for one of them
    assert budget.now(own=130, reported=250) == 300
    assert budget.now(own=180, reported=250) == 329  # at least what it did itself


def test_a_saved_budget_goes_on_at_its_pace() -> None:
    budget = TokenEstimate(own=0, reported=0)
    assert budget.now(own=10, reported=30) == 30
    again = TokenEstimate(own=14, reported=30)
    again.load_state_dict(budget.state_dict())
    assert again.now(own=14, reported=30) == budget.now(own=14, reported=30) == 42
    assert again.now(own=20, reported=60) == 60
    assert again.now(own=21, reported=60) == 63
