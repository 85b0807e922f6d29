"""The feed of a process from its run file."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from diloco.config import RunConfig
from diloco.errors import StoreError, translated
from diloco.tracking.base import TrackedRun
from diloco.tracking.feed import Feed, Outlet
from diloco.tracking.kinds import CLASSES, require_packages
from diloco.tracking.process import TrackerProcess
from diloco.whole_files import write_whole

ID_FILE = "tracked-as"

NOT_TOLD = {"syncer", "track", "learner"}
"""Tables of the run file that are about machines: they have paths, and URLs that may have passwords in them."""


def open_feed(config: RunConfig, who: str) -> Feed | None:
    """The feed of one process of a run, which has to `begin` yet; None: the run file names no tracker.

    Arguments:
        who: "syncer", or the learner's name.

    Raises:
        ConfigError: a tracker's package is not installed.
    """
    table = config.track
    if not table.trackers:
        return None
    require_packages(table.trackers)
    folder = config.dir / "tracking" if table.folder is None else table.folder
    own: dict[str, dict[str, Any]] = {
        "wandb": {"mode": table.wandb_mode or "online"},
        "mlflow": {"tracking_uri": table.mlflow_tracking_uri},
    }
    outlets: dict[str, Outlet] = {
        name: TrackerProcess(
            CLASSES[name], {"folder": str(folder.absolute()), **own.get(name, {})}, folder / f"{who}-{name}.log"
        )
        for name in table.trackers
    }
    run = TrackedRun(
        id="",
        project=table.project,
        group=config.run.name,
        name=f"{table.name or config.run.name}-{who}",
        config=config.model_dump(mode="json", exclude_none=True, exclude=NOT_TOLD),
    )
    return Feed(run, outlets)


def kept_id(folder: Path) -> str:
    """The id of what a process of this folder logs, drawn once.

    Raises:
        StoreError: it cannot be kept.
    """
    path = folder / ID_FILE
    with translated(OSError, StoreError, f"cannot keep {path}", "set [run] dir to a writable directory"):
        if path.is_file() and (found := path.read_text(encoding="utf-8")):
            return found
        drawn = secrets.token_hex(8)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, drawn)
        return drawn
