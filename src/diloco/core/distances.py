"""Lengths, angles and distances of outer gradients, the same on any device and any number of threads.

Sums are fp64 over fixed blocks of 4096 elements from the start of the vector: a block's upper half is added to its lower one until one
element is left (`torch.sum` adds in an order that depends on the processor), and blocks are added exactly (`math.fsum`). Contributions
are decoded run by run. Where a learner trains a part of the tensors, its length is taken over those (a distance of two learners: over
what both train) and scaled up by √(elements / those elements), so that it is neither short nor near for that.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.codecs.sums import fold
from diloco.core.contributions import Encoded, Stretch, untrained
from diloco.core.decoding import RUN_SEGMENTS, Reader, clear, runs
from diloco.core.layout import Placement

BLOCK_ELEMENTS = 4096
_GROUP_ELEMENTS = 64 * BLOCK_ELEMENTS  # at a time, to spread the cost of the calls
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def inner_product(x: Tensor, y: Tensor) -> float:
    """⟨x, y⟩ of two flat fp32 vectors: fp64 sums of blocks of 4096 elements, added exactly."""
    pieces = zip(x.split(_GROUP_ELEMENTS), y.split(_GROUP_ELEMENTS), strict=True)
    return math.fsum(sum_ for one, other in pieces for sum_ in _sums(one.double().mul_(other.double())))


def norm(x: Tensor) -> float:
    """‖x‖ of a flat fp32 vector, as `inner_product` sums it."""
    return math.sqrt(math.fsum(_squares(x)))


def times(x: Tensor, factor: float) -> Tensor:
    """factor·x. Where fp32 cannot hold the factor (a very short vector made long, or back) the product is taken in fp64."""
    if SMALLEST <= abs(factor) <= LARGEST:
        return x.mul(factor)
    return x.double().mul_(factor).float()


def norms_of(
    codec: Codec, contributions: Sequence[Encoded], num_elements: int, places: Sequence[Placement] = ()
) -> list[float]:
    """‖v‖ of every contribution, decoded run by run: fp64 sums of blocks of 4096 elements, added exactly.

    `places`: the tensors, needed where a learner trains only some of them.
    """
    reader = Reader(codec, min(num_elements, RUN_SEGMENTS * SEGMENT_ELEMENTS), contributions[0].payloads[0].device)
    found = []
    for each in contributions:
        blocks: list[float] = []
        gaps = untrained(each, places)
        for part, span in runs(codec, num_elements):
            blocks += _squares(clear(reader.read(each, span, reader.scratch[: part.stop - part.start]), part, gaps))
        left = num_elements - sum(gap.stop - gap.start for gap in gaps)
        found.append(math.sqrt(math.fsum(blocks) * (num_elements / left)) if left else 0.0)
    return found


Matrix = list[list[float]]


def squared_distances(
    codec: Codec, contributions: Sequence[Encoded], stretches: Sequence[Stretch], num_elements: int
) -> list[Matrix]:
    """‖v_i − v_j‖² of all contributions in one pass, for each stretch over itself; 0 where one of the two does not count there.

    Blocks begin with each run of a stretch. A run of all learners is decoded at a time.
    """
    num, device = len(contributions), contributions[0].payloads[0].device
    reader = Reader(codec, 0, device)
    values = torch.empty(num, min(num_elements, RUN_SEGMENTS * SEGMENT_ELEMENTS), device=device)
    pairs = [[(i, j) for i in each.counting for j in each.counting if j < i] for each in stretches]
    blocks: list[dict[tuple[int, int], list[float]]] = [{pair: [] for pair in each} for each in pairs]
    for part, span in runs(codec, num_elements):
        rows = values[:, : part.stop - part.start]
        for row, each in zip(rows, contributions, strict=True):
            reader.read(each, span, row)
        for stretch, found in zip(stretches, blocks, strict=True):
            piece = stretch.within(part)
            if piece is None:
                continue
            for (i, j), sums in found.items():
                sums += _squares(rows[i, piece.elements] - rows[j, piece.elements])
    squared: list[Matrix] = [[[0.0] * num for _ in range(num)] for _ in stretches]
    for matrix, found in zip(squared, blocks, strict=True):
        for (i, j), sums in found.items():
            matrix[i][j] = matrix[j][i] = math.fsum(sums)
    return squared


def between(squared: Sequence[Matrix], stretches: Sequence[Stretch], num_elements: int) -> Matrix:
    """Squared distances of whole contributions, from those of the stretches; inf between two that train nothing in common."""
    learners = range(len(squared[0]))

    def distance(i: int, j: int) -> float:
        common = [s for s, each in enumerate(stretches) if i in each.counting and j in each.counting]
        shared = sum(stretches[s].num_elements for s in common)
        return math.fsum(squared[s][i][j] for s in common) * (num_elements / shared) if shared else math.inf

    return [[0.0 if i == j else distance(i, j) for j in learners] for i in learners]


def to_mean(
    weights: Sequence[float], squared: Sequence[Matrix], stretches: Sequence[Stretch], num_elements: int
) -> list[float]:
    """‖v_i − z‖ of every contribution, z the mean with these weights, without z: ‖v_i − z‖² = Σ_j a_j·D_ij − ½ Σ_jk a_j·a_k·D_jk

    with D the squared distances and a the weights, of sum 1, for each stretch over itself. 0 for one that counts nowhere.
    """
    sums, lengths = [0.0] * len(weights), [0] * len(weights)
    for matrix, stretch in zip(squared, stretches, strict=True):
        total = math.fsum(weights[i] for i in stretch.counting)
        shares = {i: weights[i] / total for i in stretch.counting}
        to_all = {i: math.fsum(share * matrix[i][j] for j, share in shares.items()) for i in shares}
        spread = math.fsum(share * to_all[i] for i, share in shares.items()) / 2
        for i in shares:
            sums[i] += max(0.0, to_all[i] - spread)
            lengths[i] += stretch.num_elements
    return [math.sqrt(sum_ * (num_elements / n)) if n else 0.0 for sum_, n in zip(sums, lengths, strict=True)]


def _squares(x: Tensor) -> list[float]:
    """Sums of squares of the blocks of a run."""
    return [sum_ for piece in x.split(_GROUP_ELEMENTS) for sum_ in _sums(piece.double().square_())]


def _sums(x: Tensor) -> list[float]:
    """Sums of the blocks of a flat fp64 vector, which is overwritten; what the last one lacks is 0."""
    full = x.numel() - x.numel() % BLOCK_ELEMENTS
    sums: list[float] = fold(x[:full].view(-1, BLOCK_ELEMENTS)).flatten().tolist()
    if full < x.numel():
        last = torch.zeros(BLOCK_ELEMENTS, dtype=torch.float64, device=x.device)
        last[: x.numel() - full] = x[full:]
        sums.append(float(fold(last)))
    return sums
