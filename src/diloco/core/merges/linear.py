"""The base of merges that are weighted sums: measurements, coefficients, and the one loop that sums contributions."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from diloco.core.merges.decoding import Decoder, Run, within
from diloco.core.merges.measures import lengths_of
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

    def merge_runs(self, decoder: Decoder, out: Tensor, final: Callable[[slice], None]) -> None:
        sums = [(each.elements, each) for each in self.coefficients(decoder, self.measure(decoder))]
        scaled_ = [each.elements for _, each in sums if each.length is not None]

        def add(run: Run) -> None:
            add_up(run, decoder.momentum, list(within(run.elements, sums)), out[run.elements])
            if not scaled_:
                final(run.elements)

        for _ in decoder.each_run(add):
            pass
        if not scaled_:
            return
        lengths = {it.start: each for it, each in zip(scaled_, lengths_of(decoder, scaled_, out), strict=True)}

        def scale(run: Run) -> None:
            for part, each in within(run.elements, sums):
                if each.length is not None:
                    _scale_to_length(run, decoder, part, each, lengths[each.elements.start], out[run.elements])
            final(run.elements)

        for _ in decoder.each_run(scale):
            pass


def add_up(run: Run, momentum: Tensor | None, sums: Sequence[tuple[slice, WeightedSum]], out: Tensor) -> None:
    """Write the sums of a run to `out` (fp32, the run), each at its slice; elements outside these do not change."""
    sums = [
        (part, each)
        for part, each in sums
        if each.towards or not run.weighted_sum(each.factors, each.divisor, part, out)
    ]
    for index in sorted({index for _, each in sums for index in each.factors}):
        own = [(part, each) for part, each in sums if index in each.factors]
        if len(own) == 1 and own[0][0] == slice(0, len(out)) and index == min(own[0][1].factors):
            # A run of one sum: its first contribution is decoded straight into `out`.
            scaled(run.read(index, out), own[0][1].factors[index])
        else:
            decoded = run.read(index)
            for part, each in own:
                share, target = scaled(decoded[part], each.factors[index]), out[part]
                if index == min(each.factors):
                    target.copy_(share)
                else:
                    target.add_(share)
        for part, each in own:
            if momentum is not None and index in each.towards:
                out[part].add_(scaled(momentum[run.elements][part].clone(), each.towards[index]))
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


def _scale_to_length(run: Run, decoder: Decoder, part: slice, sum_: WeightedSum, length: float, out: Tensor) -> None:
    """Scale the part of a complete sum that is in a run to its length; a sum without a direction is replaced by the
    weighted mean. `out`: fp32, the run."""
    if sum_.length is not None and length >= sum_.shortest:
        scaled(out[part], sum_.length / length)
        return
    means = [(each.elements, each) for each in means_of(decoder.contributions, decoder.places)]
    start = run.elements.start
    inside = within(slice(start + part.start, start + part.stop), means)
    moved = [(slice(part.start + own.start, part.start + own.stop), each) for own, each in inside]
    add_up(run, decoder.momentum, moved, out)
