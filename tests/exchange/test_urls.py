"""Ranges from a server of HTTP that answers a part of each, as it may."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from diloco.exchange.wire.urls import UrlReader

DATA = random.Random(1).randbytes(1000)
MOST_BYTES = 300


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        first, last = map(int, found.groups())
        data = DATA[first : last + 1][:MOST_BYTES]
        self.send_response(206)
        if self.path == "/object":
            self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{len(DATA)}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("start", "stop"), [(0, 1000), (10, 200), (100, 950), (500, 2000), (999, 1001)])
def test_a_range_is_whole_or_ends_with_the_object(start: int, stop: int, url: str) -> None:
    reader = UrlReader(threading.Event())
    assert reader.read(f"{url}/object", start, stop) == DATA[start:stop]
    assert reader.is_usable


def test_a_server_that_does_not_say_where_the_object_ends_is_not_used(url: str) -> None:
    reader = UrlReader(threading.Event())
    assert reader.read(f"{url}/unknown", 0, 1000) is None
    assert not reader.is_usable
