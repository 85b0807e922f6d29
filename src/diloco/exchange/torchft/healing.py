"""A member that is behind gets what it lacks from the most advanced member, as raw bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diloco.exchange.group import Group, to_bytes, to_tensor
from diloco.exchange.torchft.run_copy import Copy


def adopt_first(group: Group, copy: Copy, frames: Sequence[dict[str, Any]], num_bytes: dict[str, int]) -> None:
    """Start a new run: all members take the model of the first replica as version 0.

    Arguments:
        group, frames: of one quorum, and what its members said; their versions are set to 0.
        copy: of this member; it is written to.
        num_bytes: bytes by kind; those that cross are added under "joins".
    """
    copy.load(_from_rank(group, 0, copy.as_bytes() if group.rank == 0 else b"", "the first model", num_bytes))
    copy.fragments = [replace(held, version=0) for held in copy.fragments]
    for frame in frames:
        frame["versions"] = [0] * len(copy.fragments)


def heal(group: Group, copy: Copy, frames: Sequence[dict[str, Any]], num_bytes: dict[str, int]) -> None:
    """Bring every fragment to the newest version of any member. Fragments of one version have the same bits everywhere.

    Arguments: as of `adopt_first`; the frames stay as they are.
    """
    by_source: dict[int, list[int]] = {}
    for fragment in range(len(copy.fragments)):
        versions = [frame["versions"][fragment] for frame in frames]
        if min(versions) < max(versions):
            by_source.setdefault(versions.index(max(versions)), []).append(fragment)
    for source, fragments in sorted(by_source.items()):
        raw = copy.as_bytes(fragments) if group.rank == source else b""
        healed = _from_rank(group, source, raw, "healing", num_bytes)
        if any(frames[group.rank]["versions"][f] < frames[source]["versions"][f] for f in fragments):
            copy.load(healed)
    copy.step = max(copy.step, *(frame["step"] for frame in frames))


def _from_rank(group: Group, source: int, raw: bytes, what: str, num_bytes: dict[str, int]) -> bytes:
    """Broadcast one member's bytes of any size."""
    sizes = [int(frame["bytes"]) for frame in group.gather_frames({"bytes": len(raw)}, what)]
    joined = group.gather(to_tensor(raw), sizes, what)
    num_bytes["joins"] += len(raw) * (len(sizes) - 1) if group.rank == source else joined.numel()
    return to_bytes(joined)
