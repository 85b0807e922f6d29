"""An island: the ranks of torch.distributed that form one learner, given by the caller or read from the wrappers and
tensors of its model; and that model, combined from the parts of the ranks, as pipeline stages and experts are on some.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diloco.core.layout import BaseTensor, Layout, TensorSpec
from diloco.errors import ConfigError, LayoutError
from diloco.exchange.base import Exchange
from diloco.exchange.group import Group, as_bytes, ranks_in
from diloco.learner.roles import ModelDescription

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


T = TypeVar("T", TensorSpec, BaseTensor)
Before = Callable[[str, str], bool]


def _precedes(of_ranks: Sequence[ModelDescription], name: str, other: str) -> bool:
    """Whether the tensor `name` is known to precede `other` in the model, as far as it follows from the modules of the
    ranks."""
    mine, theirs = name.split("."), other.split(".")
    common = next(i for i, (one, another) in enumerate(zip(mine, theirs, strict=False)) if one != another)
    path, one, another = ".".join(mine[:common]), mine[common], theirs[common]
    for described in of_ranks:
        if one in (names := described.children.get(path, ())) and another in names:
            return names.index(one) < names.index(another)
    return one.isdigit() and another.isdigit() and int(one) < int(another)


def described_by_all(mine: ModelDescription, group: Group) -> ModelDescription:
    """The description of the whole model; every rank calls it.

    Ranks that hold the same tensors hold them in model order. If they hold different ones, as pipeline stages do, their
    orders are merged: by the order of modules, where a rank has both modules, even as None or without layers; otherwise
    layers of one list by number, and all other tensors by rank.

    Raises:
        LayoutError: two ranks describe a tensor differently.
    """
    of_ranks = group.gather_values(asdict(mine), "what each rank holds of the model")
    return merged(TypeAdapter(list[ModelDescription]).validate_python(of_ranks))


def merged(described: Sequence[ModelDescription]) -> ModelDescription:
    """The combined description, in the order of a single process that holds the whole model."""
    buffers = dict.fromkeys(chain.from_iterable(each.buffers for each in described))

    def turn(each: TensorSpec | BaseTensor) -> int:
        is_averaged = isinstance(each, TensorSpec) and each.is_averaged
        return 2 if _name(each) in buffers else int(is_averaged)

    before = partial(_precedes, described)
    return ModelDescription(
        _merged([each.exchanged for each in described], turn, before),
        _merged([each.static for each in described], turn, before),
        _merged([each.base for each in described], turn, before),
        tuple(buffers),
        {},
    )


def static_of_all(mine: Mapping[str, Tensor], layout: Layout, group: Group) -> dict[str, Tensor]:
    """The static tensors of all ranks on the host, on rank 0. Every rank calls it with its own tensors."""
    held = group.gather_values(list(mine), "the static tensors of each rank")
    found = dict(mine)
    for spec in layout.static:
        owner = next(rank for rank, names in enumerate(held) if spec.name in names)
        if owner == 0:
            continue
        dtype = getattr(torch, spec.dtype)
        sizes = [spec.numel * dtype.itemsize if rank == owner else 0 for rank in range(group.size)]
        own = as_bytes(mine[spec.name].contiguous()) if group.rank == owner else torch.empty(0, dtype=torch.uint8)
        received = group.collect(own, sizes, f"tensor {spec.name!r} of this learner's model")
        if group.rank == 0:
            found[spec.name] = received.view(dtype).view(spec.shape)
    return found


def _merged(orders: Sequence[Sequence[T]], turn: Callable[[T], int], before: Before) -> tuple[T, ...]:
    """All tensors, first those whose turn is 0, then 1, then 2."""
    found: dict[str, T] = {}
    for rank, order in enumerate(orders):
        for each in order:
            known = found.setdefault(_name(each), each)
            if known != each:
                raise LayoutError(
                    f"tensor {_name(each)!r} is {each} on rank {rank} of this learner and {known} on an earlier one; "
                    "give different tensors different names, or say with gather=… which piece of one each rank holds."
                )
    names = [
        _in_one_order([[_name(each) for each in order if turn(each) == number] for order in orders], before)
        for number in range(3)
    ]
    return tuple(found[name] for name in chain(*names))


def _in_one_order(orders: Sequence[Sequence[str]], before: Before) -> list[str]:
    left = list({tuple(order): None for order in orders})
    names: list[str] = list(left.pop()) if len(left) == 1 else []
    while heads := list(dict.fromkeys(order[0] for order in left if order)):
        # A name is ready if it is the next one of every rank that holds it.
        ready = [head for head in heads if all(head == order[0] for order in left if head in order)] or heads
        chosen = ready[0]
        for head in ready[1:]:
            chosen = head if before(head, chosen) else chosen
        names.append(chosen)
        left = [tuple(name for name in order if name != chosen) for order in left]
    return names


def _name(each: TensorSpec | BaseTensor) -> str:
    return each.name if isinstance(each, TensorSpec) else each.spec.name
