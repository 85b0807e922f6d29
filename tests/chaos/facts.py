"""Evidence of a chaos run as plain values: what was done to it (`Record`), and what its processes wrote (`Facts`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from tests.chaos.leaks import Curve
from tests.chaos.plan import ANSWERS, ChaosPlan, Fault
from tests.chaos.processes import End

from diloco.errors import DilocoError
from diloco.event_log import read_events
from diloco.events import Adopted, Event, Gap, Merged, Published, SyncerStarted
from diloco.protocol.accounting import Account
from diloco.protocol.lineage import Epoch
from diloco.store.objects import open_store, read_manifest
from diloco.store.reading import ObjectReader


@dataclass(frozen=True)
class Injected:
    """A fault as it happened. Unix times in seconds; `hit`: there was something to hit."""

    fault: Fault
    began_at: float
    ended_at: float
    hit: bool

    def overlaps(self, since: float, until: float) -> bool:
        """Whether it was active between these times."""
        return self.began_at <= until and self.ended_at >= since


@dataclass(frozen=True)
class Record:
    """A run as the process that drove it has seen it.

    Attributes:
        lost_s: deadline of a silent learner.
        calm, troubled: Unix times in seconds, from and to.
        ends: processes that ended and were started again, by what they had been sent or by themselves.
        settled: after the last fault all learners have merged again.
        status: of the run, after its learners had left.
        exit_codes: of the processes that were ended when the run was over.
        state: what `diloco syncer check` says of the state at the end.
        replays: what `diloco replay` says of each state that was served, the oldest first.
        state_dirs: as `World.state_dirs`.
        stale_dirs: older copies that were served.
        failures: what stopped the run before its end.
        curves: of a soak, what its processes and files held.
    """

    plan: ChaosPlan
    lost_s: float
    calm: tuple[float, float]
    troubled: tuple[float, float]
    injected: tuple[Injected, ...]
    ends: tuple[End, ...]
    settled: bool
    status: dict[str, Any]
    exit_codes: dict[str, int]
    state: dict[str, Any]
    replays: tuple[dict[str, Any], ...]
    state_dirs: tuple[Path, ...]
    stale_dirs: tuple[Path, ...]
    failures: tuple[str, ...]
    curves: Mapping[str, Curve]

    def hits(self, *kinds: str) -> list[Injected]:
        """The faults that have hit something; of these kinds, where any are named."""
        return [each for each in self.injected if each.hit and (not kinds or each.fault.kind in kinds)]


@dataclass(frozen=True)
class StoredVersion:
    """A version that was durable. `digest`: "" if its syncer was ended before it could say so."""

    fragment: int
    version: int
    digest: str
    tokens: int


@dataclass(frozen=True)
class Facts:
    """Files of a run, as values.

    Attributes:
        syncer: all events of the syncer.
        learners: of each learner.
        stores: the durable versions, a sequence for each stretch after which the run went back; the newest at the end.
        stale: the events of each older copy of the state, since it was put in the state's place.
        refusals: how often learners have said that they do not follow an older or a second copy.
        epochs: the run's, each with the versions that it began with.
        trained: tokens that each learner has trained, as the syncer has counted them.
        tracebacks: of each process, the last line of each exception that its log shows.
        answers: of a soak, how often each viewer was answered, and what it met instead.
    """

    syncer: Sequence[Event]
    learners: dict[str, Sequence[Event]]
    stores: Sequence[Sequence[StoredVersion]]
    tracebacks: dict[str, list[str]] = field(default_factory=dict)
    epochs: Sequence[Epoch] = ()
    stale: Sequence[Sequence[Event]] = ()
    refusals: int = 0
    trained: Mapping[str, int] = field(default_factory=dict)
    answers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def history(self) -> list[StoredVersion]:
        """All versions of all stretches."""
        return [row for store in self.stores for row in store]

    @property
    def line(self) -> list[StoredVersion]:
        """The versions that led to the end: each stretch begins with the newest versions that it has of the one before,
        which has those before them."""
        rows: dict[int, list[StoredVersion]] = {}
        for store in reversed(self.stores):
            first = {fragment: min(row.version for row in found) for fragment, found in rows.items()}
            for row in store:
                if row.version < first.get(row.fragment, row.version + 1):
                    rows.setdefault(row.fragment, []).append(row)
        return [row for found in rows.values() for row in found]

    @property
    def num_missing(self) -> int:
        """Events of the syncer that a full disk has refused."""
        return sum(event.missing for event in self.syncer if isinstance(event, Gap))

    @property
    def holdings(self) -> list[tuple[str, Adopted]]:
        """The versions that learners have reported to hold."""
        return [
            (name, event) for name, events in self.learners.items() for event in events if isinstance(event, Adopted)
        ]


def read_facts(record: Record) -> Facts:
    """Read everything. Raises StoreError: an event file cannot be read."""
    directory, dirs = record.plan.directory, record.state_dirs
    own = [directory / name for name in record.plan.names]
    twins = [path.parent for path in sorted((directory / "twins").glob("*/*/events.jsonl"))]
    syncer = sorted(chain.from_iterable(map(_events, dirs)), key=lambda event: event.t)
    accounts, epochs = _record(dirs[-1])
    logs = sorted((directory / "logs").glob("*.log"))
    answers = directory / ANSWERS
    return Facts(
        syncer,
        {path.relative_to(directory).as_posix(): _events(path) for path in (*own, *twins)},
        stretches(syncer),
        {path.stem: found for path in logs if (found := _tracebacks(path))},
        epochs,
        [_events(path) for path in record.stale_dirs],
        sum(_refusals(path) for path in logs),
        accounts,
        json.loads(answers.read_text()) if answers.exists() else {},
    )


def _events(directory: Path) -> list[Event]:
    path = directory / "events.jsonl"
    return read_events(path) if path.exists() else []


def stretches(events: Iterable[Event]) -> list[list[StoredVersion]]:
    """The durable versions by the events of a syncer. One that was durable when the syncer was killed, but not
    published, is named by the next start."""
    found: list[list[StoredVersion]] = [[]]
    newest = dict[int, int]()  # by fragment
    known = dict[tuple[int, int], StoredVersion]()
    tokens = dict[tuple[int, int], int]()  # of merges

    def add(fragment: int, version: int, digest: str | None) -> None:
        key, earlier = (fragment, version), known.get((fragment, version))
        if digest is None and earlier is not None:
            found[-1].append(earlier)
        else:
            known[key] = StoredVersion(fragment, version, digest or "", tokens.get(key, 0))
            found[-1].append(known[key])
        newest[fragment] = version

    for event in events:
        match event:
            case Merged(fragment=fragment, version=version, tokens=of_each):
                tokens[fragment, version] = sum(of_each)
            case Published(fragment=fragment, version=version, digest=digest):
                if fragment not in newest:
                    add(fragment, 0, None)
                add(fragment, version, digest)
            case SyncerStarted(versions=versions):
                goes_back = any(version < newest.get(fragment, 0) for fragment, version in enumerate(versions))
                if goes_back:
                    found.append([])
                for fragment, version in enumerate(versions):
                    if goes_back or version > newest.get(fragment, -1):
                        add(fragment, version, None)
    return found


def _record(state_dir: Path) -> tuple[dict[str, int], tuple[Epoch, ...]]:
    """What each learner has trained, and the epochs; both empty where the state is damaged."""
    try:
        objects = open_store(state_dir)
        manifest = read_manifest(objects)
        with ObjectReader(objects) as reader:
            record, epochs = reader.record(str(manifest.record), len(manifest.fragments))
    except DilocoError:
        return {}, ()
    accounts = {name: Account.from_dict(each) for name, each in ({} if record is None else record["accounts"]).items()}
    return {name: account.ledgers[0].trained for name, account in accounts.items()}, epochs


def _refusals(path: Path) -> int:
    text = path.read_text(encoding="utf-8", errors="replace")
    return text.count("older copy of its state") + text.count("started on copies of the run's state")


def _tracebacks(path: Path) -> list[str]:
    """The last line of each traceback, after those that are indented."""
    found, inside = [], False
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line.startswith(" "):
            found.append(line)
            inside = False
    return found
