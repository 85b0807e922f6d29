"""A tracker in a process of its own."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from diloco.errors import TrackerError
from diloco.tracking.base import Point, TrackedRun
from diloco.tracking.feed import Feed
from diloco.tracking.process import TrackerProcess

ROOT = Path(__file__).parents[2]
SPEC = "tests.tracking.scripted:Scripted"
RUN = TrackedRun("77aa", "project", "demo", "demo-syncer", {"a": 1})


@pytest.fixture(autouse=True)
def _with_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process finds the scripted tracker."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))


def scripted(folder: Path, **script: str) -> TrackerProcess:
    own = {step.removeprefix("at_"): what for step, what in script.items()}
    return TrackerProcess(SPEC, {"folder": str(folder), "script": own}, folder / "logs" / "log")


def point(step: int, value: float = 0.5) -> Point:
    return Point(step, 2.0, {"x": value})


def piped(folder: Path) -> TextIO:
    """What the tracker is told, as soon as it is."""
    os.mkfifo(folder / "told")
    return os.fdopen(os.open(folder / "told", os.O_RDWR))  # also a writer: there is no end between two of them


def told(folder: Path) -> list[str]:
    return (folder / "told").read_text().splitlines()


def test_it_is_told_what_it_should_be_and_its_prints_go_to_a_file(tmp_path: Path) -> None:
    tracker = scripted(tmp_path)
    tracker.start(RUN)
    tracker.log(point(1))
    tracker.log(point(2, math.nan))
    tracker.end()
    assert told(tmp_path) == ["start 77aa {'a': 1}", "1 2.0 {'x': 0.5}", "2 2.0 {'x': nan}", "end"]
    printed = (tmp_path / "logs" / "log").read_text()
    assert "and write to the descriptor" in printed
    assert "trackers print" in printed


def test_what_it_raises_is_a_tracker_error_and_it_goes_on(tmp_path: Path) -> None:
    tracker = scripted(tmp_path, at_1="raise")
    tracker.start(RUN)
    with pytest.raises(TrackerError, match=r"^ValueError: no such luck; .*log says more\.$"):
        tracker.log(point(1))
    tracker.log(point(2))
    tracker.end()
    assert told(tmp_path)[1:] == ["2 2.0 {'x': 0.5}", "end"]
    assert "and more of it" in (tmp_path / "logs" / "log").read_text()


def test_a_process_that_dies_is_a_tracker_error_each_time(tmp_path: Path) -> None:
    tracker = scripted(tmp_path, at_1="die")
    tracker.start(RUN)
    for _ in range(2):
        with pytest.raises(TrackerError, match="its process has ended with code 3"):
            tracker.log(point(1))
    with pytest.raises(TrackerError, match="code 3"):
        tracker.end()


def test_a_tracker_that_is_none_is_a_tracker_error(tmp_path: Path) -> None:
    tracker = TrackerProcess("tests.tracking.scripted:Absent", {"folder": str(tmp_path)}, tmp_path / "log")
    with pytest.raises(TrackerError, match="its process has ended with code 1"):
        tracker.start(RUN)
    assert "Absent" in (tmp_path / "log").read_text()


def test_a_folder_that_cannot_be_is_a_tracker_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(TrackerError, match=r"its process cannot be started \(.*\); check track.folder"):
        scripted(tmp_path).start(RUN)


def test_a_process_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.tracking.feed.ABANDON_S", 60.0)  # on a busy machine
    tracker = scripted(tmp_path, at_1="hang")
    with piped(tmp_path) as pipe, Feed(RUN, {"hangs": tracker}) as feed:
        feed.begin()
        feed.put(point(1))
        feed.put(point(2))
        assert pipe.readline().startswith("start")
        assert pipe.readline() == "hangs\n"
        feed.close(timeout_s=0.0)
    assert tracker._process is not None
    assert tracker._process.returncode == -signal.SIGKILL
    assert feed.dropped == {"hangs": 2}


def test_ctrl_c_is_not_for_it(tmp_path: Path) -> None:
    tracker = scripted(tmp_path)
    tracker.start(RUN)
    assert tracker._process is not None
    assert os.getpgid(tracker._process.pid) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        tracker._process.send_signal(number)
    tracker.log(point(1))
    tracker.end()
    assert told(tmp_path)[-1] == "end"


PARENT = """
import os, signal
from tests.tracking.test_process import RUN, point, scripted
from pathlib import Path
from typing import TextIO
tracker = scripted(Path({folder!r}))
tracker.start(RUN)
tracker.log(point(1))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_its_run_when_the_process_that_feeds_it_is_killed(tmp_path: Path) -> None:
    with piped(tmp_path) as pipe:
        done = subprocess.run([sys.executable, "-c", PARENT.format(folder=str(tmp_path))], check=False)
        assert done.returncode == -signal.SIGKILL
        lines = [pipe.readline() for _ in range(3)]  # waits for them
    assert lines == ["start 77aa {'a': 1}\n", "1 2.0 {'x': 0.5}\n", "end\n"]
