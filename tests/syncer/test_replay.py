"""A real run's journal: written over sockets through `kill -9` and a full disk, and replayed by the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.processes import ForkedSyncer
from tests.syncer.runs import RUN, LearnerThreads, method, start, train, versions_of

import diloco
from diloco.cli import main
from diloco.store.journal_files import part_paths

RUN_FILE = """
[run]
name = "tiny"
tokens = 1_000_000
[method]
preset = "StreamingDiLoCo"
sync_every = 4
overlap = 1
mix = 0.0
codec = "e3m0"
fragments = {type = "Named", patterns = [["layers.0.*"], ["layers.1.*"]]}
quorum = {type = "AllLive", at_least = 2}
[syncer]
lost_floor_s = 60.0
record_contributions = true
"""


@contextmanager
def syncer_process(directory: Path) -> Iterator[ForkedSyncer]:
    it = ForkedSyncer(directory, RUN_FILE)
    try:
        yield it
    finally:
        it.kill()


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    try:
        main(["replay", *arguments, "--json"])
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of a run whose syncer was killed twice."""
    directory = tmp_path_factory.mktemp("killed")
    steps, kill_at = 40, (9, 25)

    def at_step(step: int) -> None:
        if step in kill_at:
            syncer.kill()
            syncer.start()

    with syncer_process(directory) as syncer, LearnerThreads(2) as pool:
        lives = [
            pool.submit(
                train, index,
                pool.connect(syncer.address, learner=f"learner-{index}", initialise=index == 0), None, steps,
                at_step if index == 0 else None,
            )
            for index in range(2)
        ]  # fmt: skip
        for life in lives:
            life.result(timeout=300)
    return directory / "state"


def test_a_run_through_kill_9_is_replayed_to_the_bit(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = replayed(capsys, str(killed))
    assert (code, found["difference"], found["gaps"]) == (0, None, [])
    assert found["boots"] == 3
    assert found["decisions_equal"] == found["events"] > 50
    assert found["merges_equal"] == found["merges"] >= 18
    assert min(each["version"] for each in found["fragments"]) >= 9
    with pytest.raises(SystemExit, match="^0$"):
        main(["replay", str(killed)])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"merges with equal digests {found['merges']} of {found['merges']}" in shown
    assert shown.endswith("no difference")


def test_a_part_of_a_run_is_replayed(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, whole = replayed(capsys, str(killed))
    code, found = replayed(capsys, str(killed), "--fragment", "1")
    assert code == 0
    assert 0 < found["merges_equal"] < found["merges"] == whole["merges"]
    code, found = replayed(capsys, str(killed), "--until", str(whole["seconds"] / 2))
    assert code == 0
    assert 0 < found["events"] < whole["events"]


def test_a_changed_payload_fails_with_both_digests(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = min((killed / "journal" / "payloads").glob("contribution-*"))
    whole = path.read_bytes()
    try:
        path.write_bytes(bytes([whole[0] ^ 8]) + whole[1:])
        code, found = replayed(capsys, str(killed))
    finally:
        path.write_bytes(whole)
    assert code == 1
    assert path.name.removeprefix("contribution-") in found["difference"]


def test_a_changed_byte_and_a_lost_part_of_the_journal_are_found(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = part_paths(killed / "journal")[1]
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
        code, found = replayed(capsys, str(killed))
        assert code == 1
        assert f"of {path} is not what was written" in found["difference"]
        path.unlink()
        code, found = replayed(capsys, str(killed))
        assert code == 1
        assert "part 2 is missing" in found["difference"]
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_journal_without_its_end_is_found(
    killed: Path, capsys: pytest.CaptureFixture[str], *, is_emptied: bool
) -> None:
    path = part_paths(killed / "journal")[-1]
    whole = path.read_bytes()
    try:
        path.write_bytes(b"" if is_emptied else whole[: len(whole) // 2])
        code, found = replayed(capsys, str(killed))
    finally:
        path.write_bytes(whole)
    assert code == 1
    assert found["decisions_equal"] == found["events"]
    assert "its end is missing" in found["difference"]


def test_a_journal_whose_beginning_was_removed_is_replayed_from_the_next_start(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = part_paths(killed / "journal")[0]
    whole = path.read_bytes()
    try:
        path.unlink()
        code, found = replayed(capsys, str(killed))
    finally:
        path.write_bytes(whole)
    assert (code, found["boots"], found["difference"]) == (0, 2, None)
    assert len(found["gaps"]) == 1
    assert "part 1 is missing" in found["gaps"][0]
    assert found["decisions_equal"] == found["events"]
    assert found["merges_equal"] == 0 < found["merges"]  # the tensors that it starts with are not known


def test_what_came_before_an_empty_part_is_said_to_be_missing(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a process leaves that was killed before it had written anything, and as a damaged disk does."""
    path = part_paths(killed / "journal")[0]
    whole = path.read_bytes()
    try:
        path.write_bytes(b"")
        code, found = replayed(capsys, str(killed))
    finally:
        path.write_bytes(whole)
    assert (code, found["boots"], found["difference"]) == (0, 2, None)
    assert len(found["gaps"]) == 1
    assert "start 1 of the syncer has versions (" in found["gaps"][0]
    assert found["gaps"][0].endswith("the journal has nothing before it")


def test_wrong_use_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "journal").mkdir(parents=True)
    (tmp_path / "empty" / "journal" / "00000001.jsonl.gz").touch()
    (tmp_path / "linked" / "journal").mkdir(parents=True)
    (tmp_path / "linked" / "journal" / "00000001.jsonl.gz").symlink_to(tmp_path / "nowhere")
    for arguments, code, said in (
        ([str(tmp_path / "nothing")], 2, "there is no"),
        ([str(tmp_path)], 1, "there is no journal in"),
        (["."], 1, f"there is no journal in {tmp_path}"),
        ([str(tmp_path / "empty")], 1, "has no start of a syncer"),
        ([str(tmp_path / "linked")], 1, "cannot read"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["replay", *arguments])
        assert ended.value.code == code
        assert said in capsys.readouterr().err


def test_a_syncer_keeps_no_journal_where_it_is_told_so(tmp_path: Path) -> None:
    with start(tmp_path, method(), journal=False) as syncer:
        train(0, diloco.connect(syncer.address, run=RUN, learner="learner-0", initialise=True), None, 4)
    assert not (tmp_path / "state" / "journal").exists()


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_contributions_may_be_recorded_from_a_later_start_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], codec: str
) -> None:
    given = method(codec=codec, outer=diloco.Nesterov(lr=0.7, momentum=0.9))
    before: list[int] = []
    for is_first in (True, False):
        with start(tmp_path, given, record_contributions=not is_first) as syncer:
            train(0, diloco.connect(syncer.address, run=RUN, learner="learner-0", initialise=is_first), None, 12)
            before = before or versions_of(syncer)
            code, found = replayed(capsys, str(tmp_path / "state"))  # while the syncer runs
            assert (code, found["difference"], found["gaps"]) == (0, None, [])
    code, found = replayed(capsys, str(tmp_path / "state"))
    assert (code, found["difference"], found["gaps"]) == (0, None, [])
    assert sum(before) > 0
    assert found["merges_equal"] == found["merges"] - sum(before) > 0
