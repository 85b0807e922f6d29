"""`diloco syncer check`, `backup` and `restore`: commands on state directories."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Json
from diloco.cli._output import print_result
from diloco.errors import StoreError

if TYPE_CHECKING:
    from diloco.store.inspection import DirectoryState, Problem


def check(
    state_dir: Annotated[Path, typer.Argument(help="The state directory of a stopped syncer.")],
    repair: Annotated[bool, typer.Option("--repair", help="Go back to each fragment's newest intact version.")] = False,
    as_json: Json = False,
) -> None:
    """Verify every digest of a state directory, and list lost and usable versions.

    Exit code 0: a syncer can serve the newest versions; 1: it cannot, or a syncer is running there. --repair deletes
    nothing: it moves damaged files to the subdirectory set-aside.
    """
    from diloco.store.inspection import inspect
    from diloco.store.repair import repair as repair_directory

    aside, mended = list[Path](), list["Problem"]()
    if not repair:
        found = inspect(state_dir)
    else:
        found, aside = repair_directory(state_dir)
        if not found.starts:
            mended, found = found.problems, inspect(state_dir)
    repaired = [f"repaired: {each.file}: {each.what}" for each in mended]
    text = "\n".join([*_lines(found), *repaired, *(f"set aside: {each}" for each in aside)])
    print_result(as_json, {**found.to_dict(), "set_aside": [str(each) for each in aside]}, text)
    if not found.starts:
        advice = "`diloco syncer restore` makes it anew from a backup"
        if found.can_be_repaired:
            targets = (f"version {each.serves} of fragment {each.fragment}" for each in found.fragments)
            advice = f"--repair goes back to {', '.join(targets)}"
        raise StoreError(f"no syncer can start on {state_dir} as it is; {advice}.")


def _lines(found: "DirectoryState") -> list[str]:
    lines = [f"run: {'not known' if found.row is None else found.row['run']}"]
    parts = {
        "database": found.has_database,
        "frozen parameters and buffers": found.has_static,
        "members and ledgers": found.has_record,
    }
    lines += [f"{name}: {'whole' if is_whole else 'not whole'}" for name, is_whole in parts.items()]
    for each in found.fragments:
        serves = "no version is whole" if each.serves is None else f"version {each.serves} is whole"
        lost = ", ".join(map(str, each.lost))
        tokens = f" ({each.lost_tokens} tokens)" if each.lost_tokens else ""
        lines.append(f"fragment {each.fragment}: {serves}" + (f"; lost: {lost}{tokens}" if lost else ""))
    return lines + [f"{each.file}: {each.what}" for each in (*found.problems, *found.notes)]


def backup(
    state_dir: Annotated[Path, typer.Argument(help="The state directory of a syncer, running or not.")],
    place: Annotated[str, typer.Argument(help="A directory, or an fsspec URL such as s3://bucket/run.")],
    keep: Annotated[int, typer.Option(min=1, help="Snapshots to keep there, this one included.")] = 3,
    as_json: Json = False,
) -> None:
    """Take a snapshot of a run: one record with its versions, verified and read back."""
    from diloco.store.backup import back_up
    from diloco.store.targets import open_target

    snapshot = back_up(state_dir, open_target(place), keep)
    versions = [each.update.version for each in snapshot.versions]
    text = f"{place} has the snapshot {snapshot.name}: versions {versions} of run {snapshot.row['run']!r}"
    print_result(as_json, {"place": place, "snapshot": snapshot.name, "versions": versions}, text)


def restore(
    place: Annotated[str, typer.Argument(help="A place with snapshots, of `diloco syncer backup` or syncer.backup.")],
    state_dir: Annotated[Path, typer.Argument(help="The state directory to make; it must be absent or empty.")],
    snapshot: Annotated[str | None, typer.Option(help="The name of a snapshot; default: the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Make a state directory from a snapshot. Learners continue with it, also those with newer versions."""
    from diloco.store.backup import restore as restore_snapshot
    from diloco.store.targets import open_target

    restored = restore_snapshot(open_target(place), state_dir, snapshot)
    versions = [each.update.version for each in restored.versions]
    text = f"{state_dir} is the snapshot {restored.name}: versions {versions} of run {restored.row['run']!r}"
    print_result(as_json, {"state_dir": str(state_dir), "snapshot": restored.name, "versions": versions}, text)
