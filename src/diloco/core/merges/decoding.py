"""The input of a merge: each learner's encoded contribution, its weight, and the tensors that the learner trains. It is
checked once, then decoded run by run of whole segments, into reused scratch."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.codecs.codec import Scratch
from diloco.core.layout import Placement
from diloco.errors import ConfigError, CorruptPayloadError

RUN_SEGMENTS = 16
"""Segments of one learner that are decoded at once: enough to spread the cost of a call, few enough for a processor's
cache."""
RUN_ELEMENTS = RUN_SEGMENTS * SEGMENT_ELEMENTS

SHARED_RUN_SEGMENTS = 8
"""Segments where all learners are decoded at once. Distances depend on this number: their blocks begin with each run.
"""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Encoded:
    """One learner's contribution to a merge.

    Attributes:
        learner: its name.
        payloads: uint8 vectors, each an encoding of the same elements; their decoded values are summed in this order
            (work that was late for the round before, then new work). A learner that trains none of the tensors may have
            none.
        weight: finite, not negative.
        staleness: versions between the oldest base of its outer gradients and the round.
        tensors: indices into the merge's `places` of the tensors that this learner trains; None: all of them.
        shares: by tensor of `places`, the factor of the weight in the merge of that tensor (`weights.shares_of`);
            None: 1 for all.
        parts: as `tensors`, for each payload, where they differ: the learner has come back to train others.
    """

    learner: str
    payloads: tuple[Tensor, ...]
    weight: float
    staleness: int = 0
    tensors: frozenset[int] | None = None
    shares: tuple[float, ...] | None = None
    parts: tuple[frozenset[int] | None, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it changes the merge: it has a weight, and its learner trains some tensor."""
        return self.weight > 0 and self.tensors != frozenset()

    def trains(self, index: int) -> bool:
        """Whether the learner trains the tensor of this index in the merge's `places`."""
        return self.tensors is None or index in self.tensors

    def weight_of(self, index: int) -> float:
        """The weight in the merge of the tensor of this index."""
        return self.weight if self.shares is None else self.weight * self.shares[index]


def shard_of(places: Sequence[Placement], elements: slice) -> tuple[tuple[Placement, ...], range]:
    """The tensors of a shard of a fragment: those that intersect `elements`, clipped to it (then one-dimensional) and
    with offsets relative to its start, and their indices in `places`."""
    start, stop = elements.start, elements.stop
    found = [i for i, place in enumerate(places) if max(start, place.offset) < min(stop, place.elements.stop)]
    indices = range(found[0], found[-1] + 1) if found else range(0)
    clipped = []
    for place in places[indices.start : indices.stop]:
        first, last = max(start, place.offset), min(stop, place.elements.stop)
        spec = place.spec
        if last - first != spec.numel:
            spec = replace(spec, shape=(last - first,))
        clipped.append(Placement(spec, first - start))
    return tuple(clipped), indices


def within(run: slice, spans: Sequence[tuple[slice, T]]) -> Iterator[tuple[slice, T]]:
    """The parts of `spans` in a run, relative to its start. Spans are in order and do not overlap."""
    for index in range(bisect_right(spans, run.start, key=lambda span: span[0].stop), len(spans)):
        elements, value = spans[index]
        if elements.start >= run.stop:
            return
        first, last = max(elements.start, run.start), min(elements.stop, run.stop)
        if first < last:
            yield slice(first - run.start, last - run.start), value


class Decoder:
    """The contributions of one merge.

    Attributes:
        contributions: one per learner, in learner-id order.
        places: the tensors of the vector that is merged.
        num_elements: the length of that vector.
        momentum: of the outer optimizer, fp32 [num_elements]; None: it has none.
        device: of the payloads and of all computation.

    Raises:
        ConfigError: no contribution has a weight.
        CorruptPayloadError: a payload of the wrong size; names the learner.
    """

    def __init__(
        self,
        codec: Codec,
        contributions: Sequence[Encoded],
        places: Sequence[Placement],
        num_elements: int,
        momentum: Tensor | None = None,
    ) -> None:
        if not any(each.weight for each in contributions):
            raise ConfigError(f"the weights of all {len(contributions)} contributions are 0; at least one must count.")
        _check_sizes(codec, contributions, num_elements)
        self.contributions = contributions
        self.places = places
        self.num_elements = num_elements
        self.momentum = momentum
        payloads = (payload for each in contributions for payload in each.payloads)
        self.device = next(payloads, torch.empty(0)).device
        self._codec = codec
        self._scratch = Scratch(self.device)

    def runs(self, num_segments: int = RUN_SEGMENTS) -> Iterator[slice]:
        """The elements of each run of whole segments; the last one may be shorter."""
        step = num_segments * SEGMENT_ELEMENTS
        for start in range(0, self.num_elements, step):
            yield slice(start, min(start + step, self.num_elements))

    def read(self, index: int, run: slice, out: Tensor | None = None) -> Tensor:
        """The outer gradient of contribution `index` in this run: the sum over its payloads, in `out` or in scratch.

        Raises CorruptPayloadError on inf or NaN; it names the learner.
        """
        out = self._take("decoded", run) if out is None else out
        span = self._codec.segment_span(
            self.num_elements, run.start // SEGMENT_ELEMENTS, math.ceil(run.stop / SEGMENT_ELEMENTS)
        )
        contribution = self.contributions[index]
        if not contribution.payloads:
            return out.zero_()
        for number, payload in enumerate(contribution.payloads):
            part = self._decode(contribution, payload[span], self._take("late", run) if number else out)
            if contribution.parts and (trained := contribution.parts[number]) is not None:
                for elements, tensor in within(run, [(each.elements, i) for i, each in enumerate(self.places)]):
                    part[elements].mul_(tensor in trained)
            if number:
                out.add_(part)
        return out

    def shared_runs(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Each run of SHARED_RUN_SEGMENTS segments with the outer gradients of all contributions in it, in scratch."""
        num_elements = min(self.num_elements, SHARED_RUN_SEGMENTS * SEGMENT_ELEMENTS)
        rows = torch.empty(len(self.contributions), num_elements, dtype=torch.float32, device=self.device)
        for run in self.runs(SHARED_RUN_SEGMENTS):
            yield run, [self.read(index, run, row[: run.stop - run.start]) for index, row in enumerate(rows)]

    def _take(self, name: str, run: slice) -> Tensor:
        length = min(self.num_elements, RUN_ELEMENTS)
        return self._scratch.take(name, (length,), torch.float32)[: run.stop - run.start]

    def _decode(self, contribution: Encoded, payload: Tensor, out: Tensor) -> Tensor:
        try:
            return self._codec.decode(payload, out.numel(), out, self._scratch)
        except CorruptPayloadError as error:
            raise CorruptPayloadError(
                f"the contribution of {contribution.learner} cannot be merged: {error}"
            ) from error


def _check_sizes(codec: Codec, contributions: Sequence[Encoded], num_elements: int) -> None:
    expected_bytes = codec.encoded_bytes(num_elements)
    for learner, payload in ((each.learner, payload) for each in contributions for payload in each.payloads):
        if payload.dtype != torch.uint8 or payload.shape != (expected_bytes,):
            raise CorruptPayloadError(
                f"the contribution of {learner} is {tuple(payload.shape)} {str(payload.dtype).removeprefix('torch.')},"
                f" and {num_elements} elements in {codec.name} are {expected_bytes} bytes."
            )
