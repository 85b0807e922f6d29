"""Build the model of a run file: any causal language model of transformers, from a configuration or from weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from diloco.config import ModelTable
from diloco.errors import ConfigError, LayoutError, translated
from diloco.tables import nearest
from diloco.training.expert_parallel import sharded_like
from diloco.training.expert_part import part_config

# The model of `diloco demo`: small enough for two CPU cores, and a decoder like its larger relatives.
SMALL_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model_config(table: ModelTable, vocab_size: int, sequence_length: int) -> PreTrainedConfig:
    """The transformers configuration of a run; the settings of the table override those of a config file.

    Raises ConfigError for an unknown model type or setting (naming the nearest known one), and for an unreadable config
    file.
    """
    if _is_pretrained(table):
        failed = f"cannot load model.weights = {table.weights}"
        with translated((OSError, ValueError), ConfigError, failed, "give a directory or a hub name"):
            pretrained: PreTrainedConfig = AutoConfig.from_pretrained(str(table.weights))
        pretrained.use_cache = False
        return pretrained
    if table.config is not None:
        if not table.config.is_file():
            raise ConfigError(f"there is no model configuration at {table.config}; check model.config")
        failed = f"cannot read the model configuration {table.config}"
        with translated((OSError, ValueError), ConfigError, failed, "check model.config"):
            base = AutoConfig.from_pretrained(table.config).to_dict()
        model_type = base.pop("model_type")
    else:
        model_type = table.type
        base = {"vocab_size": vocab_size, "max_position_embeddings": sequence_length}
        base |= SMALL_LLAMA if model_type == "llama" else {}
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f'unknown model.type = "{model_type}"; {nearest(model_type, list(CONFIG_MAPPING))}')
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    for key in table.settings:
        if key not in known:
            advice = nearest(key, sorted(known | set(ModelTable.model_fields)))
            raise ConfigError(f'unknown key "model.{key}" for a model of type {model_type}; {advice}')
    failed = f"the [model] table does not describe a {model_type} model"
    with translated((TypeError, ValueError), ConfigError, failed, "correct it"):
        config: PreTrainedConfig = config_class(**{**base, **table.settings, "use_cache": False})
    own_size = config.get_text_config().vocab_size
    if own_size < vocab_size:
        raise ConfigError(f"model.vocab_size = {own_size} is below the data's {vocab_size}; remove or raise it")
    return config


def build_model(
    table: ModelTable, vocab_size: int, sequence_length: int, seed: int, experts: Sequence[int] | None = None
) -> PreTrainedModel:
    """The model in its initial state: from `seed` alone, or from `model.weights`. It does not change the random state.

    Arguments:
        experts: build the part of a mixture that holds these, without the weights, which come from the run; None: all.

    Raises ConfigError when the configuration or the weights cannot be used.
    """
    dtype = getattr(torch, table.dtype)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if experts is None and _is_pretrained(table):
            return _pretrained(table, str(table.weights), dtype)
        config = model_config(table, vocab_size, sequence_length)
        config = config if experts is None else part_config(config, experts)
        failed, advice = "transformers cannot build this model", "correct the [model] table"
        with translated((ValueError, ImportError), ConfigError, failed, advice):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, attn_implementation=table.attention, dtype=dtype
            )
    if table.weights is not None and experts is None:
        load_weights(model, Path(table.weights))
    return model


def _is_pretrained(table: ModelTable) -> bool:
    """Whether the weights are a model of a directory or of the hub, with its own configuration."""
    if table.weights is None or table.weights.endswith(".safetensors"):
        return False
    if table.settings or table.config is not None:
        raise ConfigError(
            f"model.weights = {table.weights} brings its own configuration; remove the other keys of [model]"
        )
    return True


def _pretrained(table: ModelTable, weights: str, dtype: torch.dtype) -> PreTrainedModel:
    failed, advice = f"cannot load model.weights = {weights}", "give a directory or a hub name"
    with translated((OSError, ValueError), ConfigError, failed, advice):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            weights, attn_implementation=table.attention, dtype=dtype, use_safetensors=True
        )
    model.config.use_cache = False
    return model


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Load a safetensors file into `model`. Raises ConfigError when it cannot be read or does not fit."""
    failed = f"cannot read the weights {path}"
    with translated((OSError, SafetensorError), ConfigError, failed, "give a safetensors file"):
        weights = load_file(path)
    failed = f"the weights {path} do not fit the run's model"
    with translated(LayoutError, ConfigError, failed, "give weights of this model"):
        load_state(model, weights)


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load `state` into `model`; a tied weight may have any of its names.

    Raises LayoutError that names the first tensor that is missing, unknown or of another shape.
    """
    own = model.state_dict(keep_vars=True)
    filled = set()
    for name, tensor in state.items():
        if name not in own:
            raise LayoutError(f"the model has no tensor {name}")
        theirs, ours = list(tensor.shape), list(own[name].shape)
        if theirs != ours:
            raise LayoutError(f"{name} has shape {theirs} where the model has {ours}")
        filled.add(id(own[name]))
    for name, tensor in own.items():
        if id(tensor) not in filled:
            raise LayoutError(f"the tensor {name} of the model is missing")
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(sharded_like(own[name], tensor))
