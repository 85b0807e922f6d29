"""What every merge is: a value that says how contributions become one outer gradient, and the loop that all of them go
through.

A merge's memory does not grow with the number of learners beyond a run of each, and the order of arrival does not
matter (the caller passes contributions in learner-id order).
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
from diloco.core.merges.decoding import Decoder
from diloco.core.merges.inputs import Encoded
from diloco.errors import NonFiniteError


class Merge(Choice):
    """How the outer gradients of several learners become one."""

    elementwise: ClassVar[bool]
    """True: merging a run of whole segments gives the bits of that part of the whole. False: it needs whole fragments.
    """

    weighted: ClassVar[bool] = True
    """False: every learner counts the same, whatever its weight; only weight 0 leaves one out."""

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
        merge: how.
        codec: what the payloads are encoded with.
        contributions: one of each learner, in learner-id order; at least one of them counts (weight above 0).
        places: the tensors of these `num_elements` elements, in order and without gaps: those of a fragment, or those
            of a run of whole segments of it, clipped (`shard_of`), where the merge is elementwise.
        momentum: the outer optimizer's (`Outer.momentum_of`), fp32 [num_elements], where it keeps one.
        out: fp32 [num_elements], where the result goes. What is yielded is a view of it, is final, and may be
            overwritten from then on. What has not been yielded yet must be left alone.

    Each tensor is merged over the learners that train it, with their weights; one that no learner trains gets 0.

    Raises:
        ConfigError: unusable weights.
        LayoutError: places that do not cover the elements, or a contribution that names a tensor that is not there.
        CorruptPayloadError: a payload of the wrong size or with inf or NaN in it; names the learner.
        NonFiniteError: the merge itself overflows.
    """
    decoder = Decoder(codec, contributions, places, num_elements, momentum)
    for run in merge.merge_runs(decoder, out):
        _require_finite(out[run])
        yield run, out[run]


def _require_finite(run: Tensor) -> None:
    """One pass without a temporary: minimum and maximum carry every inf and NaN. `run` is not empty."""
    low, high = torch.aminmax(run)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteError("the sum of the contributions overflows fp32; find the learner that diverged.")
