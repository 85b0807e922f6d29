"""Drawings: what a page holds, and that key, curves, bars and times say the same."""

import re
from pathlib import Path

import pytest
from tests.figures import figures_in, key_of, labels_of, text_of, traces_of

from diloco.errors import ConfigError, StoreError
from diloco.report import drawing
from diloco.report.drawing import (
    BLUE,
    GREEN,
    RED,
    Axis,
    Bars,
    Kind,
    Line,
    Picture,
    Span,
    bars,
    lines,
    merged,
    short,
    timeline,
)
from diloco.report.frame import asset, require_html, write_drawings

X, Y = Axis("chips", log=True, ticks=(10, 100, 1000)), Axis("goodput, %", low=0, high=100)
LARGEST_PAGE = 1_500_000


def three_pictures() -> list[Picture]:
    curves = [
        Line("one", [10, 1000], [90, 50], BLUE), Line("two", [10, 1000], [92, 54], RED),
        Line("here", [100], [70], GREEN, [3], "o"),
    ]  # fmt: skip
    shares = [Bars("computing", [70.0, 80.0], BLUE), Bars("stopped", [30.0, 20.0], RED)]
    spans = {"a": [Span(0, 2, "compute"), Span(1, 2, "up")], "b": [Span(0, 1, "compute"), Span(1, 3, "waiting")]}
    figures = {
        "lines": lines(curves, X, Y),
        "bars": bars(["a & b", "c"], shares, Axis("share, %", low=0, high=100)),
        "timeline": timeline(spans),
    }
    return [
        Picture(f"Title of {name}", "What to see: 1 < 2.", figure, ("row", "value"), [("a & b", "1.5")])
        for name, figure in figures.items()
    ]


# ------------------------------------------------------------------------------------------------------------- the page


def test_a_page_holds_each_figure_with_its_heading_and_its_table(tmp_path: Path) -> None:
    page = tmp_path / "new" / "plan.html"
    write_drawings(page, "A plan", "Its lead.", three_pictures())
    text = page.read_text()
    assert figures_in(page) == [picture.figure for picture in three_pictures()]
    assert text.count("<table>") == text.count("<h2>") == text.count('<div class="drawing"') == 3
    assert "What to see: 1 &lt; 2." in text
    assert "<td>a &amp; b</td><td class=n>1.5</td>" in text


def test_a_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    write_drawings(tmp_path / "p.html", "t", "l", three_pictures())
    text = (tmp_path / "p.html").read_text().replace(asset("plotly.min.js"), "")
    assert re.findall(r"\b(?:src|href)\s*=\s*\"(?!data:,)[^\"]*\"", text) == []
    assert re.findall(r"url\((?!#)[^)]*\)|@import|https?:", text) == []


def test_text_of_any_origin_is_text(tmp_path: Path) -> None:
    hostile = '</script><img src=x onerror="alert(1)">'
    name = "<b>a</b>"
    figure = timeline({name: [Span(0, 1, "compute")]})
    assert figure["layout"]["yaxis"]["ticktext"] == ["&lt;b&gt;a&lt;/b&gt;"]
    write_drawings(tmp_path / "p.html", hostile, hostile, [Picture(hostile, hostile, figure, (hostile,), [(hostile,)])])
    assert hostile not in (tmp_path / "p.html").read_text()
    assert figures_in(tmp_path / "p.html") == [figure]


def test_every_colour_has_a_light_and_a_dark_value() -> None:
    light, dark = asset("page.css").split("@media (prefers-color-scheme:dark)")[:2]
    named = {value for value in vars(drawing).values() if isinstance(value, str) and value.startswith("var(")}
    assert len(named) == 12
    for colour in named:
        assert f"{colour[4:-1]}:#" in light
        assert f"{colour[4:-1]}:#" in dark


def test_the_library_is_the_one_that_its_notice_names_and_comes_with_its_licence() -> None:
    version = re.search(r"basic - minified\) v([\d.]+)", asset("plotly.min.js"))
    assert version
    assert f"plotly.js {version[1]} (" in asset("NOTICE")
    assert "MIT License" in asset("NOTICE")


def test_only_an_html_file_is_written(tmp_path: Path) -> None:
    require_html(None)
    require_html(tmp_path / "plan.html")
    for name in ("plan.png", "pictures"):
        with pytest.raises(ConfigError, match=rf'--out writes one HTML page, not {name}; name it "\w+\.html"\.'):
            require_html(Path(name))
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*file.*; choose another place"):
        write_drawings(tmp_path / "file" / "p.html", "t", "l", three_pictures())


# ------------------------------------------------------------------------------------------------------- key and curves


def test_the_key_names_what_is_drawn_and_nothing_else() -> None:
    band = Axis("chips", log=True, ticks=(10, 100, 1000), band=(20, 200, "measured"))
    curves = [Line("low", [10, 1000], [90, 10], BLUE), Line("high", [10, 1000], [91, 51], RED, style="--"),
              Line("here", [100], [70], GREEN, style="o")]  # fmt: skip
    figure = lines(curves, band, Y)
    assert key_of(figure) == ["high", "low", "here", "measured"]  # by their height at the end
    assert [trace["mode"] for trace in figure["data"]] == ["lines+markers", "lines+markers", "markers"]
    assert key_of(lines(curves[:1], X, Y)) == []  # one thing needs no key


def test_curves_that_cannot_be_told_apart_are_one_under_all_their_names() -> None:
    x = [1.0, 10.0, 100.0]
    curves = [Line("a", x, [10, 50, 90], BLUE), Line("same", x, [10, 50, 90], RED),
              Line("close", x, [10.3, 49.8, 90.2], GREEN), Line("apart", x, [10, 50, 80], RED),
              Line("other x", [1.0, 9.0, 100.0], [10, 50, 90], RED)]  # fmt: skip
    figure = lines(curves, Axis("x", log=True), Y)
    assert key_of(figure) == ["a = same ≈ close", "other x", "apart"]
    assert len(figure["data"]) == 3


def test_whether_curves_look_the_same_is_for_the_axis_to_say() -> None:
    x, near, far = [1.0, 10.0], [1.0, 1000.0], [1.1, 1000.0]
    for y, num_curves in ((Axis("h", log=True), 2), (Axis("h"), 1)):
        assert len(merged([Line("a", x, near, BLUE), Line("b", x, far, RED)], y)) == num_curves


def test_points_stay_by_themselves() -> None:
    curves = [Line("curve", [1.0, 2.0], [5.0, 6.0], BLUE), Line("points", [1.0, 2.0], [5.0, 6.0], RED, style="o")]
    assert key_of(lines(curves, Axis("x"), Axis("y"))) == ["curve", "points"]


def test_an_axis_has_the_range_and_the_ticks_that_it_is_given_or_those_of_what_is_drawn() -> None:
    curve = [Line("a", [3e3, 2e5], [10.0, 90.0], BLUE)]
    layout = lines(curve, X, Y)["layout"]
    assert layout["yaxis"]["range"] == [0, 100]
    assert layout["xaxis"]["ticktext"] == ["10", "100", "1k"]
    fine, coarse = (lines(curve, Axis("x", log=True, low=low), Y)["layout"]["xaxis"] for low in (None, 1e3))
    assert fine["ticktext"][:4] == ["1k", "2k", "5k", "10k"]
    assert coarse["range"] == [3.0, None]
    [wide] = [Line("a", [1.0, 1e6], [1.0, 2.0], BLUE)]
    assert lines([wide], Axis("x", log=True), Y)["layout"]["xaxis"]["tickvals"] == [10.0**power for power in range(7)]


# ---------------------------------------------------------------------------------------------------------------- bars


def test_bars_are_stacked_and_those_of_nothing_are_not_in_the_key() -> None:
    series = [Bars("least", [1e-5, 0.0], BLUE), Bars("none", [0.0, 0.0], RED), Bars("most", [99.0, 100.0], GREEN)]
    figure = bars(["a", "b"], series, Axis("%", low=0, high=100))
    assert key_of(figure) == ["least", "most"]
    assert figure["layout"]["barmode"] == "stack"
    least = figure["data"][0]
    assert (least["x"], least["y"]) == ([1e-5, 0.0], [0, -1])  # the first row on top
    assert least["marker"]["line"]["width"] > 0  # a hairline
    assert "text" not in least


def test_on_a_logarithmic_axis_there_are_points_and_their_numbers_and_no_lengths() -> None:
    figure = bars(["a", "b"], [Bars("hours", [9.886, 1096.4], BLUE, "{:.3g}".format)], Axis("hours", log=True))
    [points] = figure["data"]
    assert (points["type"], points["x"], points["text"]) == ("scatter", [9.886, 1096.4], ["9.89", "1.1e+03"])
    low, high = figure["layout"]["xaxis"]["range"]
    assert 10**low < 9.886 < 1.5 * 1096.4 < 10**high  # with room for the number


def test_a_marked_row_stands_out() -> None:
    figure = bars(["a", "b\nmore"], [Bars("h", [1.0, 2.0], BLUE)], Axis("h"), marked=[1])
    assert labels_of(figure) == ["a", "b more*"]


# ----------------------------------------------------------------------------------------------------------- timelines


def test_a_timeline_has_a_key_for_each_kind_that_is_there_and_marks_each_kill() -> None:
    spans = {
        "a": [Span(0, 2, "compute"), Span(2, 5, "stopped"), Span(5, 6, "compute"), Span(6, 6, "stopped")],
        "b": [Span(0, 6, "compute"), Span(1, 1.0001, "down")],
    }
    figure = timeline(spans)
    assert key_of(figure) == ["computing", "gone", "on the link, down", "killed"]
    drawn = traces_of(figure)
    assert (drawn["killed"]["x"], drawn["killed"]["y"]) == ([2.0, 6.0], [0, 0])
    assert (drawn["gone"]["base"], drawn["gone"]["x"]) == ([2.0], [3.0])
    down = drawn["on the link, down"]
    assert (down["base"], down["x"], down["y"]) == ([1.0], [0.0001], [-1])
    assert down["marker"]["line"]["width"] > 0  # a hairline: it is 17 millionths of the row


def test_times_that_touch_are_one_band() -> None:
    [band] = timeline({"a": [Span(n / 10, (n + 1) / 10, "up") for n in range(10)]})["data"]
    assert (band["base"], band["x"]) == ([0.0], [1.0])


def test_a_long_time_is_in_a_larger_unit() -> None:
    for end_s, unit in ((200.0, "seconds"), (3000.0, "minutes"), (90000.0, "hours"), (1e6, "days")):
        axis = timeline({"a": [Span(0, end_s, "compute")]})["layout"]["xaxis"]
        assert axis["title"]["text"] == unit
        assert 5 <= axis["range"][1] < 240


def test_where_nobody_does_anything_there_is_nothing_to_explain() -> None:
    figure = timeline({"a": []})
    assert (figure["data"], key_of(figure)) == ([], [])


def test_more_times_than_can_be_told_apart_keep_their_sums_and_the_page_its_size(tmp_path: Path) -> None:
    """Of 40 learners each computes for 0.3 s, waits for 0.1 s and sends for 0.2 s, and so on; one is killed."""
    one: list[Span] = []
    for number in range(2000):
        at_s = 0.4 * number
        kinds: list[tuple[float, float, Kind]] = [(0.0, 0.3, "compute"), (0.3, 0.4, "waiting"), (0.1, 0.3, "up")]
        one += [Span(at_s + begin_s, at_s + end_s, kind) for begin_s, end_s, kind in kinds]
    rows = {f"learner-{number}": one for number in range(40)}
    rows["learner-39"] = [*one[:600], Span(79.9, 80.0, "stopped")]
    figure = timeline(rows)
    assert "sorted by what it does" in figure["layout"]["xaxis"]["title"]["text"]
    assert sum(len(trace["x"]) for trace in figure["data"]) <= drawing.MOST_BANDS
    drawn, unit_s = traces_of(figure), 60.0
    for name, share in (("computing", 0.75), ("waiting", 0.25), ("on the link, up", 0.5)):
        of_first = [x for x, row in zip(drawn[name]["x"], drawn[name]["y"], strict=True) if row == 0]
        assert unit_s * sum(of_first) == pytest.approx(share * 800.0, rel=1e-4)
    assert (drawn["killed"]["x"], drawn["killed"]["y"]) == ([pytest.approx(79.9 / unit_s, rel=1e-5)], [-39])
    write_drawings(tmp_path / "p.html", "t", "l", [Picture("t", "l", figure, ("a",), [])])
    assert (tmp_path / "p.html").stat().st_size < LARGEST_PAGE


# -------------------------------------------------------------------------------------------------------------- labels


def test_a_label_is_in_short_lines_and_what_is_equal_to_what_stays_together() -> None:
    wrapped = drawing.wrapped("Streaming DiLoCo with a long name, M = 12, τ = 5")
    assert all(len(line) <= 36 for line in wrapped.split("<br>"))
    assert not any(re.search(r"=$|^=", line) for line in wrapped.split("<br>"))
    assert text_of(wrapped) == "Streaming DiLoCo with a long name, M = 12, τ = 5"
    assert len(drawing.wrapped("x" * 100).replace("<br>", "")) == 60


@pytest.mark.parametrize(
    ("value", "text"), [(0.1, "0.1"), (999, "999"), (1500, "1.5k"), (1.2e6, "1.2M"), (4e11, "400B")]
)
def test_numbers_on_ticks_are_short(value: float, text: str) -> None:
    assert short(value) == text
