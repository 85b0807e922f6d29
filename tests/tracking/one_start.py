"""`python -m tests.tracking.one_start START`: one start of a tracked process, with the tracker's real library.

START is JSON: the tracker's class and options, the `TrackedRun`, and points. Libraries have state that a restart has
not, so a test that restarts a run starts this twice.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from diloco.tracking import trackers
from diloco.tracking.feed import Feed
from diloco.tracking.trackers import TrackedRun
from diloco.tracking.values import Point


def main(start: str) -> None:
    told = json.loads(start)
    tracker = getattr(trackers, told["tracker"])(folder=Path(told["folder"]), **told["options"])
    feed = Feed(TrackedRun(**told["run"]), {"it": tracker})
    for point in told["points"]:
        feed.put(Point(**point))
    feed.close(timeout_s=280.0)


if __name__ == "__main__":
    main(sys.argv[1])
