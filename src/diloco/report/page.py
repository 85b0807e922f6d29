"""The report of a run: its numbers, and its page as one file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, StoreError, translated
from diloco.event_log import EventTail, newest_event
from diloco.events import Event, Progress
from diloco.report.frame import frozen_page
from diloco.report.story import Story
from diloco.report.timeline import Timeline

READ_BYTES = 1 << 22


def read_run(folders: Sequence[Path]) -> tuple[Timeline, Story]:
    """Read every `events.jsonl` below the folders into a timeline, and into the story of the page.

    Of a run under way, all figures are of one moment: that of the newest progress event of its syncer (`as_of`). Later
    events of the syncer and the learners are left out, except orders of admins.

    Raises:
        ConfigError: no event log, or none of a syncer. StoreError: an unreadable event log.
    """
    files, last = event_files(folders)
    where = ", ".join(map(str, folders))
    if not files:
        raise ConfigError(f"there is no events.jsonl below {where}; name the folder of a run.")
    timeline, story = Timeline(as_of=last.t if isinstance(last, Progress) else None), Story()
    for path in files:
        tail = EventTail(path)
        while events := tail.read(READ_BYTES):
            for event in events:
                if timeline.includes(event):
                    timeline.take(event, str(path))
                    story.take(event, str(path))
    if not timeline.syncer_starts:
        raise ConfigError(f"no events.jsonl below {where} is of a syncer; name the syncer's folder too.")
    return timeline, story


def event_files(folders: Sequence[Path]) -> tuple[list[Path], Event | None]:
    """Every `events.jsonl` below the folders, and a syncer's newest progress, or its end.

    Those of syncers come first, since they name the learners, in the order in which their syncers served the run last.
    """
    files = sorted({path for folder in folders for path in folder.rglob("events.jsonl")})
    newest = {path: newest_event(path, "initialised", "progress", "finished") for path in files}
    served = {path: event for path, event in newest.items() if event is not None and event.who == "syncer"}
    order = sorted(served, key=lambda path: served[path].t)
    return [*order, *(path for path in files if path not in served)], served[order[-1]] if order else None


def numbers(timeline: Timeline) -> dict[str, Any]:
    """Plain values: seconds; `as_of` in Unix time, None where the run has ended; bytes on the syncer's connections,
    both directions; losses as learners logged them."""
    begun, _ = timeline.syncer_starts[0]
    evaluated = (event for name in timeline.presence for event in timeline.evaluated.get(name, []) if not event.of_part)
    losses = [(event.tokens, event.loss) for event in evaluated]
    learners = {name: _learner(timeline, name) for name in sorted(timeline.presence)}
    ended = timeline.finished.get("syncer")
    trained = max((tokens for tokens, _ in losses), default=0)
    return {
        "run": timeline.run,
        "as_of": timeline.as_of,
        "method": timeline.method.get("name", ""),
        "num_parameters": timeline.num_parameters,
        "duration_s": timeline.ended_at - begun,
        "tokens": max(timeline.tokens, trained, ended.tokens if ended is not None else 0),
        "loss": max(losses)[1] if losses else None,
        "merges": len(timeline.merges),
        "num_bytes": sum(timeline.traffic.ways()),
        "syncer_restarts": timeline.num_restarts,
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
        "waited_s": sum(event.seconds for event in timeline.waits.get(name, [])) if name in timeline.steps else None,
        "num_bytes": sum(timeline.traffic.ways(name)),
    }


def write_page(path: Path, story: Story) -> None:
    """Write the page as one self-contained file.

    Raises:
        StoreError: the file cannot be written.
    """
    text = frozen_page(story.since(0))
    with translated(OSError, StoreError, f"cannot write {path}", "choose another place with --out"):
        path.write_text(text, encoding="utf-8")


HEADS = ("learner", "present, s", "joined", "given up", "at step", "in merges", "waited, s", "MB")


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each learner, with the columns of `HEADS`."""
    return [
        (
            name,
            f"{each['present_s']:,.1f}",
            str(each["joined"]),
            str(len(each["given_up"])),
            *(f"{each[key]:,}" for key in ("step", "merges")),
            "–" if each["waited_s"] is None else f"{each['waited_s']:,.1f}",
            f"{each['num_bytes'] / 1e6:,.2f}",
        )
        for name, each in found["learners"].items()
    ]


def summary(found: dict[str, Any]) -> str:
    """The run in one sentence."""
    loss = "" if found["loss"] is None else f", held-out loss {found['loss']:.4f}"
    num = len(found["learners"])
    as_of = "" if found["as_of"] is None else f"; as of {datetime.fromtimestamp(found['as_of'], UTC):%H:%M:%S} UTC"
    missing = f"; {found['missing_events']:,} events are missing from the files" if found["missing_events"] else ""
    return (
        f"{found['method']}, {found['num_parameters']:,} parameters, {num} learner{'s' * (num != 1)}: "
        f"{found['tokens']:,} tokens in {found['duration_s']:,.1f} s, {found['merges']:,} merges, "
        f"{found['num_bytes'] / 1e6:,.2f} MB on the wire{loss}{as_of}{missing}"
    )
