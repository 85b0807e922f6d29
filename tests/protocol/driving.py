"""What a driver does with a SyncerCore, at once and without a disk: write a record, store a version, start again from
what was written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from diloco.core.layout import Layout
from diloco.protocol.actions import Action
from diloco.protocol.contribution import Verdict
from diloco.protocol.in_flight import Ledger
from diloco.protocol.records import Record
from diloco.protocol.syncer import SyncerCore
from diloco.run.experts import ExpertStatus
from diloco.run.global_model import GlobalModel
from diloco.run.status import RunStatus

LAYOUT = Layout((), ())
A = TypeVar("A", bound=Action)


def only(kind: type[A], actions: Iterable[Action]) -> A:
    """The one action of its kind."""
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def kinds(actions: Iterable[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def record(core: SyncerCore, now: float = 0.0) -> tuple[Record, list[Action]]:
    """A record is written; what the core says to that."""
    written = core.saved()
    return written, core.recorded(now, written.serial)


def publish(core: SyncerCore, now: float = 0.0, fragment: int = 0, refused: Sequence[str] = ()) -> list[Action]:
    """The merge under way is done and stored, with the record that belongs to it."""
    core.merged(fragment, refused)
    return committed(core, now, fragment)


def committed(core: SyncerCore, now: float, fragment: int, written: Record | None = None) -> list[Action]:
    """The new version is stored with a record that counts it as published; None: it is taken now."""
    written = written or core.saved(storing=[fragment])
    return [*core.stored(now, fragment), *core.recorded(now, written.serial)]


def status_of(core: SyncerCore, now: float) -> dict[str, Any]:
    """Its part of what `diloco status` shows, where no learner has said which versions it has."""
    model = GlobalModel[Any, Any](LAYOUT, b"", core.fragments, [()] * len(core.fragments))
    return RunStatus().of_core(core, model, ExpertStatus(()), now)


def restarted(core: SyncerCore, written: Record, now: float, versions: Sequence[int] | None = None) -> SyncerCore:
    """A new process that finds this record on the disk, as JSON, beside `versions` (None: those that are published)."""
    found = [state.version for state in core.fragments] if versions is None else versions
    again = SyncerCore(core.rules, found, deadlines=core.deadlines)
    again.restore(now, json.loads(json.dumps(written.values)))
    return again


def ledger(core: SyncerCore, learner: str, fragment: int = 0) -> Ledger:
    return core.accounting.accounts[learner].ledgers[fragment]


def verdicts(core: SyncerCore, learner: str) -> tuple[Verdict, ...]:
    """What a learner hears of its contributions."""
    return core.standing(learner).verdicts
