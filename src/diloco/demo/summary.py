"""The result of a demo: numbers (`summary.json`), a headline, and the page of its run with that headline."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco import events as ev
from diloco.demo.bucket_server import OneAtATime
from diloco.demo.plan import SYNCERS
from diloco.demo.processes import Kill
from diloco.demo.story import DemoOutcome
from diloco.event_log import read_events
from diloco.report.frame import frozen_page
from diloco.report.page import event_files, numbers
from diloco.report.series import ring_all_reduce_bytes
from diloco.report.story import Story
from diloco.report.timeline import Timeline, is_learner

PROCESSES = {
    "learner": "one learner", "trainer": "one trainer", "rollout": "one rollout worker", "reward": "the reward worker",
}  # fmt: skip
"""In the headline, by the first part of their names."""

CURVES = {"baseline": "data parallel", "isolated": "isolated learner, at the same step"}
"""Names of the controls' curves, by process."""


def summarise(outcome: DemoOutcome, bucket: OneAtATime | None = None) -> dict[str, Any]:
    """Plain values: losses in nats per byte on the same held-out sequences; bytes of both directions, counted by the
    syncer. `bucket`: holds the run."""
    timeline, config = outcome.timeline, outcome.config
    baseline, isolated = timeline.finished["baseline"], timeline.finished.get("isolated")
    assert baseline.loss is not None
    wire_bytes = sum(timeline.traffic.ways())
    baseline_wire_bytes = baseline_bytes(timeline, config.tokens_per_full_step)
    keys = ("name", "back_s", "by")
    kills = [dict(zip(keys, (kill.name, *recovery(timeline, kill)), strict=True)) for kill in outcome.kills]
    found = {
        "global_loss": outcome.global_loss,
        "baseline_loss": baseline.loss,
        "isolated_loss": None if isolated is None else isolated.loss,
        "loss_gap_percent": 100 * (outcome.global_loss / baseline.loss - 1),
        "tokens": timeline.finished["syncer"].tokens,
        "baseline_tokens": baseline.tokens,
        "initial_tokens": timeline.initial_tokens,
        "wire_bytes": wire_bytes,
        "wire_bytes_by_kind": timeline.traffic.by_kind(),
        "baseline_wire_bytes": baseline_wire_bytes,
        "bytes_ratio": baseline_wire_bytes / max(1, wire_bytes),
        "kills": kills,
        "kills_survived": sum(kill["back_s"] is not None for kill in kills),
        "versions": sum(outcome.versions),
        "versions_lost": num_lost(config.dir, outcome.versions),
        "bucket_bytes": None if bucket is None else bucket.num_bytes,
        "seed": config.run.seed,
        "seconds": outcome.seconds,
        "run": numbers(timeline),
    }
    return {"headline": headline(found), **found}


def baseline_bytes(timeline: Timeline, tokens_per_step: int) -> int:
    """Bytes that data parallel would have sent for the tokens trained while two or more learners were live.

    Each step event of a learner reports the tokens since its previous one, which are a fraction of a full step of
    `tokens_per_step` tokens; a full step costs a ring all-reduce among the learners live at that time. Tokens of a lone
    learner (the warm start in particular) and steps of learners that left count as free, in favour of the baseline.
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
            if num_learners >= 2 and trained > 0:  # tokens decrease when a learner resumes from its checkpoint
                num_bytes += trained / tokens_per_step * ring_all_reduce_bytes(num_learners, timeline.num_parameters)
    return round(num_bytes)


def recovery(timeline: Timeline, kill: Kill) -> tuple[float | None, str]:
    """Seconds from a kill until the work of the process went on, None: it never did; and the process that does it.

    A syncer is back once it serves, or its standby; a learner once it has rejoined and contributed to a merge.
    """
    if kill.name in SYNCERS:
        times, since = [*timeline.syncer_starts, *timeline.takeovers], kill.t
    else:
        joined = [begin for begin, _ in timeline.presence.get(kill.name, []) if begin > kill.t]
        times = [(merge.t, kill.name) for merge in timeline.merges if kill.name in merge.contributors]
        since = min(joined, default=math.inf)
    at, by = min((each for each in times if each[0] > since), default=(None, kill.name))
    return None if at is None else at - kill.t, by


def num_lost(directory: Path, newest: Sequence[int]) -> int:
    """Published versions that are not in the store's history in the end: published again, or newer than the `newest`
    of their fragment."""
    logs = [read_events(file) for file in directory.glob("*/events.jsonl")]
    published = [(each.fragment, each.version) for log in logs for each in log if isinstance(each, ev.Published)]
    return len(published) - len({each for each in published if each[1] <= newest[each[0]]})


# --------------------------------------------------------------------------------------------------------- in words


def headline(summary: dict[str, Any]) -> str:
    """For instance "49 times fewer bytes, loss 0.4 % higher, one learner killed and back in 5.2 s"."""
    num_bytes = _bytes(summary["wire_bytes"], summary["baseline_wire_bytes"])
    return ", ".join((num_bytes, _loss(summary["loss_gap_percent"]), kills_in_words(summary["kills"])))


def _bytes(num_bytes: int, baseline: int) -> str:
    if not num_bytes:
        return "bytes not counted"
    ratio = baseline / num_bytes
    if round(ratio, 1) == 1.0:
        return "as many bytes"
    if ratio < 1:
        return f"{_times(1 / ratio)} times more bytes" if ratio else "more bytes than data parallel, which needed none"
    return f"{_times(ratio)} times fewer bytes"


def _times(ratio: float) -> str:
    """A ratio, with one decimal place below 10."""
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:,.0f}"


def _loss(gap_percent: float) -> str:
    if not math.isfinite(gap_percent):
        return "a non-finite loss"
    if round(gap_percent, 1) == 0.0:
        return "the same loss to 0.1 %"
    return f"loss {abs(gap_percent):.1f} % {'higher' if gap_percent > 0 else 'lower'}"


def kills_in_words(kills: list[dict[str, Any]]) -> str:
    """`kills`: for each, the name of the process, and `back_s`, the seconds until it worked again, or None, and `by`,
    the process that did."""
    if not kills:
        return "no process killed"
    back_s = [kill["back_s"] for kill in kills if kill["back_s"] is not None]
    slowest = f"{max(back_s):.1f} s" if back_s else ""
    if len(kills) == 1 and back_s and kills[0]["by"] != kills[0]["name"]:
        return f"the {kills[0]['name']} killed and the {kills[0]['by']} serving {slowest} later"
    if len(kills) == 1:
        process = PROCESSES.get(kills[0]["name"].partition("-")[0], "the syncer")
        return f"{process} killed and back in {slowest}" if back_s else f"{process} killed and not back before the end"
    if len(back_s) < len(kills):
        return f"{len(kills)} kills, {len(back_s)} of the processes back"
    return f"{len(kills)} kills and all back, the slowest in {slowest}"


def describe(summary: dict[str, Any]) -> str:
    """The numbers behind the headline, one line each."""
    it, isolated = summary, summary["isolated_loss"]
    alone = "" if isolated is None else f", isolated learner {isolated:.4f}"
    is_forked = bool(it["kills"]) and sys.platform == "linux"  # as in `DemoProcesses`
    forked = "; a killed process is forked again with its imports loaded" if is_forked else ""
    bucket = "" if it["bucket_bytes"] is None else f", {it['bucket_bytes'] / 1e6:,.1f} MB written to the bucket"
    return (
        f"held-out loss: {it['global_loss']:.4f} nats per byte, data parallel {it['baseline_loss']:.4f} "
        f"({it['loss_gap_percent']:+.1f} %){alone}\n"
        f"on the wire: {it['wire_bytes'] / 1e6:,.1f} MB, data parallel {it['baseline_wire_bytes'] / 1e6:,.1f} MB "
        "(computed: a ring all-reduce of bf16 gradients in every step)\n"
        f"in the store: {it['versions']:,} versions, {it['versions_lost']:,} lost{bucket}\n"
        f"{it['run']['merges']} merges, {it['tokens']:,} tokens, {it['seconds']:.0f} s{forked}"
    )


# ----------------------------------------------------------------------------------------------------- as the page


def write_report(path: Path, outcome: DemoOutcome, summary: dict[str, Any]) -> None:
    """Write the page of the run with the headline, the controls' curves, the kills and the compared bytes.

    The last point of the global model's curve is that of the saved model: learners may have evaluated older versions.
    """
    story, tokens = Story(), summary["tokens"]
    for file in event_files([outcome.config.dir])[0]:
        for event in read_events(file):
            if event.who in CURVES:
                event = event.model_copy(update={"who": CURVES[event.who]})
            elif isinstance(event, ev.Evaluated | ev.Reported) and event.tokens >= tokens:
                continue
            story.take(event, str(file))
    story.take(
        ev.Evaluated(who=outcome.timeline.initialiser, step=0, tokens=tokens, loss=outcome.global_loss, num_sequences=0)
    )
    text = (
        "A byte-level language model learns the source text of Python's standard library. One learner warms up alone; "
        "data parallel goes on from there, too, to as many tokens with the same total batch, data and schedule. In "
        f"numbers: {describe(summary)}.".replace("\n", "; ")
    )
    write_story(
        path, story, outcome.kills, summary, text, num_bytes=summary["wire_bytes"],
        parallel_bytes=summary["baseline_wire_bytes"], ratio=summary["bytes_ratio"],
    )  # fmt: skip


def write_story(
    path: Path, story: Story, kills: Sequence[Kill], summary: dict[str, Any], text: str, **head: float
) -> None:  # fmt: skip
    """Write the page of a story with the kills and the summary's headline. `head`: values in place of the story's."""
    for kill, found in zip(kills, summary["kills"], strict=True):
        by = "it worked again" if found["by"] == kill.name else f"{found['by']} served the run"
        back = "" if found["back_s"] is None else f"; {by} {found['back_s']:.1f} s later"
        story.tell(kill.t, "bad", f"{kill.name} was killed{back}", "killed", kill.name)
    shown = story.since(0)
    shown["head"] |= head
    shown["demo"] = {"headline": summary["headline"], "text": text}
    path.write_text(frozen_page(shown), encoding="utf-8")
