"""A store in memory: a place with objects and a manifest (`run.objects.Objects`), whose objects are copies of values
instead of bytes, and which does as a test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

from tests.chaos.versions import require

from diloco.core.update import Update
from diloco.errors import MissingObjectError, SwapRefusedError
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import Manifest, is_object_name
from diloco.run.objects import Blob, Found, Objects
from diloco.run.ports import InitialModel, Json, RunMethod, SavedRun

T = TypeVar("T")

POINTS = ("put", "after put", "swap", "after swap", "delete", "after delete")
"""The steps of requests: each before it has an effect, and after."""

Reach = Callable[[str, Callable[[], Any]], Any]
"""Has a request of a kind ("put", "swap", "get", "read", "list", "delete") take effect, and returns its answer; or
raises StoreError, with or without the effect."""


def at_once(what: str, request: Callable[[], T]) -> T:
    """As `Reach`: every request takes effect."""
    return request()


class Place:
    """What outlives all processes.

    Attributes:
        objects: by name.
        found: the manifest; None: there is none.
        history: all manifests so far.
        swapped: called with each manifest and the one before, as it takes its place.
    """

    def __init__(self, swapped: Callable[[Manifest | None, Manifest], None] = lambda _, __: None) -> None:
        self.objects: dict[str, Any] = {}
        self.found: Found | None = None
        self.history: list[Manifest] = []
        self.swapped = swapped
        self._tokens = set[str]()

    @property
    def manifest(self) -> Manifest | None:
        """The one that is there."""
        return self.history[-1] if self.history else None

    def put(self, name: str, value: Any) -> None:
        """Store an object. A name is never put with other contents, or it is without meaning."""
        require(is_object_name(name), f"an object is called {name!r}")
        self.objects.setdefault(name, value)

    def get(self, name: str) -> Any:
        """An object, as it was put. Raises MissingObjectError."""
        if name not in self.objects:
            raise MissingObjectError(f"there is no object {name}.")
        return self.objects[name]

    def swap(self, data: bytes, token: str | None) -> str:
        """Replace the manifest. Raises SwapRefusedError. A token is the hash of the content, as an S3 ETag is."""
        if token != (None if self.found is None else self.found.token):
            raise SwapRefusedError("another manifest is there.")
        before, after = self.manifest, Manifest.from_bytes(data, "the place")
        new = blake2b(data, digest_size=8).hexdigest()
        require(new not in self._tokens, f"the manifest with serial {after.serial} was there before")
        missing = after.names - self.objects.keys()
        require(not missing, f"the manifest with serial {after.serial} names {sorted(missing)}, which are not there")
        self._tokens.add(new)
        self.found = Found(data, new)
        self.history.append(after)
        self.swapped(before, after)
        return new

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, none of which is named."""
        named = set(names) & (frozenset() if self.manifest is None else self.manifest.names)
        require(not named, f"{sorted(named)} are deleted, and named by the manifest")
        for name in names:
            self.objects.pop(name, None)


class SimulatedObjects(Objects):
    """One process's way to a place."""

    name = "the place"

    def __init__(self, place: Place, reach: Reach = at_once, shortest_swap_s: float = 0.0) -> None:
        self.place, self._reach, self.shortest_swap_s = place, reach, shortest_swap_s

    def put(self, name: str, parts: Sequence[Any]) -> None:
        value = parts[0] if len(parts) == 1 else b"".join(parts)  # a pack of groups
        self._reach("put", lambda: self.place.put(name, value))

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        return self._reach("get", lambda: self.place.get(name))

    def list(self) -> list[str]:
        found: list[str] = self._reach("list", lambda: [*self.place.objects])
        return found

    def delete(self, names: Sequence[str]) -> None:
        self._reach("delete", lambda: self.place.delete(names))

    def manifest(self) -> Found | None:
        found: Found | None = self._reach("read", lambda: self.place.found)
        return found

    def swap(self, data: bytes, token: str | None) -> str:
        new: str = self._reach("swap", lambda: self.place.swap(data, token))
        return new


class CopyFormat:
    """Objects that are copies of values (`run.objects.ObjectFormat`).

    Arguments:
        copy: of a fragment.
    """

    def __init__(self, copy: Callable[[Any], Any] = deepcopy) -> None:
        self._copy = copy

    def version(self, run_id: str, held: Any, update: Update, tokens: int) -> Blob:
        return _blob(str((run_id, held.version, held.digest, update)), (self._copy(held), update))

    def update(self, run_id: str, update: Update, payload: Any) -> Blob:
        return _blob(str((run_id, update)), deepcopy(payload))

    def frozen(self, run: str, method: RunMethod, model: InitialModel[Any]) -> Blob:
        return _blob(str((run, model.run_id, model.source)), (run, method, replace(model, fragments=())))

    def record(self, record: Json | None, epochs: Sequence[Epoch]) -> Blob:
        """TypeError where the record is not plain values."""
        text = json.dumps([record, [[each.number, each.versions] for each in epochs]])
        return _blob(text, text)

    def read(self, objects: Objects, manifest: Manifest) -> SavedRun[Any]:
        """As `run.objects.ObjectFormat`."""

        def get(name: str | None) -> Any:
            assert name is not None
            return objects.get(name)

        run, method, model = get(manifest.frozen)
        record, epochs = self._record_of(get(manifest.record))
        newest = [get(versions[0].held) for versions in manifest.fragments]
        return SavedRun(
            run, method, model.layout, tuple(self._copy(held) for held, _ in newest),
            tuple(update.contributors for _, update in newest), model.static, model.source, model.step, model.tokens,
            model.run_id, tuple(Epoch(number, tuple(versions)) for number, versions in epochs), record,
        )  # fmt: skip

    def _record_of(self, value: Any) -> Any:
        return json.loads(value)


def _blob(identity: str, value: Any) -> Blob:
    return Blob(blake2b(identity.encode(), digest_size=32).hexdigest(), (value,))
