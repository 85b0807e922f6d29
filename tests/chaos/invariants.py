"""Invariants of a chaos run: each is a pure function of what was recorded, which returns what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.chaos.accounts import open_accounts, open_units
from tests.chaos.facts import Facts, Record
from tests.chaos.history import (
    broken_chain,
    falling_epochs,
    foreign_holdings,
    lost_versions,
    older_copies_followed,
    repeated_versions,
)
from tests.chaos.leaks import leaks
from tests.chaos.plan import TWIN, VIEWER_EVERY_S
from tests.chaos.processes import End

from diloco.events import Contributed, Published

ENDS = ("kill", "stop", "damage", "restore", "stale", "same")
"""First words of the faults that end a process."""

REFUSES = ("damage state", "same name")
"""Faults after which a process may refuse to go on: its state is damaged, or another process has its name."""

REFUSED_S = 5.0
"""A learner that has met an older copy has ended this long after the copy was removed."""

LATEST_S = 60.0
"""A process that was asked to end has ended within this time, on a slow machine too."""

STUCK_S = 120.0
"""Longest time of a fragment without a new version."""

STOPPED = 143
"""Exit code of a supervised learner that a signal has stopped."""


@dataclass(frozen=True)
class Finding:
    """Whether an invariant holds. `broken`: what breaks it, a sentence each. `seen`: what was compared."""

    name: str
    broken: tuple[str, ...]
    seen: str

    @property
    def holds(self) -> bool:
        """Whether nothing breaks it."""
        return not self.broken


def check(record: Record, facts: Facts) -> tuple[Finding, ...]:
    """Check all invariants; of a soak, those of a soak too."""
    due = (*INVARIANTS, *OF_A_SOAK) if record.plan.soak else INVARIANTS
    return tuple(Finding(name, tuple(found(record, facts)), seen(record, facts)) for name, found, seen in due)


# --- the processes and their files


def uncalled_ends(record: Record, facts: Facts) -> Iterator[str]:
    """A process ends only by what was sent to it; a syncer may also refuse a damaged state."""
    for end in record.ends:
        mine = (each for each in record.hits() if each.fault.target == end.name.removesuffix(TWIN))
        sent = [each for each in mine if each.began_at - 1.0 <= end.t and each.fault.kind.startswith(ENDS)]
        last = max(sent, key=lambda each: each.began_at, default=None)
        if end.code > 0 and end.code != STOPPED:
            refuses = last is not None and last.fault.kind in REFUSES and end.t <= last.ended_at + LATEST_S
            if not refuses and not _meets_an_older_copy(record, end):
                yield f"{end.name} ended by itself with exit code {end.code}"
        elif last is None or end.t > last.ended_at + LATEST_S:
            yield f"{end.name} ended with exit code {end.code}, and nothing was sent to it"
    for name, code in record.exit_codes.items():
        if code != (STOPPED if name in record.plan.names else 0):
            yield f"{name} ended with exit code {code} when the run was over"


def _meets_an_older_copy(record: Record, end: End) -> bool:
    """A learner that was started again ends with a sentence while its syncer serves one."""
    stale = record.hits("stale copy")
    return end.name in record.plan.names and any(each.began_at <= end.t <= each.ended_at + REFUSED_S for each in stale)


def exceptions(record: Record, facts: Facts) -> Iterator[str]:
    """No log has a traceback."""
    for name, lines in facts.tracebacks.items():
        for line in sorted(set(lines)):
            yield f"{name}: {line[:300]}"


def stands_still(record: Record, facts: Facts) -> Iterator[str]:
    """After the last fault every learner is in merges again, and all could be ended in good order."""
    if not record.settled:
        yield "not all learners have merged again after the last fault"
    yield from record.failures


def state_not_whole(record: Record, facts: Facts) -> Iterator[str]:
    """A syncer would start on the state, with the newest version of each fragment."""
    if not record.state.get("starts"):
        yield "no syncer starts on the state at the end: " + "; ".join(
            f"{each['file']} {each['what']}" for each in record.state.get("problems", ())
        )


def replays_differ(record: Record, facts: Facts) -> Iterator[str]:
    """The journal of each state that was served replays: all decisions, and all merges whose payloads are kept."""
    for path, replay in zip(record.state_dirs, record.replays, strict=True):
        found = replay["found"]
        if replay["exit_code"] != 0 or not found or found["difference"] is not None:
            said = found.get("difference") if found else replay["said"][-300:]
            yield f"{path.name} does not replay: {said}"
        elif found["decisions_equal"] + found["skipped"] < found["events"]:
            yield f"{path.name}: {found['decisions_equal']} of {found['events']} decisions are the same"


# --- a soak


def leaking(record: Record, facts: Facts) -> Iterator[str]:
    """After a quarter of the time, the median slope of memory, handles, threads and directories (Theil and Sen) is not
    beyond what is allowed (`tests.chaos.leaks`), where rises outnumber falls by five standard errors (Kendall); journal
    and events have 20 kB and 2 kB for each version at most."""
    return leaks(record.curves, sum(isinstance(event, Published) for event in facts.syncer))


def stuck(record: Record, facts: Facts) -> Iterator[str]:
    """A fragment that has work has a new version within two minutes."""
    newest, longest = dict[int, float](), dict[int, float]()
    for event in facts.syncer:
        match event:
            case Published(fragment=fragment, t=at) | Contributed(fragment=fragment, t=at):
                since = newest.setdefault(fragment, at)
                longest[fragment] = max(longest.get(fragment, 0.0), at - since)
                if isinstance(event, Published):
                    newest[fragment] = at
    for fragment, for_s in longest.items():
        if for_s > STUCK_S:
            yield f"fragment {fragment} had no new version for {for_s:.0f} s"


def unanswered(record: Record, facts: Facts) -> Iterator[str]:
    """Each request of `tests.chaos.viewers` has had an answer at least once."""
    for name in VIEWER_EVERY_S:
        if not facts.answers.get(name, {}).get("answered"):
            yield f"the viewer {name!r} was never answered"


Broken = Callable[[Record, Facts], Iterator[str]]
Seen = Callable[[Record, Facts], str]

LOST = "no published version is lost"

INVARIANTS: tuple[tuple[str, Broken, Seen], ...] = (
    (LOST, lost_versions, lambda record, facts: f"{len(facts.history)} versions"),
    ("every version is published once", repeated_versions, lambda record, facts: f"{len(facts.history)} versions"),
    ("epochs grow", falling_epochs, lambda record, facts: f"{len(facts.epochs)} epochs"),
    ("the history has no gap", broken_chain, lambda record, facts: f"{len(facts.line)} versions"),
    ("learners hold what was published", foreign_holdings, lambda record, facts: f"{len(facts.holdings)} holdings"),
    (
        "no learner follows an older copy",
        older_copies_followed,
        lambda record, facts: f"{len(facts.stale)} copies served",
    ),
    ("every token is accounted for", open_accounts, lambda record, facts: f"{record.status.get('tokens', 0):,} tokens"),
    ("every unit of data has one fate", open_units, lambda record, facts: _units(record)),
    ("the run goes on", stands_still, lambda record, facts: f"{len(record.hits())} faults"),
    ("no process ends by itself", uncalled_ends, lambda record, facts: f"{len(record.ends)} restarts"),
    ("no process shows an exception", exceptions, lambda record, facts: f"{len(facts.learners) + 1} logs"),
    ("the state at the end is whole", state_not_whole, lambda record, facts: "diloco syncer check"),
    ("the journal replays", replays_differ, lambda record, facts: _replayed(record)),
)
"""Name, check, and the text that says what was compared."""

OF_A_SOAK: tuple[tuple[str, Broken, Seen], ...] = (
    ("no process or directory leaks", leaking, lambda record, facts: f"{len(record.curves)} curves"),
    ("no fragment is stuck", stuck, lambda record, facts: f"{len(facts.history)} versions"),
    ("every viewer is answered", unanswered, lambda record, facts: f"{len(VIEWER_EVERY_S)} viewers"),
)
"""Further invariants of a soak."""


def _units(record: Record) -> str:
    data = record.status.get("data") if record.status else None
    return "no leased data" if data is None else f"{sum(each['done'] for each in data['passes']):,} units done"


def _replayed(record: Record) -> str:
    found = [each["found"] for each in record.replays if each["found"]]
    events, merges = sum(each["events"] for each in found), sum(each["merges_equal"] for each in found)
    return f"{events:,} decisions, {merges:,} merges again"
