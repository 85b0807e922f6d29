"""`python -m tests.chaos`: its options, and short runs of it. Nothing here depends on how fast the machine is."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.__main__ import main, parse
from tests.chaos.plan import LOST_S

ROOT = Path(__file__).parents[2]
KINDS = ("kill syncer", "kill learner", "cut transfer", "half open", "corruption")

SAME_AS_SIGTERM = (signal.SIGHUP, signal.SIGINT)
ENDS = (signal.SIGTERM, signal.SIGKILL, *(pytest.param(each, marks=pytest.mark.slow) for each in SAME_AS_SIGTERM))
HEEDS_ALL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from tests.chaos.__main__ import main
sys.exit(main())
"""
"""What a shell starts in the background ignores Ctrl-C, and under nohup the end of its terminal; and so would whatever
it starts itself."""


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.chaos", *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )


def planned(*arguments: str) -> list[dict[str, Any]]:
    return [vars(fault) for fault in parse([*arguments])[1].faults(LOST_S)]


def test_a_seed_can_be_looked_at_before_it_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "--json", "--seed", "3", "--minutes", "3"]) == 0
    faults = json.loads(capsys.readouterr().out)
    assert faults == planned("--seed", "3", "--minutes", "3") == planned("--seed", "3", "--hours", "0.05")
    assert faults != planned("--seed", "4", "--minutes", "3")
    assert {"at_s", "kind", "target", "seconds", "choice"} == set(faults[0])


def test_two_lengths_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--hours", "1", "--minutes", "1"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--only", "earthquake"), "kill learner"),
        (("--out", str(Path(__file__).parent)), "is not empty"),
    ],
)
def test_wrong_plans_are_refused(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow  # tests/syncer kills, stops, pauses, cuts and damages the same processes, one fault a test
@pytest.mark.timeout(900)
def test_a_short_run_survives_its_faults(tmp_path: Path) -> None:
    arguments = ["--seed", "1017", "--minutes", "0.1", "--every", "1", "--learners", "2", "--only", ",".join(KINDS)]
    assert {fault["kind"] for fault in planned(*arguments)} == set(KINDS)
    done = chaos(*arguments, "--calm", "1", "--slowness", "4", "--out", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out" / "chaos.json").read_text())
    assert found["holds"]
    assert found["invariants"] == {name: [] for name in found["seen"]}
    assert found["num_survived"] == found["num_faults"] > 0  # a cut may come when nothing crosses
    assert found["versions_lost"] == 0
    assert found["holdings_compared"] > 0
    ledger = found["ledger"]
    assert ledger["trained"] == sum(ledger[key] for key in ("merged", "pending", "lost", "discarded"))
    injected = [json.loads(line) for line in (tmp_path / "out" / "faults.jsonl").read_text().splitlines()]
    assert len(injected) == len(planned(*arguments))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_no_process_outlives_it(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", HEEDS_ALL, "--learners", "1", "--calm", "600", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        assert "are planned; starting" in process.stderr.readline()
        pids = json.loads((out / "pids.json").read_text())
        assert set(pids) == {"syncer", "learner-0"}
        open_ends = [os.pidfd_open(pid) for pid in pids.values()]
        process.send_signal(number)
        said = process.stderr.read()
        code = process.wait()
    for each in open_ends:  # readable once the process has ended; the test's own limit ends a wait for ever
        select.select([each], [], [])
        os.close(each)
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
        return
    assert code == 130
    assert "all processes are ended" in said
    assert "interrupted after 0 of" in said
    assert (out / "faults.jsonl").read_text() == ""
