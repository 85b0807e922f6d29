"""The study of staleness and H: its cells are what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from benchmarks.rl_study import Point, Record, Rollouts, State, config_of, run_cell, summary, supervised

from diloco.config import RunConfig
from diloco.rl.trainer import Policy

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
STEPS = 20


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return config_of(3, "rl.groups_per_step=2", "rl.supervised_steps=40")


@pytest.fixture(scope="module")
def start(config: RunConfig) -> State:
    return supervised(config)


@pytest.mark.slow
def test_a_cell_repeats_itself(config: RunConfig, start: State) -> None:
    first, again = (run_cell("H=5,s=1", config, start, steps=STEPS) for _ in range(2))
    assert [point.step for point in first] == [0, STEPS]
    assert [replace(point, cpu_s=0.0) for point in first] == [replace(point, cpu_s=0.0) for point in again]
    assert first[0].accuracy != first[1].accuracy


def test_one_learner_that_always_merges_is_a_plain_loop(config: RunConfig, start: State) -> None:
    record = Record("plain", config, start)
    rollouts, policy = Rollouts(config, 0, start, record), Policy(config, begins=False)
    policy.model.load_state_dict(start)
    for step in range(1, STEPS + 1):
        rollouts.publish(step - 1, policy.model.state_dict)
        policy.step(rollouts.batch(), step)
    record.add(STEPS, policy.model.state_dict())
    merged = run_cell("H=1,s=0", config, start, steps=STEPS, learners=1)[-1]
    # An outer step of rate 1 is θ − (θ − θ'), which is θ' but for rounding; no token is drawn at such an edge here.
    assert merged.accuracy == pytest.approx(record.points[-1].accuracy, abs=1e-3)
    assert (merged.generated, merged.trained) == (record.generated, record.trained)


def test_groups_are_those_of_the_version_so_many_ago(config: RunConfig, start: State) -> None:
    rollouts = Rollouts(config, 2, start, Record("stale", config, start))
    seen = []
    for version in range(5):
        rollouts.publish(version, lambda: start)
        seen.append(set(rollouts.batch().staleness.tolist()))
    assert seen == [{0}, {1}, {2}, {2}, {2}]


def test_groups_have_the_log_probabilities_of_that_version(config: RunConfig, start: State) -> None:
    other = {name: value + 0.05 * torch.randn_like(value) for name, value in start.items()}
    batches = []
    for states in ((start,), (start, other)):
        rollouts = Rollouts(config, 1, start, Record("stale", config, start))
        for version, state in enumerate(states):
            rollouts.publish(version, lambda state=state: state)
        batches.append(rollouts.batch())
    assert torch.equal(batches[0].rollout_log_probs, batches[1].rollout_log_probs)


def test_the_summary_has_means_and_intervals() -> None:
    def run(seed: int, last: float) -> list[Point]:
        return [Point("H=5,s=1", seed, step, it, step / 2, step, step) for step, it in ((0, 0.1), (100, last))]

    runs = {("H=5,s=1", seed): run(seed, last) for seed, last in enumerate((0.3, 0.4, 0.5))}
    [row] = summary(runs, ["H=5,s=1"])
    assert row["+ at 100"] == pytest.approx([0.3, 4.303 * 0.1 / math.sqrt(3)])
    assert row["+ at 32 s"][0] == pytest.approx(0.3 * 32 / 50)
    assert (row["reached 0.4"], row["s to 0.4"], row["− base"]) == (2, [50.0, 0.0], [])
