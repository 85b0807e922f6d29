"""The faults of a seed, and what is found wrong with a run of reinforcement learning."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.processes import until
from benchmarks.roles import SYNCER, Roles, violations
from tests.chaos.roles import KINDS, LOST_S, NAMES, Fault, Strike, schedule, steps_of, works

GROUPS = {
    "acknowledged": 21, "waiting": 6, "leased": 5, "merged": 4, "stale": 3, "without signal": 2, "refused": 1,
}  # fmt: skip


def test_the_same_seed_has_the_same_faults() -> None:
    assert schedule(7, 50) == schedule(7, 50) != schedule(8, 50)
    assert sum(len(strike.faults) for strike in schedule(7, 50)) == 50


def test_each_kind_happens_to_each_process() -> None:
    faults = [fault for strike in schedule(3, 2 * len(KINDS) * len(NAMES)) for fault in strike.faults]
    assert {(fault.kind, fault.name) for fault in faults} == {(kind, name) for kind in KINDS for name in NAMES}
    assert max(fault.seconds for fault in faults if fault.kind == "short freeze") < LOST_S
    assert min(fault.seconds for fault in faults if fault.kind == "long freeze") > LOST_S


def test_two_faults_at_once_have_two_targets() -> None:
    pairs = [strike.faults for strike in schedule(5, 200) if len(strike.faults) == 2]
    assert len(pairs) > 10
    assert all(one.name != other.name and 0 <= other.after_s < LOST_S for one, other in pairs)


def test_faults_begin_and_end_in_order() -> None:
    one, other = Fault("kill", "reward-0", 0.0, 0.0), Fault("long freeze", SYNCER, 0.0, 6.0)
    steps = list(steps_of(Strike(0.0, (one, other))))
    assert [(begins, fault.name) for _, begins, fault in steps] == [
        (True, "reward-0"), (True, SYNCER), (False, "reward-0"), (False, SYNCER),
    ]  # fmt: skip


def test_groups_that_add_up_and_grow_are_right() -> None:
    assert violations({}, GROUPS) == []
    assert violations(GROUPS, GROUPS) == []
    assert violations(GROUPS, {**GROUPS, "acknowledged": 22, "merged": 7, "waiting": 4}) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"waiting": 5}, "21 groups are acknowledged, and their states are"),
        ({"leased": -1, "waiting": 12}, "21 groups are acknowledged, and their states are"),
        ({"acknowledged": 20, "waiting": 5}, "20 groups are acknowledged, and 21 were before"),
        ({"merged": 3, "waiting": 7}, "3 groups are merged, and 4 were before"),
        ({"stale": 2, "waiting": 7}, "2 groups are stale, and 3 were before"),
    ],
)
def test_a_wrong_account_is_found(change: dict[str, int], what: str) -> None:
    (found,) = violations(GROUPS, {**GROUPS, **change})
    assert found.startswith(what)


def test_a_process_that_does_nothing_new_does_not_work() -> None:
    def status(generated: int, version: int, contributors: list[str]) -> dict[str, object]:
        workers = [{"name": "rollout-0", "generated": generated, "scored": 0}]
        return {
            "groups": {"workers": workers}, "fragments": [{"version": version, "last_contributors": contributors}]
        }  # fmt: skip

    first = status(3, 5, ["trainer-0", "trainer-1"])
    assert not works("rollout-0", first, first)
    assert works("rollout-0", first, status(4, 5, []))
    assert not works("rollout-1", first, status(4, 5, []))
    assert not works("trainer-0", first, status(3, 6, ["trainer-0"]))
    assert not works("trainer-0", first, status(3, 7, ["trainer-1"]))
    assert works("trainer-0", first, status(3, 7, ["trainer-0"]))


@pytest.mark.slow
def test_a_process_that_ends_by_itself_is_found(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('run = {name = "none", tokens = 1}\n')
    with Roles(tmp_path, tmp_path / "run.toml") as roles:
        (tmp_path / "run.toml").unlink()
        roles.restart("rollout-1")
        until(lambda: roles.look() or bool(roles.wrong), "its end is not seen")
        assert roles.wrong == ["rollout-1 ended by itself with code 2; see logs/rollout-1.log"]
        assert not roles.look()
        assert len(roles.wrong) == 1  # it is said once
        assert roles.processor_s()["rollout"] > 0
