"""Eight bits per value: 256 equal buckets from −6σ to 6σ, their means as the codebook of a segment."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core.codecs.chunks import checked_means, fold, power_of_two, scaled
from diloco.core.codecs.codec import Codec, Scratch

NUM_BUCKETS = 256
_CODEBOOK_BYTES = 4 * NUM_BUCKETS
"""A mean in fp32 for each bucket, in ascending order."""
RANGE_SIGMAS = 12

_ONE = 2.0**35
"""The unit of sums: values below 4 are whole numbers of 1/_ONE, so that a sum of a segment is exact in fp64, in any
order."""


@dataclass(frozen=True)
class Uniform8(Codec):
    """INTELLECT-1's int8 (arXiv 2412.01152): the value of code b is the mean of the values in bucket b; 8.25 bits per
    element.

    With σ the root mean square of a segment and w = 12σ / 256, bucket b holds b − 128 ≤ x / w < b − 127; values beyond
    ±6σ are in the first and the last one. So a value within ±6σ is off by less than w = 0.047σ. A zero decodes to the
    mean of bucket 128, the small values from 0 to w.

    Differences from Prime's implementation: σ and codebook are those of a segment of 32768 elements and not of a tensor
    or a part of a ring, so that shards give the bits of the whole. σ is taken about zero, and not about the mean, which
    is small beside it. A contribution is quantised once and added in fp32, and not quantised anew at each hop of a
    ring.
    """

    family: ClassVar[str] = "uniform8"
    cpu_group_segments: ClassVar[int] = 4

    def encode_rows(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        rows, n = x.shape
        y, exponent = scaled(x, scratch)
        squares = torch.mul(y, y, out=scratch.take("squares", tuple(y.shape), torch.float32))
        total = fold(squares)
        # A tensor, not a number: a GPU would multiply by a number's reciprocal, which rounds differently.
        width = total.div_(torch.full_like(total, n)).sqrt_().mul_(RANGE_SIGMAS / NUM_BUCKETS)
        y = y[:, :n]
        bucket = torch.div(
            y, width.masked_fill_(width == 0, torch.inf), out=scratch.take("buckets", (rows, n), torch.float32)
        )
        bucket.floor_().add_(NUM_BUCKETS // 2).clamp_(0, NUM_BUCKETS - 1)

        index = scratch.take("index", (rows, n), torch.int64).copy_(bucket)
        whole = scratch.take("whole", (rows, n), torch.float64).copy_(y).mul_(_ONE).round_()
        sums = scratch.take("sums", (rows, NUM_BUCKETS), torch.float64).zero_().scatter_add_(1, index, whole)
        counts = scratch.take("counts", (rows, NUM_BUCKETS), torch.float64).zero_()
        counts.scatter_add_(1, index, whole.fill_(1.0))
        # y is x times 2^(128 − e), e the exponent bits; back to the scale of x in fp64, which holds every product.
        means = sums.div_(counts.clamp_min_(1.0)).mul_(0.5 / _ONE).mul_(power_of_two(exponent)).float()
        means.masked_fill_(means.abs() < torch.finfo(torch.float32).tiny, 0.0)
        out[:, :_CODEBOOK_BYTES] = means.view(torch.uint8)
        out[:, _CODEBOOK_BYTES:] = index

    def decode_rows(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        codebook = checked_means(payload[:, :_CODEBOOK_BYTES], torch.float32, self.name, scratch)
        index = scratch.take("index", tuple(out.shape), torch.int64).copy_(payload[:, _CODEBOOK_BYTES:])
        torch.gather(codebook, 1, index, out=out)

    def check_rows(self, payload: Tensor, num_elements: int, scratch: Scratch) -> None:
        checked_means(payload[:, :_CODEBOOK_BYTES], torch.float32, self.name, scratch)
