"""What must hold after a chaos run: each one a pure function of what was written down, which returns what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from diloco.chaos.facts import Facts
from diloco.chaos.pair import (
    differing_histories,
    is_pair,
    lost_by_the_pair,
    repeated_by_the_pair,
    shared_epochs,
)
from diloco.chaos.schedule import PAIR, STANDBY, SYNCER
from diloco.chaos.story import Told
from diloco.chaos.versions import BrokenInvariantError, Versions, check_ledger
from diloco.chaos.world import TWIN
from diloco.demo.processes import End
from diloco.events import Contributed, Merged, Published, SyncerStarted

GOES_BACK = ("restore", "damage state")
"""Faults after which the run may go on from earlier versions."""

ENDS = ("kill", "stop", "damage", "restore", "stale", "same")
"""How the kinds of faults begin that end a process."""

REFUSES = ("damage state", "same name")
"""Faults that a process may end for with a sentence: the state is damaged, or another process has the name."""

REFUSED_S = 5.0
"""A learner that has met an older copy has ended this long after that was taken away."""

LATEST_S = 60.0
"""A process that was asked to end has ended by then, on a slow machine too."""

STOPPED = 143
"""Exit code of a supervised learner that a signal has stopped."""


@dataclass(frozen=True)
class Finding:
    """Whether an invariant holds. `broken`: what breaks it, a sentence each. `seen`: what was looked at."""

    name: str
    broken: tuple[str, ...]
    seen: str

    @property
    def holds(self) -> bool:
        """Whether nothing breaks it."""
        return not self.broken


def check(told: Told, facts: Facts) -> tuple[Finding, ...]:
    """All of them."""
    return tuple(Finding(name, tuple(found(told, facts)), seen(told, facts)) for name, found, seen in INVARIANTS)


# --- versions and holdings


@dataclass(frozen=True)
class WentBack:
    """A syncer began with an older version of a fragment than was published. `fault`: the kind that had done it; "":
    none had."""

    fault: str
    fragment: int
    published: int
    version: int


def went_back(told: Told, facts: Facts) -> Iterator[WentBack]:
    """All starts from older versions; of one syncer, since one of two may start behind."""
    if is_pair(facts):
        return
    excuses = [(each.began_at, each.fault.kind) for each in told.injected if each.hit and each.fault.kind in GOES_BACK]
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


def lost_versions(told: Told, facts: Facts) -> Iterator[str]:
    """No syncer starts with less than was published, but where the state was damaged or restored on purpose."""
    if is_pair(facts):
        yield from lost_by_the_pair(facts)
    for each in went_back(told, facts):
        if not each.fault:
            yield f"version {each.published} of fragment {each.fragment} is lost: a syncer began at {each.version}"


def repeated_versions(told: Told, facts: Facts) -> Iterator[str]:
    """Between two starts each version of a fragment is published once, in order."""
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


def is_damaged(told: Told) -> bool:
    """Whether a database was damaged on purpose, which takes its part of the history with it."""
    return any(each.hit and each.fault.kind == "damage state" for each in told.injected)


def started_from(facts: Facts) -> set[tuple[int, int]]:
    """The fragments and versions that syncers began with: those that a kill kept from being logged as published."""
    starts = [event.versions for event in facts.syncer if isinstance(event, SyncerStarted)]
    return {(fragment, version) for versions in starts for fragment, version in enumerate(versions)}


def foreign_holdings(told: Told, facts: Facts) -> Iterator[str]:
    """Every learner holds the bits that were published. Of a version that only a start names, since its line of the
    history is gone with a damaged database, all hold the same."""
    versions, only_started = Versions(), started_from(facts) if is_damaged(told) else set()
    for row in facts.history:
        versions.ever[row.fragment, row.version].add(row.digest)
    for event in facts.syncer:
        if isinstance(event, Published):
            versions.ever[event.fragment, event.version].add(event.digest)
    for name, event in facts.holdings:
        known = versions.ever[event.fragment, event.version]
        if not known and (event.fragment, event.version) in only_started:
            known.add(event.digest)
        yield from _broken(lambda: versions.held(name, event.fragment, event.version, event.digest))  # noqa: B023


def broken_chain(told: Told, facts: Facts) -> Iterator[str]:
    """The history at the end has every version from the first on once. Where a damaged database has taken its part of
    it along, the events say what was published."""
    published = set[tuple[int, int]]()
    if is_damaged(told):
        published = {(it.fragment, it.version) for it in facts.syncer if isinstance(it, Published)}
        published |= started_from(facts)
    for fragment in sorted({row.fragment for row in facts.line}):
        versions = sorted(row.version for row in facts.line if row.fragment == fragment)
        due = set(range(versions[0], versions[-1] + 1))
        missing = sorted(version for version in due - {*versions} if (fragment, version) not in published)
        if missing or len(versions) > len({*versions}):
            yield f"the history of fragment {fragment} has no version {missing}, or one twice, of {len(versions)}"


# --- tokens and data


def older_copies_followed(told: Told, facts: Facts) -> Iterator[str]:
    """A syncer that was started on an older copy of the state gets no work, and learners say why. One that was started
    again meanwhile, without a checkpoint, may join it."""
    if any(isinstance(event, SyncerStarted) for events in facts.stale for event in events) and not facts.refusals:
        yield "an older copy was served, and no learner has said that it does not follow it"
    for path, events in zip(told.stale_dirs, facts.stale, strict=True):
        for event in events:
            if isinstance(event, Contributed | Merged | Published):
                yield f"the older copy that is now in {path.name} has {event.kind}: {event!r:.200}"


def open_accounts(told: Told, facts: Facts) -> Iterator[str]:
    """Per fragment, trained = pending + merged + discarded + lost, nothing is pending after all have left, and what
    the history says to be merged is what the ledger says."""
    if not told.status:
        yield "the syncer has said nothing of its tokens"
        return
    line = facts.line
    is_whole = {row.fragment for row in line if row.version == 0} == set(range(len(told.status["fragments"])))
    is_whole &= not any(each.fault == "damage state" for each in went_back(told, facts))
    trained = {each["ledger"]["trained"] for each in told.status["fragments"]}
    if len(trained) > 1:
        yield f"the fragments have counted different tokens: {sorted(trained)}"
    for each in told.status["fragments"]:
        what, ledger = f"fragment {each['fragment']}", each["ledger"]
        yield from _broken(lambda: check_ledger(what, ledger, ledger["discarded"]))  # noqa: B023
        if ledger["pending"]:
            yield f"{what}: {ledger['pending']} tokens are pending, and no learner is there"
        merged = sum(row.tokens for row in line if row.fragment == each["fragment"])
        if is_whole and merged != ledger["merged"]:
            yield f"{what}: {ledger['merged']} tokens are merged by the ledger, and {merged} by the history"


def open_units(told: Told, facts: Facts) -> Iterator[str]:
    """Of leased data, every unit of a pass is done, leased or free, and has one fate."""
    data: dict[str, Any] | None = told.status.get("data") if told.status else None
    if data is None:
        return
    for each in data["passes"]:
        there = each["done"] + each["leased"] + each["free"]
        if there != data["num_units"]:
            yield f"pass {each['pass']}: {there} units of {data['num_units']} are done, leased or free"
        if each["leased"]:
            yield f"pass {each['pass']}: {each['leased']} units are leased, and no learner is there"
    done = data["passes_done"] * data["num_units"] + sum(each["done"] for each in data["passes"])
    for fragment, each in enumerate(data["fragments"]):
        if (fates := sum(each["fates"].values())) != done:
            yield f"fragment {fragment}: {fates} units have a fate, and {done} are done"


# --- the processes and their files


def uncalled_ends(told: Told, facts: Facts) -> Iterator[str]:
    """A process ends only by what was sent to it; a syncer may also refuse a damaged state."""
    for end in told.ends:
        mine = (each for each in told.injected if each.hit and each.fault.target in _causes(end.name))
        sent = [each for each in mine if each.began_at - 1.0 <= end.t and each.fault.kind.startswith(ENDS)]
        last = max(sent, key=lambda each: each.began_at, default=None)
        if end.code > 0 and end.code != STOPPED:
            refuses = last is not None and last.fault.kind in REFUSES and end.t <= last.ended_at + LATEST_S
            if not refuses and not _meets_an_older_copy(told, end):
                yield f"{end.name} ended by itself with exit code {end.code}"
        elif last is None or end.t > last.ended_at + LATEST_S:
            yield f"{end.name} ended with exit code {end.code}, and nothing was sent to it"
    for name, code in told.exit_codes.items():
        if code != (STOPPED if name in told.plan.names else 0):
            yield f"{name} ended with exit code {code} when the run was over"


def _meets_an_older_copy(told: Told, end: End) -> bool:
    """A learner that was started again ends with a sentence while its syncer serves one."""
    stale = (each for each in told.injected if each.hit and each.fault.kind == "stale copy")
    return end.name in told.plan.names and any(each.began_at <= end.t <= each.ended_at + REFUSED_S for each in stale)


def _causes(name: str) -> tuple[str, ...]:
    return (name, PAIR) if name in (SYNCER, STANDBY) else (name.removesuffix(TWIN),)


def exceptions(told: Told, facts: Facts) -> Iterator[str]:
    """No process has shown an exception."""
    for name, lines in facts.tracebacks.items():
        for line in sorted(set(lines)):
            yield f"{name}: {line[:300]}"


def stands_still(told: Told, facts: Facts) -> Iterator[str]:
    """After the last fault every learner is in merges again, and all could be ended in good order."""
    if not told.settled:
        yield "not all learners have merged again after the last fault"
    yield from told.failures


def state_not_whole(told: Told, facts: Facts) -> Iterator[str]:
    """A syncer would start on the state, with the newest version of each fragment."""
    for name, state in told.states.items():
        if not state.get("starts"):
            yield f"no syncer starts on the state of {name} at the end: " + "; ".join(
                f"{each['file']} {each['what']}" for each in state.get("problems", ())
            )


def replays_differ(told: Told, facts: Facts) -> Iterator[str]:
    """The journal of each state that was served replays: all decisions, and all merges whose payloads are kept."""
    for (_, path), replay in zip(told.state_dirs, told.replays, strict=True):
        found = replay["found"]
        if replay["exit_code"] != 0 or not found or found["difference"] is not None:
            said = found.get("difference") if found else replay["said"][-300:]
            yield f"{path.name} does not replay: {said}"
        elif found["decisions_equal"] + found["skipped"] < found["events"]:
            yield f"{path.name}: {found['decisions_equal']} of {found['events']} decisions are the same"


def _broken(look: Callable[[], None]) -> Iterator[str]:
    try:
        look()
    except BrokenInvariantError as error:
        yield str(error)


Broken = Callable[[Told, Facts], Iterator[str]]
Seen = Callable[[Told, Facts], str]

INVARIANTS: tuple[tuple[str, Broken, Seen], ...] = (
    ("no published version is lost", lost_versions, lambda told, facts: f"{len(facts.history)} versions"),
    ("every version is published once", repeated_versions, lambda told, facts: f"{len(facts.history)} versions"),
    ("each epoch has one syncer", shared_epochs, lambda told, facts: f"{len(facts.epochs)} epochs"),
    ("both syncers have the same history", differing_histories, lambda told, facts: _syncers(facts)),
    ("the history has no gap", broken_chain, lambda told, facts: f"{len(facts.line)} versions"),
    ("learners hold what was published", foreign_holdings, lambda told, facts: f"{len(facts.holdings)} holdings"),
    (
        "no learner follows an older copy",
        older_copies_followed,
        lambda told, facts: f"{len(facts.stale)} copies served",
    ),
    ("every token is accounted for", open_accounts, lambda told, facts: f"{told.status.get('tokens', 0):,} tokens"),
    ("every unit of data has one fate", open_units, lambda told, facts: _units(told)),
    ("the run goes on", stands_still, lambda told, facts: f"{sum(each.hit for each in told.injected)} faults"),
    ("no process ends by itself", uncalled_ends, lambda told, facts: f"{len(told.ends)} restarts"),
    ("no process shows an exception", exceptions, lambda told, facts: f"{len(facts.learners) + 1} logs"),
    ("the state at the end is whole", state_not_whole, lambda told, facts: "diloco syncer check"),
    ("the journal replays", replays_differ, lambda told, facts: _replayed(told)),
)
"""Each with what breaks it, and what was looked at."""


def _units(told: Told) -> str:
    data = told.status.get("data") if told.status else None
    return "no leased data" if data is None else f"{sum(each['done'] for each in data['passes']):,} units done"


def _syncers(facts: Facts) -> str:
    return "one syncer" if facts.standby is None else f"{len(facts.standby)} versions"


def _replayed(told: Told) -> str:
    found = [each["found"] for each in told.replays if each["found"]]
    events, merges = sum(each["events"] for each in found), sum(each["merges_equal"] for each in found)
    return f"{events:,} decisions, {merges:,} merges again"
