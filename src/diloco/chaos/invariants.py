"""What must hold after a chaos run: each one a pure function of what was written down, which returns what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diloco.chaos.accounts import open_accounts, open_units
from diloco.chaos.facts import Facts
from diloco.chaos.history import (
    broken_chain,
    foreign_holdings,
    lost_versions,
    older_copies_followed,
    repeated_versions,
)
from diloco.chaos.pair import MUST_TAKE_OVER, differing_histories, shared_epochs, untimely_takeovers
from diloco.chaos.schedule import PAIR, STANDBY, SYNCER
from diloco.chaos.story import Told
from diloco.chaos.world import TWIN
from diloco.demo.processes import End

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


Broken = Callable[[Told, Facts], Iterator[str]]
Seen = Callable[[Told, Facts], str]

INVARIANTS: tuple[tuple[str, Broken, Seen], ...] = (
    ("no published version is lost", lost_versions, lambda told, facts: f"{len(facts.history)} versions"),
    ("every version is published once", repeated_versions, lambda told, facts: f"{len(facts.history)} versions"),
    ("each epoch has one syncer", shared_epochs, lambda told, facts: f"{len(facts.epochs)} epochs"),
    ("a standby takes over when it must", untimely_takeovers, lambda told, facts: _takeovers(told)),
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


def _takeovers(told: Told) -> str:
    return f"{sum(each.hit and each.fault.kind in MUST_TAKE_OVER for each in told.injected)} faults of the first"


def _replayed(told: Told) -> str:
    found = [each["found"] for each in told.replays if each["found"]]
    events, merges = sum(each["events"] for each in found), sum(each["merges_equal"] for each in found)
    return f"{events:,} decisions, {merges:,} merges again"
