"""A workload: a model's parameters, layers, and time of an inner step.

preset   the models of the papers' simulators, as printed there
TOML     parameters = 1.2e9, layers = 24, step_time = "310 ms"; or a config or preset instead of the first two
JSON     a transformers config.json; the step time is given separately

The parameters of a config.json are counted from its numbers, without torch or transformers. A decoder is an embedding,
L layers of attention and feed-forward, a final norm and a head. Families differ in biases, norms, and the construction
of attention and feed-forward; `FAMILIES` lists the supported ones.
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from diloco.errors import ConfigError, translated
from diloco.escaping import read_json
from diloco.planning.units import TIME, amount
from diloco.tables import Table, nearest, read_text, read_toml, validate

PUBLISHED: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
"""The numbers from papers and studies that plans use, by table."""


@dataclass(frozen=True)
class Workload:
    """A model, and the time of its inner step on one learner.

    Attributes:
        name: for tables.
        num_parameters: of all synchronised tensors.
        num_layers: L.
        step_s: compute time of an inner step, in seconds; 0: unknown.
        expert_parameters: those of all experts of a mixture, with their rows of the routers; 0: not known, or dense.
        num_experts: E, experts of each layer that has some; 0: as above.
        top_k: experts of a layer that a token uses; 0: not known.
    """

    name: str
    num_parameters: float
    num_layers: int
    step_s: float
    expert_parameters: float = 0.0
    num_experts: int = 0
    top_k: int = 0

    def __post_init__(self) -> None:
        amount("the number of parameters", self.num_parameters)
        if self.num_layers < 1:
            raise ConfigError(
                f"a model of {self.num_parameters:g} parameters has {self.num_layers} layers; give 1 layer or more."
            )


_EXPERTS = ("expert_parameters", "num_experts", "top_k")

PRESETS: Mapping[str, Workload] = {
    name: Workload(name, it["parameters"], it["layers"], it["step_s"], *(it.get(key, 0) for key in _EXPERTS))
    for name, it in PUBLISHED["models"].items()
}
"""The models of the papers' simulators."""


class ModelSizeTable(Table):
    """A model's size: a preset, parameters and layers, or a config that has them."""

    parameters: float | None = Field(default=None, gt=0)
    layers: int | None = Field(default=None, gt=0)
    config: Path | None = None  # a transformers config.json, instead of parameters and layers
    preset: str | None = None  # a model of the papers: 1b, 10b, 100b, llama-405b, deepseek-v3
    active_parameters: float | None = Field(default=None, gt=0)  # parameters that a token uses in a mixture of experts

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [self.preset is not None, self.config is not None, self.parameters is not None]
        if sum(ways) != 1 or (self.parameters is None) != (self.layers is None):
            raise ValueError("a model has a preset, parameters and layers, or a config; give one of the three")
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f'there is no model preset "{self.preset}"; {nearest(self.preset, list(PRESETS))}')
        if (self.active_parameters or 0) > (self.parameters or math.inf):
            raise ValueError(
                f"a token cannot use {self.active_parameters:g} of {self.parameters:g} parameters; lower "
                "active_parameters"
            )
        return self

    def workload(self, directory: Path = Path()) -> Workload:
        """Return the model without a step time; `config` is relative to the `directory`."""
        if self.preset is not None:
            return replace(PRESETS[self.preset], step_s=0.0)
        if self.config is not None:
            return _counted(self.config.parent.name, directory / self.config)
        assert self.parameters is not None
        assert self.layers is not None
        return Workload("the model", self.parameters, self.layers, 0.0)


class _ModelFile(ModelSizeTable):
    name: str | None = None
    step_time: Annotated[float, BeforeValidator(lambda text: TIME.parse(text, positive=True))] | None = None


def load_workload(model: str, step_s: float | None = None) -> Workload:
    """Load a workload by the name of a preset, TOML file or transformers config.json; `step_s` replaces its step time.

    Raises:
        ConfigError: unknown preset, missing or invalid file, or no step time.
    """
    path = Path(model)
    if model in PRESETS:
        workload = PRESETS[model]
    elif model.endswith(".toml"):
        given = validate(_ModelFile, read_toml(read_text(path, "model file"), model), model)
        workload = replace(given.workload(path.parent), name=given.name or path.stem, step_s=given.step_time or 0.0)
    elif model.endswith(".json"):
        workload = _counted(path.parent.name or model, path)
    else:
        raise ConfigError(
            f"there is no model {model!r}; choose {', '.join(PRESETS)}, or name a .toml file or a transformers "
            "config.json."
        )
    if step_s is not None:
        return replace(workload, step_s=step_s)
    if not workload.step_s:
        raise ConfigError(f'{model} has no time of an inner step; add --step-time, for example "310 ms".')
    return workload


def parameters_of(model: str | None, parameters: float | None) -> float:
    """Return the number of parameters, given directly or by a model."""
    if parameters is not None and model is None:
        return parameters
    if model is None or parameters is not None:
        raise ConfigError("the number of parameters comes from --model or from --parameters; give one of the two.")
    return load_workload(model, 0.0).num_parameters


# --- transformers' config.json ----------------------------------------------------------------------------------------


class _Config:
    """The values of a config.json; a missing value is an error that names its key."""

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
        """Return the value, or the default if it is missing or null."""
        value = self._values.get(key)
        return default if value is None else value


class ModelSize(NamedTuple):
    """A model's size.

    Attributes:
        expert_parameters, num_experts, top_k: as in `Workload`.
    """

    parameters: int
    layers: int
    expert_parameters: int = 0
    num_experts: int = 0
    top_k: int = 0


def _counted(name: str, path: Path) -> Workload:
    parameters, layers, *experts = count_parameters(path)
    return Workload(name, parameters, layers, 0.0, *experts)


def count_parameters(path: str | Path) -> ModelSize:
    """Count the parameters of the model of a transformers config.json.

    Tied embeddings count once, all experts of a mixture count.

    Raises:
        ConfigError: the file cannot be read, is of an unsupported family, or lacks a number.
    """
    text = read_text(path, "model's config").removeprefix("\ufeff")
    values = read_json(text, str(path), ConfigError, "give the model's own config.json")
    family = values.get("model_type") if isinstance(values, dict) else None
    if family not in FAMILIES:
        raise ConfigError(
            f"{path}: counting the parameters of {family!r} is not supported; {nearest(str(family), list(FAMILIES))}: "
            "for others give parameters and layers in a TOML file."
        )
    wrong = f"{path} has a value that no {family} model has"
    with translated((TypeError, ZeroDivisionError), ConfigError, wrong, "give the model's own config.json"):
        return FAMILIES[family](_Config(values, str(path)))


def _gated(hidden: int, inner: int) -> int:
    """A gated feed-forward: gate, up, down."""
    return 3 * hidden * inner


def _whole(c: _Config, layers: int) -> int:
    """Embedding, head, last norm and the layers."""
    num_tables = 1 if c.get("tie_word_embeddings", False) else 2
    return num_tables * c["vocab_size"] * c["hidden_size"] + c["hidden_size"] + layers


def _llama_like(c: _Config, *, bias: bool = False, head_norms: bool = False) -> ModelSize:
    """Grouped-query attention, and a gated feed-forward, or one for each expert with a router."""
    hidden, inner, heads, layers = (
        c[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    )
    own = bool(c.get("attention_bias", False))  # Llama and Qwen3: of all four projections; Qwen2 always has three
    head = c["head_dim"] if c.get("head_dim", 0) else hidden // heads
    queries, keys = heads * head, (c["num_key_value_heads"] if c.get("num_key_value_heads", 0) else heads) * head
    attention = hidden * (2 * queries + 2 * keys) + (bias or own) * (queries + 2 * keys) + own * hidden
    feed_forward = _gated(hidden, inner) + bool(c.get("mlp_bias", False)) * (2 * inner + hidden)
    num_sparse, *experts = _experts(c, hidden)
    each = attention + head_norms * 2 * head + 2 * hidden
    return ModelSize(_whole(c, layers * each + (layers - num_sparse) * feed_forward + experts[0]), layers, *experts)


def _top_k(c: _Config) -> int:
    return c["num_experts_per_tok"] if c.get("num_experts_per_tok", 0) else 0


def _experts(c: _Config, hidden: int) -> tuple[int, int, int, int]:
    """The number of layers whose feed-forward is a mixture (Mixtral, Qwen3-MoE), the parameters of all experts, their
    number in a layer, and that of a token."""
    num = c.get("num_local_experts", 0) or c.get("num_experts", 0)
    inner = c["moe_intermediate_size" if c.get("moe_intermediate_size", 0) else "intermediate_size"]
    dense, every = c.get("mlp_only_layers", ()), c.get("decoder_sparse_step", 1)
    sparse = [each for each in range(c["num_hidden_layers"]) if num and each not in dense and (each + 1) % every == 0]
    return len(sparse), len(sparse) * num * (hidden + _gated(hidden, inner)), num, _top_k(c)


def _deepseek_v3(c: _Config) -> ModelSize:
    """Latent attention; the first layers are dense, the others a mixture with shared experts."""
    hidden, heads, layers = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"]
    query_rank, rank, rotary = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    plain, value = c["qk_nope_head_dim"], c["v_head_dim"]
    attention = hidden * query_rank + query_rank + query_rank * heads * (plain + rotary)
    attention += hidden * (rank + rotary) + rank + rank * heads * (plain + value) + heads * value * hidden
    dense, inner = c["first_k_dense_replace"], c["moe_intermediate_size"]
    experts = (layers - dense) * c["n_routed_experts"] * (_gated(hidden, inner) + hidden)
    shared = (layers - dense) * c["n_shared_experts"] * _gated(hidden, inner)
    all_layers = layers * (attention + 2 * hidden) + dense * _gated(hidden, c["intermediate_size"]) + shared + experts
    return ModelSize(_whole(c, all_layers), layers, experts, c["n_routed_experts"], _top_k(c))


def _gpt_layer(hidden: int, inner: int, *, bias: bool = True) -> int:
    """Attention, feed-forward and two norms, with biases everywhere."""
    return 4 * hidden * hidden + bias * 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden


def _gpt2(c: _Config) -> ModelSize:
    """Learned positions, a tied head."""
    hidden, layers = c["n_embd"], c["n_layer"]
    head = 0 if c.get("tie_word_embeddings", True) else c["vocab_size"] * hidden
    layer = _gpt_layer(hidden, c.get("n_inner", 4 * hidden))
    return ModelSize((c["vocab_size"] + c["n_positions"]) * hidden + head + layers * layer + 2 * hidden, layers)


def _gpt_neox(c: _Config) -> ModelSize:
    """An untied head."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    layer = _gpt_layer(hidden, c["intermediate_size"], bias=bool(c.get("attention_bias", True)))
    return ModelSize(_whole(c, layers * layer) + hidden, layers)


FAMILIES: dict[str, Callable[[_Config], ModelSize]] = {
    "llama": _llama_like,
    "mistral": _llama_like,
    "qwen2": partial(_llama_like, bias=True),
    "qwen3": partial(_llama_like, head_norms=True),
    "qwen3_moe": partial(_llama_like, head_norms=True),
    "mixtral": _llama_like,
    "deepseek_v3": _deepseek_v3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
"""By `model_type`."""
