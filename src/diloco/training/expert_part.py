"""The part of a mixture that an island holds: the same class of model with fewer experts, local row i of each tensor of
experts being row `experts[i]` of the whole model's.

A router of the part chooses among the experts that are held, as many for a token as the whole model's. It has their
rows only, and so has every tensor with a row for each expert, such as DeepSeek-V3's balancing bias.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from diloco.config import NUM_EXPERTS
from diloco.core.method import Method
from diloco.errors import ConfigError
from diloco.learner.experts import mixture_blocks
from diloco.learner.held import HeldExperts
from diloco.protocol.units import numbers, numbers_of, units_of
from diloco.training.optimizers import converted

M = TypeVar("M", bound=PreTrainedModel)


def num_experts_of(config: PreTrainedConfig) -> tuple[str, int]:
    """The key of a configuration that has the number of experts, and the number. Raises ConfigError: there is none."""
    for key in NUM_EXPERTS:
        if number := getattr(config, key, None):
            return key, number
    raise ConfigError(
        f"a model of type {config.model_type} has no experts to hold ({', '.join(NUM_EXPERTS)}); hold a part of a "
        "mixture of experts only."
    )


def part_config(config: PreTrainedConfig, experts: Sequence[int]) -> PreTrainedConfig:
    """The configuration of the part that holds `experts`, for a learner that gets all values from its run.

    A router in groups (DeepSeek-V3: the best `topk_group` of `n_group` groups of neighbours, each by the sum of its two
    best scores) keeps the groups of which experts are held.

    Raises:
        ConfigError: the numbers are not ascending, or beyond the model's; they are fewer than the router chooses, or do
            not fill its groups.
    """
    (key, number), held = num_experts_of(config), units_of(experts)
    if not experts or list(experts) != numbers_of(held) or not 0 <= experts[0] <= experts[-1] < number:
        raise ConfigError(
            f"the experts {list(experts)} cannot be held of a model with {number}; name numbers from 0 to {number - 1} "
            "in ascending order, each once."
        )
    choices: Any = config
    top_k = choices.num_experts_per_tok
    if len(experts) < top_k:
        raise ConfigError(
            f"experts {numbers(held)} are fewer than the {top_k} that the router chooses for each token "
            "(num_experts_per_tok); hold as many or more."
        )
    part: Any = copy.deepcopy(config)
    setattr(part, key, len(experts))
    if num_groups := getattr(config, "n_group", None):
        left = Counter(expert // (number // num_groups) for expert in experts)
        part.n_group, part.topk_group = len(left), min(choices.topk_group, len(left))
        size = min(left.values())
        if size < max(2, *left.values()) or size * part.topk_group < top_k:
            raise ConfigError(
                f"experts {numbers(held)} do not fill the groups of the router, which chooses {top_k} experts of "
                f"{choices.topk_group} of {num_groups} groups (n_group): they are {list(left.values())} of the groups "
                f"{list(left)}; hold equally many of each, at least 2, and {top_k} in {part.topk_group} groups."
            )
    return part  # type: ignore[no-any-return]


@torch.no_grad()
def part_of(model: M, experts: Sequence[int]) -> M:
    """The part of a whole mixture of transformers (Mixtral, Qwen3-MoE, DeepSeek-V3, …) that holds `experts`.

    It has copies of the model's values, in their dtypes and on their devices; parameters are tied and frozen, and
    modules in training mode, as in the model, which stays as it is.

    Raises:
        ConfigError: as `part_config`; or the model is none of transformers, or has no fused tensors of experts.
    """
    given: object = model
    blocks = list(mixture_blocks(model))
    if not isinstance(given, PreTrainedModel) or not blocks or not all(block.fused for block in blocks):
        raise ConfigError(
            f"{type(model).__name__} has no part with fewer experts; it takes a model of transformers whose experts "
            "are the rows of fused tensors, such as MixtralForCausalLM, unwrapped."
        )
    config = part_config(model.config, experts)
    with torch.device("meta"):  # allocates and initialises nothing
        part = type(model)(config)
    taken: dict[int, Tensor] = {}  # by the model's tensor, so that tied ones stay tied
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, own in tensors:
        place, _, leaf = name.rpartition(".")
        module = part.get_submodule(place)
        if id(own) not in taken:
            rows = held_rows(own.detach(), getattr(module, leaf).shape, experts).clone()
            is_parameter = isinstance(own, nn.Parameter)
            taken[id(own)] = nn.Parameter(rows, requires_grad=own.requires_grad) if is_parameter else rows
        setattr(module, leaf, taken[id(own)])
    for name, whole_module in model.named_modules():
        part.get_submodule(name).training = whole_module.training
    return part


def held_rows(value: Tensor, shape: Sequence[int], experts: Sequence[int]) -> Tensor:
    """The rows of `experts` of a tensor of the whole model, such as state of its optimizer, where the part's tensor, of
    this shape, has another number of rows; any other tensor as it is."""
    if value.ndim != len(shape) or not shape or value.shape[0] in (1, shape[0]):
        return value
    # A dimension of 1: of Adafactor's state, which is factored.
    is_cut = all(size in (1, own) for size, own in zip(value.shape[1:], shape[1:], strict=True))
    return value[list(experts)] if is_cut else value


def part_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, experts: Sequence[int]) -> dict[str, Any]:
    """The `state_dict` of the whole model's optimizer for `optimizer`, which trains the same parameters of the part."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return converted(state, lambda index, each: held_rows(each, parameters[index].shape, experts))


def moved_rows(value: Tensor, rows: Sequence[int | None]) -> Tensor:
    """The rows of a tensor of a part with these numbers, in a part with other experts; zero where it had none."""
    moved = value.new_zeros((len(rows), *value.shape[1:]))
    for row, before in enumerate(rows):
        if before is not None:
            moved[row] = value[before]
    return moved


def experts_to_hold(text: str, config: PreTrainedConfig, method: Method) -> HeldExperts:
    """The experts of `train.holds_experts`, of a model with this configuration.

    Raises:
        ConfigError: as `HeldExperts.of` and `part_config`.
    """
    held = HeldExperts.of(f"{text} of {num_experts_of(config)[1]}", method)
    part_config(config, held.experts)
    return held
