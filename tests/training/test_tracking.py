"""A run that is tracked: a syncer and a learner as processes, and what TensorBoard finds afterwards."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.config import RunConfig, dump_config

# Trackers have all the time at the end that a busy machine needs.
PATIENT = "from diloco.tracking import feed; feed.END_S = 280.0; from diloco.cli import main; main()"
DILOCO = [sys.executable, "-c", PATIENT]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of a folder, by name: step and value."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: dict[str, list[tuple[int, float]]] = {}
    for event in (event for file in sorted(folder.iterdir()) for event in EventFileLoader(str(file)).Load()):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                found.setdefault(value.tag, []).append((event.step, float(make_ndarray(value.tensor))))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)  # three processes begin by importing torch
@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_a_run_is_tracked_at_both_ends(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    config = tiny(
        "run.learners=1", "run.steps=20", "run.tokens=51_200", "schedule.steps=20", "train.threads=1",
        "syncer.address=127.0.0.1:0", "syncer.page=false", "evaluate.every_steps=10", "checkpoint.every_steps=10",
        "track.trackers=['tensorboard']",
    )  # fmt: skip
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    syncer = subprocess.Popen([*DILOCO, "syncer", str(path)], stderr=subprocess.PIPE, text=True)
    try:
        assert syncer.stderr is not None
        for line in syncer.stderr:
            if serves := re.search(r"syncer for run 'tiny' at (\S+)", line):
                break
        assert serves is not None
        address = f"syncer.address={serves[1]}"
        command = [*DILOCO, "train", str(path), "--shard", "0", "--initialise", "if-empty", "--set", address]
        learner = subprocess.run(command, capture_output=True, text=True, check=False)
        assert learner.returncode == 0, learner.stderr
    finally:
        syncer.terminate()
        said = syncer.communicate()[1]
    assert not any(word in learner.stderr + said for word in ("has lost", "and the run continues", "abandoned"))

    folder = tmp_path / "run" / "tracking" / "tensorboard"
    run, own = curves(folder / "tiny-syncer"), curves(folder / "tiny-learner-0")
    assert run["run/tokens"][-1] == (20, 5_120.0)
    assert run["run/joins"][-1][1] == run["run/goodbyes"][-1][1] == 1.0
    assert run["run/merges"][-1][1] >= 4.0
    assert run["run/participation"][-1][1] == 1.0
    assert run["run/received_bytes"][-1][1] > 0
    assert [step for step, _ in own["train/loss"]] == list(range(1, 21))
    assert own["train/loss"][-1][1] < own["train/loss"][0][1]
    assert own["train/tokens"][-1] == (20, 5_120.0)
    assert {step for step, _ in own["train/checkpoint_bytes"]} == {10, 20}
    assert own["exchange/updates"][-1][1] == own["exchange/merges"][-1][1] >= 4.0
    assert own["exchange/sent_bytes"][-1][1] > 0
    shares = [own[f"exchange/{state}_share"][-1][1] for state in ("merged", "pending", "discarded", "lost")]
    assert sum(shares) == pytest.approx(1.0)
    evaluated = dict(own["global_model/held_out_loss"])
    assert evaluated.keys() == {10, 20}
    # What the syncer hears of, it hears with a heartbeat; the learner may have left before the next one.
    heard, own_losses = run.get("global_model/held_out_loss", []), own["global_model/held_out_loss"]
    assert {loss for _, loss in heard} <= {loss for _, loss in own_losses}  # twice at the last step: before the end too
