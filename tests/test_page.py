"""The page of a run, and pages of drawings, in a real browser: the system's Chromium, driven by Playwright."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco import events as ev
from diloco.errors import AuthError, ConfigError
from diloco.event_log import EventLog
from diloco.protocol.contribution import UNMERGED
from diloco.protocol.steering import Order
from diloco.report.drawing import BLUE, GREEN, RED, Axis, Bars, Line, Picture, Span, bars, lines, timeline
from diloco.report.frame import frozen_page, write_drawings
from diloco.report.page import read_run, write_page
from diloco.syncer.keys.certificates import Caller
from diloco.syncer.page.live_page import LivePage

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]

OFFLINE = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")

MAX_PAGE_BYTES = 1_500_000
FATES = {"merged": 600, "pending": 160, f"discarded: {UNMERGED}": 40}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(OFFLINE))
        yield browser
        browser.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two learners, one of which is evicted; the name of the run is hostile."""
    learners = {
        name: ev.LearnerProgress(
            incarnation=1, state="healthy", step=90, tokens=900, step_s=0.5, training_loss=2.5, versions=(1, 0)
        )
        for name in ("paris", "oslo")
    }
    merged = ev.Merged(
        fragment=0, round=0, version=1, contributors=("paris", "oslo"), weights=(0.5, 0.5), tokens=(5, 5),
        members=("paris", "oslo"), reason="all 2 learners of the round have contributed",
    )  # fmt: skip
    with EventLog(tmp_path / "events.jsonl", who="syncer") as log:
        for t, event in enumerate(
            (
                ev.SyncerStarted(run="<b>run</b>", address="x", method={"name": "DiLoCo"}, budget_tokens=4000),
                ev.Initialised(learner="paris", source="seed", layout_digest="", num_parameters=1000),
                ev.Joined(learner="paris", incarnation=1),
                ev.Joined(learner="oslo", incarnation=1),
                ev.Progress(step=40, tokens=800, learners=learners, ledger=FATES),
                merged,
                ev.Reported(by="paris", tokens=1500, loss=2.125),
                ev.Evicted(learner="oslo", incarnation=1, reason="nothing heard for 6.0 s"),
            ),
            start=1_700_000_000,
        ):
            at = t + 100 if isinstance(event, ev.Progress) else t  # a report is of the moment of its newest progress
            log.append(event.model_copy(update={"t": float(at)}))
    return tmp_path


def opened(browser: Any, url: str, **context: Any) -> tuple[Any, list[str]]:
    """The page once it shows something, and what it complains of."""
    page = browser.new_context(**context).new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(url)
    page.locator("#members tbody tr").nth(1).wait_for()
    return page, complaints


def frozen(run: Path) -> str:
    path = run / "page.html"
    write_page(path, read_run([run])[1])
    return path.as_uri()


def test_a_frozen_page_shows_the_run(browser: Any, run: Path) -> None:
    page, complaints = opened(browser, frozen(run))
    assert page.inner_text("#run") == "<b>run</b>"
    assert "held-out loss 2.125 after 1.50k tokens" in page.inner_text("#lead")
    assert "38 % of 4.00k" in page.inner_text("#tiles")
    assert [row.split("\t")[:2] for row in page.inner_text("#members tbody").split("\n")] == [
        ["oslo", "nothing heard for 6.0 s"],
        ["paris", "healthy"],
    ]
    assert "all 2 learners of the round have contributed" in page.inner_text("#merges")
    assert page.inner_text("#ledger").split("\n") == ["merged 75.0 %", "pending 20.0 %", "not merged at the end 5.0 %"]
    assert page.evaluate("['loss', 'timeline', 'training'].map((id) => document.querySelectorAll(`#${id} svg`).length > 0)") == [True] * 3  # fmt: skip  # noqa: E501
    assert [page.locator(f"#{each}").is_visible() for each in ("speed", "bytes")] == [False] * 2  # nothing to show
    assert page.inner_text("#link") == ""
    assert complaints == []
    page.context.close()


def test_the_load_of_experts_is_a_strip_for_each_block(browser: Any, run: Path) -> None:
    page, _ = opened(browser, frozen(run))
    assert not page.locator("#load").is_visible()  # a dense model
    page.context.close()
    with EventLog(run / "paris" / "events.jsonl", who="paris") as log:
        log.append(
            ev.Routed(t=1_700_000_003.0, step=4, blocks=("layers.0.mlp",), tokens=((6, 3, 3, 0),), entropy=(1.25,))
        )
    page, complaints = opened(browser, frozen(run))
    assert page.inner_text("#load") == "layers.0.mlp: 1.25 nats, 1 idle"
    shares = [each.get_attribute("title") for each in page.locator("#load i").all()]
    assert shares == [f"expert {i}: {share} % of the tokens" for i, share in enumerate(("50.0", "25.0", "25.0", "0.0"))]
    assert complaints == []
    page.context.close()


@pytest.fixture
def mixture(run: Path) -> Path:
    """The run goes on, of a mixture of 64 experts: seven groups of eight are merged, by learners that train halves."""
    halves = {"paris": ((0, 32),), "oslo": ((24, 56),)}
    merges = [
        ev.Merged(
            fragment=group, round=round_, version=round_ + 1, contributors=tuple(halves), weights=(0.5, 0.5),
            tokens=(5, 5),
            experts=tuple(
                () if stop <= 8 * group or first >= 8 * group + 8 else ((8 * group, 8 * group + 8),)
                for ((first, stop),) in halves.values()
            ),
        )
        for group in range(7) for round_ in range(1 + group % 3)
    ]  # fmt: skip
    learners = {
        name: ev.LearnerProgress(
            incarnation=2, state="healthy", step=95, tokens=950, versions=(1,), experts=own, holds_part=name == "oslo"
        )
        for name, own in halves.items()
    }
    progress = ev.Progress(step=95, tokens=1900, learners=learners, num_experts=64, untrained=((56, 64),))
    with EventLog(run / "events.jsonl", who="syncer") as log:
        events = (ev.Joined(learner="oslo", incarnation=2), *merges, progress)
        for t, event in enumerate(events, start=1_700_000_200):
            log.append(event.model_copy(update={"t": float(t)}))
    return run


@pytest.mark.parametrize("width", [390, 1280])
def test_a_mixture_of_many_experts_is_a_few_strips(browser: Any, mixture: Path, width: int) -> None:
    page, complaints = opened(browser, frozen(mixture), viewport={"width": width, "height": 900})
    strips = page.locator("#experts .strip")
    labels = [strips.nth(index).inner_text() for index in range(strips.count())]
    assert labels == ["merged 0 to 3 times", "by 0 to 2 learners", "oslo", "paris"]
    titles = "(row) => [...row.querySelectorAll('i')].map((it) => it.title)"
    cells = [strips.nth(index).evaluate(titles) for index in range(strips.count())]
    assert {len(each) for each in cells} == {64}
    assert cells[0][30] == "expert 30: merged once, by 2.0 learners on average, last in version 1"
    assert cells[0][17] == "expert 17: merged 3 times, by 1.0 learners on average, last in version 3"
    assert cells[1][56] == "expert 56: not merged yet"
    assert [each.endswith("expert 31: trained by paris") for each in cells[3]].index(True) == 31
    assert (cells[2][0], cells[3][63]) == ("expert 0: not held by oslo", "expert 63: not trained by paris")
    said = [strips.nth(index).locator("span").get_attribute("title") for index in (2, 3)]
    assert said == ["holds and trains experts 24–55", "trains experts 0–31"]
    assert page.inner_text("#untrained") == "No live learner trains experts 56–63: nothing is merged into them."
    low, high = page.evaluate(
        "[0, 16].map((at) => getComputedStyle(document.querySelectorAll('#experts i')[at]).backgroundColor)"
    )
    assert low != high
    assert page.locator("#experts").bounding_box()["height"] < 200  # all of them, on any screen
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    page.context.close()


def test_a_run_of_no_mixture_has_no_experts_on_its_page(browser: Any, run: Path) -> None:
    page, _ = opened(browser, frozen(run))
    assert not page.locator("#experts").is_visible()
    page.context.close()


def test_the_demos_page_begins_with_its_headline_and_its_bars_are_true(browser: Any, run: Path) -> None:
    shown = read_run([run])[1].since(0)
    shown["head"] |= {"num_bytes": 2_000_000, "parallel_bytes": 98_000_000, "ratio": 49.0}
    shown["demo"] = {"headline": "49 times <b>fewer</b> bytes", "text": "what was <i>done</i>"}
    (run / "demo.html").write_text(frozen_page(shown), encoding="utf-8")
    page, complaints = opened(browser, (run / "demo.html").as_uri())
    assert page.inner_text("#run") == "49 times <b>fewer</b> bytes"
    assert page.inner_text("#lead") == "what was <i>done</i>"
    one, other = page.evaluate(
        "[...document.querySelectorAll('#bytes i')].map((it) => it.getBoundingClientRect().width)"
    )
    assert other / one == pytest.approx(49.0, rel=0.1)
    assert "49 times fewer bytes than data parallel" in page.inner_text("#bytes")
    assert complaints == []
    page.context.close()


def test_a_live_page_follows_the_run(browser: Any, run: Path) -> None:
    with closing(LivePage("127.0.0.1:0", run / "events.jsonl", lambda: None, is_open=False)) as live:
        page, complaints = opened(browser, live.url)
        assert page.inner_text("#link") == "live"
        assert "link=" not in page.url  # what a history or a shoulder could keep
        with EventLog(run / "events.jsonl", who="syncer") as log:
            log.append(ev.Reported(by="paris", tokens=2000, loss=1.75))
        page.locator("#lead", has_text="held-out loss 1.750").wait_for()
        assert "; 1 learner is live;" in page.inner_text("#lead")
        assert complaints == []
        with EventLog(run / "events.jsonl", who="syncer") as log:
            log.append(ev.Finished(steps=90, tokens=2000, seconds=9.0, reason="stopped"))
    page.locator("#link", has_text="ended").wait_for()
    assert "DiLoCo, ended" in page.inner_text("#lead")
    page.context.close()


def test_a_learner_has_one_colour_live_after_a_reload_and_in_the_report(browser: Any, run: Path) -> None:
    def colours(page: Any) -> dict[str, str]:
        page.locator("#members tbody tr").nth(2).wait_for()
        dots = "[...document.querySelectorAll('#members td:first-child')].map((it) => [it.textContent, it.firstChild.style.background])"  # noqa: E501
        return dict(page.evaluate(dots))

    with closing(LivePage("127.0.0.1:0", run / "events.jsonl", lambda: None, is_open=True)) as live:
        page, _ = opened(browser, live.url)
        with EventLog(run / "events.jsonl", who="syncer") as log:
            log.append(ev.Joined(t=1_700_000_008.0, learner="bergen", incarnation=1))
        first = colours(page)
        page.reload()
        second = colours(page)
    page.goto(frozen(run))
    assert first == second == colours(page)
    assert len({*first.values()}) == 3
    page.context.close()


def again(run: Path) -> Path:
    """The run goes on: oslo rejoins and is in a merge again; data parallel is trained too."""
    with EventLog(run / "events.jsonl", who="syncer") as log:
        for t, event in (
            (7, ev.Joined(learner="oslo", incarnation=2)),
            (9, ev.Merged(fragment=0, round=1, version=2, contributors=("paris",), weights=(1.0,), tokens=(5,))),
            (12, ev.Merged(fragment=0, round=2, version=3, contributors=("oslo",), weights=(1.0,), tokens=(5,))),
            (14, ev.Left(learner="paris", incarnation=1, tokens=900)),
            (15, ev.Traffic(learner="paris", sent_bytes={"updates": 900}, received_bytes={"contributions": 100})),
        ):
            log.append(event.model_copy(update={"t": 1_700_000_000.0 + t}))
    with EventLog(run / "control" / "events.jsonl", who="baseline") as log:
        for tokens, loss in ((1000, 2.5), (2000, 1.5)):
            log.append(ev.Evaluated(t=1_700_000_020.0, step=1, tokens=tokens, loss=loss, num_sequences=4))
    return run


def test_six_tiles_tell_the_run_in_short(browser: Any, run: Path) -> None:
    shown = read_run([again(run)])[1].since(0)
    shown["head"] |= {"parallel_bytes": 49_000, "ratio": 49.0}
    (run / "tiles.html").write_text(frozen_page(shown), encoding="utf-8")
    page, complaints = opened(browser, (run / "tiles.html").as_uri())
    tiles = [each.split("\n") for each in page.locator(".tile").all_inner_texts()]
    assert [value for value, _ in tiles] == ["+6.3 %", "1.00 kB", "1.50k", "1 min 44 s", "1", "5.0 s"]
    loss, num_bytes, tokens, _, learners, recovery = (text for _, text in tiles)
    assert loss == "loss, against data parallel: 2.125 and 2.000"
    assert num_bytes == "on the wire, 49 times fewer than data parallel (computed, 49.0 kB)"
    assert (tokens, learners) == ("tokens, 38 % of 4.00k", "learner live")
    assert recovery == "from the eviction of oslo to its next merge"
    assert complaints == []
    page.context.close()


def test_the_tiles_without_a_control_and_without_a_loss_of_a_learner(browser: Any, run: Path) -> None:
    shown = read_run([run])[1].since(0)
    shown["demo"] = {"headline": "of bytes", "text": ""}
    assert shown["head"]["recovery"] == {"learner": "oslo", "kind": "evicted", "seconds": None}
    shown["head"]["recovery"] = None
    (run / "tiles.html").write_text(frozen_page(shown), encoding="utf-8")
    page, _ = opened(browser, (run / "tiles.html").as_uri())
    tiles = page.locator(".tile").all_inner_texts()
    assert (tiles[0], tiles[-1]) == ("2.1250\nheld-out loss, nats per byte", "0\nlearners lost")
    assert not page.locator("#gap-note").is_visible()
    assert (
        page.evaluate("[$('loss').layout.yaxis.title.text, $('training').layout.yaxis.title.text]")
        == ["loss, nats per byte"] * 2
    )
    page.context.close()
    page, _ = opened(browser, frozen(run))
    assert page.locator(".tile").last.inner_text() == "–\noslo is not back"
    page.context.close()


def test_without_a_loss_the_first_tile_tells_the_rewards(browser: Any, run: Path) -> None:
    shown = read_run([run])[1].since(0)
    shown["head"]["loss"], shown["rewards"] = None, {"add": [[5, 0.25], [9, 0.5]], "sort": [[4, 0.75]]}
    (run / "rewards.html").write_text(frozen_page(shown), encoding="utf-8")
    page, complaints = opened(browser, (run / "rewards.html").as_uri())
    tiles = page.locator(".tile").all_inner_texts()
    assert (len(tiles), tiles[0]) == (6, "0.63\nmean reward of 2 tasks")
    assert complaints == []
    page.context.close()


def test_the_gap_to_data_parallel_is_a_strip_below_the_loss(browser: Any, run: Path) -> None:
    page, _ = opened(browser, frozen(again(run)))
    curve, x, y, above = page.evaluate("""(({ data, layout }) => {
      const gap = data.find((it) => it.yaxis === "y2");
      return [data.map((it) => it.name), gap.x, gap.y, layout.yaxis2.domain[1] < layout.yaxis.domain[0]];
    })($("loss"))""")
    assert (curve, x, y, above) == (["data parallel", "global model", "gap"], [1500], [pytest.approx(6.25)], True)
    assert page.locator("#gap-note").is_visible()
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_kind_of_event_has_a_shape_and_only_a_loss_the_colour_of_a_warning(
    browser: Any, run: Path, scheme: str
) -> None:
    story = read_run([again(run)])[1]
    story.tell(1_700_000_006.0, "bad", "oslo was killed", "killed", "oslo")
    (run / "kinds.html").write_text(frozen_page(story.since(0)), encoding="utf-8")
    page, _ = opened(browser, (run / "kinds.html").as_uri(), color_scheme=scheme)
    shapes, colours, hues, rows = page.evaluate("""(() => {
      const marks = [...document.querySelectorAll("#marks path")], kind = (it) => it.classList[0];
      const look = (it) => { const { fill, stroke } = getComputedStyle(it); return stroke === "none" ? fill : stroke; };
      const rows = [...document.querySelectorAll("#timeline svg")].map((row) => [...row.querySelectorAll("path")]
        .filter((it) => it.getAttribute("d")).map((it) => [kind(it), it.getBoundingClientRect().left]));
      const told = marks.map((it) => [kind(it), it.getAttribute("d") + getComputedStyle(it).fill]);
      return [told, marks.map((it) => [kind(it), look(it)]), COLOURS.map(css), rows];
    })()""")
    assert len({shape for _, shape in shapes}) == len(shapes) == 6
    colours, warning = dict(colours), {"killed", "evicted"}
    assert len({colours[kind] for kind in warning}) == len({colours[kind] for kind in {*colours} - warning}) == 1
    assert colours["missed"] != colours["killed"]
    codes = {f"rgb({int(hue[1:3], 16)}, {int(hue[3:5], 16)}, {int(hue[5:7], 16)})" for hue in hues}
    assert len(codes) == len(hues)
    assert not codes & {*colours.values()}  # hues are of learners
    oslo, paris = rows
    assert [kind for kind, _ in paris] == ["missed", "merged", "joined", "left"]
    assert [kind for kind, _ in oslo] == ["missed", "merged", "joined", "killed", "evicted", "joined"]
    places = [left for _, left in oslo[2:]]
    assert all(other - one >= 9 for one, other in itertools.pairwise(places))  # an eviction and a join of one moment
    page.context.close()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run of 64 learners, some of which are evicted and come back, and its control."""
    folder, names, started = tmp_path_factory.mktemp("crowd"), [f"learner-{i}" for i in range(64)], 1_700_000_000.0
    with EventLog(folder / "syncer" / "events.jsonl", who="syncer") as log:

        def add(t: float, event: ev.Event) -> None:
            log.append(event.model_copy(update={"t": started + t}))

        add(0, ev.SyncerStarted(run="r", address="x", method={"name": "DiLoCo"}, learners=64, budget_tokens=10**9))
        add(0, ev.Initialised(learner=names[0], source="seed", layout_digest="", num_parameters=10**7))
        for name in names:
            add(1, ev.Joined(learner=name, incarnation=1))
        for n in range(410):
            t, lost = 10.0 + 8 * n, names[n // 10 % 64]
            if n % 10 == 2:
                add(t, ev.Evicted(learner=lost, incarnation=n // 10 // 64 + 1, reason="nothing heard for 6.0 s"))
            if n % 10 == 7:
                add(t, ev.Joined(learner=lost, incarnation=n // 10 // 64 + 2, step=30 * n))
            who = tuple(each for i, each in enumerate(names) if (i + n) % 11 and (each != lost or not 2 <= n % 10 < 7))
            weights, tokens = (1.0,) * len(who), (5,) * len(who)
            add(t + 1, ev.Merged(
                fragment=n % 4, round=n // 4, version=n // 4 + 1, contributors=who, weights=weights, tokens=tokens,
                members=tuple(names), reason=f"all {len(who)} learners of the round have contributed",
            ))  # fmt: skip
            step = ev.LearnerProgress(
                incarnation=1, state="healthy", step=30 * n, tokens=n, training_loss=5 / (n + 1), versions=(1,) * 4
            )
            add(t + 2, ev.Progress(step=30 * n, tokens=2 * n, learners=dict.fromkeys(names, step), ledger=FATES))
            if n % 20 == 0:
                add(t + 3, ev.Reported(by=names[0], tokens=2000 * n, loss=5 / (n + 9)))
    with EventLog(folder / "control" / "events.jsonl", who="baseline") as log:
        for n in range(0, 500, 20):
            log.append(ev.Evaluated(t=started, step=n, tokens=2000 * n, loss=4.9 / (n + 9), num_sequences=4))
    write_page(folder / "page.html", read_run([folder])[1])
    return folder / "page.html"


def test_the_page_of_a_long_run_of_many_learners_is_small(crowd: Path) -> None:
    assert crowd.stat().st_size <= MAX_PAGE_BYTES
    shown = json.loads(crowd.read_text().partition('id="frozen">')[2].partition("</script>")[0])
    assert len(shown["merges"]) >= 100
    assert shown["merges"][-1]["version"] == 103
    assert {points[-1][0] for points in shown["training"].values()} == {30 * 409}
    assert min(map(len, shown["training"].values())) >= 25
    shown["learners"] *= 20  # what cannot be halved
    assert len(frozen_page(shown)) > MAX_PAGE_BYTES


OVERLAPS = """(() => {
  const range = document.createRange(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const box = ({ left, right, top, bottom }, what) => ({ left, right, top, bottom, what });
  const isSeen = (it, { left, right, top, bottom }) => { // not scrolled away
    const clip = it.closest(".rows, .lines, .scroll")?.getBoundingClientRect();
    return left < right && (!clip || (top >= clip.top && bottom <= clip.bottom && right <= clip.right));
  };
  const texts = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.data.trim() || node.parentElement.closest("script, title, #js-plotly-tester")) continue;
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) if (isSeen(node.parentElement, rect)) texts.push(box(rect, node.data));
  }
  const lines = [...document.querySelectorAll(".gridlayer path, .zerolinelayer path, #timeline path")]
    .filter((it) => isSeen(it, it.getBoundingClientRect())).map((it) => box(it.getBoundingClientRect(), "a line"));
  const touch = (a, b, room) =>
    a.left < b.right + room && b.left < a.right + room && a.top < b.bottom + room && b.top < a.bottom + room;
  const found = texts.flatMap((one, at) => {
    const others = texts.slice(at + 1).filter((it) => touch(one, it, -1));
    return [...others, ...lines.filter((it) => touch(one, it, 1))].map((it) => [one.what, it.what]);
  });
  return [texts.length, lines.length, found];
})()"""


@pytest.mark.parametrize("width", [400, 1120])
def test_no_text_touches_another_or_a_line_with_64_learners(browser: Any, crowd: Path, width: int) -> None:
    page, complaints = opened(browser, crowd.as_uri(), viewport={"width": width, "height": 900})
    num_texts, num_lines, found = page.evaluate(OVERLAPS)
    assert num_texts > 500
    assert num_lines > 20
    assert found == []
    rows = page.evaluate("""[...document.querySelectorAll("#timeline svg")].map((row) => {
      const marks = [...row.querySelectorAll("[transform]")].map((it) => it.getBoundingClientRect().left);
      return [row.getBoundingClientRect().height, marks];
    })""")
    assert len(rows) == 64
    for height, places in rows:
        assert height >= 20
        assert all(other - one >= 8 for one, other in itertools.pairwise(sorted(places)))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    page.context.close()


def test_a_live_page_says_when_it_follows_no_more_and_what_to_do(browser: Any, run: Path) -> None:
    ended: list[Caller] = []

    def check(caller: Caller) -> None:
        if caller in ended:
            raise AuthError("it was revoked.")

    def broken() -> None:
        raise ValueError("a defect")

    vera = Caller("vera", "viewer", key="2")
    for progress, told in (
        (lambda: None, "reload the page, or ask for a new link"),
        (broken, "stopped: the syncer's log has the reason"),
    ):
        ended.clear()
        with closing(LivePage("127.0.0.1:0", run / "events.jsonl", progress, is_open=False, check=check)) as live:
            page, _ = opened(browser, live.url_for(vera), viewport={"width": 400, "height": 800})
            if progress is not broken:
                ended.append(vera)
            page.locator("#link", has_text=told).wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= 400
            page.context.close()


def test_an_admin_steers_from_the_page_also_by_keyboard(browser: Any, run: Path) -> None:
    orders: list[Order] = []

    def steer(order: Order, caller: Caller) -> str:
        orders.append(order)
        if order.what == "quorum":
            raise ConfigError("a quorum of 7 is out of reach.")
        return f"{order.what} by {caller.name}"

    with closing(LivePage("127.0.0.1:0", run / "events.jsonl", lambda: None, is_open=False, steer=steer)) as live:
        page, complaints = opened(
            browser, live.url_for(Caller("anna", "admin", key="1")), viewport={"width": 400, "height": 800}
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        page.select_option("#whom", "oslo")
        page.locator("[data-order=ban]").click()
        page.locator("#what", has_text="Evict and ban oslo?").wait_for()
        page.get_by_role("button", name="Cancel").click()
        assert orders == []
        page.locator("[data-order=ban]").focus()
        page.keyboard.press("Enter")
        page.locator("#why").fill("<b>it is stolen</b>")
        page.locator("#yes").focus()
        page.keyboard.press("Enter")
        page.locator("#answer", has_text="evict by anna").wait_for()
        assert orders == [Order("evict", "oslo", bans=True, reason="<b>it is stolen</b>")]
        page.locator("[data-order=pause]").click()
        page.keyboard.press("Escape")
        page.locator("#at-least").fill("7")
        page.locator("[data-order=quorum]").click()
        page.locator("#yes").click()
        page.locator("#answer", has_text="a quorum of 7 is out of reach.").wait_for()
        assert orders[1:] == [Order("quorum", at_least=7)]
        assert [each for each in complaints if "400" not in each] == []  # the browser's own word of the refusal
        page.context.close()


def test_a_viewers_page_and_a_frozen_one_have_no_orders(browser: Any, run: Path) -> None:
    with closing(LivePage("127.0.0.1:0", run / "events.jsonl", lambda: None, is_open=False, steer=lambda *_: "")) as it:
        for url in (it.url, frozen(run)):
            page, _ = opened(browser, url)
            assert not page.locator("#steer").is_visible()
            page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1100])
def test_it_fits_every_screen(browser: Any, run: Path, scheme: str, width: int) -> None:
    page, _ = opened(browser, frozen(run), color_scheme=scheme, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (_brightness(ink) > _brightness(paper)) == (scheme == "dark")
    page.context.close()


def test_the_keyboard_reaches_the_learners(browser: Any, run: Path) -> None:
    page, _ = opened(browser, frozen(run))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "to the learners"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.contains(document.querySelector('#members'))")
    page.context.close()


def _brightness(colour: str) -> float:
    """Of "rgb(1, 2, 3)"."""
    return sum(float(each) for each in colour.removeprefix("rgb(").removesuffix(")").split(","))


# ------------------------------------------------------------------------------------------------------------ drawings

LONG = "a learner's very long name, in the data centre that is farthest away"
SEEN = """[...document.querySelectorAll('.drawing')].map((place) => {
  const box = (it) => ["left", "right", "top", "bottom"].map((side) => it.getBoundingClientRect()[side]);
  const boxes = (what) => [...place.querySelectorAll(what)].map(box).filter(([left, right]) => left < right);
  const [x, y, key] = ['.xtick text', '.ytick text', '.legendtext'].map(boxes);
  return { panel: box(place), texts: boxes('text'), x, y, key };
})"""


def drawings() -> list[Picture]:
    """Long names, many rows and wide ranges."""
    counts = tuple(100.0 * 2**power for power in range(8))
    curves = [Line(f"{LONG}, {i}", counts, [10.0**-i * n for n in counts], BLUE) for i in range(5)]
    span, chips = Axis("hours until all of the tokens are trained", log=True), Axis("chips", log=True, ticks=counts)
    figures = [
        lines(curves, replace(chips, band=(200, 900, LONG)), Axis("h", log=True)),
        lines(curves[:1], Axis("x", low=100, high=9000), Axis("y", log=True, low=100, high=20000)),
        bars([f"{LONG}, {i}\n{LONG}" for i in range(6)], [Bars("h", [1e-3, 1, 9, 99, 1e3, 1e5], RED)], span),
        bars(["a", "b"], [Bars("computing", [99.9, 100.0], GREEN, "{:.1f} %".format)], Axis("%", low=0)),
        bars([LONG], [Bars(f"{LONG}, {i}", [9.0], BLUE) for i in range(4)], Axis("hours", low=0)),
        timeline({f"{i}-{LONG}": [Span(0, 9e5, "compute"), Span(i, 9, "up"), Span(8e5, 9e5, "stopped")]
                  for i in range(12)}),
    ]  # fmt: skip
    return [Picture(f"<b>{LONG}</b>", "What to see.", figure, ("row", "value"), [(LONG, "1")]) for figure in figures]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 400)])
def test_drawings_are_readable_on_every_screen(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    """No text is cut off by its drawing's edge, and none is written over the next."""
    write_drawings(tmp_path / "p.html", "t", "l", drawings())
    page = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}).new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
    page.goto((tmp_path / "p.html").as_uri())
    assert (tmp_path / "p.html").stat().st_size <= MAX_PAGE_BYTES
    page.locator(".drawing .main-svg").nth(2 * len(drawings()) - 1).wait_for(state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for found in page.evaluate(SEEN):
        left, right, top, bottom = found["panel"]
        assert found["texts"]
        for box in found["texts"]:
            assert left - 1 <= box[0] <= box[1] <= right + 1
            assert top - 1 <= box[2] <= box[3] <= bottom + 1
        for of, begin, end in (("x", 0, 1), ("y", 2, 3)):
            boxes = sorted(found[of], key=lambda box: box[begin])
            assert all(one[end] <= other[begin] + 1 for one, other in itertools.pairwise(boxes))
        for one, other in itertools.combinations(found["key"], 2):
            assert one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] + 1 or other[3] <= one[2] + 1
    num_texts, num_lines, found = page.evaluate(OVERLAPS)
    assert (num_texts > 50, num_lines > 10, found) == (True, True, [])
    colour = page.evaluate("document.querySelector('.scatterlayer .lines path').style.stroke")
    assert colour == {"light": "rgb(0, 114, 178)", "dark": "rgb(61, 158, 224)"}[scheme]
    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    page.wait_for_function(f"document.querySelector('.scatterlayer .lines path').style.stroke !== '{colour}'")
    assert complaints == []
    page.context.close()
