"""Leaves some of the new connections of some hosts unanswered, in the kernel: they cost this process nothing.

A classic BPF program on the listening socket looks at each packet that opens a connection (a SYN), at where it comes
from, and at a random number. One that it drops is sent again by the peer's system after 1 s, 3 s, 7 s and so on, so
that a peer that means well gets in later. Connections that are open pass, no matter whose. No right beyond the
process's own is needed. Linux, see its Documentation/networking/filter.rst.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Mapping

from diloco.syncer.tcp import duplicate_of, listeners

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # <asm-generic/socket.h>
_LOAD_BYTE, _LOAD_WORD, _AND, _SHIFT_RIGHT, _IF_EQUAL, _GO, _RETURN = 0x30, 0x20, 0x54, 0x74, 0x15, 0x05, 0x06
_OF_IP = -0x100000  # offsets from here on are those of the IP header; others, of the TCP header
_RANDOM = -0x1000 + 56
_TCP_FLAGS, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12
_IP_SOURCE = {4: 12, 8: 8}  # by the bytes of a network: IPv4 addresses, and halves of IPv6 addresses
_PASS, _DROP = 0xFFFFFFFF, 0

_INSTRUCTION, _PROGRAM = struct.Struct("=HBBI"), struct.Struct("@HP")  # sock_filter, sock_fprog

Instruction = tuple[int, int, int, int]  # operation, instructions to skip if true, if false, operand


def program(thinned: Mapping[bytes, int]) -> list[Instruction]:
    """The filter.

    Arguments:
        thinned: by network (`tcp.network_of`), k: one in 2^k of its new connections passes.
    """
    code = [
        (_LOAD_BYTE, 0, 0, _TCP_FLAGS), (_AND, 0, 0, _SYN_OR_ACK), (_IF_EQUAL, 1, 0, _SYN), (_RETURN, 0, 0, _PASS),
        (_LOAD_BYTE, 0, 0, _OF_IP), (_SHIFT_RIGHT, 0, 0, 4), (_IF_EQUAL, 0, 1, 4),  # which skips 255 at most
    ]  # fmt: skip
    blocks = {
        size: [line for network, k in sorted(thinned.items()) if len(network) == size for line in _one(network, k)]
        for size in _IP_SOURCE
    }
    v4 = [*blocks[4], (_RETURN, 0, 0, _PASS)]
    return [*code, (_GO, 0, 0, 1), (_GO, 0, 0, len(v4)), *v4, *blocks[8], (_RETURN, 0, 0, _PASS)]


def _one(network: bytes, k: int) -> list[Instruction]:
    """Return for a packet of this network; go on behind for others."""
    decide = [(_LOAD_WORD, 0, 0, _RANDOM), (_AND, 0, 0, (1 << k) - 1), (_IF_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _PASS),
              (_RETURN, 0, 0, _DROP)]  # fmt: skip
    start = _IP_SOURCE[len(network)]
    found: list[Instruction] = []
    for offset in reversed(range(0, len(network), 4)):
        (word,) = struct.unpack_from(">I", network, offset)
        found = [(_LOAD_WORD, 0, 0, _OF_IP + start + offset), (_IF_EQUAL, 0, len(found or decide), word)] + (
            found or decide
        )
    return found


class SynFilter:
    """On the sockets of this process that listen at a port.

    Raises:
        OSError: they cannot be listed.
    """

    def __init__(self, port: int) -> None:
        self._listeners = listeners(port)
        self._thinned: dict[bytes, int] = {}

    def thin(self, thinned: Mapping[bytes, int]) -> None:
        """As `program`; with nothing in it every connection passes. Does nothing where that is so already.

        Raises:
            OSError: the system has no such filters, or no room for this one.
        """
        if thinned == self._thinned:
            return
        code = [_INSTRUCTION.pack(*line[:3], line[3] % 2**32) for line in program(thinned)]
        instructions = ctypes.create_string_buffer(b"".join(code))
        attached = _PROGRAM.pack(len(code), ctypes.addressof(instructions))
        for fd, inode in self._listeners:
            if (listener := duplicate_of(fd, inode)) is not None:
                with listener:
                    if thinned:
                        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
                    else:
                        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        self._thinned = dict(thinned)
