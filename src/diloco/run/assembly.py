"""Contributions that are uploaded in parts: each rank of a learner uploads the bytes of its shard, over a connection of
its own. A complete part is not written again: a rank that uploads it once more did not receive the acknowledgement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from diloco.errors import BusyError, PayloadError
from diloco.protocol.accounting import key_of
from diloco.protocol.contribution import Contribution
from diloco.run.ports import S

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


class Assemblies(Generic[S]):
    """All contributions that are being put together."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int, int], Assembly[S]] = {}

    def of(self, c: Contribution) -> Assembly[S] | None:
        """The assembly of a contribution; None: no part of it was uploaded yet."""
        return self._open.get(key_of(c))

    def add(self, assembly: Assembly[S]) -> None:
        """Add a contribution, with its first part."""
        self._open[key_of(assembly.contribution)] = assembly

    def ended(self, assembly: Assembly[S], span: Span, *, is_complete: bool, received: int) -> bool:
        """The upload of a part has ended after `received` bytes. Returns whether the caller must release the slot,
        since it will not be used."""
        assembly.coming.discard(span)
        if is_complete:
            assembly.here.add(span)
        elif received > 0:
            assembly.cut[span] = received
        if not assembly.is_over and (assembly.here or assembly.coming or assembly.cut):
            return False
        if not assembly.is_over:
            self.remove(assembly)
        return not assembly.coming

    def remove(self, assembly: Assembly[S]) -> None:
        """Remove a contribution that is complete, or of which nothing was received."""
        del self._open[key_of(assembly.contribution)]

    def end(self, learner: str, incarnation: int) -> list[S]:
        """An incarnation has ended. Returns the slots to release now; uploads into others are still under way."""
        slots = []
        for key, assembly in list(self._open.items()):
            if key[:2] == (learner, incarnation):
                del self._open[key]
                assembly.is_over = True
                if not assembly.coming:
                    slots.append(assembly.slot)
        return slots
