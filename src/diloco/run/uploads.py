"""Room for the payloads of contributions: uploaded whole or in parts, resumed after a cut, and limited per learner.

Each rank of a learner uploads the bytes of its shard as a part, over a connection of its own. A complete part is not
written again: a rank that uploads it once more did not receive the acknowledgement.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Generic

from diloco.errors import BusyError, PayloadError
from diloco.protocol.accounting import key_of
from diloco.protocol.contribution import Contribution
from diloco.run import validation
from diloco.run.ports import S, SpoolPort

KEPT_S = 600.0
"""How long the received prefix of a cut upload is kept for its learner, which repeats an upload within seconds unless
the link is down."""

MOST_MODELS = 2
"""Room for the uploads of one incarnation, as a multiple of contributions to all fragments: it sends one after the
other, and the connection of an earlier one may not have ended."""


Span = tuple[int, int]
"""The bytes of a part in the payload: first, and last + 1."""


@dataclass(eq=False)
class Assembly(Generic[S]):
    """A contribution that is being put together.

    Attributes:
        slot: the room for the whole payload.
        here: the complete parts.
        coming: the parts that are being uploaded, each over one connection.
        cut: of parts whose upload was cut off, how many bytes were received.
        is_over: its incarnation has ended; the slot is released once no part is being uploaded.
    """

    contribution: Contribution
    num_bytes: int
    slot: S
    here: set[Span] = field(default_factory=set)
    coming: set[Span] = field(default_factory=set)
    cut: dict[Span, int] = field(default_factory=dict)
    is_over: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the parts that are complete make up the payload."""
        return sum(stop - start for start, stop in self.here) == self.num_bytes

    def begin(self, contribution: Contribution, num_bytes: int, span: Span) -> int:
        """The upload of a part begins. Returns how many of its bytes an earlier upload has left.

        Raises:
            PayloadError: it is a part of another contribution, or overlaps with another part.
            BusyError: it is still being uploaded over an earlier connection.
        """
        if contribution != self.contribution or num_bytes != self.num_bytes:
            raise PayloadError(
                f"the ranks of learner {contribution.learner!r} describe contribution {contribution.number} to "
                f"fragment {contribution.fragment} differently; let all of them take the same steps."
            )
        for start, stop in self.here | self.coming | self.cut.keys():
            if (start, stop) != span and start < span[1] and span[0] < stop:
                raise PayloadError(
                    f"bytes {span[0]} to {span[1]} of a contribution of learner {contribution.learner!r} overlap with "
                    f"bytes {start} to {stop}, which another rank sends; divide it as `core.shards` does."
                )
        if span in self.coming:
            raise BusyError(
                f"bytes {span[0]} to {span[1]} of contribution {contribution.number} of learner "
                f"{contribution.learner!r} to fragment {contribution.fragment} are still being uploaded over an "
                "earlier connection; they are taken once that has ended, within a minute."
            )
        self.coming.add(span)
        return self.cut.pop(span, 0)


@dataclass(eq=False)
class Upload(Generic[S]):
    """A contribution whose payload, or a part of it, is being uploaded.

    Attributes:
        num_bytes: of the whole payload.
        slot: the room for this upload, or for the whole payload with `assembly`.
        span: the part of the payload; None: all of it.
        assembly: of this part; None: the whole payload is uploaded, or the part was received before and is not needed.
        received: how many first bytes of `room` an earlier upload, which was cut off at `cut_at_s`, has left there.
    """

    contribution: Contribution
    num_bytes: int
    slot: S
    span: Span | None = None
    assembly: Assembly[S] | None = None
    received: int = 0
    cut_at_s: float = 0.0

    @property
    def room(self) -> Span:
        """The bytes of the slot that are uploaded."""
        if self.span is None:
            return 0, self.num_bytes
        return self.span if self.assembly is not None else (0, self.span[1] - self.span[0])


class Uploads(Generic[S]):
    """The payloads of contributions, from the beginning of their uploads until their rounds are closed.

    Of the whole payloads whose upload was cut off, each incarnation has at most one, where its next upload resumes: a
    learner sends one contribution at a time. It is dropped when its incarnation ends, sends another contribution, or
    does not resume in time, and all are dropped when room is needed.

    Attributes:
        assemblies: contributions that are being put together, by their keys.
    """

    def __init__(self, spool: SpoolPort[S]) -> None:
        self.assemblies: dict[tuple[str, int, int, int], Assembly[S]] = {}
        self._spool = spool
        self._cut: dict[tuple[str, int], Upload[S]] = {}  # by learner and incarnation
        self._open_bytes = Counter[tuple[str, int]]()
        self._owners: dict[int, tuple[tuple[str, int], int]] = {}  # of slots, by identity, and their bytes
        self._slots: dict[Contribution, S] = {}  # of accepted contributions

    def begin(
        self, c: Contribution, num_bytes: int, span: Span | None, model_bytes: int, *, is_here: bool
    ) -> Upload[S]:
        """Make room.

        Arguments:
            model_bytes: of a contribution to each fragment.
            is_here: the whole contribution was received before.

        Raises:
            NoRoomError: there is no room. BusyError: the incarnation uses too much. PayloadError: as
                `Assembly.begin`.
        """
        most_bytes = MOST_MODELS * model_bytes
        if span is None:
            cut = self._cut.get(_owner(c))
            if cut is not None and (cut.contribution, cut.num_bytes) == (c, num_bytes):
                return self._cut.pop(_owner(c))
            self._drop_cut(_owner(c))
            return Upload(c, num_bytes, self._allocate(c, num_bytes, most_bytes))
        validation.check_span(c, span, num_bytes)
        assembly = self.assemblies.get(key_of(c))
        if is_here or (assembly is not None and span in assembly.here):  # the acknowledgement of this part was lost
            return Upload(c, num_bytes, self._allocate(c, span[1] - span[0], most_bytes), span)
        if assembly is None:
            assembly = Assembly(c, num_bytes, self._allocate(c, num_bytes, most_bytes))
            self.assemblies[key_of(c)] = assembly
        return Upload(c, num_bytes, assembly.slot, span, assembly, assembly.begin(c, num_bytes, span))

    def cut(self, upload: Upload[S], now_s: float, *, received: int, is_wanted: bool) -> None:
        """An upload was cut off; the bytes received are kept if they may be needed."""
        c = upload.contribution
        if upload.span is None and received > 0 and is_wanted:
            self._drop_cut(_owner(c))
            self._cut[_owner(c)] = replace(upload, received=received, cut_at_s=now_s)
        else:
            self._ended(upload, is_complete=False, received=received)

    def completed(self, upload: Upload[S]) -> bool:
        """All bytes of an upload were received; returns whether the contribution is complete. If so, the caller owns
        its slot, and calls `taken` or `release`."""
        if upload.span is None:
            return True
        self._ended(upload, is_complete=True)
        assembly = upload.assembly
        if assembly is None or assembly.is_over or not assembly.is_whole:
            return False
        del self.assemblies[key_of(assembly.contribution)]
        return True

    def _ended(self, upload: Upload[S], *, is_complete: bool, received: int = 0) -> None:
        """An upload has ended after `received` bytes: release its slot unless that is still used."""
        if (assembly := upload.assembly) is not None and upload.span is not None:
            assembly.coming.discard(upload.span)
            if is_complete:
                assembly.here.add(upload.span)
            elif received > 0:
                assembly.cut[upload.span] = received
            if not assembly.is_over and (assembly.here or assembly.coming or assembly.cut):
                return
            if not assembly.is_over:
                del self.assemblies[key_of(assembly.contribution)]
            if assembly.coming:
                return
        self.release(upload.slot)

    def taken(self, upload: Upload[S]) -> None:
        """The contribution is accepted, and its payload waits for its round."""
        c = upload.contribution
        self._forget(upload.slot)
        self._slots[c] = upload.slot
        if (cut := self._cut.get(_owner(c))) is not None and cut.contribution == c:
            self._drop_cut(_owner(c))

    def take(self, c: Contribution) -> S:
        """The payload of an accepted contribution, whose round is closed now. The caller releases its slot."""
        return self._slots.pop(c)

    def drop(self, c: Contribution) -> None:
        """The contribution is rejected."""
        if (slot := self._slots.pop(c, None)) is not None:
            self._spool.release(slot)

    def release(self, slot: S) -> None:
        """Release a slot that is not used any more."""
        self._forget(slot)
        self._spool.release(slot)

    def end(self, learner: str, incarnation: int) -> None:
        """An incarnation has ended: drop its incomplete payloads."""
        self._drop_cut((learner, incarnation))
        for key, assembly in list(self.assemblies.items()):
            if key[:2] == (learner, incarnation):
                del self.assemblies[key]
                assembly.is_over = True
                if not assembly.coming:  # otherwise its last upload releases the slot
                    self.release(assembly.slot)

    def make_room(self) -> None:
        """Drop all uploads that were cut off: there is no room for new contributions."""
        for owner in list(self._cut):
            self._drop_cut(owner)

    def tick(self, now_s: float) -> None:
        """Drop uploads that were cut off long ago."""
        for owner in [owner for owner, cut in self._cut.items() if now_s - cut.cut_at_s >= KEPT_S]:
            self._drop_cut(owner)

    def _drop_cut(self, owner: tuple[str, int]) -> None:
        if (cut := self._cut.pop(owner, None)) is not None:
            self.release(cut.slot)

    def _allocate(self, c: Contribution, num_bytes: int, most_bytes: int) -> S:
        owner = _owner(c)
        open_bytes = self._open_bytes[owner]
        if open_bytes + num_bytes > most_bytes:
            raise BusyError(
                f"learner {c.learner!r} is uploading {open_bytes} bytes, and {num_bytes} more would be over the "
                f"{most_bytes} that it may at a time; they are taken once an earlier upload has ended."
            )
        slot = self._spool.allocate(num_bytes)
        self._open_bytes[owner] = open_bytes + num_bytes
        self._owners[id(slot)] = owner, num_bytes
        return slot

    def _forget(self, slot: S) -> None:
        owner, num_bytes = self._owners.pop(id(slot))
        self._open_bytes[owner] -= num_bytes
        if not self._open_bytes[owner]:
            del self._open_bytes[owner]


def _owner(c: Contribution) -> tuple[str, int]:
    return c.learner, c.incarnation
