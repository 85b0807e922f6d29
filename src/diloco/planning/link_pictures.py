"""Pictures of links: value against bandwidth, and what learners do in one period."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from diloco.planning.graph import Execution, costs_of, pattern_of
from diloco.planning.palette import METHODS, VIOLET
from diloco.planning.picture_axes import Axis
from diloco.planning.pictures import Line, Picture, lines
from diloco.planning.question import Around, Graph, Question
from diloco.planning.settings import Setting, setting_for
from diloco.planning.timelines import KINDS, Kind, Span, timeline
from diloco.planning.units import RATE, TIME

NUM_POINTS = 60
AROUND_POINTS = 25
SHOWN: tuple[Kind, ...] = ("compute", "waiting", "up", "down")
SKIPPED = 3
"""Periods before the one that is drawn."""
WIDEST, NUM_TRIED = 1000.0, 40
"""How far from what was asked for the axis may reach, as a factor; bandwidths that are tried to find its range."""
LEAST_SHOWN, MOST_SHOWN = 0.1, 0.98
"""Of utilisation where curves begin and end."""

OVERLAPPED = VIOLET
"""Streaming with an overlap stands beside Streaming without."""

Spans = dict[str, list[Span]]


def pictures(question: Question, asked_bit_per_s: Mapping[str, float]) -> list[Picture]:
    """The curve with its relatives and the links that were asked for, by what was asked, and a timeline of one period
    on the last of them."""
    return [_curve(question, asked_bit_per_s), _timeline(question, list(asked_bit_per_s.values())[-1])]


def _curve(question: Question, asked_bit_per_s: Mapping[str, float]) -> Picture:
    asked = list(asked_bit_per_s.values())
    relatives = list(_relatives(question))
    low, high = _range(relatives, asked)
    num = NUM_POINTS if isinstance(question, Graph) else AROUND_POINTS
    grid = [low * (high / low) ** (i / (num - 1)) for i in range(num)]
    rates = sorted({*grid, *asked})  # the points are on the curve, also between the points of the grid
    drawn = [
        Line(
            title(each),
            [rate / 1e9 for rate in rates],
            [100 * each.value(rate) for rate in rates],
            style="--" if number else "-",
            colour=OVERLAPPED if _is_overlapped(each.setting) else METHODS[each.setting.method],
        )
        for number, each in enumerate(relatives)
    ]
    worth = dict(zip(rates, drawn[0].y, strict=True))
    at, values = [rate / 1e9 for rate in asked], [worth[rate] for rate in asked]
    points = Line("asked for", at, values, style="o", colour=drawn[0].colour)
    label = "compute utilisation, %" if question.measure == "computing" else "pace of merges kept, %"
    axes = Axis("link of a learner, Gbit/s", log=True), Axis(label, low=0, high=103)
    rows = [(name, RATE.show(rate), f"{worth[rate]:.4g} %") for name, rate in asked_bit_per_s.items()]
    heads = ("asked for", "link", question.measure)
    heading = f"{question.workload.name}: what a link is worth"
    text = caption(question, relatives)
    return Picture("utilization", heading, text, partial(lines, [*drawn, points], *axes), heads, rows)


def title(question: Question) -> str:
    """The method and those of its numbers that are not the usual ones: what tells it from the others of a picture."""
    own = question.setting
    usual = setting_for(question.workload, own.method, sync_every=own.sync_every)
    numbers = {f"τ = {own.overlap}": own.overlap != usual.overlap}
    numbers[f"P = {own.num_fragments}"] = own.num_fragments != usual.num_fragments
    return ", ".join([own.title, *(number for number, is_own in numbers.items() if is_own)])


def caption(question: Question, relatives: Sequence[Question]) -> str:
    """What the picture shows, from the curves that it has."""
    first, *others = relatives
    text = f"{title(first)}: {question.setting}."
    if not others:
        return text
    beside = [f"{title(each)}, every step" for each in others if each.setting.sync_every == 1]
    rest = [title(each) for each in others if each.setting.sync_every > 1]
    if rest:
        beside.append(f"every {others[-1].setting.sync_every} steps: {'; '.join(rest)}")
    return f"{text} Beside it, with the same codec and latency: {'; '.join(beside)}."


def _range(relatives: Sequence[Question], asked: Sequence[float]) -> tuple[float, float]:
    """The range of the axis: from where the first curve rises to where the last one has, with what was asked for."""
    if not all(isinstance(each, Graph) for each in relatives):  # no data parallel among them, and searching is slow
        return min(asked) / 5, 30 * max(asked)
    lowest, highest = min(asked) / WIDEST, WIDEST * max(asked)
    rates = [lowest * (highest / lowest) ** (i / (NUM_TRIED - 1)) for i in range(NUM_TRIED)]
    rising = [rate for rate in rates if max(each.value(rate) for each in relatives) > LEAST_SHOWN]
    risen = [rate for rate in rates if all(each.value(rate) > MOST_SHOWN * each.value(math.inf) for each in relatives)]
    return min([min(asked) / 2, *rising[:1]]), max([2 * max(asked), *risen[:1]])


def _relatives(question: Question) -> Iterator[Question]:
    """The question itself, then other methods at the same H, codec and latency."""
    own = question.setting
    yield question
    if question.measure != "computing":
        return
    every = own.sync_every if own.method != "data-parallel" else 100
    wanted: list[tuple[str, int | None, int | None]] = [
        ("diloco", every, None), ("streaming", every, None), ("streaming", every, 1), ("eager", every, None)
    ]  # fmt: skip
    if isinstance(question, Graph):
        wanted.insert(0, ("data-parallel", None, None))
    for method, h, tau in wanted:
        setting = setting_for(question.workload, method, sync_every=h, overlap=tau)
        setting = replace(setting, up=own.up, down=own.down, latency_s=own.latency_s)
        if setting != own:
            yield replace(question, setting=setting)


def _is_overlapped(setting: Setting) -> bool:
    return setting.method == "streaming" and setting.overlap > 0


def _timeline(question: Question, bit_per_s: float) -> Picture:
    rows = _graph_rows(question, bit_per_s) if isinstance(question, Graph) else _around_rows(question, bit_per_s)
    table = []
    for name, spans in rows.items():
        seconds = (sum(span.end_s - span.begin_s for span in spans if span.kind == kind) for kind in SHOWN)
        table.append((name, *map(TIME.show, seconds)))
    heading = f"{question.workload.name}: one period on {RATE.show(bit_per_s)}"
    text = f"{question.setting}. What is on the link runs beside what is computed."
    heads = ("learner", *(KINDS[kind][0] for kind in SHOWN))
    return Picture("timeline", heading, text, partial(timeline, rows), heads, table)


def _graph_rows(question: Graph, bit_per_s: float) -> Spans:
    """A period of H steps of the long run; one row, for all learners do the same."""
    costs = costs_of(question.workload, question.setting, bit_per_s)
    pattern = pattern_of(question.workload.num_layers, question.setting)
    execution = Execution(pattern, costs, traced=True)
    execution.advance_to((SKIPPED + pattern.overlap // pattern.period) * pattern.period)
    begin_s = execution.now_s
    execution.advance_to(execution.step + pattern.period)
    assert execution.trace is not None
    kinds: dict[str, Kind] = {"wait": "waiting", "up": "up", "down": "down"}
    spans = [Span(each.start_s, each.end_s, kinds[each.kind]) for each in execution.trace if each.kind in kinds]
    at_s = begin_s
    for each in [span for span in spans if span.kind == "waiting"]:
        spans.append(Span(at_s, max(at_s, each.begin_s), "compute"))
        at_s = max(at_s, each.end_s)
    spans.append(Span(at_s, execution.now_s, "compute"))
    return {"each learner": _clipped(spans, begin_s, execution.now_s)}


def _around_rows(question: Around, bit_per_s: float) -> Spans:
    """The last H steps of the slowest learner; one row where all learners are equal."""
    prediction = question.predict(bit_per_s, traced=True)
    activities = prediction.activities
    num = 1 + max(each.learner for each in activities)
    of_learner = [[Span(it.begin_s, it.end_s, it.kind) for it in activities if it.learner == i] for i in range(num)]
    end_s = min(max(it.end_s for it in spans if it.kind in ("compute", "waiting")) for spans in of_learner)
    slowest = min(question.speeds)
    length_s = question.setting.sync_every * question.workload.step_s / slowest / min(prediction.utilization)
    names = ["each learner"] if num == 1 else [f"learner {i + 1}" for i in range(num)]
    return {name: _clipped(spans, end_s - length_s, end_s) for name, spans in zip(names, of_learner, strict=True)}


def _clipped(spans: Iterable[Span], begin_s: float, end_s: float) -> list[Span]:
    """The parts of the spans that lie in a window, which becomes time 0."""
    inside = ((max(each.begin_s, begin_s), min(each.end_s, end_s), each.kind) for each in spans)
    return [Span(begins - begin_s, ends - begin_s, kind) for begins, ends, kind in inside if ends > begins]
