"""What every member keeps of the run, and its form as bytes: one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from diloco.core.fragments import digest
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.exchange.base import Model
from diloco.exchange.group import to_bytes, to_tensor


@dataclass
class Held:
    """What every member keeps of a fragment, and how its version came about."""

    version: int
    theta: Tensor
    outer_state: Mapping[str, Tensor]
    residual: Tensor | None
    digest: str
    update: Update | None = None
    mean: Tensor | None = None
    merged_rounds: dict[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


@dataclass
class Copy:
    """The run as one member has it.

    Attributes:
        fragments: by index.
        static: the tensors that training leaves alone.
        step: the newest inner step that anybody is known to have sent a contribution after.
    """

    fragments: list[Held] = field(default_factory=list)
    static: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0

    def begin(self, model: Model, method: Method) -> None:
        """This member's own model, of version −1: before any that the run has."""
        self.static = model.static
        self.fragments = [
            Held(-1, theta.contiguous(), method.outer.init(theta.numel()), None, "") for theta in model.fragments
        ]

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each fragment."""
        return tuple(held.version for held in self.fragments)

    def as_bytes(self, fragments: Sequence[int] | None = None) -> bytes:
        """Fragments (None: all) as one safetensors file; how they came about is one of its tensors, as JSON."""
        tensors: dict[str, Tensor] = {f"static.{name}": value.contiguous() for name, value in self.static.items()}
        told: dict[str, Any] = {}
        for f in range(len(self.fragments)) if fragments is None else fragments:
            held = self.fragments[f]
            tensors[f"{f}.theta"] = held.theta
            tensors |= {f"{f}.outer.{name}": value for name, value in held.outer_state.items()}
            tensors |= {} if held.residual is None else {f"{f}.residual": held.residual}
            update = None if held.update is None else held.update.as_dict()
            told[str(f)] = {"version": held.version, "update": update, "merged_rounds": held.merged_rounds,
                            "refused": held.refused}  # fmt: skip
        text = to_tensor(json.dumps(told).encode())
        return save({name: value.contiguous() for name, value in tensors.items()} | {"told": text})

    def load(self, raw: bytes) -> None:
        """What `as_bytes` gave replaces what is here; fragments that are not in it stay."""
        tensors = load(raw)
        told = json.loads(to_bytes(tensors.pop("told")))
        self.static = _under("static.", tensors)
        for key, values in told.items():
            theta = tensors[f"{key}.theta"]
            self.fragments[int(key)] = Held(
                values["version"],
                theta,
                _under(f"{key}.outer.", tensors),
                tensors.get(f"{key}.residual"),
                digest(theta),
                None if values["update"] is None else Update.from_dict(values["update"]),
                None,
                values["merged_rounds"],
                tuple(values["refused"]),
            )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
