"""`WhatIf`: the questions of `diloco replay --with`, read and answered beside a replay."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from diloco.core.choices import nearest
from diloco.core.members import Deadlines
from diloco.core.merges import MERGES, SCREENS
from diloco.core.method import Method
from diloco.core.outer import OUTER_OPTIMIZERS
from diloco.core.rounds import QUORUMS
from diloco.errors import ConfigError, StoreError, translated
from diloco.plain_json import MALFORMED
from diloco.run import other_merges, other_rounds
from diloco.run.other_merges import OtherMerges
from diloco.run.other_rounds import OtherRounds
from diloco.run.recorder import entry_of
from diloco.run.replay import Replay

_TYPES = {"merge": MERGES, "screen": SCREENS, "outer": OUTER_OPTIMIZERS, "quorum": QUORUMS}

ROUNDS = ("quorum", "weight", "partial")
"""Fields of a method that change what is decided of rounds, and need no tensors."""

DEADLINES = tuple(field.name for field in fields(Deadlines))


class Changes:
    """What `--with` asks for.

    Arguments:
        asked: "field=value" each, with the value as TOML (a bare word is a text); "outer.lr=0.5" changes one field of
            an answer.

    Raises:
        ConfigError: a field that cannot be asked for, or questions about tensors and about rounds together.
    """

    def __init__(self, asked: Sequence[str]) -> None:
        self._asked = [_split(each) for each in asked]
        known = (*other_merges.FIELDS, *ROUNDS, *DEADLINES)
        names = {name.partition(".")[0] for name, _ in self._asked}
        for name in names:
            if name not in known:
                raise ConfigError(f"--with {name} cannot be asked of a journal{nearest(name, known)}")
        self.is_about_tensors = bool(names & set(other_merges.FIELDS))
        if self.is_about_tensors and not names <= set(other_merges.FIELDS):
            raise ConfigError(
                f"--with asks about merges ({', '.join(other_merges.FIELDS)}) or about rounds and deadlines, and not "
                f"both at once, as it does with {', '.join(sorted(names))}."
            )

    def of_method(self, method: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that change, of a method as in `Method.to_dict`. Raises ConfigError: no such answer."""
        changed: dict[str, Any] = {}
        for name, value in self._asked:
            field, _, own = name.partition(".")
            if field in DEADLINES:
                continue
            if own:
                changed[field] = {**(changed.get(field) or method[field] or {}), own: value}
            else:
                changed[field] = _answer(field, value)
        Method.from_dict({**method, **changed})
        return changed

    @property
    def deadlines(self) -> dict[str, float]:
        """The deadlines that change."""
        return {name: float(value) for name, value in self._asked if name in DEADLINES}


class WhatIf:
    """A replay with an answer beside it.

    Arguments:
        replay: has replayed nothing yet.
    """

    def __init__(self, replay: Replay, changes: Changes) -> None:
        self._replay, self._changes = replay, changes
        self._merges: OtherMerges | None = None
        self._rounds: OtherRounds | None = None

    def take(self, line: str) -> None:
        """The next entry of the journal.

        Raises:
            ConfigError: the run's method cannot have the changes.
        """
        entry = entry_of(line)
        if entry["e"] == "__init__" and self._merges is None and self._rounds is None:
            with translated(MALFORMED, StoreError, "the journal begins with no method", "it cannot be asked"):
                method = entry["a"]["method"]["is"]
            self._begin(method)
        self._replay.take(line)
        if self._rounds is not None:
            for said in entry.get("d", ()):
                what, _, error = said.partition(": ")
                self._replay.counts.counts[f"messages refused: {error}"] += what in ("refuses", "answers")
            self._rounds.take(entry, self._replay.begun_push)

    def _begin(self, method: Mapping[str, Any]) -> None:
        changed = self._changes.of_method(method)
        if self._changes.is_about_tensors:
            self._merges = self._replay.other = OtherMerges(changed)
        else:
            self._rounds = OtherRounds(self._replay.formats, method=changed, deadlines=self._changes.deadlines)

    def answer(self) -> dict[str, Any]:
        """What would have happened: {"assumed", "heads", "rows"} and, of merges, "versions".

        Raises:
            StoreError: the journal has no contributions to merge.
        """
        if self._merges is not None:
            return _merged(self._merges)
        counts = self._replay.counts.counts
        others = self._rounds.observer.counts if self._rounds is not None else {}
        names = sorted(name for name in {*counts, *others} if counts.get(name) or others.get(name))
        rows = [[name, counts.get(name, 0), others.get(name, 0)] for name in names]
        return {"assumed": other_rounds.ASSUMED, "heads": ["", "as it was", "with"], "rows": rows}


def _merged(merges: OtherMerges) -> dict[str, Any]:
    if not merges.versions:
        raise StoreError(
            "--with asks about tensors, and the journal has no contributions to merge; serve the run with "
            "[syncer] record_contributions = true from its beginning, or ask about rounds and deadlines."
        )
    rows = []
    for fragment, each in sorted(merges.versions.items()):
        was, other = sum(line[1] for line in each) / len(each), sum(line[2] for line in each) / len(each)
        rows.append([fragment, len(each), f"{was:.4g}", f"{other:.4g}", f"{each[-1][3]:.4g}"])
    heads = ["fragment", "rounds", "mean step", "with", "distance"]
    return {
        "assumed": other_merges.ASSUMED, "heads": heads, "rows": rows, "rounds_without_result": merges.num_failed,
        "contributions_refused": merges.num_refused,
        "versions": {str(fragment): each for fragment, each in merges.versions.items()},
    }  # fmt: skip


def _split(asked: str) -> tuple[str, Any]:
    name, equals, text = asked.partition("=")
    if not equals or not name:
        raise ConfigError(f'--with {asked} is not of the form field=value, for example "merge=TrimmedMean"')
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return name, text


def _answer(field: str, value: Any) -> Any:
    """An answer of which only the type may be given, or the beginning of its name in any case."""
    if field not in _TYPES or not isinstance(value, str):
        return value
    if field == "screen" and value == "none":
        return None
    names = [kind.__name__ for kind in _TYPES[field]]
    found = [name for name in names if name.lower() == value.lower()] or [
        name for name in names if name.lower().startswith(value.lower())
    ]
    if len(found) != 1:
        raise ConfigError(f"--with {field}={value} is not one of its answers{nearest(value, names)}")
    return {"type": found[0]}
