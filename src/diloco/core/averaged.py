"""Averaged tensors: training changes them and no gradient does, such as running statistics and router biases.

They are in the fragments and are sent as outer gradients like the parameters, Δ = anchor − value. Their outer step is

    Θ ← Θ − Δ̄            the weighted mean of the learners' values; no learning rate, no momentum

because an outer optimizer follows a gradient, and this is none: the mean of estimates is the estimate. Nesterov
momentum would carry a variance that falls below 0: with μ = 0.9 and lr = 0.7 the first step already goes 1.33 times as
far as the mean. The mean of variances lies between them; what is left below 0 by rounding, a lossy codec or an outer
gradient that was measured from an older version is set to 0. The elements' outer state stays 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from diloco.core.layout import Placement
from diloco.core.merges.decoding import within
from diloco.core.outer import Outer, State


class AveragedElements:
    """Where the averaged tensors are in a fragment, or in a shard of one.

    Arguments:
        places: the tensors of the fragment or shard.
    """

    def __init__(self, places: Sequence[Placement]) -> None:
        self._spans = [(each.elements, each.spec.role == "variance") for each in places if each.spec.is_averaged]

    def step(
        self, outer: Outer, run: slice, state: Mapping[str, Tensor], params: Tensor, delta: Tensor, out: Tensor,
        new_state: State,
    ) -> None:  # fmt: skip
        """`Outer.step` of the elements of a run, in which averaged ones become the mean.

        Arguments:
            run: these elements of the fragment; `state`, `params` and `delta` are of them.
            out, new_state: where the result is written; `out` may be `delta`.
        """
        means = [(part, outer.average(params[part], delta[part])) for part, _ in within(run, self._spans)]
        outer.step(state, params, delta, out=out, new_state=new_state)
        for part, mean in means:
            out[part] = mean
            for each in new_state.values():
                if each.dim():
                    each[part] = 0

    def floor(self, run: slice, theta: Tensor) -> None:
        """Set the variances of a run, `theta`, that are below 0 to 0."""
        for part, is_variance in within(run, self._spans):
            if is_variance:
                theta[part].clamp_(min=0)
