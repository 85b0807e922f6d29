"""python -m tests.soak.viewers RUN_DIRECTORY: people and machines that look at a run, until SIGTERM.

One asks for the status over a connection that it keeps, one over a new connection each time, one fetches the model, one
breaks off what it fetches, one scrapes the metrics, and one connects and says nothing. What each was answered, and how
often not, is in RUN_DIRECTORY/viewers.json afterwards.
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

from diloco.config import load_config
from diloco.errors import DilocoError
from diloco.exchange.connection import Connection
from diloco.exchange.remote import fetch_model, fetch_status
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.incoming import Download

SAID = "viewers.json"
WATCHER = "watcher"
"""As `diloco chaos` calls its viewer."""

EVERY_S = {"long-lived": 0.25, "short-lived": 0.5, "model": 5.0, "broken off": 1.0, "metrics": 0.5, "silent": 0.5}


class _EnoughError(Exception):
    """Enough was fetched."""


class BrokenOff(Download):
    """Reads a little of what comes, and hangs up."""

    def read(self, stream: Iterator[bytes], acknowledge: queue.SimpleQueue[bytes | None]) -> Iterator[None]:
        """As `Download.read`."""
        next(stream)
        raise _EnoughError


def viewers(directory: Path) -> dict[str, Callable[[], object]]:
    """What each does again and again."""
    config = load_config(directory / "run.toml")
    address, run, keys = config.syncer.address, config.run.name, directory / "keys" / WATCHER
    host, _, port = address.rpartition(":")
    kept = Connection(address, keys=keys)

    def ask() -> None:
        json.loads(kept.call("control", "Status", pb.StatusRequest(run=run), pb.StatusReply).status)

    def break_off() -> None:
        request = pb.PullRequest(run=run, fragment=0, base=-1)
        with closing(Connection(address, keys=keys)) as connection:
            with suppress(_EnoughError):
                connection.pull("joins", request, BrokenOff(request))

    def scrape() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{config.syncer.metrics_port}/metrics", timeout=10) as page:
            page.read()

    def say_nothing() -> None:
        with socket.create_connection((host, int(port)), timeout=10):
            pass

    return {
        "long-lived": ask, "short-lived": lambda: fetch_status(address, run=run, keys=keys),
        "model": lambda: fetch_model(address, run=run, keys=keys), "broken off": break_off, "metrics": scrape,
        "silent": say_nothing,
    }  # fmt: skip


def main() -> None:
    """View until SIGTERM."""
    directory, over = Path(sys.argv[1]), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    counts: dict[str, Counter[str]] = {name: Counter() for name in EVERY_S}

    def view(name: str, look: Callable[[], object]) -> None:
        while not over.wait(EVERY_S[name]):
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
    (directory / SAID).write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
