"""Parameters and layers of a transformers `config.json`, counted from its numbers alone: neither torch nor transformers
is imported.

A decoder is an embedding, L layers of attention and feed-forward, a last norm and a head. Families differ in biases,
norms, and in how attention and feed-forward are built; those that are known are in `FAMILIES`.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, translated
from diloco.tables import read_text


class _Config:
    """The values of a config.json; a missing one is an error that names it."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values, self._source = values, source

    def __getitem__(self, key: str) -> int:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"{self._source}: {key} = {json.dumps(value)} is not a whole number; give the model's own config.json, "
                "or its parameters and layers in a TOML file."
            )
        return value

    def get(self, key: str, default: Any) -> Any:
        """The value, or the default where there is none or it is null."""
        value = self._values.get(key)
        return default if value is None else value


def count_parameters(path: str | Path) -> tuple[int, int]:
    """(parameters, layers) of the model that a transformers config.json describes.

    Tied embeddings count once; a mixture counts all its experts.

    Raises:
        ConfigError: the file cannot be read, is of a family that is not known here, or misses a number.
    """
    text = read_text(path, "model's config").removeprefix("\ufeff")
    with translated(json.JSONDecodeError, ConfigError, f"{path} is not JSON", "give the model's own config.json"):
        values = json.loads(text)
    family = values.get("model_type") if isinstance(values, dict) else None
    if family not in FAMILIES:
        close = difflib.get_close_matches(str(family), FAMILIES, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(
            f"{path}: the parameters of a {family!r} are not counted here{meant}; known are {', '.join(FAMILIES)}: "
            "for others give parameters and layers in a TOML file."
        )
    return FAMILIES[family](_Config(values, str(path)))


def _gated(hidden: int, inner: int) -> int:
    """A gated feed-forward: gate, up, down."""
    return 3 * hidden * inner


def _attention(c: _Config, *, bias: bool, output_bias: bool, head_norms: bool) -> int:
    """Query, key, value and output of grouped-query attention."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head = c["head_dim"] if c.get("head_dim", 0) else hidden // heads
    queries, keys = heads * head, (c["num_key_value_heads"] if c.get("num_key_value_heads", 0) else heads) * head
    biases = bias * (queries + 2 * keys) + output_bias * hidden
    return hidden * (2 * queries + 2 * keys) + biases + head_norms * 2 * head


def _whole(c: _Config, layers: int, *, tied: bool) -> int:
    """Embedding, head, last norm and the layers."""
    num_tables = 1 if c.get("tie_word_embeddings", tied) else 2
    return num_tables * c["vocab_size"] * c["hidden_size"] + c["hidden_size"] + layers


def _dense(*, bias: bool = False, head_norms: bool = False) -> Callable[[_Config], tuple[int, int]]:
    def count(c: _Config) -> tuple[int, int]:
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        own = bool(c.get("attention_bias", False))  # Llama's and Qwen3's switch is for all four, Qwen2 has three always
        feed_forward = _gated(hidden, inner) + bool(c.get("mlp_bias", False)) * (2 * inner + hidden)
        layer = _attention(c, bias=bias or own, output_bias=own, head_norms=head_norms) + feed_forward + 2 * hidden
        return _whole(c, c["num_hidden_layers"] * layer, tied=False), c["num_hidden_layers"]

    return count


def _mixtral(c: _Config) -> tuple[int, int]:
    hidden, experts = c["hidden_size"], c["num_local_experts"]
    layer = _attention(c, bias=False, output_bias=False, head_norms=False) + 2 * hidden
    layer += hidden * experts + experts * _gated(hidden, c["intermediate_size"])
    return _whole(c, c["num_hidden_layers"] * layer, tied=False), c["num_hidden_layers"]


def _deepseek_v3(c: _Config) -> tuple[int, int]:
    """Latent attention; the first layers are dense, the others a mixture with shared experts."""
    hidden, heads, layers = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"]
    query_rank, rank, rotary = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    plain, value = c["qk_nope_head_dim"], c["v_head_dim"]
    attention = hidden * query_rank + query_rank + query_rank * heads * (plain + rotary)
    attention += hidden * (rank + rotary) + rank + rank * heads * (plain + value) + heads * value * hidden
    experts, dense = c["n_routed_experts"], c["first_k_dense_replace"]
    mixture = (experts + c["n_shared_experts"]) * _gated(hidden, c["moe_intermediate_size"]) + experts * hidden
    all_layers = (
        layers * (attention + 2 * hidden) + dense * _gated(hidden, c["intermediate_size"]) + (layers - dense) * mixture
    )
    return _whole(c, all_layers, tied=False), layers


def _gpt2(c: _Config) -> tuple[int, int]:
    """Learned positions, biases and norms with biases everywhere, a tied head."""
    hidden, layers = c["n_embd"], c["n_layer"]
    inner = c.get("n_inner", 4 * hidden)
    layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    head = 0 if c.get("tie_word_embeddings", True) else c["vocab_size"] * hidden
    return (c["vocab_size"] + c["n_positions"]) * hidden + head + layers * layer + 2 * hidden, layers


def _gpt_neox(c: _Config) -> tuple[int, int]:
    """Biases and norms with biases everywhere, an untied head."""
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    layer = (
        4 * hidden * hidden
        + c.get("attention_bias", True) * 4 * hidden
        + 2 * hidden * inner
        + inner
        + hidden
        + 4 * hidden
    )
    return _whole(c, layers * layer, tied=False) + hidden, layers


FAMILIES: dict[str, Callable[[_Config], tuple[int, int]]] = {
    "llama": _dense(),
    "mistral": _dense(),
    "qwen2": _dense(bias=True),
    "qwen3": _dense(head_norms=True),
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
"""By `model_type`."""
