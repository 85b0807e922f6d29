"""Pictures: what is written, what a page holds, and that key, curves and points say the same."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tests.planning.read_pictures import drawn_on, key_of, require_readable

from diloco.errors import ConfigError, StoreError
from diloco.planning import palette, picture_pages, pictures
from diloco.planning.picture_axes import NARROW_IN, WIDTH_IN, Axis, short
from diloco.planning.pictures import Bars, Line, Picture
from diloco.planning.timelines import Span, timeline
from diloco.report.frame import asset

X, Y = Axis("chips", log=True, ticks=(10, 100, 1000)), Axis("goodput, %", low=0, high=100)
WIDTHS = pytest.mark.parametrize("width_in", [WIDTH_IN, NARROW_IN])


def three_pictures() -> list[Picture]:
    curves = [Line("one", [10, 1000], [90, 50]), Line("two", [10, 1000], [92, 54]), Line("here", [100], [70], [3], "o")]
    shares = [Bars("computing", [70.0, 80.0]), Bars("stopped", [30.0, 20.0])]
    spans = {"a": [Span(0, 2, "compute"), Span(1, 2, "up")], "b": [Span(0, 1, "compute"), Span(1, 3, "waiting")]}
    figures: dict[str, Callable[[float], Figure]] = {
        "lines": partial(pictures.lines, curves, X, Y),
        "bars": partial(pictures.bars, ["a & b", "c"], shares, Axis("share, %", low=0, high=100)),
        "timeline": partial(timeline, spans),
    }
    return [
        Picture(name, f"Title of {name}", "What to see: 1 < 2.", draw, ("row", "value"), [("a & b", "1.5")])
        for name, draw in figures.items()
    ]


# ------------------------------------------------------------------------------------------------------------ the files


def test_a_png_for_each_picture_and_one_page_for_all(tmp_path: Path) -> None:
    files = picture_pages.write(tmp_path / "new" / "plan", "goodput", "A plan", "Its lead.", three_pictures())
    assert [file.name for file in files] == ["lines.png", "bars.png", "timeline.png", "goodput.html"]
    for file in files[:-1]:
        assert file.read_bytes().startswith(b"\x89PNG")
    page = files[-1].read_text()
    assert page.count("<table>") == page.count("<h2>") == 3
    assert page.count('<div class="wide"><svg') == page.count('<div class="narrow"><svg') == 3
    assert "What to see: 1 &lt; 2." in page
    assert "<td>a &amp; b</td><td class=n>1.5</td>" in page
    for words in ("chips", "goodput, %", "one", "two", "here", "computing", "waiting"):
        assert f">{words}</text>" in page  # text stays text: it can be searched and read aloud


def test_a_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    page = picture_pages.write(tmp_path, "p", "t", "l", three_pictures())[-1].read_text()
    assert re.findall(r"\b(?:src|href)\s*=\s*\"(?!#)[^\"]*\"", page) == []
    assert re.findall(r"url\((?!#)[^)]*\)|@import|<script|<link", page) == []


def test_the_two_figures_of_a_section_share_no_names() -> None:
    """What one of them only refers to is not shown where the other is hidden."""
    wide, narrow = picture_pages.section(three_pictures()[0]).split('<div class="narrow">')
    clips = [set(re.findall(r'<clipPath id="(\w+)"', each)) for each in (wide, narrow)]
    assert all(clips)
    assert not clips[0] & clips[1]


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (
        [file.read_bytes() for file in picture_pages.write(tmp_path / name, "p", "t", "l", three_pictures())]
        for name in ("first", "second")
    )
    assert first == second


def test_every_colour_has_its_like_on_a_dark_page(tmp_path: Path) -> None:
    page = picture_pages.write(tmp_path, "p", "t", "l", three_pictures())[-1].read_text()
    figures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert re.findall(r": (?:#\w+|white|black)", figures) == []
    used = set(re.findall(r"var\(--(c\w+),", figures))
    light, dark = (dict(re.findall(r"--(c\w+):(#\w+)", each)) for each in page.split("@media(prefers-color-scheme")[:2])
    assert used
    assert used <= light.keys() & dark.keys()


def test_the_colours_are_those_of_the_live_page() -> None:
    script = asset("page.js")
    light, dark = (re.findall(r"#\w{6}", re.findall(rf"const {name} = \[(.*?)\]", script)[0])
                   for name in ("COLOURS", "ON_DARK"))  # fmt: skip
    assert {colour: palette.ON_DARK[colour] for colour in palette.COLOURS} == dict(zip(light, dark, strict=True))


# ------------------------------------------------------------------------------------------------------- key and curves


@WIDTHS
def test_the_key_names_what_is_drawn_and_nothing_else(width_in: float) -> None:
    band = Axis("chips", log=True, ticks=(10, 100, 1000), band=(20, 200, "measured"))
    curves = [Line("low", [10, 1000], [90, 10]), Line("high", [10, 1000], [91, 51], style="--"),
              Line("here", [100], [70], style="o"), Line("", [10], [70], style="o")]  # fmt: skip
    [axes] = pictures.lines(curves, band, Y, width_in).axes
    assert key_of(axes) == ["high", "low", "here", "measured"]  # by their height at the end
    assert drawn_on(axes) == sorted(key_of(axes))


def test_curves_that_cannot_be_told_apart_are_one_under_all_their_names() -> None:
    x = [1.0, 10.0, 100.0]
    curves = [Line("a", x, [10, 50, 90]), Line("same", x, [10, 50, 90]), Line("close", x, [10.3, 49.8, 90.2]),
              Line("apart", x, [10, 50, 80]), Line("other x", [1.0, 9.0, 100.0], [10, 50, 90])]  # fmt: skip
    [axes] = pictures.lines(curves, Axis("x", log=True), Y).axes
    assert key_of(axes) == ["a = same ≈ close", "other x", "apart"]
    assert len(axes.lines) == 3


def test_whether_curves_look_the_same_is_for_the_axis_to_say() -> None:
    x, near, far = [1.0, 10.0], [1.0, 1000.0], [1.1, 1000.0]
    for y, num_curves in ((Axis("h", log=True), 2), (Axis("h"), 1)):
        assert len(pictures.merged([Line("a", x, near), Line("b", x, far)], y)) == num_curves


def test_points_stay_by_themselves() -> None:
    curves = [Line("curve", [1.0, 2.0], [5.0, 6.0]), Line("points", [1.0, 2.0], [5.0, 6.0], style="o")]
    [axes] = pictures.lines(curves, Axis("x"), Axis("y")).axes
    assert key_of(axes) == ["curve", "points"]


def test_nothing_is_written_over_a_curve() -> None:
    """Names are in the key: none has a box that would erase what is below it."""
    [axes] = pictures.lines([Line("curve", [10, 1000], [90, 50]), Line("here", [100], [70], style="o")], X, Y).axes
    assert not axes.texts


# ---------------------------------------------------------------------------------------------------------------- bars


def test_stacked_bars_begin_where_the_last_ended() -> None:
    [axes] = three_pictures()[1].draw(WIDTH_IN).axes
    begins = [patch.get_x() for container in axes.containers for patch in container if hasattr(patch, "get_x")]
    assert begins == [0.0, 0.0, 70.0, 80.0]


def test_of_bars_only_what_is_there_is_in_the_key_and_the_least_is_seen() -> None:
    series = [Bars("least", [1e-5, 0.0]), Bars("none", [0.0, 0.0]), Bars("most", [99.0, 100.0])]
    [axes] = pictures.bars(["a", "b"], series, Axis("%", low=0, high=100)).axes
    assert key_of(axes) == ["least", "most"]
    hairline, *others = axes.patches
    assert len(others) == 2
    assert hairline.get_linewidth() > 0
    assert hairline.get_zorder() > others[0].get_zorder()


def test_on_a_logarithmic_axis_there_are_points_and_their_numbers_and_no_lengths() -> None:
    [axes] = pictures.bars(["a", "b"], [Bars("hours", [9.886, 1096.4])], Axis("hours", log=True)).axes
    assert not axes.patches
    assert [list(line.get_xdata()) for line in axes.lines] == [[9.886], [1096.4]]
    assert [text.get_text() for text in axes.texts] == ["9.89", "1096"]


def test_a_marked_row_stands_out() -> None:
    [axes] = pictures.bars(["a", "b"], [Bars("h", [1.0, 2.0])], Axis("h"), marked=[1]).axes
    assert [label.get_fontweight() for label in axes.get_yticklabels()] == ["normal", "bold"]


# ----------------------------------------------------------------------------------------------------------- timelines


@WIDTHS
def test_a_timeline_has_a_key_for_each_kind_that_is_there_and_marks_each_kill(width_in: float) -> None:
    spans = {
        "a": [Span(0, 2, "compute"), Span(2, 5, "stopped"), Span(5, 6, "compute"), Span(6, 6, "stopped")],
        "b": [Span(0, 6, "compute"), Span(1, 1.0001, "down")],
    }
    [axes] = timeline(spans, width_in).axes
    assert sorted(key_of(axes)) == ["computing", "gone", "killed", "on the link, down"]
    assert [(line.get_xdata(), line.get_ydata()) for line in axes.lines] == [([2.0], [0]), ([6.0], [0])]
    [short] = [band for band in axes.patches if band.get_label() == "on the link, down"]
    assert short.get_linewidth() > 0  # a hairline: it is 17 millionths of the row


def test_times_that_touch_are_one_band() -> None:
    [axes] = timeline({"a": [Span(n / 10, (n + 1) / 10, "up") for n in range(10)]}).axes
    [band] = axes.patches
    assert len(band.get_path()) == 5


def test_a_long_time_is_in_a_larger_unit() -> None:
    for end_s, unit in ((200.0, "seconds"), (3000.0, "minutes"), (90000.0, "hours"), (1e6, "days")):
        [axes] = timeline({"a": [Span(0, end_s, "compute")]}).axes
        assert axes.get_xlabel() == unit
        assert 5 <= axes.get_xlim()[1] < 240


def test_where_nobody_does_anything_there_is_nothing_to_explain() -> None:
    assert timeline({"a": []}).axes[0].get_legend() is None


# --------------------------------------------------------------------------------------------------------- readability


@WIDTHS
def test_long_names_many_rows_and_wide_ranges_stay_readable(width_in: float) -> None:
    long = "a learner's very long name, in the data centre that is farthest away"
    counts = tuple(100.0 * 2**power for power in range(12))
    curves = [Line(f"{long}, {i}", counts, [10.0**-i * n for n in counts]) for i in range(8)]
    figures = [
        pictures.lines(curves, Axis("chips of all learners", log=True, ticks=counts), Axis("h", log=True), width_in),
        pictures.lines(curves[:1], Axis("x", low=0.1, high=0.3), Axis("y", log=True, low=1e5, high=1.2e5), width_in),
        pictures.bars([f"{long}, {i}\n{long}" for i in range(6)], [Bars("h", [1e-3, 1, 9, 99, 1e3, 1e5])],
                      Axis("hours until all of the tokens are trained", log=True), width_in),
        pictures.bars([long], [Bars(f"{long}, {i}", [9.0]) for i in range(4)], Axis("hours"), width_in),
        timeline({f"{i}-{long}": [Span(0, 9e5, "compute"), Span(i, 9, "up")] for i in range(40)}, width_in),
    ]  # fmt: skip
    for figure in figures:
        require_readable(figure)


def test_a_name_is_no_mathematics() -> None:
    [axes] = timeline({"$x^2$": [Span(0, 1, "compute")]}).axes
    assert axes.get_yticklabels()[0].get_text() == r"\$x^2\$"


@pytest.mark.parametrize(
    ("value", "text"), [(0.1, "0.1"), (999, "999"), (1500, "1.5k"), (1.2e6, "1.2M"), (4e11, "400B")]
)
def test_numbers_on_ticks_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    picture_pages.require()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib, which is not installed; pip install 'diloco\[plot\]'"):
        picture_pages.require()


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write pictures to .*file.*--out"):
        picture_pages.write(tmp_path / "file", "p", "t", "l", three_pictures()[:1])
