"""A bound for the connections of the live page: each takes a handle that the run may need."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 128
"""At once, of all browsers: each watches over one, and loads the page's files over a few more."""

FIRST_REQUEST_S = 10.0
"""How long a connection may say nothing."""


class BoundedProtocol(H11Protocol):
    """HTTP as uvicorn has it; what is beyond the bound, or says nothing, is closed."""

    _until_request: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """As `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._until_request = self.loop.call_later(FIRST_REQUEST_S, self._close_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol`."""
        if self._until_request is not None:
            self._until_request.cancel()
        super().connection_lost(exc)

    def _close_silent(self) -> None:
        if getattr(self, "cycle", None) is None:  # no whole request has come; uvicorn's annotation leaves None out
            self.transport.abort()
