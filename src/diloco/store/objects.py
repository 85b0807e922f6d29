"""What a store is: immutable objects, and one manifest that is swapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Found:
    """The manifest as it was read. `token`: of exactly this manifest, for `Objects.swap`."""

    data: bytes
    token: str


class Objects(Protocol):
    """A store's five operations, which block.

    Attributes:
        name: the path or URL that the user gave.
        shortest_swap_s: between two swaps.
    """

    name: str
    shortest_swap_s: float

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None: ...
    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes | memoryview: ...
    def list(self, epoch: int | None = None) -> list[str]: ...
    def delete(self, names: Iterable[str]) -> None: ...
    def manifest(self) -> Found | None: ...
    def swap(self, data: bytes, token: str | None) -> str: ...
