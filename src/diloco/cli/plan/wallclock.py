"""`diloco plan wallclock`: hours of a training, by what they go into."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.cli.plan._model import parameters_of
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.planning.training_time import Link, TrainingPlan, WallClock

    Found = list[tuple[str, TrainingPlan, WallClock]]


class PaperNetwork(StrEnum):
    """The paper's networks across sites."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


def command(
    chips: Annotated[int, typer.Option(min=1, help="Of all learners together.")],
    batch_tokens: Annotated[float, typer.Option(help="Tokens of a step, over all learners.")],
    model: Annotated[
        str | None,
        typer.Option(help="1b, 10b, 100b, llama-405b, deepseek-v3, a .toml file or a transformers config.json."),
    ] = None,
    parameters: Annotated[float | None, typer.Option(help="Instead of --model.")] = None,
    tokens: Annotated[float | None, typer.Option(help="To train on. Default: 20 for every parameter.")] = None,
    learners: Annotated[str, typer.Option(help="Numbers of learners to compare; 1 is data parallel.")] = "1,2,4,8",
    sync_every: Annotated[int, typer.Option(min=1, metavar="H", help="Inner steps between two synchronisations.")] = 30,
    codec: Annotated[
        str, typer.Option(help="Of the outer gradients: bf16, e3m0, int4, …; gradients are bf16.")
    ] = "bf16",
    network: Annotated[
        PaperNetwork | None,
        typer.Option(help="Across sites: 400, 100 or 10 Gbit/s with 0.1, 1 or 10 ms. Default: all three."),
    ] = None,
    across: Annotated[str | None, typer.Option(help='Your own link across sites, for example "1 Gbit/s".')] = None,
    across_latency: Annotated[str | None, typer.Option(help='Of it, for example "20 ms". Default: 0.')] = None,
    within: Annotated[str, typer.Option(help="The network of the chips of a learner.")] = "400 Gbit/s",
    within_latency: Annotated[str, typer.Option(help="Of it.")] = "0.1 ms",
    flops: Annotated[str, typer.Option(help="What a chip achieves.")] = "300 TFLOP/s",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write pictures there: PNG, and one HTML page.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object per network and number of learners.")
    ] = False,
) -> None:
    """Hours of computing, of reducing within a learner and across sites, for data parallel and DiLoCo.

    The model of the scaling-law paper (arXiv 2503.09799), in which nothing overlaps.
    """
    from diloco.planning.pictures import require
    from diloco.planning.training_time import Link, TrainingPlan, wall_clock
    from diloco.planning.units import COMPUTE, RATE, TIME
    from diloco.planning.wire import wire_format

    if out is not None:
        require()
    num_parameters = parameters_of(model, parameters)
    inside = Link(RATE.parse(within, "--within", positive=True), TIME.parse(within_latency, "--within-latency"))
    rate, bits = COMPUTE.parse(flops, "--flops", positive=True), wire_format(codec).bits_per_value
    found: Found = []
    for name, link in _links(network, across, across_latency).items():
        for number in _numbers(learners):
            job = TrainingPlan(
                num_parameters, 20 * num_parameters if tokens is None else tokens, batch_tokens, chips, number, sync_every,
                inside, link, rate, outer_bits=bits,
            )  # fmt: skip
            found.append((name, job, wall_clock(job)))
    if as_json:
        typer.echo(json.dumps([_plain(*each) for each in found], indent=1))
    else:
        _print(found)
    if out is not None:
        _draw(found, out)


def _links(network: PaperNetwork | None, across: str | None, latency: str | None) -> "dict[str, Link]":
    from diloco.planning.training_time import NETWORKS, Link
    from diloco.planning.units import RATE, TIME

    if across is None:
        if latency is not None:
            raise ConfigError("--across-latency is of your own link; add --across, or leave it out.")
        return dict(NETWORKS) if network is None else {network.value: NETWORKS[network]}
    if network is not None:
        raise ConfigError("--network names a link and --across gives one; leave one of them out.")
    rate = RATE.parse(across, "--across", positive=True)
    return {RATE.show(rate): Link(rate, 0.0 if latency is None else TIME.parse(latency, "--across-latency"))}


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--learners {text!r} is not a list of whole numbers; write for example 1,2,4.") from None


def _plain(network: str, job: "TrainingPlan", clock: "WallClock") -> dict[str, Any]:
    return {
        "network": network, "method": "data-parallel" if job.learners == 1 else "diloco", "learners": job.learners,
        "hours": clock.total_s / 3600, "compute_s": clock.compute_s, "within_s": clock.within_s, "across_s": clock.across_s,
        "total_s": clock.total_s, "utilization_percent": 100 * clock.utilization, "steps": clock.steps,
        "across_bits_per_chip": clock.across_bits, "parameters": job.num_parameters, "tokens": job.tokens,
        "batch_tokens": job.batch_tokens, "chips": job.chips, "sync_every": job.sync_every, "outer_bits_per_value": job.outer_bits,
        "across_bit_per_s": job.across.bit_per_s, "across_latency_s": job.across.latency_s,
        "within_bit_per_s": job.within.bit_per_s, "within_latency_s": job.within.latency_s, "flop_per_s": job.flop_per_s,
    }  # fmt: skip


def _print(found: "Found") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from diloco.planning.training_time_pictures import title
    from diloco.planning.units import SIZE, significant

    console, job = Console(highlight=False), found[0][1]
    console.print(
        f"{job.num_parameters:.3g} parameters, {job.tokens:.3g} tokens, steps of {job.batch_tokens:.3g}, {job.chips:,} chips, "
        f"H = {job.sync_every}",
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for head in ("network", "method"):
        table.add_column(head)
    for head in ("hours", "compute", "within", "across", "busy", "sent"):
        table.add_column(head, justify="right", no_wrap=True)
    before = ""
    for network, each, clock in found:
        seconds = (clock.total_s, clock.compute_s, clock.within_s, clock.across_s)
        table.add_row(
            "" if network == before else network, title(each), *(significant(each_s / 3600) for each_s in seconds),
            f"{100 * clock.utilization:.0f} %", SIZE.show(clock.across_bits / 8),
        )  # fmt: skip
        before = network
    console.print(table)
    console.print(
        "Hours of computing and of reductions within a learner and across sites, none of which overlap; busy: the part that is "
        "computing; sent: by a chip, across sites.",
        style="dim",
    )


def _draw(found: "Found", out: Path) -> None:
    from diloco.planning.pictures import write
    from diloco.planning.training_time_pictures import pictures

    lead = (
        f"{found[0][1].num_parameters:.3g} parameters, {found[0][1].tokens:.3g} tokens. Made by diloco plan wallclock."
    )
    for file in write(out, "wallclock", "Wall clock", lead, pictures(found)):
        typer.echo(f"wrote {file}", err=True)
