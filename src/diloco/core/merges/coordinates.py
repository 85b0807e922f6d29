"""The base of coordinate-wise merges, which need one coordinate's values of all learners at once."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from diloco.core.merges.decoding import Decoder, Run, within
from diloco.core.merges.merge import Merge
from diloco.core.merges.weighted_sum import means_of

BLOCK_ELEMENTS = 16384
"""Elements of every vector that are combined at once, so that all vectors' blocks fit a processor's cache."""


class CoordinateMerge(Merge):
    """A function of the values and weights of one coordinate; a run of all learners is decoded at a time."""

    elementwise: ClassVar[bool] = True

    @abstractmethod
    def combine(self, values: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        """Merge a block, coordinate by coordinate.

        Arguments:
            values: fp32 [n], one vector per learner that trains the block and has a weight, in merge order; they may
                be overwritten.
            weights: of those learners, divided by the largest of the whole merge, or of the block if learners have
                different weights from tensor to tensor.
            out: fp32 [n], written.
        """

    def merge_runs(self, decoder: Decoder, out: Tensor, final: Callable[[slice], None]) -> None:
        largest = max(each.weight for each in decoder.contributions)
        weights = [each.weight / largest for each in decoder.contributions]
        stretches = [(each.elements, each) for each in means_of(decoder.contributions, decoder.places)]
        has_shares = any(each.shares is not None for each in decoder.contributions)

        def merge(run: Run) -> None:
            rows = run.read_all()
            for part, each in within(run.elements, stretches):
                merged = out[run.elements][part]
                if not each.counting:
                    merged.zero_()
                    continue
                values = [rows[index][part].split(BLOCK_ELEMENTS) for index in each.counting]
                own_weights = [each.factors[index] if has_shares else weights[index] for index in each.counting]
                for block, *own in zip(merged.split(BLOCK_ELEMENTS), *values, strict=True):
                    self.combine(own, own_weights, block)
            final(run.elements)

        for _ in decoder.each_run(merge):
            pass
