"""The right to publish a run: one syncer's part in the succession of manifests.

A store is a set of immutable objects and one manifest, which a syncer may swap only if it is still the one that it has
read. So at most one manifest follows another, whatever clocks say, and no syncer needs to know of the others:

1. Objects are stored, then the swap succeeds, then learners are told. One swap is in flight at a time.
2. Every swap raises the serial, so that the bytes of a manifest never come twice.
3. A swap whose answer is lost is repeated with the same bytes and the same condition. If it is refused, the manifest is
   read: if it is the one that was sent, the swap has succeeded; otherwise another syncer has the run, and this one is
   fenced.
4. Every start claims a new epoch with a swap, before it puts anything. A standby does so once the manifest has not
   changed for a lease, by its own clock; a first swaps at least every third of one.
5. A first whose last confirmed swap was sent a lease ago is suspended: it publishes and acknowledges nothing until a
   swap succeeds. Nothing depends on that but how soon learners look for the other syncer.
6. An object is deleted (a) a while after a confirmed manifest has stopped naming it; (b) if an earlier epoch wrote it
   and no confirmed manifest of this one has named it. Nothing is deleted for a swap whose fate is unknown.

`Publisher` has no clock, thread or store: every method is an event, takes the time, and returns what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from diloco.errors import DilocoError, StoreError, UnknownRunError
from diloco.protocol.manifest import Manifest, NamedVersion, epoch_of

Standing = Literal["waiting", "claiming", "serving", "suspended", "fenced", "released"]
"""What a syncer may do with its run.

    waiting     it serves nothing: another syncer may
    claiming    its claim is in flight
    serving     it serves the run
    suspended   a lease has passed since its last confirmed swap was sent
    fenced      another syncer has claimed the run, or it cannot be served
    released    it has given up the run, which any syncer may claim at once
"""

RETRY_S = 1.0
"""Between two tries of a request that the store did not answer."""

RENEWALS = 3
"""Swaps within a lease, at least."""

READS = 10
"""Reads within a lease of a syncer that waits, at least."""

READ_S = 1.0
"""Between two of its reads, at most: it finds a run that was released."""


@dataclass(frozen=True)
class Read:
    """Read the manifest, then call `read`, or `failed`."""


@dataclass(frozen=True)
class Swap:
    """Replace the manifest with `data` if it is the one with this token (None: if there is none); then call `swapped`,
    `refused`, or, where its fate is unknown, `failed`."""

    data: bytes
    token: str | None


@dataclass(frozen=True)
class List:
    """List all objects, then call `listed`."""


@dataclass(frozen=True)
class Delete:
    """Delete those of these objects that exist. No answer is needed."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Serve:
    """The run is this syncer's, as this manifest says: load it and serve it in the manifest's epoch."""

    manifest: Manifest


@dataclass(frozen=True)
class Confirmed:
    """The changes with these tickets are durable."""

    tickets: tuple[Any, ...]


@dataclass(frozen=True)
class Stand:
    """The standing has changed. `why`: a sentence."""

    standing: Standing
    why: str


@dataclass(frozen=True)
class RefuseStart:
    """The run cannot be served: the start is refused, or the manifest cannot be read."""

    error: DilocoError


Act = Read | Swap | List | Delete | Serve | Confirmed | Stand | RefuseStart


@dataclass(frozen=True)
class Change:
    """A change of the manifest.

    Attributes:
        ticket: returned in `Confirmed`.
        published: new versions, by fragment.
        record: the new record; `is_over`: as it says, like in `Manifest`.
        packs: new packs of groups, by number; `live`: those of all packs that the record needs; None: there are none.
        keep: versions that groups need.
        initial: fields of a new run's first model.
    """

    ticket: Any
    published: Mapping[int, NamedVersion] = field(default_factory=dict)
    record: str | None = None
    is_over: bool = False
    initial: Mapping[str, Any] = field(default_factory=dict)
    packs: Mapping[int, str] = field(default_factory=dict)
    live: Collection[int] | None = None
    keep: int = 0

    def applied_to(self, manifest: Manifest) -> Manifest:
        """The manifest after the change."""
        changed = replace(manifest, **self.initial)
        if self.live is not None:
            changed = changed.with_packs(self.packs, self.live, self.keep)
        changed = changed.with_versions(self.published)
        return changed if self.record is None else replace(changed, record=self.record, is_over=self.is_over)


@dataclass
class _InFlight:
    """A swap. `began_at`: when it was first sent; `retry_at`: when it is sent again (infinite: it may be answered)."""

    manifest: Manifest
    token: str | None
    tickets: tuple[Any, ...]
    began_at: float
    retry_at: float = math.inf

    @property
    def swap(self) -> Swap:
        return Swap(self.manifest.to_bytes(), self.token)


class Publisher:
    """One syncer's claim on a run.

    Arguments:
        run: the run's name.
        boot: a random number of the process, other than 0.
        former: the boot of this syncer's former process, which has ended; None: there was none.
        address: of this syncer, for people.
        is_standby: it waits while another syncer serves the run; otherwise that is refused.
        lease_s: infinite: no other syncer can have the store (the lock of a directory).
        keep_s: how long an object stays after the last confirmed manifest that named it.
        shortest_swap_s: between the beginnings of two swaps.

    Attributes:
        standing: as above.
        manifest: the newest one that is known.
        epoch: that of its last claim; 0: there was none.
    """

    def __init__(
        self, run: str, *, boot: int, former: int | None = None, address: str = "", is_standby: bool = False,
        lease_s: float = math.inf, keep_s: float = 600.0, shortest_swap_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.standing: Standing = "waiting"
        self.manifest: Manifest | None = None
        self.epoch = 0
        self._run, self._boot, self._former, self._address = run, boot, former, address
        self._is_standby, self._lease_s, self._keep_s, self._shortest_s = is_standby, lease_s, keep_s, shortest_swap_s
        self._token: str | None = None
        self._is_reading = self._is_promoted = self._is_stopping = False
        self._read_at = math.inf  # when to read next
        self._seen_at: float | None = None  # since when a manifest that is waited for has not changed
        self._in_flight: _InFlight | None = None
        self._changes: list[Change] = []
        self._began_at = -math.inf  # when a swap was sent last
        self._held_from = -math.inf  # when the last confirmed swap was first sent
        self._num_names = 0
        self._unnamed: dict[str, float] = {}  # objects to delete, and when
        self._list_at = math.inf

    # --- the start ----------------------------------------------------------------------------------------------------

    def promote(self, now: float) -> list[Act]:
        """Claim the run at once, by an operator's decision. The syncer that has it is fenced by its next swap."""
        self._is_promoted = True
        return [] if self.standing != "waiting" or self._is_reading else self.start(now)

    def read(self, now: float, found: Manifest | None, token: str | None) -> list[Act]:
        """The manifest was read; None: there is none."""
        self._is_reading, self._read_at = False, math.inf
        if self._in_flight is not None and not self._is_over:
            return self._settle(now, found, token)
        if self.standing != "waiting":
            return []
        has_changed = self._seen_at is None or token != self._token
        is_first = self._seen_at is None
        self.manifest, self._token = found, token
        if found is not None and found.run != self._run:
            return self.fail(
                UnknownRunError(
                    f"the store holds run {found.run!r}, not {self._run!r}; use another place for this run."
                )
            )
        if has_changed:
            self._seen_at = now
        assert self._seen_at is not None
        is_free = found is None or found.boot in (0, self._former) or self._lease_s == math.inf
        if is_free or self._is_promoted or now - self._seen_at >= self._lease_s:
            return self._claim(now)
        if has_changed and not is_first and not self._is_standby:
            assert found is not None
            at = f" at {found.address}" if found.address else ""
            return self.fail(
                StoreError(
                    f"the store is served by another syncer{at}, in epoch {found.epoch}; stop that one, or start this "
                    "one with --standby."
                )
            )
        self._read_at = now + min(READ_S, self._lease_s / READS)
        return []

    def _claim(self, now: float) -> list[Act]:
        found = self.manifest or Manifest(self._run)
        claim = replace(
            found, epoch=found.epoch + 1, boot=self._boot, address=self._address, origin=None, copied_at=None
        )
        self.standing, self.epoch = "claiming", claim.epoch
        return [Stand("claiming", "the run is free"), *self._send(now, claim, ())]

    def start(self, now: float) -> list[Act]:
        """Read the manifest; at first, to claim the run once no other syncer has it."""
        self._is_reading, self._read_at = True, math.inf
        return [Read()]

    def fail(self, error: DilocoError) -> list[Act]:
        """The run cannot be served; also called where the manifest that was read is damaged, or of another format."""
        if self._is_over:
            return []
        self.standing = "fenced"
        return [RefuseStart(error)]

    # --- changes ------------------------------------------------------------------------------------------------------

    def next_name(self) -> str:
        """The beginning of a new object's name, in the epoch that was claimed, also once another one is known."""
        self._num_names += 1
        return f"{self.epoch}/{self._num_names}"

    def change(self, now: float, change: Change) -> list[Act]:
        """Make a change with the next swap. Its objects are stored."""
        self._changes.append(change)
        return self.tick(now)

    def swapped(self, now: float, token: str) -> list[Act]:
        """The swap in flight has succeeded."""
        done, before = self._in_flight, self.manifest
        if self._is_over:
            return []
        assert done is not None
        self._in_flight, self.manifest, self._token = None, done.manifest, token
        self._held_from = done.began_at
        if self.standing == "claiming":
            self.standing = "serving"
            self._list_at = now + self._keep_s
            return [Stand("serving", f"epoch {done.manifest.epoch}"), Serve(done.manifest), *self.tick(now)]
        if done.manifest.boot == 0:
            self.standing = "released"
            return [Confirmed(done.tickets), Stand("released", "this syncer stops")]
        assert before is not None
        for name in before.names - done.manifest.names:
            self._unnamed[name] = now + self._keep_s
        return [*([Confirmed(done.tickets)] if done.tickets else []), *self.tick(now)]

    def refused(self, now: float) -> list[Act]:
        """The store has another manifest than the swap in flight expects."""
        return [] if self._is_over else self.start(now)

    def failed(self, now: float) -> list[Act]:
        """A read or a swap was not answered, or the store could not execute it now."""
        if self._is_reading:
            self._is_reading, self._read_at = False, now + RETRY_S
        elif self._in_flight is not None:
            self._in_flight.retry_at = now + RETRY_S
        return self.tick(now)

    def _settle(self, now: float, found: Manifest | None, token: str | None) -> list[Act]:
        """The swap in flight was refused, and this is the manifest."""
        assert self._in_flight is not None
        if found == self._in_flight.manifest and token is not None:
            return self.swapped(now, token)
        if token == self._in_flight.token:  # an answer from before
            return self.failed(now)
        self._in_flight = None
        if self.standing == "claiming":
            self.standing = "waiting"
            return [Stand("waiting", "another syncer was faster"), *self.read(now, found, token)]
        self.standing, self.manifest = "fenced", found or Manifest(self._run)
        at = None if found is None else f"at {found.address or 'another address'} in epoch {found.epoch}"
        return [Stand("fenced", f"the run is served by {f'the syncer {at}' if at else 'no syncer'}")]

    # --- time ---------------------------------------------------------------------------------------------------------

    def release(self, now: float) -> list[Act]:
        """Give up the run, after all changes so far: a standby, or the next start, claims it at once."""
        self._is_stopping = True
        if self.standing in ("waiting", "claiming"):
            self.standing = "released"
            return [Stand("released", "this syncer stops")]
        return self.tick(now)

    def listed(self, now: float, names: Sequence[str]) -> list[Act]:
        """These objects are in the store."""
        manifest = self.manifest
        if self.standing not in ("serving", "suspended") or manifest is None:
            return []
        kept = {*manifest.names, *self._unnamed}
        if self._in_flight is not None:
            kept |= self._in_flight.manifest.names
        for name in names:
            if epoch_of(name) < manifest.epoch and name not in kept:
                self._unnamed[name] = now
        return self.tick(now)

    @property
    def wake_at(self) -> float:
        """When `tick` must be called at the latest."""
        if self._is_over:
            return math.inf
        in_flight = self._in_flight
        retry_at = self._read_at if in_flight is None or self._is_reading else min(in_flight.retry_at, self._read_at)
        if self.standing in ("waiting", "claiming"):
            return retry_at
        times = [retry_at]
        if self.standing == "serving":
            times.append(self._held_from + self._lease_s)
        if self._may_clean:
            times += [self._list_at, *self._unnamed.values()]
        if in_flight is None:
            times.append(self._due_at)
        return min(times)

    @property
    def is_retrying(self) -> bool:
        """Whether the store has not answered the last request."""
        in_flight = self._in_flight
        return (self._read_at < math.inf and self.standing != "waiting") or (
            in_flight is not None and in_flight.retry_at < math.inf
        )

    @property
    def is_serving(self) -> bool:
        """Whether it has the run, as far as it knows."""
        return self.standing in ("serving", "suspended")

    @property
    def _is_over(self) -> bool:
        return self.standing in ("fenced", "released")

    @property
    def is_idle(self) -> bool:
        """Whether no swap is in flight or wanted."""
        return self._in_flight is None and not self._changes

    @property
    def _due_at(self) -> float:
        """When the next swap begins, if none is in flight."""
        soonest = self._began_at + self._shortest_s
        if self._changes or self._is_stopping or self.standing == "suspended":
            return soonest
        return max(soonest, self._began_at + self._lease_s / RENEWALS)

    def tick(self, now: float) -> list[Act]:
        """Time may have passed: do what is due."""
        if self._is_over:
            return []
        acts: list[Act] = []
        is_held = now < self._held_from + self._lease_s
        if self.standing == "serving" and not is_held:
            self.standing = "suspended"
            acts.append(Stand("suspended", f"no swap has succeeded for {self._lease_s:g} s"))
        elif self.standing == "suspended" and is_held:
            self.standing = "serving"
            acts.append(Stand("serving", "the store answers again"))
        if self._read_at <= now:
            return [*acts, *self.start(now)]
        in_flight = self._in_flight
        if in_flight is not None and in_flight.retry_at <= now:
            in_flight.retry_at, self._began_at = math.inf, now
            acts.append(in_flight.swap)
        if self.is_serving and in_flight is None and self._due_at <= now:
            acts += self._swap(now)
        return acts + self._clean(now) if self._may_clean else acts

    def _swap(self, now: float) -> list[Act]:
        assert self.manifest is not None
        changes, self._changes, manifest = self._changes, [], self.manifest
        for change in changes:
            manifest = change.applied_to(manifest)
        if self._is_stopping:
            manifest = replace(manifest, boot=0, address="")
        return self._send(now, manifest, tuple(change.ticket for change in changes))

    def _send(self, now: float, manifest: Manifest, tickets: tuple[Any, ...]) -> list[Act]:
        following = replace(manifest, serial=manifest.serial + 1)
        self._in_flight = _InFlight(following, self._token, tickets, now)
        self._began_at = now
        return [self._in_flight.swap]

    @property
    def _may_clean(self) -> bool:
        """Whether objects may be deleted: no swap was refused."""
        return self.standing == "serving" and not self._is_reading and self._read_at == math.inf

    def _clean(self, now: float) -> list[Act]:
        if self._list_at <= now:
            self._list_at = math.inf
            return [List()]
        due = tuple(sorted(name for name, at in self._unnamed.items() if at <= now))
        for name in due:
            del self._unnamed[name]
        return [Delete(due)] if due else []
