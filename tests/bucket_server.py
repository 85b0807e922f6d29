"""The demo's bucket in a process of its own, with faults.

python -m tests.bucket_server BUCKET    prints its port; ends with its standard input
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from diloco.demo.bucket_server import CREDENTIALS, Application, read_body, serving

CONTROL = "/-/faults"

FaultKind = Literal["status", "lost", "late", "slow", "ignored"]


@dataclass
class Fault:
    """What happens to requests.

    Attributes:
        kind: "status": answered by `status` and not executed; "lost": executed, and the connection breaks without an
            answer; "late": as lost, but executed only when `release` is called; "slow": answered only then; "ignored":
            executed without its conditions.
        method, path: of the requests, as far as they begin and end with these.
        num: so many requests.
        status: for example 503.
    """

    kind: FaultKind
    method: str = "PUT"
    path: str = "manifest.json"
    num: int = 1
    status: int = 503


class BucketServer:
    """A running bucket; a context manager that ends it.

    Attributes:
        url: for `Bucket`, with its endpoint.
        environment: variables with which a process reaches it.
    """

    def __init__(self, bucket: str = "bucket") -> None:
        command = [sys.executable, "-m", "tests.bucket_server", bucket]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.environment = CREDENTIALS
        self._bucket = bucket

    def url(self, prefix: str, endpoint: str | None = None) -> str:
        """The URL of a store in the bucket. `endpoint`: a relay's."""
        return f"s3://{self._bucket}/{prefix}?endpoint={endpoint or self.endpoint}"

    def fault(self, kind: FaultKind, **more: Any) -> None:
        """Do this to requests from now on."""
        self._control("POST", json.dumps(asdict(Fault(kind, **more))).encode())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for `release`."""
        return int(json.loads(self._control("GET"))["waiting"])

    @property
    def num_pending(self) -> int:
        """Requests that faults have yet to find."""
        return int(json.loads(self._control("GET"))["pending"])

    def release(self) -> None:
        """Execute the requests that wait."""
        self._control("DELETE")

    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def _control(self, method: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.endpoint + CONTROL, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class _Faulty:
    """An application with faults before it."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._num_waiting = self._generation = 0

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        data = read_body(environ)
        if environ["PATH_INFO"] == CONTROL:
            return self._controlled(environ["REQUEST_METHOD"], data, start)
        fault = self._fault_of(environ)
        if fault is not None and fault.kind == "status":
            start(f"{fault.status} Fault", [("Content-Length", "0")])
            return []
        if fault is not None and fault.kind in ("late", "slow"):
            self._wait()
        if fault is not None and fault.kind == "ignored":
            for name in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"):
                environ.pop(name, None)
        answer = self._application(environ, start)
        if fault is not None and fault.kind in ("lost", "late"):
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return answer

    def _fault_of(self, environ: dict[str, Any]) -> Fault | None:
        with self._changed:
            for fault in self._faults:
                if environ["REQUEST_METHOD"] == fault.method and environ["PATH_INFO"].endswith(fault.path):
                    fault.num -= 1
                    self._faults = [each for each in self._faults if each.num > 0]
                    return fault
        return None

    def _wait(self) -> None:
        with self._changed:
            generation = self._generation
            self._num_waiting += 1
            self._changed.wait_for(lambda: self._generation > generation)
            self._num_waiting -= 1

    def _controlled(self, method: str, data: bytes, start: Callable[..., Any]) -> Iterable[bytes]:
        with self._changed:
            if method == "POST":
                self._faults.append(Fault(**json.loads(data)))
            elif method == "DELETE":
                self._generation += 1
                self._changed.notify_all()
            pending = sum(fault.num for fault in self._faults)
            answer = json.dumps({"waiting": self._num_waiting, "pending": pending}).encode()
        start("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]


if __name__ == "__main__":
    with serving(sys.argv[1], _Faulty) as (port, _):
        print(port, flush=True)
        sys.stdin.read()
