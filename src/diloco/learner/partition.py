"""Conversion between the tensors of a model, as this process holds them, and the part of each fragment that it
exchanges.

The ranks of an island divide each fragment among them (`core.shards`): rank r owns a run of its elements, independent
of the pieces of the model that it holds. Before a send every rank sends the owners the elements that they lack, and
after an adoption the owners send every rank the elements of its pieces. So no rank ever holds a whole fragment, and
only one of equal replicas is exchanged. A process alone owns and holds all elements.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from diloco.core.fragments import Fragment, Layout, scatter
from diloco.core.layout import Placement
from diloco.core.memory import new_vector
from diloco.core.merges import shard_of
from diloco.core.shards import even_shards
from diloco.errors import LayoutError
from diloco.exchange.group import Group, device_group, device_of
from diloco.learner.pieces import Box, Gather, Piece, cut

CPU = torch.device("cpu")

AllToAll = Callable[[Tensor, Sequence[int], Sequence[int], str], Tensor]
"""Cut uint8 into parts of these sizes, one for each rank; return those of all ranks, of these sizes, in rank order."""


@dataclass(frozen=True)
class _Block:
    """Elements of one tensor that one rank holds and another owns. `box`: in the tensor, or in a view of it."""

    name: str
    box: Box
    start: int  # of the tensor in the owner's part; negative if the tensor begins before the part

    def in_part(self, part: Tensor) -> Tensor:
        """These elements as a strided view of the owner's part."""
        return part.as_strided(self.box.sizes, self.box.strides, part.storage_offset() + self.start + self.box.first)

    def num_bytes(self, dtypes: Mapping[str, torch.dtype]) -> int:
        """The size of its values."""
        return self.box.numel * dtypes[self.name].itemsize


@dataclass
class _Route:
    """The blocks of one fragment that this rank shares with each rank, itself included, in the same order on both.

    Attributes:
        held: blocks that this rank holds, by the rank that owns them.
        owned: blocks that this rank owns, by the rank that holds them.
        crosses: whether any block is held by one rank and owned by another.
    """

    held: list[list[_Block]]
    owned: list[list[_Block]]
    crosses: bool = False


class Partition:
    """The part of every fragment that this process exchanges. All ranks of an island call every method that takes
    tensors, in the same order.

    Arguments:
        boxes: of every rank, the box that it holds of each tensor, by name. A box that several ranks hold is a replica.
        gather: returns the piece of a tensor of the layout that this rank holds (`Units`).
        all_to_all: exchanges bytes between the ranks; None: there is one.
        wire: the device of the bytes that it exchanges.

    Raises:
        LayoutError: the pieces of a tensor do not make up all of it.
    """

    def __init__(
        self, layout: Layout, rank: int, boxes: Sequence[Mapping[str, Box]], gather: Gather,
        all_to_all: AllToAll | None = None, wire: torch.device = CPU,
    ) -> None:  # fmt: skip
        self._layout, self._rank, self._boxes = layout, rank, boxes
        self._gather, self._all_to_all, self._wire = gather, all_to_all, wire
        self._shards = even_shards((fragment.numel for fragment in layout.fragments), len(boxes))
        self._dtypes = {p.spec.name: getattr(torch, p.spec.dtype) for f in layout.fragments for p in f.tensors}
        self._sending: list[_Route] = []
        self._adopting: list[_Route] = []
        for fragment in layout.fragments:
            for place in fragment.tensors:
                _require_all(place, [held.get(place.spec.name) for held in boxes])
            self._sending.append(self._route(fragment, "near"))
            self._adopting.append(self._route(fragment, "all"))

    def elements(self, fragment: int) -> slice:
        """The part's elements in the fragment's flat vector."""
        return self._shards[fragment].elements(self._rank)

    def local(self, name: str, tensor: Tensor) -> Tensor:
        """The memory of a tensor's piece in this process."""
        return self._piece(name, tensor).local

    def places(self, fragment: int) -> tuple[Placement, ...]:
        """The tensors of the part, clipped to it."""
        return shard_of(self._layout.fragments[fragment].tensors, self.elements(fragment))[0]

    @torch.no_grad()
    def gather(
        self, fragment: int, tensors: Mapping[str, Tensor], out: Tensor | None = None, *, of_first: bool = False
    ) -> Tensor:
        """The part of a fragment, flat fp32, from tensors as the model holds them; on their device, or in `out`.

        `of_first`: take replicas from the first rank that holds them, because they may differ.
        """
        route, own = self._sending[fragment], self._boxes[self._rank]
        if of_first:
            route = self._route(self._layout.fragments[fragment], "first")
        elements = self.elements(fragment)
        pieces = {
            place.spec.name: self._piece(place.spec.name, tensors[place.spec.name]).local
            for place in self._layout.fragments[fragment].tensors
            if place.spec.name in own
        }
        device = next(iter(pieces.values())).device if pieces else self._wire
        if out is None:
            out = new_vector(elements.stop - elements.start, device=device)
        blocks = [[(block, pieces[block.name][block.box.within(own[block.name])]) for block in each]
                  for each in route.held]  # fmt: skip
        for block, values in self._cross(
            route, blocks, route.owned, self._dtypes, f"the values of fragment {fragment}"
        ):
            block.in_part(out).copy_(values)
        return out

    @torch.no_grad()
    def spread(self, fragment: int, part: Tensor, device: torch.device) -> dict[str, Tensor]:
        """The fp32 values that this process holds of each tensor, from the part of every rank. May share memory with
        `part`."""
        route, own = self._adopting[fragment], self._boxes[self._rank]
        if len(self._boxes) == 1:
            views = scatter(self._layout.fragments[fragment], part.to(device))
            return {name: view.view(own[name].sizes) for name, view in views.items()}
        names = [place.spec.name for place in self._layout.fragments[fragment].tensors if place.spec.name in own]
        found = {name: new_vector(own[name].numel, device=device).view(own[name].sizes) for name in names}
        blocks = [[(block, block.in_part(part)) for block in each] for each in route.owned]
        fp32 = dict.fromkeys(self._dtypes, torch.float32)
        for block, values in self._cross(route, blocks, route.held, fp32, f"the new values of fragment {fragment}"):
            found[block.name][block.box.within(own[block.name])].copy_(values)
        return found

    def _piece(self, name: str, tensor: Tensor) -> Piece:
        piece = self._gather(name, tensor)
        box, dtype = self._boxes[self._rank][name], self._dtypes[name]
        if piece.box != box or piece.local.dtype != dtype:
            raise LayoutError(
                f"{name!r} is {piece.box} in {piece.local.dtype}, and was {box} in {dtype} when the learner was made; "
                "bring the model into its dtype, and shard it, before the learner attaches, and leave it so."
            )
        if piece.local.shape != piece.box.sizes:
            raise LayoutError(
                f"this rank's piece of {name!r} has the shape {tuple(piece.local.shape)}, and its box "
                f"{piece.box.sizes}; give both alike, and shard the model again before the learner takes part (FSDP1 "
                "leaves parameters whole after an evaluation)."
            )
        return piece

    def _cross(
        self, route: _Route, sent: list[list[tuple[_Block, Tensor]]], expected: list[list[_Block]],
        dtypes: Mapping[str, torch.dtype], what: str,
    ) -> Iterator[tuple[_Block, Tensor]]:  # fmt: skip
        """Send blocks to each rank; yields the blocks expected from each, with their values."""
        yield from sent[self._rank]
        if self._all_to_all is None or not route.crosses:
            return
        sent = [[] if rank == self._rank else blocks for rank, blocks in enumerate(sent)]
        expected = [[] if rank == self._rank else blocks for rank, blocks in enumerate(expected)]
        sizes = [sum(block.num_bytes(dtypes) for block, _ in blocks) for blocks in sent]
        buffer = new_vector(sum(sizes), torch.uint8, self._wire)
        start = 0
        for block, values in chain(*sent):
            into = buffer[start : start + block.num_bytes(dtypes)]
            into.copy_(values.to(dtypes[block.name]).contiguous().view(-1).view(torch.uint8))
            start += into.numel()
        wanted = [sum(block.num_bytes(dtypes) for block in blocks) for blocks in expected]
        received, start = self._all_to_all(buffer, sizes, wanted, what), 0
        for block in chain(*expected):
            raw = received[start : start + block.num_bytes(dtypes)]
            start += raw.numel()
            if raw.storage_offset() % dtypes[block.name].itemsize:
                raw = raw.clone()
            yield block, raw.view(dtypes[block.name]).view(block.box.sizes)

    def _route(self, fragment: Fragment, replicas: Literal["all", "near", "first"]) -> _Route:
        """The route of a fragment.

        `replicas`: the holders of a box that take part: "all"; "first"; or "near": the owner if it holds the box, else
        a holder chosen by the owner's rank.
        """
        num_ranks, rank = len(self._boxes), self._rank
        shards = self._shards[fragment.index]
        route = _Route([[] for _ in range(num_ranks)], [[] for _ in range(num_ranks)])
        runs = [shards.elements(owner) for owner in range(num_ranks)]
        starts, stops = [run.start for run in runs], [run.stop for run in runs]
        for place in fragment.tensors:
            holders: dict[Box, list[int]] = {}
            for holder, held in enumerate(self._boxes):
                box = held.get(place.spec.name)
                if box is not None and box.numel:
                    holders.setdefault(box, []).append(holder)
            for box, ranks in holders.items():
                # The owners of elements in the box; a loop over all owners would take time in the square of the ranks.
                low, high = place.offset + box.first, place.offset + box.last + 1
                for owner in range(bisect_right(stops, low), bisect_left(starts, high)):
                    if starts[owner] == stops[owner]:
                        continue
                    chosen = ranks
                    if replicas == "near":
                        chosen = [owner if owner in ranks else ranks[owner % len(ranks)]]
                    elif replicas == "first":
                        chosen = ranks[:1]
                    route.crosses |= chosen != [owner]
                    if rank != owner and rank not in chosen:
                        continue
                    run = starts[owner] - place.offset, stops[owner] - place.offset
                    blocks = [_Block(place.spec.name, part, -run[0]) for part in cut(box, *run)]
                    if rank in chosen:
                        route.held[owner].extend(blocks)
                    if rank == owner:
                        for holder in chosen:
                            route.owned[holder].extend(blocks)
        return route


def _require_all(place: Placement, boxes: Sequence[Box | None]) -> None:
    """Raise LayoutError unless the distinct boxes of a tensor have as many elements as it."""
    distinct = {box for box in boxes if box is not None}
    if (held := sum(box.numel for box in distinct)) != place.spec.numel:
        raise LayoutError(
            f"the ranks of this learner hold {held} of the {place.spec.numel} elements of {place.spec.name!r}; every "
            "element must be in the piece of one rank, or in equal pieces of several."
        )


def partition_of(
    layout: Layout, parameters: Mapping[str, Tensor], gather: Gather, group: Group | None = None
) -> Partition:
    """The partition of a model whose parameters the ranks of `group` hold in pieces. Every rank calls it. Without a
    group this process is alone.

    If all ranks have NCCL, the pieces are exchanged between the devices, over the ranks' own process group.
    """
    own = {name: gather(name, parameter) for name, parameter in parameters.items()}
    if group is None:
        return Partition(layout, 0, [{name: piece.box for name, piece in own.items()}], gather)
    device = device_of({name: piece.local for name, piece in own.items()})
    on_device = device_group(group.parent, device)
    of_ranks = group.gather_values(
        {
            "boxes": {name: [piece.box.shape, piece.box.offsets, piece.box.sizes] for name, piece in own.items()},
            "on device": on_device is not None,
        },
        "what each rank holds of the model",
    )
    boxes = [{name: Box(*map(tuple, box)) for name, box in each["boxes"].items()} for each in of_ranks]
    if on_device is not None and all(each["on device"] for each in of_ranks):
        return Partition(layout, group.rank, boxes, gather, on_device.all_to_all, device)
    return Partition(layout, group.rank, boxes, gather, group.all_to_all)
