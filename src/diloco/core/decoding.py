"""How a merge reads what goes into it.

Contributions are decoded a few segments at a time, in learner-id order whatever order they came in, into vectors that are used over
and over.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.contributions import Encoded
from diloco.errors import CorruptPayloadError, NonFiniteError

RUN_SEGMENTS = 8
"""How many segments are decoded at once: enough to spread the cost of a call, few enough for a processor's cache."""


def runs(codec: Codec, num_elements: int) -> Iterator[tuple[slice, slice]]:
    """The (elements, payload bytes) of each run of RUN_SEGMENTS segments; the last one may be shorter."""
    num_segments = -(-num_elements // SEGMENT_ELEMENTS)
    for first in range(0, num_segments, RUN_SEGMENTS):
        last = min(first + RUN_SEGMENTS, num_segments)
        elements = slice(first * SEGMENT_ELEMENTS, min(last * SEGMENT_ELEMENTS, num_elements))
        yield elements, codec.segment_span(num_elements, first, last)


class Reader:
    """Decodes runs of contributions into vectors that are used over and over."""

    def __init__(self, codec: Codec, num_elements: int, device: torch.device) -> None:
        self._codec = codec
        self._num_elements = num_elements
        self._late: Tensor | None = None
        self.scratch = torch.empty(num_elements, dtype=torch.float32, device=device)

    def read(self, contribution: Encoded, span: slice, out: Tensor) -> Tensor:
        """What a learner brings, in this span of payload bytes: the sum over its payloads, written into `out`."""
        self._decode(contribution, contribution.payloads[0][span], out)
        for payload in contribution.payloads[1:]:
            if self._late is None or self._late.numel() < out.numel():
                self._late = torch.empty_like(out)
            out.add_(self._decode(contribution, payload[span], self._late[: out.numel()]))
        return out if contribution.factor == 1.0 else out.mul_(contribution.factor)

    def whole(self, contribution: Encoded) -> Tensor:
        """What a learner brings, all of it, in `scratch`, which must be that long."""
        for elements, span in runs(self._codec, self._num_elements):
            self.read(contribution, span, self.scratch[elements])
        return self.scratch

    def _decode(self, contribution: Encoded, payload: Tensor, out: Tensor) -> Tensor:
        try:
            return self._codec.decode(payload, out.numel(), out)
        except CorruptPayloadError as error:
            raise CorruptPayloadError(
                f"the contribution of {contribution.learner} cannot be merged: {error}"
            ) from error


def clear(decoded: Tensor, run: slice, gaps: Sequence[slice]) -> Tensor:
    """Set what lies in `gaps` to 0, in place; `decoded` holds the elements of `run`."""
    for gap in gaps:
        first, last = max(gap.start, run.start), min(gap.stop, run.stop)
        if first < last:
            decoded[first - run.start : last - run.start].zero_()
    return decoded


def require_finite(merged: Tensor) -> None:
    """One pass without a temporary: minimum and maximum carry every inf and NaN. `merged` is not empty."""
    low, high = torch.aminmax(merged)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteError("the sum of the contributions overflows fp32; find the learner that diverged.")
