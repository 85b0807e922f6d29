"""Lengths, angles and distances of outer gradients, the same on any device and any number of threads.

Sums are fp64 over fixed blocks of 4096 elements from the start of the vector: a block's upper half is added to its
lower one until one element is left (`torch.sum` adds in an order that depends on the processor), and blocks are added
exactly (`math.fsum`). Each function decodes the contributions once. If a learner trains only some of the tensors, its
length is computed over those (a distance, over the tensors that both learners train) and scaled up by √(elements /
those elements), to be comparable to the length of a whole contribution.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.merges.decoding import RUN_ELEMENTS, Decoder, within
from diloco.core.merges.weighted_sum import WeightedSum

BLOCK_ELEMENTS = 4096


class BlockSums:
    """Σ x·y of two vectors that are added piece by piece, or Σ x². Less than a block is kept from piece to piece."""

    def __init__(self, scratch: "WideScratch") -> None:
        self._scratch = scratch
        self._sums: list[float] = []
        self._rest: tuple[Tensor, ...] = ()

    def add(self, x: Tensor, y: Tensor | None = None) -> None:
        """The next elements, flat fp32; `y` None: x itself. All pieces of a vector have a `y`, or none has."""
        for start in range(0, x.numel(), RUN_ELEMENTS):
            part = slice(start, start + RUN_ELEMENTS)
            self._add((x[part],) if y is None else (x[part], y[part]))

    def end(self) -> None:
        """End the vectors: the last block is padded with zeros, and the next piece begins a new block."""
        if self._rest and self._rest[0].numel():
            missing = BLOCK_ELEMENTS - self._rest[0].numel()
            self._add(tuple(each.new_zeros(missing) for each in self._rest))
        self._rest = ()

    def total(self) -> float:
        """The sum over all pieces."""
        self.end()
        return math.fsum(self._sums)

    def _add(self, pieces: tuple[Tensor, ...]) -> None:
        wide = self._scratch.widen(self._rest or tuple(each[:0] for each in pieces), pieces)
        num_blocks, rest = divmod(wide[0].numel(), BLOCK_ELEMENTS)
        self._rest = tuple(each[num_blocks * BLOCK_ELEMENTS :].clone() for each in wide) if rest else ()
        if num_blocks:
            self._sums += self._scratch.block_sums(num_blocks, product=len(pieces) == 2)


class WideScratch:
    """Two fp64 vectors of a run and a block, used for one piece after the other."""

    def __init__(self, device: torch.device) -> None:
        self._wide = torch.empty(2, RUN_ELEMENTS + BLOCK_ELEMENTS, dtype=torch.float64, device=device)
        self._halves: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def widen(self, rest: tuple[Tensor, ...], pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The rest of the piece before, followed by this piece, in fp64."""
        wide = tuple(
            row[: before.numel() + piece.numel()] for row, before, piece in zip(self._wide, rest, pieces, strict=False)
        )
        for row, before, piece in zip(wide, rest, pieces, strict=True):
            row[: before.numel()].copy_(before)
            row[before.numel() :].copy_(piece)
        return wide

    def block_sums(self, num_blocks: int, *, product: bool) -> list[float]:
        """The sums of the first blocks of what was widened last, which are overwritten.

        A product of two fp32 numbers is exact in fp64, so `addcmul_` rounds once, whether the device fuses it or not.
        """
        if num_blocks not in self._halves:
            self._halves[num_blocks] = self._views(num_blocks)
        (low, high), (low_factor, high_factor), *halves = self._halves[num_blocks]
        if not product:
            low_factor, high_factor = low, high
        low.mul_(low_factor).addcmul_(high, high_factor)
        for low, high in halves:
            low.add_(high)
        sums: list[float] = low.flatten().tolist()
        return sums

    def _views(self, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
        """(lower, upper) halves: of both vectors' blocks, then of what each halving leaves of the first one's."""
        x, y = self._wide[:, : num_blocks * BLOCK_ELEMENTS].view(2, num_blocks, BLOCK_ELEMENTS)
        width = BLOCK_ELEMENTS // 2
        halves = [(x[:, :width], x[:, width:]), (y[:, :width], y[:, width:])]
        while width > 1:
            width //= 2
            halves.append((x[:, :width], x[:, width : 2 * width]))
        return halves


def norm(x: Tensor) -> float:
    """‖x‖ of a flat fp32 vector."""
    sums = BlockSums(WideScratch(x.device))
    sums.add(x)
    return math.sqrt(sums.total())


def contribution_norms(decoder: Decoder) -> list[float]:
    """‖v‖ of every contribution, over the tensors that its learner trains; its values of other tensors are ignored."""
    scratch = WideScratch(decoder.device)
    untrained = [
        [place.elements for place_index, place in enumerate(decoder.places) if not each.trains(place_index)]
        for each in decoder.contributions
    ]
    sums = [BlockSums(scratch) for _ in untrained]
    for run in decoder.runs():
        for index, gaps in enumerate(untrained):
            decoded = decoder.read(index, run)
            for gap in gaps:
                decoded[max(0, gap.start - run.start) : max(0, gap.stop - run.start)].zero_()
            sums[index].add(decoded)
    norms = []
    for own, gaps in zip(sums, untrained, strict=True):
        trained = decoder.num_elements - sum(gap.stop - gap.start for gap in gaps)
        norms.append(math.sqrt(own.total() * (decoder.num_elements / trained)) if trained else 0.0)
    return norms


@dataclass(frozen=True)
class Measured:
    """A tensor of a contribution: its norm, and its inner product with the outer momentum (0 if not measured)."""

    norm: float
    along: float = 0.0


def measure_tensors(
    decoder: Decoder, learners: Mapping[int, Sequence[int]], momentum: Tensor | None = None
) -> dict[tuple[int, int], Measured]:
    """Measurements by (tensor, contribution). `learners`: of each tensor to measure, the contributions to measure."""
    scratch = WideScratch(decoder.device)
    keys = [(tensor, index) for tensor in sorted(learners) for index in learners[tensor]]
    squares = {key: BlockSums(scratch) for key in keys}
    products = {key: BlockSums(scratch) for key in keys if momentum is not None}
    wanted = [(decoder.places[tensor].elements, tensor) for tensor in sorted(learners)]
    for run in decoder.runs():
        inside = list(within(run, wanted))
        for index in sorted({index for _, tensor in inside for index in learners[tensor]}):
            decoded = decoder.read(index, run)
            for part, tensor in inside:
                if index in learners[tensor]:
                    squares[tensor, index].add(decoded[part])
                    if momentum is not None:
                        products[tensor, index].add(decoded[part], momentum[run][part])
        for _, tensor in inside:
            if decoder.places[tensor].elements.stop <= run.stop:
                for sums in (each[tensor, index] for each in (squares, products) if each for index in learners[tensor]):
                    sums.end()
    return {
        key: Measured(math.sqrt(squares[key].total()), products[key].total() if momentum is not None else 0.0)
        for key in keys
    }


Matrix = list[list[float]]


def squared_distances(decoder: Decoder, stretches: Sequence[WeightedSum]) -> list[Matrix]:
    """‖v_i − v_j‖² of all contributions, for each stretch separately; 0 where one of the two has no weight there.

    Blocks begin with each run of a stretch. All contributions of a run are decoded at a time.
    """
    scratch, num = WideScratch(decoder.device), len(decoder.contributions)
    sums = [{(i, j): BlockSums(scratch) for i in each.counting for j in each.counting if j < i} for each in stretches]
    spans = [(stretch.elements, pairs) for stretch, pairs in zip(stretches, sums, strict=True)]
    for run, rows in decoder.shared_runs():
        for part, pairs in within(run, spans):
            for (i, j), sum_ in pairs.items():
                sum_.add(rows[i][part] - rows[j][part])
                sum_.end()
    squared: list[Matrix] = [[[0.0] * num for _ in range(num)] for _ in stretches]
    for matrix, pairs in zip(squared, sums, strict=True):
        for (i, j), sum_ in pairs.items():
            matrix[i][j] = matrix[j][i] = sum_.total()
    return squared
