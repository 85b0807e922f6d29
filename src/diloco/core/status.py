"""The state of `SyncerCore` as plain values."""

from __future__ import annotations

from typing import Any

from diloco.core.ledger import total
from diloco.core.syncer import SyncerCore


def status_of(core: SyncerCore, now: float) -> dict[str, Any]:
    """Learners, rounds with the reason why each waits, and ledgers, as plain values."""
    drained = core.drained
    learners = {
        m.learner: {
            "incarnation": m.incarnation,
            "step": m.step,
            "tokens": core.accounting.accounts[m.learner].ledgers[0].trained,
            "healthy": m.healthy,
            "waiting": m.waiting,
            "drained": m.learner in drained,
            "step_s": m.step_s,
            "silent_s": max(0.0, now - m.seen_at),
            "given_up_in_s": max(0.0, core.deadlines.ends_at(m) - now),
        }
        for m in sorted(core.members.values(), key=lambda m: m.learner)
    }
    fragments = []
    for index, state in enumerate(core.fragments):
        decision = core.decision(now, index)
        if state.closing is None:
            contributed, members = core.rounds.roster(index)
        else:
            contributed = list(dict.fromkeys(c.learner for c in state.closing.contributions))
            members = sorted(state.closing.members)
        waits = "no contribution yet" if state.phase == "open" else state.phase
        ledgers = [account.ledgers[index] for account in core.accounting.accounts.values()]
        fragments.append(
            {
                "fragment": index,
                "version": state.version,
                "phase": state.phase,
                "contributed": list(contributed),
                "members": list(members),
                "reason": decision.reason if decision else waits,
                "ledger": total(ledgers).as_dict(),
            }
        )
    return {"step": core.step, "tokens": core.accounting.run_tokens, "learners": learners, "fragments": fragments}
