"""Beginnings and unequal learners: warm starts, late joiners, batches of different size, learners of a part of the
model."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import diloco
from diloco.cli.train import _connector
from diloco.config import RunConfig
from diloco.core.presets import method_from_table
from diloco.errors import AlreadyInitialisedError, CheckpointError, ConfigError
from diloco.event_log import read_events
from diloco.events import Initialised
from diloco.exchange.base import Exchange
from diloco.following.follower import newest_model
from diloco.syncer.server import Options, Syncer
from diloco.training.checkpoint import list_checkpoints, load_checkpoint
from diloco.training.loop import Trainer
from diloco.training.model import build_model
from diloco.training.pretrained import checkpoint_state
from diloco.training.spec import LearnerSpec, StopRequest, Summary

Tiny = Callable[..., RunConfig]
DILOCO = "method={preset='DiLoCo', sync_every=6}"


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    names = a.keys() & b.keys()  # a tied head has a name of its own in a state dict
    assert {"model.norm.weight", "model.embed_tokens.weight"} <= names
    for name in names:
        assert torch.equal(a[name], b[name]), name


def serve(config: RunConfig, directory: Path) -> Syncer:
    return Syncer(config.run.name, method_from_table(config.method), Options("127.0.0.1:0", directory))


def learner_of(config: RunConfig, part: LearnerSpec) -> Trainer:
    return Trainer(config, part, attach=_connector(config, part, StopRequest()))


def run_pair(*configs: RunConfig) -> list[tuple[Summary, Trainer]]:
    """Two learners in one process, each with its own configuration."""

    def life(index: int, exchange: Exchange) -> tuple[Summary, Trainer]:
        config = configs[index]

        def attach(model: Any, optimizer: Any, steps: int, tokens: int, _: Any) -> diloco.Learner:
            method, trains = method_from_table(config.method), config.train.trains or None
            return diloco.Learner(model, optimizer, method=method, exchange=exchange, trains=trains)

        trainer = Trainer(config, LearnerSpec(f"pair-{index}", shard=index), attach=attach)
        return trainer.train(), trainer

    return diloco.run_local(life, learners=2)


# --- beginnings


def test_a_run_may_begin_with_what_another_came_to(tiny: Tiny, tmp_path: Path) -> None:
    whole = Trainer(tiny(), LearnerSpec("whole", role="baseline"))
    whole.train()
    Trainer(
        tiny("run.tokens=2_560", "schedule.steps=20", "checkpoint.every_steps=10"),
        LearnerSpec("first", role="baseline"),
    ).train()
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "first" / "checkpoints")

    other = tiny("run.name=other", f"warm_start.checkpoint='{checkpoint}'")
    second = Trainer(other, LearnerSpec("second", role="baseline"))
    summary = second.train()
    assert (summary.steps, summary.tokens, summary.run_tokens) == (20, 10 * 256, 5_120)
    assert_same(dict(whole.model.state_dict()), dict(second.model.state_dict()))

    with pytest.raises(ConfigError, match="has trained 2560 tokens and run.tokens is 2560; raise it"):
        Trainer(
            tiny(f"warm_start.checkpoint='{checkpoint}'", "run.tokens=2_560"), LearnerSpec("x", role="baseline")
        ).train()
    with pytest.raises(CheckpointError, match=r"does not fit the model of this run .* check \[model\] and \[inner\]"):
        Trainer(
            tiny(f"warm_start.checkpoint='{checkpoint}'", "model.hidden_size=32"), LearnerSpec("x", role="baseline")
        ).train()


def test_a_warm_start_adds_what_a_checkpoint_lacks(tiny: Tiny, tmp_path: Path) -> None:
    part = LearnerSpec("lone", role="isolated", shard=1)
    whole = Trainer(tiny("warm_start.steps=6"), part)
    whole.train()
    Trainer(
        tiny("run.tokens=1_024", "schedule.steps=20", "checkpoint.every_steps=4"), LearnerSpec("all", role="baseline")
    ).train()
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "all" / "checkpoints")
    second = Trainer(tiny("warm_start.steps=6", f"warm_start.checkpoint='{checkpoint}'"), replace(part, name="second"))
    second.train()
    assert_same(dict(whole.model.state_dict()), dict(second.model.state_dict()))


def test_the_initialising_learner_gives_the_run_a_checkpoints_model_step_and_tokens(tiny: Tiny, tmp_path: Path) -> None:
    Trainer(
        tiny("run.tokens=2_560", "schedule.steps=20", "checkpoint.every_steps=10"),
        LearnerSpec("first", role="baseline"),
    ).train()
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "first" / "checkpoints")
    with serve(tiny(DILOCO), tmp_path / "state") as syncer:
        config = tiny(
            DILOCO, f"syncer.address={syncer.address}", f"warm_start.checkpoint='{checkpoint}'", "run.steps=11"
        )
        summary = learner_of(config, LearnerSpec("a", initialise=True)).train()
        assert summary.steps == 11
        newest = newest_model(syncer.address, run="tiny").state_dict()  # no round is over yet
        assert_same(checkpoint_state(checkpoint), newest)
        joiner = learner_of(
            config.model_copy(update={"run": config.run.model_copy(update={"steps": 12})}), LearnerSpec("b", shard=1)
        )
        assert joiner.train().steps == 12
    (given,) = [e for e in read_events(tmp_path / "state" / "events.jsonl") if isinstance(e, Initialised)]
    assert (given.step, given.tokens) == (10, 2_560)


def test_a_run_whose_syncer_lost_everything_goes_on_from_a_learners_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    part = LearnerSpec("a", initialise=True)
    with serve(tiny(DILOCO), tmp_path / "state") as syncer:
        config = tiny(DILOCO, f"syncer.address={syncer.address}", "run.steps=8", "checkpoint.every_steps=8")
        learner_of(config, part).train()
    (checkpoint,) = list_checkpoints(config.dir / "a" / "checkpoints")
    with serve(tiny(DILOCO), tmp_path / "new") as syncer:
        config = tiny(DILOCO, f"syncer.address={syncer.address}", "run.steps=11")
        resumed = learner_of(config, replace(part, resume_from=checkpoint))
        assert resumed.train().steps == 11
        assert_same(checkpoint_state(checkpoint), newest_model(syncer.address, run="tiny").state_dict())
    (given,) = [e for e in read_events(tmp_path / "new" / "events.jsonl") if isinstance(e, Initialised)]
    assert (given.step, given.tokens) == (8, load_checkpoint(checkpoint)["run_tokens"])


def test_a_learner_initialises_a_run_that_has_no_model_and_joins_one_that_has(tiny: Tiny, tmp_path: Path) -> None:
    part = LearnerSpec("a", initialise="if-empty")
    with serve(tiny(DILOCO), tmp_path / "state") as syncer:
        config = tiny(DILOCO, f"syncer.address={syncer.address}", "run.steps=8")
        assert learner_of(config, part).train().steps == 8
        again = config.model_copy(update={"run": config.run.model_copy(update={"steps": 11})})
        with pytest.raises(AlreadyInitialisedError):
            learner_of(again, replace(part, initialise=True)).train()
        assert learner_of(again, part).train().steps == 11  # killed before its first checkpoint, and started again
        # Nothing is left of the exchange that was refused; in a rank, its threads would abort the process at its end.
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("diloco-")] == []


# --- unequal learners


def test_learners_of_different_batch_size(tiny: Tiny) -> None:
    overrides = ("learner.pair-1.train.batch=2", "learner.pair-1.train.accumulate=2", DILOCO)
    (a, one), (b, two) = run_pair(tiny(*overrides, learner="pair-0"), tiny(*overrides, learner="pair-1"))
    assert (a.tokens, b.tokens) == (a.steps * 4 * 32, b.steps * 2 * 32)
    assert a.run_tokens >= 5_120
    assert (one._training.stream.position, two._training.stream.position) == (4 * a.steps, 2 * b.steps)
    assert_same(one.learner.global_state_dict(), two.learner.global_state_dict())


def test_a_batch_that_does_not_divide_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"train.batch = 3 must be a multiple of train.accumulate = 2"):
        tiny("train.batch=3", "train.accumulate=2")


def test_what_nobody_trains_stays_as_it_was(tiny: Tiny) -> None:
    config = tiny(DILOCO, "train.trains=['model.layers.1.*']")
    before = {
        name: p.detach().clone() for name, p in build_model(config.model, 256, 32, config.run.seed).named_parameters()
    }
    (summary, trainer), _ = run_pair(config, config)
    after = trainer.learner.global_state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("model.layers.1.")}
    assert len(trainer.optimizer.state) == len(changed)
    assert all(p.requires_grad and p.grad is None for p in trainer.model.parameters())
    assert summary.metrics["merges"] > 0


def test_learners_of_two_halves_train_a_whole(tiny: Tiny) -> None:
    config = tiny(DILOCO)
    before = {
        name: p.detach().clone() for name, p in build_model(config.model, 256, 32, config.run.seed).named_parameters()
    }
    lower = tiny(DILOCO, "train.trains=['model.embed_tokens.*', 'model.layers.0.*']")
    upper = tiny(DILOCO, "train.trains=['model.layers.1.*', 'model.norm.*']")
    (_, a), (_, b) = run_pair(lower, upper)
    assert_same(a.learner.global_state_dict(), b.learner.global_state_dict())
    after = a.learner.global_state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_the_warm_start_trains_everything(tiny: Tiny) -> None:
    part, trains = LearnerSpec("lone", role="isolated"), "train.trains=['model.norm.*']"
    whole, stopped = (Trainer(tiny("warm_start.steps=4", trains, f"run.steps={steps}"), part) for steps in (5, 9))
    whole.train()
    stopped.train()
    for (name, early), late in zip(whole.model.named_parameters(), stopped.model.parameters(), strict=True):
        assert torch.equal(early, late) == (name != "model.norm.weight"), name
    assert len(whole.optimizer.state) == len(list(whole.model.parameters()))


def test_an_isolated_learner_trains_no_part_of_the_experts(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="needs other learners, and an isolated one exchanges nothing"):
        Trainer(tiny("train.trains_experts='0-1'"), LearnerSpec("lone", role="isolated")).train()


def test_a_pattern_that_matches_nothing_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r'train.trains has "layers.\*", which matches no parameter'):
        Trainer(tiny("train.trains=['layers.*']"), LearnerSpec("lone", role="isolated")).train()
