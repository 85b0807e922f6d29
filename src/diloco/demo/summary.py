"""The demo in numbers: `summary.json`."""

from __future__ import annotations

from typing import Any

from diloco.demo.accounting import KINDS, back_after_s, baseline_bytes, participation
from diloco.demo.headline import headline
from diloco.demo.plan import NUM_LEARNERS
from diloco.demo.story import DemoResult


def summarise(outcome: DemoResult) -> dict[str, Any]:
    """Plain values: losses in nats per byte on the same held-out sequences; bytes of both directions, as the syncer
    counts them."""
    timeline, config = outcome.timeline, outcome.config
    by_kind = {kind: timeline.traffic.get(kind, 0) for kind in KINDS}
    wire_bytes = sum(by_kind.values())
    baseline_wire_bytes = baseline_bytes(timeline, config.tokens_per_full_step)
    baseline, isolated = outcome.controls["baseline"], outcome.controls.get("isolated")
    kills = [{"name": kill.name, "back_s": back_after_s(timeline, kill)} for kill in timeline.kills]
    found = {
        "global_loss": outcome.global_loss,
        "baseline_loss": baseline["held_out_loss"],
        "isolated_loss": None if isolated is None else isolated["held_out_loss"],
        "loss_gap_percent": 100 * (outcome.global_loss / baseline["held_out_loss"] - 1),
        "tokens": outcome.served.tokens,
        "baseline_tokens": baseline["tokens"],
        "initial_tokens": timeline.initial_tokens,
        "wire_bytes": wire_bytes,
        "wire_bytes_by_kind": by_kind,
        "baseline_wire_bytes": baseline_wire_bytes,
        "bytes_ratio": baseline_wire_bytes / max(1, wire_bytes),
        "learners": NUM_LEARNERS,
        "kills": kills,
        "kills_survived": sum(kill["back_s"] is not None for kill in kills),
        "syncer_restarts": max(0, len(timeline.syncer_starts) - 1),
        "merges": len(timeline.merges),
        "versions": list(outcome.served.versions),
        "participation": participation(timeline),
        "ledger": list(outcome.served.ledger),
        "learner_steps": {name: learner["steps"] for name, learner in outcome.learners.items()},
        "blocked_s": {name: learner["metrics"]["blocked_s"] for name, learner in outcome.learners.items()},
        "num_parameters": timeline.num_parameters,
        "method": outcome.method,
        "seed": config.run.seed,
        "seconds": outcome.seconds,
    }
    return {"headline": headline(found), **found}
