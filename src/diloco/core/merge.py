"""Merging: one outer gradient out of those of several learners.

Contributions arrive encoded and stay so: a merge decodes them a few segments at a time, in the order given, into one
scratch vector. Its memory does not grow with the number of learners, the order of arrival does not matter (the
caller passes them in learner-id order), and merging a run of whole segments gives the bits of that part of the whole.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.values import Choice, choice_from_dict, nearest
from diloco.errors import ConfigError, CorruptPayloadError, NonFiniteError

RUN_SEGMENTS = 8
"""How many segments are decoded at once: enough to spread the cost of a call, few enough for a processor's cache."""


class Merge(Choice):
    """How the outer gradients of several learners become one."""

    @abstractmethod
    def merge(self, codec: Codec, payloads: Sequence[Tensor], weights: Sequence[float], num_elements: int) -> Tensor:
        """Decode and merge.

        `payloads` are uint8 vectors, each the encoding by `codec` of `num_elements` fp32 elements (a fragment, or a
        run of whole segments of one), in learner-id order; `weights` are finite, not negative, not all zero. Returns
        a flat fp32 vector of shape (num_elements,). Raises ConfigError on unusable weights and
        CorruptPayloadError on a payload of the wrong size or with inf or NaN in it, both naming the contribution's
        index, and NonFiniteError when the merge itself overflows.
        """


@dataclass(frozen=True)
class Mean(Merge):
    """The weighted mean: Δ = (Σ_m w_m·Δ_m) / (Σ_m w_m), summed in fp32 in the order given.

    Weights are divided by the largest first, so equal weights are exactly 1 and one contributor's outer gradient is
    returned bit for bit. DiLoCo (arXiv 2311.08105, algorithm 1) with uniform weights; weights by tokens for unequal
    shards.

    >>> payloads = [codec.encode(torch.tensor([1.0, 2.0])), codec.encode(torch.tensor([3.0, 6.0]))]
    >>> Mean().merge(codec, payloads, [1.0, 3.0], num_elements=2)   # [2.5, 5.0]
    """

    def merge(self, codec: Codec, payloads: Sequence[Tensor], weights: Sequence[float], num_elements: int) -> Tensor:
        shares = _relative_weights(payloads, weights)
        device = payloads[0].device
        # A tensor, not a number: a GPU would multiply by a number's reciprocal, which rounds differently.
        total = torch.tensor(math.fsum(shares), dtype=torch.float32, device=device)
        merged = torch.empty(num_elements, dtype=torch.float32, device=device)
        scratch = torch.empty(min(num_elements, RUN_SEGMENTS * SEGMENT_ELEMENTS), dtype=torch.float32, device=device)
        _check_sizes(codec, payloads, num_elements)
        for part, span in _runs(codec, num_elements):
            sum_ = merged[part]
            decoded = scratch[: sum_.numel()]
            _decode(codec, 0, payloads[0][span], sum_)
            sum_.mul_(shares[0])
            for index in range(1, len(payloads)):
                _decode(codec, index, payloads[index][span], decoded)
                sum_.add_(decoded.mul_(shares[index]))
            _require_finite(sum_.div_(total))
        return merged


MERGES: tuple[type[Merge], ...] = (Mean,)


def merge_from_dict(values: Mapping[str, object]) -> Merge:
    """Read back `Merge.to_dict()`, e.g. `{"type": "Mean"}`. Raises ConfigError naming a typo."""
    return choice_from_dict("merge", MERGES, values)


class _HasTokens(Protocol):
    @property
    def tokens(self) -> int: ...


WEIGHTS = ("uniform", "tokens")


def weights_of(kind: str, contributions: Sequence[_HasTokens]) -> list[float]:
    """How much each contribution counts: "uniform" (1 each) or "tokens" (the tokens it was trained on).

    DiLoCo weighs i.i.d. shards uniformly and unequal ones by their number of examples (arXiv 2311.08105, section 3.2).
    """
    match kind:
        case "uniform":
            return [1.0 for _ in contributions]
        case "tokens":
            return [float(contribution.tokens) for contribution in contributions]
    raise ConfigError(f"{kind!r} is not a known weight{nearest(kind, WEIGHTS)}")


def _relative_weights(payloads: Sequence[Tensor], weights: Sequence[float]) -> list[float]:
    """The weights divided by the largest: in [0, 1], equal ones exactly 1."""
    if not payloads or len(weights) != len(payloads):
        raise ConfigError(
            f"a merge needs a contribution and one weight for each, not {len(payloads)} and {len(weights)}."
        )
    for index, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"the weight of contribution {index} must be finite and not negative, not {weight!r}.")
    largest = max(weights)
    if largest == 0:
        raise ConfigError(f"the weights of all {len(weights)} contributions are 0; at least one must count.")
    return [weight / largest for weight in weights]


def _check_sizes(codec: Codec, payloads: Sequence[Tensor], num_elements: int) -> None:
    expected_bytes = codec.encoded_bytes(num_elements)
    for index, payload in enumerate(payloads):
        if payload.dtype != torch.uint8 or payload.shape != (expected_bytes,):
            raise CorruptPayloadError(
                f"contribution {index} is {tuple(payload.shape)} {str(payload.dtype).removeprefix('torch.')},"
                f" and {num_elements} elements in {codec.name} are {expected_bytes} bytes."
            )


def _runs(codec: Codec, num_elements: int) -> Iterator[tuple[slice, slice]]:
    """The (elements, payload bytes) of each run of RUN_SEGMENTS segments; the last one may be shorter."""
    num_segments = -(-num_elements // SEGMENT_ELEMENTS)
    for first in range(0, num_segments, RUN_SEGMENTS):
        last = min(first + RUN_SEGMENTS, num_segments)
        elements = slice(first * SEGMENT_ELEMENTS, min(last * SEGMENT_ELEMENTS, num_elements))
        yield elements, codec.segment_span(num_elements, first, last)


def _decode(codec: Codec, index: int, payload: Tensor, out: Tensor) -> None:
    try:
        codec.decode(payload, out.numel(), out)
    except CorruptPayloadError as error:
        raise CorruptPayloadError(f"contribution {index} cannot be merged: {error}") from error


def _require_finite(merged: Tensor) -> None:
    """One pass without a temporary: minimum and maximum carry every inf and NaN. `merged` is not empty."""
    low, high = torch.aminmax(merged)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteError("the sum of the contributions overflows fp32; find the learner that diverged.")
