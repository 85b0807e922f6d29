"""Sparse formats: a fixed number of elements of each chunk of 4096 is kept, and sent with their positions."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.codecs.bins import TwoBit
from diloco.core.codecs.chunks import Chunked, corrupt, fold, scaled, short
from diloco.core.codecs.codec import Codec, Scratch, magnitude_bits, refuse_nonfinite
from diloco.core.codecs.floats import BF16, FP32
from diloco.core.codecs.formats import CHUNK_ELEMENTS, SparseSizes
from diloco.core.codecs.positions import positions_of
from diloco.errors import CorruptPayloadError

_VALUE_CODECS: dict[str, Codec] = {"fp32": FP32(), "bf16": BF16(), "2bit": TwoBit(block=CHUNK_ELEMENTS)}
_GROUP = 8
_SMALLEST_KEY = -(2**31)


class _Sparse(Chunked):
    """A chunk is [positions of the k kept elements][their values, in order of position]; the others decode to +0.

    k depends only on the number of elements. Where all are kept, no positions are sent. Values are fp32 (exact),
    bf16, or the 2 bits of `TwoBit`, the kept values of a chunk being one block.
    """

    values: str

    def num_kept(self, num_elements: int) -> int:
        """k ≥ 1 of a chunk of 1 ≤ `num_elements` ≤ CHUNK_ELEMENTS elements."""
        sizes = self.format.sizes
        assert isinstance(sizes, SparseSizes)
        return sizes.num_kept(num_elements)

    @abstractmethod
    def _keys(self, x: Tensor, scratch: Scratch) -> Tensor:
        """int32 [chunks, n]: the elements with the k largest keys are kept; of equal keys, those at lower positions."""

    @property
    def lossless(self) -> bool:
        return self.values == "fp32" and self.num_kept(CHUNK_ELEMENTS) == CHUNK_ELEMENTS

    def encode_chunks(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        n, k, num_bytes = x.shape[1], self.num_kept(x.shape[1]), self._positions_bytes(x.shape[1])
        kept = x
        if k < n:
            chosen = largest(self._keys(x, scratch), k, scratch)
            kept = positions_of(n, k).encode(chosen, x, out[:, :num_bytes], scratch)
        _VALUE_CODECS[self.values].encode_rows(kept.contiguous(), out[:, num_bytes:], scratch)

    def decode_chunks(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        n, k, num_bytes = out.shape[1], self.num_kept(out.shape[1]), self._positions_bytes(out.shape[1])
        kept = out if k == n else scratch.take("kept", (len(out), k), torch.float32)
        with self._damage():
            _VALUE_CODECS[self.values].decode_rows(payload[:, num_bytes:], kept, scratch)
        if k < n:
            positions = self._checked_positions(payload, n, scratch)
            positions_of(n, k).spread(positions, kept, out, scratch)

    def check_chunks(self, payload: Tensor, num_elements: int, scratch: Scratch) -> None:
        k, num_bytes = self.num_kept(num_elements), self._positions_bytes(num_elements)
        with self._damage():
            _VALUE_CODECS[self.values].check_rows(payload[:, num_bytes:], k, scratch)
        if k < num_elements:
            self._checked_positions(payload, num_elements, scratch)

    def _positions_bytes(self, num_elements: int) -> int:
        return self.chunk_bytes(num_elements) - _VALUE_CODECS[self.values].encoded_bytes(self.num_kept(num_elements))

    def _checked_positions(self, payload: Tensor, num_elements: int, scratch: Scratch) -> Tensor:
        k = self.num_kept(num_elements)
        own = payload[:, : self._positions_bytes(num_elements)]
        positions = positions_of(num_elements, k).decode(own, scratch)
        if positions is None:
            raise corrupt(self.name, f"positions that are not {k} ascending ones below {num_elements}")
        return positions

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Raise errors of the values' codec under the name of this one."""
        try:
            yield
        except CorruptPayloadError as error:
            raise CorruptPayloadError(f"values of a {self.name} payload are damaged: {error}") from error

    @property
    def _suffix(self) -> str:
        return "" if self.values == "fp32" else f"-{self.values}"


@dataclass(frozen=True)
class TopK(_Sparse):
    """The `k` largest magnitudes of each chunk of 4096 elements, lower positions first where magnitudes are equal.

    A shorter chunk of n elements keeps min(k, n). k = 4096 keeps all, which with fp32 values is lossless. SparseLoCo,
    arXiv 2508.15706: k = 128 and 2-bit values with 4 bins ("topk-128-2bit"), with error feedback; its chunks are cut
    from each tensor, these from the flat fragment. k = 128 takes 112 bytes of positions a chunk: 1.21875 bits per
    element with fp32 values, 0.71875 with bf16, 0.296875 with 2 bits.
    """

    k: int = 128
    values: str = "fp32"

    @property
    def name(self) -> str:
        return f"topk-{self.k}{self._suffix}"

    def _keys(self, x: Tensor, scratch: Scratch) -> Tensor:
        magnitudes = magnitude_bits(x, scratch)
        refuse_nonfinite(int(magnitudes.amax()))
        return magnitudes


@dataclass(frozen=True)
class SignPruned(_Sparse):
    """Sign pruning: ⌊fraction · n⌋ elements of each chunk of n ≤ 4096 become zero, those against the chunk's sign
    first.

    A chunk's elected sign is that of its sum, positive if that is 0: the sign with the larger summed magnitude. Pruned
    are, in this order until the number is reached: zeros, then elements of the other sign from the smallest magnitude
    up, then those of the elected sign from the smallest up; of equal ones those at higher positions first. A fraction
    of 0 prunes nothing, which with fp32 values is lossless; about half of a chunk has the other sign, so 0.5 leaves
    hardly any element of it.

    DiLoCo, arXiv 2311.08105, prunes "per neuron" by sign, after TIES-Merging, arXiv 2306.01708, without saying more.
    Here (1) a chunk of 4096 neighbours in the flat fragment replaces a neuron; (2) the fraction is met exactly in
    each chunk, so that the size is known beforehand; (3) the election is among the elements of one learner's chunk,
    where TIES elects among the learners for each element.
    """

    fraction: float = 0.5
    values: str = "fp32"

    @property
    def name(self) -> str:
        return f"sign-pruned-{short(self.fraction)}{self._suffix}"

    def _keys(self, x: Tensor, scratch: Scratch) -> Tensor:
        y, _ = scaled(x, scratch)
        other = (fold(y) < 0).to(torch.int32).mul_(_SMALLEST_KEY)  # the sign bit of the sign that was not elected
        # As integers, bits without a sign are ordered as the magnitudes, and those with one follow below all of them.
        keys = scratch.take("keys", tuple(x.shape), torch.int32)
        torch.bitwise_xor(x.view(torch.int32), other, out=keys)
        return keys.masked_fill_(keys == 0, _SMALLEST_KEY)


def largest(keys: Tensor, k: int, scratch: Scratch) -> Tensor:
    """Mask of the k < n largest keys (int32 [rows, n]), the first ones among equals: bool [rows, n]."""
    threshold = _kth_largest(keys, k)
    reached = scratch.take(
        "reached", tuple(keys.shape), torch.int32
    )  # comparing into another type is several times slower
    torch.ge(keys, threshold, out=reached)
    if int(reached.sum(-1, dtype=torch.int32).amax()) > k:  # more than one key at the threshold
        over = torch.gt(keys, threshold, out=scratch.take("over", tuple(keys.shape), torch.int32))
        equal = reached.sub_(over)
        missing = k - over.sum(-1, keepdim=True, dtype=torch.int32)
        reached = equal.mul_(equal.cumsum(-1, dtype=torch.int32) <= missing).add_(over)
    chosen = scratch.take("chosen", tuple(keys.shape), torch.bool)
    chosen.view(torch.int8).copy_(reached)
    return chosen


def _kth_largest(keys: Tensor, k: int) -> Tensor:
    """The k-th largest key of each row: int32 [rows, 1].

    The k largest lie in the k groups with the largest maxima, up to equal ones: an element elsewhere is at most its
    group's maximum, so at most each of those. Looking there alone is faster if k is small.
    """
    rows, n = keys.shape
    if n % _GROUP == 0 and 4 * _GROUP * k <= n:
        groups = keys.view(rows, _GROUP, n // _GROUP)
        best = groups.amax(1).topk(k, sorted=False).indices
        keys = groups.gather(2, best.unsqueeze(1).expand(-1, _GROUP, -1)).view(rows, -1)
    return keys.topk(k, sorted=False).values.amin(-1, keepdim=True)
