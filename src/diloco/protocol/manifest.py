"""The manifest of a run: the one object of a store that is replaced. It names all others.

`Publisher` (protocol/publishing.py) decides which syncer may replace it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from diloco.errors import DamagedObjectError, StoreError

FORMAT = 13
"""Of a store. Formats up to 10 were those of a database, before the first release."""

MOST_BYTES = 256 << 10
"""Of a manifest."""

MOST_NUMBER = 10**18
"""Of an epoch, a serial, a version or an object; 64-bit integers have room for what follows."""

MOST_FRAGMENTS = 150
"""Of a run."""

MOST_VERSIONS = 300
"""Of all fragments. They take, each with its update, a quarter of those bytes, and packs of groups most others."""

_NAME = re.compile(r"[0-9]{1,18}/[0-9]{1,18}-[0-9a-f]{64}")

_MALFORMED = ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError
"""Errors that other JSON than a manifest's can raise."""

KEPT_VERSIONS = 2
"""Versions of each fragment that a manifest names, at least: the newest ones."""


@dataclass(frozen=True)
class NamedVersion:
    """A version of a fragment.

    Attributes:
        held: the object that holds Θ, the outer state and the residual.
        update: the object that holds the encoded update to this version; None: the whole fragment is the update.
    """

    version: int
    held: str
    update: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The contents of a store at one moment.

    Attributes:
        run: the run's name.
        run_id: as in `protocol.lineage`; "": the run has no model yet.
        epoch: of the newest claim.
        boot: of the process that claimed it; 0: it has released the store.
        serial: ascending with every swap, so that no manifest's bytes come twice.
        address: of the syncer that claimed it, for people.
        frozen: the object with the layout, the method, and what training does not change; None: there is no model.
        record: the object with the record and the epochs of the run; None: as `frozen`.
        fragments: of each fragment the newest versions, newest first.
        origin: of a copy: epoch and serial of the manifest that was copied.
        copied_at: of a copy: Unix time in seconds.
        is_over: the run has ended, with these versions; a learner that joins makes it go on.
        keep: versions of each fragment that are named, at most.
        packs: objects with groups of reinforcement learning, each with its number (`protocol.groups`).
    """

    run: str
    run_id: str = ""
    epoch: int = 0
    boot: int = 0
    serial: int = 0
    address: str = ""
    frozen: str | None = None
    record: str | None = None
    fragments: tuple[tuple[NamedVersion, ...], ...] = ()
    origin: tuple[int, int] | None = None
    copied_at: float | None = None
    is_over: bool = False
    keep: int = KEPT_VERSIONS
    packs: tuple[tuple[int, str], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All objects that it names."""
        return frozenset(self._names())

    def _names(self) -> Iterator[str]:
        yield from (each for each in (self.frozen, self.record) if each is not None)
        yield from (name for _, name in self.packs)
        for version in (version for versions in self.fragments for version in versions):
            yield version.held
            if version.update is not None:
                yield version.update

    @property
    def versions(self) -> tuple[int, ...]:
        """The newest version of each fragment."""
        return tuple(versions[0].version for versions in self.fragments)

    def with_versions(self, published: Mapping[int, NamedVersion]) -> Self:
        """The manifest after these versions of fragments, by index, were published."""
        fragments = tuple(
            (*((published[index],) if index in published else ()), *versions)[: self.keep]
            for index, versions in enumerate(self.fragments)
        )
        return replace(self, fragments=fragments)

    def with_packs(self, new: Mapping[int, str], live: Collection[int], keep: int) -> Self:
        """The manifest with those of its packs, and of the new ones, that are live. `keep`: versions that groups need;
        with many fragments fewer are kept."""
        packs = tuple(each for each in {**dict(self.packs), **new}.items() if each[0] in live)
        most = MOST_VERSIONS // max(1, len(self.fragments))
        return replace(self, packs=packs, keep=max(KEPT_VERSIONS, min(keep, most)))

    def to_bytes(self) -> bytes:
        """As JSON, with a hash of all fields.

        Raises:
            StoreError: the run has too many fragments to be named in one manifest.
        """
        plain = {**asdict(self), "format": FORMAT}
        plain["fragments"] = [[[it.version, it.held, it.update] for it in versions] for versions in self.fragments]
        data = _text({**plain, "sha256": _hash_of(plain)})
        if len(self.fragments) > MOST_FRAGMENTS or len(data) > MOST_BYTES:
            raise StoreError(
                f"the versions of {len(self.fragments)} fragments do not fit in a manifest of {MOST_BYTES} bytes; cut "
                f"the model into at most {MOST_FRAGMENTS} fragments."
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes, place: str) -> Self:
        """The manifest that `to_bytes` has written.

        Arguments:
            place: of the store, for the error.

        Raises:
            DamagedObjectError: it is damaged. StoreError: it has another format.
        """
        try:
            plain = json.loads(data)
            if plain.pop("sha256") != _hash_of(plain):
                raise ValueError("its hash does not match")
            found = plain.pop("format")
            if type(found) is int and found != FORMAT:
                advice = "upgrade diloco" if found > FORMAT else "use the version of diloco that wrote it"
                raise StoreError(f"{place} has format {found} and this version reads {FORMAT}; {advice} to open it.")
            fragments = tuple(
                tuple(NamedVersion(int(version), held, update) for version, held, update in versions)
                for versions in plain["fragments"]
            )
            epoch, serial = plain["origin"] or (0, 0)
            origin = (int(epoch), int(serial)) if plain["origin"] else None
            packs = tuple((number, name) for number, name in plain["packs"])
            manifest = cls(**{**plain, "fragments": fragments, "origin": origin, "packs": packs})
            if type(found) is not int or not manifest._is_plausible:
                raise ValueError("a field has an invalid value")
        except _MALFORMED as error:
            raise DamagedObjectError(
                f"the manifest of {place} is damaged ({error!r}); `diloco syncer check {place}` says what can still be "
                "served."
            ) from error
        return manifest

    @property
    def _is_plausible(self) -> bool:
        versions = (it.version for each in self.fragments for it in each)
        numbers = (self.epoch, self.serial, self.keep, *versions, *(number for number, _ in self.packs))
        has_model = (self.run_id != "", self.frozen is not None, self.record is not None, bool(self.fragments))
        return (
            all(type(each) is int and 0 <= each < MOST_NUMBER for each in numbers)
            and type(self.boot) is int
            and 0 <= self.boot <= 2**63
            and all(type(each) is str and each.isprintable() for each in (self.run, self.run_id, self.address))
            and all(is_object_name(each) for each in self.names)
            and type(self.copied_at) in (float, int, type(None))
            and all(type(each) is bool for each in (self.is_over,))  # whatever the file says
            and len(set(has_model)) == 1
            and all(versions and len(versions) <= self.keep and _descends(versions) for versions in self.fragments)
        )


def _text(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def _hash_of(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(plain)).hexdigest()


def _descends(versions: tuple[NamedVersion, ...]) -> bool:
    numbers = [each.version for each in versions]
    return numbers == sorted(set(numbers), reverse=True)


def is_object_name(name: Any) -> bool:
    """Whether this is the name of an object, `<epoch>/<counter>-<hash>`: two numbers, and 64 hexadecimal digits."""
    return type(name) is str and _NAME.fullmatch(name) is not None


def epoch_of(name: str) -> int:
    """The epoch in which an object was written."""
    return int(name.partition("/")[0])
