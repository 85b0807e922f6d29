"""The event log: the schema round-trips, and a torn last line does no harm."""

import errno
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from diloco.errors import StoreError
from diloco.event_log import EventLog, read_events
from diloco.events import Evaluated, Gap, Merged, Sampled, Stepped, event_types

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "run-file.md"


def merged(version: int) -> Merged:
    return Merged(
        fragment=1, round=3, version=version, contributors=("a", "b"), weights=(0.5, 0.5), tokens=(10, 20), merge_s=0.25
    )


def test_events_round_trip_with_stamps(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path, who="syncer", clock=lambda: 12.5) as log:
        written = [
            log.append(merged(1)),
            log.append(Evaluated(t=3.0, who="a", step=5, tokens=7, loss=2.5, num_sequences=4)),
        ]
    assert read_events(path) == written
    assert (written[0].t, written[0].who) == (12.5, "syncer")
    assert (written[1].t, written[1].who) == (3.0, "a")
    assert path.read_text().startswith('{"t":12.5,"kind":"merged","who":"syncer",')


def test_a_diverged_loss_can_be_written_and_read(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e.jsonl", who="a") as log:
        log.append(Stepped(step=1, loss=math.nan, lr=0.1, tokens=1, tokens_per_s=1.0, gradient_norm=math.inf))
    (event,) = read_events(tmp_path / "e.jsonl")
    assert isinstance(event, Stepped)
    assert math.isnan(event.loss)
    assert math.isinf(event.gradient_norm)


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_skipped_and_cut_off_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, who="a") as log:
        first, _ = log.append(merged(1)), log.append(merged(2))
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_events(path) == [first]
    with EventLog(path, who="a") as log:
        third = log.append(merged(3))
    assert read_events(path) == [first, third]


def test_a_file_that_is_one_torn_line_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t": 1' + b"7" * 200_000)
    with EventLog(path, who="a") as log:
        event = log.append(merged(1))
    assert read_events(path) == [event]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"t":1.0,"kind":"merged","who":"syncer","fragment":"one"}\n')
    with pytest.raises(StoreError, match=r"line 1 of .*fragment"):
        read_events(path)
    path.write_text('{"t":1.0,"kind":"nonsense","who":"syncer"}\n')
    with pytest.raises(StoreError, match=r"line 1 of .*\(its kind is 'nonsense'\)"):
        read_events(path)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read the event log"):
        read_events(tmp_path / "none.jsonl")


def test_a_disk_that_takes_nothing_stops_nobody_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with EventLog(tmp_path / "events.jsonl", who="a") as log:
        assert [log.append(merged(version)).version for version in (1, 2, 3)] == [1, 2, 3]
        assert log.num_missing == 3
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize("content", [b"\x7fELF\x02\0\0\0", b"notes of mine", b'{"kind": "other"}'])
def test_what_is_no_log_of_events_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events.jsonl"
    for number in (1, 2):
        path.write_bytes(content)
        with EventLog(path, who="a") as log:
            log.append(Sampled(step=1, prompt="", text=""))
        assert len(read_events(path)) == 1
        assert (tmp_path / f"events.jsonl.set-aside-{number}").read_bytes() == content


def test_a_disk_that_refuses_a_new_file_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there is set aside by then."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"no log of events")

    def refusing(file: Path, mode: str = "r", **more: Any) -> IO[Any]:
        if mode == "ab":
            raise OSError(errno.ENOSPC, "no space left")
        return open(file, mode, **more)

    with EventLog(path, "a") as log:
        monkeypatch.setattr("diloco.event_log.open", refusing, raising=False)
        log.append(Sampled(step=1, prompt="", text=""))
        monkeypatch.undo()
        log.append(Sampled(step=2, prompt="", text=""))
    assert [type(event) for event in read_events(path)] == [Gap, Sampled]


def test_a_file_that_was_moved_before_the_first_event_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, "a") as log:
        path.rename(tmp_path / "events.jsonl.1")
        log.append(Sampled(step=1, prompt="", text=""))
        assert log.num_missing == 0
    assert len(read_events(path)) == 1


def test_zeros_that_a_power_cut_has_left_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for tail in (b"\0" * 4096, b'{"t":17' + b"\0" * 50):
        with EventLog(path, who="a") as log:
            log.append(Sampled(step=1, prompt="", text=""))
        with path.open("ab") as file:
            file.write(tail)
    with EventLog(path, who="a"):
        assert len(read_events(path)) == 2


def test_a_gap_says_how_many_events_the_disk_refused_and_no_line_is_torn(tmp_path: Path) -> None:
    """The kernel takes a part of a line, as a disk that becomes full, and everything again later."""
    script = """
import resource, sys
from diloco.event_log import EventLog
from diloco.events import Sampled
def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
with EventLog(sys.argv[1], who="a") as log:
    for step, spare in ((1, None), (2, 20), (3, 20), (4, None), (5, None), (6, 0), (7, None)):
        limit(resource.RLIM_INFINITY if spare is None else log.path.stat().st_size + spare)
        log.append(Sampled(step=step, prompt="", text=""))
        assert log.path.read_bytes().endswith(b"\\n")
"""
    path = tmp_path / "events.jsonl"
    child = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    said = [
        event.missing if isinstance(event, Gap) else f"step {event.model_dump()['step']}" for event in read_events(path)
    ]
    assert said == ["step 1", 2, "step 4", "step 5", 1, "step 7"]


def test_the_page_about_events_has_every_kind_and_field_and_no_other() -> None:
    sections = dict(re.findall(r"^#+ `(\w+)`\n(.*?)(?=^##|\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL))
    assert sections.keys() == event_types().keys()
    for kind, cls in event_types().items():
        assert " ".join(sections[kind].split()).startswith(" ".join((cls.__doc__ or "").split())), kind
        fields = re.findall(r"^\| `(\w+)` \|", sections[kind], re.MULTILINE)
        assert fields == [name for name in cls.model_fields if name not in ("t", "kind", "who")], kind


def test_every_kind_is_written_by_somebody() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src" / "diloco").rglob("*.py") if path.name != "events.py")
    for cls in set(event_types().values()) - {Gap}:  # which the log itself writes
        assert re.search(rf"\b(ev|events)\.{cls.__name__}\(\s*[\w(]", source), cls
