"""Parts of mixtures: models with fewer experts, the inner optimizer's state of them, and learners that hold them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from diloco.config import RunConfig, parse_config
from diloco.errors import ConfigError
from diloco.training.expert_part import part_config, part_of, part_state
from diloco.training.model import build_model
from diloco.training.optimizers import load_optimizer, make_optimizer

Tiny = Callable[..., RunConfig]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def mixtral(**keys: Any) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 8, **keys}))


def qwen(**keys: Any) -> PreTrainedModel:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **sizes, **keys}))


def deepseek(**keys: Any) -> PreTrainedModel:
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 3}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, **LATENT, **sizes, **keys}))


KINDS: dict[str, Callable[..., PreTrainedModel]] = {"mixtral": mixtral, "qwen3_moe": qwen, "deepseek_v3": deepseek}


def whole(kind: str, **keys: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = KINDS[kind](**keys)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))):
            tensor.normal_(0, 0.3)  # routers are initialised as zeros, or nearly
    return model


def is_of_experts(name: str) -> bool:
    return ".experts." in name or ".mlp.gate." in name


# --- the part


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_has_the_rows_of_its_experts_and_copies_of_all_else(kind: str) -> None:
    model, experts = whole(kind), (2, 3, 6, 7)
    model.eval()
    model.get_submodule("model.layers.1").train()
    model.get_parameter("model.norm.weight").requires_grad_(False)
    before, random = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    part = part_of(model, experts)
    assert torch.equal(torch.get_rng_state(), random)
    assert type(part) is type(model)
    names = [name for name, _ in model.named_buffers()] + list(before)
    for name in names:
        own, given = (dict(it.named_buffers()) | it.state_dict() for it in (part, model))
        expected = given[name][list(experts)] if is_of_experts(name) else given[name]
        assert torch.equal(own[name], expected), name
        assert own[name].dtype == given[name].dtype
        assert own[name].untyped_storage().data_ptr() != given[name].untyped_storage().data_ptr()
    assert sum(map(is_of_experts, before)) >= 3
    modes = [[(name, it.training) for name, it in each.named_modules()] for each in (part, model)]
    assert modes[0] == modes[1]
    trained = [[(name, it.requires_grad) for name, it in each.named_parameters()] for each in (part, model)]
    assert trained[0] == trained[1]
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())
    assert model.config.num_local_experts == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_keeps_tied_weights_and_dtypes(dtype: torch.dtype) -> None:
    model = whole("mixtral", tie_word_embeddings=True).to(dtype)
    part = part_of(model, range(4))
    assert part.get_input_embeddings().weight is part.get_output_embeddings().weight
    assert {each.dtype for each in part.parameters()} == {dtype}
    assert part.get_buffer("model.rotary_emb.inv_freq").dtype == model.get_buffer("model.rotary_emb.inv_freq").dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [(0, 1, 2, 3), (2, 3, 6, 7), (1, 3, 4, 6), tuple(range(8))])
def test_a_part_computes_what_the_whole_does_where_routers_choose_among_its_experts(
    kind: str, experts: tuple[int, ...]
) -> None:
    if kind == "deepseek_v3" and experts == (1, 3, 4, 6):
        pytest.skip("its routers choose groups of neighbours")
    model = whole(kind).eval()
    if kind == "deepseek_v3" and len(experts) == 4:
        model.get_submodule("model.layers.1.mlp.gate").topk_group = 2  # as many groups as are held
    tokens = torch.randint(64, (3, 17))
    others = [expert for expert in range(8) if expert not in experts]
    free = model(input_ids=tokens).logits

    def masked(_: nn.Module, __: Any, output: Any) -> Any:
        logits = output.clone()
        logits[..., others] = float("-inf")
        return logits

    part = part_of(model, experts)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "deepseek_v3":  # it chooses by sigmoids, to which it adds a bias
            model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")[others] = float("-inf")
        else:
            linear = torch.nn.functional.linear
            routers = {id(each.mlp.gate.weight) for each in model.model.layers}
            patch.setattr(
                torch.nn.functional, "linear",
                lambda x, w, *b: masked(model, None, linear(x, w, *b)) if id(w) in routers else linear(x, w, *b),
            )  # fmt: skip
        restricted = model(input_ids=tokens).logits
    torch.testing.assert_close(part(input_ids=tokens).logits, restricted, atol=1e-6, rtol=1e-5)
    assert torch.equal(restricted, free) == (len(experts) == 8)


def test_groups_of_deepseek_stay_groups() -> None:
    config = whole("deepseek_v3", n_routed_experts=16, topk_group=3).config
    for experts, groups in [(range(8), (2, 2)), ((0, 1, 4, 5, 8, 9, 14, 15), (4, 3)), (range(4, 8), (1, 1))]:
        part = part_config(config, experts)
        assert (part.n_routed_experts, part.n_group, part.topk_group) == (len(experts), *groups)
        model = part_of(DeepseekV3ForCausalLM(config), experts)
        assert (model.config.n_group, model.get_submodule("model.layers.1.mlp.gate").num_group) == (groups[0],) * 2
        assert torch.isfinite(model(input_ids=torch.randint(64, (2, 9))).logits).all()
    assert (config.n_routed_experts, config.n_group, config.topk_group) == (16, 4, 3)


@pytest.mark.parametrize(
    ("make", "experts", "message"),
    [
        (mixtral, (3,), r"experts 3 are fewer than the 2 that the router chooses for each token .*hold as many"),
        (qwen, (0, 5), "experts 0, 5 are fewer than the 3"),
        (mixtral, (7, 8), r"the experts \[7, 8\] cannot be held of a model with 8; name numbers from 0 to 7"),
        (mixtral, (-1, 2), r"the experts \[-1, 2\] cannot be held"),
        (mixtral, (3, 2), r"the experts \[3, 2\] cannot be held .* in ascending order, each once"),
        (mixtral, (2, 2, 3), r"the experts \[2, 2, 3\] cannot be held"),
        (mixtral, (), r"the experts \[\] cannot be held"),
        (deepseek, (0, 1, 2), r"experts 0-2 do not fill the groups .* they are \[2, 1\] of the groups \[0, 1\]; hold"),
        (deepseek, (0, 2, 4), r"they are \[1, 1, 1\] of the groups \[0, 1, 2\]; hold equally many of each, at least 2"),
        (
            lambda: deepseek(num_experts_per_tok=4, topk_group=1, n_group=2), (0, 1, 4, 5),
            r"chooses 4 experts of 1 of 2 groups \(n_group\): they are \[2, 2\] .* and 4 in 1 groups",
        ),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_held(make: Callable[..., PreTrainedModel], experts: Any, message: str) -> None:
    model = make()
    for refuse in (lambda: part_of(model, experts), lambda: part_config(model.config, experts)):
        with pytest.raises(ConfigError, match=message):
            refuse()


def test_models_without_fused_experts_have_no_part() -> None:
    dense = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no part with fewer experts"):
        part_of(dense, (0, 1))
    with pytest.raises(ConfigError, match="a model of type llama has no experts to hold"):
        part_config(dense.config, (0, 1))
    listed = mixtral()
    for layer in listed.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
    with pytest.raises(ConfigError, match="MixtralForCausalLM has no part with fewer experts; it takes a model"):
        part_of(listed, (0, 1))
    with pytest.raises(ConfigError, match="Sequential has no part"):
        part_of(nn.Sequential(mixtral()), (0, 1))  # type: ignore[type-var]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_part_continues_with_the_inner_state_of_its_experts(kind: str, optimizer: str) -> None:
    config = parse_config('[run]\nname = "a"\ntokens = 614400\n', overrides=[f"inner.optimizer={optimizer}"])
    model, experts = whole(kind), [2, 3, 6, 7]
    of_model = make_optimizer(model, config)
    for seed in range(3):
        torch.manual_seed(seed)
        for each in model.parameters():
            each.grad = torch.randn_like(each)
        of_model.step()
    part = part_of(model, experts)
    of_part = make_optimizer(part, config)
    load_optimizer(of_part, part_state(copy.deepcopy(of_model.state_dict()), of_part, experts))
    for name, each in model.named_parameters():  # a further step of both, with the same gradients
        each.grad = torch.randn_like(each)
        part.get_parameter(name).grad = each.grad[experts].clone() if is_of_experts(name) else each.grad.clone()
        state, own = of_model.state[each], of_part.state[part.get_parameter(name)]
        assert {"exp_avg", "exp_avg_sq", "momentum_buffer"} & set(own)
        for key, value in state.items():
            expected = value[experts] if is_of_experts(name) and value.ndim else value
            assert torch.equal(own[key], expected), (name, key)
    for each_optimizer in (of_model, of_part):
        each_optimizer.step()
    for name, each in model.named_parameters():
        if is_of_experts(name) and ".gate." in name and optimizer == "muon":
            continue  # Muon orthogonalises a router as one matrix
        expected = each[experts] if is_of_experts(name) else each
        torch.testing.assert_close(part.get_parameter(name), expected, atol=1e-6, rtol=1e-5)


def test_a_part_from_a_configuration_allocates_no_whole_model(tmp_path: Path) -> None:
    config = whole("mixtral").config
    config.to_json_file(tmp_path / "config.json")
    text = f'[run]\nname = "a"\ntokens = 614400\n[model]\nconfig = "{tmp_path / "config.json"}"\n'
    table = parse_config(text, overrides=["model.vocab_size=256"]).model
    random = torch.get_rng_state()
    part = build_model(table, 256, 32, 0, experts=(4, 5, 6, 7))
    assert torch.equal(torch.get_rng_state(), random)
    assert part.config.num_local_experts == 4
    assert part.get_parameter("model.layers.0.mlp.experts.down_proj").shape == (4, 16, 24)
    mixtral(vocab_size=256).save_pretrained(tmp_path / "model")
    weights = parse_config(
        text.split("[model]", maxsplit=1)[0], overrides=[f"model.weights={tmp_path / 'model'}"]
    ).model
    assert build_model(weights, 256, 32, 0, experts=(4, 5)).config.num_local_experts == 2
    assert build_model(weights, 256, 32, 0).config.num_local_experts == 8
