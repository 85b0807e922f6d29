"""Weights & Biases, online or into files that `wandb sync` sends later."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from diloco.tracking.base import Point, TrackedRun


class WeightsAndBiases:
    """Logs a run of W&B with the step as the axis of all charts.

    Arguments:
        folder: of everything that the run's trackers keep.
        mode: "online" or "offline".
    """

    def __init__(self, folder: Path, mode: Literal["online", "offline"]) -> None:
        self._folder, self._mode = folder, mode
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begin the run of this id, or go on with it."""
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        # Offline W&B cannot look whether there is such a run: parts of one id become one when they are synchronised.
        self._run = wandb.init(
            project=run.project,
            group=run.group,
            name=run.name,
            id=run.id,
            resume="allow" if self._mode == "online" else None,
            config=dict(run.config),
            dir=str(self._folder),
            mode=self._mode,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, point: Point) -> None:
        """Log a row. The step is a value of it: steps of W&B's own cannot go back, and those of a run may."""
        self._run.log({"step": point.step, **point.values})

    def end(self) -> None:
        """Finish the run, which sends what is not sent yet."""
        self._run.finish()
