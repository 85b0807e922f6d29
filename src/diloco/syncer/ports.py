"""Ports and file handles: why a port cannot be served, and how many connections a process can take."""

from __future__ import annotations

import errno
import os
import socket
import sys

from diloco.errors import ConfigError, DilocoError, RunError
from diloco.exchange.wire.address import socket_path, split_address


def port_refusal(address: str, error: OSError, *, what: str, choice: str) -> DilocoError:
    """The error for a port that the system refuses.

    Arguments:
        what: would be served there.
        choice: how another one is chosen.
    """
    if error.errno == errno.EADDRINUSE:
        return RunError(f"{address} is in use by another process, so {what} cannot be served there; stop that one, or "
                        f"{choice}.")  # fmt: skip
    reason = error.strerror or os.strerror(error.errno or 0)
    return ConfigError(f"{what} cannot be served at {address} ({reason}); {choice}.")


def why_unbound(address: str) -> OSError:
    """What the system says of binding this address."""
    if socket_path(address) is not None:
        return OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    host, port = split_address(address)
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(place)
            tried.listen(1)
    except OSError as error:
        return error
    return OSError(errno.EAGAIN, "it was refused a moment ago")


MOST_FILES = 65_536
"""Asked for at most."""

RESERVE = 384
"""For the store, the spool, the event log, what Python opens, and the connections of the live page (`live_page`)."""

MOST_CONNECTIONS = 4096


def raise_file_limit() -> int:
    """Let this process open as many files as it may; how many that are."""
    if sys.platform == "win32":
        return MOST_FILES
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connections_for(num_files: int) -> int:
    """Connections that a process with this many files accepts at a time."""
    return max(16, min(MOST_CONNECTIONS, num_files - RESERVE))
