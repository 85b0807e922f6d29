"""The scripts and the run file of docs/start.md are those of examples/start, and run, with fewer tokens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.processes import until

from diloco import events as ev
from diloco.config import parse_config
from diloco.core.presets import method_from_table
from diloco.event_log import read_events
from diloco.syncer.server import Options, Syncer

ROOT = Path(__file__).parents[1]
START = ROOT / "examples" / "start"


def test_the_page_shows_the_files() -> None:
    blocks = re.findall(r"^```\w+\n(.*?)^```", (ROOT / "docs" / "start.md").read_text(), re.MULTILINE | re.DOTALL)
    assert {"first.py", "learner.py", "run.toml"} == {path.name for path in START.iterdir() if path.is_file()}
    assert all((START / name).read_text() in blocks for name in ("first.py", "learner.py", "run.toml"))


@pytest.mark.slow
def test_the_ten_lines_train_the_same_model_on_all_learners() -> None:
    done = subprocess.run([sys.executable, START / "first.py"], capture_output=True, text=True, timeout=300, check=True)
    weights, same = done.stdout.splitlines()
    assert all(abs(float(each) - 1) < 0.05 for each in re.findall(r"\d\.\d+", weights))
    assert same == "the same on all learners: True"


def test_two_processes_train_one_model_over_a_syncer(tmp_path: Path) -> None:
    config, stop = parse_config((START / "run.toml").read_text()), tmp_path / "stop"
    script = (START / "learner.py").read_text()
    ends_by = "while learner.run_tokens < 500_000:"
    assert ends_by in script
    script = "import pathlib\n" + script.replace(ends_by, f"while not pathlib.Path({str(stop)!r}).exists():")
    options = Options("127.0.0.1:0", tmp_path)
    with Syncer(config.run.name, method_from_table(config.method), options) as syncer:
        script = script.replace(config.syncer.address, syncer.address)
        learners = [
            subprocess.Popen([sys.executable, "-c", script, *words], stdout=subprocess.PIPE, text=True)
            for words in (["paris", "--initialise"], ["oslo"])
        ]
        until(lambda: any(set(each.contributors) == {"paris", "oslo"} for each in merged(tmp_path)), "a merge of both")
        stop.touch()
        printed = [learner.communicate(timeout=300)[0] for learner in learners]
    assert [learner.returncode for learner in learners] == [0, 0]
    for name, text in zip(("paris", "oslo"), printed, strict=True):
        assert re.fullmatch(rf"{name} leaves at step \d+, the run has [\d,]+ tokens\n", text)


def merged(state: Path) -> list[ev.Merged]:
    return [event for event in read_events(state / "events.jsonl") if isinstance(event, ev.Merged)]
