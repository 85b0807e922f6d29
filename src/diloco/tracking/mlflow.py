"""MLflow: a tracking server, or a database in `<folder>/mlflow.db`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco.tracking.base import Point, TrackedRun

ID_TAG = "diloco.id"
MAX_BATCH = 100
"""Parameters that MLflow takes in a call."""
MAX_VALUE = 500
"""Characters of a parameter's value."""


class MLflow:
    """Logs a run of MLflow. Values that are not finite are logged as they are.

    Arguments:
        folder: of everything that the run's trackers keep.
        tracking_uri: as MLflow has it; None: a database in the folder.
    """

    def __init__(self, folder: Path, tracking_uri: str | None) -> None:
        self._folder, self._tracking_uri = folder, tracking_uri
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> None:
        """Begin a run with the tag of this id, or go on with it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = self._tracking_uri
        if uri is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(self._folder / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=uri)
        experiment_id = self._experiment_id(run.project)
        found = self._client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {ID_TAG: run.id, "diloco.run": run.group}
        self._run_id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        params = [Param(_name(key), str(value)[:MAX_VALUE]) for key, value in _flat(run.config)]
        for first in range(0, len(params), MAX_BATCH):
            self._client.log_batch(self._run_id, params=params[first : first + MAX_BATCH])

    def _experiment_id(self, name: str) -> str:
        """Of the project; another process may make it at the same time."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            folder = (self._folder / "mlflow-artifacts").absolute().as_uri() if self._tracking_uri is None else None
            try:
                return str(self._client.create_experiment(name, artifact_location=folder))
            except MlflowException:
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return str(found.experiment_id)

    def log(self, point: Point) -> None:
        """Log the values at once."""
        from mlflow.entities import Metric

        t_ms = int(point.t * 1000)
        metrics = [Metric(_name(name), value, t_ms, point.step) for name, value in point.values.items()]
        for first in range(0, len(metrics), MAX_BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MAX_BATCH])

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
