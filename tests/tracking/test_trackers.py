"""Each tracker against its real library: what a run and its restart have logged is read back.

In the environment of the other tests there are TensorBoard and W&B; `make trackers` has an environment for the others,
which needs no torch.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import ConfigError
from diloco.tracking.trackers import TrackedRun, require_packages
from diloco.tracking.values import Point

ROOT = Path(__file__).parents[2]

RUN = TrackedRun("77aa00bb11cc22dd-syncer", "project", "demo", "demo-syncer", {"run": {"name": "demo", "tokens": 800}})
OTHER = TrackedRun("ffff00bb11cc22dd-syncer", "project", "demo", "demo-syncer", {})

LOSS = "global_model/held_out_loss"
TOKENS = "run/tokens"

Curve = list[tuple[int, float]]
"""Step and value."""

pytestmark = pytest.mark.timeout(900)  # MLflow makes a database


def needs(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed; `make trackers` has trackio and mlflow")


def started(tracker: str, folder: Path, run: TrackedRun, points: list[Point], **options: Any) -> str:
    """A process of a run. Returns what it says on standard error; standard output is left to the run's results."""
    start = {
        "tracker": tracker, "folder": str(folder), "options": options, "run": asdict(run),
        "points": [asdict(point) for point in points],
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.tracking.one_start", json.dumps(start)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def track(tracker: str, folder: Path, run: TrackedRun, points: list[Point], **options: Any) -> None:
    """A process of a run that misses nothing."""
    said = started(tracker, folder, run, points, **options)
    assert "and the run continues" not in said
    assert "has lost" not in said


def logged(tracker: str, folder: Path, **options: Any) -> None:
    """A run, its restart, which goes back by a step, and another run of the same name."""
    before = [Point(10, 1000.0, {TOKENS: 100.0}), Point(20, 1010.0, {TOKENS: 200.0, LOSS: 2.5})]
    after = [Point(19, 1020.0, {TOKENS: 190.0, LOSS: math.nan}), Point(30, 1030.0, {TOKENS: 300.0, LOSS: 2.25})]
    track(tracker, folder, RUN, before, **options)
    track(tracker, folder, RUN, after, **options)


EXPECTED_TOKENS: Curve = [(10, 100.0), (20, 200.0), (19, 190.0), (30, 300.0)]


def assert_losses(found: Curve) -> None:
    assert [step for step, _ in found] == [20, 19, 30]
    assert (found[0][1], found[2][1]) == (2.5, 2.25)
    assert math.isnan(found[1][1])


def printed(*command: str, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_tensorboard(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    logged("TensorBoard", tmp_path)
    curves: dict[str, Curve] = {}
    texts, times = [], []
    files = sorted((tmp_path / "tensorboard" / "demo-syncer").iterdir(), key=lambda path: path.stat().st_ino)
    assert len(files) == 2  # one a start, and TensorBoard reads both
    for event in (event for file in files for event in EventFileLoader(str(file)).Load()):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "text":
                texts.append(make_ndarray(value.tensor).item().decode())
            else:
                curves.setdefault(value.tag, []).append((event.step, float(make_ndarray(value.tensor))))
                times.append(event.wall_time)
    assert sorted(curves[TOKENS]) == sorted(EXPECTED_TOKENS)
    assert {step for step, _ in curves[LOSS]} == {20, 19, 30}
    assert {1000.0, 1010.0, 1020.0, 1030.0} == set(times)
    assert json.loads(texts[0]) == RUN.config


def wandb_records(file: Path) -> list[dict[str, Any]]:
    """What W&B's own reader finds in a file."""
    lines = printed(sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)).splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    needs("wandb")
    logged("WeightsAndBiases", tmp_path, mode="offline")
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{RUN.id}.wandb"] * 2  # `wandb sync` makes one run of them
    curves: dict[str, Curve] = {}
    for file in files:
        records = wandb_records(file)
        run = next(record["run"] for record in records if record["type"] == "run")
        assert (run["run_id"], run["project"], run["run_group"], run["display_name"]) == (
            RUN.id, "project", "demo", "demo-syncer",
        )  # fmt: skip
        assert run["config"]["update"]["run"] == RUN.config["run"]
        for record in records:
            if record["type"] == "history":
                row = record["history"]["item"]
                for name in {TOKENS, LOSS} & row.keys():
                    curves.setdefault(name, []).append((row["step"], float(row[name])))
        axes = [record["metric"] for record in records if record["type"] == "metric"]
        assert {"glob_name": "*", "step_metric": "step"}.items() <= axes[-1].items()
        assert (records[-1]["type"], records[-1]["exit"]["exit_code"]) == ("exit", 0)
    assert curves[TOKENS] == EXPECTED_TOKENS
    assert_losses(curves[LOSS])


def test_wandb_without_a_key_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    said = started("WeightsAndBiases", tmp_path, RUN, [Point(1, 1000.0, {TOKENS: 1.0})], mode="online")
    assert "could not start, and the run continues: W&B finds no API key; run wandb login" in said
    assert "has lost 1 of 1 points" in said


def test_trackio(tmp_path: Path) -> None:
    needs("trackio")
    logged("Trackio", tmp_path)
    track("Trackio", tmp_path, OTHER, [])
    command = str(Path(sys.executable).with_name("trackio"))

    def asked(*arguments: str) -> Any:
        return json.loads(printed(command, *arguments, "--json", TRACKIO_DIR=str(tmp_path / "trackio")))

    def curve(metric: str) -> Curve:
        values = asked("get", "metric", "--project", "project", "--run", "demo-syncer-77aa00bb", "--metric", metric)
        return [(each["step"], float(each["value"])) for each in values["values"]]

    assert "demo-syncer-77aa00bb" in asked("list", "runs", "--project", "project")["runs"]
    assert sorted(curve(TOKENS)) == sorted(EXPECTED_TOKENS)
    assert {step for step, _ in curve(LOSS)} == {20, 19, 30}
    run = asked("get", "run", "--project", "project", "--run", "demo-syncer-77aa00bb")
    assert run["config"]["run"] == RUN.config["run"]


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_mlflow(tmp_path: Path) -> None:
    needs("mlflow")
    from mlflow import MlflowClient

    logged("MLflow", tmp_path, tracking_uri=None)
    track("MLflow", tmp_path, OTHER, [], tracking_uri=None)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("project")
    assert experiment is not None
    runs = {run.data.tags["diloco.id"]: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {RUN.id, OTHER.id}
    run = runs[RUN.id]
    assert (run.info.run_name, run.info.status) == ("demo-syncer", "FINISHED")
    assert run.data.params == {"run.name": "demo", "run.tokens": "800"}

    def curve(metric: str) -> Curve:
        history = sorted(client.get_metric_history(run.info.run_id, metric), key=lambda it: it.timestamp)
        assert history[0].timestamp >= 1_000_000  # milliseconds
        return [(it.step, it.value) for it in history]

    assert curve(TOKENS) == EXPECTED_TOKENS
    assert {step for step, _ in curve(LOSS)} == {20, 19, 30}


def test_a_tracker_that_is_not_installed_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: Callable[[str], None] = lambda _: None  # noqa: E731
    monkeypatch.setattr("diloco.tracking.trackers.find_spec", absent)
    with pytest.raises(
        ConfigError, match=r"track.trackers = wandb, mlflow are not installed; pip install 'diloco\[wandb,mlflow\]'"
    ):
        require_packages(["wandb", "mlflow"])
    require_packages([])
