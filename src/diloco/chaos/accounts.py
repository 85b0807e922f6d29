"""Where tokens and units of data went in a chaos run: what the syncer counts adds up, and is what learners and merges
say that it is. Pure functions of what was written down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.chaos.facts import Facts
from diloco.chaos.history import went_back
from diloco.chaos.story import Told
from diloco.chaos.versions import BrokenInvariantError, check_ledger
from diloco.events import Event, Finished, Merged, Published, RunStarted, Stepped, SyncerStarted

FORGETS = ("restore", "damage state", "stale copy")
"""Faults after which the syncer may count less than it has heard of."""

DISTURBS = ("fill learner's disk", "same name")
"""Faults during which a learner that ends in good order may not get its last tokens to the syncer or to its disk."""


@dataclass
class Life:
    """A process of a learner, as its own events tell.

    Attributes:
        tokens: that it has trained, as of `last_at`.
        most_tokens: that it has trained between two of its events.
        most_tokens_per_s: between two of its events.
        is_whole: it ended in good order, and `tokens` are all.
    """

    learner: str
    first: int
    last_at: float
    tokens: int = 0
    most_tokens: int = 0
    most_tokens_per_s: float = 0.0
    is_whole: bool = False


def lives(events: Sequence[Event]) -> list[Life]:
    """Of a learner's events: each begins where its checkpoint had it."""
    found: list[Life] = []
    for event in events:
        match event:
            case RunStarted(who=who, tokens=tokens, t=at):
                found.append(Life(who, tokens, at))
            case Stepped(tokens=tokens, tokens_per_s=rate, t=at) if found:
                life = found[-1]
                life.most_tokens = max(life.most_tokens, tokens - life.first - life.tokens)
                life.most_tokens_per_s = max(life.most_tokens_per_s, rate)
                life.tokens, life.last_at = tokens - life.first, at
            case Finished(tokens=tokens, t=at) if found and not found[-1].is_whole:
                if tokens >= found[-1].first + found[-1].tokens:  # not of a process that never began to train
                    found[-1].tokens, found[-1].last_at, found[-1].is_whole = tokens - found[-1].first, at, True
    return found


def miscounted_tokens(told: Told, facts: Facts) -> Iterator[str]:
    """Of each learner, the syncer counts at most what its processes say that they trained, and at least what those say
    that ended in good order.

    A process that was killed may have trained on after its last event: as much as between two of them at most, or,
    where its disk had no room for events, as much as its fastest pace comes to until its end.
    """
    hit = [each for each in told.injected if each.hit]
    all_lives = [life for events in facts.learners.values() for life in lives(events)]
    most = max((life.most_tokens for life in all_lives), default=0)
    upper, lower = defaultdict[str, int](int), defaultdict[str, int](int)
    for life in all_lives:
        mine = [each for each in hit if each.fault.target == life.learner and each.ended_at >= life.last_at]
        end = min((end.t for end in told.ends if end.name == life.learner and end.t >= life.last_at), default=None)
        upper[life.learner] += life.tokens
        if life.is_whole:
            near = (each for each in mine if each.fault.kind in DISTURBS and each.began_at <= life.last_at)
            lower[life.learner] += 0 if any(near) else life.tokens
        elif end is not None and any(each.fault.kind == DISTURBS[0] and each.began_at <= end for each in mine):
            upper[life.learner] += int((end - life.last_at) * life.most_tokens_per_s) + most
        else:
            upper[life.learner] += most
    forgets = any(each.fault.kind in FORGETS for each in hit)
    for name, trained in facts.trained.items():
        if trained > upper[name]:
            yield f"{trained} tokens are counted as trained by {name}, whose processes trained {upper[name]} at most"
        if trained < lower[name] and not forgets:
            yield f"{trained} tokens are counted as trained by {name}, whose processes trained {lower[name]} at least"


def open_accounts(told: Told, facts: Facts) -> Iterator[str]:
    """Per fragment, trained = pending + merged + discarded + lost, nothing is pending after all have left, and what
    the history says to be merged is what the ledger says. `miscounted_tokens` says of what is trained."""
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
        try:
            check_ledger(what, ledger, ledger["discarded"])
        except BrokenInvariantError as error:
            yield str(error)
        if ledger["pending"]:
            yield f"{what}: {ledger['pending']} tokens are pending, and no learner is there"
        merged = sum(row.tokens for row in line if row.fragment == each["fragment"])
        if is_whole and merged != ledger["merged"]:
            yield f"{what}: {ledger['merged']} tokens are merged by the ledger, and {merged} by the history"
    yield from miscounted_tokens(told, facts)


def merged_units(facts: Facts) -> dict[int, int | None]:
    """Of each fragment, the units that the versions of the line have merged, by the events of those who published them;
    None: the event of one is missing, as where the disk was full."""
    merged, published = dict[tuple[int, int], Merged](), dict[tuple[int, int, str], Merged]()
    for events in facts.syncers.values():
        for event in events:
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


def open_units(told: Told, facts: Facts) -> Iterator[str]:
    """Of leased data, every unit of a pass is done, leased or free, and has one fate; and as many were merged as the
    events of the merges say."""
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
    merged = merged_units(facts)
    for fragment, each in enumerate(data["fragments"]):
        if (fates := sum(each["fates"].values())) != done:
            yield f"fragment {fragment}: {fates} units have a fate, and {done} are done"
        if (units := merged.get(fragment)) is not None and units != each["merges"]:
            yield f"fragment {fragment}: {each['merges']} units are merged by the record, and {units} by the events"
