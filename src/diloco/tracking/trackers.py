"""Adapters of TensorBoard, W&B, trackio and MLflow. The library of a tracker is imported when its run starts.

They run in threads of a process that trains or serves, and do not touch its signals, standard input or output.
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
"""Time limit for all trackers together to log their queues and to end."""


@dataclass(frozen=True)
class TrackedRun:
    """The run of a tracker: one process of a run.

    Attributes:
        id: the same after a restart of the process, so that the tracker continues; letters, digits, "-".
        project: project of the trackers that the run belongs to.
        group: name of the run, common to its processes.
        name: display name.
        config: configuration of the run, plain values.
    """

    id: str
    project: str
    group: str
    name: str
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Logs points of one run. Methods may block and may raise anything: only a thread of a `Feed` calls them."""

    def start(self, run: TrackedRun) -> None:
        """Start a run of the tracker, or continue the one that an earlier process of this id started."""

    def log(self, point: Point) -> None:
        """Log a point. Points are ordered by time; their steps may go back where the run does."""

    def end(self) -> None:
        """Flush. No call follows."""


def require_packages(trackers: Sequence[str]) -> None:
    """Raise ConfigError unless the packages of all these trackers are installed."""
    absent = [name for name in trackers if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"the packages of track.trackers = {', '.join(absent)} are not installed; "
            f"pip install 'diloco[{','.join(absent)}]', or remove it from the list."
        )


class TensorBoard:
    """An event file in `<folder>/tensorboard/<name>`, a new one at each start.

    TensorBoard reads all files of a folder as one run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open a file, and write the configuration as text."""
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder / run.name))
        text = "".join(f"    {line}\n" for line in json.dumps(run.config, indent=1).splitlines())  # as Markdown's code
        self._add(text_pb("config", text), 0.0, 0)

    def log(self, point: Point) -> None:
        """Write the values as fp32 scalars, and flush them to the operating system."""
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
    """A W&B run with the step as the axis of all charts: online, or in files for `wandb sync`."""

    def __init__(self, folder: Path, mode: Literal["online", "offline"]) -> None:
        self._folder, self._mode = folder, mode
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Start the run of this id, or continue it."""
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            mode=self._mode, console="off", silent=True, disable_git=True, save_code=False,
            stop_fn=_refuse_to_stop, finish_timeout=END_S, finish_timeout_raises=True,
        )  # fmt: skip
        wandb.setup(settings)
        if self._mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                'W&B finds no API key; run wandb login, or set WANDB_API_KEY or track.wandb_mode = "offline"'
            )
        # Offline, W&B cannot find an earlier run of this id; `wandb sync` joins the parts of one id.
        self._run = wandb.init(
            project=run.project, group=run.group, name=run.name, id=run.id, config=dict(run.config),
            resume="allow" if self._mode == "online" else None, dir=str(self._folder), settings=settings,
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, point: Point) -> None:
        """Log a row, with the step as a value: W&B's own steps cannot go back, and those of a run may."""
        self._run.log({"step": point.step, **point.values})

    def end(self) -> None:
        """Finish the run, which sends the remaining data."""
        self._run.finish()


def _refuse_to_stop() -> None:
    """Ignore the stop button on W&B's page, which would interrupt this process."""
    logging.getLogger("diloco.tracking").warning("a stop request from W&B is ignored: a tracker cannot stop a run")


class Trackio:
    """A database in `<folder>/trackio`; `TRACKIO_DIR=<folder>/trackio trackio show` opens it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "trackio"
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Start the run of this name and id, or continue it."""
        os.environ["TRACKIO_DIR"] = str(self._folder)  # read at the import of trackio
        import trackio

        for module in (trackio, trackio.run, trackio.utils):  # standard output is for results
            vars(module)["print"] = partial(print, file=sys.stderr)
        # trackio continues the newest run of a name, so the name includes a part of the id.
        name = f"{run.name}-{run.id[:8]}"
        self._run = trackio.init(
            project=run.project, name=name, group=run.group, config=dict(run.config), resume="allow", embed=False
        )

    def log(self, point: Point) -> None:
        """Log the values."""
        self._run.log(dict(point.values), step=point.step)

    def end(self) -> None:
        """Flush and finish the run."""
        self._run.finish()


ID_TAG = "diloco.id"
MAX_BATCH = 100
"""Limit of MLflow for the items of one call."""
MAX_VALUE = 500
"""Limit of MLflow for the characters of a parameter's value."""


class MLflow:
    """A run of a tracking server; without an address, of `<folder>/mlflow.db`. Non-finite values are logged
    unchanged."""

    def __init__(self, folder: Path, tracking_uri: str | None) -> None:
        self._folder, self._tracking_uri = folder, tracking_uri
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> None:
        """Start a run with the tag of this id, or continue it."""
        import mlflow
        from mlflow.entities import Param

        uri = self._tracking_uri
        if uri is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(self._folder / 'mlflow.db').absolute()}"
        mlflow.set_tracking_uri(uri)
        self._client = mlflow.MlflowClient()
        experiment_id = mlflow.set_experiment(run.project).experiment_id  # another process may create it too
        found = self._client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {ID_TAG: run.id, "diloco.run": run.group}
        self._run_id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        self._batches("params", [Param(_name(key), str(value)[:MAX_VALUE]) for key, value in _flat(run.config)])

    def log(self, point: Point) -> None:
        """Log the values synchronously."""
        from mlflow.entities import Metric

        t_ms = int(point.t * 1000)
        self._batches("metrics", [Metric(_name(key), value, t_ms, point.step) for key, value in point.values.items()])

    def _batches(self, kind: str, items: Sequence[Any]) -> None:
        for first in range(0, len(items), MAX_BATCH):
            self._client.log_batch(self._run_id, **{kind: items[first : first + MAX_BATCH]})

    def end(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def _name(name: str) -> str:
    """The name without characters that MLflow refuses."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)


def _flat(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables, by dotted names."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value
