"""A member's copy of the run, its form as one safetensors file, and how a member that is behind gets it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from diloco.core.fragments import digest
from diloco.core.global_fragment import GlobalFragment
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.exchange.base import FlatModel
from diloco.exchange.group import Group, to_bytes, to_tensor


@dataclass(frozen=True)
class RoundResult:
    """The round that led to a fragment's version.

    Attributes:
        merged_rounds: by replica, the newest round of which a contribution is merged in this or an earlier version.
        refused: replicas whose contributions the screen refused.
        mean: the merged outer gradient, if it is published and this member has merged it.
    """

    update: Update
    merged_rounds: Mapping[str, int]
    refused: tuple[str, ...]
    mean: Tensor | None = None


@dataclass
class Copy:
    """One member's copy of the run.

    Attributes:
        fragments: by index.
        results: by fragment, where it has been merged.
        static: the tensors that training does not change.
        step: the newest inner step that any member is known to have sent a contribution after.
    """

    fragments: list[GlobalFragment] = field(default_factory=list)
    results: dict[int, RoundResult] = field(default_factory=dict)
    static: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0

    def begin(self, model: FlatModel, method: Method) -> None:
        """Start from this member's own model, as version −1: older than any version of the run."""
        self.static = model.static
        self.fragments = [
            GlobalFragment.first(method.for_fragment(f), f, theta.contiguous(), version=-1)
            for f, theta in enumerate(model.fragments)
        ]

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment."""
        return tuple(held.version for held in self.fragments)

    def as_bytes(self, fragments: Sequence[int] | None = None) -> bytes:
        """Fragments (None: all) as one safetensors file; one of its tensors is JSON with their versions and rounds."""
        tensors: dict[str, Tensor] = {f"static.{name}": value.contiguous() for name, value in self.static.items()}
        records: dict[str, Any] = {}
        for f in range(len(self.fragments)) if fragments is None else fragments:
            held = self.fragments[f]
            tensors[f"{f}.theta"] = held.theta
            tensors |= {f"{f}.outer.{name}": value for name, value in held.outer_state.items()}
            tensors |= {} if held.residual is None else {f"{f}.residual": held.residual}
            records[str(f)] = {"version": held.version}
            if (result := self.results.get(f)) is not None:
                records[str(f)] |= {
                    "update": result.update.as_dict(),
                    "merged_rounds": result.merged_rounds,
                    "refused": result.refused,
                }
        text = to_tensor(json.dumps(records).encode())
        return save({name: value.contiguous() for name, value in tensors.items()} | {"told": text})

    def load(self, raw: bytes) -> None:
        """Load the result of `as_bytes`; fragments that are not in it stay."""
        tensors = load(raw)
        records = json.loads(to_bytes(tensors.pop("told")))
        self.static = _under("static.", tensors)
        for key, record in records.items():
            f, theta = int(key), tensors[f"{key}.theta"]
            outer_state = _under(f"{key}.outer.", tensors)
            self.fragments[f] = GlobalFragment(
                f, record["version"], theta, outer_state, tensors.get(f"{key}.residual"), digest(theta)
            )
            if "update" in record:
                update, refused = Update.from_dict(record["update"]), tuple(record["refused"])
                self.results[f] = RoundResult(update, record["merged_rounds"], refused)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def adopt_first(group: Group, copy: Copy, frames: Sequence[dict[str, Any]], num_bytes: dict[str, int]) -> None:
    """Start a new run: all members take the model of the first replica as version 0.

    Arguments:
        group, frames: of one quorum, and its members' greetings, in which the versions are set to 0.
        copy: this member's copy, which is updated.
        num_bytes: bytes by kind; the bytes sent and received are added under "joins".
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
