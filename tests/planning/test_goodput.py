"""Goodput: the published table, formulas against simulation, and limits."""

from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies import goodput as study
from studies.pages import filled

from diloco.errors import ConfigError
from diloco.planning.goodput import (
    FailureTimes,
    Fleet,
    Goodput,
    LearnerSpeeds,
    all_stopped,
    availability,
    closed_form,
    simulate,
)

NEVER_FAILS = FailureTimes(mtbi_s=1e30)
UNEQUAL = (1.0, 1.0, 1.0, 0.5)

# ------------------------------------------------------------------------------------------------- the published table


@pytest.fixture(scope="module")
def published() -> list[tuple[Goodput, float]]:
    """What was found for each cell of the table, and what the table says."""
    return [(simulate(fleet), percent) for fleet, percent in study.cells()]


def test_every_published_value_within_three_and_a_half_points_and_their_mean_within_one_point_two(
    published: list[tuple[Goodput, float]],
) -> None:
    assert len(published) == 16
    for distances in (
        [abs(it.goodput - percent) for it, percent in published],
        [abs((it.closed_form or 0.0) - percent) for it, percent in published],
    ):
        assert max(distances) <= 3.5
        assert fmean(distances) <= 1.2


def test_formula_and_simulation_of_the_published_cells_within_a_fifth_of_a_point(
    published: list[tuple[Goodput, float]],
) -> None:
    # 0.7 is asked for; a standard error is 0.02 to 0.1, and an interval that fits is an interval that is right.
    for it, _ in published:
        assert it.closed_form == pytest.approx(it.goodput, abs=0.2)
        assert it.interval[0] < it.goodput < it.interval[1]


def test_only_chips_per_learner_matter_to_elastic_and_decoupled() -> None:
    same = [Fleet(300_000, 1, "elastic"), Fleet(300_000, 1), Fleet(600_000, 2), Fleet(2_400_000, 8)]
    assert len({round(closed_form(fleet) or 0.0, 12) for fleet in same}) == 1


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    page = study.PAGE.read_text(encoding="utf-8")
    assert filled(page, study.tables()) == page, "run python -m studies.goodput"


# ------------------------------------------------------------------------------------------------------- the formulas


@settings(max_examples=30)
@given(
    mtbf_s=st.floats(20.0, 1e6),
    step_s=st.floats(0.05, 20.0),
    down_s=st.floats(1.0, 200.0),
    repair_s=st.floats(5.0, 5000.0),
    up_s=st.floats(1.0, 200.0),
    elastic=st.booleans(),
)
def test_formula_and_simulation_agree_for_any_times(
    mtbf_s: float, step_s: float, down_s: float, repair_s: float, up_s: float, elastic: bool
) -> None:
    times = FailureTimes(mtbi_s=1000 * mtbf_s, down_s=down_s, repair_s=repair_s, up_s=up_s, step_s=step_s)
    it = simulate(Fleet(1000, 1, "elastic" if elastic else "data-parallel", times))
    # The formula for elastic stops is asymptotic (within a point), and the simulation has five standard errors.
    noise = 2.5 * (it.interval[1] - it.interval[0]) / 2
    assert it.goodput == pytest.approx(it.closed_form, abs=noise + (1.0 if elastic else 0.0))


def test_no_stop_no_loss_and_no_failure_no_loss() -> None:
    at_once = FailureTimes(down_s=0, repair_s=0, up_s=0)
    for fleet in (
        Fleet(10**6, 1, "data-parallel", at_once),
        Fleet(10**6, 4, times=at_once),
        Fleet(10**6, 4, times=NEVER_FAILS),
    ):
        it = simulate(fleet)
        assert (it.goodput, it.stopped, it.waiting, it.closed_form) == pytest.approx((100, 0, 0, 100))


def test_availability_by_hand() -> None:
    # Steps of no length: the next failure is 1/λ = 100 s away. Up-scaling 300 s after the first failure of a cycle.
    times = FailureTimes(repair_s=300, up_s=50, down_s=25)
    assert availability(0.01, 1e-9, times, elastic=False) == pytest.approx(100 / 450)
    failures = 300 / 125 + (100**2 / 125**2 + 1) / 2
    assert availability(0.01, 1e-9, times, elastic=True) == pytest.approx(100 / (100 + 25 + 50 / failures))


def test_a_repair_within_the_first_stop_is_one_of_its_own() -> None:
    times = FailureTimes(mtbi_s=1e6, down_s=80, repair_s=20, up_s=15, step_s=10)
    it = simulate(Fleet(30_000, 1, "elastic", times))
    run_s = 10 / (1 - 2.718281828459045**-0.3)
    assert it.closed_form == pytest.approx(100 * run_s / (run_s + 80 + 15))
    assert it.goodput == pytest.approx(it.closed_form, abs=0.5)  # five standard errors


def test_chance_that_nobody_runs() -> None:
    assert all_stopped(Fleet(10**6, 1, "elastic")) == pytest.approx(1 - (closed_form(Fleet(10**6, 1, "elastic")) or 0))
    alone = 1 - (closed_form(Fleet(125_000, 1)) or 0)
    assert all_stopped(Fleet(10**6, 8)) == pytest.approx(alone**8)
    faster = Fleet(10**6, 2, speeds=LearnerSpeeds(relative=(1.0, 0.5)))
    assert 0 < all_stopped(faster) < 1


def test_learners_that_stop_until_the_repair() -> None:
    elastic, whole = (Fleet(10**6, 8, elastic_learners=kind) for kind in (True, False))
    assert closed_form(whole) == pytest.approx(closed_form(Fleet(125_000, 1, "data-parallel")))
    assert simulate(whole).goodput == pytest.approx(100 * (closed_form(whole) or 0), abs=0.5)
    assert (closed_form(whole) or 0) < (closed_form(elastic) or 0)


# ------------------------------------------------------------------------------------------------- speeds and waiting


def test_lock_step_waits_for_the_slowest_and_decoupled_learners_do_not() -> None:
    speeds = LearnerSpeeds(relative=UNEQUAL)
    lock_step = simulate(Fleet(4, 4, "data-parallel", NEVER_FAILS, speeds))
    assert lock_step.goodput == pytest.approx(100 * 4 * 0.5 / 3.5)
    assert lock_step.waiting == pytest.approx(100 - lock_step.goodput)
    decoupled = simulate(Fleet(4, 4, times=NEVER_FAILS, speeds=speeds))
    assert (decoupled.goodput, decoupled.waiting) == pytest.approx((100, 0))


def test_steps_that_vary_cost_lock_step_the_mean_of_their_maximum() -> None:
    # A gamma distribution of coefficient 1 is exponential: the maximum of four has the mean 1 + 1/2 + 1/3 + 1/4.
    expected = 100 / (1 + 1 / 2 + 1 / 3 + 1 / 4)
    speeds = LearnerSpeeds(jitter=1.0)
    lock_step = simulate(Fleet(4, 4, "elastic", NEVER_FAILS, speeds))
    assert lock_step.goodput == pytest.approx(expected, rel=0.02)  # 20,000 samples of the maximum
    assert lock_step.closed_form is None


def test_learners_that_differ_stop_as_often_as_the_formula_says() -> None:
    """The formula knows the mean step alone."""
    fleet = Fleet(1_200_000, 8, speeds=LearnerSpeeds(0.3, (1.0,) * 6 + (0.68,) * 2))
    it = simulate(fleet)
    assert it.goodput == pytest.approx(it.closed_form, abs=0.5)
    assert it.goodput + it.stopped == pytest.approx(100)


# -------------------------------------------------------------------------------------------------------- its numbers


def test_seeded() -> None:
    for fleet in (Fleet(10**6, 8), Fleet(10**6, 8, speeds=LearnerSpeeds(0.1))):
        assert simulate(fleet, 3) == simulate(fleet, 3)
        assert simulate(fleet, 3).goodput != simulate(fleet, 4).goodput


@pytest.mark.parametrize("speeds", [LearnerSpeeds(), LearnerSpeeds(0.1)])
def test_intervals_hold_what_they_promise(speeds: LearnerSpeeds) -> None:
    fleet = Fleet(1_200_000, 4, speeds=speeds)
    found = [simulate(fleet, seed) for seed in range(12)]
    centre = fmean(it.goodput for it in found)
    held = sum(it.interval[0] <= centre <= it.interval[1] for it in found)
    assert held >= 9  # 11 or 12 expected; fewer than 9 once in five hundred


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fleet(4, 8), "4 chips cannot be shared by 8 learners"),
        (lambda: Fleet(8, 2, speeds=LearnerSpeeds(relative=(1.0,))), "1 speeds for 2 learners; give one for each"),
        (lambda: Fleet(8, 2, "elastik"), "there is no mode 'elastik'; choose data-parallel, elastic, decoupled"),
        (lambda: Fleet(0), "chips must be a whole number of at least 1, not 0"),
        (lambda: LearnerSpeeds(float("nan")), "step times that vary by nan % of their mean cannot be simulated"),
        (lambda: LearnerSpeeds(relative=(1.0, 0.0)), "a learner's speed must be .* not 0.0"),
    ],
)
def test_wrong_numbers_are_refused_in_one_sentence(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
