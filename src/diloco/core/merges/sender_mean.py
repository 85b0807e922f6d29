"""The mean over the learners that sent a coordinate."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.merges.coordinates import CoordinateMerge


@dataclass(frozen=True)
class SenderMean(CoordinateMerge):
    """Every coordinate's weighted mean over its senders, the learners whose decoded value is not zero; 0 without
    senders.

    For sparse contributions: SparseLoCo's reference implementation (arXiv 2508.15706) divides by the number of a
    coordinate's senders, and not by that of all learners. With dense contributions it is the mean. A learner is no
    sender of tensors that it does not train.
    """

    def combine(self, values: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        senders = torch.zeros_like(out)
        out.zero_()
        for value, weight in zip(values, weights, strict=True):
            senders.add_(value.sign().abs_().mul_(weight))  # several times faster than value.ne(0.0).float()
            out.add_(value.mul_(weight))
        out.div_(senders.masked_fill_(senders == 0.0, 1.0))
