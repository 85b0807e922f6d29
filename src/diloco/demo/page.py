"""`report.html`: the page of the demo's run, with what the demo knows beyond the run's own events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco import events as ev
from diloco.demo.accounting import KINDS
from diloco.demo.plan import VICTIM
from diloco.demo.served import PROMPT
from diloco.demo.story import DemoResult
from diloco.event_log import read_events
from diloco.report.frame import frozen_page
from diloco.report.story import Story
from diloco.report.timeline import is_learner

DATA_PARALLEL = "data parallel"
CURVES = {"baseline": DATA_PARALLEL, "isolated": "isolated learner, at the same step"}
"""Names of the controls' curves, by the directory of their events."""


def write_report(path: Path, outcome: DemoResult, summary: dict[str, Any]) -> None:
    """Write the page; nothing in it is loaded from elsewhere."""
    path.write_text(frozen_page(told(outcome, summary)), encoding="utf-8")


def told(outcome: DemoResult, summary: dict[str, Any]) -> dict[str, Any]:
    """The run's story with the controls' curves, the kills, the final loss and the measured bytes; the rest is in
    "demo"."""
    story, run = Story(), outcome.config.dir
    for path in sorted(run.glob("*/events.jsonl")):
        for event in read_events(path):
            for each in _shown(event, outcome):
                story.take(each)
    end, served = outcome.timeline.ended_at, outcome.served
    story.take(_evaluated(outcome.timeline.initialiser, end, served.tokens, outcome.global_loss))
    for kill, found in zip(outcome.timeline.kills, summary["kills"], strict=True):
        back = "" if found["back_s"] is None else f"; it worked again {found['back_s']:.1f} s later"
        story.tell(kill.t, "bad", f"{kill.name} was killed{back}", "killed", kill.name)
    shown = story.since(0)
    shown["head"] |= {
        "num_bytes": summary["wire_bytes"], "parallel_bytes": summary["baseline_wire_bytes"],
        "ratio": summary["bytes_ratio"],
    }  # fmt: skip
    return {**shown, "demo": _demo(outcome, summary)}


def _evaluated(who: str, t: float, tokens: int, loss: float) -> ev.Evaluated:
    return ev.Evaluated(t=t, who=who, step=0, tokens=tokens, loss=loss, num_sequences=0)


def _shown(event: ev.Event, outcome: DemoResult) -> Iterator[ev.Event]:
    """An event as the page takes it: a control's curve has a name of its own, and begins where the warm start ended;
    the end of the global model's is that of the served model, which a learner may have evaluated a version before."""
    name = CURVES.get(event.who)
    if name is None:
        if not isinstance(event, ev.Evaluated | ev.Reported) or event.tokens < outcome.served.tokens:
            yield event
        if isinstance(event, ev.Evaluated) and event.tokens == outcome.timeline.initial_tokens:
            for control in outcome.controls:
                yield _evaluated(CURVES[control], event.t, event.tokens, event.loss)
        return
    renamed = event.model_copy(update={"who": name})
    if isinstance(event, ev.Evaluated) and name != DATA_PARALLEL:  # it trains a share of the run's tokens
        yield renamed.model_copy(update={"tokens": event.step * outcome.config.tokens_per_full_step})
    else:
        yield renamed


def _demo(outcome: DemoResult, summary: dict[str, Any]) -> dict[str, Any]:
    """Text for the page: the headline, what was done, more tiles [number, meaning], and sections."""
    kinds = ", ".join(f"{kind} {summary['wire_bytes_by_kind'][kind] / 1e6:,.2f} MB" for kind in KINDS)
    return {
        "headline": summary["headline"],
        "intro": _intro(outcome, summary),
        "tiles": _tiles(summary),
        "bytes": f"Of this run: {kinds}.",
        "sections": [
            {"title": "What the model writes", "prompt": PROMPT, "text": outcome.sample},
            {"title": "How it was measured", "text": _measured(outcome, summary)},
        ],
    }


def _intro(outcome: DemoResult, summary: dict[str, Any]) -> str:
    is_killed = VICTIM in [kill["name"] for kill in summary["kills"]]
    killed = f" {VICTIM} is ended with kill -9 on the way, and started again." if is_killed else ""
    return (
        f"A byte-level language model of {summary['num_parameters']:,} parameters learns the source text of Python's "
        f"standard library. One learner warms up alone for {outcome.config.warm_start.steps} steps and gives the run "
        f"its model; {summary['learners'] - 1} more join, and they exchange 4-bit outer gradients through a syncer."
        f"{killed} Data parallel, the yardstick, trains on as many tokens, {summary['baseline_tokens']:,}, with the "
        "same total batch."
    )


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str]]:
    gap, isolated = summary["loss_gap_percent"], summary["isolated_loss"]
    way = f"{abs(gap):.1f} % {'above' if gap > 0 else 'below'}"
    tiles = [(f"{summary['baseline_loss']:.4f}", f"held-out loss of data parallel; the global model's is {way}")]
    if isolated is not None:
        tiles.append((f"{isolated:.4f}", "held-out loss of a learner that never communicates"))
    back = [(kill["back_s"], kill["name"]) for kill in summary["kills"] if kill["back_s"] is not None]
    if back:
        seconds, name = max(back)
        work = "was in a merge" if is_learner(name) else "worked"
        tiles.append((f"{seconds:.1f} s", f"until {name}, killed, {work} again"))
    return tiles


def _measured(outcome: DemoResult, summary: dict[str, Any]) -> str:
    config = outcome.config
    alone = (
        ""
        if summary["isolated_loss"] is None
        else " The isolated learner makes as many steps as the longest learner of the run, on a share of the tokens; "
        "its curve is drawn at the run's step."
    )
    return (
        "The syncer, the learners and the controls were separate processes on this machine, one torch thread each, "
        f"joined by loopback. All losses are means over the same {config.evaluate.sequences} held-out sequences of "
        f"{config.data.sequence_length} bytes, in nats per byte; a token is a byte. The last point of the global model "
        "is the loss of the model that the syncer served when the run was over. Data parallel goes on from the same "
        "warm start, and reads the union of the learners' data in the same order, with the same schedule."
        f"{alone} The bytes are those of the syncer's messages with gRPC's framing, without HTTP/2, TLS and TCP. "
        f"Seed {summary['seed']}; it took {summary['seconds']:.0f} s. The same numbers are in "
        "summary.json, every event in the events.jsonl files."
    )
