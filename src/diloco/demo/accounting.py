"""The demo's sums: bytes of the baseline, share of merges, how long a process was away."""

from __future__ import annotations

from diloco.report.series import ring_all_reduce_bytes
from diloco.report.timeline import Kill, Timeline, is_learner

KINDS = ("contributions", "updates", "joins", "control")


def baseline_bytes(timeline: Timeline, tokens_per_step: int) -> int:
    """Bytes that data parallel would have sent for the tokens trained while two or more learners were there.

    Each step event of a learner says how many tokens it trained since its last one. They are that share of a full step
    of `tokens_per_step` tokens, and the step costs what a ring of the learners that were there at that moment costs.
    Tokens of a lone learner, the warm start first of all, cost nothing; so do steps of learners that are gone: both
    make the baseline look cheaper.
    """
    num_bytes = 0.0
    for process, steps in timeline.steps.items():
        if not is_learner(process):
            continue
        alone = timeline.initial_tokens if process == timeline.initialiser else 0
        before = alone
        for event in steps:
            trained, before = event.tokens - before, max(alone, event.tokens)
            num_learners = timeline.num_live(event.t)
            if num_learners >= 2 and trained > 0:  # a learner that resumes counts again from its checkpoint
                num_bytes += trained / tokens_per_step * ring_all_reduce_bytes(num_learners, timeline.num_parameters)
    return round(num_bytes)


def participation(timeline: Timeline) -> dict[str, float]:
    """The share of all merges that each learner was in."""
    return {
        name: sum(name in merge.contributors for merge in timeline.merges) / max(1, len(timeline.merges))
        for name in sorted(timeline.presence)
    }


def back_after_s(timeline: Timeline, kill: Kill) -> float | None:
    """Seconds until what was killed did its work again; None: it never did.

    A learner works where it has joined again and is in a merge, the syncer where it serves, a control where it trains.
    """
    name, since = kill.name, kill.t
    if name == "syncer":
        times = timeline.syncer_starts
    elif is_learner(name):
        joined = [begin for begin, _ in timeline.presence.get(name, []) if begin > kill.t]
        since = min(joined, default=timeline.ended_at)
        times = [merge.t for merge in timeline.merges if name in merge.contributors]
    else:
        times = [step.t for step in timeline.steps.get(name, [])]
    back_at = min((t for t in times if t > since), default=None)
    return None if back_at is None else back_at - kill.t
