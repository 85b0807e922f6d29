"""Ports and file handles: errors of binding a port, and the number of connections that a process can accept."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path

from diloco.errors import ConfigError, DilocoError, RunError
from diloco.exchange.wire.address import socket_path, split_address


def port_refusal(address: str, error: OSError, *, what: str, choice: str) -> DilocoError:
    """The error for a port that the system refuses.

    Arguments:
        what: the service on that port.
        choice: how the user chooses another port.
    """
    if error.errno == errno.EADDRINUSE:
        return RunError(f"{address} is in use by another process, so {what} cannot be served there; stop that one, or "
                        f"{choice}.")  # fmt: skip
    reason = error.strerror or os.strerror(error.errno or 0)
    return ConfigError(f"{what} cannot be served at {address} ({reason}); {choice}.")


def why_unbound(address: str) -> OSError:
    """The system's error when this address is bound."""
    if (path := socket_path(address)) is not None:
        directory = Path(path).parent
        if not directory.is_dir():
            return OSError(errno.ENOENT, f"there is no directory {directory}")
        if not os.access(directory, os.W_OK | os.X_OK):
            return OSError(errno.EACCES, f"the directory {directory} is not writable")
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
"""Most file handles that a process asks for."""

RESERVE = 384
"""File handles for the store, the spool, the event log, Python itself, and the connections of the live page."""

MOST_CONNECTIONS = 4096


def raise_file_limit() -> int:
    """Raise this process's limit of open files as far as allowed; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connections_for(num_files: int) -> int:
    """The number of connections that a process with so many file handles accepts."""
    return max(16, min(MOST_CONNECTIONS, num_files - RESERVE))
