"""Expert parallelism inside a learner: the ranks share the experts of a mixture, and the rest of the model by FSDP2.

It is that of transformers (`DistributedConfig(fsdp_size=ranks, ep_size=size)`): each rank holds the experts of its
place in a group of `size` ranks, tokens travel to their experts and back, and every parameter is a DTensor.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from diloco.errors import ConfigError, translated
from diloco.learner.experts import mixture_blocks
from diloco.learner.pieces import Box, read_dtensor

KEY = "train.expert_parallel"


def shard_experts(model: nn.Module, size: int, num_ranks: int) -> nn.Module:
    """The model, sharded over all ranks of torch.distributed, with its values. Every rank calls it with the same model.

    Arguments:
        size: number of ranks that together hold all experts.
        num_ranks: of the learner, 1 without torchrun.

    Raises:
        ConfigError: the size does not divide the ranks or the experts, the model has no experts, or tied weights.
    """
    if num_ranks == 1:
        raise ConfigError(
            f"{KEY} = {size} needs a learner of several ranks; start it as torchrun --nproc-per-node {size} -m diloco "
            "train …, without --collective"
        )
    if num_ranks % size:
        raise ConfigError(f"{KEY} = {size} does not divide the learner's {num_ranks} ranks; change one of them")
    blocks = list(mixture_blocks(model))
    if not blocks or not isinstance(model, PreTrainedModel):
        raise ConfigError(f"{KEY} = {size} needs a mixture of experts, and {type(model).__name__} has none; drop it")
    for block in blocks:
        if block.num_experts % size:
            raise ConfigError(f"{KEY} = {size} does not divide the {block.num_experts} experts of {block.name}")
    if len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False))):
        raise ConfigError(
            f"{KEY} = {size} unties weights that {type(model).__name__} ties, which FSDP cannot train; set "
            "model.tie_word_embeddings = false before the run has a model, or drop it"
        )
    accelerator, device = torch.accelerator.current_accelerator(), next(model.parameters()).device
    if accelerator is not None and accelerator.type != device.type:
        raise ConfigError(f'{KEY} = {size} needs {accelerator.type}, not {device.type}; set train.device = "auto"')
    failed = f"transformers cannot share the experts of {type(model).__name__} over ranks"
    with translated((ImportError, ValueError, RuntimeError), ConfigError, failed, f"drop {KEY}"):
        from transformers.distributed.configuration_utils import DistributedConfig

        settings, _, meshes = model.prepare_distribute_model(DistributedConfig(fsdp_size=num_ranks, ep_size=size))
        sharded: nn.Module = model.maybe_distribute_model(model, settings, meshes)
    return sharded


def is_sharded(model: nn.Module) -> bool:
    """Whether the ranks hold pieces of the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def sharded_like(own: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, sharded as `own` of the same shape."""
    if not isinstance(own, DTensor) or value.shape != own.shape:
        return value
    box = read_dtensor("", own).box
    local = value[box.within(Box.whole(box.shape))].to(own.device).contiguous()
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_`, also for parameters of which each rank of torch.distributed holds other pieces.

    Torch's own refuses parameters on several device meshes, as those of experts and of the rest are. Returns the norm
    before clipping.
    """
    gradients = [each.grad.to_local() for each in parameters if isinstance(each.grad, DTensor)]
    if not gradients:
        return nn.utils.clip_grad_norm_(parameters, largest)
    squares = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for each in gradients:
        each.mul_((largest / (norm + 1e-6)).clamp(max=1))  # as torch does
    return norm
