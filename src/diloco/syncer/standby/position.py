"""`standby.json`: what a syncer's state directory says of its part in a pair of syncers (`protocol.pair`).

A directory without it is that of a syncer that never had a second one. Its epoch is in the database.
"""

from __future__ import annotations

import json
from pathlib import Path

from diloco.errors import StoreError, first_line
from diloco.plain_json import MALFORMED
from diloco.protocol.pair.values import Position
from diloco.store.durable import sync_directory
from diloco.whole_files import write_whole

FILE = "standby.json"


def read_position(state_dir: Path) -> Position | None:
    """What is in a state directory; None: nothing.

    Raises:
        StoreError: it is damaged.
    """
    path = state_dir / FILE
    try:
        plain = json.loads(path.read_bytes())
        place, is_paired, electorate = plain["place"], plain["is_paired"], plain["electorate"]
        base, offered = plain["base"], plain["offered"]
        if place not in ("first", "standby") or type(is_paired) is not bool:
            raise ValueError(f"place {place!r}, is_paired {is_paired!r}")
        if type(base) is not int or base < 0 or type(offered) is not int or offered < 0:
            raise ValueError(f"base {base!r}, offered {offered!r}")
        if type(electorate) is not list or not all(type(each) is str for each in electorate):
            raise ValueError("the electorate")
        return Position(place, is_paired, base, frozenset(electorate), offered)
    except FileNotFoundError:
        return None
    except MALFORMED as error:
        raise StoreError(
            f"{path} is damaged ({first_line(error)}), and says whether this syncer may serve the run; start it as "
            "the standby of the other one in an empty directory, or remove the file if there is no other one."
        ) from error


def write_position(state_dir: Path, position: Position) -> None:
    """Make it durable.

    Raises:
        StoreError: the disk refused; what was there before still is.
    """
    plain = {
        "place": position.place, "is_paired": position.is_paired, "base": position.base,
        "electorate": sorted(position.electorate), "offered": position.offered,
    }  # fmt: skip
    try:
        write_whole(state_dir / FILE, json.dumps(plain, indent=1))
        sync_directory(state_dir)
    except OSError as error:
        raise StoreError(
            f"{state_dir / FILE} could not be written ({error}); free disk space, it is tried again."
        ) from error
