"""trackio: a database in `<folder>/trackio`, which `TRACKIO_DIR=<folder>/trackio trackio show` opens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from diloco.tracking.base import Point, TrackedRun


class Trackio:
    """Logs a run of trackio.

    Arguments:
        folder: of everything that the run's trackers keep.
    """

    def __init__(self, folder: Path) -> None:
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")  # which trackio reads when it is imported
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begin the run of this name and id, or go on with it."""
        import trackio

        # trackio goes on with the newest run of a name, so the name has a part of the id.
        name = f"{run.name}-{run.id[:8]}"
        self._run = trackio.init(
            project=run.project, name=name, group=run.group, config=dict(run.config), resume="allow", embed=False
        )

    def log(self, point: Point) -> None:
        """Log the values."""
        self._run.log(dict(point.values), step=point.step)

    def end(self) -> None:
        """Write what is not written yet."""
        self._run.finish()
