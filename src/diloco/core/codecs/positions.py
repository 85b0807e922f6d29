"""Encodings of the positions of a sparse chunk's kept elements, of a size that does not depend on the positions."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.codecs.chunks import pack, unpack
from diloco.core.codecs.codec import Scratch
from diloco.core.codecs.formats import smallest_positions


@dataclass(frozen=True)
class Bitmap:
    """The positions of k kept elements among n (1 ≤ k < n) as one bit per element, set if it is kept."""

    n: int
    k: int

    @property
    def num_bytes(self) -> int:
        """Exact bytes of the positions of a chunk, for every choice."""
        return math.ceil(self.n / 8)

    def encode(self, chosen: Tensor, x: Tensor, out: Tensor, scratch: Scratch) -> Tensor:
        """Write the positions of chosen (bool [chunks, n], k each) into out (uint8). Returns x at them: [chunks, k]."""
        pack(chosen.view(torch.uint8), 1, out, scratch)
        table = scratch.take("table", (len(x), self.k + 1), torch.float32)
        return table.scatter_(1, self._ranks(chosen, scratch), x)[:, 1:]

    def decode(self, payload: Tensor, scratch: Scratch) -> Tensor | None:
        """The argument `positions` of `spread`, from uint8 [chunks, num_bytes]; None: no encoder writes these."""
        bits = unpack(payload, 1, scratch)
        wrong = (bits.sum(-1, dtype=torch.int32) != self.k).any() | bits[:, self.n :].any()
        return None if bool(wrong) else bits[:, : self.n]

    def spread(self, positions: Tensor, kept: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Write kept values (fp32 [chunks, k]) at their positions in out (fp32 [chunks, n]), +0 elsewhere."""
        table = scratch.take("table", (len(kept), self.k + 1), torch.float32)
        table[:, 0] = 0.0
        table[:, 1:] = kept
        torch.gather(table, 1, self._ranks(positions, scratch), out=out)

    def _ranks(self, chosen: Tensor, scratch: Scratch) -> Tensor:
        """int64 [chunks, n]: 1, 2, … k for the chosen elements in order, 0 for the others.

        Faster than a list of positions: finding those branches on every bit.
        """
        member = scratch.take("member", tuple(chosen.shape), torch.int64).copy_(chosen)
        ranks = scratch.take("ranks", tuple(chosen.shape), torch.int64)
        return torch.cumsum(member, 1, out=ranks).mul_(member)


@dataclass(frozen=True)
class EliasFano:
    """As `Bitmap`, in other bytes: the `low_bits` = l lowest bits of each position p_i, then a bit string with bit
    (p_i >> l) + i set for each i.

    About l + 2 bits a position, 7 for 128 of 4096. Elias 1974 (10.1145/321812.321820), Vigna 2013
    (10.1145/2433396.2433409).
    """

    n: int
    k: int
    low_bits: int

    @property
    def num_bytes(self) -> int:
        return self.low_bits * self._plane_bytes + math.ceil(self._num_high_bits / 8)

    @property
    def _plane_bytes(self) -> int:
        """Bytes of one plane: one of the low bits, of all positions."""
        return math.ceil(self.k / 8)

    @property
    def _num_high_bits(self) -> int:
        return self.k + (self.n - 1 >> self.low_bits)

    def encode(self, chosen: Tensor, x: Tensor, out: Tensor, scratch: Scratch) -> Tensor:
        chunks, num_low = len(x), self.low_bits * self._plane_bytes
        index = chosen.nonzero()[:, 1].view(chunks, self.k)
        bits = torch.arange(self.low_bits, device=x.device).unsqueeze(1)
        planes = (index.unsqueeze(1) >> bits).bitwise_and_(1).to(torch.uint8).view(-1, self.k)
        packed = scratch.take("planes", (len(planes), self._plane_bytes), torch.uint8)
        pack(planes, 1, packed, scratch)
        out[:, :num_low] = packed.view(chunks, -1)
        high = scratch.take("high bits", (chunks, self._num_high_bits), torch.uint8).zero_()
        pack(high.scatter_(1, (index >> self.low_bits).add_(self._order(x)), 1), 1, out[:, num_low:], scratch)
        return x.gather(1, index)

    def decode(self, payload: Tensor, scratch: Scratch) -> Tensor | None:
        chunks, num_low = len(payload), self.low_bits * self._plane_bytes
        high = unpack(payload[:, num_low:], 1, scratch)
        if bool((high.sum(-1, dtype=torch.int32) != self.k).any()):
            return None
        index = high.nonzero()[:, 1].view(chunks, self.k).sub_(self._order(payload)).bitwise_left_shift_(self.low_bits)
        planes = unpack(payload[:, :num_low].reshape(-1, self._plane_bytes), 1, scratch)[:, : self.k].to(torch.int64)
        bits = torch.arange(self.low_bits, device=payload.device).unsqueeze(1)
        index.add_(planes.view(chunks, self.low_bits, self.k).bitwise_left_shift_(bits).sum(1))
        wrong = (index[:, 1:] <= index[:, :-1]).any() | (index[:, -1] >= self.n).any()
        return None if bool(wrong) else index

    def spread(self, positions: Tensor, kept: Tensor, out: Tensor, scratch: Scratch) -> None:
        out.zero_().scatter_(1, positions, kept)

    def _order(self, like: Tensor) -> Tensor:
        return torch.arange(self.k, device=like.device)


@functools.lru_cache(maxsize=256)
def positions_of(n: int, k: int) -> Bitmap | EliasFano:
    """The encoding with the fewest bytes."""
    _, low_bits = smallest_positions(n, k)
    return EliasFano(n, k, low_bits) if low_bits else Bitmap(n, k)
