"""Invariants of a chaos run's versions and epochs, and of what learners held of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.facts import Facts, Record
from tests.chaos.plan import GOES_BACK
from tests.chaos.versions import BrokenInvariantError, Versions

from diloco.events import Contributed, Merged, Published, SyncerStarted


@dataclass(frozen=True)
class WentBack:
    """A syncer began with an older version of a fragment than was published. `fault`: the kind that had done it; "":
    none had."""

    fault: str
    fragment: int
    published: int
    version: int


def went_back(record: Record, facts: Facts) -> Iterator[WentBack]:
    """All starts from older versions."""
    excuses = [(each.began_at, each.fault.kind) for each in record.hits(*GOES_BACK)]
    shown: dict[int, int] = {}
    before = 0.0
    for event in facts.syncer:
        match event:
            case SyncerStarted(versions=versions, t=at):
                kinds = [kind for began_at, kind in excuses if before <= began_at <= at]
                for fragment, version in enumerate(versions):
                    if version < shown.get(fragment, 0):
                        yield WentBack(kinds[0] if kinds else "", fragment, shown[fragment], version)
                shown, before = dict(enumerate(versions)), at
            case Published(fragment=fragment, version=version):
                shown[fragment] = version


def lost_versions(record: Record, facts: Facts) -> Iterator[str]:
    """A syncer starts with the newest version that was published, but after 'damage state' and 'restore'."""
    for each in went_back(record, facts):
        if not each.fault:
            yield f"version {each.published} of fragment {each.fragment} is lost: a syncer began at {each.version}"


def repeated_versions(record: Record, facts: Facts) -> Iterator[str]:
    """Between two starts each version of a fragment is published once, in order."""
    shown: dict[int, int] = {}
    for event in facts.syncer:
        match event:
            case SyncerStarted(versions=versions):
                shown = dict(enumerate(versions))
            case Published(fragment=fragment, version=version):
                if version <= shown.get(fragment, 0):
                    yield f"version {version} of fragment {fragment} was published after {shown[fragment]}"
                shown[fragment] = version


def started_from(facts: Facts) -> set[tuple[int, int]]:
    """The fragments and versions that syncers began with: those that a kill kept from being logged as published."""
    starts = [event.versions for event in facts.syncer if isinstance(event, SyncerStarted)]
    return {(fragment, version) for versions in starts for fragment, version in enumerate(versions)}


def foreign_holdings(record: Record, facts: Facts) -> Iterator[str]:
    """The digest of each fragment that any learner has reported is one that a syncer had at that version. Of a version
    whose digest no event says (the initial one; one that only a start names; where a disk was full), all hold the
    same."""
    versions, only_started = Versions(), started_from(facts)
    for row in facts.history:
        if row.digest:
            versions.ever[row.fragment, row.version].add(row.digest)
    for event in facts.syncer:
        if isinstance(event, Published):
            versions.ever[event.fragment, event.version].add(event.digest)
    for name, event in facts.holdings:
        known = versions.ever[event.fragment, event.version]
        is_unsaid = event.version == 0 or (event.fragment, event.version) in only_started or facts.num_missing > 0
        if not known and is_unsaid:
            known.add(event.digest)
        try:
            versions.held(name, event.fragment, event.version, event.digest)
        except BrokenInvariantError as error:
            yield str(error)


def broken_chain(record: Record, facts: Facts) -> Iterator[str]:
    """The history at the end has every version from the first on once, but for what a full disk has kept from the
    events."""
    for fragment in sorted({row.fragment for row in facts.line}):
        versions = sorted(row.version for row in facts.line if row.fragment == fragment)
        due = set(range(versions[0], versions[-1] + 1))
        missing = [] if facts.num_missing else sorted(due - {*versions})
        if missing or len(versions) > len({*versions}):
            yield f"the history of fragment {fragment} has no version {missing}, or one twice, of {len(versions)}"


def older_copies_followed(record: Record, facts: Facts) -> Iterator[str]:
    """A syncer that was started on an older copy of the state gets no contribution and merges nothing, and learners say
    why. A learner that was started again meanwhile may join it, until it finds that its checkpoint is further."""
    if any(isinstance(event, SyncerStarted) for events in facts.stale for event in events) and not facts.refusals:
        yield "an older copy was served, and no learner has said that it does not follow it"
    for path, events in zip(record.stale_dirs, facts.stale, strict=True):
        for event in events:
            if isinstance(event, Contributed | Merged | Published):
                yield f"the older copy that is now in {path.name} has {event.kind}: {event!r:.200}"


def falling_epochs(record: Record, facts: Facts) -> Iterator[str]:
    """The epochs of the run grow."""
    numbers = [epoch.number for epoch in facts.epochs]
    if numbers != sorted(set(numbers)):
        yield f"the run's epochs do not grow: {numbers}"
