"""Pictures of links: value against bandwidth, and what learners do in one period."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from diloco.planning.dag import Execution
from diloco.planning.graph import costs_of, pattern_of
from diloco.planning.pictures import BLUE, Axis, Kind, Line, Picture, Span, lines, timeline
from diloco.planning.question import Around, Graph, Question
from diloco.planning.settings import setting_for
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

Points = Sequence[tuple[float, float]]
Spans = dict[str, list[Span]]


def pictures(question: Question, points: Points, at_bit_per_s: float) -> list[Picture]:
    """The curve with its relatives and the points (bit/s, value) that were asked for, and a timeline of one period."""
    return [_curve(question, points), _timeline(question, at_bit_per_s)]


def _curve(question: Question, points: Points) -> Picture:
    relatives = list(_relatives(question))
    low, high = _range([each for _, each in relatives], [rate for rate, _ in points])
    num = NUM_POINTS if isinstance(question, Graph) else AROUND_POINTS
    rates = [low * (high / low) ** (i / (num - 1)) for i in range(num)]
    drawn: list[Line] = []
    for name, each in relatives:
        values = [100 * each.value(rate) for rate in rates]
        drawn.append(Line(name, [rate / 1e9 for rate in rates], values, style="--" if drawn else "-"))
    at, worth = [rate / 1e9 for rate, _ in points], [100 * value for _, value in points]
    drawn.append(Line("asked for", at, worth, style="o", colour=BLUE))
    label = "compute utilisation, %" if question.measure == "computing" else "pace of merges kept, %"
    figure = lines(drawn, Axis("Gbit/s of a learner's link", log=True), Axis(label, low=0, high=103))
    rows = [(f"{100 * value:.4g} %", RATE.show(rate)) for rate, value in points]
    title = f"{question.workload.name}: what a link is worth"
    text = f"{question.setting}; the others have the same H and codec."
    return Picture("utilization", title, text, figure, (question.measure, "link"), rows)


def _range(relatives: Sequence[Question], asked: Sequence[float]) -> tuple[float, float]:
    """The range of the axis: from where the first curve rises to where the last one has, with what was asked for."""
    if not all(isinstance(each, Graph) for each in relatives):  # no data parallel among them, and searching is slow
        return min(asked) / 5, 30 * max(asked)
    lowest, highest = min(asked) / WIDEST, WIDEST * max(asked)
    rates = [lowest * (highest / lowest) ** (i / (NUM_TRIED - 1)) for i in range(NUM_TRIED)]
    rising = [rate for rate in rates if max(each.value(rate) for each in relatives) > LEAST_SHOWN]
    risen = [rate for rate in rates if all(each.value(rate) > MOST_SHOWN * each.value(math.inf) for each in relatives)]
    return min([min(asked) / 2, *rising[:1]]), max([2 * max(asked), *risen[:1]])


def _relatives(question: Question) -> Iterator[tuple[str, Question]]:
    """The question itself, then other methods at the same H, codec and latency."""
    own = question.setting
    yield own.method + (f", τ = {own.overlap}" if own.method == "streaming" and own.overlap else ""), question
    if question.measure != "computing":
        return
    every = own.sync_every if own.method != "data-parallel" else 100
    wanted: list[tuple[str, str, int | None, int | None]] = [
        ("diloco", "diloco", every, None),
        ("streaming", "streaming", every, None),
        ("streaming, τ = 1", "streaming", every, 1),
        ("eager", "eager", every, None),
    ]
    if isinstance(question, Graph):
        wanted.insert(0, ("data parallel", "data-parallel", None, None))
    for name, method, h, tau in wanted:
        setting = setting_for(question.workload, method, sync_every=h, overlap=tau)
        setting = replace(setting, up=own.up, down=own.down, latency_s=own.latency_s)
        if setting != own:
            yield name, replace(question, setting=setting)


def _timeline(question: Question, bit_per_s: float) -> Picture:
    rows = _graph_rows(question, bit_per_s) if isinstance(question, Graph) else _around_rows(question, bit_per_s)
    table = []
    for name, spans in rows.items():
        seconds = (sum(span.end_s - span.begin_s for span in spans if span.kind == kind) for kind in SHOWN)
        table.append((name, *map(TIME.show, seconds)))
    title = f"{question.workload.name}: one period on {RATE.show(bit_per_s)}"
    text = f"{question.setting}. What is on the link runs beside what is computed."
    return Picture("timeline", title, text, timeline(rows), ("learner", *SHOWN), table)


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
    slowest = min(question.learners.speeds)
    length_s = question.setting.sync_every * question.workload.step_s / slowest / min(prediction.utilization)
    names = ["each learner"] if num == 1 else [f"learner {i + 1}" for i in range(num)]
    return {name: _clipped(spans, end_s - length_s, end_s) for name, spans in zip(names, of_learner, strict=True)}


def _clipped(spans: Iterable[Span], begin_s: float, end_s: float) -> list[Span]:
    """The parts of the spans that lie in a window, which becomes time 0."""
    inside = ((max(each.begin_s, begin_s), min(each.end_s, end_s), each.kind) for each in spans)
    return [Span(begins - begin_s, ends - begin_s, kind) for begins, ends, kind in inside if ends > begins]
