"""The result of a chaos run: numbers, and their text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from tests.chaos.facts import Facts, Injected, Record
from tests.chaos.history import went_back
from tests.chaos.invariants import LOST, Finding
from tests.chaos.leaks import growths
from tests.chaos.plan import ENDS_LEARNER, ENDS_SYNCER

from diloco.events import Joined, Merged, Published, Resumed, Stepped, SyncerStarted

RECOVERIES = {
    "survivor": "a survivor's next version after a learner's kill -9",
    "learner": "a learner that was ended, until a version has its work again",
    "learner_from_its_start": "the same, from the start of its process",
    "syncer": "a syncer that was ended, until the next one serves",
    "syncer_from_its_start": "the same, from the start of its process",
}
"""Times that are measured, for people."""


def measured(record: Record, facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain values; times in seconds."""
    hit = record.hits()
    merges = [event for event in facts.syncer if isinstance(event, Merged)]
    calm, troubled = (_tokens_per_s(merges, *span) for span in (record.calm, record.troubled))
    begun = [event for event in merges if record.troubled[0] <= event.t <= record.troubled[1]]
    step_s, works, serves = _step_s(facts, *record.calm), partial(_first_work, facts), partial(_served_again, facts)
    return {
        "seed": record.plan.seed,
        "learners": record.plan.learners,
        "seconds": round(record.troubled[1] - record.troubled[0], 1),
        "faults": _by_kind(hit, facts, record),
        "num_faults": len(hit),
        "num_survived": sum(_survived(each, facts, record) for each in hit),
        "holds": all(finding.holds for finding in findings),
        "invariants": {finding.name: list(finding.broken) for finding in findings},
        "seen": {finding.name: finding.seen for finding in findings},
        "versions_published": sum(isinstance(event, Published) for event in facts.syncer),
        "versions_lost": sum(len(finding.broken) for finding in findings if finding.name == LOST),
        "versions_given_up": sum(each.published - each.version for each in went_back(record, facts)),
        "holdings_compared": len(facts.holdings),
        "missing_events": facts.num_missing,
        "bytes_resumed": sum(event.num_bytes for event in facts.syncer if isinstance(event, Resumed)),
        "goodput": {"calm": calm, "troubled": troubled, "ratio": troubled / calm if calm else None},
        "participation": {
            name: sum(name in event.contributors for event in begun) / max(1, len(begun)) for name in record.plan.names
        },
        "step_s": step_s,
        "lost_deadline_s": record.lost_s,
        "recovery": {
            "learner": summary(_back(hit, ENDS_LEARNER, works, from_start=False)),
            "learner_from_its_start": summary(_back(hit, ENDS_LEARNER, works, from_start=True)),
            "syncer": summary(_back(hit, ENDS_SYNCER, serves, from_start=False)),
            "syncer_from_its_start": summary(_back(hit, ENDS_SYNCER, serves, from_start=True)),
            "survivor": summary(_survivors_next(hit, facts)),
        },
        "survivor_bound_s": None if step_s is None else 2 * step_s + record.lost_s,
        "ledger": _ledger(record),
        **({"growth": growths(record.curves), "viewers": facts.answers} if record.plan.soak else {}),
    }


def summary(seconds: Iterable[float]) -> dict[str, float | int] | None:
    """Of times: how many, the median and the worst; None: there are none."""
    found = sorted(seconds)
    if not found:
        return None
    return {"num": len(found), "median": round(statistics.median(found), 3), "worst": round(found[-1], 3)}


def _tokens_per_s(merges: Sequence[Merged], since: float, until: float) -> float:
    """Tokens merged a second: of all fragments, divided by their number."""
    fragments = {event.fragment for event in merges}
    tokens = sum(sum(event.tokens) for event in merges if since <= event.t <= until)
    return tokens / max(1, len(fragments)) / max(1e-9, until - since)


def _step_s(facts: Facts, since: float, until: float) -> float | None:
    """The median of the seconds for an inner step, over all learners; None: too few were taken."""
    each = []
    for events in facts.learners.values():
        steps = [event for event in events if isinstance(event, Stepped) and since <= event.t <= until]
        each += [
            (after.t - before.t) / (after.step - before.step)
            for before, after in pairwise(steps)
            if after.step > before.step
        ]
    return statistics.median(each) if each else None


def _survived(injected: Injected, facts: Facts, record: Record) -> bool:
    """After it a version was published, and in the end all learners merged again."""
    return record.settled and any(
        isinstance(event, Published) and event.t > injected.ended_at for event in facts.syncer
    )


def _by_kind(hit: Sequence[Injected], facts: Facts, record: Record) -> dict[str, dict[str, int]]:
    return {
        kind: {
            "injected": sum(each.fault.kind == kind for each in hit),
            "survived": sum(each.fault.kind == kind and _survived(each, facts, record) for each in hit),
        }
        for kind in sorted({each.fault.kind for each in hit})
    }


def _back(
    hit: Sequence[Injected], kinds: Sequence[str], recovery: Callable[[Injected], float | None], *, from_start: bool
) -> Iterator[float]:
    """From the signal that ended a process to its recovery, where it came before another fault hit the process;
    `from_start`: from when it was started again, about a second less."""
    for each in hit:
        if each.fault.kind in kinds and (at := recovery(each)) is not None:
            same = (other for other in hit if other is not each and other.fault.target == each.fault.target)
            if not any(each.began_at <= other.began_at <= at for other in same):
                yield at - (each.ended_at if from_start else each.began_at)


def _first_work(facts: Facts, injected: Injected) -> float | None:
    """When a version had work again of a learner that was ended, and has joined since; None: none had."""
    name, joined_at = injected.fault.target, None
    for event in facts.syncer:
        if event.t <= injected.ended_at:
            continue
        if joined_at is None and isinstance(event, Joined) and event.learner == name:
            joined_at = event.t
        elif joined_at is not None and isinstance(event, Merged) and name in event.contributors:
            return event.t
    return None


def _served_again(facts: Facts, injected: Injected) -> float | None:
    """When a syncer that was ended serves again; None: it does not."""
    starts = (event.t for event in facts.syncer if isinstance(event, SyncerStarted) and event.t > injected.began_at)
    return next(starts, None)


def _survivors_next(hit: Sequence[Injected], facts: Facts) -> list[float]:
    """From the SIGKILL of a learner to the next version that is without its work, where nothing else was wrong then."""
    found = []
    for each in hit:
        if each.fault.kind == "kill learner":
            others = (other for other in hit if other is not each)
            merges = (
                event.t
                for event in facts.syncer
                if isinstance(event, Merged)
                and event.t > each.began_at
                and event.contributors
                and each.fault.target not in event.contributors
            )
            at = next(merges, None)
            if at is not None and not any(it.overlaps(each.began_at, at) for it in others):
                found.append(at - each.began_at)
    return found


def _ledger(record: Record) -> dict[str, int] | None:
    """Of the first fragment, all learners together."""
    if not record.status:
        return None
    ledger = record.status["fragments"][0]["ledger"]
    return {
        **{key: ledger[key] for key in ("trained", "merged", "pending", "lost")},
        "discarded": sum(ledger["discarded"].values()),
    }


def headline(found: dict[str, Any]) -> str:
    """The run in one sentence."""
    ratio = found["goodput"]["ratio"]
    goodput = "not measured" if ratio is None else f"{ratio:.0%}"
    verdict = "all invariants hold" if found["holds"] else "something does not hold"
    return (
        f"{found['num_faults']} faults in {found['seconds']:,.0f} s on a syncer and {found['learners']} "
        f"learners: {found['num_survived']} survived, {found['versions_published']:,} versions published, "
        f"{found['versions_lost']} lost, goodput {goodput} of a stretch "
        f"without faults; {verdict}."
    )


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The result for a terminal."""
    yield headline(found)
    for name, broken in found["invariants"].items():
        yield f"{'BROKEN' if broken else 'holds '}  {name} ({found['seen'][name]})"
        yield from (f"        {each}" for each in broken[:10])
    yield "seconds to come back: times, median, worst"
    for key, what in RECOVERIES.items():
        each = found["recovery"][key]
        numbers = "not measured" if each is None else f"{each['num']}, {each['median']:.2f}, {each['worst']:.2f}"
        yield f"        {what}: {numbers}"
    for name, each in found.get("growth", {}).items():
        yield f"{name:40} {each['per_hour']:>12.4g} an hour, {each['standard_errors']:5.1f} standard errors"
