"""Files that are whole or absent, and what is left of processes that died while they wrote."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.whole_files import hidden_name, remove_leftovers, write_whole

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that is no more."""
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(done.stdout)


def test_leftovers_of_dead_processes_of_this_host_are_removed_and_nothing_else(tmp_path: Path, dead: int) -> None:
    stays = [f".step-2.{HOST}.{os.getppid()}", f".step-2.not-{HOST}.{dead}", ".step-notes", f".other.{HOST}.{dead}"]
    for name in [*stays, f".step-2.{HOST}.{dead}", hidden_name("step-1")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / f".step-3.{HOST}.{dead}").write_bytes(b"half")
    remove_leftovers(tmp_path, "step-*")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stays)


def test_a_text_is_whole_and_takes_what_was_left_of_it_away(tmp_path: Path, dead: int) -> None:
    path = tmp_path / "run[1].json"
    stays = [f".{path.name}.{HOST}.{os.getppid()}", f".run1.json.{HOST}.{dead}"]
    for name in [*stays, f".{path.name}.{HOST}.{dead}"]:
        (tmp_path / name).write_text("half")
    write_whole(path, "one")
    assert path.read_text() == "one"
    write_whole(path, "other")
    assert path.read_text() == "other"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([*stays, path.name])


def test_leftovers_that_cannot_be_removed_are_not_in_the_way(tmp_path: Path, dead: int) -> None:
    left = tmp_path / f".run.json.{HOST}.{dead}"
    left.mkdir()
    (left / "file").touch()
    left.rename(tmp_path / "elsewhere")
    left.symlink_to(tmp_path / "elsewhere")  # which no rmtree follows
    write_whole(tmp_path / "run.json", "text")
    assert (tmp_path / "run.json").read_text() == "text"
    assert (tmp_path / "elsewhere" / "file").exists()


def test_what_was_there_stays_where_the_disk_refuses(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.mkdir()
    (path / "file").touch()
    with pytest.raises(OSError, match=r"run\.json"):
        write_whole(path, "text")
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
