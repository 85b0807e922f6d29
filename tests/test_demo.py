"""What the demo computes from event files, and its page. The demo itself: `make demo` (slow)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diloco import events as ev
from diloco.demo.accounting import baseline_bytes, participation, read_timeline
from diloco.demo.processes import Family
from diloco.errors import ConfigError, ExchangeError


def step(t: float, number: int, tokens: int) -> ev.Stepped:
    return ev.Stepped(t=t, step=number, loss=2.0, lr=0.1, tokens=tokens, tokens_per_s=1.0, gradient_norm=1.0)


def merged(t: float, version: int, *contributors: str) -> ev.Merged:
    return ev.Merged(
        t=t, fragment=0, round=version - 1, version=version, contributors=contributors, weights=(1.0,) * len(contributors),
        tokens=(1,) * len(contributors),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A warm start of 100 tokens; from second 10 two learners, from 20 three, from 30 two again; one restart of the syncer at 40."""
    with ev.EventLog(tmp_path / "syncer" / "events.jsonl", who="syncer") as log:
        log.append(ev.SyncerStarted(t=1, run="r", address="x"))
        log.append(
            ev.Initialised(t=5, learner="learner-0", source="", layout_digest="", num_parameters=1000, tokens=100)
        )
        for t, name in ((5, "learner-0"), (10, "learner-1"), (20, "learner-2")):
            log.append(ev.Joined(t=t, learner=name, incarnation=1))
        log.append(merged(25, 1, "learner-0", "learner-1", "learner-2"))
        log.append(ev.Evicted(t=30, learner="learner-2", incarnation=1, reason="lost"))
        log.append(merged(35, 2, "learner-0", "learner-1"))
        log.append(
            ev.Traffic(t=36, learner="learner-0", sent_bytes={"updates": 5}, received_bytes={"contributions": 7})
        )
        log.append(
            ev.Traffic(t=37, learner="learner-0", sent_bytes={"updates": 10}, received_bytes={"contributions": 7})
        )
        log.append(ev.SyncerStarted(t=40, run="r", address="x"))
        log.append(ev.Traffic(t=41, learner="learner-0", sent_bytes={"updates": 1}, received_bytes={"control": 2}))
        log.append(ev.Finished(t=50, steps=9, tokens=400, seconds=1, reason="stopped"))
    with ev.EventLog(tmp_path / "learner-0" / "events.jsonl", who="learner-0") as log:
        for t, number, tokens in ((4, 1, 100), (8, 2, 130), (15, 3, 160), (25, 4, 190), (35, 5, 220)):
            log.append(step(t, number, tokens))
    with ev.EventLog(tmp_path / "learner-1" / "events.jsonl", who="learner-1") as log:
        for t, number, tokens in ((15, 3, 30), (25, 4, 60)):
            log.append(step(t, number, tokens))
    return tmp_path


def test_bytes_are_summed_over_syncer_processes(run: Path) -> None:
    timeline = read_timeline(run)
    assert timeline.traffic == {"updates": 11, "contributions": 7, "control": 2}
    assert timeline.restarts == [40]
    assert timeline.tokens == 400


def test_the_baseline_pays_only_where_two_or_more_trained(run: Path) -> None:
    """learner-0: 30 tokens alone (free), 30 with one other, 30 with two, 30 with one; learner-1: 30 with one, 30 with two others."""
    two, three = (30 + 30 + 30) / 90, (30 + 30) / 90
    assert baseline_bytes(read_timeline(run), tokens_per_full_step=90) == round((two * 4 * 1 + three * 4 * 2) * 1000)


def test_participation_is_counted_over_all_merges(run: Path) -> None:
    assert participation(read_timeline(run)) == {"learner-0": 1.0, "learner-1": 1.0, "learner-2": 0.5}


def test_presence(run: Path) -> None:
    timeline = read_timeline(run)
    assert timeline.live_learners() == ["learner-0", "learner-1"]
    assert [timeline.num_live(t) for t in (4, 8, 15, 25, 35)] == [0, 1, 2, 3, 2]


def test_a_killed_process_comes_back_and_a_failed_one_is_shown(tmp_path: Path) -> None:
    with Family(tmp_path) as family:
        child = family.start("methods", ["methods", "--json"])
        family.kill("methods")
        child.process.wait(timeout=30)
        while not child.done:
            family.watch()
        assert family.num_kills == 1
        assert json.loads(family.output("methods"))
        failing = family.start("failing", ["train", str(tmp_path / "none.toml")])
        failing.process.wait(timeout=30)
        with pytest.raises(ExchangeError, match=r"(?s)failing failed with exit code 2.*none\.toml"):
            family.watch()


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    from diloco.demo.story import QUICK, tell

    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not a demo"):
        tell(tmp_path, QUICK, 0, lambda phase, timeline: None)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_quick_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco", "demo", "--quick", "--json", "--dir", str(tmp_path / "demo")]
    summary = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert summary["kills_survived"] == 1
    assert summary["bytes_ratio"] > 40
    assert abs(summary["loss_gap_percent"]) < 5
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
