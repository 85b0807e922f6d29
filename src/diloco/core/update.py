"""The metadata of a published version of a fragment, without the tensors."""

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
        contributors, weights: the learners whose contributions were merged, and their weights, in merge order.
        scale: the factor of the merged outer gradient.
        digest: of the new global fragment, fp32 (`core.layout.Digest`).
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
        """The inverse of `as_dict`, also after a passage through JSON."""
        return cls(**{**values, "contributors": tuple(values["contributors"]), "weights": tuple(values["weights"])})
