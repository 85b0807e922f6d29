"""What must hold where there are two syncers, and what a takeover takes: pure functions of what was written down.

The line is the history of the syncer that serves the run at the end. A version that one syncer wrote and the other one
never had was never seen, and is set aside where that one comes back: only what was published or held counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

from diloco.chaos.facts import Facts
from diloco.chaos.schedule import PAIR, STANDBY, SYNCER
from diloco.chaos.story import Injected, Told
from diloco.chaos.world import SERVES
from diloco.events import Gap, Published, Stands, SyncerStarted

TAKEOVERS = ("kill first", "freeze first", "isolate first", "kill syncer", "stop syncer", "pause syncer")
"""Faults of the first that its standby may take the run over for."""

MUST_TAKE_OVER = ("kill first", "freeze first", "isolate first")
"""Those that last until it has, or for a minute more than planned."""


def is_pair(facts: Facts) -> bool:
    """Whether there were two syncers."""
    return facts.standby is not None


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


def shared_epochs(told: Told, facts: Facts) -> Iterator[str]:
    """A syncer's epochs grow; one syncer publishes in each, and nothing that a later epoch began without.

    A syncer that has just started, or whose disk has refused an event, has no known epoch until it says how it stands.
    """
    publishers = defaultdict[int, set[str]](set)
    for name, events in facts.syncers.items():
        highest, now = 0, None
        for event in events:
            match event:
                case SyncerStarted() | Gap():
                    now = None
                case Stands(epoch=epoch):
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


def differing_histories(told: Told, facts: Facts) -> Iterator[str]:
    """In the end both syncers have the same versions."""
    if facts.standby is None:
        return
    mine, theirs = (
        {(row.fragment, row.version): (row.digest, row.tokens) for row in rows} for rows in (facts.line, facts.standby)
    )
    for fragment, version in sorted(mine.keys() | theirs.keys()):
        if mine.get((fragment, version)) != theirs.get((fragment, version)):
            yield f"the two syncers differ in version {version} of fragment {fragment}"


def untimely_takeovers(told: Told, facts: Facts) -> Iterator[str]:
    """A fault of the first that lasts until its standby serves the run ends by that; and no epoch begins while nothing
    is wrong."""
    for each in told.injected if is_pair(facts) else ():
        if each.hit and each.fault.kind in MUST_TAKE_OVER:
            during = [it for it in facts.syncers[_other(each)] if each.began_at < it.t <= each.ended_at]
            serves = any(isinstance(it, Stands) and it.standing in SERVES for it in during)
            if not serves and not any(isinstance(it, Gap) for it in during):  # a full disk may have kept it quiet
                seconds = each.ended_at - each.began_at
                yield f"{_other(each)} has not taken over within {seconds:.0f} s of {each.fault.kind}"
    begin, end = told.calm
    for name, events in facts.syncers.items() if is_pair(facts) else ():
        epoch = 0
        for event in events:
            if isinstance(event, Stands):
                if begin <= event.t <= end and event.epoch != epoch > 0:
                    yield f"{name} came from epoch {epoch} to {event.epoch} while nothing was wrong"
                epoch = event.epoch


# --- times


def takeovers(
    hit: Sequence[Injected], facts: Facts, *, until: Literal["serves", "publishes"], alone: bool
) -> list[float]:
    """Seconds from a fault of the first until the other syncer serves the run, or has published a version. `alone`:
    those during which no other fault was."""
    found = []
    for each in hit:
        at = _taken_over(each, hit, facts)
        if at is not None and until == "publishes":
            other = _other(each)
            at = next((it.t for it in facts.syncers[other] if isinstance(it, Published) and it.t >= at), None)
        if at is None:
            continue
        others = (other for other in hit if other is not each)
        if not alone or not any(it.began_at <= at and it.ended_at >= each.began_at for it in others):
            found.append(at - each.began_at)
    return found


def _taken_over(each: Injected, hit: Sequence[Injected], facts: Facts) -> float | None:
    """When the other syncer served the run, alone or with the old first as its standby, before the next fault of a
    syncer; None: it did not."""
    if each.fault.kind not in TAKEOVERS or _other(each) not in facts.syncers:
        return None
    syncers = (SYNCER, STANDBY, PAIR)
    later = [it.began_at for it in hit if it.began_at > each.began_at and it.fault.target in syncers]
    stands = (it for it in facts.syncers[_other(each)] if isinstance(it, Stands) and it.standing in SERVES)
    return next((it.t for it in stands if each.began_at < it.t < min(later, default=float("inf"))), None)


def _other(each: Injected) -> str:
    return STANDBY if each.fault.target == SYNCER else SYNCER
