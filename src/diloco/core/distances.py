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
from diloco.core.contributions import RUN_SEGMENTS, Encoded, Reader, clear, runs, untrained
from diloco.core.layout import Placement

BLOCK_ELEMENTS = 4096
_GROUP_ELEMENTS = (
    16 * BLOCK_ELEMENTS
)  # at a time: enough to spread the cost of a call, few enough for a processor's cache
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
    return distances_of(codec, contributions, num_elements, places, None)


def distances_of(
    codec: Codec,
    contributions: Sequence[Encoded],
    num_elements: int,
    places: Sequence[Placement],
    centre: Tensor | None,
) -> list[float]:
    """‖v − centre‖ of every contribution, as `norms_of` sums it; None stands for 0."""
    reader = Reader(codec, min(num_elements, RUN_SEGMENTS * SEGMENT_ELEMENTS), contributions[0].payloads[0].device)
    found = []
    for each in contributions:
        blocks: list[float] = []
        gaps = untrained(each, places)
        for part, span in runs(codec, num_elements):
            decoded = reader.read(each, span, reader.scratch[: part.stop - part.start])
            blocks += _squares(clear(decoded if centre is None else decoded.sub_(centre[part]), part, gaps))
        found.append(math.sqrt(math.fsum(blocks) * _scaled_up(num_elements, gaps)))
    return found


def squared_distances(
    codec: Codec, contributions: Sequence[Encoded], num_elements: int, places: Sequence[Placement]
) -> list[list[float]]:
    """Squared distances between all contributions; inf between two that train nothing in common."""
    num, device = len(contributions), contributions[0].payloads[0].device
    reader = Reader(codec, 0, device)
    values = torch.empty(num, min(num_elements, RUN_SEGMENTS * SEGMENT_ELEMENTS), device=device)
    gaps = [untrained(each, places) for each in contributions]
    blocks: dict[tuple[int, int], list[float]] = {(i, j): [] for i in range(num) for j in range(i)}
    for part, span in runs(codec, num_elements):
        rows = values[:, : part.stop - part.start]
        for row, each in zip(rows, contributions, strict=True):
            reader.read(each, span, row)
        for (i, j), found in blocks.items():
            found += _squares(clear(rows[i] - rows[j], part, gaps[i] + gaps[j]))
    squared = [[0.0] * num for _ in range(num)]
    for (i, j), found in blocks.items():
        both = {(gap.start, gap.stop): gap for gap in gaps[i] + gaps[j]}
        factor = _scaled_up(num_elements, list(both.values()))
        squared[i][j] = squared[j][i] = math.fsum(found) * factor if factor else math.inf
    return squared


def _scaled_up(num_elements: int, gaps: Sequence[slice]) -> float:
    """What a sum of squares over all but the gaps is multiplied by to stand for one over all; 0 where nothing is left."""
    left = num_elements - sum(gap.stop - gap.start for gap in gaps)
    return num_elements / left if left else 0.0


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
