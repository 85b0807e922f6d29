"""`diloco syncer check`: verify and repair the store of a run."""

from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Json
from diloco.cli._output import print_result
from diloco.errors import StoreError

if TYPE_CHECKING:
    from diloco.store.inspection import Problem, StoreState


def check(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A state directory, or the URL of a bucket.")],
    repair: Annotated[bool, typer.Option("--repair", help="Go back to each fragment's newest whole version.")] = False,
    as_json: Json = False,
) -> None:
    """Verify every object that a store's manifest names, and list lost and usable versions. Changes nothing.

    Exit code 0: a syncer can serve the newest versions; 1: it cannot. --repair needs a stopped syncer. It deletes
    nothing: in a directory, what is not whole moves to the subdirectory set-aside.
    """
    from diloco.store.inspection import check as inspect
    from diloco.store.objects import open_store, opened
    from diloco.store.repair import repair as repair_store
    from diloco.store.repair import require_repairable

    found, aside, mended = inspect(open_store(store)), tuple[str, ...](), list["Problem"]()
    if repair and found.problems:
        require_repairable(found)  # before the lock, which creates a file
        with opened(store, lock=True) as objects:
            before, aside = repair_store(objects)
        mended, found = before.problems, inspect(open_store(store))
    repaired = [f"repaired: {each.name}: {each.what}" for each in mended]
    text = "\n".join([*_lines(found), *repaired, *(f"set aside: {each}" for each in aside)])
    print_result(as_json, {**found.to_dict(), "set_aside": list(aside)}, text)
    if not found.starts:
        advice = "`diloco copy` brings a copy of the run back"
        if found.can_be_repaired:
            targets = (f"version {each.serves} of fragment {each.fragment}" for each in found.fragments)
            advice = f"--repair goes back to {', '.join(targets)}"
        raise StoreError(f"no syncer can start on {store} as it is; {advice}.")


def _lines(found: "StoreState") -> list[str]:
    lines = [f"run: {'not known' if found.run is None else found.run}"]
    if found.manifest is not None and not found.manifest.fragments:
        return [*lines, "no model yet"]
    parts = {
        "manifest": found.manifest is not None,
        "layout and frozen parameters": found.frozen is not None,
        "members and ledgers": found.has_record,
    }
    lines += [f"{name}: {'whole' if is_whole else 'not whole'}" for name, is_whole in parts.items()]
    for each in found.fragments:
        serves = "no version is whole" if each.serves is None else f"version {each.serves} is whole"
        lost = ", ".join(map(str, each.lost))
        tokens = f" ({each.lost_tokens} tokens)" if each.lost_tokens else ""
        lines.append(f"fragment {each.fragment}: {serves}" + (f"; lost: {lost}{tokens}" if lost else ""))
    return lines + [f"{each.name} {each.what}" for each in (*found.problems, *found.notes)]
