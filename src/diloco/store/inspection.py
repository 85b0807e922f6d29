"""The whole objects of a store, and what a syncer could serve. Changes nothing, also while a syncer serves the store.

Every object that the manifest names is read and hashed. Only if one of them is not whole, or the manifest itself, the
other objects of the run are tried, newest first: by the epoch and counter in their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from diloco.core.update import Update
from diloco.errors import ConfigError, DamagedObjectError, DilocoError, MissingObjectError, StoreError
from diloco.escaping import MALFORMED
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import KEPT_VERSIONS, Manifest, NamedVersion, epoch_of
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore
from diloco.run.objects import Found, Objects
from diloco.store.directory import MANIFEST
from diloco.store.reading import NOT_WHOLE, Frozen, ObjectReader

_INVALID = (DilocoError, *MALFORMED)
"""Errors that invalid values in a record raise."""

_TRIES = 10
"""An inspection is repeated if the manifest has changed meanwhile: what it named may have been deleted."""


@dataclass(frozen=True)
class Problem:
    """An object that is missing, damaged or unknown. `name`: of the object; or "manifest.json"."""

    name: str
    what: str


@dataclass(frozen=True)
class FoundFragment:
    """The versions of a fragment.

    Attributes:
        fragment: its index.
        published: the newest version by the manifest, or else by the names of objects; None: there is neither.
        whole: whole versions, newest first, at most as many as a manifest names; the first one would be served.
        lost_tokens: trained tokens in the versions after that, as far as their objects say.
    """

    fragment: int
    published: int | None
    whole: tuple[NamedVersion, ...]
    lost_tokens: int

    @property
    def serves(self) -> int | None:
        """The version that would be served; None: none is whole."""
        return self.whole[0].version if self.whole else None

    @property
    def lost(self) -> tuple[int, ...]:
        """The published versions after it."""
        first = 0 if self.serves is None else self.serves + 1
        return () if self.published is None else tuple(range(first, self.published + 1))


@dataclass
class StoreState:
    """The result of an inspection.

    Attributes:
        place: as the user gave it.
        read: the manifest as it was read; None: there is none.
        manifest: None: it is missing or damaged.
        frozen: what training does not change, and its object; None: it is not whole.
        record: the newest whole record that can be restored; None: there is none.
        epochs: beside it.
        has_record: it is the manifest's.
        newest_epoch: among the names of objects.
        starts: a syncer can serve the store, at the newest version of each fragment.
        problems: what a repair would mend, and what is lost.
        notes: other findings.
    """

    place: str
    read: Found | None = None
    manifest: Manifest | None = None
    frozen: Frozen | None = None
    frozen_name: str = ""
    record: Mapping[str, Any] | None = None
    epochs: tuple[Epoch, ...] = ()
    has_record: bool = False
    newest_epoch: int = 0
    fragments: tuple[FoundFragment, ...] = ()
    starts: bool = False
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    @property
    def can_be_repaired(self) -> bool:
        """Whether the whole objects suffice to continue the run."""
        return self.starts or (self.frozen is not None and all(each.whole for each in self.fragments))

    @property
    def run(self) -> str | None:
        """The run's name; None: it is not known."""
        return self.manifest.run if self.manifest is not None else None if self.frozen is None else self.frozen.run

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "place": self.place, "run": self.run, "starts": self.starts, "can_be_repaired": self.can_be_repaired,
            "manifest": self.manifest is not None, "frozen": self.frozen is not None, "record": self.has_record,
            "fragments": [
                {
                    "fragment": each.fragment, "published": each.published, "serves": each.serves,
                    "lost": list(each.lost), "lost_tokens": each.lost_tokens,
                }
                for each in self.fragments
            ],
            "problems": [vars(each) for each in self.problems], "notes": [vars(each) for each in self.notes],
        }  # fmt: skip


def check(objects: Objects) -> StoreState:
    """Inspect a store.

    Raises:
        ConfigError: there is none. StoreError: it has another format, or cannot be read.
    """
    for _ in range(_TRIES):
        found = _Inspection(objects).found
        if not found.problems or objects.manifest() == found.read:
            return found
    raise StoreError(f"the manifest of {objects.name} changes faster than its objects can be read; try again.")


@dataclass(frozen=True)
class _Header:
    """The description of a version in its object, which is not verified."""

    name: str
    run_id: str
    fragment: int
    version: int
    tokens: int


class _Inspection:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._names = sorted(objects.list(), key=order_of, reverse=True)
        found = self.found = StoreState(objects.name, objects.manifest())
        if found.read is None and not self._names:
            raise ConfigError(f"there is no run in {objects.name}; check the path or URL.")
        with ObjectReader(objects) as self._reader:
            self._look_at_manifest()
            manifest = found.manifest
            found.newest_epoch = max(0 if manifest is None else manifest.epoch, *map(epoch_of, self._names), 0)
            if manifest is not None and not manifest.fragments:
                found.starts = True
                return
            for name in () if manifest is None else (name for _, name in manifest.packs):
                try:
                    self._reader.pack(name)
                except NOT_WHOLE as error:  # a run goes on without it
                    found.notes.append(Problem(name, f"{_how(error)}: groups of completions, which end as refused"))
            self._look_at_frozen()
            if found.frozen is not None:
                found.fragments = tuple(map(self._fragment, range(len(found.frozen.layout.fragments))))
                self._look_at_record()
        is_as_published = found.frozen is not None and all(it.whole and not it.lost for it in found.fragments)
        is_named = manifest is not None and found.frozen_name == manifest.frozen
        found.starts = is_as_published and is_named and found.has_record

    def _problem(self, name: str, what: str) -> None:
        self.found.problems.append(Problem(name, what))

    def _look_at_manifest(self) -> None:
        if self.found.read is None:
            self._problem(MANIFEST, "is missing")
            return
        try:
            self.found.manifest = Manifest.from_bytes(self.found.read.data, self._objects.name)
        except DamagedObjectError:
            self._problem(MANIFEST, "is damaged")

    def _look_at_frozen(self) -> None:
        manifest = self.found.manifest
        named = None if manifest is None else manifest.frozen
        for name in (*([] if named is None else [named]), *self._others):
            try:
                frozen = self._reader.frozen(name)
            except NOT_WHOLE as error:
                if name == named:
                    self._problem(name, f"{_how(error)}: the layout, and frozen parameters and buffers")
                continue
            if manifest is None or frozen.is_of(manifest):
                self.found.frozen, self.found.frozen_name = frozen, name
                return

    # --- versions -----------------------------------------------------------------------------------------------------

    @cached_property
    def _others(self) -> list[str]:
        """The objects that the manifest does not name, newest first."""
        named = frozenset[str]() if self.found.manifest is None else self.found.manifest.names
        return [name for name in self._names if name not in named]

    @cached_property
    def _other_versions(self) -> list[_Header]:
        """The versions among them, newest first."""
        return [found for name in self._others if (found := self._header(name)) is not None]

    def _header(self, name: str) -> _Header | None:
        """The description of a version; None: the object holds something else, or its header is damaged."""
        with suppress(*NOT_WHOLE, *MALFORMED):
            head = self._reader.head(name, "a version")
            if "theta" in head.entries:
                update, tokens = Update.from_dict(head.described["update"]), int(head.described["tokens"])
                return _Header(name, str(head.described["run_id"]), update.fragment, update.version, tokens)
        return None

    def _fragment(self, index: int) -> FoundFragment:
        assert self.found.frozen is not None
        named = () if self.found.manifest is None else self.found.manifest.fragments[index]
        found = (self._whole(index, each, self.found.problems) for each in named)
        whole = [each for each in found if each is not None]
        published = named[0].version if named else None
        if whole and whole[0].version == published:
            return FoundFragment(index, published, tuple(whole), 0)
        of_run = (self.found.frozen.run_id, index)
        others = [each for each in self._other_versions if (each.run_id, each.fragment) == of_run]
        for each in others:
            is_older = all(each.version < it.version for it in whole)
            # by an intact manifest, a later version was never published
            if len(whole) < KEPT_VERSIONS and is_older and (published is None or each.version < published):
                version = self._whole(index, NamedVersion(each.version, each.name), self.found.notes)
                whole += [] if version is None else [version]
        if published is None:
            published = max((each.version for each in others), default=None)
        serves = whole[0].version if whole else -1
        headers = [*others, *(header for it in named if (header := self._header(it.held)) is not None)]
        tokens = {it.version: it.tokens for it in headers if serves < it.version <= (published or 0)}
        return FoundFragment(index, published, tuple(whole), sum(tokens.values()))

    def _whole(self, index: int, named: NamedVersion, findings: list[Problem]) -> NamedVersion | None:
        """The version, if it is whole, without its update if that is not; both are added to the findings."""
        assert self.found.frozen is not None
        try:
            self._reader.version(named, index, self.found.frozen)
        except NOT_WHOLE as error:
            findings.append(Problem(named.held, f"{_how(error)}: version {named.version} of fragment {index}"))
            return None
        try:
            if named.update is not None:
                self._reader.update(named.update, index, named.version)
        except NOT_WHOLE as error:
            update = f"the update of fragment {index} to version {named.version}"
            findings.append(Problem(str(named.update), f"{_how(error)}: {update}"))
            return NamedVersion(named.version, named.held)
        return named

    # --- the record ---------------------------------------------------------------------------------------------------

    def _look_at_record(self) -> None:
        """Find the newest record that can be restored, up to the manifest's."""
        manifest = self.found.manifest
        named = None if manifest is None else manifest.record
        if named is not None and self._takes_record(named):
            self.found.has_record = True
            return
        if named is not None:
            self._problem(named, "is not whole: the record of members and tokens")
        for name in self._others:
            if (named is None or order_of(name) < order_of(named)) and self._is_record(name):
                if self._takes_record(name):
                    return

    def _is_record(self, name: str) -> bool:
        """Whether an object may be a record: a safetensors file does not begin like JSON."""
        try:
            return bytes(self._objects.get(name, 0, 1)) == b"{"
        except MissingObjectError:
            return False

    def _takes_record(self, name: str) -> bool:
        frozen, versions = self.found.frozen, [each.serves or 0 for each in self.found.fragments]
        assert frozen is not None
        try:
            record, epochs = self._reader.record(name, len(versions))
        except NOT_WHOLE:
            return False
        try:
            core = SyncerCore(Rules.of(frozen.method, len(versions)), versions, step=frozen.step)
            if record is not None:
                core.restore(0.0, record)
        except _INVALID:
            return False
        self.found.record, self.found.epochs = record, epochs
        return True


def order_of(name: str) -> tuple[int, int]:
    """The epoch and the counter in an object's name: objects were written in this order."""
    epoch, _, rest = name.partition("/")
    return int(epoch), int(rest.partition("-")[0])


def _how(error: StoreError) -> str:
    return "is missing" if isinstance(error, MissingObjectError) else "is damaged"
