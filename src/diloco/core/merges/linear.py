"""The base of merges that are weighted sums: measurements, coefficients, and the one loop that sums contributions."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from diloco.core.merges.decoding import Decoder, within
from diloco.core.merges.measures import BlockSums, WideScratch
from diloco.core.merges.merge import Merge
from diloco.core.merges.weighted_sum import WeightedSum, means_of

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max

MeasuredT = TypeVar("MeasuredT")


class LinearMerge(Merge, Generic[MeasuredT]):
    """Σ_m factor_m·v_m, tensor by tensor."""

    @abstractmethod
    def measure(self, decoder: Decoder) -> MeasuredT:
        """Measure what the coefficients depend on beside the weights, in at most one pass over the contributions."""

    @abstractmethod
    def coefficients(self, decoder: Decoder, measured: MeasuredT) -> Sequence[WeightedSum]:
        """The sums, in order and without gaps. Pure arithmetic, which decodes nothing."""

    def merge_runs(self, decoder: Decoder, out: Tensor) -> Iterator[slice]:
        sums = [(each.elements, each) for each in self.coefficients(decoder, self.measure(decoder))]
        scratch = WideScratch(decoder.device) if any(each.length is not None for _, each in sums) else None
        lengths: dict[int, BlockSums] = {}
        pending: list[slice] = []  # runs that wait for a tensor in them to be scaled
        for run in decoder.runs():
            inside = list(within(run, sums))
            add_up(decoder, run, inside, out[run])
            first_open = run.stop
            for part, each in inside:
                if each.length is None or scratch is None:
                    continue
                start = each.elements.start
                lengths.setdefault(start, BlockSums(scratch)).add(out[run][part])
                if each.elements.stop <= run.stop:
                    _scale_to_length(decoder, each, math.sqrt(lengths.pop(start).total()), out)
                else:
                    first_open = start
            pending.append(run)
            while pending and pending[0].stop <= first_open:
                yield pending.pop(0)


def add_up(decoder: Decoder, run: slice, sums: Sequence[tuple[slice, WeightedSum]], out: Tensor) -> None:
    """Write the sums of a run to `out` (fp32, the run), each at its slice; elements outside these do not change."""
    for index in sorted({index for _, each in sums for index in each.factors}):
        own = [(part, each) for part, each in sums if index in each.factors]
        if len(own) == 1 and own[0][0] == slice(0, len(out)) and index == min(own[0][1].factors):
            # A run of one sum: its first contribution is decoded straight into `out`.
            scaled(decoder.read(index, run, out), own[0][1].factors[index])
        else:
            decoded = decoder.read(index, run)
            for part, each in own:
                share, target = scaled(decoded[part], each.factors[index]), out[part]
                if index == min(each.factors):
                    target.copy_(share)
                else:
                    target.add_(share)
        for part, each in own:
            if decoder.momentum is not None and index in each.towards:
                out[part].add_(scaled(decoder.momentum[run][part].clone(), each.towards[index]))
    for part, each in sums:
        if not each.factors:
            out[part].zero_()
        elif each.divisor != 1.0:
            # A tensor, not a number: a GPU would multiply by a number's reciprocal, which rounds differently.
            out[part].div_(torch.tensor(each.divisor, dtype=torch.float32, device=out.device))


def scaled(x: Tensor, factor: float) -> Tensor:
    """factor·x, in place. Where fp32 cannot hold the factor (a very short vector made long, or back) the product is
    computed in fp64."""
    if factor == 1.0:
        return x
    if factor == 0.0 or SMALLEST <= abs(factor) <= LARGEST:
        return x.mul_(factor)
    return x.copy_(x.double().mul_(factor))


def _scale_to_length(decoder: Decoder, sum_: WeightedSum, length: float, out: Tensor) -> None:
    """Scale a complete sum in `out` to its length; a sum without a direction is replaced by the weighted mean."""
    if sum_.length is not None and length >= sum_.shortest:
        scaled(out[sum_.elements], sum_.length / length)
        return
    own = slice(sum_.elements.start, sum_.elements.stop)
    means = means_of(decoder.contributions, decoder.places)
    spans = [
        (own, replace(each, elements=own)) for each in means if each.elements.start <= own.start < each.elements.stop
    ]
    for run in decoder.runs():
        if inside := list(within(run, spans)):
            add_up(decoder, run, inside, out[run])
