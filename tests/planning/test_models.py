"""Models of a plan: presets, TOML files, and parameters counted as transformers would have them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.errors import ConfigError
from diloco.planning.workload import FAMILIES, PRESETS, count_parameters, load_workload

SMALL: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {},
        {
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 10,
        },
    ],
    "mistral": [{"num_key_value_heads": 2}],
    "qwen2": [{"num_key_value_heads": 2}, {"tie_word_embeddings": True}],
    "qwen3": [{"num_key_value_heads": 2, "head_dim": 16}, {"attention_bias": True}],
    "qwen3_moe": [
        {"num_experts": 5, "moe_intermediate_size": 9, "head_dim": 16, "mlp_only_layers": [1]},
        {"num_experts": 5, "moe_intermediate_size": 9, "head_dim": 16, "decoder_sparse_step": 2},
    ],
    "mixtral": [{"num_local_experts": 3, "num_key_value_heads": 2}],
    "deepseek_v3": [
        {
            "q_lora_rank": 6,
            "kv_lora_rank": 5,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 3,
            "v_head_dim": 7,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "moe_intermediate_size": 9,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        }
    ],
    "gpt2": [{}, {"n_inner": 17}],
    "gpt_neox": [{}, {"attention_bias": False}],
}
SIZES = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GPT2_SIZES = {"vocab_size": 101, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 32}


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_models_themselves(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for extra in SMALL[family]:
        config = AutoConfig.for_model(family, **(GPT2_SIZES if family == "gpt2" else SIZES), **extra)
        config.save_pretrained(tmp_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name or ".mlp.gate.weight" in name)
        num_experts = max((each.shape[0] for name, each in model.named_parameters() if ".experts." in name), default=0)
        top_k = config.num_experts_per_tok if num_experts else 0
        found = count_parameters(tmp_path / "config.json")
        assert found == (sum(sizes.values()), 3, experts, num_experts, top_k), extra


def test_a_published_model_has_its_published_size(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 128256,
                "hidden_size": 16384,
                "intermediate_size": 53248,
                "num_hidden_layers": 126,
                "num_attention_heads": 128,
                "num_key_value_heads": 8,
            }
        )
    )
    num_parameters, num_layers, *_ = count_parameters(path)
    assert round(num_parameters / 1e9, 2) == 405.85
    assert num_layers == PRESETS["llama-405b"].num_layers


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text('parameters = 1.2e9\nlayers = 20\nstep_time = "310 ms"\n')
    workload = load_workload(str(tmp_path / "ours.toml"))
    assert (workload.name, workload.num_parameters, workload.num_layers, workload.step_s) == ("ours", 1.2e9, 20, 0.31)
    assert load_workload("1b", step_s=0.3).step_s == 0.3
    config = {"model_type": "gpt2", **GPT2_SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "by-config.toml").write_text('config = "config.json"\nstep_time = "2 s"\n')
    assert (
        load_workload(str(tmp_path / "by-config.toml")).num_parameters == count_parameters(tmp_path / "config.json")[0]
    )


@pytest.mark.parametrize("wrong", [{"decoder_sparse_step": 0}, {"mlp_only_layers": 3}, {"num_experts": "8"}])
def test_a_config_with_a_wrong_value_is_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_experts": 4}
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, **sizes, **wrong}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config.json has a value that no qwen3_moe model has .*give the model's"):
        count_parameters(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('parameters = 1e9\nlayers = 24\nstep_time = "310"', 'has no unit; write for example "310 ms"'),
        ('parameters = 1e9\nlayers = 24\nstep_time = "-3 ms"', "has to be above 0"),
        ("parameters = 1e9\nlayer = 24", 'unknown key "layer"; did you mean "layers"?'),
        ("parameters = 1e9", "give one of the three"),
        ("parameters = 1e9\nlayers = 24", "add --step-time"),
        ('parameters = 1e40\nlayers = 24\nstep_time = "1 s"', "out of range"),
        ('parameters = -1\nlayers = 24\nstep_time = "1 s"', "greater than 0"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(text)
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        load_workload(str(tmp_path / "ours.toml"))


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose 1b, 10b, 100b, llama-405b, deepseek-v3, or name a"):
        load_workload("2b")
    with pytest.raises(ConfigError, match="check the path"):
        load_workload(str(tmp_path / "gone.toml"))
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="'mamba' is not supported"):
        load_workload(str(path))
    path.write_text('{"model_type": "llama"')
    with pytest.raises(ConfigError, match="is not JSON"):
        load_workload(str(path))
    path.write_text('\ufeff{"model_type": "llama", "hidden_size": 8}', encoding="utf-8")  # as some editors save it
    with pytest.raises(ConfigError, match="= null is not a whole number"):
        load_workload(str(path), step_s=1.0)
