"""A run in numbers, and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, StoreError, translated
from diloco.event_log import read_events
from diloco.planning.pages import page, plain, table, values_table
from diloco.report.charts import losses_chart, timeline_chart, training_chart
from diloco.report.timeline import Timeline


def read_run(folders: Sequence[Path]) -> Timeline:
    """Every `events.jsonl` below the folders, sorted out by who wrote it.

    Raises:
        ConfigError: there is none, or none of a syncer. StoreError: one cannot be read.
    """
    files = sorted({path for folder in folders for path in folder.rglob("events.jsonl")})
    where = ", ".join(map(str, folders))
    if not files:
        raise ConfigError(f"there is no events.jsonl below {where}; name the folder of a run.")
    timeline = Timeline()
    for path in files:
        for event in read_events(path):
            timeline.take(event.who, event)
    if not timeline.syncer_starts:
        raise ConfigError(f"no events.jsonl below {where} is a syncer's; name the syncer's folder too.")
    return timeline


def numbers(timeline: Timeline) -> dict[str, Any]:
    """Plain values: seconds; bytes on the syncer's connections, both directions; losses in nats per token."""
    begun = timeline.syncer_starts[0]
    losses = [(event.tokens, event.loss) for name in timeline.presence for event in timeline.evaluated.get(name, [])]
    learners = {name: _learner(timeline, name) for name in sorted(timeline.presence)}
    ended = timeline.finished.get("syncer")
    trained = max((tokens for tokens, _ in losses), default=0)
    return {
        "run": timeline.run,
        "method": timeline.method.get("name", ""),
        "num_parameters": timeline.num_parameters,
        "duration_s": timeline.ended_at - begun,
        "tokens": max(trained, ended.tokens if ended is not None else 0),
        "loss": max(losses)[1] if losses else None,
        "merges": len(timeline.merges),
        "num_bytes": sum(timeline.traffic.values()),
        "syncer_restarts": len(timeline.syncer_starts) - 1,
        "missing_events": timeline.missing,
        "learners": learners,
    }


def _learner(timeline: Timeline, name: str) -> dict[str, Any]:
    spans = timeline.presence[name]
    return {
        "present_s": sum((timeline.ended_at if end is None else end) - begin for begin, end in spans),
        "joined": len(spans),
        "given_up": [event.reason for event in timeline.evictions if event.learner == name],
        "step": timeline.newest_step(name),
        "merges": sum(name in merge.contributors for merge in timeline.merges),
        "waited_s": sum(event.seconds for event in timeline.waits.get(name, [])),
        "num_bytes": sum(timeline.traffic_of(name).values()),
    }


def write_page(path: Path, timeline: Timeline) -> None:
    """Write the page; nothing in it is loaded from elsewhere. Raises StoreError where it cannot be written."""
    body = _body(timeline, numbers(timeline))
    with translated(OSError, StoreError, f"cannot write {path}", "choose another place with --out"):
        path.write_text(page(f"run {timeline.run}", body), encoding="utf-8")


def _body(timeline: Timeline, found: dict[str, Any]) -> str:
    losses = timeline.evaluated and (
        f"<h2>Held-out loss</h2><p>Of the global model, and of controls.</p>{losses_chart(timeline)}"
    )
    training = timeline.steps and f"<h2>Training loss</h2><p>Of each process's own model.</p>{training_chart(timeline)}"
    return f"""<h1>{plain(timeline.run)}</h1>
<p class="lead">{plain(summary(found))}</p>
{losses or ""}
<h2>Who took part</h2>
<p>A row per process. A band is a learner's presence in the run, a tick a merge that it is in,
<b style="color:#16a34a">▶</b> a return. In the syncer's row every merge is a tick, and
<b style="color:#d97706">amber</b> where a learner of the run is missing from it.</p>
{timeline_chart(timeline)}
{table(HEADS, rows(found))}
{training or ""}
<h2>The method</h2>
{values_table(timeline.method)}"""


HEADS = ("learner", "present, s", "joined", "given up", "at step", "in merges", "waited, s", "MB")


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each learner, under `HEADS`."""
    return [
        (
            name,
            f"{each['present_s']:,.1f}",
            str(each["joined"]),
            str(len(each["given_up"])),
            *(f"{each[key]:,}" for key in ("step", "merges")),
            f"{each['waited_s']:,.1f}",
            f"{each['num_bytes'] / 1e6:,.2f}",
        )
        for name, each in found["learners"].items()
    ]


def summary(found: dict[str, Any]) -> str:
    """The run in one sentence."""
    loss = "" if found["loss"] is None else f", held-out loss {found['loss']:.4f} nats per token"
    missing = f"; {found['missing_events']:,} events are missing from the files" if found["missing_events"] else ""
    return (
        f"{found['method']}, {found['num_parameters']:,} parameters, {len(found['learners'])} learners: "
        f"{found['tokens']:,} tokens in {found['duration_s']:,.1f} s, {found['merges']:,} merges, "
        f"{found['num_bytes'] / 1e6:,.2f} MB on the wire{loss}{missing}"
    )
