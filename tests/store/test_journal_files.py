"""The files of a journal: parts, torn ends, changed bits and full disks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest

from diloco.errors import StoreError
from diloco.store.journal_files import FORMAT, JournalFiles, PayloadFiles, part_paths
from diloco.store.journal_reader import JournalReader


def test_payloads_that_were_half_written_at_a_kill_are_removed(tmp_path: Path) -> None:
    payloads = tmp_path / "journal" / "payloads"
    assert PayloadFiles(tmp_path)("payload-1", [memoryview(b"whole")])
    (payloads / ".tmp-payload-2-77").write_bytes(b"half")
    assert PayloadFiles(tmp_path)("payload-3", [memoryview(b"whole")])
    assert sorted(each.name for each in payloads.iterdir()) == ["payload-1", "payload-3"]


def entries_of(state_dir: Path) -> list[str]:
    return [line for line in JournalReader(state_dir) if '"#journal"' not in line]


def test_entries_come_back_in_order_over_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.store.journal_files.PART_BYTES", 300)
    written = [json.dumps({"e": "tick", "n": number}) for number in range(200)]
    for first in (0, 100):
        journal = JournalFiles(tmp_path)
        for number, entry in enumerate(written[first : first + 100]):
            journal.append(entry)
            if number % 7 == 0:
                journal.sync()
        journal.close()
    assert len(part_paths(tmp_path / "journal")) > 3
    assert entries_of(tmp_path) == written
    part_paths(tmp_path / "journal")[1].unlink()
    assert any("missing" in entry for entry in entries_of(tmp_path))


def test_a_part_whose_end_the_disk_refuses_is_ended_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.store.journal_files.PART_BYTES", 300)
    full, num_refused, fsync = False, 0, os.fsync

    def refuse(descriptor: int) -> None:
        nonlocal num_refused
        if full:
            num_refused += 1
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr("diloco.store.journal_files.os.fsync", refuse)
    written = [json.dumps({"n": number}) for number in range(400)]
    journal = JournalFiles(tmp_path)
    for number, entry in enumerate(written):
        full = number % 40 > 20
        journal.append(entry)
        if number % 3 == 0:
            journal.sync()
    full = False
    journal.close()
    assert num_refused > 20
    assert len(part_paths(tmp_path / "journal")) > 3
    assert entries_of(tmp_path) == written


def test_a_killed_writer_leaves_whole_entries(tmp_path: Path) -> None:
    journal = JournalFiles(tmp_path)
    for number in range(50):
        journal.append(json.dumps({"n": number}))
    journal.sync()
    journal.append('{"n": "not synced"}')
    path = part_paths(tmp_path / "journal")[0]
    assert len(entries_of(tmp_path)) == 50
    path.write_bytes(path.read_bytes()[:-40])
    read = entries_of(tmp_path)
    assert read == [json.dumps({"n": number}) for number in range(len(read))]


@pytest.mark.timeout(900)  # processor time of thousands of readings
def test_every_changed_bit_is_found_and_every_torn_end_is_none(tmp_path: Path) -> None:
    """Also one behind which everything up to the end decompresses as one endless line, as a torn end would."""
    journal, random = JournalFiles(tmp_path), Random(3)
    for number in range(20):
        journal.append(json.dumps({"n": number, "digest": random.randbytes(random.randrange(24)).hex()}))
        if number % 4 == 3:
            journal.sync()
    path = part_paths(tmp_path / "journal")[0]
    whole, written = path.read_bytes(), entries_of(tmp_path)
    assert len(written) == 20
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            found = entries_of(tmp_path)
            # equal: a bit of gzip's time or system
            assert found == written or any("#damage" in entry for entry in found), (at, bit)
        path.write_bytes(whole[:at])
        torn = entries_of(tmp_path)
        assert torn == written[: len(torn)], at


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_refused(other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version decides otherwise: that is no difference in the run."""
    monkeypatch.setattr("diloco.store.journal_files.FORMAT", other)
    journal = JournalFiles(tmp_path)
    journal.sync()
    with pytest.raises(StoreError, match=f"has format {other} and this version replays {FORMAT}; use .* wrote it.$"):
        list(JournalReader(tmp_path))
    monkeypatch.undo()
    JournalFiles(tmp_path).sync()
    with pytest.raises(StoreError, match="wrote it, or move the parts before 2 elsewhere, and the replay begins there"):
        list(JournalReader(tmp_path))
    part_paths(tmp_path / "journal")[0].unlink()
    assert "part 1 is missing" in next(iter(JournalReader(tmp_path)))


def test_a_disk_that_refuses_costs_entries_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First less than what waits in memory, which is then written; then more, which is a gap."""
    monkeypatch.setattr("diloco.store.journal_files.MOST_WAITING_BYTES", 2000)
    journal = JournalFiles(tmp_path)
    (tmp_path / "journal").write_text("no directory can be made here")
    for number in range(30):
        journal.append(json.dumps({"n": number}))
    journal.sync()
    assert "cannot be written" in caplog.text
    (tmp_path / "journal").unlink()
    journal.sync()
    assert [json.loads(entry)["n"] for entry in entries_of(tmp_path)] == list(range(30))
    journal.close()
    journal = JournalFiles(tmp_path)
    (tmp_path / "journal").rename(tmp_path / "elsewhere")
    (tmp_path / "journal").write_text("again")
    for number in range(30, 330):
        journal.append(json.dumps({"n": number}))
    journal.sync()
    journal.append(json.dumps({"n": 330}))
    (tmp_path / "journal").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "journal")
    journal.close()
    read = [json.loads(entry) for entry in entries_of(tmp_path)]
    assert read[30:] == [{"e": "#gap", "missing": 300}, {"n": 330}]
