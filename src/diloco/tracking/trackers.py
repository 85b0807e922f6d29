"""Adapters of TensorBoard, W&B, trackio and MLflow. The library of a tracker is imported when its run starts.

They run in threads of a process that trains or serves, and leave its signals, standard input and output alone.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from diloco.errors import ConfigError
from diloco.tracking.values import Point

END_S = 15.0
"""Trackers have this long to log what waits and to end, all together."""


@dataclass(frozen=True)
class TrackedRun:
    """One process of a run, as its trackers know it.

    Attributes:
        id: the same whenever the process is started again, so that a tracker goes on; letters, digits, "-".
        project: under which trackers file it.
        group: of the run's processes, the run's name.
        name: for people.
        config: of the run, plain values.
    """

    id: str
    project: str
    group: str
    name: str
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Logs points of one run. Methods may take long and may raise anything: nothing but a thread of a `Feed` waits for
    them."""

    def start(self, run: TrackedRun) -> None:
        """Begin, or go on with what an earlier process of the same id began."""

    def log(self, point: Point) -> None:
        """Keep a point. Points come in the order of their time; their steps may go back where the run does."""

    def end(self) -> None:
        """Keep what is not kept yet. Nothing comes afterwards."""


def require_packages(trackers: Sequence[str]) -> None:
    """Raise ConfigError where the package of one of these is not installed."""
    absent = [name for name in trackers if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"track.trackers has {', '.join(absent)}, not installed here; pip install 'diloco[{','.join(absent)}]', or "
            "leave it out of the list."
        )


class TensorBoard:
    """An event file in `<folder>/tensorboard/<name>`, a new one at each start; TensorBoard reads all files of a folder
    as one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open a file, with the configuration as its first text."""
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder / run.name))
        text = "".join(f"    {line}\n" for line in json.dumps(run.config, indent=1).splitlines())  # as Markdown's code
        self._add(text_pb("config", text), 0.0, 0)

    def log(self, point: Point) -> None:
        """Write the values as scalars, in fp32, through to the operating system."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._add(Summary(value=values), point.t, point.step)

    def _add(self, summary: Any, t: float, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=t, step=step, summary=summary))
        self._writer.flush()

    def end(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B with the step as the axis of all charts: online, or in files that `wandb sync` sends later."""

    def __init__(self, folder: Path, mode: Literal["online", "offline"]) -> None:
        self._folder, self._mode = folder, mode
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begin the run of this id, or go on with it."""
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            mode=self._mode, console="off", silent=True, disable_git=True, save_code=False,
            stop_fn=_refuse_to_stop, finish_timeout=END_S, finish_timeout_raises=True,
        )  # fmt: skip
        wandb.setup(settings)
        if self._mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                'W&B has no API key here; run wandb login, or set WANDB_API_KEY or track.wandb_mode = "offline"'
            )
        # Offline W&B cannot look whether there is such a run: parts of one id become one when they are synchronised.
        self._run = wandb.init(
            project=run.project, group=run.group, name=run.name, id=run.id, config=dict(run.config),
            resume="allow" if self._mode == "online" else None, dir=str(self._folder), settings=settings,
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, point: Point) -> None:
        """Log a row. The step is a value of it: steps of W&B's own cannot go back, and those of a run may."""
        self._run.log({"step": point.step, **point.values})

    def end(self) -> None:
        """Finish the run, which sends what is not sent yet."""
        self._run.finish()


def _refuse_to_stop() -> None:
    """The button on W&B's page that stops a run would interrupt this process."""
    logging.getLogger("diloco.tracking").warning("W&B asks to stop the run, which a tracker may not; the run goes on")


class Trackio:
    """A database in `<folder>/trackio`, which `TRACKIO_DIR=<folder>/trackio trackio show` opens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "trackio"
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begin the run of this name and id, or go on with it."""
        os.environ["TRACKIO_DIR"] = str(self._folder)  # which trackio reads when it is imported
        import trackio

        for module in (trackio, trackio.run, trackio.utils):  # standard output is for results
            vars(module)["print"] = partial(print, file=sys.stderr)
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


ID_TAG = "diloco.id"
MAX_BATCH = 100
"""Parameters that MLflow takes in a call."""
MAX_VALUE = 500
"""Characters of a parameter's value."""


class MLflow:
    """A run at a tracking server, or without an address in `<folder>/mlflow.db`. Values that are not finite are logged
    as they are."""

    def __init__(self, folder: Path, tracking_uri: str | None) -> None:
        self._folder, self._tracking_uri = folder, tracking_uri
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> None:
        """Begin a run with the tag of this id, or go on with it."""
        import mlflow
        from mlflow.entities import Param

        uri = self._tracking_uri
        if uri is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(self._folder / 'mlflow.db').absolute()}"
        mlflow.set_tracking_uri(uri)
        self._client = mlflow.MlflowClient()
        experiment_id = mlflow.set_experiment(run.project).experiment_id  # another process may make it as well
        found = self._client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {ID_TAG: run.id, "diloco.run": run.group}
        self._run_id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        self._batches("params", [Param(_name(key), str(value)[:MAX_VALUE]) for key, value in _flat(run.config)])

    def log(self, point: Point) -> None:
        """Log the values at once."""
        from mlflow.entities import Metric

        t_ms = int(point.t * 1000)
        self._batches("metrics", [Metric(_name(key), value, t_ms, point.step) for key, value in point.values.items()])

    def _batches(self, kind: str, items: Sequence[Any]) -> None:
        for first in range(0, len(items), MAX_BATCH):
            self._client.log_batch(self._run_id, **{kind: items[first : first + MAX_BATCH]})

    def end(self) -> None:
        """The run's end."""
        self._client.set_terminated(self._run_id)


def _name(name: str) -> str:
    """A name with characters that MLflow takes."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)


def _flat(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, by names with dots."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value
