"""Merging: one outer gradient out of those of several learners; the means.

A merge's memory does not grow with the number of learners, the order of arrival does not matter (the caller passes contributions in
learner-id order), and an elementwise merge of a run of whole segments gives the bits of that part of the whole. Other merges: `radial`
(by direction and norm), `robust` (against learners that lie), `heloco` (against the outer momentum).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core.choices import Choice
from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.contributions import Encoded, stretches_of, untrained
from diloco.core.decoding import RUN_SEGMENTS, Reader, clear, require_finite, runs
from diloco.core.layout import Placement


class Merge(Choice):
    """How the outer gradients of several learners become one."""

    elementwise: ClassVar[bool]
    """True: merging a run of whole segments gives the bits of that part of the whole. False: it needs whole fragments."""

    weighted: ClassVar[bool] = True
    """False: everybody counts the same, whatever its weight; only weight 0 leaves one out."""

    @abstractmethod
    def merge(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int,
        momentum: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Decode and merge; a flat fp32 vector of shape (num_elements,).

        Arguments:
            codec: what the payloads are encoded with.
            contributions: one of each learner, in learner-id order; at least one of them counts (weight above 0).
            places: the tensors of these `num_elements` elements, in order and without gaps: those of a fragment, or those
                of a run of whole segments of it, clipped (`shard_of`), where the merge is elementwise.
            momentum: the outer optimizer's (`Outer.momentum_of`), fp32 [num_elements], where it keeps one.

        Each tensor is merged over the learners that train it, with their weights; one that nobody trains gets 0.

        Raises:
            ConfigError: unusable weights.
            LayoutError: places that do not cover the elements, or a contribution that names a tensor that is not there.
            CorruptPayloadError: a payload of the wrong size or with inf or NaN in it; names the learner.
            NonFiniteError: the merge itself overflows.
        """


@dataclass(frozen=True)
class Mean(Merge):
    """The weighted mean: Δ = (Σ_m w_m·Δ_m) / (Σ_m w_m), per tensor over those who train it, summed in fp32 in the order given.

    Weights are divided by the largest first, so equal weights are exactly 1 and one contributor's outer gradient is
    returned bit for bit. DiLoCo (arXiv 2311.08105, algorithm 1) with uniform weights; weights by tokens for unequal
    shards; per-tensor contributors as for learners that train a part of the experts (SPES, arXiv 2602.11543).

    >>> one, two = (codec.encode(torch.tensor(values)) for values in ([1.0, 2.0], [3.0, 6.0]))
    >>> Mean().merge(codec, [Encoded("a", (one,), 1.0), Encoded("b", (two,), 3.0)], places, num_elements=2)   # [2.5, 5.0]
    """

    elementwise: ClassVar[bool] = True

    def merge(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int,
        momentum: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        stretches = stretches_of(codec, contributions, places, num_elements)
        device = contributions[0].payloads[0].device
        merged = torch.empty(num_elements, dtype=torch.float32, device=device)
        reader = Reader(codec, min(num_elements, RUN_SEGMENTS * SEGMENT_ELEMENTS), device)
        for part, span in runs(codec, num_elements):
            sum_ = merged[part]
            inside = [piece for stretch in stretches if (piece := stretch.within(part)) is not None]
            for index, contribution in enumerate(contributions):
                theirs = [piece for piece in inside if index in piece.shares]
                if not theirs:
                    continue
                if len(inside) == 1 and index == theirs[0].first:
                    reader.read(contribution, span, sum_).mul_(theirs[0].shares[index])
                    continue
                decoded = reader.read(contribution, span, reader.scratch[: sum_.numel()])
                for piece in theirs:
                    share, target = decoded[piece.elements].mul_(piece.shares[index]), sum_[piece.elements]
                    if index == piece.first:
                        target.copy_(share)
                    else:
                        target.add_(share)
            for piece in inside:
                if piece.shares:
                    # A tensor, not a number: a GPU would multiply by a number's reciprocal, which rounds differently.
                    sum_[piece.elements].div_(torch.tensor(piece.total, dtype=torch.float32, device=device))
                else:
                    sum_[piece.elements].zero_()
            require_finite(sum_)
        return merged


@dataclass(frozen=True)
class SenderMean(Merge):
    """Every coordinate's weighted mean over those who sent it, that is, whose decoded value is not zero; 0 where nobody did.

    For contributions that name a few coordinates each: SparseLoCo's reference implementation (arXiv 2508.15706) divides by a
    coordinate's senders and not by all learners. With dense contributions it is the mean. Who does not train a tensor sends none of it.
    """

    elementwise: ClassVar[bool] = True

    def merge(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int,
        momentum: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        stretches_of(codec, contributions, places, num_elements)  # checks
        largest = max(each.weight for each in contributions)
        device = contributions[0].payloads[0].device
        merged = torch.zeros(num_elements, dtype=torch.float32, device=device)
        reader = Reader(codec, min(num_elements, RUN_SEGMENTS * SEGMENT_ELEMENTS), device)
        weight = torch.empty_like(reader.scratch)
        gaps = [untrained(each, places) for each in contributions]
        for part, span in runs(codec, num_elements):
            sum_, senders = merged[part], weight[: part.stop - part.start].zero_()
            for each, theirs in zip(contributions, gaps, strict=True):
                decoded = clear(reader.read(each, span, reader.scratch[: sum_.numel()]), part, theirs)
                share = each.weight / largest
                senders.add_(decoded.ne(0.0).float().mul_(share))
                sum_.add_(decoded.mul_(share))
            require_finite(sum_.div_(senders.masked_fill_(senders == 0.0, 1.0)))
        return merged
