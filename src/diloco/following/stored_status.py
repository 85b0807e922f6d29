"""The status of a run, and its newest digests, from its store alone: for `diloco status` and `replay`."""

from __future__ import annotations

import os
import time
from typing import Any

from diloco.core.update import Update
from diloco.errors import ConfigError, DamagedObjectError, NotInitialisedError, StoreError, translated
from diloco.escaping import MALFORMED
from diloco.run.objects import Readable
from diloco.run.ports import SavedRun
from diloco.run.run_state import RunState
from diloco.run.status import RunStatus
from diloco.store.inspection import order_of
from diloco.store.objects import open_store, read_manifest, repeated
from diloco.store.reading import ObjectReader, advice, require_one_run

NOT_STORED = ("live", "healthy", "heard", "waiting", "silent_s", "given_up_in_s", "share", "versions_behind")
"""Of a learner: only a syncer knows it."""


def stored_status(place: str | os.PathLike[str]) -> dict[str, Any]:
    """Plain values as of a syncer's status, of the run's newest manifest; None: only a syncer knows it.

    Raises:
        ConfigError: there is no run. NotInitialisedError: it has no model yet. StoreError: it cannot be read.
    """
    objects = open_store(place)
    return repeated(lambda: _status(objects))


def _status(objects: Readable) -> dict[str, Any]:
    manifest = read_manifest(objects)
    assert manifest.frozen is not None
    assert manifest.record is not None
    newest = [versions[0] for versions in manifest.fragments]
    with ObjectReader(objects) as reader:
        frozen = reader.frozen(manifest.frozen, static=False)
        record, epochs = reader.record(manifest.record, len(newest))
        require_one_run(frozen, manifest, objects.name)
        heads = [reader.head(each.held, f"version {each.version}") for each in newest]
    place = objects.name
    with translated(MALFORMED, DamagedObjectError, f"the record of {place} has invalid values", advice(place)):
        updates = [Update.from_dict(head.described["update"]) for head in heads]  # each knows its version and digest
        contributors = tuple(each.contributors for each in updates)
        saved = SavedRun(
            **vars(frozen), fragments=tuple(updates), contributors=contributors, epochs=epochs, record=record
        )
        state = RunState[Update, Any](frozen.run, frozen.method)
        state.restore(saved, 0.0)
        last = max(zip(newest, updates, strict=True), key=lambda it: order_of(it[0].held))[1]
        state.model.newest = last if last.version else None
        values = RunStatus().as_dict(state, 0.0)
    for learner in values["learners"].values():
        learner |= dict.fromkeys(NOT_STORED)
    for fragment in values["fragments"]:
        fragment |= {"phase": None, "contributed": [], "members": [], "reason": "not in the store"}
    store = {
        "place": place, "standing": "released" if manifest.boot == 0 else "serving", "is_over": manifest.is_over,
        "epoch": manifest.epoch, "serial": manifest.serial, "address": manifest.address,
        "versions": list(manifest.versions),
    }  # fmt: skip
    return {
        **values, "epoch": manifest.epoch, "spooled_bytes": None, "waits_for": None, "time_s": time.time(),
        "uptime_s": None, "missing_events": None, "budget_tokens": None, "num_bytes": {}, "store": store,
    }  # fmt: skip


def newest_digests(objects: Readable) -> tuple[list[tuple[int, str]], int] | None:
    """Version and digest of each fragment's newest version, not verified, of a run that may be served (empty: there is
    no model), and the epoch of the newest claim; None: they cannot be read."""

    def read() -> tuple[list[tuple[int, str]], int]:
        manifest = read_manifest(objects)
        newest = [versions[0] for versions in manifest.fragments]
        with ObjectReader(objects) as reader:
            heads = [(each.version, reader.head(each.held, f"version {each.version}")) for each in newest]
        return [(version, str(head.described["update"]["digest"])) for version, head in heads], manifest.epoch

    try:
        return repeated(read)
    except (ConfigError, NotInitialisedError):
        return [], 0
    except (StoreError, *MALFORMED):
        return None
