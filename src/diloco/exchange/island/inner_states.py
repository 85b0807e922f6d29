"""The inner optimizer's state of a learner of several ranks: rank 0 gives and takes it, each rank has its own pieces.

Ranks whose optimizers have the same digest hold the same pieces, as replicas do, and the first of them speaks for all.
Where all ranks hold the same, the state is that of one process, and either can be the other's peer. Otherwise it is

    size (8 bytes, little-endian), state    of each group of equal ranks, in the order of their first ranks

and its digest is that of the ranks' digests, in order: only learners of one shape have the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.errors import CorruptPayloadError
from diloco.exchange.base import PeerState
from diloco.exchange.group import Group, to_bytes, to_tensor
from diloco.exchange.island.messages import collect

SIZE_BYTES = 8
WHAT = "a peer's inner state"


@dataclass(frozen=True)
class Pieces:
    """Which ranks hold which pieces of the state.

    Attributes:
        digests: of each rank's optimizers.
    """

    digests: tuple[str, ...]

    @classmethod
    def of(cls, group: Group, digest: str) -> Pieces:
        """Every rank calls it with the digest of its own."""
        return cls(tuple(map(str, group.gather_values(digest, "the inner optimizers of each rank"))))

    @property
    def firsts(self) -> list[int]:
        """The first rank of each group of equal ranks."""
        return [self.digests.index(each) for each in dict.fromkeys(self.digests)]

    @property
    def digest(self) -> str:
        """Of the whole learner's optimizers: 64 hexadecimal digits."""
        if len(self.firsts) == 1:
            return self.digests[0]
        return hashlib.sha256(json.dumps(self.digests).encode()).hexdigest()

    def joined(self, group: Group, own: bytes) -> bytes:
        """On rank 0 the state of the whole learner, from every rank's; elsewhere nothing."""
        firsts = self.firsts
        part = to_tensor(own if group.rank in firsts else b"")
        sizes = [int(each) for each in group.gather_values(part.numel(), "the inner state of each rank")]
        raw = to_bytes(collect(group, part, sizes, "the inner state of this learner"))
        if len(firsts) == 1 or group.rank != 0:
            return raw
        pieces, at = [], 0
        for size in (sizes[rank] for rank in firsts):
            pieces += [size.to_bytes(SIZE_BYTES, "little"), raw[at : at + size]]
            at += size
        return b"".join(pieces)

    def split(self, content: bytes) -> list[bytes]:
        """The state of each rank, from that of a whole learner.

        Raises:
            CorruptPayloadError: it is of another number of groups, or cut.
        """
        firsts = self.firsts
        if len(firsts) == 1:
            return [content] * len(self.digests)
        states: dict[str, bytes] = {}
        at = 0
        for rank in firsts:
            begin = at + SIZE_BYTES
            at = begin + int.from_bytes(content[at:begin], "little")
            states[self.digests[rank]] = content[begin:at]
        if at != len(content):
            raise CorruptPayloadError(f"{WHAT} has {len(content)} bytes, and its {len(firsts)} parts take {at}.")
        return [states[each] for each in self.digests]

    def dealt(self, group: Group, found: PeerState | str) -> PeerState | str:
        """What rank 0 has found, on every rank: its own part of the state, or why there is none."""
        parts: Sequence[bytes] = [b""] * group.size
        peer, reason = "", ""
        if isinstance(found, PeerState):
            try:
                peer, parts = found.peer, self.split(found.content)
            except CorruptPayloadError as error:
                reason = str(error)
        else:
            reason = found
        sizes = [len(each) for each in parts]
        peer, reason, sizes = group.gather_values([peer, reason, sizes], WHAT)[0]
        receive = [sizes[group.rank] if rank == 0 else 0 for rank in range(group.size)]
        own_sizes = sizes if group.rank == 0 else [0] * group.size
        part = group.all_to_all(to_tensor(b"".join(parts)), own_sizes, receive, WHAT)
        return reason or PeerState(peer, to_bytes(part))
