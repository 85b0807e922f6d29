"""Mixtures of experts in the reference trainer: auxiliary loss, balancing bias, load of the experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import diloco
from diloco.config import RunConfig
from diloco.core.presets import method_from_table
from diloco.errors import CheckpointError, ConfigError
from diloco.event_log import read_events
from diloco.events import Event, Routed, Stepped
from diloco.exchange.base import Exchange
from diloco.tracking.values import trainer_point
from diloco.training.checkpoint import list_checkpoints
from diloco.training.held_out import evaluate
from diloco.training.inner import InnerStep
from diloco.training.learners import AnyLearner
from diloco.training.loop import Trainer
from diloco.training.mixture import buffer_roles
from diloco.training.model import build_model
from diloco.training.pretrained import checkpoint_state, export_run
from diloco.training.spec import LearnerSpec, Summary

Tiny = Callable[..., RunConfig]
KINDS = {
    "mixtral": "model={type='mixtral', num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.1}",
    "qwen3_moe": (
        "model={type='qwen3_moe', num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8, "
        "router_aux_loss_coef=0.1}"
    ),
    "deepseek_v3": (
        "model={type='deepseek_v3', n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, n_group=2, "
        "topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, "
        "v_head_dim=8}"
    ),
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def mixture(tiny: Tiny) -> Callable[..., RunConfig]:
    """The tiny run with a mixture of 2 layers."""

    def make(kind: str, *overrides: str) -> RunConfig:
        sizes = "hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, "
        return tiny(KINDS[kind].replace("{", "{" + sizes + "num_key_value_heads=2, "), *overrides)

    return make


def trained(config: RunConfig) -> Trainer:
    """Data parallel in one process, to its end."""
    trainer = Trainer(config, LearnerSpec("baseline", role="baseline"))
    trainer.train()
    return trainer


def events(config: RunConfig, name: str = "baseline") -> list[Event]:
    return list(read_events(config.dir / name / "events.jsonl"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_auxiliary_loss_is_trained_and_never_reported(mixture: Callable[..., RunConfig], kind: str) -> None:
    config, batch = mixture(kind, "train.clip=1e9"), torch.randint(256, (4, 33))
    model, reference = (build_model(config.model, 256, 32, 0).train() for _ in range(2))
    inner = InnerStep(model, torch.optim.SGD(model.parameters(), lr=1.0), config.train, torch.device("cpu"))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    result = inner.run(batch, 1.0)

    arguments = {} if kind == "deepseek_v3" else {"output_router_logits": True}
    output = reference(input_ids=batch[:, :-1], **arguments)
    plain = F.cross_entropy(output.logits.flatten(0, 1), batch[:, 1:].flatten())
    (plain if kind == "deepseek_v3" else plain + 0.1 * output.aux_loss).backward()
    for name, each in reference.named_parameters():
        # 1 − (1 − g) has the rounding errors of fp32 at 1.
        torch.testing.assert_close(before[name] - dict(model.named_parameters())[name], each.grad, atol=1e-6, rtol=0)
    plain = plain.detach()
    assert float(result.loss) == float(plain)
    held_out = evaluate(reference, dict(reference.state_dict()), [batch])
    assert held_out == pytest.approx(float(plain), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_load_is_in_the_events_and_at_the_trackers(mixture: Callable[..., RunConfig], kind: str) -> None:
    config = mixture(kind, "train.log_every_steps=4", "run.tokens=2_560")
    trained(config)
    found = [event for event in events(config) if isinstance(event, Routed)]
    assert [event.step for event in found] == [4, 8]
    per_token = {"mixtral": 2, "qwen3_moe": 3, "deepseek_v3": 2}[kind]
    for event in found:
        assert event.blocks == tuple(f"model.layers.{i}.mlp" for i in ((1,) if kind == "deepseek_v3" else (0, 1)))
        for tokens, entropy in zip(event.tokens, event.entropy, strict=True):
            assert sum(tokens) == 4 * 256 * per_token  # four steps of 256 tokens
            assert 0 < entropy <= torch.tensor(float(len(tokens))).log()
        point = trainer_point(event)
        assert point is not None
        block = event.blocks[0]
        assert point.values[f"experts/{block}/load_1"] == event.tokens[0][1] / sum(event.tokens[0])
        assert point.values[f"experts/{block}/idle"] == event.tokens[0].count(0)
        assert point.values[f"experts/{block}/router_entropy"] == event.entropy[0]


def test_a_dense_model_has_no_load_and_no_bias_to_move(tiny: Tiny) -> None:
    config = tiny("run.tokens=2_560")
    trained(config)
    assert not any(isinstance(event, Routed) for event in events(config))
    with pytest.raises(ConfigError, match=r"train.bias_speed = 0.01 has no effect: .* drop it"):
        Trainer(tiny("train.bias_speed=0.01"), LearnerSpec("baseline", role="baseline"))


@pytest.mark.parametrize(("overrides", "speed"), [((), 1e-3), (("train.bias_speed=0.25",), 0.25)])
def test_the_bias_moves_against_the_load_of_each_step(
    mixture: Callable[..., RunConfig], overrides: tuple[str, ...], speed: float
) -> None:
    config = mixture("deepseek_v3", "train.log_every_steps=1", "run.tokens=2_560", "train.accumulate=2", *overrides)
    trainer = trained(config)
    expected = torch.zeros(8)
    for event in events(config):
        if isinstance(event, Routed):
            load = torch.tensor(event.tokens[0], dtype=torch.float64)
            expected += speed * (load.mean() - load).sign().float()
    assert expected.any()
    torch.testing.assert_close(trainer.model.get_buffer(BIAS), expected, atol=1e-7, rtol=0)  # a sum in another dtype


def run_local(config: RunConfig) -> list[dict[str, Tensor]]:
    """Two learners of the run in one process; the state of each model at its end."""

    def life(index: int, exchange: Exchange) -> tuple[Summary, dict[str, Tensor]]:
        def attach(model: Any, optimizer: Any, steps: int, tokens: int, _: Any) -> AnyLearner:
            method = method_from_table(config.method)
            return diloco.Learner(model, optimizer, method=method, exchange=exchange, buffers=buffer_roles(model))

        trainer = Trainer(config, LearnerSpec(f"learner-{index}", shard=index), attach=attach)
        return trainer.train(), {name: each.clone() for name, each in trainer.model.state_dict().items()}

    return [state for _, state in diloco.run_local(life, learners=2)]


def test_merges_average_the_biases(mixture: Callable[..., RunConfig]) -> None:
    method = "method={preset='DiLoCo', sync_every=10}"
    config = mixture("deepseek_v3", "train.log_every_steps=1", "run.tokens=2_560", "train.bias_speed=0.03125", method)
    first, second = run_local(config)  # ten steps, and one merge after them
    moved = []
    for index in range(2):
        own = torch.zeros(8)
        for event in events(config, f"learner-{index}"):
            if isinstance(event, Routed):
                load = torch.tensor(event.tokens[0], dtype=torch.float64)
                own += 0.03125 * (load.mean() - load).sign().float()
        moved.append(own)
    assert not torch.equal(*moved)
    assert torch.equal(first[BIAS], second[BIAS])
    torch.testing.assert_close(first[BIAS], (moved[0] + moved[1]) / 2, atol=1e-6, rtol=0)  # sums of 1/32 in fp32


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_learns_and_resumes_to_the_bit(mixture: Callable[..., RunConfig], kind: str) -> None:
    config = mixture(kind, "checkpoint.every_steps=7", "checkpoint.keep=5", "inner.optimizer=muon")
    whole = trained(config)
    losses = [event.loss for event in events(config) if isinstance(event, Stepped)]
    assert losses[-1] < losses[0] - 0.2
    checkpoint = list_checkpoints(config.dir / "baseline" / "checkpoints")[0]
    resumed = Trainer(config, LearnerSpec("resumed", role="baseline", resume_from=checkpoint))
    assert resumed.train().steps == 20
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_run_of_a_mixture_does_not_begin_with_a_dense_checkpoint(
    mixture: Callable[..., RunConfig], tiny: Tiny
) -> None:
    dense = tiny("run.tokens=1_280", "checkpoint.every_steps=5")
    trained(dense)
    (checkpoint,) = list_checkpoints(dense.dir / "baseline" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"does not fit the model of this run \(.*\); check \[model\] and"):
        trained(mixture("mixtral", f"warm_start.checkpoint='{checkpoint}'"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_of_a_mixture_loads_in_transformers_with_the_same_loss(
    mixture: Callable[..., RunConfig], tmp_path: Path, kind: str
) -> None:
    config = mixture(kind, "run.tokens=2_560", "checkpoint.every_steps=10")
    trainer = trained(config)
    (checkpoint,) = list_checkpoints(config.dir / "baseline" / "checkpoints")
    export_run(checkpoint_state(checkpoint), config, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    batches = [torch.randint(256, (4, 33))]
    expected = evaluate(trainer.model, dict(trainer.model.state_dict()), batches)
    assert evaluate(loaded, dict(loaded.state_dict()), batches) == expected
