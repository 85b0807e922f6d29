"""The start of a run: compare method and model over all ranks, then broadcast rank 0's model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diloco.core.fragments import Layout
from diloco.core.memory import new_vector
from diloco.core.method import Method
from diloco.errors import ConfigError, LayoutError
from diloco.exchange.base import Model
from diloco.exchange.collective.agreement import name_of
from diloco.exchange.group import Group


def compare(group: Group, layout: Layout, method: Method, overlap: int | None) -> int:
    """Compare every rank's method and model with rank 0's. Raises the same error on every rank.

    `overlap`: this rank's own τ; None: the method's. Returns the longest overlap of all ranks.

    Raises:
        ConfigError: the methods differ, or a process group cannot run the method.
        LayoutError: the models differ; names the first tensor that differs.
    """
    said = {
        "method": method.to_dict(), "layout": layout.to_dict(),
        "overlap": method.overlap if overlap is None else overlap,
    }  # fmt: skip
    theirs = group.gather_values(said, "opening the run")
    methods = [Method.from_dict(each["method"]) for each in theirs]
    layouts = [Layout.from_dict(each["layout"]) for each in theirs]
    for rank in range(1, group.size):
        if difference := methods[0].difference(methods[rank]):
            raise ConfigError(f"{name_of(0)} and {name_of(rank)} use different methods: {difference}.")
        if difference := layouts[0].first_difference(layouts[rank]):
            raise LayoutError(f"{name_of(0)} and {name_of(rank)} do not hold the same model: {difference}.")
    if not method.wait:
        raise ConfigError("wait=False needs a syncer that merges without a late learner; use wait=True over a group.")
    if (why := method.quorum.needs_syncer) is not None:
        raise ConfigError(why)
    if method.quorum.at_least > group.size:
        raise ConfigError(
            f"the quorum needs {method.quorum.at_least} learners and the process group has {group.size}; lower "
            "at_least."
        )
    longest: int = max(each["overlap"] for each in theirs)
    return longest


def broadcast(group: Group, num_bytes: dict[str, int], layout: Layout, initial: Callable[[], Model]) -> Model:
    """Rank 0's model, `initial()` there, on every rank.

    `num_bytes`: bytes by kind; those that cross are added under "joins".
    """
    if group.rank == 0:
        model = initial()
        fragments = tuple(theta.contiguous() for theta in model.fragments)
        static = {name: value.contiguous() for name, value in model.static.items()}
    else:
        fragments = tuple(new_vector(each.numel) for each in layout.fragments)
        static = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in layout.static}
    for index, theta in enumerate(fragments):
        group.broadcast(theta, f"fragment {index} of {name_of(0)}'s model")
    for spec in layout.static:
        group.broadcast(static[spec.name], f"tensor {spec.name!r} of {name_of(0)}'s model")
    crossed = sum(tensor.numel() * tensor.element_size() for tensor in (*fragments, *static.values()))
    num_bytes["joins"] += crossed * (group.size - 1 if group.rank == 0 else 1)
    return Model(fragments, static)
