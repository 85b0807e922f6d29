"""Defects between a syncer and its store that are put in on purpose. Storms find each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.storms.defects import Defect

from diloco.protocol.manifest import Manifest, NamedVersion
from diloco.protocol.publishing import Act, Change, Confirmed, Publisher, Stand
from diloco.run.objects import Blob
from diloco.run.ports import Json, MergedRound
from diloco.run.published import PublishedStore

# --- one syncer -------------------------------------------------------------------------------------------------------


def names_objects_by_their_content(patch: pytest.MonkeyPatch) -> None:
    def put_blob(self: PublishedStore[Any, Any], prefix: str, blob: Blob) -> str:
        name = f"1/0-{blob.hash}"
        self._objects.put(name, blob.parts)
        return name

    patch.setattr(PublishedStore, "_put_blob", put_blob)


def publishes_before_the_swap(patch: pytest.MonkeyPatch) -> None:
    commit = PublishedStore.commit

    def at_once(
        self: PublishedStore[Any, Any], versions: Sequence[MergedRound[Any, Any]], record: Json,
        pack: Sequence[bytes], done: Callable[[], None],
    ) -> None:  # fmt: skip
        commit(self, versions, record, pack, lambda: None)
        self._worker.submit("put", None, lambda: None, lambda _: done())

    patch.setattr(PublishedStore, "commit", at_once)


def swaps_before_objects_are_there(patch: pytest.MonkeyPatch) -> None:
    put = PublishedStore.put

    def early(self: PublishedStore[Any, Any], merged: MergedRound[Any, Any], done: Callable[[], None]) -> None:
        update, held = merged.update, self._format.version(self._run_id, merged.held, merged.update, merged.tokens)
        encoded = self._format.update(self._run_id, update, merged.payload)
        names = [f"{self.publisher.manifest.epoch}/{self.publisher._num_names + n}" for n in (1, 2)]  # type: ignore[union-attr]
        put(self, merged, lambda: None)
        later = None if encoded is None else f"{names[1]}-{encoded.hash}"
        self._named[update.fragment] = NamedVersion(update.version, f"{names[0]}-{held.hash}", later)
        self._worker.submit("check", None, lambda: None, lambda _: done())

    patch.setattr(PublishedStore, "put", early)


def repeats_a_swap_with_new_bytes(patch: pytest.MonkeyPatch) -> None:
    failed = Publisher.failed

    def anew(self: Publisher, now: float) -> list[Act]:
        if self._in_flight is not None:
            manifest = self._in_flight.manifest
            self._in_flight.manifest = replace(manifest, serial=manifest.serial + 1)
        return failed(self, now)

    patch.setattr(Publisher, "failed", anew)


def takes_a_refusal_for_the_end(patch: pytest.MonkeyPatch) -> None:
    """Of its own swap, whose answer was lost."""

    def settle(self: Publisher, now: float, found: Manifest | None, token: str | None) -> list[Act]:
        self._in_flight, self.standing = None, "fenced"
        return [Stand("fenced", "the swap was refused")]

    patch.setattr(Publisher, "_settle", settle)


def does_not_raise_the_serial(patch: pytest.MonkeyPatch) -> None:
    send = Publisher._send

    def same(self: Publisher, now: float, manifest: Manifest, tickets: tuple[Any, ...]) -> list[Act]:
        is_claim = self.standing == "claiming"
        return send(self, now, manifest if is_claim else replace(manifest, serial=manifest.serial - 1), tickets)

    patch.setattr(Publisher, "_send", same)


def claims_the_epoch_of_before(patch: pytest.MonkeyPatch) -> None:
    send = Publisher._send

    def same(self: Publisher, now: float, manifest: Manifest, tickets: tuple[Any, ...]) -> list[Act]:
        if self.standing == "claiming":
            manifest = replace(manifest, epoch=max(1, manifest.epoch - 1))
        return send(self, now, manifest, tickets)

    patch.setattr(Publisher, "_send", same)


def puts_a_version_once(patch: pytest.MonkeyPatch) -> None:
    until_done = PublishedStore._until_done

    def once(self: PublishedStore[Any, Any], what: str, kind: Any, job: Any, done: Any) -> None:
        if not what.startswith("version"):
            until_done(self, what, kind, job, done)
            return
        self._worker.submit(kind, None, lambda: _or_none(job), lambda found: None if found is None else done(found))

    patch.setattr(PublishedStore, "_until_done", once)


def _or_none(job: Callable[[], Any]) -> Any:
    from diloco.errors import StoreError

    try:
        return job()
    except StoreError:
        return None


def deletes_at_once(patch: pytest.MonkeyPatch) -> None:
    init = Publisher.__init__
    patch.setattr(Publisher, "__init__", lambda self, *args, **options: init(self, *args, **{**options, "keep_s": 0.0}))


def deletes_for_a_swap_whose_fate_is_unknown(patch: pytest.MonkeyPatch) -> None:
    send = Publisher._send

    def early(self: Publisher, now: float, manifest: Manifest, tickets: tuple[Any, ...]) -> list[Act]:
        named = frozenset() if self.manifest is None else self.manifest.names
        for name in named - manifest.names:
            self._unnamed[name] = now
        return send(self, now, manifest, tickets)

    patch.setattr(Publisher, "_send", early)


def deletes_what_an_earlier_epoch_named(patch: pytest.MonkeyPatch) -> None:
    """All that its manifest does not name when it begins, and what that names once it does not any more."""
    listed = Publisher.listed

    def forgets(self: Publisher, now: float, names: Sequence[str]) -> list[Act]:
        self._unnamed.clear()
        return listed(self, now, names)

    patch.setattr(Publisher, "listed", forgets)


def never_deletes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "_may_clean", False)


# --- two syncers ------------------------------------------------------------------------------------------------------


def swaps_again_after_a_refusal(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Publisher, now: float, found: Manifest | None, token: str | None) -> list[Act]:
        assert self._in_flight is not None
        if found == self._in_flight.manifest and token is not None:
            return self.swapped(now, token)
        self._in_flight.token = token
        return self.failed(now)

    patch.setattr(Publisher, "_settle", settle)


def publishes_what_was_refused(patch: pytest.MonkeyPatch) -> None:
    refused = Publisher.refused

    def confirms(self: Publisher, now: float) -> list[Act]:
        tickets = () if self._in_flight is None else self._in_flight.tickets
        if self._in_flight is not None:
            self._in_flight.tickets = ()
        return [*([Confirmed(tickets)] if tickets else []), *refused(self, now)]

    patch.setattr(Publisher, "refused", confirms)


def claims_what_it_has_not_read(patch: pytest.MonkeyPatch) -> None:
    """The newest manifest is read when it takes over; what it claims is the one of its start."""
    claim = Publisher._claim

    def stale(self: Publisher, now: float) -> list[Act]:
        first = getattr(self, "first", self.manifest)
        if first is not None and self.manifest is not None:
            newer = {"epoch": self.manifest.epoch, "serial": self.manifest.serial}
            self.manifest = replace(first, **newer)
        return claim(self, now)

    read = Publisher.read

    def reads(self: Publisher, now: float, found: Manifest | None, token: str | None) -> list[Act]:
        if not hasattr(self, "first"):
            self.first = found  # type: ignore[attr-defined]
        return read(self, now, found, token)

    patch.setattr(Publisher, "_claim", stale)
    patch.setattr(Publisher, "read", reads)


def is_never_fenced(patch: pytest.MonkeyPatch) -> None:
    """It goes on as if nobody had claimed the run, and never swaps again."""

    def settle(self: Publisher, now: float, found: Manifest | None, token: str | None) -> list[Act]:
        assert self._in_flight is not None
        if found == self._in_flight.manifest and token is not None:
            return self.swapped(now, token)
        tickets, self._in_flight.tickets = self._in_flight.tickets, ()
        self._in_flight.retry_at, self._held_from = math.inf, math.inf
        return [Confirmed(tickets)] if tickets else []

    patch.setattr(Publisher, "_settle", settle)


def change_twice(patch: pytest.MonkeyPatch) -> None:
    """A change that was in a refused swap is made by the next epoch of the same process."""
    applied = Change.applied_to
    patch.setattr(Change, "applied_to", lambda self, manifest: applied(self, applied(self, manifest)))


ONE: dict[Defect, int] = {
    publishes_before_the_swap: 0,
    swaps_before_objects_are_there: 0,
    repeats_a_swap_with_new_bytes: 4,
    takes_a_refusal_for_the_end: 4,
    does_not_raise_the_serial: 0,
    claims_the_epoch_of_before: 0,
    puts_a_version_once: 4,
    deletes_at_once: 0,
    deletes_for_a_swap_whose_fate_is_unknown: 0,
    deletes_what_an_earlier_epoch_named: 0,
    never_deletes: 0,
    names_objects_by_their_content: 5,
    change_twice: 0,
}
"""Each with the first seed to try: the storms before it are good all the same."""

TWO: dict[Defect, int] = {
    swaps_again_after_a_refusal: 1,
    publishes_what_was_refused: 19,
    claims_what_it_has_not_read: 0,
    is_never_fenced: 1,
}
"""The same for storms with a standby."""
