"""The inner optimizers: which parameter goes where, torch's own steps, and resuming to the bit."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.config import RunConfig, dump_config, parse_config
from diloco.errors import CheckpointError, ConfigError
from diloco.exchange.base import Exchange
from diloco.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from diloco.training.loop import Trainer
from diloco.training.model import build_model
from diloco.training.optimizers import (
    Chained,
    describe_optimizer,
    hidden_matrices,
    load_optimizer,
    make_optimizer,
)
from diloco.training.spec import LearnerSpec

Tiny = Callable[..., RunConfig]
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def config_of(*overrides: str) -> RunConfig:
    return parse_config('[run]\nname="x"\ntokens=614_400\n', overrides=overrides)


def llama(*overrides: str) -> nn.Module:
    settings = [f"model.{key}={value}" for key, value in (SMALL | {"num_key_value_heads": 2}).items()]
    return build_model(config_of(*settings, *overrides).model, 256, 32, 0)


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in parameters]


HIDDEN = [
    "model.layers.0." + name
    for name in (
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    )
]  # fmt: skip


@pytest.mark.parametrize("tied", ["true", "false"])
def test_embeddings_and_head_are_not_hidden_whether_tied_or_not(tied: str) -> None:
    model = llama(f"model.tie_word_embeddings={tied}")
    assert ("lm_head.weight" in dict(model.named_parameters())) == (tied == "false")
    assert names_of(model, hidden_matrices(model)) == HIDDEN


def test_every_parameter_has_one_optimizer_and_vectors_do_not_decay() -> None:
    model = llama("model.tie_word_embeddings=false")
    optimizer = make_optimizer(model, config_of("inner.optimizer=muon"))
    muon, matrices, vectors = optimizer.param_groups
    assert names_of(model, muon["params"]) == HIDDEN
    assert names_of(model, matrices["params"]) == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all(p.ndim == 1 for p in vectors["params"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_position_embeddings_and_frozen_matrices_are_left_out() -> None:
    settings = ("model.type=gpt2", "model.n_embd=16", "model.n_layer=1", "model.n_head=2")
    model = build_model(config_of(*settings).model, 256, 32, 0)
    model.get_parameter("transformer.h.0.mlp.c_fc.weight").requires_grad_(False)
    hidden = names_of(model, hidden_matrices(model))
    assert hidden == [f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")]


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 256, (2, 9), generator=generator)
    logits = model(input_ids=tokens[:, :-1]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def test_a_step_is_that_of_torchs_own_optimizers() -> None:
    config = config_of("inner.optimizer=muon", "inner.muon_lr=0.02", "inner.muon_momentum=0.9", "inner.muon_steps=3")
    model = llama()
    reference = copy.deepcopy(model)
    optimizer = make_optimizer(model, config)
    hidden = [reference.get_parameter(name) for name in HIDDEN]
    others = [p for name, p in reference.named_parameters() if name not in HIDDEN]
    muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, momentum=0.9, ns_steps=3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.ndim == 2]},
            {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True,
    )  # fmt: skip
    for step in range(3):
        for each, optimizers in ((model, [optimizer]), (reference, [muon, adamw])):
            backward(each, step)
            for one in optimizers:
                one.step()
                one.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert set(map(id, optimizer.state)) == set(map(id, model.parameters()))


MIXTRAL = ("model.type=mixtral", "model.num_local_experts=4", "model.num_experts_per_tok=2")


def test_experts_are_hidden_matrices_with_the_steps_of_matrices_of_their_own() -> None:
    config = config_of("inner.optimizer=muon", "inner.muon_momentum=0.9")
    model = llama(*MIXTRAL)
    fused = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    hidden = names_of(model, hidden_matrices(model))
    assert set(fused) < set(hidden)
    optimizer = make_optimizer(model, config)
    assert names_of(model, optimizer.param_groups[1]["params"]) == fused
    separate = nn.ModuleList(
        nn.ParameterList(matrix.clone() for matrix in model.get_parameter(name).detach()) for name in fused
    )
    reference = torch.optim.Muon(
        separate.parameters(), lr=4e-3, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        backward(model, step)
        for name, matrices in zip(fused, separate, strict=True):
            for matrix, gradient in zip(matrices, model.get_parameter(name).grad, strict=True):
                matrix.grad = gradient.clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for name, matrices in zip(fused, separate, strict=True):
        assert torch.equal(model.get_parameter(name), torch.stack(list(matrices))), name  # no tolerance
    momentum = optimizer.state_dict()["state"]
    assert [momentum[len(hidden) - 2 + at]["momentum_buffer"].shape for at in range(2)] == [
        model.get_parameter(name).shape for name in fused
    ]


def pair(seed: int) -> tuple[nn.Linear, nn.Linear, Chained]:
    torch.manual_seed(seed)
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    return a, b, Chained([torch.optim.SGD(a.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(b.parameters())])


def train(a: nn.Linear, b: nn.Linear, optimizer: Chained, steps: range) -> None:
    for step in steps:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        b(a(x)).square().mean().backward()
        optimizer.step()


def test_a_chain_continues_from_its_saved_state_to_the_bit(tmp_path: Path) -> None:
    a, b, optimizer = pair(1)
    train(a, b, optimizer, range(3))
    saved = {"a": a.state_dict(), "b": b.state_dict(), "optimizer": optimizer.state_dict()}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 3, saved, keep=1).path)
    train(a, b, optimizer, range(3, 6))

    c, d, other = pair(2)
    train(c, d, other, range(7, 9))  # a state to be replaced
    c.load_state_dict(loaded["a"])
    d.load_state_dict(loaded["b"])
    other.load_state_dict(loaded["optimizer"])
    train(c, d, other, range(3, 6))
    assert torch.equal(a.weight, c.weight)
    assert torch.equal(b.weight, d.weight)
    for group in other.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    train(c, d, other, range(6, 7))  # a schedule reaches both after loading, too
    assert torch.equal(a.weight, c.weight)
    assert torch.equal(b.weight, d.weight)


def test_a_hook_runs_once_before_both() -> None:
    a, b, optimizer = pair(1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append((a.weight.clone(), b.weight.clone())))
    before = a.weight.clone(), b.weight.clone()
    train(a, b, optimizer, range(1))
    assert len(calls) == 1
    assert all(torch.equal(x, y) for x, y in zip(calls[0], before, strict=True))
    assert not torch.equal(before[0], a.weight)
    assert not torch.equal(before[1], b.weight)


def test_a_closure_gives_the_loss() -> None:
    a, b, optimizer = pair(1)

    def closure() -> float:
        loss = b(a(torch.ones(1, 4))).sum()
        loss.backward()
        return float(loss.detach())

    before, expected = a.weight.clone(), float(b(a(torch.ones(1, 4))).sum().detach())
    assert optimizer.step(closure) == expected
    assert not torch.equal(before, a.weight)


def test_a_shared_parameter_and_a_late_group_are_refused() -> None:
    a, _, optimizer = pair(1)
    with pytest.raises(ValueError, match="more than one parameter group"):
        Chained([torch.optim.SGD(a.parameters(), lr=1), torch.optim.SGD([a.weight], lr=1)])
    with pytest.raises(ConfigError, match="accepts no more groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_model_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no two-dimensional hidden weight"):
        make_optimizer(nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)), config_of("inner.optimizer=muon"))


def test_the_run_files_values_beat_those_of_a_checkpoint() -> None:
    model = llama()
    optimizer = make_optimizer(model, config_of())
    state = optimizer.state_dict()
    other = make_optimizer(model, config_of("inner.weight_decay=0.3", "inner.lr=0.5"))
    load_optimizer(other, state)
    assert [(group["weight_decay"], group["lr"]) for group in other.param_groups] == [(0.3, 0.5), (0.0, 0.5)]
    with pytest.raises(ValueError, match="another inner optimizer"):
        load_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), state)


# --- in the run file and in the trainer


def test_muloco_brings_muon_unless_the_run_file_says_otherwise() -> None:
    model = llama()
    for overrides, name, words in [
        ((), "adamw", "trains every parameter by AdamW"),
        (
            ("method={preset='MuLoCo'}",),
            "muon",
            "trains 7 hidden matrices by Muon and the rest by AdamW, as in MuLoCo",
        ),
        (("method={preset='MuLoCo'}", "inner.optimizer=adamw"), "adamw", "trains every parameter by AdamW"),
        (("inner.optimizer=muon",), "muon", "trains 7 hidden matrices by Muon and the rest by AdamW"),
    ]:
        config = config_of(*overrides)
        assert config.inner_optimizer == name
        said = describe_optimizer(make_optimizer(model, config), config)
        assert said.startswith(words)
        assert ("MuLoCo" in said) == ("MuLoCo" in words)
        assert parse_config(dump_config(config)) == config


def test_what_muon_alone_reads_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match="inner.muon_lr has no effect with AdamW"):
        config_of("inner.muon_lr=0.1")
    with pytest.raises(ConfigError, match="inner.muon_steps has no effect with AdamW"):
        config_of("inner.muon_steps=3", "inner.optimizer=adamw", "method={preset='MuLoCo'}")


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_a_muon_run_learns_and_resumes_to_the_bit(tiny: Tiny) -> None:
    config = tiny("inner.optimizer=muon", "inner.muon_lr=8e-3", "checkpoint.every_steps=7", "checkpoint.keep=5")
    whole = Trainer(config, LearnerSpec("whole", role="baseline"))
    assert whole.train().held_out_loss < 5.5
    # The schedule's end, a tenth of the peak, for both.
    assert [group["lr"] for group in whole.optimizer.param_groups] == pytest.approx([8e-4, 4e-4, 4e-4])
    checkpoint = list_checkpoints(config.dir / "whole" / "checkpoints")[0]
    resumed = Trainer(config, LearnerSpec("resumed", role="baseline", resume_from=checkpoint))
    assert resumed.train().steps == 20
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name
    with pytest.raises(CheckpointError, match="another inner optimizer"):
        Trainer(tiny(), LearnerSpec("other", role="baseline", resume_from=checkpoint)).train()


@pytest.mark.parametrize("kind", [(), MIXTRAL], ids=["dense", "mixture"])
@pytest.mark.parametrize("method", [diloco.DataParallel(), diloco.DiLoCo(sync_every=2)], ids=lambda method: method.name)
def test_a_learner_takes_a_chain(method: diloco.Method, kind: tuple[str, ...]) -> None:
    """Two learners with Muon; gradients exchanged by a hook, and outer gradients."""

    def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = llama(*kind)
        optimizer = make_optimizer(model, config_of("inner.optimizer=muon"))
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            for step in range(4):
                backward(model, 10 * index + step)
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=16)
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    first, second = diloco.run_local(life, learners=2)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
