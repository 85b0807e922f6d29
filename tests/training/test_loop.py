"""The trainer: alone, in pairs over the local exchange, stopped and resumed to the bit."""

import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.config import RunConfig
from diloco.core.presets import method_from_table
from diloco.errors import CheckpointError, ConfigError, StoreError
from diloco.event_log import read_events
from diloco.events import Adopted, CheckpointRefused, Evaluated, Finished, RunStarted, Stepped
from diloco.exchange.base import Exchange
from diloco.training.checkpoint import list_checkpoints, load_checkpoint
from diloco.training.learners import AnyLearner
from diloco.training.loop import Trainer
from diloco.training.pretrained import checkpoint_state
from diloco.training.spec import LearnerSpec, Summary

Tiny = Callable[..., RunConfig]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def losses(config: RunConfig, name: str) -> list[float]:
    return [e.loss for e in read_events(config.dir / name / "events.jsonl") if isinstance(e, Stepped)]


def test_the_baseline_trains_to_the_token_and_learns(tiny: Tiny) -> None:
    config = tiny("evaluate.every_steps=10", "run.tokens=10_240")
    summary = Trainer(config, LearnerSpec("all", role="baseline")).train()
    assert (summary.steps, summary.tokens, summary.run_tokens, summary.reason) == (40, 10_240, 10_240, "budget")
    events = read_events(config.dir / "all" / "events.jsonl")
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], Finished)
    evaluated = [e.loss for e in events if isinstance(e, Evaluated)]
    assert len(evaluated) == 4
    assert evaluated[-1] < evaluated[0] < 5.6
    assert len(summary.sample) > 0


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tiny: Tiny) -> None:
    runs = []
    for seed in (7, 7, 8):
        trainer = Trainer(tiny(f"run.seed={seed}"), LearnerSpec("all", role="baseline"))
        trainer.train()
        runs.append(weights(trainer))
    assert_same(runs[0], runs[1])
    assert not torch.equal(runs[0]["model.norm.weight"], runs[2]["model.norm.weight"])


def test_accumulation_is_the_same_step_to_rounding(tiny: Tiny) -> None:
    runs = []
    for accumulate in (1, 4):
        config = tiny(f"train.accumulate={accumulate}", "run.learners=1", "run.tokens=512", "schedule.warmup_steps=1")
        trainer = Trainer(config, LearnerSpec("all", role="baseline"))
        trainer.train()
        runs.append(weights(trainer))
    for name, value in runs[0].items():
        # Two Adam steps of at most lr = 4e-3 each; fp32 gradients differ in the last bits, which Adam's normalisation
        # enlarges.
        torch.testing.assert_close(value, runs[1][name], atol=2e-4, rtol=0)


def test_an_evaluation_does_not_change_training(tiny: Tiny) -> None:
    runs = []
    for every in (0, 1):
        trainer = Trainer(tiny(f"evaluate.every_steps={every}"), LearnerSpec("all", role="baseline"))
        trainer.train()
        runs.append(weights(trainer))
    assert_same(*runs)


def test_the_isolated_learner_stops_with_the_others_and_shares_the_warm_start(tiny: Tiny) -> None:
    config = tiny("warm_start.steps=5")
    summary = Trainer(config, LearnerSpec("lone", role="isolated", shard=1)).train()
    assert summary.steps == 20
    assert summary.tokens == 5 * 256 + 15 * 128
    Trainer(config, LearnerSpec("all", role="baseline")).train()
    lone, everything = losses(config, "lone"), losses(config, "all")
    assert lone[:5] == everything[:5]
    assert lone[5:] != everything[5:]


def stopped_at(trainer: Trainer, step: int) -> Summary:
    """Train as if Ctrl-C was pressed during `step`."""

    class Stopper:
        def is_due(self) -> bool:
            if trainer.learner.steps == step:
                trainer.stop()
            return False

        def show(self, status: object) -> None: ...
        def say(self, text: str) -> None: ...
        def close(self) -> None: ...

    trainer._progress = Stopper()
    return trainer.train()


@pytest.mark.parametrize("step", [3, 5, 11])
def test_stopped_and_resumed_alone_is_the_same_to_the_bit(tiny: Tiny, step: int) -> None:
    config = tiny("warm_start.steps=5")
    part = LearnerSpec("lone", role="isolated", shard=1)
    whole = Trainer(config, part)
    whole.train()

    first = Trainer(config, replace(part, name="again"))
    assert stopped_at(first, step).reason == "stopped"
    (checkpoint,) = list_checkpoints(config.dir / "again" / "checkpoints")
    torch.manual_seed(99)  # a new process would not know the old state
    second = Trainer(config, replace(part, name="again", resume_from=checkpoint))
    summary = second.train()
    assert summary.steps == 20
    assert summary.tokens == 5 * 256 + 15 * 128
    assert_same(weights(whole), weights(second))


def trained_with_a_full_disk(trainer: Trainer, steps: range) -> list[str]:
    """Train while the kernel lets no file grow beyond 30,000 bytes after these steps; returns what people are told."""
    said: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Disk:
        def is_due(self) -> bool:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000 if trainer.learner.steps in steps else soft, hard))
            return False

        def show(self, status: object) -> None: ...
        def close(self) -> None: ...
        def say(self, text: str) -> None:
            said.append(text)

    trainer._progress = Disk()
    try:
        trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return said


def test_a_full_disk_under_a_checkpoint_is_said_and_ends_nothing(tiny: Tiny) -> None:
    config = tiny("checkpoint.every_steps=10", "checkpoint.keep=5")
    whole = Trainer(config, LearnerSpec("whole", role="baseline"))
    whole.train()
    trainer = Trainer(config, LearnerSpec("all", role="baseline"))
    said = trained_with_a_full_disk(trainer, range(9, 12))
    assert_same(weights(whole), weights(trainer))
    events = read_events(config.dir / "all" / "events.jsonl")
    assert [event.step for event in events if isinstance(event, CheckpointRefused)] == [10, 11]
    assert [("File too large" in text and "free disk space" in text) for text in said[:3]] == [True, True, False]
    there = list_checkpoints(config.dir / "all" / "checkpoints")
    assert [load_checkpoint(path)["step"] for path in there] == [12, 20]


def test_a_last_checkpoint_that_the_disk_refuses_is_an_error_after_everything_else(tiny: Tiny) -> None:
    config = tiny("checkpoint.every_steps=10")
    with pytest.raises(StoreError, match="cannot write the checkpoint .*step-0000000020"):
        trained_with_a_full_disk(Trainer(config, LearnerSpec("all", role="baseline")), range(19, 21))
    events = read_events(config.dir / "all" / "events.jsonl")
    assert isinstance(events[-1], Finished)
    there = list_checkpoints(config.dir / "all" / "checkpoints")
    assert [load_checkpoint(path)["step"] for path in there] == [10]


DROPOUT = ("model={type='gpt2', n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.2}", "run.tokens=2_560")


def test_dropout_is_drawn_from_the_runs_seed_and_a_learners_shard_and_goes_on_after_a_stop(tiny: Tiny) -> None:
    config = tiny(*DROPOUT)
    runs = []
    for shard in (0, 0, 1):
        trainer = Trainer(config, LearnerSpec("all", role="baseline", shard=shard))
        torch.manual_seed(len(runs))  # what a process drew before does not matter
        trainer.train()
        runs.append(weights(trainer))
    assert_same(runs[0], runs[1])
    assert not torch.equal(runs[0]["transformer.ln_f.weight"], runs[2]["transformer.ln_f.weight"])

    stopped_at(Trainer(config, LearnerSpec("again", role="baseline")), 4)
    (checkpoint,) = list_checkpoints(config.dir / "again" / "checkpoints")
    resumed = Trainer(config, LearnerSpec("again", role="baseline", resume_from=checkpoint))
    resumed.train()
    assert_same(runs[0], weights(resumed))


def test_a_checkpoint_of_another_run_or_model_or_shards_is_refused(tiny: Tiny) -> None:
    part = LearnerSpec("all", role="baseline")
    stopped_at(Trainer(tiny(), part), 2)
    (checkpoint,) = list_checkpoints(tiny().dir / "all" / "checkpoints")
    resumed = replace(part, resume_from=checkpoint)
    for override, message in [
        ("run.name=other", "belongs to the run tiny"),
        ("model.hidden_size=32", "does not fit the model"),
        ("run.learners=4", "num_shards = 2"),
        ("run.seed=8", "seed = 7"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            Trainer(tiny(override), resumed).train()


def attach_to(config: RunConfig, exchange: Exchange) -> Any:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, tokens: int, _: Any) -> AnyLearner:
        return diloco.Learner(model, optimizer, method=method_from_table(config.method), exchange=exchange)

    return attach


def run_pair(config: RunConfig, **fields: Any) -> list[tuple[Summary, dict[str, Tensor]]]:
    """Two learners in one process."""

    def life(index: int, exchange: Exchange) -> tuple[Summary, dict[str, Tensor]]:
        part = LearnerSpec(f"pair-{index}", shard=index, **{k: v[index] for k, v in fields.items()})
        trainer = Trainer(config, part, attach=attach_to(config, exchange))
        summary = trainer.train()
        return summary, dict(trainer.learner.global_state_dict())

    return diloco.run_local(life, learners=2)


def test_a_pair_over_the_local_exchange_trains_one_global_model(tiny: Tiny) -> None:
    config = tiny()
    (a, model_a), (b, model_b) = run_pair(config)
    assert a.tokens + b.tokens == 5_120
    assert a.steps == b.steps == 20
    assert_same(model_a, model_b)
    assert a.held_out_loss == b.held_out_loss
    adopted = [e for e in read_events(config.dir / "pair-0" / "events.jsonl") if isinstance(e, Adopted)]
    assert {e.fragment for e in adopted} == {0, 1, 2}
    others = [e for e in read_events(config.dir / "pair-1" / "events.jsonl") if isinstance(e, Adopted)]
    held = {(e.fragment, e.version): e.digest for e in others}
    assert all(e.digest and held[e.fragment, e.version] == e.digest for e in adopted)
    assert len({e.digest for e in adopted}) == len(adopted)
    assert a.metrics["merges"] > 0


def test_data_parallel_over_the_local_exchange_is_the_baseline(tiny: Tiny) -> None:
    config = tiny("run.tokens=1_280", "method={preset='DataParallel'}", "schedule.warmup_steps=1")
    (_, parallel), _ = run_pair(config)
    trainer = Trainer(config, LearnerSpec("all", role="baseline"))
    trainer.train()
    for name, value in weights(trainer).items():
        # Five Adam steps on gradients that differ in the last bits (a mean of two means); see the accumulation test.
        torch.testing.assert_close(value, parallel[name], atol=1e-3, rtol=0)


FAMILY = {
    "LocalSGD": "sync_every=6",
    "DiLoCo": "sync_every=[[0, 6], [12, 4]]",
    "MuLoCo": "sync_every=6, codec='2bit'",
    "SparseLoCo": "sync_every=6",
    "DelayedDiLoCo": "sync_every=6",
    "EagerDiLoCo": "sync_every=6",
    "DecoupledDiLoCo": "sync_every=6, fragments={type='Balanced', num_fragments=3}",
    "AsyncDiLoCo": "sync_every=6",
}


@pytest.mark.parametrize("preset", FAMILY)
def test_the_trainer_runs_every_method_of_the_family(tiny: Tiny, preset: str) -> None:
    config = tiny(f"method={{preset='{preset}', {FAMILY[preset]}}}")
    (a, model_a), (b, model_b) = run_pair(config)
    assert (a.steps, b.steps, a.run_tokens) == (20, 20, 5_120)
    assert a.held_out_loss == b.held_out_loss < 5.6
    assert_same(model_a, model_b)
    assert a.metrics["merges"] >= 3


@pytest.mark.parametrize(
    ("preset", "step"),
    [
        (None, 4),
        ("EagerDiLoCo", 8),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((None, 6), (None, 7), (None, 13), ("DiLoCo", 13), ("SparseLoCo", 8), ("DelayedDiLoCo", 8))
        ),
    ],
)
def test_a_pair_stopped_and_resumed_is_the_same_to_the_bit(
    tiny: Tiny, tmp_path: Path, preset: str | None, step: int
) -> None:
    method = [] if preset is None else [f"method={{preset='{preset}', {FAMILY[preset]}}}"]
    (_, whole), _ = run_pair(tiny(*method))
    first = tiny(*method, f"run.dir={tmp_path / 'again'}", f"checkpoint.every_steps={step}", "checkpoint.keep=9")
    run_pair(first)
    at = [first.dir / f"pair-{i}" / "checkpoints" / f"step-{step:010d}" for i in range(2)]
    (summary, resumed), _ = run_pair(tiny(*method, f"run.dir={tmp_path / 'again'}"), resume_from=at)
    assert summary.steps == 20
    assert_same(whole, resumed)


@pytest.mark.parametrize("preset", ["DiLoCo", "DataParallel"])
def test_a_checkpoint_holds_what_is_trained_once_and_the_global_model(tiny: Tiny, preset: str) -> None:
    config = tiny(f"method={{preset='{preset}'}}", "run.tokens=1_280", "checkpoint.every_steps=5")
    (_, model), _ = run_pair(config)
    [checkpoint] = list_checkpoints(config.dir / "pair-0" / "checkpoints")
    saved = load_checkpoint(checkpoint)
    learner = saved["learner"]
    assert learner["parameters"]
    assert not learner["parameters"].keys() & saved["model"].keys()
    exported = checkpoint_state(checkpoint)
    assert exported.keys() <= model.keys()  # a tied head has a name of its own in a state dict
    for name, value in exported.items():
        assert torch.equal(value, model[name]), name


def test_a_warm_start_that_the_exchange_cannot_take_over_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="the warm start made 3 steps but the run starts at 0"):
        run_pair(tiny("warm_start.steps=3"), initialise=[True, False])
