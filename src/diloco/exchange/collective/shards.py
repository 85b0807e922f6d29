"""What a rank keeps of a fragment: all of it as a learner, and its shard as the shard's syncer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from diloco.core.held import HeldFragment
from diloco.core.layout import Fragment, Placement
from diloco.core.merges import shard_of
from diloco.core.method import Method
from diloco.core.shards import Shards


@dataclass
class Held:
    """What this rank keeps of a fragment.

    Attributes:
        elements: of its shard.
        places, tensors: of its shard, as `shard_of` gives them.
        all_places: the tensors of the whole fragment.
        whole: as a learner; with an outer state where the outer optimizer is on the learners.
        own: its shard, as the shard's syncer. `own.theta` is a view of `whole.theta` from the first round on.
    """

    shards: Shards
    elements: slice
    places: tuple[Placement, ...]
    tensors: range
    all_places: tuple[Placement, ...]
    whole: HeldFragment
    own: HeldFragment

    def take(self, whole: HeldFragment, own: HeldFragment) -> None:
        """A new version."""
        self.whole, self.own = whole, replace(own, theta=whole.theta[self.elements])


def first_held(method: Method, fragment: Fragment, theta: Tensor, shards: Shards, rank: int) -> Held:
    """What `rank` keeps of a fragment at version 0, `theta`. `shards`: of the fragment, unless one rank owns it."""
    if method.needs_whole_fragments:
        shards = replace(shards, owner=fragment.index % shards.num_shards)
    elements = shards.elements(rank)
    whole = HeldFragment.first(method, fragment.index, theta)
    if method.outer_at == "syncer":
        whole = replace(whole, outer_state={})
    own = HeldFragment.first(method, fragment.index, theta[elements])
    return Held(shards, elements, *shard_of(fragment.tensors, elements), fragment.tensors, whole, own)
