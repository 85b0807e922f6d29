"""The base of all merges, and `merge_into`, which executes one.

With the number of learners, a merge's memory grows by a run of each at most, and by that for every thread. The order of
arrival does not matter: the caller passes contributions in learner-id order.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from diloco.core.choices import Choice
from diloco.core.codecs import Codec
from diloco.core.layout import Placement
from diloco.core.memory import Each, is_finite, one_by_one
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
    def merge_runs(self, decoder: Decoder, out: Tensor, final: Callable[[slice], None]) -> None:
        """Write the merged outer gradient to `out`, fp32 [decoder.num_elements].

        Calls `final` with the elements of each of the decoder's runs once, when they are final; in any order, and for
        several runs at once where the decoder works in threads.
        """


def merge_into(
    out: Tensor,
    merge: Merge,
    codec: Codec,
    contributions: Sequence[Encoded],
    places: Sequence[Placement],
    momentum: Tensor | None = None,
    *,
    final: Callable[[slice], None] = lambda _: None,
    each: Each = one_by_one,
) -> None:
    """Decode and merge.

    Arguments:
        out: fp32 [num_elements], receives the merged outer gradient.
        merge: the rule.
        codec: of the payloads.
        contributions: one per learner, in learner-id order; at least one has a weight above 0.
        places: the tensors of these elements, in order and without gaps: those of a fragment, or those of a run of
            whole segments of it, clipped (`shard_of`), where the merge is elementwise.
        momentum: of the outer optimizer (`Outer.momentum_of`), fp32 [num_elements]; None: it has none.
        final: called once with the elements of every run of whole segments, when they are final in `out`. It may
            overwrite them, and only them.
        each: works through the runs; the bits do not depend on it.

    Each tensor is merged over the learners that train it, with their weights; a tensor that no learner trains gets 0.

    Raises:
        ConfigError: no contribution has a weight.
        CorruptPayloadError: a payload of the wrong size, or with inf or NaN in what is merged of it; names the learner.
        NonFiniteError: the merge itself overflows.
    """

    def checked(run: slice) -> None:
        if not is_finite(out[run]):
            raise NonFiniteError("the sum of the contributions overflows fp32; find the learner that diverged.")
        final(run)

    merge.merge_runs(Decoder(codec, contributions, places, out.numel(), momentum, each), out, checked)
