"""A tracker in a process of its own, from the side that feeds it.

Trackers import for seconds, print, watch signals and wait at the end of their process for a network that is gone; all
of that happens in the other process, which this one may kill. A line of JSON goes to it for each method, and one comes
back when that is done. It outlives a process that is killed for as long as it takes to end its run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco.errors import TrackerError, translated
from diloco.tracking.base import Point, TrackedRun


class TrackerProcess:
    """An `Outlet`.

    Arguments:
        spec: "module:Class" of the tracker.
        options: of the class, plain values.
        log_file: of what the tracker prints.

    Raises (all methods):
        TrackerError: the tracker raised, or its process has ended.
    """

    def __init__(self, spec: str, options: Mapping[str, Any], log_file: Path) -> None:
        self._spec, self._options, self._log_file = spec, options, log_file
        self._process: subprocess.Popen[str] | None = None
        self._is_abandoned = False

    def start(self, run: TrackedRun) -> None:
        """Start the process, and the tracker in it."""
        command = [sys.executable, "-m", "diloco.tracking.child", self._spec, json.dumps(dict(self._options))]
        with translated(OSError, TrackerError, "its process cannot be started", "check track.folder"):
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            with self._log_file.open("ab") as printed:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, encoding="utf-8",
                    start_new_session=True,  # Ctrl-C is for the run
                )  # fmt: skip
        if self._is_abandoned:  # meanwhile
            self.abandon()
        self._call({"start": asdict(run)})

    def log(self, point: Point) -> None:
        """Have the tracker log a point."""
        self._call({"log": asdict(point)})

    def end(self) -> None:
        """End the tracker and its process."""
        self._call({"end": None})
        assert self._process is not None
        self._close()
        self._process.wait()

    def abandon(self) -> None:
        """Kill the process."""
        self._is_abandoned = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _call(self, request: Mapping[str, Any]) -> None:
        assert self._process is not None
        into, out = self._process.stdin, self._process.stdout
        assert into is not None
        assert out is not None
        answer = ""
        with suppress(OSError, ValueError):  # it has ended, or was closed here
            into.write(json.dumps(request) + "\n")
            into.flush()
            answer = out.readline()
        if not answer:
            self._close()
            code = self._process.wait()
            raise TrackerError(f"its process has ended with code {code}; {self._log_file} says why.")
        if (error := json.loads(answer)) is not None:
            raise TrackerError(f"{error}; {self._log_file} says more.")

    def _close(self) -> None:
        assert self._process is not None
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
