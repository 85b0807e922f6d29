"""Reads the objects of a run. Nothing in a store is trusted: every byte is hashed, and no memory is reserved for a size
that the object does not have.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from diloco.closing import Closing
from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Layout
from diloco.core.memory import new_vector
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import DamagedObjectError, LayoutError, MissingObjectError
from diloco.escaping import MALFORMED
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import Manifest, NamedVersion
from diloco.run.objects import Blob, Readable
from diloco.store.blobs import ObjectHead, hasher_of

NOT_WHOLE = (MissingObjectError, DamagedObjectError)
"""What reading an object raises if it is not there as it was written; the place itself has answered."""

OUTER = "outer."
"""Prefix of the outer state's tensors."""

READERS = 4
"""Fragments that a start reads and hashes in parallel, each by `READERS_OF_AN_OBJECT` threads."""
READERS_OF_AN_OBJECT = 2

PIECE_BYTES = 4 << 20
"""Of a request for a part of a tensor; it fits the processor's cache. A multiple of any element size."""
PIECES_AHEAD = 4

RECORD = "the record of members and tokens"

HEAD_BYTES = 64 << 10
"""Of the first request for an object."""
MOST_HEADER_BYTES = 64 << 20
MOST_RECORD_BYTES = 1 << 30

REQUESTS = 16
"""At once."""


def advice(place: str) -> str:
    """What to do about a damaged store: the end of an error message."""
    return f"`diloco syncer check {place}` says what can still be served."


@dataclass(frozen=True)
class ReadObject:
    """An object, or some tensors of it."""

    name: str
    head: ObjectHead
    tensors: Mapping[str, Tensor]

    @property
    def blob(self) -> Blob:
        """Its content; all tensors were read."""
        parts = (bytes_of(self.tensors[name]) for name in self.head.entries)
        return Blob(self.name.rpartition("-")[2], (self.head.data, *parts))


@dataclass(frozen=True)
class Frozen:
    """What training does not change: as in `SavedRun`."""

    run: str
    run_id: str
    method: Method
    layout: Layout
    source: str
    step: int
    tokens: int
    static: bytes

    def is_of(self, manifest: Manifest) -> bool:
        """Whether it is of the run that the manifest names."""
        mine = self.run, self.run_id, len(self.layout.fragments)
        return mine == (manifest.run, manifest.run_id, len(manifest.fragments))


def require_one_run(frozen: Frozen, manifest: Manifest, place: str) -> None:
    """Raise DamagedObjectError if a manifest names what is frozen of another run."""
    if not frozen.is_of(manifest):
        raise DamagedObjectError(f"the manifest of {place} names objects of two runs; {advice(place)}")


class ObjectReader(Closing):
    """Reads objects of a store; a context manager. Any thread may call any method.

    All methods take the name of an object, and its role for errors (`holds`: "fragment 1, version 3"). They raise
    MissingObjectError or DamagedObjectError, or StoreError where the place does not answer.
    """

    def __init__(self, objects: Readable) -> None:
        self.objects = objects
        self._requests = ThreadPoolExecutor(REQUESTS)

    def close(self) -> None:
        """Cancel the requests that have not begun, and wait for the others."""
        self._requests.shutdown(cancel_futures=True)

    def head(self, name: str, holds: str) -> ObjectHead:
        """The beginning of a safetensors file."""
        with self.checked(name, holds):
            data = bytes(self.objects.get(name, 0, HEAD_BYTES))
            num_bytes = 8 + int.from_bytes(data[:8], "little")
            if len(data) < 8 or num_bytes > MOST_HEADER_BYTES:
                raise ValueError("it has no header")
            if num_bytes > len(data):
                data += bytes(self.objects.get(name, len(data), num_bytes))
            _require_hash(name, data[:num_bytes])
            return ObjectHead.from_bytes(data[:num_bytes])

    def read(self, name: str, head: ObjectHead, holds: str, only: Callable[[str], bool] = lambda _: True) -> ReadObject:
        """A safetensors file, with tensors in memory of their own. `only`: which tensors are read."""
        with self.checked(name, holds), ThreadPoolExecutor(READERS_OF_AN_OBJECT) as readers:
            last = head.num_bytes - 1
            if len(self.objects.get(name, last, last + 2)) != 1:  # before memory is reserved
                raise ValueError(f"its size differs from the {last + 1} bytes that its header states")
            wanted = [key for key in head.entries if only(key)]
            tensors = dict(zip(wanted, readers.map(partial(self._tensor, name, head), wanted), strict=True))
        return ReadObject(name, head, tensors)

    def _tensor(self, name: str, head: ObjectHead, key: str) -> Tensor:
        entry, hasher = head.entries[key], hasher_of(key)
        tensor = new_vector((entry.last - entry.first) // entry.dtype.itemsize, entry.dtype)
        pieces = self._pieces(name, len(head.data), entry.first, entry.last)
        for part in tensor.split(PIECE_BYTES // entry.dtype.itemsize) if tensor.numel() else ():
            view, data = bytes_of(part), next(pieces).result()
            if len(data) != len(view):
                raise ValueError("it is too short")
            view[:] = data
            hasher.update(part)
        if hasher.hex() != entry.hash:
            raise ValueError(f"its {key} does not match the hash in its header")
        return tensor.view(entry.shape)

    def _pieces(self, name: str, begin: int, first: int, last: int) -> Iterator[Future[bytes | memoryview]]:
        """The bytes of a tensor in order; several requests are under way."""
        waiting = deque[Future[bytes | memoryview]]()
        for start in range(first, last, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, last)
            waiting.append(self._requests.submit(self.objects.get, name, begin + start, begin + stop))
            if len(waiting) == PIECES_AHEAD:
                yield waiting.popleft()
        yield from waiting

    # --- by what they hold --------------------------------------------------------------------------------------------

    def frozen(self, name: str, *, static: bool = True) -> Frozen:
        """What training does not change. `static`: with its tensors, else they are empty."""
        holds = "the layout and the frozen parameters"
        found = self.read(name, self.head(name, holds), holds, lambda _: static)
        with self.checked(name, holds):
            plain = dict(found.head.described)
            plain |= {"method": Method.from_dict(plain["method"]), "layout": Layout.from_dict(plain["layout"])}
            numbers, texts = [plain[key] for key in ("step", "tokens")], [plain[key] for key in ("run", "source")]
            if not all(type(each) is int and each >= 0 for each in numbers) or not all(type(it) is str for it in texts):
                raise TypeError("a value has another type")
            return Frozen(**plain, static=bytes(bytes_of(found.tensors["static"])) if static else b"")

    def version(
        self, named: NamedVersion, fragment: int, frozen: Frozen, only: Callable[[str], bool] = lambda _: True
    ) -> tuple[GlobalFragment, Update]:  # fmt: skip
        """A version of a fragment, and the update that led to it. `only`: as in `read`; Θ is read in any case."""
        holds = f"fragment {fragment}, version {named.version}"
        head = self.head(named.held, holds)
        with self.checked(named.held, holds):
            update, num_elements = Update.from_dict(head.described["update"]), frozen.layout.fragments[fragment].numel
            found = (head.described["run_id"], update.fragment, update.version, head.entries["theta"].shape)
            if found != (frozen.run_id, fragment, named.version, (num_elements,)):
                raise ValueError("it is another object")
            if head.entries["theta"].hash != update.digest:
                raise ValueError("its digest is not the published one")
        it = self.read(named.held, head, holds, lambda key: key == "theta" or only(key))
        outer = {key.removeprefix(OUTER): value for key, value in it.tensors.items() if key.startswith(OUTER)}
        theta, residual = it.tensors["theta"], it.tensors.get("residual")
        return GlobalFragment(fragment, named.version, theta, outer, residual, update.digest), update

    def update(self, name: str, fragment: int, version: int) -> tuple[Update, Tensor]:
        """An encoded update and its payload, uint8."""
        holds = f"the update of fragment {fragment} to version {version}"
        head = self.head(name, holds)
        with self.checked(name, holds):
            update = Update.from_dict(head.described["update"])
            if (update.fragment, update.version) != (fragment, version) or set(head.entries) != {"payload"}:
                raise ValueError("it is another object")
        return update, self.read(name, head, holds).tensors["payload"]

    def record(self, name: str, num_fragments: int) -> tuple[dict[str, Any] | None, tuple[Epoch, ...]]:
        """The record of a run with so many fragments, and its epochs."""
        with self.checked(name, RECORD):
            data = self.objects.get(name, 0, MOST_RECORD_BYTES)
            _require_hash(name, data)
            plain = json.loads(bytes(data))
            epochs = tuple(Epoch(int(number), tuple(map(int, versions))) for number, versions in plain["epochs"])
            if {len(each.versions) for each in epochs} != {num_fragments}:
                raise ValueError("its epochs are of another model")
            return plain["record"], epochs

    def pack(self, name: str) -> Blob:
        """Groups of completions (`protocol.groups`)."""
        with self.checked(name, "groups of completions"):
            data = self.objects.get(name)
            _require_hash(name, data)
        return Blob(name.rpartition("-")[2], (data,))

    @contextmanager
    def checked(self, name: str, holds: str) -> Iterator[None]:
        """Raise DamagedObjectError where what is inside fails because of an object's content."""
        what = f"object {name} of {self.objects.name} ({holds})"
        try:
            yield
        except MissingObjectError as error:
            raise MissingObjectError(f"{what} is missing; {advice(self.objects.name)}") from error
        except (LayoutError, *MALFORMED) as error:
            why = str(error) if type(error) is ValueError else repr(error)
            raise DamagedObjectError(f"{what} is damaged ({why}); {advice(self.objects.name)}") from error


def _require_hash(name: str, data: bytes | memoryview) -> None:
    if hashlib.sha256(data).hexdigest() != name.rpartition("-")[2]:
        raise ValueError("its content does not match the hash in its name")
