"""The base of all merges, and `merged_runs`, which executes one.

With the number of learners, a merge's memory grows by a run of each at most. The order of arrival does not matter: the
caller passes contributions in learner-id order.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core.choices import Choice
from diloco.core.codecs import Codec
from diloco.core.layout import Placement
from diloco.core.merges.decoding import Decoder, Encoded
from diloco.errors import NonFiniteError


class Merge(Choice):
    """How the outer gradients of several learners become one."""

    elementwise: ClassVar[bool]
    """True: merging a run of whole segments gives the bits of that part of the whole. False: it needs whole fragments.
    """

    weighted: ClassVar[bool] = True
    """False: weights do not count, except that weight 0 leaves a learner out."""

    weighs_tensors: ClassVar[bool] = True
    """False: a weighted merge in which a learner has one weight for all of its tensors."""

    @abstractmethod
    def merge_runs(self, decoder: Decoder, out: Tensor) -> Iterator[slice]:
        """Write the merged outer gradient to `out`, fp32 [decoder.num_elements].

        Yields each of the decoder's runs, in order, once it is final.
        """


def merged_runs(
    merge: Merge,
    codec: Codec,
    contributions: Sequence[Encoded],
    places: Sequence[Placement],
    num_elements: int,
    momentum: Tensor | None = None,
    *,
    out: Tensor,
) -> Iterator[tuple[slice, Tensor]]:
    """Decode and merge: (elements, merged outer gradient of these) for one run of whole segments after the other.

    Arguments:
        merge: the rule.
        codec: of the payloads.
        contributions: one per learner, in learner-id order; at least one has a weight above 0.
        places: the tensors of these `num_elements` elements, in order and without gaps: those of a fragment, or those
            of a run of whole segments of it, clipped (`shard_of`), where the merge is elementwise.
        momentum: of the outer optimizer (`Outer.momentum_of`), fp32 [num_elements]; None: it has none.
        out: fp32 [num_elements], receives the result. The tensors yielded are views of it; they are final, and the
            caller may overwrite them. The caller must not write to other elements.

    Each tensor is merged over the learners that train it, with their weights; a tensor that no learner trains gets 0.

    Raises:
        ConfigError: no contribution has a weight.
        CorruptPayloadError: a payload of the wrong size or with inf or NaN in it; names the learner.
        NonFiniteError: the merge itself overflows.
    """
    decoder = Decoder(codec, contributions, places, num_elements, momentum)
    for run in merge.merge_runs(decoder, out):
        _require_finite(out[run])
        yield run, out[run]


def _require_finite(run: Tensor) -> None:
    """Raise NonFiniteError on inf or NaN, in one pass without a temporary. `run` is not empty."""
    low, high = torch.aminmax(run)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteError("the sum of the contributions overflows fp32; find the learner that diverged.")
