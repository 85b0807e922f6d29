"""The store of a run: immutable objects, and one manifest that is swapped if it is still the one that was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from diloco.core.update import Update
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import Manifest
from diloco.run.ports import H, InitialModel, Json, RunMethod, SavedRun

P_contra = TypeVar("P_contra", contravariant=True)


@dataclass(frozen=True)
class Blob:
    """The content of an object.

    Attributes:
        hash: 64 hexadecimal digits, which end its name.
        parts: its bytes, in order.
    """

    hash: str
    parts: tuple[bytes | memoryview, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all parts."""
        return sum(len(each) for each in self.parts)


@dataclass(frozen=True)
class Found:
    """The manifest as it was read. `token`: what a swap names as the one to be replaced."""

    data: bytes
    token: str


class Readable(Protocol):
    """Objects and a manifest that can be read. All methods block, and raise StoreError (those of a syncer
    ExchangeError) where the place does not answer; the same call can be repeated.

    Attributes:
        name: the path, URL or address that the user gave.
    """

    name: str

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes | memoryview:
        """Bytes of an object; fewer where it ends before `stop`. Raises MissingObjectError: there is no such object."""

    def manifest(self) -> Found | None:
        """The manifest; None: there is none."""


class Objects(Readable, Protocol):
    """A place with objects: a directory, or a bucket. All methods block, and raise StoreError where the place refuses
    or does not answer; the same call can be repeated.

    Attributes:
        name: the path or URL that the user gave.
        shortest_swap_s: between two swaps.
    """

    shortest_swap_s: float

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Store an object, whole or not at all. A name is put again only with the same bytes."""

    def list(self) -> list[str]:
        """The names of all objects."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete those of these objects that exist."""

    def swap(self, data: bytes, token: str | None) -> str:
        """Replace the manifest with this token (None: there is none); returns the new one's token. All objects that
        were put before are durable first.

        Raises:
            SwapRefusedError: the store has another manifest. StoreError: whether it was replaced is not known.
        """


class ObjectFormat(Protocol[H, P_contra]):
    """What the objects of a run hold."""

    def version(self, run_id: str, held: H, update: Update, tokens: int) -> Blob:
        """A version of a fragment. `tokens`: trained tokens in it."""

    def update(self, run_id: str, update: Update, payload: P_contra) -> Blob:
        """An encoded update. One that is lossless has no object: the version itself is the update."""

    def frozen(self, run: str, method: RunMethod, model: InitialModel[H]) -> Blob:
        """What training does not change."""

    def record(self, record: Json | None, epochs: Sequence[Epoch]) -> Blob:
        """The record of a run, and its epochs."""

    def read(self, objects: Objects, manifest: Manifest) -> SavedRun[H]:
        """The run that a manifest names, every object checked against its name.

        Raises:
            StoreError: an object is missing or damaged.
        """
