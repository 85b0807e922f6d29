"""The model of an island, from what each of its ranks holds: pipeline stages and experts are on some ranks only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from diloco.core.layout import BaseTensor, Layout, TensorSpec
from diloco.errors import LayoutError
from diloco.exchange.group import Group, as_bytes
from diloco.learner.roles import Described

T = TypeVar("T", TensorSpec, BaseTensor)

_LAYER = re.compile(r"(.*?)\.?\b(\d+)\.")


def described_by_all(mine: Described, group: Group) -> Described:
    """The tensors of all ranks; every rank calls it.

    Ranks that hold the same tensors hold them in the order of the model. Where they hold different ones, as pipeline
    stages do, their orders are merged: layers of one list by number, all else by rank.

    Raises:
        LayoutError: two ranks describe a tensor differently.
    """
    told = group.gather_values(mine.to_dict(), "what each rank holds of the model")
    all_ = [Described.from_dict(each) for each in told]
    return Described(
        _merged([each.exchanged for each in all_]),
        _merged([each.static for each in all_]),
        _merged([each.base for each in all_]),
    )


def static_of_all(mine: Mapping[str, Tensor], layout: Layout, group: Group) -> dict[str, Tensor]:
    """On rank 0 the static tensors of all ranks, on the host; every rank calls it with its own."""
    held = group.gather_values(list(mine), "the static tensors of each rank")
    found = dict(mine)
    for spec in layout.static:
        owner = next(rank for rank, names in enumerate(held) if spec.name in names)
        if owner == 0:
            continue
        dtype = getattr(torch, spec.dtype)
        num_bytes, is_sender = spec.numel * dtype.itemsize, group.rank == owner
        send = as_bytes(mine[spec.name].contiguous()) if is_sender else torch.empty(0, dtype=torch.uint8)
        received = group.all_to_all(
            send,
            [num_bytes if is_sender and rank == 0 else 0 for rank in range(group.size)],
            [num_bytes if group.rank == 0 and rank == owner else 0 for rank in range(group.size)],
            f"tensor {spec.name!r} of this learner's model",
        )
        if group.rank == 0:
            found[spec.name] = received.view(dtype).view(spec.shape)
    return found


def _merged(orders: Sequence[Sequence[T]]) -> tuple[T, ...]:
    found: dict[str, T] = {}
    for rank, order in enumerate(orders):
        for each in order:
            known = found.setdefault(_name(each), each)
            if known != each:
                raise LayoutError(
                    f"tensor {_name(each)!r} is {each} on rank {rank} of this learner and {known} on an earlier one; "
                    "give different tensors different names, or say with gather=… which piece of one each rank holds."
                )
    left = list({tuple(map(_name, order)): None for order in orders})
    merged: list[str] = list(left.pop()) if len(left) == 1 else []
    while heads := [names[0] for names in left if names]:
        # A name waits where it is not the next one of every rank that holds it.
        ready = [head for head in heads if all(head == names[0] for names in left if head in names)] or heads
        chosen = ready[0]
        for head in ready[1:]:
            chosen = head if _comes_before(head, chosen) else chosen
        merged.append(chosen)
        left = [tuple(name for name in names if name != chosen) for names in left]
    return tuple(found[name] for name in merged)


def _name(each: TensorSpec | BaseTensor) -> str:
    return each.name if isinstance(each, TensorSpec) else each.spec.name


def _comes_before(name: str, other: str) -> bool:
    """Whether both are of one list of layers, and the first name of an earlier layer."""
    mine, theirs = _LAYER.match(name), _LAYER.match(other)
    if mine is None or theirs is None or mine[1] != theirs[1]:
        return False
    return int(mine[2]) < int(theirs[2])
