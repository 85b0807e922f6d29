"""A bucket on this machine that speaks S3's protocol: moto's server, one request at a time.

moto's own server answers requests in threads, and checks a condition before it writes: two writers have both won.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

NEEDS = ("obstore", "moto", "flask", "flask_cors")
"""Packages of the server, and of the store that its clients open."""

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "not-checked", "AWS_REGION": "us-east-1",
}  # fmt: skip

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""Of WSGI."""


def read_body(environ: dict[str, Any]) -> bytes:
    """Read a request's body, and leave it to be read again."""
    data = bytes(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
    environ["wsgi.input"] = io.BytesIO(data)
    return data


class OneAtATime:
    """An application whose requests are read each by its own thread, so that a slow sender holds up no other, and
    executed while no other is.

    Attributes:
        num_bytes: that were put.
    """

    def __init__(self, application: Application) -> None:
        self._application = application
        self._one = threading.Lock()
        self.num_bytes = 0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        data = read_body(environ)
        with self._one:
            self.num_bytes += len(data)
            return list(self._application(environ, start))


@contextmanager
def serving(
    bucket: str, around: Callable[[Application], Application] = lambda it: it
) -> Iterator[tuple[int, OneAtATime]]:
    """Serve an empty bucket from this process; yields a loopback port, and what answers there.

    This process, and those that it starts meanwhile, get `CREDENTIALS`.

    Arguments:
        around: what takes the requests before they are executed.
    """
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server
    from werkzeug.test import create_environ

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, kind: str, message: str, *args: Any) -> None:
            if kind == "error":
                super().log(kind, message, *args)

    application = OneAtATime(DomainDispatcherApplication(create_backend_app))
    application(create_environ(f"/{bucket}", "http://127.0.0.1", method="PUT"), lambda *_: None)
    server = make_server("127.0.0.1", 0, around(application), threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    before = {name: os.environ[name] for name in CREDENTIALS if name in os.environ}
    os.environ.update(CREDENTIALS)
    try:
        yield server.port, application
    finally:
        for name in CREDENTIALS:
            del os.environ[name]
        os.environ.update(before)
        server.shutdown()
        server.server_close()
