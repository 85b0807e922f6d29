"""What a chaos run comes to in numbers: pure functions of what was written down."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from diloco.chaos.facts import Facts
from diloco.chaos.history import went_back
from diloco.chaos.invariants import Finding
from diloco.chaos.pair import is_pair, takeovers
from diloco.chaos.story import Injected, Told
from diloco.events import Joined, Merged, Published, Resumed, Stepped, SyncerStarted

ENDS_LEARNER, ENDS_SYNCER = ("kill learner", "stop learner"), ("kill syncer", "stop syncer")


def measured(told: Told, facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain values; times in seconds."""
    hit = [each for each in told.injected if each.hit]
    merges = [event for event in facts.syncer if isinstance(event, Merged)]
    calm, troubled = (_tokens_per_s(merges, *span) for span in (told.calm, told.troubled))
    begun = [event for event in merges if told.troubled[0] <= event.t <= told.troubled[1]]
    step_s = _step_s(facts, *told.calm)
    return {
        "seed": told.plan.seed,
        "learners": told.plan.learners,
        "syncers": len(told.plan.syncers),
        "seconds": round(told.troubled[1] - told.troubled[0], 1),
        "faults": _by_kind(hit, facts, told),
        "num_faults": len(hit),
        "num_survived": sum(_survived(each, facts, told) for each in hit),
        "holds": all(finding.holds for finding in findings),
        "invariants": {finding.name: list(finding.broken) for finding in findings},
        "seen": {finding.name: finding.seen for finding in findings},
        "versions_published": sum(isinstance(event, Published) for event in facts.syncer),
        "versions_lost": sum(len(finding.broken) for finding in findings if finding.name == LOST),
        "versions_given_up": sum(each.published - each.version for each in went_back(told, facts)),
        "holdings_compared": len(facts.holdings),
        "missing_events": facts.num_missing,
        "bytes_resumed": sum(event.num_bytes for event in facts.syncer if isinstance(event, Resumed)),
        "goodput": {"calm": calm, "troubled": troubled, "ratio": troubled / calm if calm else None},
        "participation": {
            name: sum(name in event.contributors for event in begun) / max(1, len(begun)) for name in told.plan.names
        },
        "step_s": step_s,
        "lost_deadline_s": told.lost_s,
        "recovery": {
            "learner": summary(_learners_back(hit, facts)),
            "learner_from_its_start": summary(_learners_back(hit, facts, from_start=True)),
            "syncer": summary(_syncers_back(hit, facts)),
            "syncer_from_its_start": summary(_syncers_back(hit, facts, from_start=True)),
            "takeover": summary(takeovers(hit, facts, until="serves", alone=True)),
            "takeover_amid_faults": summary(takeovers(hit, facts, until="serves", alone=False)),
            "takeover_published": summary(takeovers(hit, facts, until="publishes", alone=False)),
            "survivor": summary(_survivors_next(hit, facts)),
        },
        "survivor_bound_s": None if step_s is None else 2 * step_s + told.lost_s,
        "ledger": _ledger(told),
    }


LOST = "no published version is lost"


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


def _survived(injected: Injected, facts: Facts, told: Told) -> bool:
    """After it a version was published, and in the end all learners merged again."""
    return told.settled and any(isinstance(event, Published) and event.t > injected.ended_at for event in facts.syncer)


def _by_kind(hit: Sequence[Injected], facts: Facts, told: Told) -> dict[str, dict[str, int]]:
    return {
        kind: {
            "injected": sum(each.fault.kind == kind for each in hit),
            "survived": sum(each.fault.kind == kind and _survived(each, facts, told) for each in hit),
        }
        for kind in sorted({each.fault.kind for each in hit})
    }


def _learners_back(hit: Sequence[Injected], facts: Facts, *, from_start: bool = False) -> list[float]:
    """From the signal that ended a learner to the first version with its new work; `from_start`: from when its process
    was started again, about a second less."""
    found = []
    for each in _lasting(hit, ENDS_LEARNER, lambda each: _first_work(facts, each)):
        at = _first_work(facts, each)
        assert at is not None
        found.append(at - (each.ended_at if from_start else each.began_at))
    return found


def _lasting(
    hit: Sequence[Injected], kinds: Sequence[str], recovery: Callable[[Injected], float | None]
) -> Iterator[Injected]:
    """Faults of these kinds after which the process came back before another fault hit it."""
    for each in hit:
        if each.fault.kind in kinds and (at := recovery(each)) is not None:
            same = (other for other in hit if other is not each and other.fault.target == each.fault.target)
            if not any(each.began_at <= other.began_at <= at for other in same):
                yield each


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


def _syncers_back(hit: Sequence[Injected], facts: Facts, *, from_start: bool = False) -> list[float]:
    """From the signal that ended the only syncer to the moment when the next one serves."""
    if is_pair(facts):
        return []  # the other one takes over
    starts = [event.t for event in facts.syncer if isinstance(event, SyncerStarted)]

    def serves(each: Injected) -> float | None:
        return next((t for t in starts if t > each.began_at), None)

    found = []
    for each in _lasting(hit, ENDS_SYNCER, serves):
        at = serves(each)
        assert at is not None
        found.append(at - (each.ended_at if from_start else each.began_at))
    return found


def _survivors_next(hit: Sequence[Injected], facts: Facts) -> list[float]:
    """From the SIGKILL of a learner to the next version that is without its work, where nothing else was wrong then."""
    found = []
    for each in hit:
        if each.fault.kind == "kill learner":
            others = [other for other in hit if other is not each]
            merges = (
                event.t
                for event in facts.syncer
                if isinstance(event, Merged)
                and event.t > each.began_at
                and event.contributors
                and each.fault.target not in event.contributors
            )
            at = next(merges, None)
            if at is not None and not any(it.began_at <= at and it.ended_at >= each.began_at for it in others):
                found.append(at - each.began_at)
    return found


def _ledger(told: Told) -> dict[str, int] | None:
    """Of the first fragment, all learners together."""
    if not told.status:
        return None
    ledger = told.status["fragments"][0]["ledger"]
    return {
        **{key: ledger[key] for key in ("trained", "merged", "pending", "lost")},
        "discarded": sum(ledger["discarded"].values()),
    }
