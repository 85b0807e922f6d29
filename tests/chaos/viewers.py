"""python -m tests.chaos.viewers RUN_DIRECTORY: viewers of a soak, until SIGTERM.

One requests the status over a kept connection, one over a new connection each time, one fetches the model, one breaks
off its fetch, one scrapes the metrics, and one connects and sends nothing. RUN_DIRECTORY/viewers.json has the number of
answers of each, and of its errors by name.
"""

from __future__ import annotations

import json
import queue
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from tests.chaos.plan import ANSWERS, VIEWER_EVERY_S, WATCHER

from diloco.config import load_config
from diloco.errors import DilocoError
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import fetch_status
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.incoming import Download
from diloco.following.follower import newest_model


class _BrokenOffError(Exception):
    """One message was read."""


class BrokenOff(Download):
    """Reads one message of the answer, and hangs up."""

    def read(self, stream: Iterator[bytes], acknowledge: queue.SimpleQueue[bytes | None]) -> Iterator[None]:
        """As `Download.read`."""
        next(stream)
        raise _BrokenOffError


def viewers(directory: Path) -> dict[str, Callable[[], object]]:
    """The request of each."""
    config = load_config(directory / "run.toml")
    address, run, keys = config.syncer.address, config.run.name, directory / "keys" / WATCHER
    host, _, port = address.rpartition(":")
    kept = Connection(address, keys=keys)

    def ask() -> None:
        json.loads(kept.call("control", "Status", pb.StatusRequest(run=run), pb.StatusReply).status)

    def break_off() -> None:
        request = pb.PullRequest(run=run, fragment=0, base=-1)
        with closing(Connection(address, keys=keys)) as connection:
            with suppress(_BrokenOffError):
                connection.pull("joins", request, BrokenOff(request))

    def scrape() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{config.syncer.metrics_port}/metrics", timeout=10) as page:
            page.read()

    def say_nothing() -> None:
        with socket.create_connection((host, int(port)), timeout=10):
            pass

    return {
        "long-lived": ask, "short-lived": lambda: fetch_status(address, run=run, keys=keys),
        "model": lambda: newest_model(address, run=run, keys=keys), "broken off": break_off, "metrics": scrape,
        "silent": say_nothing,
    }  # fmt: skip


def main() -> None:
    """View until SIGTERM."""
    directory, over = Path(sys.argv[1]), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    counts: dict[str, Counter[str]] = {name: Counter() for name in VIEWER_EVERY_S}

    def view(name: str, look: Callable[[], object]) -> None:
        while not over.wait(VIEWER_EVERY_S[name]):
            try:
                look()
                counts[name]["answered"] += 1
            except (DilocoError, OSError, urllib.error.URLError) as error:
                counts[name][type(error).__name__] += 1

    threads = [threading.Thread(target=view, args=each) for each in viewers(directory).items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (directory / ANSWERS).write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
