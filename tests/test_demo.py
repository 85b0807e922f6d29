"""What the demo computes from event files, and its page. The demo itself: `make demo` (slow)."""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.store.small_run import read_newest

from diloco import events as ev
from diloco.demo import bucket_server
from diloco.demo.display import Display, is_wanted
from diloco.demo.plan import LEARNERS, QUICK, SYNCERS, Plan, free_port, prepared
from diloco.demo.processes import DemoProcesses, Kill
from diloco.demo.story import tell
from diloco.demo.summary import (
    baseline_bytes,
    describe,
    headline,
    num_lost,
    recovery,
    summarise,
    write_report,
)
from diloco.errors import ConfigError, RunError
from diloco.event_log import EventLog, read_events
from diloco.report.page import read_run
from diloco.report.series import ring_all_reduce_bytes
from diloco.report.timeline import Timeline, TimelineFollower
from diloco.store.objects import open_store


def step(t: float, number: int, tokens: int) -> ev.Stepped:
    return ev.Stepped(t=t, step=number, loss=2.0, lr=0.1, tokens=tokens, tokens_per_s=1.0, gradient_norm=1.0)


def merged(t: float, version: int, *contributors: str) -> ev.Merged:
    return ev.Merged(
        t=t,
        fragment=0,
        round=version - 1,
        version=version,
        contributors=contributors,
        weights=(1.0,) * len(contributors),
        tokens=(1,) * len(contributors),
    )


def read(directory: Path) -> Timeline:
    return TimelineFollower(directory).read()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A warm start of 100 tokens; from second 10 two learners, from 20 three, from 30 two again; one restart of the
    syncer at 40."""
    with EventLog(tmp_path / "syncer" / "events.jsonl", who="syncer") as log:
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
    with EventLog(tmp_path / "learner-0" / "events.jsonl", who="learner-0") as log:
        for t, number, tokens in ((4, 1, 100), (8, 2, 130), (15, 3, 160), (25, 4, 190), (35, 5, 220)):
            log.append(step(t, number, tokens))
    with EventLog(tmp_path / "learner-1" / "events.jsonl", who="learner-1") as log:
        for t, number, tokens in ((15, 3, 30), (25, 4, 60)):
            log.append(step(t, number, tokens))
    return tmp_path


def test_bytes_are_summed_over_syncer_processes(run: Path) -> None:
    timeline = read(run)
    assert timeline.traffic.by_kind() == {"updates": 11, "contributions": 7, "control": 2}
    assert timeline.syncer_starts == [(1, "syncer"), (40, "syncer")]
    assert timeline.initial_tokens == 100


@pytest.fixture
def shared_run(tmp_path: Path) -> Path:
    """Two syncers; the standby takes over at second 43, and the first comes back at 45 to wait."""
    with EventLog(tmp_path / "syncer" / "events.jsonl", who="syncer") as log:
        log.append(ev.StandingChanged(t=1, standing="serving", epoch=1, why=""))
        log.append(ev.SyncerStarted(t=1.5, run="r", address="x"))
        log.append(
            ev.Initialised(t=5, learner="learner-0", source="", layout_digest="", num_parameters=1000, tokens=100)
        )
        log.append(ev.Joined(t=5, learner="learner-0", incarnation=1))
        for version in (1, 2):
            log.append(ev.Published(t=30 + version, fragment=0, version=version, digest="", num_bytes=1))
        log.append(ev.Traffic(t=37, learner="learner-0", sent_bytes={"updates": 10}, received_bytes={}))
        log.append(ev.SyncerStarted(t=45, run="r", address="x", versions=(2,)))
    with EventLog(tmp_path / "standby" / "events.jsonl", who="syncer") as log:
        log.append(ev.SyncerStarted(t=2, run="r", address="y"))
        log.append(ev.StandingChanged(t=43, standing="serving", epoch=2, why=""))
        log.append(merged(44, 3, "learner-0"))
        log.append(ev.Published(t=44, fragment=0, version=3, digest="", num_bytes=1))
        for t, num_bytes in ((46, 3), (48, 4)):
            log.append(ev.Traffic(t=t, learner="learner-0", sent_bytes={"updates": num_bytes}, received_bytes={}))
        log.append(ev.Finished(t=50, steps=9, tokens=400, seconds=1, reason="stopped"))
    return tmp_path


def test_two_syncers_are_one_run(shared_run: Path) -> None:
    """A standby's start is no restart, and each syncer counts its own bytes, in whatever order the files are read."""
    timeline, story = read_run([shared_run])
    for each in (timeline, read(shared_run)):
        assert (each.traffic.by_kind(), each.num_restarts) == ({"updates": 14}, 1)
    shown = story.since(0)
    assert (shown["head"]["state"], shown["head"]["restarts"], shown["head"]["num_bytes"]) == ("ended", 1, 14)
    assert recovery(read(shared_run), Kill("syncer", 38.5)) == (4.5, "standby")
    assert recovery(read(shared_run), Kill("standby", 44.5)) == (0.5, "syncer")


def test_a_version_that_is_published_again_or_not_in_the_end_is_lost(shared_run: Path) -> None:
    assert num_lost(shared_run, [3]) == 0
    assert num_lost(shared_run, [2]) == 1
    with EventLog(shared_run / "standby" / "events.jsonl", who="syncer") as log:
        log.append(ev.Published(t=49, fragment=0, version=2, digest="", num_bytes=1))
    assert num_lost(shared_run, [3]) == 1


def test_the_baseline_pays_only_where_two_or_more_trained(run: Path) -> None:
    """learner-0: 30 tokens alone (free), 30 with one other, 30 with two, 30 with one; learner-1: 30 with one, 30 with
    two others."""
    two, three = (30 + 30 + 30) / 90, (30 + 30) / 90
    assert baseline_bytes(read(run), tokens_per_step=90) == round((two * 4 * 1 + three * 4 * 2) * 1000)


def test_presence(run: Path) -> None:
    timeline = read(run)
    live = sorted(name for name, spans in timeline.presence.items() if spans[-1][1] is None)
    assert live == ["learner-0", "learner-1"]
    assert [timeline.num_live(t) for t in (4, 8, 15, 25, 35)] == [0, 1, 2, 3, 2]


def test_a_ring_moves_each_value_twice_but_for_ones_own_share() -> None:
    """Per learner 2·(M − 1)/M·2·N bytes: nothing alone, N·2 with one other, towards N·4 with many."""
    assert [ring_all_reduce_bytes(m, 1000) / max(m, 1) for m in (0, 1, 2, 4)] == [0, 0, 2000, 3000]


def test_a_resumed_learner_is_not_paid_for_tokens_it_counts_down(tmp_path: Path) -> None:
    with EventLog(tmp_path / "syncer" / "events.jsonl", who="syncer") as log:
        log.append(ev.Initialised(t=1, learner="x", source="", layout_digest="", num_parameters=1000))
        log.append(ev.Joined(t=1, learner="learner-0", incarnation=1))
        log.append(ev.Joined(t=1, learner="learner-1", incarnation=1))
    with EventLog(tmp_path / "learner-0" / "events.jsonl", who="learner-0") as log:
        for t, tokens in ((2, 30), (3, 60), (4, 40), (5, 70)):  # killed after 60 tokens, back at a checkpoint before 40
            log.append(step(t, 1, tokens))
    assert baseline_bytes(read(tmp_path), tokens_per_step=90) == 4 * 1000


def test_a_follower_takes_every_event_once(run: Path) -> None:
    follower = TimelineFollower(run)
    before = len(follower.read().merges)
    with EventLog(run / "syncer" / "events.jsonl", who="syncer") as log:
        log.append(merged(60, 3, "learner-0"))
    with open(run / "syncer" / "events.jsonl", "ab") as file:
        file.write(b'{"t":61,"kind":"mer')  # in the middle of a write
    assert len(follower.read().merges) == len(follower.read().merges) == before + 1
    with EventLog(run / "syncer" / "events.jsonl", who="syncer") as log:  # cuts the torn line off
        log.append(merged(62, 4, "learner-0"))
    assert [merge.t for merge in follower.read().merges] == [25, 35, 60, 62]


def test_a_rejoin_ends_the_presence_that_a_killed_syncer_left_open(run: Path) -> None:
    with EventLog(run / "syncer" / "events.jsonl", who="syncer") as log:
        log.append(ev.Joined(t=60, learner="learner-1", incarnation=2))
    assert read(run).presence["learner-1"] == [(10, 60), (60, None)]


def test_a_replaced_incarnation_does_not_end_the_new_ones_presence(run: Path) -> None:
    with EventLog(run / "syncer" / "events.jsonl", who="syncer") as log:
        log.append(ev.Joined(t=60, learner="learner-1", incarnation=2))
        log.append(ev.Evicted(t=61, learner="learner-1", incarnation=1, reason="replaced by a newer incarnation"))
    assert read(run).presence["learner-1"] == [(10, 60), (60, None)]


def test_a_killed_process_is_away_until_it_does_its_work_again(run: Path) -> None:
    with EventLog(run / "syncer" / "events.jsonl", who="syncer") as log:
        log.append(merged(55, 3, "learner-0", "learner-1"))  # sent before the kill
        log.append(ev.Joined(t=60, learner="learner-1", incarnation=2))
        log.append(merged(63, 4, "learner-0", "learner-1"))
    timeline = read(run)
    kills = [Kill("learner-1", 52), Kill("syncer", 38.5), Kill("learner-2", 33)]
    assert [recovery(timeline, kill) for kill in kills] == [(11, "learner-1"), (1.5, "syncer"), (None, "learner-2")]


LEARNER = {"name": "learner-2", "back_s": 5.25, "by": "learner-2"}
SYNCER = {"name": "syncer", "back_s": 3.5, "by": "syncer"}
GONE = {"name": "learner-0", "back_s": None, "by": "learner-0"}
FEWER, SAME, BACK = "49 times fewer bytes", "loss 0.4 % higher", "one learner killed and back in 5.2 s"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (FEWER, SAME, BACK)),
        ({"loss_gap_percent": 0.0}, (FEWER, "the same loss to 0.1 %", BACK)),
        ({"loss_gap_percent": -1.91}, (FEWER, "loss 1.9 % lower", BACK)),
        ({"loss_gap_percent": 3.04}, (FEWER, "loss 3.0 % higher", BACK)),
        ({"loss_gap_percent": -3.0}, (FEWER, "loss 3.0 % lower", BACK)),
        ({"loss_gap_percent": float("nan")}, (FEWER, "a non-finite loss", BACK)),
        ({"wire_bytes": 400}, ("2.5 times fewer bytes", SAME, BACK)),
        ({"wire_bytes": 990}, ("as many bytes", SAME, BACK)),
        ({"wire_bytes": 2500}, ("2.5 times more bytes", SAME, BACK)),
        ({"wire_bytes": 0}, ("bytes not counted", SAME, BACK)),
        ({"baseline_wire_bytes": 0}, ("more bytes than data parallel, which needed none", SAME, BACK)),
        ({"kills": []}, (FEWER, SAME, "no process killed")),
        ({"kills": [SYNCER]}, (FEWER, SAME, "the syncer killed and back in 3.5 s")),
        (
            {"kills": [{**SYNCER, "by": "standby"}]},
            (FEWER, SAME, "the syncer killed and the standby serving 3.5 s later"),
        ),
        ({"kills": [GONE]}, (FEWER, SAME, "one learner killed and not back before the end")),
        ({"kills": [LEARNER, SYNCER]}, (FEWER, SAME, "2 kills and all back, the slowest in 5.2 s")),
        ({"kills": [LEARNER, GONE]}, (FEWER, SAME, "2 kills, 1 of the processes back")),
    ],
)
def test_the_headline_says_what_was_measured(changed: dict[str, Any], expected: tuple[str, ...]) -> None:
    found = {"wire_bytes": 20, "baseline_wire_bytes": 984, "loss_gap_percent": 0.36, "kills": [LEARNER]}
    assert headline({**found, **changed}) == ", ".join(expected)


@pytest.mark.parametrize(
    ("environ", "is_terminal", "platform", "expected"),
    [
        ({"DISPLAY": ":0"}, True, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0", "CI": "false"}, True, "linux", True),
        ({}, True, "darwin", True),
        ({}, True, "linux", False),
        ({"DISPLAY": ":0"}, False, "linux", False),
        ({"DISPLAY": ":0", "CI": "true"}, True, "linux", False),
    ],
)
def test_a_browser_is_opened_for_people_only(
    environ: dict[str, str], is_terminal: bool, platform: str, expected: bool
) -> None:
    assert is_wanted(environ, is_terminal=is_terminal, platform=platform) == expected


def test_in_a_pipe_a_phase_and_a_kill_are_said_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = DemoProcesses(run)
    with Display(100, {"syncer": "http://page"}, opens=False, to_stderr=True) as display:
        display.show("starting", Timeline(), family)
        for _ in range(3):
            display.show("together", read(run), family)
        family.kills.append(Kill("syncer", 38.5))
        for _ in range(3):
            display.show("together", read(run), family)
    assert [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "starting",
        "watch the run at http://page",
        "together",
        "syncer was killed; it will be restarted",
        "syncer works again, 1.5 s after the kill",
    ]


def test_of_two_syncers_the_one_that_takes_over_is_said(shared_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = DemoProcesses(shared_run)
    pages = {"syncer": "http://one", "standby": "http://two"}
    first = Timeline()
    for event in read_events(shared_run / "syncer" / "events.jsonl")[:-1]:
        first.take(event, "syncer")
    with Display(100, pages, opens=False, to_stderr=True) as display:
        family.kills.append(Kill("syncer", 38.5))
        display.show("together", first, family)
        for _ in range(2):
            display.show("together", read(shared_run), family)
    assert [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "syncer was killed; its standby takes over",
        "watch the run at http://one",
        "together",
        "standby works in the place of syncer, 4.5 s after the kill",
        "watch the run at http://two",
    ]


def start_endless(family: DemoProcesses, *, restarts: bool = False) -> None:
    """A syncer, which does not end by itself before it is killed."""
    run_file = family.directory / "run.toml"
    run_file.write_text("run = {name = 'demo', tokens = 1_000_000}\nsyncer = {insecure = true}\n")
    where = ("--address", "127.0.0.1:0", "--state-dir", str(family.directory / "state"))
    family.start("syncer", "syncer", str(run_file), *where, restart_after_s=1.0 if restarts else None)


def test_a_killed_process_comes_back_and_a_failed_one_is_shown(tmp_path: Path) -> None:
    with DemoProcesses(tmp_path) as family:
        start_endless(family, restarts=True)
        (killed := family.children["syncer"].process).kill()

        def is_back() -> bool:
            family.watch()
            return family.children["syncer"].process is not killed

        until(is_back, "its second start")
        assert [kill.name for kill in family.kills] == ["syncer"]
        family.start("methods", "methods", "--json")
        until(lambda: family.are_done("methods"), "its end")
        assert json.loads(family.output("methods"))
        family.start("failing", "train", str(tmp_path / "none.toml"), restart_after_s=1.0)
        family.children["failing"].process.join()
        with pytest.raises(RunError, match=r"(?s)failing failed with exit code 2.*none\.toml"):
            family.watch()


def test_a_killed_control_ends_the_demo(tmp_path: Path) -> None:
    with DemoProcesses(tmp_path) as family:
        start_endless(family)
        family.children["syncer"].process.kill()
        family.children["syncer"].process.join()
        with pytest.raises(RunError, match="syncer failed with exit code -9"):
            family.watch()


def test_processes_with_the_same_seed_draw_different_ports() -> None:
    drawn = set()
    for _ in range(4):
        random.seed(0)
        drawn.add(free_port())
    assert len(drawn) > 1


def test_leaving_ends_every_process(tmp_path: Path) -> None:
    with prepared(tmp_path / "demo", QUICK, seed=0) as config, DemoProcesses(config.dir) as family:
        family.start("syncer", "syncer", str(config.dir / "run.toml"), serves=True)
        process = family.children["syncer"].process
        assert json.loads((tmp_path / "demo" / "pids.json").read_text()) == {"syncer": process.pid}
    assert process.exitcode == -signal.SIGKILL


STARTS_ONE = """
import sys
from pathlib import Path
from diloco.demo.processes import DemoProcesses

if __name__ == "__main__":
    with DemoProcesses(Path(sys.argv[1])) as family:
        family.start("syncer", "syncer", sys.argv[2], serves=True)
        print(family.children["syncer"].process.pid, flush=True)
        family.children["syncer"].process.join()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc to look in")
def test_processes_end_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    with prepared(tmp_path / "demo", QUICK, seed=0) as config:
        command = [sys.executable, "-c", STARTS_ONE, str(config.dir), str(config.dir / "run.toml")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as demo:
            assert demo.stdout is not None
            pid = int(demo.stdout.readline())
            demo.kill()
        until(lambda: not runs(pid), "its end")


def runs(pid: int) -> bool:
    """Whether a process has not ended; one that its parent has not asked for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_demo_at_a_time_is_in_a_directory(tmp_path: Path) -> None:
    with prepared(tmp_path / "demo", QUICK, seed=0):
        with pytest.raises(ConfigError, match="a demo is running in"), prepared(tmp_path / "demo", QUICK, seed=1):
            pass
        assert (tmp_path / "demo" / "run.toml").exists()
    with prepared(tmp_path / "demo", QUICK, seed=1) as config:
        assert config.run.seed == 1


def test_only_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="no earlier demo wrote"), prepared(tmp_path, QUICK, seed=0):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "precious"

    demo = tmp_path / "demo"
    with prepared(demo, QUICK, seed=3) as config:
        assert config.run.seed == 3
        (demo / "old").write_text("")
    with prepared(demo, QUICK, seed=4) as config:
        assert config.run.seed == 4
        assert sorted(path.name for path in demo.iterdir()) == ["run.toml"]
    (demo / "run.toml").write_text("[run]\n")  # a run of the user's own
    with pytest.raises(ConfigError, match="no earlier demo wrote"), prepared(demo, QUICK, seed=0):
        pass


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_demo_survives_kills_from_outside(tmp_path: Path) -> None:
    """The whole story with real processes, with the syncer and the learner that initialised the run killed by
    the test."""
    plan = Plan(steps=120, kill_after=0.1, isolated=True, sync_every=10, held_out=32)
    killed: list[str] = []
    phases: list[str] = []

    def kill_from_outside(phase: str, timeline: Timeline, family: DemoProcesses) -> None:
        phases.append(phase)
        due = {
            "syncer": len(timeline.merges) >= 5 and timeline.num_live(math.inf) == len(LEARNERS),
            "learner-0": len(timeline.syncer_starts) > 1 and timeline.presence["learner-0"][-1][1] is None,
        }
        for name, is_due in due.items():
            if is_due and name not in killed and family.children[name].process.is_alive():
                killed.append(name)
                os.kill(json.loads((tmp_path / "demo" / "pids.json").read_text())[name], signal.SIGKILL)

    with prepared(tmp_path / "demo", plan, 0) as config:
        outcome = tell(config, plan, kill_from_outside)
        summary = summarise(outcome)

    assert set(killed) == {"syncer", "learner-0"} <= {kill["name"] for kill in summary["kills"]}
    assert f"{len(summary['kills'])} kills" in summary["headline"]
    assert summary["run"]["syncer_restarts"] == 1
    saved = read_newest(open_store(tmp_path / "demo" / "syncer"))
    versions = [fragment.version for fragment in saved.fragments]
    check_published(read_events(tmp_path / "demo" / "syncer" / "events.jsonl"), versions)
    assert (summary["versions"], summary["versions_lost"], summary["bucket_bytes"]) == (sum(versions), 0, None)
    assert summary["tokens"] <= summary["baseline_tokens"] < summary["tokens"] + 18 * 64  # it makes whole steps
    assert summary["wire_bytes"] == sum(summary["wire_bytes_by_kind"].values()) > 0
    assert summary["global_loss"] < 4.0  # uniform bytes cost 5.5
    assert phases[0] == "starting a syncer and three learners"

    write_report(tmp_path / "report.html", outcome, summary)
    page = (tmp_path / "report.html").read_text()
    assert "<script src=" not in page
    shown = json.loads(page.partition('id="frozen">')[2].partition("</script>")[0])
    assert shown["demo"]["headline"] == summary["headline"]
    assert all(line in shown["demo"]["text"] for line in describe(summary).splitlines())
    assert shown["head"]["num_bytes"] == summary["wire_bytes"]
    own, parallel = (dict(shown["loss"][name]) for name in ("global model", "data parallel"))
    assert own[summary["tokens"]] == summary["global_loss"]
    assert parallel[summary["baseline_tokens"]] == summary["baseline_loss"]
    alone = dict(shown["loss"]["isolated learner, at the same step"])  # drawn at the run's step
    assert alone[outcome.timeline.finished["syncer"].steps * 18 * 64] == summary["isolated_loss"]
    assert sum(shown["ledger"].values()) == len(versions) * (summary["tokens"] - summary["initial_tokens"])
    killed_at = {event["learner"] for event in shown["events"] if event["kind"] == "killed"}
    assert killed_at == {kill["name"] for kill in summary["kills"]}


def check_published(log: list[ev.Event], served: list[int]) -> None:
    """Every version that was ever published is in the model that was served in the end, each published once."""
    published = [(e.fragment, e.version) for e in log if isinstance(e, ev.Published)]
    versions = {(fragment, version + 1) for fragment, newest in enumerate(served) for version in range(newest)}
    assert len(set(published)) == len(published)
    assert set(published) <= versions
    # A version that became durable in the instant before a kill may not have come into the log; its successor starts
    # from it.
    restarts = [e for e in log if isinstance(e, ev.SyncerStarted)][1:]
    durable = {(fragment, version) for e in restarts for fragment, version in enumerate(e.versions)}
    assert versions - set(published) <= durable
    assert len(versions - set(published)) <= len(restarts)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C, and so would whatever it starts itself."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco", "demo", "--quick", "--dir", str(tmp_path / "demo")]
    pids_file = tmp_path / "demo" / "pids.json"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as demo:
        until(lambda: pids_file.exists() and len(json.loads(pids_file.read_text())) == 4, "four processes")
        demo.send_signal(signal.SIGINT)
        assert demo.stdout is not None
        demo.stdout.read()
        assert demo.wait() == 130
    for pid in json.loads(pids_file.read_text()).values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_bucket_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user's credentials come back, and its port is free."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.delenv("AWS_REGION", raising=False)
    before = dict(os.environ)
    with bucket_server.serving("demo") as (port, _):
        assert bucket_server.CREDENTIALS.items() <= os.environ.items()
    assert dict(os.environ) == before
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco", "demo", "--quick", "--json", "--dir", str(tmp_path / "demo")]
    summary = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert summary["kills_survived"] == 1
    assert summary["bytes_ratio"] > 40
    assert abs(summary["loss_gap_percent"]) < 5


OVER_A_BUCKET = """
import json, sys
from pathlib import Path
from diloco.demo import bucket_server
from diloco.demo.plan import Plan, prepared
from diloco.demo.story import tell
from diloco.demo.summary import summarise

with bucket_server.serving("demo") as (port, bucket):
    url = f"s3://demo/run?endpoint=http://127.0.0.1:{port}"
    plan = Plan(steps=120, kill_after=0.3, isolated=False, sync_every=10, held_out=32, bucket=url)
    with prepared(Path(sys.argv[1]), plan, 0) as config:
        print(json.dumps(summarise(tell(config, plan, lambda *_: None), bucket)))
"""
"""In a process of its own, whose children get the credentials of the bucket."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_demo_over_a_bucket(tmp_path: Path) -> None:
    """The standby takes over from the killed syncer, with its versions and its members; the first one waits then."""
    done = subprocess.run(
        [sys.executable, "-c", OVER_A_BUCKET, str(tmp_path / "demo")], check=True, capture_output=True
    )
    summary = json.loads(done.stdout)
    assert [(kill["name"], kill["by"]) for kill in summary["kills"]] == [("syncer", "standby")]
    assert summary["versions_lost"] == 0 < summary["versions"]
    assert summary["bucket_bytes"] > 0
    assert [learner["joined"] for learner in summary["run"]["learners"].values()] == [1] * len(LEARNERS)
    stands = {
        name: [
            (each.standing, each.epoch)
            for each in read_events(tmp_path / "demo" / name / "events.jsonl")
            if isinstance(each, ev.StandingChanged) and each.standing == "serving"
        ]
        for name in SYNCERS
    }
    assert stands == {"syncer": [("serving", 1)], "standby": [("serving", 2)]}
    assert (
        f"the syncer killed and the standby serving {summary['kills'][0]['back_s']:.1f} s later" in summary["headline"]
    )
