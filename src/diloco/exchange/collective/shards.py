"""A rank's state of a fragment: the whole of it as a learner, and its shard as the shard's syncer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diloco.core.fragments import digest
from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Fragment, Placement
from diloco.core.merges import shard_of
from diloco.core.method import Method
from diloco.core.shards import Shards
from diloco.errors import CheckpointError
from diloco.exchange.collective.joining import agree, name_of
from diloco.exchange.group import Group, as_bytes, attempt


@dataclass
class HeldShard:
    """This rank's state of a fragment.

    Attributes:
        elements: those of its shard.
        places, tensors: those of its shard, as `shard_of` returns them.
        all_places: the tensors of the whole fragment.
        whole: the learner's; with an outer state if the outer optimizer is on the learners.
        own: the syncer's, of the shard. `own.theta` is a view of `whole.theta` from the first round on.
    """

    shards: Shards
    elements: slice
    places: tuple[Placement, ...]
    tensors: range
    all_places: tuple[Placement, ...]
    whole: GlobalFragment
    own: GlobalFragment

    def take(self, whole: GlobalFragment, own: GlobalFragment) -> None:
        """Store a new version."""
        self.whole, self.own = whole, replace(own, theta=whole.theta[self.elements])


def first_held(method: Method, fragment: Fragment, theta: Tensor, shards: Shards, rank: int) -> HeldShard:
    """The state of `rank` for a fragment at version 0, `theta`. `shards`: of the fragment, unless one rank owns it."""
    if method.needs_whole_fragments:
        shards = replace(shards, owner=fragment.index % shards.num_shards)
    elements, method = shards.elements(rank), method.for_fragment(fragment.index)
    whole = GlobalFragment.first(method, fragment.index, theta)
    if method.outer_at == "syncer":
        whole = replace(whole, outer_state={})
    own = GlobalFragment.first(method, fragment.index, theta[elements])
    return HeldShard(shards, elements, *shard_of(fragment.tensors, elements), fragment.tensors, whole, own)


def state_of(group: Group, fragments: Sequence[HeldShard]) -> dict[str, Any]:
    """The state of a rank as tensors and plain values, with the rank."""
    saved = {}
    for index, held in enumerate(fragments):
        outer_state = held.whole.outer_state or held.own.outer_state
        saved[str(index)] = {**held.own.state_dict(), "theta": held.own.theta.clone(), "outer": dict(outer_state)}
    return {"world_size": group.size, "rank": group.rank, "fragments": saved}


def restore(
    group: Group, method: Method, fragments: Sequence[HeldShard], state: Mapping[str, Any], num_bytes: dict[str, int]
) -> None:
    """Restore the fragments from the result of `state_of`. All ranks call it, and gather each other's shards.

    `num_bytes`: bytes by kind; the bytes sent and received are added under "joins".

    Raises:
        CheckpointError: it is of another world size, rank or model, or the ranks' checkpoints are of different steps.
    """
    doing = "the loading of a checkpoint"
    _, error = attempt(lambda: _check(group, fragments, state))
    versions = [] if error else [state["fragments"][str(f)]["version"] for f in range(len(fragments))]
    moment = hashlib.sha256(json.dumps(versions).encode()).hexdigest()
    moments = [frame["versions"] for frame in agree(group, num_bytes, doing, {"versions": moment}, error)]
    for rank, theirs in enumerate(moments):
        if theirs != moments[0]:
            raise CheckpointError(
                f"the checkpoints of {name_of(0)} and {name_of(rank)} were not taken after the same step; load "
                "checkpoints of one step."
            )
    for index, held in enumerate(fragments):
        saved = state["fragments"][str(index)]
        parts = [held.shards.elements(rank) for rank in range(group.size)]
        sizes = [4 * (part.stop - part.start) for part in parts]
        joined = group.gather(as_bytes(saved["theta"].contiguous()), sizes, doing)
        num_bytes["joins"] += sizes[group.rank] * (group.size - 2) + sum(sizes)
        theta = joined.view(torch.float32)
        steps = method.outer_at == "learners"
        outer_state = saved["outer"] if steps else {}
        whole = GlobalFragment(index, saved["version"], theta, outer_state, None, digest(theta))
        own = whole.part(held.elements)
        outer_state = own.outer_state if steps else saved["outer"]
        held.take(whole, replace(own, outer_state=outer_state, residual=saved["residual"]))


def _check(group: Group, fragments: Sequence[HeldShard], state: Mapping[str, Any]) -> None:
    if (state.get("world_size"), state.get("rank")) != (group.size, group.rank):
        raise CheckpointError(
            f"the checkpoint is of rank {state.get('rank')} of {state.get('world_size')} and this is rank "
            f"{group.rank} of {group.size}; resume every learner from its own checkpoint, as many as before."
        )
    for index, held in enumerate(fragments):
        saved = state["fragments"].get(str(index))
        if saved is None or saved["theta"].shape != held.own.theta.shape:
            raise CheckpointError(f"the checkpoint does not fit fragment {index}; it is of another model or method.")
