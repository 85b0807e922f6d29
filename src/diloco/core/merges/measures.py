"""Lengths, angles and distances of outer gradients, the same on any device and any number of threads.

Sums are fp64 over fixed blocks of 4096 elements from the start of the vector: a block's upper half is added to its
lower one until one element is left (`torch.sum` adds in an order that depends on the processor), and blocks are added
exactly (`math.fsum`). Each function decodes the contributions once. If a learner trains only some of the tensors, its
length is computed over those (a distance, over the tensors that both learners train) and scaled up by √(elements /
those elements), to be comparable to the length of a whole contribution.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.codecs.chunks import fold
from diloco.core.merges.decoding import Decoder, Run, within
from diloco.core.merges.weighted_sum import WeightedSum

BLOCK_ELEMENTS = 4096
PIECE_ELEMENTS = 64 * BLOCK_ELEMENTS
"""Elements that are measured at once."""

T = TypeVar("T")


def block_sums(x: Tensor, y: Tensor | None = None) -> list[float]:
    """Σ x·y of each block, or Σ x²: flat fp32; the last block is padded with zeros."""
    if missing := -x.numel() % BLOCK_ELEMENTS:
        x = torch.cat([x, x.new_zeros(missing)])
        y = None if y is None else torch.cat([y, y.new_zeros(missing)])
    if x.device.type == "cpu" and (loops := arithmetic.loops()) is not None:
        return [*loops.block_sums(x, x if y is None else y)]
    wide = x.double().view(-1, BLOCK_ELEMENTS)
    low, high = wide.chunk(2, 1)
    low_factor, high_factor = (wide if y is None else y.double().view(-1, BLOCK_ELEMENTS)).chunk(2, 1)
    # A product of two fp32 numbers is exact in fp64, so `addcmul_` rounds once, whether the device fuses it or not.
    sums: list[float] = fold(low.mul(low_factor).addcmul_(high, high_factor)).flatten().tolist()
    return sums


def pieces_of(stretches: Iterable[tuple[slice, T]]) -> Iterator[list[tuple[slice, T]]]:
    """Stretches of a vector in pieces of at most PIECE_ELEMENTS, whole blocks but for the last of a stretch. Short
    ones next to each other come together, up to about as many elements."""
    pieces, num_elements = list[tuple[slice, T]](), 0
    for elements, value in stretches:
        for start in range(elements.start, elements.stop, PIECE_ELEMENTS):
            pieces.append((slice(start, min(start + PIECE_ELEMENTS, elements.stop)), value))
            num_elements += PIECE_ELEMENTS if len(pieces) == 1 else pieces[-1][0].stop - pieces[-2][0].stop
            if num_elements >= PIECE_ELEMENTS:
                yield pieces
                pieces, num_elements = [], 0
    if pieces:
        yield pieces


def contribution_norms(decoder: Decoder) -> list[float]:
    """‖v‖ of every contribution, over the tensors that its learner trains; its values of other tensors are ignored."""
    untrained = [
        [place.elements for place_index, place in enumerate(decoder.places) if not each.trains(place_index)]
        for each in decoder.contributions
    ]

    def sums_of(pieces: list[tuple[slice, None]]) -> list[list[float]]:
        [(piece, _)] = pieces
        own, found = decoder.run_around(piece), []
        squares = own.squares([index for index, gaps in enumerate(untrained) if not gaps], piece)
        for index, gaps in enumerate(untrained):
            if index in squares:
                found.append(squares[index])
                continue
            decoded = own.read(index)[own.within(piece)]
            for gap in gaps:
                decoded[max(0, gap.start - piece.start) : max(0, gap.stop - piece.start)].zero_()
            found.append(block_sums(decoded))
        return found

    sums: list[list[float]] = [[] for _ in untrained]
    for found in decoder.each(sums_of, pieces_of([(slice(0, decoder.num_elements), None)])):
        for total, own_sums in zip(sums, found, strict=True):
            total += own_sums
    norms = []
    for own, gaps in zip(sums, untrained, strict=True):
        trained = decoder.num_elements - sum(gap.stop - gap.start for gap in gaps)
        norms.append(math.sqrt(math.fsum(own) * (decoder.num_elements / trained)) if trained else 0.0)
    return norms


@dataclass(frozen=True)
class Measured:
    """A tensor of a contribution: its norm, and its inner product with the outer momentum (0 if not measured)."""

    norm: float
    along: float = 0.0


Key = tuple[int, int]
"""(tensor, contribution)."""


def measure_tensors(
    decoder: Decoder, learners: Mapping[int, Sequence[int]], momentum: Tensor | None = None
) -> dict[Key, Measured]:
    """Measurements by (tensor, contribution). `learners`: of each tensor to measure, the contributions to measure."""

    def sums_of(pieces: list[tuple[slice, int]]) -> list[tuple[Key, list[float], list[float]]]:
        own = decoder.run_around(slice(pieces[0][0].start, pieces[-1][0].stop))
        found: list[tuple[Key, list[float], list[float]]] = []
        left = list[tuple[slice, int, set[int]]]()
        for piece, tensor in pieces:
            squares = own.squares(learners[tensor], piece) if momentum is None else {}
            found += [((tensor, index), sums, []) for index, sums in squares.items()]
            left.append((piece, tensor, {*learners[tensor]} - squares.keys()))
        for index in sorted({index for _, _, indices in left for index in indices}):
            decoded = own.read(index)
            for piece, tensor, indices in left:
                if index in indices:
                    part = decoded[own.within(piece)]
                    along = [] if momentum is None else block_sums(part, momentum[piece])
                    found.append(((tensor, index), block_sums(part), along))
        return found

    keys = [(tensor, index) for tensor in sorted(learners) for index in learners[tensor]]
    sums: dict[Key, tuple[list[float], list[float]]] = {key: ([], []) for key in keys}
    wanted = [(decoder.places[tensor].elements, tensor) for tensor in sorted(learners)]
    for found in decoder.each(sums_of, pieces_of(wanted)):
        for key, squares, products in found:
            sums[key][0].extend(squares)
            sums[key][1].extend(products)
    return {key: Measured(math.sqrt(math.fsum(own)), math.fsum(along)) for key, (own, along) in sums.items()}


def lengths_of(decoder: Decoder, stretches: Sequence[slice], x: Tensor) -> list[float]:
    """‖·‖ of each stretch of a vector (fp32), by the decoder's threads."""
    sums: list[list[float]] = [[] for _ in stretches]

    def sums_of(pieces: list[tuple[slice, int]]) -> list[tuple[int, list[float]]]:
        return [(index, block_sums(x[piece])) for piece, index in pieces]

    for found in decoder.each(sums_of, pieces_of([(each, index) for index, each in enumerate(stretches)])):
        for index, own in found:
            sums[index] += own
    return [math.sqrt(math.fsum(each)) for each in sums]


Matrix = list[list[float]]


def squared_distances(decoder: Decoder, stretches: Sequence[WeightedSum]) -> list[Matrix]:
    """‖v_i − v_j‖² of all contributions, for each stretch separately; 0 where one of the two has no weight there.

    Blocks begin with each run of a stretch. All contributions of a run are decoded at a time.
    """
    num = len(decoder.contributions)
    sums: list[dict[tuple[int, int], list[float]]] = [
        {(i, j): [] for i in each.counting for j in each.counting if j < i} for each in stretches
    ]
    spans = [(stretch.elements, pairs) for stretch, pairs in zip(stretches, sums, strict=True)]

    def sums_of(run: Run) -> list[tuple[list[float], list[float]]]:
        rows = run.read_all()
        return [
            (own, block_sums(rows[i][part] - rows[j][part]))
            for part, pairs in within(run.elements, spans)
            for (i, j), own in pairs.items()
        ]

    for found in decoder.each_run(sums_of):
        for own, blocks in found:
            own += blocks
    squared: list[Matrix] = [[[0.0] * num for _ in range(num)] for _ in stretches]
    for matrix, pairs in zip(squared, sums, strict=True):
        for (i, j), sum_ in pairs.items():
            matrix[i][j] = matrix[j][i] = math.fsum(sum_)
    return squared
