"""The demo in numbers: `summary.json`."""

from __future__ import annotations

from typing import Any

from diloco.demo.accounting import KINDS, baseline_bytes, participation
from diloco.demo.story import NUM_LEARNERS, Outcome


def summarise(outcome: Outcome) -> dict[str, Any]:
    """Plain values. Losses are nats per byte on the same held-out sequences; bytes are those on the sockets, both directions."""
    timeline = outcome.timeline
    by_kind = {kind: timeline.traffic.get(kind, 0) for kind in KINDS}
    counted_on = "sockets" if sum(by_kind.values()) else "messages"
    if counted_on == "messages":
        by_kind = _message_bytes(outcome)
    wire_bytes = sum(by_kind.values())
    baseline_wire_bytes = baseline_bytes(timeline, outcome.config.tokens_per_full_step)
    baseline_loss = outcome.baseline["held_out_loss"]
    return {
        "global_loss": outcome.global_loss,
        "baseline_loss": baseline_loss,
        "isolated_loss": None if outcome.isolated is None else outcome.isolated["held_out_loss"],
        "loss_gap_percent": 100 * (outcome.global_loss / baseline_loss - 1),
        "tokens": timeline.tokens,
        "baseline_tokens": outcome.baseline["tokens"],
        "wire_bytes": wire_bytes,
        "wire_bytes_by_kind": by_kind,
        "counted_on": counted_on,
        "baseline_wire_bytes": baseline_wire_bytes,
        "bytes_ratio": baseline_wire_bytes / max(1, wire_bytes),
        "learners": NUM_LEARNERS,
        "kills_survived": outcome.num_kills,
        "syncer_restarts": len(timeline.restarts),
        "merges": len(timeline.merges),
        "participation": participation(timeline),
        "num_parameters": timeline.num_parameters,
        "blocked_s": {name: learner["metrics"]["blocked_s"] for name, learner in outcome.learners.items()},
        "method": outcome.config.method,
        "seconds": outcome.seconds,
    }


def _message_bytes(outcome: Outcome) -> dict[str, int]:
    """Where the system counts no sockets: what learners say they sent and received, without framing. Killed ones say nothing."""
    counts = dict.fromkeys(KINDS, 0)
    for learner in outcome.learners.values():
        for kind, num_bytes in learner["metrics"]["num_bytes"].items():
            counts[kind] += num_bytes
    return counts
