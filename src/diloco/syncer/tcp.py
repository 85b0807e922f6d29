"""What the kernel knows of the TCP connections of a port of this process, and does with them.

gRPC hides its sockets. The process's descriptors are listed, and each is duplicated to be asked; nothing here keeps a
duplicate.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
import sys
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

Peer = tuple[str, int]

ESTABLISHED, CLOSED = 1, 7  # tcpi_state
_U64 = struct.Struct("=Q")
_BYTES_ACKED, _BYTES_RECEIVED, _BYTES_SENT = (
    120,
    128,
    200,
)  # offsets in struct tcp_info; the first two since Linux 4.1, the last since 4.19
_TCP_INFO_BYTES = 256


@dataclass(frozen=True)
class TcpCounts:
    """What the kernel says of a connection."""

    state: int
    sent: int
    received: int


def tcp_counts(connection: socket.socket) -> TcpCounts:
    """Read a TCP socket's counters. Where the kernel has no `bytes_sent`, what the peer acknowledged stands for it.

    Raises:
        OSError: not a TCP socket, or a system without TCP_INFO.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _BYTES_RECEIVED + 8:
        raise OSError(f"TCP_INFO has {len(info)} bytes and holds no byte counts; Linux 4.1 or newer has them")
    sent_at = _BYTES_SENT if len(info) >= _BYTES_SENT + 8 else _BYTES_ACKED
    return TcpCounts(info[0], _U64.unpack_from(info, sent_at)[0], _U64.unpack_from(info, _BYTES_RECEIVED)[0])


def is_available() -> bool:
    """Whether this system can count: Linux, with /proc."""
    return sys.platform == "linux" and os.access("/proc/self/fd", os.R_OK | os.X_OK)


def duplicate_of(fd: int, inode: int) -> socket.socket | None:
    """Another descriptor of a socket of this process; None: it is closed. The caller closes it."""
    try:
        found = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    if os.fstat(found.fileno()).st_ino == inode:
        return found
    found.close()
    return None


def listeners(port: int) -> list[tuple[int, int]]:
    """Descriptor and inode of the sockets of this process that listen at a port.

    Raises:
        OSError: they cannot be listed.
    """
    found = []
    for fd, inode in open_sockets():
        duplicate = duplicate_of(fd, inode)
        if duplicate is not None:
            with duplicate:
                if _listens_at(duplicate, port):
                    found.append((fd, inode))
    return found


def defer_accepts(port: int, seconds: int) -> None:
    """Have the kernel keep connections to a port of this process to itself until the peer has said something, which
    every client does first, or `seconds` have passed: one that is silent costs this process nothing.

    Raises:
        OSError: the system cannot.
    """
    for fd, inode in listeners(port):
        if (listener := duplicate_of(fd, inode)) is not None:
            with listener:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, seconds)


def _listens_at(it: socket.socket, port: int) -> bool:
    if it.family not in (socket.AF_INET, socket.AF_INET6) or it.type != socket.SOCK_STREAM:
        return False
    return bool(it.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and it.getsockname()[1] == port


def parse_peer(peer: str) -> Peer | None:
    """gRPC's name of a peer as (IP address, port); None where it is not TCP."""
    family, _, rest = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return None
    host, _, port = urllib.parse.unquote(rest).rpartition(":")
    return plain(host.strip("[]")), int(port)


def plain(host: str) -> str:
    """One spelling of an address: no scope, and IPv4 where it is only wrapped in IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def network_of(host: str) -> bytes:
    """What one sender has of the addresses: an IPv4 address, or the first 64 bits of an IPv6 address."""
    return ipaddress.ip_address(host).packed[:8]


def peer_on(connection: socket.socket, port: int) -> Peer | None:
    """The other end, if this is a TCP connection of the local port."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    try:
        if connection.getsockname()[1] != port:
            return None
        host, peer_port, *_ = connection.getpeername()
    except OSError:  # it listens, or is closed already
        return None
    return plain(host), peer_port


def open_sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of every socket this process has open."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a hundred times a minute, and names are all it takes
        try:
            status = os.fstat(int(name))
        except OSError:  # closed since it was listed
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield int(name), status.st_ino
