"""Counting the tokens that routers send to experts."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from diloco.learner.experts import RoutedTokens

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "use_cache": False,
}  # fmt: skip
MIXTURES = {
    "mixtral": {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
    "deepseek_v3": {
        "intermediate_size": 32, "moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip


def mixture(kind: str) -> nn.Module:
    """A small mixture of transformers in training mode."""
    config = AutoConfig.for_model(kind, **SMALL, **MIXTURES[kind])
    return AutoModelForCausalLM.from_config(config).train()


def chosen(model: nn.Module, batch: Tensor) -> Tensor:
    """The reference: how often each expert is among the indices that the routers return, [blocks, experts]."""
    found: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [each.register_forward_hook(lambda _, __, out: found.append(out[2])) for each in routers]
    with torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.bincount(each.flatten(), minlength=routers[0].num_experts) for each in found])


@pytest.mark.parametrize("kind", MIXTURES)
def test_counts_are_those_of_the_routers(kind: str) -> None:
    model, batches = mixture(kind), torch.randint(64, (3, 2, 8))
    routed = RoutedTokens(model)
    layers = [1] if kind == "deepseek_v3" else [0, 1]  # its first layer is dense
    assert routed.blocks == tuple(f"model.layers.{layer}.mlp" for layer in layers)
    expected = torch.zeros_like(routed.counts())
    for batch in batches:
        expected += chosen(model, batch)
        model(batch).logits.sum().backward()
        assert torch.equal(routed.counts(), expected)
    assert routed.counts().dtype == torch.int64
    assert int(expected.sum()) == 3 * 16 * MIXTURES[kind]["num_experts_per_tok"] * len(layers)
    routed.close()
    model(batches[0]).logits.sum().backward()
    assert torch.equal(routed.counts(), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_recomputation_of_checkpointed_activations_is_not_counted_again(reentrant: bool) -> None:
    model, batch = mixture("mixtral"), torch.randint(64, (2, 8))
    routed = RoutedTokens(model, entropy=True)
    computed: list[int] = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: computed.append(1))
    model(batch).logits.sum().backward()
    once, entropy = routed.counts(), routed.read_entropy()
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model(batch).logits.sum().backward()
    assert len(computed) == 3  # the checkpointed layer is computed twice
    assert torch.equal(routed.counts(), 2 * once)
    assert torch.equal(routed.read_entropy(), entropy)


def test_evaluation_is_not_counted() -> None:
    model, batch = mixture("mixtral"), torch.randint(64, (2, 8))
    routed = RoutedTokens(model, entropy=True)
    with torch.no_grad():
        model(batch)
    model(batch)  # no backward pass
    model.eval()
    model(batch).logits.sum().backward()
    assert not routed.counts().any()
    assert not routed.read_entropy().any()


def test_micro_batches_of_which_the_first_is_not_trained() -> None:
    model, batches = mixture("mixtral"), torch.randint(64, (3, 2, 8))
    routed = RoutedTokens(model)
    logits = [model(batch).logits for batch in batches]
    (logits[1].sum() + logits[2].sum()).backward()
    assert torch.equal(routed.counts(), chosen(model, batches[1]) + chosen(model, batches[2]))


def test_a_frozen_router_counts_and_a_frozen_block_does_not() -> None:
    model, batch = mixture("mixtral"), torch.randint(64, (2, 8))
    expected = chosen(model, batch)
    routed = RoutedTokens(model)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(True)
    model(batch).logits.sum().backward()
    assert torch.equal(routed.counts(), expected)
    model.model.layers[0].mlp.experts.requires_grad_(False)
    model(batch).logits.sum().backward()
    assert torch.equal(routed.counts(), torch.stack([expected[0], 2 * expected[1]]))


def test_entropy_of_a_router_that_prefers_nothing_and_of_one_that_prefers_one() -> None:
    model, batch = mixture("mixtral"), torch.randint(64, (2, 8))
    routed = RoutedTokens(model, entropy=True)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
    model(batch).logits.sum().backward()
    entropy = routed.read_entropy()
    torch.testing.assert_close(float(entropy[0]), float(torch.tensor(4.0).log()))  # ln 4 nats, over four experts
    assert 0 < entropy[1] < entropy[0]
    assert not routed.read_entropy().any()  # since the last call


def test_names_are_canonical_and_dense_models_have_no_blocks() -> None:
    wrapped = nn.Module()
    wrapped.add_module("_orig_mod", mixture("mixtral"))
    assert RoutedTokens(wrapped).blocks == ("model.layers.0.mlp", "model.layers.1.mlp")
    routed = RoutedTokens(nn.Sequential(nn.Linear(4, 4)))
    assert routed.blocks == ()
    assert routed.num_experts == 0
    assert routed.counts().shape == (0, 0)
    assert routed.read_entropy().shape == (0,)
