"""Why a port cannot be served."""

from __future__ import annotations

import errno
import os
import socket

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
