"""Merges of whole vectors at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.core.codecs import Codec
from diloco.core.layout import Placement
from diloco.core.merges import Encoded, Merge, merge_into


def merged_vector(
    how: Merge,
    codec: Codec,
    contributions: Sequence[Encoded],
    places: Sequence[Placement],
    num_elements: int,
    momentum: Tensor | None = None,
) -> Tensor:
    """All of `merge_into`: fp32 [num_elements]."""
    out = torch.empty(num_elements)
    merge_into(out, how, codec, contributions, places, momentum)
    return out
