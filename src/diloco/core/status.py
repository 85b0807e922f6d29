"""What a syncer's state machine says of itself."""

from __future__ import annotations

from typing import Any

from diloco.core.ledger import total
from diloco.core.syncer import SyncerCore


def status_of(core: SyncerCore, now: float) -> dict[str, Any]:
    """Plain values for people and programs: learners, rounds with the reason each waits, the ledger."""
    learners = {
        m.learner: {
            "incarnation": m.incarnation,
            "step": m.step,
            "tokens": core.books.ledgers[m.learner][0].trained,
            "healthy": m.healthy,
            "waiting": m.waiting,
            "step_s": m.step_s,
            "silent_s": max(0.0, now - m.seen_at),
            "given_up_in_s": max(0.0, core.deadlines.ends_at(m) - now),
        }
        for m in sorted(core.members.values(), key=lambda m: m.learner)
    }
    fragments = []
    for index, state in enumerate(core.fragments):
        decision = core.decision(now, index)
        round_ = state.rounds.get(state.version)
        fragments.append(
            {
                "fragment": index,
                "version": state.version,
                "phase": state.phase,
                "contributed": sorted(round_.contributions) if round_ else [],
                "members": sorted(round_.members) if round_ else [],
                "reason": decision.reason
                if decision
                else ("no contribution yet" if state.phase == "open" else state.phase),
                "ledger": total(each[index] for each in core.books.ledgers.values()).as_dict(),
            }
        )
    return {"step": core.step, "tokens": core.books.run_tokens, "learners": learners, "fragments": fragments}
