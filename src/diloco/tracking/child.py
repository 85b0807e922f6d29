"""`python -m diloco.tracking.child SPEC OPTIONS`: the process of one tracker.

It reads a line of JSON for each method of the tracker from its standard input, and answers each with null or with what
went wrong. Without another line it ends the tracker, and itself after `END_S` at the latest.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from diloco.errors import first_line
from diloco.tracking.base import Point, TrackedRun, Tracker
from diloco.tracking.feed import END_S

log = logging.getLogger("diloco.tracking")


def main(spec: str, options: str) -> None:
    """Serve one tracker."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the run, whose end is this one's
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what trackers print is no answer
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    tracker, has_started = _tracker(spec, json.loads(options)), False
    while line := lines.get():
        request = json.loads(line)
        _answer(answers, _do(tracker, request))
        has_started = "end" not in request
    if has_started:  # the one who feeds it was killed
        _do(tracker, {"end": None})


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Lines, and an empty one at their end, after which this process lives for a while at most."""
    for line in sys.stdin:
        lines.put(line)
    lines.put("")
    timer = threading.Timer(END_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _tracker(spec: str, options: dict[str, Any]) -> Tracker:
    module, _, name = spec.partition(":")
    tracker: Tracker = getattr(import_module(module), name)(**options | {"folder": Path(options["folder"])})
    return tracker


def _do(tracker: Tracker, request: Mapping[str, Any]) -> str | None:
    """What went wrong."""
    try:
        match request:
            case {"start": run}:
                tracker.start(TrackedRun(**run))
            case {"log": point}:
                tracker.log(Point(**point))
            case {"end": _}:
                tracker.end()
    except Exception as error:
        log.exception("the tracker failed")
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _answer(answers: TextIO, error: str | None) -> None:
    with suppress(BrokenPipeError):  # the one who feeds it was killed
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
