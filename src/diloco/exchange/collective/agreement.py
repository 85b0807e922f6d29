"""All ranks compare what they do at one point of the protocol, and raise the same error where one failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diloco.errors import DigestError, DilocoError, ExchangeError
from diloco.exchange.group import FRAME_BYTES, TEXT_CHARACTERS, Group, error_of


def agree(
    group: Group, num_bytes: dict[str, int], doing: str, said: dict[str, Any], error: DilocoError | None = None
) -> list[dict[str, Any]]:
    """Exchange a small message with all ranks. An error of one rank is raised on all of them.

    Arguments:
        num_bytes: bytes by kind; those that cross are added under "control".
        doing: what this rank is doing, for error messages.
        said: plain values that fit into a frame.
        error: this rank's failure; None: it did not fail.

    Raises:
        ExchangeError: the ranks do different things, or one is gone.
        DilocoError: of the kind that a rank has met; names the rank.
    """
    told = None if error is None else [type(error).__name__, str(error)[:TEXT_CHARACTERS]]
    frames = group.gather_frames({"doing": doing, "said": said, "error": told}, doing)
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


def attempt(work: Callable[[], Any]) -> tuple[Any, DilocoError | None]:
    """Return a result, or the error that must be sent to the other ranks before it is raised."""
    try:
        return work(), None
    except DilocoError as error:
        return None, error


def require_same_digest(fragment: int, version: int, digests: Sequence[str]) -> None:
    """Raise DigestError unless all ranks hold the same bits of a version."""
    for rank, theirs in enumerate(digests):
        if theirs != digests[0]:
            raise DigestError(
                f"{name_of(0)} and {name_of(rank)} hold version {version} of fragment {fragment} with different bits "
                f"(digests {digests[0][:12]} and {theirs[:12]}); start all learners again from one checkpoint."
            )


def name_of(rank: int) -> str:
    """The learner that a rank is."""
    return f"learner-{rank:03d}"
