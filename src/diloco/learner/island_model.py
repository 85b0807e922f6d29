"""The model of an island, combined from the parts of its ranks: pipeline stages and experts are on some ranks only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from diloco.core.layout import BaseTensor, Layout, TensorSpec
from diloco.errors import LayoutError
from diloco.exchange.group import Group, as_bytes
from diloco.learner.roles import ModelDescription

T = TypeVar("T", TensorSpec, BaseTensor)


class _Before:
    """The order of two tensors in the model, as far as it follows from the modules of the ranks."""

    def __init__(self, children: Sequence[Mapping[str, Sequence[str]]]) -> None:
        self._children = children

    def __call__(self, name: str, other: str) -> bool:
        """Whether the tensor `name` is known to precede `other`."""
        mine, theirs = name.split("."), other.split(".")
        common = next(i for i, (one, another) in enumerate(zip(mine, theirs, strict=False)) if one != another)
        path, one, another = ".".join(mine[:common]), mine[common], theirs[common]
        for children in self._children:
            if one in (names := children.get(path, ())) and another in names:
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
    of_ranks = group.gather_values(mine.to_dict(), "what each rank holds of the model")
    return merged([ModelDescription.from_dict(each) for each in of_ranks])


def merged(described: Sequence[ModelDescription]) -> ModelDescription:
    """The combined description, in the order of a single process that holds the whole model."""
    buffers = dict.fromkeys(chain.from_iterable(each.buffers for each in described))

    def turn(each: TensorSpec | BaseTensor) -> int:
        is_averaged = isinstance(each, TensorSpec) and each.is_averaged
        return 2 if _name(each) in buffers else int(is_averaged)

    before = _Before([each.children for each in described])
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


def _merged(orders: Sequence[Sequence[T]], turn: Callable[[T], int], before: _Before) -> tuple[T, ...]:
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


def _in_one_order(orders: Sequence[Sequence[str]], before: _Before) -> list[str]:
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
