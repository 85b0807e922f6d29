"""Averaged tensors: training changes them without a gradient, as it changes running statistics and router biases.

Averaged tensors are in the fragments and are sent as outer gradients like the parameters, Δ = anchor − value. Their
outer step is

    Θ ← Θ − Δ̄            the weighted mean of the learners' values, without learning rate and momentum

because Δ of an estimate is no gradient to follow: the merged estimate is the mean of the estimates. Nesterov momentum
would carry a falling variance below 0: with μ = 0.9 and lr = 0.7 the first step already goes 1.33 times as far as the
mean. A mean of variances is not negative; rounding, a lossy codec, and an outer gradient that was measured from an
older version may leave a value below 0, which is set to 0. The outer state of averaged elements stays 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from diloco.core.layout import Placement
from diloco.core.merges.decoding import within
from diloco.core.outer import Outer, State


class AveragedElements:
    """The outer step of a fragment, or of a shard of one, some of whose tensors may be averaged.

    Arguments:
        places: the tensors of the fragment or shard.
    """

    def __init__(self, places: Sequence[Placement]) -> None:
        self._spans = [(each.elements, each.spec.role == "variance") for each in places if each.spec.is_averaged]

    def step(
        self, outer: Outer, run: slice, state: Mapping[str, Tensor], params: Tensor, delta: Tensor, out: Tensor,
        new_state: State,
    ) -> None:  # fmt: skip
        """The outer step of all elements of a run: `Outer.step`, but Θ − Δ̄ for averaged elements.

        Arguments:
            run: which elements of the fragment `state`, `params` and `delta` hold.
            out, new_state: receive the result; `out` may be `delta`.
        """
        means = [(part, outer.average(params[part], delta[part])) for part, _ in within(run, self._spans)]
        outer.step(state, params, delta, out=out, new_state=new_state)
        for part, mean in means:
            out[part] = mean
            for each in new_state.values():
                if each.dim():
                    each[part] = 0

    def are_in(self, run: slice) -> bool:
        """Whether a run has averaged elements."""
        return any(True for _ in within(run, self._spans))

    def floor(self, run: slice, theta: Tensor) -> None:
        """Set negative variances of a run to 0. `theta`: its new values, changed in place."""
        for part, is_variance in within(run, self._spans):
            if is_variance:
                theta[part].clamp_(min=0)
