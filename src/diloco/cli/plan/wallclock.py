"""`diloco plan wallclock`: hours of a training, by phase."""

from typing import Annotated, Any

import typer
from rich.console import Console

from diloco.cli._options import Json, Model, Parameters, PicturesPage, SyncEvery, parse_list
from diloco.cli._output import make_table, print_result, say_written
from diloco.core.codecs.formats import wire_format
from diloco.errors import ConfigError
from diloco.planning.pictures import hours_pictures, plan_title
from diloco.planning.training_time import NETWORKS, Link, TrainingPlan, WallClock, wall_clock
from diloco.planning.units import COMPUTE, RATE, SIZE, TIME, significant
from diloco.planning.workload import parameters_of
from diloco.report.drawing import short
from diloco.report.frame import require_html, write_drawings

Found = list[tuple[str, TrainingPlan, WallClock]]


def command(
    chips: Annotated[int, typer.Option(min=1, help="Chips of all learners together.")],
    batch_tokens: Annotated[float, typer.Option(help="Tokens of a step, over all learners.")],
    model: Model = None,
    parameters: Parameters = None,
    tokens: Annotated[float | None, typer.Option(help="Training tokens; default: 20 for every parameter.")] = None,
    learners: Annotated[str, typer.Option(help="Numbers of learners to compare; 1 is data parallel.")] = "1,2,4,8",
    sync_every: SyncEvery = 30,
    codec: Annotated[str, typer.Option(help="Codec of outer gradients: bf16, e3m0, int4, …")] = "bf16",
    across: Annotated[
        str | None,
        typer.Option(help="Rate of your link across sites. Default: 400, 100 and 10 Gbit/s with 0.1, 1 and 10 ms."),
    ] = None,
    across_latency: Annotated[str | None, typer.Option(help='Latency of it, such as "20 ms"; default 0.')] = None,
    within: Annotated[str, typer.Option(help="Rate of the network within a learner.")] = "400 Gbit/s",
    within_latency: Annotated[str, typer.Option(help="Latency of it.")] = "0.1 ms",
    flops: Annotated[str, typer.Option(help="Achieved rate of a chip.")] = "300 TFLOP/s",
    out: PicturesPage = None,
    as_json: Json = False,
) -> None:
    """Hours of computing, and of reductions within learners and across sites, for data parallel and DiLoCo.

    The model of the scaling-law paper (arXiv 2503.09799), without overlap.
    """
    require_html(out)
    num_parameters = parameters_of(model, parameters)
    if tokens is None:
        tokens = 20 * num_parameters
    inside = Link(RATE.parse(within, "--within", positive=True), TIME.parse(within_latency, "--within-latency"))
    rate, bits = COMPUTE.parse(flops, "--flops", positive=True), wire_format(codec).bits_per_value
    found: Found = []
    for name, link in _links(across, across_latency).items():
        for number in parse_list("--learners", learners, int, "whole numbers", "1,2,4"):
            plan = TrainingPlan(
                num_parameters, tokens, batch_tokens, chips, number, sync_every, inside, link, rate, outer_bits=bits
            )
            found.append((name, plan, wall_clock(plan)))
    print_result(as_json, [_plain(*each) for each in found], lambda: _print(found), indent=1)
    if out is not None:
        lead = f"{short(num_parameters, 3)} parameters, {short(tokens, 3)} tokens. Made by diloco plan wallclock."
        write_drawings(out, "Wall clock", lead, hours_pictures(found))
        say_written(out)


def _links(across: str | None, latency: str | None) -> dict[str, Link]:
    if across is None:
        if latency is not None:
            raise ConfigError("--across-latency has no effect without --across; add --across, or drop it.")
        return dict(NETWORKS)
    rate = RATE.parse(across, "--across", positive=True)
    return {RATE.show(rate): Link(rate, 0.0 if latency is None else TIME.parse(latency, "--across-latency"))}


def _plain(network: str, plan: TrainingPlan, clock: WallClock) -> dict[str, Any]:
    return {
        "network": network, "method": "data-parallel" if plan.learners == 1 else "diloco", "learners": plan.learners,
        "hours": clock.total_s / 3600, "compute_s": clock.compute_s, "within_s": clock.within_s,
        "across_s": clock.across_s, "total_s": clock.total_s, "utilization_percent": 100 * clock.utilization,
        "steps": clock.steps, "across_bits_per_chip": clock.across_bits, "parameters": plan.num_parameters,
        "tokens": plan.tokens, "batch_tokens": plan.batch_tokens, "chips": plan.chips, "sync_every": plan.sync_every,
        "outer_bits_per_value": plan.outer_bits, "across_bit_per_s": plan.across.bit_per_s,
        "across_latency_s": plan.across.latency_s, "within_bit_per_s": plan.within.bit_per_s,
        "within_latency_s": plan.within.latency_s, "flop_per_s": plan.flop_per_s,
    }  # fmt: skip


def _print(found: Found) -> None:
    rows, before = [], ""
    for network, plan, clock in found:
        seconds = (clock.total_s, clock.compute_s, clock.within_s, clock.across_s)
        hours = (significant(each_s / 3600) for each_s in seconds)
        busy, sent = f"{100 * clock.utilization:.0f} %", SIZE.show(clock.across_bits / 8)
        rows.append(("" if network == before else network, plan_title(plan), *hours, busy, sent))
        before = network
    console, plan = Console(highlight=False), found[0][1]
    console.print(
        f"{plan.num_parameters:.3g} parameters, {plan.tokens:.3g} tokens, steps of {plan.batch_tokens:.3g}, "
        f"{plan.chips:,} chips, H = {plan.sync_every}",
        soft_wrap=True,
    )
    heads = ("network", "method", "hours", "compute", "within", "across", "busy", "sent")
    console.print(make_table(heads, rows, num_text=2))
    console.print(
        "Hours of computing and of reductions within learners and across sites, without overlap; busy: the share of "
        "computing; sent: bytes of a chip across sites.",
        style="dim",
    )
