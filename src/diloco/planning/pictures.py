"""Pictures of plans: the value of a link, goodput, hours, the scaling laws, and the adviser's methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from diloco.planning.advice import penalty_status
from diloco.planning.bandwidth import GraphLinkModel, LinkModel, SyncerLinkModel
from diloco.planning.goodput import Fleet, Goodput, Mode, closed_form, simulate
from diloco.planning.graph import Execution, costs_of, pattern_of
from diloco.planning.run_estimate import AdviceInputs, RunEstimate
from diloco.planning.scaling_laws import DATA_PARALLEL_LOSS, LEARNERS, LOSS, PARAMETERS, ScalingEstimate
from diloco.planning.settings import setting_for
from diloco.planning.training_time import Link, TrainingPlan, WallClock, wall_clock
from diloco.planning.units import RATE, SIZE, TIME, significant
from diloco.report import drawing
from diloco.report.drawing import Axis, Bars, Kind, Line, Picture, Span, bars, lines, rows_of, short, timeline


def steps_between(low: float, high: float, num: int) -> list[float]:
    """Return `num` + 1 values from `low` to `high`, both included, in equal ratios."""
    return [low * (high / low) ** (step / num) for step in range(num + 1)]


# --------------------------------------------------------------------------------------------------------------- links

GRAPH_STEPS, SYNCER_STEPS = 60, 25
SHOWN: tuple[Kind, ...] = ("compute", "waiting", "up", "down")
SKIPPED = 3
"""Periods before the one drawn."""
BELOW, ABOVE = 5.0, 30.0
"""Ratios of the requested bandwidths to the axis's ends."""
Spans = dict[str, list[Span]]


def link_pictures(link_model: LinkModel, asked_bit_per_s: Mapping[str, float]) -> list[Picture]:
    """Draw the method's curve beside others, with the requested bandwidths, and one period on the last of them."""
    return [_link_curve(link_model, asked_bit_per_s), _period(link_model, list(asked_bit_per_s.values())[-1])]


def _link_curve(link_model: LinkModel, asked_bit_per_s: Mapping[str, float]) -> Picture:
    asked = list(asked_bit_per_s.values())
    relatives = list(_relatives(link_model))
    num_steps = GRAPH_STEPS if isinstance(link_model, GraphLinkModel) else SYNCER_STEPS
    grid = steps_between(min(asked) / BELOW, ABOVE * max(asked), num_steps)
    rates = sorted({*grid, *asked})  # the requested points lie on the curve
    gbit_per_s = [rate / 1e9 for rate in rates]
    drawn = []
    for number, each in enumerate(relatives):
        is_overlapped = each.setting.method == "streaming" and each.setting.overlap > 0  # beside one without overlap
        colour = drawing.VIOLET if is_overlapped else drawing.METHODS[each.setting.method]
        percents = [100 * each.value(rate) for rate in rates]
        drawn.append(Line(curve_title(each), gbit_per_s, percents, colour, style="--" if number else "-"))
    worth = dict(zip(rates, drawn[0].y, strict=True))
    reached = [worth[rate] for rate in asked]
    points = Line("asked for", [rate / 1e9 for rate in asked], reached, drawn[0].colour, style="o")
    label = "compute utilisation, %" if link_model.measure == "computing" else "pace of merges kept, %"
    figure = lines([*drawn, points], Axis("link of a learner, Gbit/s", log=True), Axis(label, low=0, high=103))
    rows = [(name, RATE.show(rate), f"{worth[rate]:.4g} %") for name, rate in asked_bit_per_s.items()]
    text = f"{curve_title(link_model)}: {link_model.setting.label}."
    if every := {each.setting.sync_every for each in relatives[1:] if each.setting.method != "data-parallel"}:
        text += f" Dashed: other methods with the same codec and latency, at H = {every.pop()}."
    heading = f"{link_model.workload.name}: utilisation against bandwidth"
    return Picture(heading, text, figure, ("asked for", "link", link_model.measure), rows)


def curve_title(link_model: LinkModel) -> str:
    """Return the method and its numbers that differ from the defaults."""
    own = link_model.setting
    usual = setting_for(link_model.workload, own.method, sync_every=own.sync_every)
    numbers = {f"τ = {own.overlap}": own.overlap != usual.overlap}
    numbers[f"P = {own.num_fragments}"] = own.num_fragments != usual.num_fragments
    return ", ".join([own.title, *(number for number, is_own in numbers.items() if is_own)])


def _relatives(link_model: LinkModel) -> Iterator[LinkModel]:
    """Yield the method itself, then others at the same H, codec and latency."""
    own = link_model.setting
    yield link_model
    if link_model.measure != "computing":
        return
    every = own.sync_every if own.method != "data-parallel" else 100
    wanted: list[tuple[str, int | None, int | None]] = [
        ("diloco", every, None), ("streaming", every, None), ("streaming", every, 1), ("eager", every, None)
    ]  # fmt: skip
    if isinstance(link_model, GraphLinkModel):
        wanted.insert(0, ("data-parallel", None, None))
    for method, h, tau in wanted:
        setting = setting_for(link_model.workload, method, sync_every=h, overlap=tau)
        setting = replace(setting, up=own.up, down=own.down, latency_s=own.latency_s)
        if setting != own:
            yield replace(link_model, setting=setting)


def _period(link_model: LinkModel, bit_per_s: float) -> Picture:
    if isinstance(link_model, GraphLinkModel):
        spans = _graph_spans(link_model, bit_per_s)
    else:
        spans = _syncer_spans(link_model, bit_per_s)
    rows = []
    for name, of_learner in spans.items():
        seconds = (sum(span.end_s - span.begin_s for span in of_learner if span.kind == kind) for kind in SHOWN)
        rows.append((name, *map(TIME.show, seconds)))
    heading = f"{link_model.workload.name}: one period on {RATE.show(bit_per_s)}"
    text = f"{link_model.setting.label}. Transfers run beside the computation."
    return Picture(heading, text, timeline(spans), ("learner", *(drawing.KINDS[kind][0] for kind in SHOWN)), rows)


def _graph_spans(link_model: GraphLinkModel, bit_per_s: float) -> Spans:
    """A period of H steps in the steady state; one row, since all learners do the same."""
    costs = costs_of(link_model.workload, link_model.setting, bit_per_s)
    pattern = pattern_of(link_model.workload.num_layers, link_model.setting)
    execution = Execution(pattern, costs, traced=True)
    execution.advance_to((SKIPPED + pattern.overlap // pattern.period) * pattern.period)
    begin_s = execution.now_s
    execution.advance_to(execution.step + pattern.period)
    assert execution.trace is not None
    spans, at_s = list(execution.trace), begin_s
    for each in [span for span in spans if span.kind == "waiting"]:
        spans.append(Span(at_s, max(at_s, each.begin_s), "compute"))
        at_s = max(at_s, each.end_s)
    spans.append(Span(at_s, execution.now_s, "compute"))
    return {"each learner": _clipped(spans, begin_s, execution.now_s)}


def _syncer_spans(link_model: SyncerLinkModel, bit_per_s: float) -> Spans:
    """The last H steps of the slowest learner; one row if all learners are equal."""
    prediction = link_model.predict(bit_per_s)
    of_learner = prediction.spans
    end_s = min(max(it.end_s for it in spans if it.kind in ("compute", "waiting")) for spans in of_learner)
    slowest = min(link_model.speeds)
    length_s = link_model.setting.sync_every * link_model.workload.step_s / slowest / min(prediction.utilization)
    names = [f"learner {i + 1}" for i in range(len(of_learner))] if len(of_learner) > 1 else ["each learner"]
    return {name: _clipped(spans, end_s - length_s, end_s) for name, spans in zip(names, of_learner, strict=True)}


def _clipped(spans: Iterable[Span], begin_s: float, end_s: float) -> list[Span]:
    """Return the parts of the spans within a window, relative to its start."""
    inside = ((max(each.begin_s, begin_s), min(each.end_s, end_s), each.kind) for each in spans)
    return [Span(begins - begin_s, ends - begin_s, kind) for begins, ends, kind in inside if ends > begins]


# ------------------------------------------------------------------------------------------------------------- goodput

MODES: Mapping[Mode, str] = {
    "data-parallel": "data parallel", "elastic": "elastic data parallel", "decoupled": "decoupled"
}  # fmt: skip


def goodput_pictures(fleet: Fleet, found: Mapping[Mode, Goodput], seed: int) -> list[Picture]:
    """Draw goodput against chips, and the shares of the time, given the goodput in every mode."""
    return [_against_chips(fleet, found[fleet.mode], seed), _where_time_goes(fleet, found)]


def mode_title(fleet: Fleet, mode: Mode) -> str:
    """Return a mode's name, with the number of decoupled learners."""
    return f"{fleet.learners} decoupled learners" if mode == "decoupled" and fleet.learners > 1 else MODES[mode]


def _goodput(fleet: Fleet, seed: int) -> float:
    """Return the goodput by formula, without noise, or by simulation where there is none."""
    formula = closed_form(fleet)
    return simulate(fleet, seed).goodput if formula is None else 100 * formula


def _against_chips(fleet: Fleet, here: Goodput, seed: int) -> Picture:
    counts = sorted({max(fleet.learners, round(fleet.chips * 2.0**power)) for power in range(-4, 4)})
    columns = {mode: [_goodput(replace(fleet, chips=num, mode=mode), seed) for num in counts] for mode in MODES}
    drawn = [Line(mode_title(fleet, mode), counts, column, drawing.METHODS[mode]) for mode, column in columns.items()]
    label, errors = "this plan, by formula", []
    if here.closed_form is None:
        label, errors = "this plan, simulated: 95 % interval", [(here.interval[1] - here.interval[0]) / 2]
    goodput = columns[fleet.mode][counts.index(fleet.chips)]
    drawn.append(Line(label, [fleet.chips], [goodput], drawing.INK, errors, style="o"))
    worst = min(map(min, columns.values()))
    low = 0.0 if worst < 50 else 100 - 2 * (100 - worst)  # goodput of a small fleet is near 100 %
    span = Axis("goodput, %", low=low, high=100 + 0.03 * (100 - low)) if low < 100 else Axis("goodput, %")
    text = (
        "Work done, in percent of the work of the same chips without failures and waiting. Learners that step together "
        "stop together, so goodput falls with the number of chips; the failure of a decoupled learner stops only "
        "itself."
    )
    heads = ("chips", *(f"{mode_title(fleet, mode)}, %" for mode in MODES))
    rows = rows_of([f"{chips:,}" for chips in counts], columns.values(), _percent)
    figure = lines(drawn, Axis("chips", log=True, ticks=tuple(counts)), span)
    return Picture("Goodput against chips", text, figure, heads, rows)


def _percent(value: float) -> str:
    """Format with more digits near 100, where the difference matters."""
    return f"{value:.3f}" if 99 < value < 100 else f"{value:.1f}"


def _where_time_goes(fleet: Fleet, found: Mapping[Mode, Goodput]) -> Picture:
    labels, values = [mode_title(fleet, mode) for mode in found], list(found.values())
    goodput, waiting, stopped = zip(*((each.goodput, each.waiting, each.stopped) for each in values), strict=True)
    shares = [
        Bars("working", goodput, drawing.COMPUTING),
        Bars("waiting for other learners", waiting, drawing.WAITING),
        Bars("stopped by a failure", stopped, drawing.STOPPED),
    ]
    figure = bars(
        labels, shares, Axis("share of the chips' time, %", low=0, high=100), marked=[list(found).index(fleet.mode)]
    )
    text = f"Of {fleet.chips:,} chips; in bold, this plan."
    heads = ("", "goodput, %", "waiting, %", "stopped, %", "uptime, %")
    uptime = [100 - each.all_stopped for each in values]
    rows = rows_of(labels, (goodput, waiting, stopped, uptime), "{:.2f}".format)
    return Picture("Where the time goes", text, figure, heads, rows)


# --------------------------------------------------------------------------------------------------------------- hours

HOUR_S = 3600.0
SLOWEST_LINK, FASTEST_LINK, LINK_STEPS = 0.1, 1000.0, 32
"""Range of the axis in Gbit/s, extended to the requested links, and its number of steps."""

Found = Sequence[tuple[str, TrainingPlan, WallClock]]


def hours_pictures(found: Found) -> list[Picture]:
    """Draw hours by phase, and hours against the link, of plans with their network across sites and wall clock."""
    return [_phases(found), _against_link(found)]


def plan_title(plan: TrainingPlan) -> str:
    """Return the method and its number of learners."""
    return "data parallel" if plan.learners == 1 else f"DiLoCo, M = {plan.learners}"


def _phases(found: Found) -> Picture:
    labels = [f"{network}: {plan_title(plan)}" for network, plan, _ in found]
    seconds = [(each.compute_s, each.within_s, each.across_s, each.total_s) for _, _, each in found]
    columns = [[each / HOUR_S for each in column] for column in zip(*seconds, strict=True)]
    phases = [
        Bars("computing", columns[0], drawing.COMPUTING),
        Bars("reducing within a learner", columns[1], drawing.VIOLET),
        Bars("reducing across sites", columns[2], drawing.WAITING),
    ]
    text = f"{short(found[0][1].num_parameters, 3)} parameters on {found[0][1].chips:,} chips; nothing overlaps."
    heads = ("network across sites: method", "computing, h", "within, h", "across, h", "in all, h")
    figure = bars(labels, phases, Axis("hours", low=0))
    return Picture("Hours by phase", text, figure, heads, rows_of(labels, columns, significant))


def _against_link(found: Found) -> Picture:
    plans = list({plan.learners: plan for _, plan, _ in found}.values())
    asked = [plan.across.bit_per_s / 1e9 for _, plan, _ in found]
    gbit_per_s = steps_between(min(SLOWEST_LINK, *asked), max(FASTEST_LINK, *asked), LINK_STEPS)
    colours = drawing.of_learners([plan.learners for plan in plans]) | {1: drawing.METHODS["data-parallel"]}
    drawn = []
    for plan in plans:
        links = [Link(1e9 * rate, plan.across.latency_s) for rate in gbit_per_s]
        hours = [wall_clock(replace(plan, across=link)).total_s / HOUR_S for link in links]
        drawn.append(Line(plan_title(plan), gbit_per_s, hours, colours[plan.learners]))
    latency_ms = plans[0].across.latency_s * 1e3
    text = f"Latency of {latency_ms:g} ms. To the right of the bend the hours do not depend on the link."
    heads, marks = ("Gbit/s", *(f"{each.label}, h" for each in drawn)), slice(0, None, 8)
    rows = rows_of([short(rate, 3) for rate in gbit_per_s[marks]], [each.y[marks] for each in drawn], significant)
    figure = lines(drawn, Axis("bandwidth across sites, Gbit/s", log=True), Axis("hours", log=True))
    return Picture("Hours against the link across sites", text, figure, heads, rows)


# -------------------------------------------------------------------------------------------------------- scaling laws

NUM_SHOWN, NUM_DRAWN = 8, 32
"""Steps from the smallest model to the largest, in the table and in a curve."""
MEASURED = (
    "Power laws, measured from 35M to 2.4B parameters with 1, 2, 4 and 8 learners at 20 tokens per parameter; beyond "
    "that they are extrapolated."
)


def scaling_pictures(here: ScalingEstimate) -> list[Picture]:
    """Draw loss and penalty by model size, within and beyond the measured range."""
    size = here.num_parameters
    shown = sorted({size, *steps_between(*PARAMETERS, NUM_SHOWN)})
    sizes = sorted({*shown, *steps_between(shown[0], shown[-1], NUM_DRAWN)})
    kinds = sorted({*LEARNERS, here.num_learners})
    colours = drawing.of_learners(kinds)
    reference = [DATA_PARALLEL_LOSS(n) for n in sizes]
    losses = [Line("data parallel", sizes, reference, drawing.METHODS["data-parallel"])]
    losses += [Line(f"M = {m}", sizes, [LOSS(n, m) for n in sizes], colours[m]) for m in kinds]
    penalties = [
        replace(each, y=[100 * (loss / least - 1) for loss, least in zip(each.y, reference, strict=True)])
        for each in losses[1:]
    ]

    def picture(title: str, text: str, curves: list[Line], at: float, label: str, unit: str, digits: int) -> Picture:
        axis = Axis("parameters", log=True, band=(*PARAMETERS, "measured sizes"))
        figure = lines([*curves, Line("this model", [size], [at], drawing.INK, style="o")], axis, Axis(label))
        columns = [[each.y[sizes.index(n)] for n in shown] for each in curves]
        rows = rows_of([short(n, 3) for n in shown], columns, f"{{:.{digits}f}}".format)
        return Picture(title, text, figure, ("parameters", *(f"{each.label}{unit}" for each in curves)), rows)

    loss, penalty = "held-out loss, nats per token", "loss above data parallel, %"
    fits = f"{MEASURED} The error of the fits is up to one point here."
    return [
        picture("Loss by the scaling laws", MEASURED, losses, here.loss, loss, "", 3),
        picture("Loss above data parallel", fits, penalties, here.loss_penalty_percent, penalty, ", %", 2),
    ]


# -------------------------------------------------------------------------------------------------------------- advice

FAR = 20
"""Ratio of hours above which their axis is logarithmic."""

Ranked = Sequence[tuple[int, RunEstimate]]


def mark(rank: int, choose: int) -> str:
    """Return the role of a rank: recommended, chosen instead with --choose, or none."""
    return "recommended" if rank == 1 else "chosen" if rank == choose else ""


def numbers(inputs: AdviceInputs, estimate: RunEstimate, no_price: str) -> tuple[str, ...]:
    """Return utilisation, hours, bytes, money and loss for a table."""
    percent = estimate.penalty.percent
    return (
        f"{100 * inputs.utilization(estimate):.1f} %", significant(estimate.hours), SIZE.show(estimate.total_bytes),
        no_price if estimate.usd is None else f"{estimate.usd:,.0f}",
        "unknown" if percent is None else f"{percent:+.1f} %",
    )  # fmt: skip


def advice_pictures(inputs: AdviceInputs, shown: Ranked, choose: int) -> list[Picture]:
    """Draw hours and utilisation of the `shown` ranks, with the recommended one marked."""
    labels, names = [], []
    for rank, each in shown:
        status, role = penalty_status(inputs, each), mark(rank, choose)
        notes = [role] * bool(role) + [f"loss {status}"] * (status != "allowed")
        title = ": ".join([each.setting.title, *([", ".join(notes)] if notes else [])])
        labels.append(f"{title}\n{each.setting.detail}")
        names.append(f"{each.setting.label}{f' ({role})' if role else ''}")
    marked = [row for row, (rank, _) in enumerate(shown) if mark(rank, choose)]
    rows = [(name, *numbers(inputs, each, no_price="")) for name, (_, each) in zip(names, shown, strict=True)]
    colours = [drawing.METHODS[each.setting.method] for _, each in shown]
    hours = [each.hours for _, each in shown]
    far = max(hours) > FAR * min(hours)
    hours_axis = Axis("hours until the tokens are trained", log=far, low=None if far else 0.0)
    percents = [100 * inputs.utilization(each) for _, each in shown]
    busy_axis = Axis("computing, % of the time of all accelerators", low=0.0, ticks=(0, 25, 50, 75, 100))
    heads = ("method", "computing", "hours", "bytes in all", "USD", "loss")
    text = (
        "The best setting of each method: those with an allowed loss penalty, then those with a higher one, then those "
        f"with an unknown one. In bold: the recommended one{', and the chosen' * (choose > 1)}."
    )
    drawn = bars(labels, [Bars("hours", hours, colours, significant)], hours_axis, marked=marked)
    busy = bars(labels, [Bars("computing", percents, colours, "{:.1f} %".format)], busy_axis, marked=marked)
    return [
        Picture("Hours", text, drawn, heads, rows),
        Picture("Utilisation", "Share of time in which the accelerators compute.", busy, heads[:2],
                [row[:2] for row in rows]),
    ]  # fmt: skip
