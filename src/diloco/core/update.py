"""The description of a published version: plain values, without the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Update:
    """A published version of a fragment.

    Attributes:
        fragment: index of the fragment.
        base, version: the versions it joins.
        contributors, weights: whose work is in it, in merge order.
        scale: what the merged outer gradient was multiplied by.
        digest: of the new global fragment, fp32.
        lossless: True: the payload is the new fragment in fp32 and needs no base. False: it is the encoded change from
            `base`, or the encoded outer gradient that takes `base` to `version`.
    """

    fragment: int
    base: int
    version: int
    contributors: tuple[str, ...]
    weights: tuple[float, ...]
    scale: float
    digest: str
    lossless: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `as_dict` gave; JSON in between does no harm."""
        return cls(**{**values, "contributors": tuple(values["contributors"]), "weights": tuple(values["weights"])})
