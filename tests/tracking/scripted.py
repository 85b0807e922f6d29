"""Trackers for a process of their own that do what a test asks for. What they are told goes to a file or a pipe."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from diloco.tracking.base import Point, TrackedRun


class Scripted:
    """Does at each step what `script` says of it: "raise", "die" or "hang"; otherwise writes it down.

    Arguments:
        folder: where "told" is.
    """

    def __init__(self, folder: Path, script: dict[str, str]) -> None:
        self._folder, self._script = folder, script

    def _tell(self, text: str) -> None:
        with (self._folder / "told").open("a") as file:
            print(text, file=file)

    def start(self, run: TrackedRun) -> None:
        print("trackers print")
        os.write(1, b"and write to the descriptor\n")
        self._tell(f"start {run.id} {run.config}")

    def log(self, point: Point) -> None:
        match self._script.get(str(point.step)):
            case "raise":
                raise ValueError("no such luck\nand more of it")
            case "die":
                os._exit(3)
            case "hang":
                self._tell("hangs")
                threading.Event().wait()
            case _:
                self._tell(f"{point.step} {point.t} {dict(point.values)}")

    def end(self) -> None:
        self._tell("end")
