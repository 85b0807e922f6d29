"""`diloco replay`: repeat a syncer's decisions and merges from its journal, and compare every digest."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.cli._options import Json
from diloco.cli._output import make_table, print_result
from diloco.config import load_config
from diloco.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from diloco.run.journal.replay import Replay
    from diloco.store.journal_reader import JournalReader

PROGRESS_EVERY_S = 2.0
"""Interval of progress messages."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run file, or the syncer's state directory.")],
    until: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Stop after this time of the journal.")
    ] = None,
    fragment: Annotated[int | None, typer.Option(min=0, metavar="INDEX", help="Merge only this fragment.")] = None,
    as_json: Json = False,
) -> None:
    """Repeat all decisions of a syncer from its journal, and all merges, and compare every digest."""
    from diloco.following.stored_status import newest_digests
    from diloco.run.journal.payloads import TensorFormats
    from diloco.run.journal.replay import Replay
    from diloco.store.journal_reader import JournalReader
    from diloco.store.objects import is_url, open_store

    state_dir, store = _places(run)
    stored = newest_digests(open_store(store))  # before the journal, to which a syncer may write
    reader = JournalReader(state_dir)
    replay = Replay(TensorFormats(reader.payload), fragment=fragment)
    span_s = _replay(reader, replay, until)
    if until is None and stored is not None:
        digests, epoch = stored
        replay.finish(digests, epoch if is_url(store) else 0)  # no other syncer claims a directory
    elif until is None:
        typer.echo(f"the end of the journal is not compared: the versions in {store} cannot be read", err=True)
    if not replay.findings.num_boots and replay.findings.difference is None:
        raise StoreError(f"the journal of {run} has no start of a syncer to replay from; check the path.")
    found = _numbers(replay, span_s)
    print_result(as_json, found, lambda: _show(found), indent=1)
    if replay.findings.difference is not None:
        raise typer.Exit(1)


def _places(run: Path) -> tuple[Path, str]:
    """The state directory, and the place of the run's objects."""
    if run.is_dir():
        return run, str(run)
    if not run.exists():
        raise ConfigError(f"there is no {run}; give the run file, or the syncer's state directory")

    config = load_config(run)
    return config.state_dir, config.store


def _replay(reader: "JournalReader", replay: "Replay", until: float | None) -> float:
    """Replay the entries; returns the seconds from the first to the last."""
    from diloco.run.journal.recorder import entry_of

    began_s = reported_s = time.monotonic()
    first_s, offset_s, span_s = None, 0.0, 0.0
    for line in reader:
        head = entry_of(line)
        if head["e"] == "#journal":
            offset_s = head["wall_s"] - head["t"]
        elif "t" in head:
            at_s = head["t"] + offset_s
            first_s = at_s if first_s is None else first_s
            if until is not None and at_s - first_s > until:
                break
            span_s = at_s - first_s
        replay.take(line)
        if time.monotonic() - reported_s >= PROGRESS_EVERY_S:
            reported_s = time.monotonic()
            done = reader.read_bytes / max(1, reader.num_bytes)
            num, seconds = replay.findings.num_entries, reported_s - began_s
            typer.echo(f"replayed {num} events ({done:.0%} of the journal) in {seconds:.0f} s", err=True)
    return span_s


def _numbers(replay: "Replay", span_s: float) -> dict[str, Any]:
    findings = replay.findings
    fragments: list[dict[str, Any]] = []
    if replay.driver is not None and replay.driver.state.is_initialised:
        model = replay.driver.state.model
        held = [model.held(index) for index in range(len(model.versions))]
        fragments = [{"version": each.version, "digest": each.digest} for each in held]
    return {
        "seconds": round(span_s, 3),
        "events": findings.num_entries,
        "decisions_equal": findings.num_equal,
        "boots": findings.num_boots,
        "merges": findings.num_merges,
        "merges_equal": findings.num_merges_equal,
        "skipped": findings.num_skipped,
        "gaps": findings.gaps,
        "difference": findings.difference,
        "fragments": fragments,
    }


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
    rows = [
        ("starts of the syncer", f"{found['boots']}"),
        ("events replayed", f"{found['events']}"),
        ("equal decisions", f"{found['decisions_equal']} of {found['events']}"),
        ("merges", f"{found['merges']}"),
        ("merges with equal digests", f"{found['merges_equal']} of {found['merges']}"),
        ("period", f"{found['seconds']:.1f} s"),
    ]
    console.print(make_table(("", ""), rows, ruled=False))
    if found["fragments"]:
        each = ((str(index), str(it["version"]), it["digest"][:16]) for index, it in enumerate(found["fragments"]))
        console.print(make_table(("fragment", "version", "digest"), each, num_text=1))
    for gap in found["gaps"]:
        console.print(f"gap: {gap}")
    if found["skipped"]:
        console.print(f"{found['skipped']} entries after a gap, up to the next start, cannot be replayed.")
    unmerged = found["merges"] - found["merges_equal"]
    if unmerged and found["difference"] is None:
        console.print(
            f"{unmerged} merges were not repeated: their contributions were not recorded (--record-contributions of "
            "the syncer), or --fragment excludes them."
        )
    difference = found["difference"]
    console.print("no difference" if difference is None else f"first difference: {difference}")
