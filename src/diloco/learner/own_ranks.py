"""The ranks of torch.distributed that form one learner: given by the caller, or read from the model's wrappers and
tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.exchange.group import ranks_in

RanksOfLearner = dist.ProcessGroup | DeviceMesh | Literal["self"]


def island_of(
    ranks: RanksOfLearner | None, model: nn.Module, exchange: Exchange
) -> dist.ProcessGroup | DeviceMesh | None:
    """The process group or mesh whose ranks are this learner; None: this process alone.

    Arguments:
        ranks: given by the caller; None: read from the model.

    Raises:
        ConfigError: other ranks train the model than those of `ranks`, or neither `ranks` nor the model tells the
            ranks, and the exchange would treat each rank as a learner.
    """
    if ranks == "self":
        _require_alone(model)
        return None
    if ranks is None:
        ranks = _largest(list(_found_in(model)))
    if isinstance(ranks, dist.ProcessGroup | DeviceMesh):
        return ranks
    if ranks is not None:
        raise ConfigError(
            f"this process is not one of the ranks of ranks={ranks!r}; pass a process group or mesh that contains it, "
            '"self", or None.'
        )
    if exchange.dials_out and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"torch.distributed has {dist.get_world_size()} ranks here, and neither ranks= nor the model tells which "
            "of them are this learner. If they train one model together, pass ranks=torch.distributed.group.WORLD to "
            'Learner, or their group or mesh; if each rank is a learner of its own, pass ranks="self" and give each a '
            "name of its own."
        )
    return None


def _require_alone(model: nn.Module) -> None:
    for group in _found_in(model):
        if len(members := ranks_in(group)) > 1:
            raise ConfigError(
                f'ranks="self" makes this process alone the learner, but ranks {members} train its model '
                "together; leave ranks= out, or give every learner a model of its own."
            )


def _found_in(model: nn.Module) -> Iterator[dist.ProcessGroup | DeviceMesh]:
    """The ranks by each of the model's DDP modules, `replicate()` modules and DTensors.

    The mesh of a DTensor may be a part of the job's, whose other ranks hold other parts of the model: it yields all.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield module.process_group
        elif (group := _replicated_over(module)) is not None:
            yield group
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            yield parameter.device_mesh if parameter.device_mesh.size() == 1 else _world()


def _replicated_over(module: nn.Module) -> dist.ProcessGroup | DeviceMesh | None:
    """The ranks over which `torch.distributed._composable.replicate` replicates this module; None: it does not."""
    imported = sys.modules.get("torch.distributed._composable.replicate")
    if imported is None or not isinstance(module, imported.DDP):
        return None
    state = imported.replicate.state(module)
    if state.has_initialized:
        group: dist.ProcessGroup = state._ddp.process_group
        return group
    given = state._init_kwargs
    found: dist.ProcessGroup | DeviceMesh = given.get("process_group") or given.get("device_mesh") or _world()
    return found


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _largest(found: list[dist.ProcessGroup | DeviceMesh]) -> dist.ProcessGroup | DeviceMesh | None:
    """The group that contains all others; None without groups."""
    found = list({id(each): each for each in found}.values())
    if not found:
        return None
    largest = max(found, key=lambda each: len(ranks_in(each)))
    for each in found:
        if not set(ranks_in(each)) <= set(ranks_in(largest)):
            raise ConfigError(
                f"parts of the model are trained by ranks {ranks_in(largest)} and others by ranks {ranks_in(each)}; "
                "pass the process group or mesh of all of them as ranks= to Learner."
            )
    return largest
