"""Invariants of a chaos run's versions and epochs, and of what learners held of them; and how long takeovers took.

Of two syncers, the line is the history of the one that serves the run at the end. A version that one of them wrote and
the other one never had was never seen, and is set aside at its return: only what was published or held counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.chaos.facts import Facts, Injected, Record
from tests.chaos.plan import GOES_BACK, SERVES, STANDBY, SYNCER, SYNCERS
from tests.chaos.versions import BrokenInvariantError, Versions

from diloco.events import Contributed, Gap, Merged, Published, StandingChanged, SyncerStarted

MUST_TAKE_OVER = ("kill first", "freeze first", "isolate first")
"""Faults that last until the standby has taken over, or for a minute more than planned."""

TAKEOVERS = (*MUST_TAKE_OVER, "kill syncer", "stop syncer", "pause syncer")
"""Faults for which a standby may take over."""


def is_pair(facts: Facts) -> bool:
    """Whether there were two syncers."""
    return facts.standby is not None


@dataclass(frozen=True)
class WentBack:
    """A syncer began with an older version of a fragment than was published. `fault`: the kind that had done it; "":
    none had."""

    fault: str
    fragment: int
    published: int
    version: int


def went_back(record: Record, facts: Facts) -> Iterator[WentBack]:
    """All starts from older versions; of one syncer, since one of two may start behind."""
    if is_pair(facts):
        return
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
    """A syncer starts with the newest version that was published, but after 'damage state' and 'restore'. Of two
    syncers, each version that either has published or any learner has held is with the same digest in the history of
    the one that serves the run at the end."""
    if is_pair(facts):
        yield from lost_by_the_pair(facts)
    for each in went_back(record, facts):
        if not each.fault:
            yield f"version {each.published} of fragment {each.fragment} is lost: a syncer began at {each.version}"


def repeated_versions(record: Record, facts: Facts) -> Iterator[str]:
    """Between two starts each version of a fragment is published once, in order; of two syncers, by one of them."""
    if is_pair(facts):
        yield from repeated_by_the_pair(facts)
        return
    shown: dict[int, int] = {}
    for event in facts.syncer:
        match event:
            case SyncerStarted(versions=versions):
                shown = dict(enumerate(versions))
            case Published(fragment=fragment, version=version):
                if version <= shown.get(fragment, 0):
                    yield f"version {version} of fragment {fragment} was published after {shown[fragment]}"
                shown[fragment] = version


def is_damaged(record: Record) -> bool:
    """Whether a database was damaged on purpose, which takes its part of the history with it."""
    return bool(record.hits("damage state"))


def started_from(facts: Facts) -> set[tuple[int, int]]:
    """The fragments and versions that syncers began with: those that a kill kept from being logged as published."""
    starts = [event.versions for event in facts.syncer if isinstance(event, SyncerStarted)]
    return {(fragment, version) for versions in starts for fragment, version in enumerate(versions)}


def foreign_holdings(record: Record, facts: Facts) -> Iterator[str]:
    """The digest of each fragment that any learner has reported is one that a syncer had at that version. Of a version
    that only a start names, since its line of the history is gone with a damaged database, all hold the same."""
    versions, only_started = Versions(), started_from(facts) if is_damaged(record) else set()
    for row in facts.history:
        versions.ever[row.fragment, row.version].add(row.digest)
    for event in facts.syncer:
        if isinstance(event, Published):
            versions.ever[event.fragment, event.version].add(event.digest)
    for name, event in facts.holdings:
        known = versions.ever[event.fragment, event.version]
        if not known and (event.fragment, event.version) in only_started:
            known.add(event.digest)
        try:
            versions.held(name, event.fragment, event.version, event.digest)
        except BrokenInvariantError as error:
            yield str(error)


def broken_chain(record: Record, facts: Facts) -> Iterator[str]:
    """The history at the end has every version from the first on once. Where a damaged database has taken its part of
    it along, the events say what was published."""
    published = set[tuple[int, int]]()
    if is_damaged(record):
        published = {(it.fragment, it.version) for it in facts.syncer if isinstance(it, Published)}
        published |= started_from(facts)
    for fragment in sorted({row.fragment for row in facts.line}):
        versions = sorted(row.version for row in facts.line if row.fragment == fragment)
        due = set(range(versions[0], versions[-1] + 1))
        missing = sorted(version for version in due - {*versions} if (fragment, version) not in published)
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


# --- two syncers


def lost_by_the_pair(facts: Facts) -> Iterator[str]:
    """What any syncer has published, and what any learner has held, is in the line."""
    line = {(row.fragment, row.version): row.digest for row in facts.line}
    for event in facts.syncer:
        if isinstance(event, Published) and line.get((event.fragment, event.version)) != event.digest:
            yield f"version {event.version} of fragment {event.fragment} was published as {event.digest}, and is lost"
    for name, held in facts.holdings:
        if line.get((held.fragment, held.version)) != held.digest:
            yield f"version {held.version} of fragment {held.fragment} was held by {name} as {held.digest}, and is lost"


def repeated_by_the_pair(facts: Facts) -> Iterator[str]:
    """Each version is published once, by one of the two."""
    seen = set[tuple[int, int]]()
    for event in facts.syncer:
        if isinstance(event, Published):
            if (event.fragment, event.version) in seen:
                yield f"version {event.version} of fragment {event.fragment} was published twice"
            seen.add((event.fragment, event.version))


def shared_epochs(record: Record, facts: Facts) -> Iterator[str]:
    """A syncer's epochs grow; one syncer publishes in each, and nothing that a later epoch began without."""
    # one that has just started, or whose disk has refused an event, has no known epoch until its next event says it
    publishers = defaultdict[int, set[str]](set)
    for name, events in facts.syncers.items():
        highest, now = 0, None
        for event in events:
            match event:
                case SyncerStarted() | Gap():
                    now = None
                case StandingChanged(epoch=epoch):
                    if epoch < highest:
                        yield f"{name} stood in epoch {epoch} after {highest}"
                    highest, now = max(highest, epoch), event
                case Published(fragment=fragment, version=version) if now is not None:
                    publishers[now.epoch].add(name)
                    if now.standing in ("waiting", "following"):
                        yield f"{name} published version {version} of fragment {fragment} while it was {now.standing}"
                    for later in facts.epochs:
                        if later.number > now.epoch and version > later.versions[fragment]:
                            yield (
                                f"{name} published version {version} of fragment {fragment} in epoch {now.epoch}, and "
                                f"epoch {later.number} began at version {later.versions[fragment]}"
                            )
    yield from (
        f"{' and '.join(sorted(names))} have both published in epoch {epoch}"
        for epoch, names in publishers.items()
        if len(names) > 1
    )
    numbers = [epoch.number for epoch in facts.epochs]
    if numbers != sorted(set(numbers)):
        yield f"the run's epochs do not grow: {numbers}"


def differing_histories(record: Record, facts: Facts) -> Iterator[str]:
    """In the end the databases of both have the same versions."""
    if facts.standby is None:
        return
    mine, theirs = (
        {(row.fragment, row.version): (row.digest, row.tokens) for row in rows} for rows in (facts.line, facts.standby)
    )
    for fragment, version in sorted(mine.keys() | theirs.keys()):
        if mine.get((fragment, version)) != theirs.get((fragment, version)):
            yield f"the two syncers differ in version {version} of fragment {fragment}"


def untimely_takeovers(record: Record, facts: Facts) -> Iterator[str]:
    """'kill first', 'freeze first' and 'isolate first' end with the other one serving the run; and no epoch begins in
    the stretch without faults."""
    if not is_pair(facts):
        return
    for each in record.hits(*MUST_TAKE_OVER):
        during = [it for it in facts.syncers[_other(each)] if each.began_at < it.t <= each.ended_at]
        serves = any(isinstance(it, StandingChanged) and it.standing in SERVES for it in during)
        if not serves and not any(isinstance(it, Gap) for it in during):  # a full disk may have kept it quiet
            seconds = each.ended_at - each.began_at
            yield f"{_other(each)} has not taken over within {seconds:.0f} s of {each.fault.kind}"
    begin, end = record.calm
    for name, events in facts.syncers.items():
        epoch = 0
        for event in events:
            if isinstance(event, StandingChanged):
                if begin <= event.t <= end and event.epoch != epoch > 0:
                    yield f"{name} came from epoch {epoch} to {event.epoch} while nothing was wrong"
                epoch = event.epoch


# --- times


def takeovers(record: Record, facts: Facts, *, until: Literal["serves", "publishes"], alone: bool) -> list[float]:
    """Seconds from a fault of the first until the other syncer serves the run, or has published a version. `alone`:
    those during which no other fault was."""
    found = []
    for each in record.hits(*TAKEOVERS) if is_pair(facts) else ():
        at = _taken_over(each, record, facts)
        if at is not None and until == "publishes":
            other = _other(each)
            at = next((it.t for it in facts.syncers[other] if isinstance(it, Published) and it.t >= at), None)
        if at is None:
            continue
        others = (other for other in record.hits() if other is not each)
        if not alone or not any(it.overlaps(each.began_at, at) for it in others):
            found.append(at - each.began_at)
    return found


def _taken_over(each: Injected, record: Record, facts: Facts) -> float | None:
    """When the other syncer served the run, alone or with the old first as its standby, before the next fault of a
    syncer; None: it did not."""
    later = [it.began_at for it in record.hits() if it.began_at > each.began_at and it.fault.target in SYNCERS]
    stands = (it for it in facts.syncers[_other(each)] if isinstance(it, StandingChanged) and it.standing in SERVES)
    return next((it.t for it in stands if each.began_at < it.t < min(later, default=float("inf"))), None)


def _other(each: Injected) -> str:
    return STANDBY if each.fault.target == SYNCER else SYNCER
