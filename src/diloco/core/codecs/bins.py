"""Two bits per value: four bins over ±3σ, whose means are the codebook of a block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.codecs.chunks import Chunked, checked_means, fold, pack, scaled, short, unpack, unscale
from diloco.core.codecs.codec import Scratch
from diloco.core.codecs.formats import CODEBOOK_BYTES, PAPER_RANGE_SIGMAS, TWO_BIT_BLOCK

_SMALLEST_NORMAL = 2.0**-126
_LARGEST_BF16 = (2 - 2**-7) * 2.0**127


def _codebook(means: Tensor, exponent: Tensor) -> Tensor:
    """The means (fp32 [4, blocks, 1], of values scaled to a largest exponent of 1) as a codebook bf16 [blocks, 4]."""
    unscaled = unscale(means, exponent).clamp_(-_LARGEST_BF16, _LARGEST_BF16)
    unscaled.masked_fill_(unscaled.abs() < _SMALLEST_NORMAL, 0.0)
    return unscaled.squeeze(-1).t().contiguous().bfloat16()


@dataclass(frozen=True)
class TwoBit(Chunked):
    """Four bins over `range_sigmas` · σ with bin means as the codebook of each block; 2.015625 bits per element at
    block 4096.

    With σ the root mean square of a block and t = range_sigmas / 4 · σ, the bins are x < −t, −t ≤ x < 0, 0 ≤ x ≤ t and
    t < x; a code is the index of a bin, its value the mean of the bin's elements. Arithmetic is fp32 after scaling by a
    power of two, and sums fold halves, so that every device writes the same bits.

    σ is taken about zero, a block's mean being small beside it. MuLoCo, arXiv 2505.23725 (2 bits with bin means where 2
    bits linear fail), and SparseLoCo, arXiv 2508.15706, have a range of 6σ. Edges at ± σ (a range of 4) are near the
    best ones for Gaussian values.
    """

    block: int = TWO_BIT_BLOCK
    range_sigmas: float = PAPER_RANGE_SIGMAS

    @property
    def name(self) -> str:
        sigmas = "" if self.range_sigmas == PAPER_RANGE_SIGMAS else f"-{short(self.range_sigmas)}sigma"
        return f"2bit{sigmas}" + ("" if self.block == TWO_BIT_BLOCK else f":{self.block}")

    def encode_chunks(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        blocks, n = x.shape
        y, exponent = scaled(x, scratch)
        width = y.shape[1]
        sums = scratch.take("sums", (4, blocks, width), torch.float32)
        squares = fold(torch.mul(y, y, out=sums[0]))
        mean_square = squares.div(torch.full_like(squares, n))  # a GPU would multiply by a number's reciprocal
        edge = mean_square.sqrt_().mul_(self.range_sigmas / 4)

        # Where a value lies in bin 1 or above, 2 or above, and in bin 3. Sums and counts of a bin are differences of
        # these.
        above = scratch.take("above", (3, blocks, width), torch.float32)
        torch.ge(y, -edge, out=above[0])
        torch.ge(y, 0.0, out=above[1])
        torch.gt(y, edge, out=above[2])
        counts = above.sum(-1, keepdim=True)  # of zeros and ones: exact in any order
        torch.mul(above, y, out=sums[1:])
        torch.sub(y, sums[1], out=sums[0])  # a value minus itself or minus zero: exact
        sums[1].sub_(sums[2])
        sums[2].sub_(sums[3])
        above[0].add_(above[1]).add_(above[2])
        codes = scratch.take("codes", (blocks, width), torch.uint8)
        codes.view(torch.int8).copy_(above[0])  # several times faster than to uint8

        numbers = torch.cat([width - counts[:1], counts[:2] - counts[1:], counts[2:]])
        numbers[2] -= width - n
        means = fold(sums).div(numbers.clamp_min_(1.0))
        out[:, :CODEBOOK_BYTES] = _codebook(means, exponent).view(torch.uint8)
        pack(codes[:, :n], 2, out[:, CODEBOOK_BYTES:], scratch)

    def decode_chunks(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        codebooks = self._checked(payload, scratch).float()
        codes = unpack(payload[:, CODEBOOK_BYTES:], 2, scratch)
        index = scratch.take("code index", tuple(codes.shape), torch.int64).copy_(codes)
        torch.gather(codebooks, 1, index[:, : out.shape[1]], out=out)

    def check_chunks(self, payload: Tensor, num_elements: int, scratch: Scratch) -> None:
        self._checked(payload, scratch)

    def _checked(self, payload: Tensor, scratch: Scratch) -> Tensor:
        """The codebooks (bf16 [blocks, 4]) of blocks."""
        return checked_means(payload[:, :CODEBOOK_BYTES], torch.bfloat16, self.name, scratch)
