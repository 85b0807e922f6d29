"""The input of a merge: each learner's encoded contribution, its weight, and the tensors that the learner trains. It is
checked once, then decoded run by run of whole segments, into reused scratch."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.codecs.codec import Scratch
from diloco.core.layout import Placement
from diloco.core.memory import Each, one_by_one
from diloco.errors import ConfigError, CorruptPayloadError

RUN_SEGMENTS = 8
"""Segments of a run: enough to spread the cost of a call, few enough for a core's cache. Distances depend on this
number: their blocks begin with each run."""

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
        codec: of the payloads.
        each: works through the runs.
        looped: indices of contributions that compiled loops can read: one payload, of all that the learner trains.
        device: of the payloads and of all computation.

    Raises:
        ConfigError: no contribution has a weight, or the momentum another length.
        CorruptPayloadError: a payload of the wrong size; names the learner.
    """

    def __init__(
        self,
        codec: Codec,
        contributions: Sequence[Encoded],
        places: Sequence[Placement],
        num_elements: int,
        momentum: Tensor | None = None,
        each: Each = one_by_one,
    ) -> None:
        if not any(each.weight for each in contributions):
            raise ConfigError(f"the weights of all {len(contributions)} contributions are 0; at least one must count.")
        if momentum is not None and momentum.shape != (num_elements,):
            raise ConfigError(f"the momentum has shape {tuple(momentum.shape)}; it must have {num_elements} elements.")
        _check_sizes(codec, contributions, num_elements)
        self.contributions = contributions
        self.places = places
        self.num_elements = num_elements
        self.momentum = momentum
        self.codec = codec
        payloads = (payload for each in contributions for payload in each.payloads)
        self.device = next(payloads, torch.empty(0)).device
        self.each = each
        self.looped = frozenset(
            index for index, it in enumerate(contributions)
            if len(it.payloads) == 1 and not it.parts and arithmetic.reading(codec, it.payloads[0])
        )  # fmt: skip

    def each_run(self, function: "Callable[[Run], T]") -> Iterable[T]:
        """The results of a function of each run, in order. It may be called for several runs at once, in threads."""
        step = RUN_SEGMENTS * SEGMENT_ELEMENTS
        starts = range(0, self.num_elements, step)
        return self.each(lambda start: function(Run(self, start, min(start + step, self.num_elements))), starts)

    def run_around(self, elements: slice) -> "Run":
        """The shortest run with these elements."""
        start = elements.start // SEGMENT_ELEMENTS * SEGMENT_ELEMENTS
        stop = math.ceil(elements.stop / SEGMENT_ELEMENTS) * SEGMENT_ELEMENTS
        return Run(self, start, min(stop, self.num_elements))


class Run:
    """A run of whole segments of the vector that is merged; the last one may be shorter.

    Attributes:
        elements: of the vector.
    """

    def __init__(self, decoder: Decoder, start: int, stop: int) -> None:
        self.elements = slice(start, stop)
        self.contributions, self._decoder = decoder.contributions, decoder
        self._span = decoder.codec.segment_span(
            decoder.num_elements, start // SEGMENT_ELEMENTS, math.ceil(stop / SEGMENT_ELEMENTS)
        )
        self._scratch = Scratch(decoder.device)

    @property
    def num_elements(self) -> int:
        """Its length."""
        return int(self.elements.stop - self.elements.start)

    def read(self, index: int, out: Tensor | None = None) -> Tensor:
        """The outer gradient of contribution `index` in this run: the sum over its payloads, in `out` or in scratch.

        Raises CorruptPayloadError on inf or NaN; it names the learner.
        """
        out = self._take("decoded") if out is None else out
        contribution = self.contributions[index]
        if not contribution.payloads:
            return out.zero_()
        for number, payload in enumerate(contribution.payloads):
            part = self._decode(contribution, payload[self._span], self._take("late") if number else out)
            if contribution.parts and (trained := contribution.parts[number]) is not None:
                places = self._decoder.places
                for elements, tensor in within(self.elements, [(each.elements, i) for i, each in enumerate(places)]):
                    part[elements].mul_(tensor in trained)
            if number:
                out.add_(part)
        return out

    def within(self, elements: slice) -> slice:
        """The place of these elements of the vector in the run."""
        return slice(elements.start - self.elements.start, elements.stop - self.elements.start)

    def squares(self, indices: Iterable[int], elements: slice) -> dict[int, list[float]]:
        """Σ x² of each block of these elements (`measures.block_sums`), for each contribution of `indices` that
        compiled loops can read."""
        it, looped = self._decoder, [index for index in indices if index in self._decoder.looped]
        if (loops := arithmetic.loops()) is None or not looped:
            return {}
        payloads = [self.contributions[index].payloads[0] for index in looped]
        squares = loops.decoded_squares(it.codec, payloads, it.num_elements, elements.start, elements.stop)
        return {} if squares is None else dict(zip(looped, squares, strict=True))

    def weighted_sum(self, factors: Mapping[int, float], divisor: float, part: slice, out: Tensor) -> bool:
        """Write Σ factor·(contribution) / divisor to a part of `out` (fp32, the run) by compiled loops. False: they
        cannot, and the part is undefined."""
        it = self._decoder
        if (loops := arithmetic.loops()) is None or not factors or not it.looped.issuperset(factors):
            return False
        payloads, first = [self.contributions[index].payloads[0] for index in factors], self.elements.start + part.start
        sum_ = loops.weighted_sum
        return bool(sum_(it.codec, payloads, it.num_elements, [*factors.values()], divisor, first, out[part]))

    def read_all(self) -> list[Tensor]:
        """The outer gradients of all contributions in this run."""
        return [self.read(index, self._take(f"row {index}")) for index in range(len(self.contributions))]

    def _take(self, name: str) -> Tensor:
        return self._scratch.take(name, (self.num_elements,), torch.float32)

    def _decode(self, contribution: Encoded, payload: Tensor, out: Tensor) -> Tensor:
        try:
            return self._decoder.codec.decode(payload, out.numel(), out, self._scratch)
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
                f" but {num_elements} elements in {codec.name} have {expected_bytes} bytes."
            )
