"""Ranges of objects from signed URLs, which a syncer hands out in place of a bucket's credentials."""

from __future__ import annotations

import http
import http.client
import logging
import math
import threading
import time
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

from diloco.errors import UnreachableError
from diloco.exchange.wire.frames import room_for

log = logging.getLogger("diloco")

SILENT_S = 30.0
"""Without a byte, a request has failed."""

TRIES = 2
"""Requests without a byte, after which a URL cannot be read."""

AGAIN_S = 600.0
"""How long no URL is tried after one could not be read."""

_CHUNK_BYTES = 1 << 20


class UrlReader:
    """Reads ranges from signed URLs, as long as they can be read from this machine. Any thread may call any method.

    Arguments:
        closing: once it is set, reads end.
    """

    def __init__(self, closing: threading.Event) -> None:
        self._closing = closing
        self._again_at = -math.inf

    @property
    def is_usable(self) -> bool:
        """Whether URLs are to be tried."""
        return time.monotonic() >= self._again_at

    def read(self, url: str, start: int, stop: int) -> memoryview | None:
        """The bytes from `start` to `stop`, or up to the end of the object; None: they cannot be read from here, which
        is logged.

        Raises:
            CorruptPayloadError: this machine has not so much memory. UnreachableError: `closing` was set.
        """
        buffer, filled, failures = room_for(stop - start), 0, 0
        while True:
            before = filled
            try:
                for num_bytes in _chunks(url, start, buffer, filled):
                    filled += num_bytes
                    if self._closing.is_set():
                        raise UnreachableError("this learner or follower was closed while it read from the store.")
                return buffer[:filled]
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures = failures + 1 if filled == before else 0
                if failures == TRIES or isinstance(error, ValueError):
                    where = urlsplit(url).netloc
                    log.warning(
                        "cannot read from the store at %s, to which the syncer refers (%s); the bytes come from the "
                        "syncer itself for the next %d minutes", where, error, AGAIN_S / 60,
                    )  # fmt: skip
                    self._again_at = time.monotonic() + AGAIN_S
                    return None


def _chunks(url: str, start: int, buffer: memoryview, filled: int) -> Iterator[int]:
    """Fill the buffer, the bytes of the object from `start` on; yields the sizes of chunks."""
    if not url.startswith(("https://", "http://")):
        raise ValueError("it is not an HTTP URL")
    last = start + len(buffer) - 1
    headers = {"Range": f"bytes={start + filled}-{last}"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - as checked
    with urllib.request.urlopen(request, timeout=SILENT_S) as answer:  # noqa: S310
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            raise ValueError(f"it answered a range request with HTTP status {answer.status}")
        while filled < len(buffer) and (num_bytes := answer.readinto(buffer[filled : filled + _CHUNK_BYTES])):
            filled += num_bytes
            yield num_bytes
        size = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if filled < len(buffer) and start + filled < int(size):  # cut off, or an answer of a part of the range
            raise OSError(f"it has sent {filled} of {len(buffer)} bytes")
