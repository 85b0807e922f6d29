"""The estimate of a run's tokens between two reports."""

from diloco.training.budget import Budget


def test_reports_at_every_step_are_taken_as_they_are() -> None:
    budget = Budget(own=0, heard=0)
    assert [budget.spent(own=k, heard=3 * k) for k in range(5)] == [0, 3, 6, 9, 12]


def test_between_reports_the_others_go_on_at_their_pace() -> None:
    budget = Budget(own=0, heard=0)
    assert budget.spent(own=10, heard=0) == 10  # nothing heard yet: at least what it did itself
    assert budget.spent(own=10, heard=30) == 30
    assert [budget.spent(own=own, heard=30) for own in (12, 15)] == [36, 45]
    assert budget.spent(own=20, heard=40) == 40  # two learners have gone
    assert budget.spent(own=24, heard=40) == 44


def test_a_jump_without_own_steps_does_not_change_the_pace() -> None:
    budget = Budget(own=10, heard=100)
    assert budget.spent(own=10, heard=500) == 500
    assert budget.spent(own=12, heard=500) == 502


def test_a_saved_budget_goes_on_at_its_pace() -> None:
    budget = Budget(own=0, heard=0)
    assert budget.spent(own=10, heard=30) == 30
    again = Budget(own=14, heard=30)
    again.load_state_dict(budget.state_dict())
    assert again.spent(own=14, heard=30) == budget.spent(own=14, heard=30) == 42
    assert again.spent(own=20, heard=60) == 60
    assert again.spent(own=21, heard=60) == 63
