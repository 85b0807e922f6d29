"""Accounts of tokens and units of data in a chaos run: the syncer's counts add up, and agree with what learners and
merges say."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.facts import Facts, Injected, Record
from tests.chaos.history import went_back
from tests.chaos.plan import ENDS_LEARNER, GOES_BACK, SYNCER, TWIN
from tests.chaos.processes import End
from tests.chaos.versions import BrokenInvariantError, check_ledger

from diloco.events import Event, Evicted, Finished, Left, Merged, Published, RunStarted, Stepped, SyncerStarted

LEAVES_S = 60.0
"""A goodbye comes this long after the learner's last event at most."""


@dataclass
class Lifetime:
    """A process of a learner, by its own events.

    Attributes:
        process: its name, a second one's with "-twin".
        first: tokens that the learner had trained before; None: the event that says it is missing.
        heard: after each event, the time and the tokens that it had trained by then.
        most_tokens: that it has trained between two of its events.
        most_tokens_per_s: between two of its events.
        is_whole: it ended in good order, and `tokens` are all.
    """

    learner: str
    process: str
    began_at: float
    first: int | None
    heard: list[tuple[float, int]] = field(default_factory=list)
    most_tokens: int = 0
    most_tokens_per_s: float = 0.0
    is_whole: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that it has trained by its last event."""
        return self.trained_by(math.inf)

    @property
    def last_at(self) -> float:
        """Time of its last event."""
        return self.heard[-1][0] if self.heard else self.began_at

    def trained_by(self, at: float) -> int:
        """Tokens that it has trained by the events until then."""
        return max((tokens for t, tokens in self.heard if t <= at), default=0)


def lifetimes(process: str, events: Sequence[Event], ends: Sequence[float] = ()) -> list[Lifetime]:
    """Lifetimes in a learner's events: each begins with the tokens of its checkpoint. `ends`: times at which its
    processes ended."""
    found: list[Lifetime] = []
    for event in events:
        match event:
            case RunStarted(who=who, tokens=tokens, t=at):
                found.append(Lifetime(who, process, at, tokens))
            case Stepped(who=who, tokens=tokens, tokens_per_s=rate, t=at) if found:
                life = found[-1]
                if any(life.last_at < end < at for end in ends):  # a full disk has refused what came before
                    life = Lifetime(who, process, at, None)
                    found.append(life)
                if life.first is not None:
                    life.most_tokens = max(life.most_tokens, tokens - life.first - life.tokens)
                    life.heard.append((at, tokens - life.first))
                life.most_tokens_per_s = max(life.most_tokens_per_s, rate)
            case Finished(tokens=tokens, seconds=seconds, t=at) if found:
                life = found[-1]
                is_its = at - seconds <= life.last_at and not life.is_whole  # not of one that never began to train
                if is_its and life.first is not None:
                    life.heard.append((at, tokens - life.first))
                    life.is_whole = True
    return found


def miscounted_tokens(record: Record, facts: Facts) -> Iterator[str]:
    """Of each learner, the syncer counts at most what its processes say that they trained, and at least what it must
    have heard of."""
    ends = defaultdict[str, list[End]](list)
    for end in record.ends:
        ends[end.name].append(end)
    found = []
    for place, events in facts.learners.items():
        directory, _, name = place.rpartition("/")
        process = f"{name}{TWIN}" if directory else name
        found += lifetimes(process, events, [end.t for end in ends[process]])
    most = max((life.most_tokens for life in found), default=0)
    for name in sorted({life.learner for life in found}):
        its = [life for life in found if life.learner == name]
        trained = facts.trained.get(name, 0)
        if (upper := _at_most(record, its, ends, most)) is not None and trained > upper:
            yield f"{trained} tokens are counted as trained by {name}, whose processes trained {upper} at most"
        if trained < (lower := sum(_heard_of(record, facts, life, ends) for life in its)):
            yield f"{trained} tokens are counted as trained by {name}, whose processes trained {lower} at least"


def _at_most(record: Record, its: Sequence[Lifetime], ends: Mapping[str, Sequence[End]], most: int) -> int | None:
    """A process that was killed may have trained on after its last event: as much as between two of them (`most`), or,
    where its disk had no room for events, as much as its fastest pace comes to until its end. None: there is no saying
    where one began."""
    total = 0
    for life in its:
        if life.first is None:
            return None
        total += life.tokens
        if not life.is_whole:
            end = _end_of(life, ends)
            if end is not None and _is_hit(record.hits("fill learner's disk"), (life.learner,), life.last_at, end):
                total += int((end - life.last_at) * life.most_tokens_per_s)
            total += most
    return total


def _heard_of(record: Record, facts: Facts, life: Lifetime, ends: Mapping[str, Sequence[End]]) -> int:
    """Tokens of a lifetime that the syncer must have heard of, and not forgotten: all, where it has heard the goodbye;
    of one that was killed, those of before the last heartbeats. Where anything else was wrong at that time, none."""
    hit = record.hits()
    if any(each.ended_at >= life.began_at for each in record.hits(*GOES_BACK, "stale copy")):
        return 0
    if life.is_whole:
        left = (it.t for it in facts.syncer if isinstance(it, Left) and it.learner == life.learner)
        heard_at = next((t for t in left if life.last_at <= t <= life.last_at + LEAVES_S), None)
        is_quiet = heard_at is not None and not _is_hit(hit, (SYNCER,), life.last_at, heard_at + record.lost_s)
        return life.tokens if is_quiet else 0
    end = _end_of(life, ends)
    if end is None:
        return 0
    since = end - 3 * record.lost_s
    evicted = (it.t for it in facts.syncer if isinstance(it, Evicted) and it.learner == life.learner)
    others = [each for each in hit if not (each.fault.kind in ENDS_LEARNER and since <= each.began_at <= end)]
    is_hit = _is_hit(others, (life.learner,), since, end) or _is_hit(hit, (SYNCER,), since, end + 2 * record.lost_s)
    return 0 if is_hit or any(since <= t <= end for t in evicted) else life.trained_by(since)


def _end_of(life: Lifetime, ends: Mapping[str, Sequence[End]]) -> float | None:
    return next((end.t for end in ends[life.process] if end.t >= life.last_at), None)


def _is_hit(hit: Sequence[Injected], targets: Sequence[str], since: float, until: float) -> bool:
    """Whether a fault of any of these targets overlaps that time."""
    return any(it.fault.target in targets and it.overlaps(since, until) for it in hit)


def open_accounts(record: Record, facts: Facts) -> Iterator[str]:
    """Per fragment, trained = pending + merged + discarded + lost, none pending in the end, and the ledger has merged
    what the history has. Of each learner, trained is at most what its processes' own events say, with what a killed
    one can have trained after its last event; and at least what those say that ended in good order, unless a state
    went back."""
    if not record.status:
        yield "the syncer has said nothing of its tokens"
        return
    line = facts.line
    is_whole = {row.fragment for row in line if row.version == 0} == set(range(len(record.status["fragments"])))
    is_whole &= not facts.num_missing and not any(each.fault == "damage state" for each in went_back(record, facts))
    trained = {each["ledger"]["trained"] for each in record.status["fragments"]}
    if len(trained) > 1:
        yield f"the fragments have counted different tokens: {sorted(trained)}"
    for each in record.status["fragments"]:
        what, ledger = f"fragment {each['fragment']}", each["ledger"]
        try:
            check_ledger(what, ledger, ledger["discarded"])
        except BrokenInvariantError as error:
            yield str(error)
        if ledger["pending"]:
            yield f"{what}: {ledger['pending']} tokens are pending, and no learner is there"
        merged = sum(row.tokens for row in line if row.fragment == each["fragment"])
        if is_whole and merged != ledger["merged"]:
            yield f"{what}: {ledger['merged']} tokens are merged by the ledger, and {merged} by the history"
    if facts.learners and not facts.trained:
        yield "no state says what each learner has trained"
    yield from miscounted_tokens(record, facts)


def merged_units(facts: Facts) -> dict[int, int | None]:
    """Of each fragment, the units that the versions of the line have merged, by the events of the syncer;
    None: the event of one is missing, as where the disk was full."""
    merged, published = dict[tuple[int, int], Merged](), dict[tuple[int, int, str], Merged]()
    for event in facts.syncer:
        match event:
            case SyncerStarted():
                merged.clear()
            case Merged(fragment=fragment, version=version):
                merged[fragment, version] = event
            case Published(fragment=fragment, version=version, digest=digest):
                if (it := merged.pop((fragment, version), None)) is not None:
                    published[fragment, version, digest] = it
    units: dict[int, int | None] = {}
    for row in facts.line:
        before, it = units.setdefault(row.fragment, 0), published.get((row.fragment, row.version, row.digest))
        if row.version:
            here = None if it is None else sum(stop - first for ranges in it.units for first, stop in ranges)
            units[row.fragment] = None if before is None or here is None else before + here
    return units


def open_units(record: Record, facts: Facts) -> Iterator[str]:
    """Of leased data, done + leased + free is all, each unit that is done has one fate in each fragment, and as many
    were merged as the events of all merges say, where none of those is missing."""
    data: dict[str, Any] | None = record.status.get("data") if record.status else None
    if data is None:
        return
    for each in data["passes"]:
        there = each["done"] + each["leased"] + each["free"]
        if there != data["num_units"]:
            yield f"pass {each['pass']}: {there} units of {data['num_units']} are done, leased or free"
        if each["leased"]:
            yield f"pass {each['pass']}: {each['leased']} units are leased, and no learner is there"
    done = data["passes_done"] * data["num_units"] + sum(each["done"] for each in data["passes"])
    merged = {} if record.hits("damage state") else merged_units(facts)  # a repair may have lost the record
    for fragment, each in enumerate(data["fragments"]):
        if (fates := sum(each["fates"].values())) != done:
            yield f"fragment {fragment}: {fates} units have a fate, and {done} are done"
        if (units := merged.get(fragment)) is not None and units != each["merges"]:
            yield f"fragment {fragment}: {each['merges']} units are merged by the record, and {units} by the events"
