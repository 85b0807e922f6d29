"""Pictures of plans: what is written, and that a page needs nothing but itself."""

import itertools
import re
import sys
from pathlib import Path

import pytest

from diloco.errors import ConfigError, StoreError
from diloco.planning import pictures
from diloco.planning.pictures import Axis, Bars, Line, Picture, Span

X, Y = Axis("chips", log=True, ticks=(10, 100, 1000)), Axis("goodput, %", low=0, high=100)


def three_pictures() -> list[Picture]:
    curves = [Line("one", [10, 1000], [90, 50]), Line("two", [10, 1000], [91, 51]), Line("here", [100], [70], [3], "o")]
    shares = [Bars("computing", [70.0, 80.0]), Bars("stopped", [30.0, 20.0])]
    spans = {"a": [Span(0, 2, "compute"), Span(1, 2, "up")], "b": [Span(0, 1, "compute"), Span(1, 3, "waiting")]}
    figures = {
        "lines": pictures.lines(curves, X, Y),
        "bars": pictures.bars(["a & b", "c"], shares, Axis("share, %", low=0, high=100)),
        "timeline": pictures.timeline(spans),
    }
    return [
        Picture(name, f"Title of {name}", "What to see: 1 < 2.", figure, ("row", "value"), [("a & b", "1.5")])
        for name, figure in figures.items()
    ]


def test_a_png_for_each_picture_and_one_page_for_all(tmp_path: Path) -> None:
    files = pictures.write(tmp_path / "new" / "plan", "goodput", "A plan", "Its lead.", three_pictures())
    assert [file.name for file in files] == ["lines.png", "bars.png", "timeline.png", "goodput.html"]
    for file in files[:-1]:
        assert file.read_bytes().startswith(b"\x89PNG")
    page = files[-1].read_text()
    assert page.count("<svg") == page.count("<table>") == page.count("<h2>") == 3
    assert "What to see: 1 &lt; 2." in page
    assert "<td>a &amp; b</td><td class=n>1.5</td>" in page
    for words in ("chips", "goodput, %", "one", "two", "here", "computing", "waiting"):
        assert f">{words}</text>" in page  # text stays text: it can be searched and read aloud


def test_a_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    page = pictures.write(tmp_path, "p", "t", "l", three_pictures())[-1].read_text()
    assert re.findall(r"\b(?:src|href)\s*=\s*\"(?!#)[^\"]*\"", page) == []
    assert re.findall(r"url\((?!#)[^)]*\)|@import|<script|<link", page) == []


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (
        [file.read_bytes() for file in pictures.write(tmp_path / name, "p", "t", "l", three_pictures())]
        for name in ("first", "second")
    )
    assert first == second


def test_names_at_the_ends_of_curves_keep_their_distance() -> None:
    curves = [Line(f"curve {index}", [10, 1000], [99, 100 - index / 10]) for index in range(5)]
    axes = pictures.lines(curves, X, Y).axes[0]
    heights = sorted(text.get_position()[1] for text in axes.texts)
    line_height = pictures.SMALL * 1.35 / (72 * 3.9 * 0.8)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= line_height * 0.999
    assert heights[-1] <= 1.0001


def test_stacked_bars_begin_where_the_last_ended() -> None:
    axes = three_pictures()[1].figure.axes[0]
    begins = [patch.get_x() for container in axes.containers[:2] for patch in container if hasattr(patch, "get_x")]
    assert begins == [0.0, 0.0, 70.0, 80.0]


def test_on_a_logarithmic_axis_there_are_points_and_their_numbers_and_no_lengths() -> None:
    [axes] = pictures.bars(["a", "b"], [Bars("hours", [9.886, 1096.4])], Axis("hours", log=True)).axes
    assert not axes.patches
    assert [list(line.get_xdata()) for line in axes.lines] == [[9.886, 1096.4]]
    assert [text.get_text() for text in axes.texts] == ["9.89", "1096"]


def test_a_points_name_is_on_the_side_where_there_is_room() -> None:
    for x, side in ((20, "left"), (1000, "right")):
        [axes] = pictures.lines([Line("curve", [10, 1000], [90, 50]), Line("here", [x], [70], style="o")], X, Y).axes
        [name] = [text for text in axes.texts if text.get_text() == "here"]
        assert name.get_ha() == side


def test_where_nobody_does_anything_there_is_nothing_to_explain() -> None:
    assert pictures.timeline({"a": []}).axes[0].get_legend() is None


@pytest.mark.parametrize(
    ("value", "text"), [(0.1, "0.1"), (999, "999"), (1500, "1.5k"), (1.2e6, "1.2M"), (4e11, "400B")]
)
def test_numbers_on_ticks_are_short(value: float, text: str) -> None:
    assert pictures.short(value) == text


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures.require()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib, which is not installed; pip install 'diloco\[plot\]'"):
        pictures.require()


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write pictures to .*file.*--out"):
        pictures.write(tmp_path / "file", "p", "t", "l", three_pictures()[:1])
