"""`diloco syncer check DIR`: what is whole in a state directory, and what can still be served."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._shared import Json
from diloco.errors import StoreError

if TYPE_CHECKING:
    from diloco.store.inspection import DirectoryState, Problem

StateDir = Annotated[Path, typer.Argument(help="The state directory of a syncer that is not running.")]


def command(
    state_dir: StateDir,
    repair: Annotated[
        bool, typer.Option("--repair", help="Go back to the newest version of each fragment that is whole.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read a state directory, verify every digest, and say what is lost and what can still be served.

    Exit code 0: a syncer serves it, at the newest versions; 1: it does not, or a syncer is running on it. --repair
    deletes nothing: it moves what is damaged to set-aside in the directory.
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
    if as_json:
        typer.echo(json.dumps({**found.to_dict(), "set_aside": [str(each) for each in aside]}))
    else:
        repaired = [f"repaired: {each.file}: {each.what}" for each in mended]
        typer.echo("\n".join([*_lines(found), *repaired, *(f"set aside: {each}" for each in aside)]))
    if not found.starts:
        can = (
            f"--repair goes back to {_versions(found)}"
            if found.can_be_repaired
            else "`diloco syncer restore` makes it anew from a backup"
        )
        raise StoreError(f"no syncer starts on {state_dir} as it is; {can}.")


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


def _versions(found: "DirectoryState") -> str:
    return ", ".join(f"version {each.serves} of fragment {each.fragment}" for each in found.fragments)
