"""What a link is worth against its bandwidth, and what everybody does when, as pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from diloco.planning.dag import Execution, Interval
from diloco.planning.graph import costs_of, pattern_of
from diloco.planning.pictures import BLUE, Axis, Kind, Line, Picture, Span, lines, timeline
from diloco.planning.question import Around, Graph, Question
from diloco.planning.settings import Setting, setting_for
from diloco.planning.units import RATE, TIME

NUM_POINTS = 60
AROUND_POINTS = 25
SHOWN: tuple[Kind, ...] = ("compute", "waiting", "up", "down")
SKIPPED = 3
"""Periods before the one that is drawn."""
WIDEST, NUM_TRIED = 1000.0, 40
"""What is drawn reaches this far at most, as a factor, to either side of what was asked for; bandwidths that are tried
to find out."""
LEAST_SHOWN, MOST_SHOWN = 0.1, 0.98
"""Of utilisation where curves begin and end."""


def pictures(question: Question, points: Sequence[tuple[float, float]], at_bit_per_s: float) -> list[Picture]:
    """The curve with its relatives and the points (bit/s, value) that were asked for, and a timeline of one period at
    one bandwidth."""
    return [_curve(question, points), _timeline(question, at_bit_per_s)]


def _curve(question: Question, points: Sequence[tuple[float, float]]) -> Picture:
    relatives = list(_relatives(question))
    low, high = _range([each for _, each in relatives], [rate for rate, _ in points])
    num = NUM_POINTS if isinstance(question, Graph) else AROUND_POINTS
    rates = [low * (high / low) ** (i / (num - 1)) for i in range(num)]
    curves = [
        Line(
            name,
            [rate / 1e9 for rate in rates],
            [100 * each.value(rate) for rate in rates],
            style="-" if i == 0 else "--",
        )
        for i, (name, each) in enumerate(relatives)
    ]
    at, worth = [rate / 1e9 for rate, _ in points], [100 * value for _, value in points]
    asked = Line("asked for", at, worth, style="o", colour=BLUE)
    label = "compute utilisation, %" if question.measure == "computing" else "pace of merges kept, %"
    figure = lines([*curves, asked], Axis("Gbit/s of a learner's link", log=True), Axis(label, low=0, high=103))
    rows = [(f"{100 * value:.4g} %", RATE.show(rate)) for rate, value in points]
    return Picture(
        "utilization",
        f"{question.workload.name}: what a link is worth",
        f"{_described(question.setting)}; the others have the same H and codec.",
        figure,
        (question.measure, "link"),
        rows,
    )


def _range(relatives: Sequence[Question], asked: Sequence[float]) -> tuple[float, float]:
    """From where the first curve begins to rise to where the last one has nearly risen; what was asked for is in it."""
    low, high = min(asked) / 5, 30 * max(asked)
    if not all(isinstance(each, Graph) for each in relatives):
        return low, high  # no data parallel among them, nor ten curves' time to look further
    lowest, highest = min(asked) / WIDEST, WIDEST * max(asked)
    rates = [lowest * (highest / lowest) ** (i / (NUM_TRIED - 1)) for i in range(NUM_TRIED)]
    rising = [rate for rate in rates if max(each.value(rate) for each in relatives) > LEAST_SHOWN]
    risen = [rate for rate in rates if all(each.value(rate) > MOST_SHOWN * each.value(math.inf) for each in relatives)]
    return min([min(asked) / 2, *rising[:1]]), max([2 * max(asked), *risen[:1]])


def _described(setting: Setting) -> str:
    return (
        f"{setting.method}, H = {setting.sync_every}, τ = {setting.overlap}, P = {setting.num_fragments}, {setting.up}"
    )


def _relatives(question: Question) -> Iterable[tuple[str, Question]]:
    """The question itself, then other methods at the same H, codec and latency."""
    own = question.setting
    yield own.method + (f", τ = {own.overlap}" if own.method == "streaming" and own.overlap else ""), question
    if question.measure != "computing":
        return
    every = own.sync_every if own.method != "data-parallel" else 100
    wanted: list[tuple[str, str, dict[str, int]]] = [
        ("diloco", "diloco", {"sync_every": every}),
        ("streaming", "streaming", {"sync_every": every}),
        ("streaming, τ = 1", "streaming", {"sync_every": every, "overlap": 1}),
        ("eager", "eager", {"sync_every": every}),
    ]
    if isinstance(question, Graph):
        wanted.insert(0, ("data parallel", "data-parallel", {}))
    for name, method, options in wanted:
        setting = setting_for(question.workload, method, up=own.up, down=own.down, latency_s=own.latency_s, **options)
        if setting != own:
            yield name, replace(question, setting=setting)


def _timeline(question: Question, bit_per_s: float) -> Picture:
    rows = _graph_rows(question, bit_per_s) if isinstance(question, Graph) else _around_rows(question, bit_per_s)
    table = [
        (name, *(TIME.show(sum(span.end_s - span.begin_s for span in spans if span.kind == kind)) for kind in SHOWN))
        for name, spans in rows.items()
    ]
    return Picture(
        "timeline", f"{question.workload.name}: one period on {RATE.show(bit_per_s)}",
        f"{_described(question.setting)}. What is on the link runs beside what is computed.", timeline(rows),
        ("learner", *SHOWN), table,
    )  # fmt: skip


def _graph_rows(question: Graph, bit_per_s: float) -> dict[str, list[Span]]:
    """Any learner, for they are equal: a period of H steps of the long run."""
    costs = costs_of(question.workload, question.setting, bit_per_s)
    pattern = pattern_of(question.workload.num_layers, question.setting)
    execution = Execution(pattern, costs, traced=True)
    execution.advance_to((SKIPPED + pattern.overlap // pattern.period) * pattern.period)
    begin_s = execution.now_s
    execution.advance_to(execution.step + pattern.period)
    assert execution.trace is not None
    waits = [each for each in execution.trace if each.kind == "wait"]
    spans = [Span(each.start_s, each.end_s, "waiting") for each in waits]
    spans += [Span(a, b, "compute") for a, b in _between(begin_s, waits, execution.now_s)]
    for each in execution.trace:
        if each.kind in ("up", "down"):
            spans.append(Span(each.start_s, each.end_s, "up" if each.kind == "up" else "down"))
    return {"each learner": _clipped(spans, begin_s, execution.now_s)}


def _between(begin_s: float, waits: Sequence[Interval], end_s: float) -> Iterable[tuple[float, float]]:
    """The time that is not waited."""
    for each in waits:
        if each.start_s > begin_s:
            yield begin_s, each.start_s
        begin_s = max(begin_s, each.end_s)
    yield begin_s, end_s


def _around_rows(question: Around, bit_per_s: float) -> dict[str, list[Span]]:
    """Every learner, or one where all are equal: the last H steps of the slowest one."""
    prediction = question.predict(bit_per_s, traced=True)
    activities = prediction.activities
    ends = {
        each.learner: each.end_s
        for each in sorted(activities, key=lambda it: it.end_s)
        if each.kind in ("compute", "waiting")
    }
    end_s = min(ends.values())  # until then everybody's time is known
    slowest = min(question.learners.speeds)
    length_s = question.setting.sync_every * question.workload.step_s / slowest / min(prediction.utilization)
    num = 1 + max(each.learner for each in activities)
    names = ["each learner"] if num == 1 else [f"learner {i + 1}" for i in range(num)]
    return {
        name: _clipped(
            [Span(it.begin_s, it.end_s, it.kind) for it in activities if it.learner == i], end_s - length_s, end_s
        )
        for i, name in enumerate(names)
    }


def _clipped(spans: Sequence[Span], begin_s: float, end_s: float) -> list[Span]:
    """What lies in the window, which becomes time 0."""
    inside = [replace(span, begin_s=max(span.begin_s, begin_s), end_s=min(span.end_s, end_s)) for span in spans]
    return [
        replace(each, begin_s=each.begin_s - begin_s, end_s=each.end_s - begin_s)
        for each in inside
        if each.end_s > each.begin_s
    ]
