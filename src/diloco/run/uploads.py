"""Room for contributions that come up: whole or in parts, after a cut from where they were, and no more than a learner
can need."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Generic

from diloco.errors import BusyError
from diloco.protocol.contribution import Contribution
from diloco.run import sense
from diloco.run.assembly import Assemblies, Assembly, Span
from diloco.run.ports import S, SpoolPort
from diloco.run.prefixes import Prefix, Prefixes

MOST_MODELS = 2
"""Of room for the uploads of one incarnation, by contributions to all fragments: it sends one after the other,
and the connection of an earlier one may not have ended."""


@dataclass(eq=False)
class Upload(Generic[S]):
    """A contribution whose payload, or a part of it, is being uploaded.

    Attributes:
        num_bytes: of the whole payload.
        slot: the room for what is uploaded, or for the whole payload with `assembly`.
        span: the part of the payload; None: all of it.
        assembly: what the part belongs to; None: the whole payload is uploaded, or the part is here already and is not
            needed.
        received: bytes of `room`, the first ones, that an upload which was cut off has left there.
    """

    contribution: Contribution
    num_bytes: int
    slot: S
    span: Span | None = None
    assembly: Assembly[S] | None = None
    received: int = 0

    @property
    def room(self) -> Span:
        """The bytes of the slot that are uploaded."""
        if self.span is None:
            return 0, self.num_bytes
        return self.span if self.assembly is not None else (0, self.span[1] - self.span[0])


class Uploads(Generic[S]):
    """All that are open, and what was cut off.

    Attributes:
        assemblies: contributions that are being put together.
    """

    def __init__(self, spool: SpoolPort[S]) -> None:
        self.assemblies: Assemblies[S] = Assemblies()
        self._spool = spool
        self._prefixes: Prefixes[S] = Prefixes(self.release)
        self._open_bytes = Counter[tuple[str, int]]()
        self._owners: dict[int, tuple[tuple[str, int], int]] = {}  # of slots, by identity, and their bytes

    def begin(
        self, c: Contribution, num_bytes: int, span: Span | None, model_bytes: int, *, is_here: bool
    ) -> Upload[S]:
        """Make room.

        Arguments:
            model_bytes: of a contribution to each fragment.
            is_here: the whole contribution is here already.

        Raises:
            NoRoomError: there is none. BusyError: the incarnation has too much of it. PayloadError: as
                `Assembly.begin`.
        """
        most_bytes = MOST_MODELS * model_bytes
        if span is None:
            prefix = self._prefixes.take(c, num_bytes)
            slot = self._allocate(c, num_bytes, most_bytes) if prefix is None else prefix.slot
            return Upload(c, num_bytes, slot, received=0 if prefix is None else prefix.received)
        sense.check_span(c, span, num_bytes)
        assembly = self.assemblies.of(c)
        if is_here or (assembly is not None and span in assembly.here):  # the acknowledgement of this part was lost
            return Upload(c, num_bytes, self._allocate(c, span[1] - span[0], most_bytes), span)
        if assembly is None:
            assembly = Assembly(c, num_bytes, self._allocate(c, num_bytes, most_bytes))
            self.assemblies.add(assembly)
        return Upload(c, num_bytes, assembly.slot, span, assembly, assembly.begin(c, num_bytes, span))

    def cut(self, upload: Upload[S], now_s: float, *, received: int, is_wanted: bool) -> None:
        """It was broken off, with the first bytes of its room here; they are kept where they may be wanted."""
        c = upload.contribution
        if upload.span is None and received > 0 and is_wanted:
            self._prefixes.keep(Prefix(c, upload.num_bytes, upload.slot, received, now_s))
        else:
            self._ended(upload, is_complete=False, received=received)

    def completed(self, upload: Upload[S]) -> bool:
        """All of it is here; returns whether that makes the contribution whole. Then its slot is the caller's, who
        calls `taken` or `release`."""
        if upload.span is None:
            return True
        self._ended(upload, is_complete=True)
        assembly = upload.assembly
        if assembly is None or assembly.is_over or not assembly.is_whole:
            return False
        self.assemblies.remove(assembly)
        return True

    def _ended(self, upload: Upload[S], *, is_complete: bool, received: int = 0) -> None:
        if (
            upload.assembly is None
            or upload.span is None
            or self.assemblies.ended(upload.assembly, upload.span, is_complete=is_complete, received=received)
        ):
            self.release(upload.slot)

    def taken(self, upload: Upload[S]) -> None:
        """The contribution is accepted: its slot belongs to the round."""
        self._forget(upload.slot)
        self._prefixes.settled(upload.contribution)

    def release(self, slot: S) -> None:
        """Nothing more comes into this slot."""
        self._forget(slot)
        self._spool.release(slot)

    def end(self, learner: str, incarnation: int) -> None:
        """The incarnation is out."""
        self._prefixes.drop(learner, incarnation)
        for slot in self.assemblies.end(learner, incarnation):
            self.release(slot)

    def make_room(self) -> None:
        """Give up what was cut off."""
        self._prefixes.make_room()

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        self._prefixes.tick(now_s)

    def _allocate(self, c: Contribution, num_bytes: int, most_bytes: int) -> S:
        owner = c.learner, c.incarnation
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
