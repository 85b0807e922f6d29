"""What the syncer logs: one line for each thing that people want to know, in one timestamped format."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.syncer.runs import Raw, layout, method, start

import diloco
from diloco import errors
from diloco.syncer.journal import MergeLines

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (INFO|WARNING|ERROR) \S.*")


def test_every_line_of_the_process_has_one_format_and_the_last_says_what_is_saved(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f"run = {{name = 'demo', tokens = 10_000_000, dir = '{tmp_path}'}}\nmethod = {{preset = 'DiLoCo'}}\n"
    )
    command = [sys.executable, "-m", "diloco", "syncer", str(run_file), "--address", "127.0.0.1:0", "--no-page"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        raw = Raw(lines[0].split(" at ")[1].split()[0])
        with pytest.raises(errors.UnknownRunError):  # its run has another name
            raw.join()
        raw.connection.close()
        process.send_signal(signal.SIGTERM)
        lines += process.stderr.readlines()
    assert process.returncode == 0
    assert all(LINE.fullmatch(line.rstrip("\n")) for line in lines), lines
    said = "".join(lines)
    assert "syncer for run 'demo' at 127.0.0.1:" in lines[0]
    assert re.search(r"WARNING refused Join of anyone at \S+: .*tiny", said)
    assert "stopping; finishing open merges; a second signal quits at once" in said
    assert f"stopped; saved in {tmp_path / 'syncer'}: no model yet" in lines[-1]


def test_a_stop_while_the_store_refuses_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="diloco.syncer")
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.connection.close()
        (tmp_path / "state" / ".tmp-manifest.json").mkdir()  # where the next manifest is written
    said = caplog.messages[-1]
    assert re.match(r"stopped; .*/state does not answer, so it may lack what is newer .*: versions \[0, 0\]", said)
    assert not any("saved in" in each for each in caplog.messages)


def test_it_says_who_joined_what_was_merged_and_who_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="diloco.syncer")
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address, "paris")
        raw.initialise(source="seed 1")
        raw.join()
        raw.push(ONES)
        syncer.driver.drain()
        raw.leave(tokens=5)
        raw.connection.close()
    said = [record.getMessage() for record in caplog.records if record.name == "diloco.syncer"]
    cut = "2 fragments: Named(patterns=(('layers.0.*',), ('layers.1.*',)))"
    assert f"initialised by paris (seed 1): 67 parameters in {cut}" in said
    assert "joined: paris (incarnation 1) at step 0" in said
    assert "left: paris (incarnation 1) after 5 tokens" in said
    merged = next(line for line in said if line.startswith("merged "))
    assert merged == (
        "merged 1 version, 5 tokens a fragment, 100% of live learners took part; newest: version 1 of fragment 0"
    )
    assert said[-1].endswith("versions [1, 0], step 2, 5 tokens")


def test_merges_are_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="diloco.syncer")
    now_s = 1000.0
    lines = MergeLines(lambda: now_s)
    for second in range(181):
        now_s = 1000.0 + second
        lines.merged(second % 2, 1 + second // 2, tokens=10, contributors=3, live=4)
        lines.say()
    lines.say()
    lines.say(is_last=True)
    lines.say(is_last=True)
    head = "75% of live learners took part; newest: version"
    assert [record.getMessage() for record in caplog.records] == [
        "merged 1 version, 10 tokens a fragment, 75% of live learners took part; newest: version 1 of fragment 0",
        f"merged 60 versions, 300 tokens a fragment, {head} 31 of fragment 0",
        f"merged 60 versions, 300 tokens a fragment, {head} 61 of fragment 0",
        f"merged 60 versions, 300 tokens a fragment, {head} 91 of fragment 0",
    ]


def test_a_learner_that_left_since_it_contributed_makes_no_share_of_more_than_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="diloco.syncer")
    lines = MergeLines(lambda: 0.0)
    lines.merged(0, 1, tokens=10, contributors=2, live=1)
    lines.say(is_last=True)
    assert "100% of live learners" in caplog.records[0].getMessage()
