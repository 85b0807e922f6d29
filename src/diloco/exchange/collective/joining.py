"""The start of a run: compare method and model over all ranks, then broadcast rank 0's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diloco.core.fragments import Layout
from diloco.core.memory import new_vector
from diloco.core.method import Method
from diloco.errors import ConfigError, DilocoError, ExchangeError, LayoutError
from diloco.exchange.base import FlatModel, require_experts_trained
from diloco.exchange.group import FRAME_BYTES, TEXT_CHARACTERS, Group, error_of, error_values
from diloco.exchange.peers import require_no_syncer


def agree(
    group: Group, num_bytes: dict[str, int], doing: str, values: dict[str, Any], error: DilocoError | None = None
) -> list[dict[str, Any]]:
    """Exchange a small message with all ranks. An error of one rank is raised on all of them.

    Arguments:
        num_bytes: bytes by kind; the bytes sent and received are added under "control".
        doing: this rank's operation, for error messages.
        values: plain values that fit into a frame.
        error: this rank's failure; None: it did not fail.

    Raises:
        ExchangeError: the ranks are at different operations, or a rank is lost.
        DilocoError: the error of a rank, with its class; names the rank.
    """
    failure = error_values(error, TEXT_CHARACTERS)
    frames = group.gather_frames({"doing": doing, "said": values, "error": failure}, doing)
    num_bytes["control"] += 2 * FRAME_BYTES * (group.size - 1)
    for rank, frame in enumerate(frames):
        if frame["error"] is not None:
            name, text = frame["error"]
            raise error_of(name, f"{frame['doing']} failed on {name_of(rank)}: {text}") from error
    for rank, frame in enumerate(frames):
        if frame["doing"] != frames[0]["doing"]:
            raise ExchangeError(
                f"{name_of(0)} is at {frames[0]['doing']} and {name_of(rank)} at {frame['doing']}; let every learner "
                "take the same steps and load the same checkpoint."
            )
    return [frame["said"] for frame in frames]


def name_of(rank: int) -> str:
    """The name of the learner of a rank."""
    return f"learner-{rank:03d}"


def compare(
    group: Group, layout: Layout, method: Method, overlap: int | None, trained: Sequence[tuple[int, ...] | None]
) -> int:  # fmt: skip
    """Compare every rank's method and model with rank 0's. Raises the same error on every rank.

    `overlap`: this rank's own τ; None: the method's. `trained`: as `Exchange.trained`. Returns the longest overlap of
    all ranks.

    Raises:
        ConfigError: the methods differ, or the method does not run over a process group; no rank trains some expert.
        LayoutError: the models differ; names the first tensor that differs.
    """
    mine = {
        "method": method.to_dict(), "layout": layout.to_dict(),
        "overlap": method.overlap if overlap is None else overlap, "trained": list(trained),
    }  # fmt: skip
    theirs = group.gather_values(mine, "opening the run")
    methods = [Method.from_dict(each["method"]) for each in theirs]
    layouts = [Layout.from_dict(each["layout"]) for each in theirs]
    for rank in range(1, group.size):
        names = f"on {name_of(0)}", f"on {name_of(rank)}"
        if difference := methods[0].difference(methods[rank], *names):
            raise ConfigError(f"learners use different methods: {difference}.")
        if difference := layouts[0].first_difference(layouts[rank], *names):
            raise LayoutError(f"learners do not hold the same model: {difference}.")
    require_experts_trained(method, layout, [each["trained"] for each in theirs])
    require_no_syncer(method)
    if method.quorum.at_least > group.size:
        raise ConfigError(
            f"the quorum needs {method.quorum.at_least} learners and the process group has {group.size}; lower "
            "at_least."
        )
    longest: int = max(each["overlap"] for each in theirs)
    return longest


def broadcast(group: Group, num_bytes: dict[str, int], layout: Layout, initial: Callable[[], FlatModel]) -> FlatModel:
    """Rank 0's model, `initial()` there, on every rank.

    `num_bytes`: bytes by kind; the bytes sent and received are added under "joins".
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
    return FlatModel(fragments, static)
