"""The event log: the schema round-trips, and a torn last line harms nobody."""

import math
import re
from pathlib import Path

import pytest

from diloco.errors import StoreError
from diloco.events import Evaluated, EventLog, Merged, Stepped, event_types, read_events

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "events.md"


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
    with pytest.raises(StoreError, match=r"line 1 of .*nonsense"):
        read_events(path)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read the event log"):
        read_events(tmp_path / "none.jsonl")


def test_the_page_about_events_has_every_kind_and_field_and_no_other() -> None:
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL))
    assert sections.keys() == event_types().keys()
    for kind, cls in event_types().items():
        assert " ".join(sections[kind].split()).startswith(" ".join((cls.__doc__ or "").split())), kind
        fields = re.findall(r"^\| `(\w+)` \|", sections[kind], re.MULTILINE)
        assert fields == [name for name in cls.model_fields if name not in ("t", "kind", "who")], kind


def test_every_kind_is_written_by_somebody() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src" / "diloco").rglob("*.py") if path.name != "events.py")
    for cls in event_types().values():
        assert re.search(rf"\b(ev|events)\.{cls.__name__}\(\s*[\w(]", source), cls
