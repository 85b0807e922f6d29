"""Trainers: batches of groups from a syncer, the loss in micro-batches, the first model, whole runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from benchmarks.processes import until
from tests.rl.toy import Rollout, config_of, group_of, groups_of, served
from tests.syncer.runs import fall_silent, num_live
from torch import Tensor

import diloco
from diloco.config import RunConfig
from diloco.errors import ConfigError
from diloco.protocol.steering import Order
from diloco.rl.batching import Batch, Scored, batch_of, batches
from diloco.rl.trainer import Policy, run_trainer
from diloco.training.spec import StopRequest


def batch(*rewards: tuple[float, ...]) -> Batch:
    config = config_of()
    groups = [Scored(group_of(number, (3, 5), "", config), its) for number, its in enumerate(rewards)]
    return batch_of(groups, (4, 5), "group")


def test_a_batch_has_the_completions_at_the_positions_of_their_predictions() -> None:
    found = batch((1, 0, 0, 0), (0, 0, 0, 4))
    assert found.tokens.tolist()[:4] == [
        [97, 63, 65, 0, 0], [97, 63, 66, 0, 0], [97, 63, 67, 0, 0], [97, 63, 68, 69, 70],
    ]  # fmt: skip
    assert found.mask.tolist()[:4] == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1]]
    assert torch.equal(found.rollout_log_probs, -5 * found.mask)
    assert found.rewards.tolist() == [[1, 0, 0, 0], [0, 0, 0, 4]]
    assert torch.allclose(found.advantages, torch.tensor([1.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, 1.5]), rtol=1e-3)
    assert (found.staleness.tolist(), found.num_tokens) == ([1, 1], 16)


def gradients(policy: Policy, batch: Batch) -> list[Tensor]:
    """Of a step."""
    found = list[Tensor]()
    parameters = list(policy.model.parameters())
    hook = policy.optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.clone() for p in parameters))
    policy.step(batch, 1)
    hook.remove()
    return found


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_micro_batches_have_the_gradient_of_the_batch(loss: str) -> None:
    kinds = (f'rl.loss="{loss}"', "rl.kl=0.1")
    whole = gradients(Policy(config_of(*kinds), begins=True), batch((1, 0, 0, 0), (0, 0, 0, 4)))
    options = ("train.accumulate=3", "train.global_batch=3")  # 8 sequences: 3, 3 and 2
    parts = gradients(Policy(config_of(*kinds, *options), begins=True), batch((1, 0, 0, 0), (0, 0, 0, 4)))
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in whole)
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)  # fp32 sums in another order


def test_what_is_rewarded_becomes_more_probable() -> None:
    policy = Policy(config_of(), begins=True)
    found = batch((1, 0, 0, 0))

    def probabilities() -> Tensor:
        with torch.no_grad():
            return policy.model(input_ids=found.tokens[:1, :2]).logits[0, -1].softmax(-1)

    before = probabilities()
    for step in range(1, 6):
        policy.step(found, step)
    growth = probabilities() / before
    assert growth[65] > 1.2
    assert growth[65] > growth[66:69].max()


@pytest.mark.slow
def test_the_first_model_has_learnt_answers_and_is_the_reference_of_every_trainer() -> None:
    start = ("rl.supervised_steps=150", "rl.supervised_batch=16", "rl.supervised_lr=1e-2")
    said = list[str]()
    first = Policy(config_of(*start), begins=True, say=said.append)
    tokens = torch.tensor([[ord("c"), ord("?")]])
    assert first.model(input_ids=tokens).logits[0, -1].argmax() == ord("C")
    assert first.model(input_ids=torch.tensor([[ord("c"), ord("?"), ord("C")]])).logits[0, -1].argmax() == 0
    assert len(said) == 1

    joiner = Policy(config_of(*start, "rl.kl=0.1"), begins=False)
    assert joiner.reference is not None
    for own, reference in zip(first.model.parameters(), joiner.reference.parameters(), strict=True):
        assert torch.equal(own, reference)
    assert Policy(config_of(*start), begins=False).reference is None


@pytest.mark.timeout(300)
def test_two_trainers_train_a_run_and_every_group_is_accounted_for(tmp_path: Path) -> None:
    with (
        served(tmp_path, 2, "rl.groups_per_step=2", "run.learners=2") as (syncer, config),
        ThreadPoolExecutor() as pool,
    ):
        trainers = [pool.submit(run_trainer, config, name) for name in ("a", "b")]
        with Rollout(syncer, config).working():
            a, b = (trainer.result() for trainer in trainers)
        assert (a.reason, a.steps, b.reason, b.steps) == ("steps", 6, "steps", 6)
        assert a.metrics["versions"] == b.metrics["versions"] == [3]
        assert a.metrics["digests"] == b.metrics["digests"]
        groups = groups_of(syncer)
        assert (groups["merged"], groups["leased"]) == (2 * 6 * 2, 0)
        assert a.tokens == b.tokens == 6 * 2 * 8
        assert a.metrics["ledger"][0]["merged"] == a.tokens
        assert a.metrics["reward"] == 0.25


def test_a_trainer_that_waits_for_groups_stops_and_ends_with_the_run(tmp_path: Path) -> None:
    with served(tmp_path, 1) as (syncer, config), ThreadPoolExecutor() as pool:
        stop = StopRequest()
        waiting = pool.submit(run_trainer, config, "a", stop=stop)
        until(lambda: num_live(syncer) == 1, "the trainer does not join")
        stop.set()
        assert waiting.result().reason == "stopped"

        waiting = pool.submit(run_trainer, config, "a")
        until(lambda: num_live(syncer) == 1, "the trainer does not join again")
        syncer.driver.ask(lambda driver: driver.steer(Order("end"), "test", lambda _: None))
        assert waiting.result().reason == "drained"


@contextmanager
def trained(config: RunConfig, name: str = "a") -> Iterator[tuple[diloco.Learner, Policy, Generator[Batch]]]:
    """A learner with its batches."""
    policy = Policy(config, begins=True)
    exchange = diloco.connect(config.syncer.address, run="toy", learner=name, initialise="if-empty")
    with diloco.Learner(policy.model, policy.optimizer, exchange=exchange) as learner:
        with closing(batches(learner, config)) as iterator:
            yield learner, policy, iterator


def test_a_group_that_became_stale_is_dropped_and_counted(tmp_path: Path) -> None:
    with served(tmp_path, 1, "rl.max_staleness=0", "rl.queue=4") as (syncer, config), ThreadPoolExecutor() as pool:
        rollout = Rollout(syncer, config)
        with trained(config) as (learner, policy, iterator):
            first = pool.submit(next, iterator)
            rollout.make(2)
            policy.step(first.result(), 1)
            until(lambda: groups_of(syncer)["leased"] == 2, "the trainer leases nothing ahead")
            learner.step(tokens=8)
            assert learner.versions == (1,)
            second = pool.submit(next, iterator)
            rollout.make(1)
            assert second.result().staleness.tolist() == [0]
            groups = groups_of(syncer)
            assert (groups["merged"], groups["stale"], groups["leased"]) == (1, 1, 1)


def test_a_group_whose_bytes_are_damaged_is_refused(tmp_path: Path) -> None:
    with served(tmp_path, 1) as (syncer, config), ThreadPoolExecutor() as pool:
        rollout = Rollout(syncer, config)
        with trained(config) as (learner, policy, iterator):
            first = pool.submit(next, iterator)
            rollout.make(1)
            policy.step(first.result(), 1)
            [number] = rollout.make(1)
            until(lambda: groups_of(syncer)["leased"] == 2, "the trainer leases nothing ahead")
            group = syncer.driver.ask(lambda driver: driver.core.groups.groups[number])
            name = dict(syncer.driver.manifest.packs)[group.pack]
            [path] = (tmp_path / "state").rglob(name.rpartition("/")[2] + "*")
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.chmod(0o600)
            path.write_bytes(data)
            learner.step(tokens=8)
            second = pool.submit(next, iterator)
            rollout.make(1)
            assert len(second.result().rewards) == 1
            groups = groups_of(syncer)
            assert (groups["merged"], groups["refused"], groups["leased"]) == (1, 1, 1)
            [(who, reason)] = groups["refusals"]
            assert who == "trainer a"
            assert "are not those that were written" in reason


def test_an_evicted_trainer_goes_on_as_a_new_incarnation(tmp_path: Path) -> None:
    with served(tmp_path, 2, "rl.groups_per_step=2", "run.steps=100") as (syncer, config):
        with Rollout(syncer, config).working(), trained(config) as (learner, policy, iterator):
            incarnations = set[int]()
            for step, found in enumerate(iterator, 1):
                policy.step(found, step)
                if step in (3, 6):
                    fall_silent(syncer, "a")  # in the middle of a round, with groups leased ahead
                learner.step(tokens=found.num_tokens)
                incarnations.add(learner.metrics()["incarnation"])
                if step >= 12 and len(incarnations) == 3:
                    break
            learner.finish()
        groups = groups_of(syncer)
        [fragment] = syncer.driver.ask(lambda driver: driver.status())["fragments"]
        assert groups["leased"] == 0
        assert groups["merged"] >= 2 * 2  # a round at least
        assert fragment["ledger"]["merged"] == 8 * groups["merged"]  # nothing was trained twice


def test_groups_that_were_asked_for_as_an_ended_incarnation_are_read_as_the_next_one(tmp_path: Path) -> None:
    with served(tmp_path, 1) as (syncer, config), ThreadPoolExecutor() as pool:
        rollout = Rollout(syncer, config)
        with trained(config) as (learner, policy, iterator):
            incarnation = learner.metrics()["incarnation"]
            first = pool.submit(next, iterator)
            rollout.make(2)
            policy.step(first.result(), 1)
            until(lambda: groups_of(syncer)["leased"] == 2, "the trainer leases nothing ahead")
            learner.step(tokens=8)
            fall_silent(syncer, "a")
            policy.step(next(iterator), 2)
            assert learner.metrics()["incarnation"] > incarnation
            learner.step(tokens=8)
            groups = groups_of(syncer)
            assert (groups["acknowledged"], groups["merged"]) == (2, 2)


def test_what_cannot_train_on_groups_is_refused() -> None:
    def life(index: int, exchange: object) -> None:
        policy = Policy(config_of(), begins=True)
        with diloco.Learner(policy.model, policy.optimizer, method=diloco.DiLoCo(), exchange=exchange) as learner:  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="a learner of one process over a syncer"):
                batches(learner, config_of())

    diloco.run_local(life, learners=1)
    with pytest.raises(ConfigError, match="queue = 2 is below rl.groups_per_step = 3"):
        config_of("rl.groups_per_step=3", "rl.queue=2")
    with pytest.raises(ConfigError, match=r"warm_start\.steps has no effect"):
        run_trainer(config_of("warm_start.steps=2"), "a")
    with pytest.raises(ConfigError, match="letters has no answers"):
        Policy(config_of("rl.supervised_steps=1", 'task.letters.source="tests.rl.toy:NoAnswers"'), begins=True)
