"""`diloco plan utilization`: what link keeps the learners computing."""

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.planning.models import Workload
    from diloco.planning.settings import Setting

TARGETS = "50,80,90,95,99"
DIGITS = 6
"""Significant digits of what is printed as JSON; the search goes no further."""


def command(
    model: Annotated[
        str, typer.Option(help="1b, 10b, 100b, llama-405b, deepseek-v3, a .toml file or a transformers config.json.")
    ],
    method: Annotated[str, typer.Option(help="data-parallel, diloco, streaming, eager or decoupled.")] = "streaming",
    sync_every: Annotated[
        int | None, typer.Option(metavar="H", help="Inner steps between two synchronisations.")
    ] = None,
    overlap: Annotated[int | None, typer.Option(metavar="N", help="Inner steps a send may take; eager: H.")] = None,
    fragments: Annotated[int | None, typer.Option(metavar="P", help="Fragments; three layers each by default.")] = None,
    codec: Annotated[str, typer.Option(help="What is sent: fp32, bf16, e3m0, int4, 2bit, topk-128-2bit, …")] = "bf16",
    codec_down: Annotated[
        str | None, typer.Option(help="What comes back, on the other direction; by default a reduction is one pass.")
    ] = None,
    latency: Annotated[str | None, typer.Option(help='Of each pass, for example "20 ms".')] = None,
    step_time: Annotated[str | None, typer.Option(help='Of an inner step, for example "310 ms".')] = None,
    targets: Annotated[str | None, typer.Option(help="Utilisations in percent; 50,80,90,95,99 by default.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help='Say what this link comes to instead, for example "1 Gbit/s".')
    ] = None,
    convention: Annotated[
        str, typer.Option(help="steady, or a paper's own: streaming-diloco, scaling-laws.")
    ] = "steady",
    why: Annotated[bool, typer.Option("--why", help="Explain the number for the last target.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per target.")] = False,
) -> None:
    """What bandwidth keeps the learners computing, or how much they compute on a link."""
    from diloco.planning.conventions import CONVENTIONS
    from diloco.planning.settings import setting_for
    from diloco.planning.units import TIME

    latency_s = 0.0 if latency is None else TIME.parse(latency, "--latency")
    step_s = None if step_time is None else TIME.parse(step_time, "--step-time", positive=True)
    options: dict[str, Any] = {
        "sync_every": sync_every, "overlap": overlap, "num_fragments": fragments, "up": codec, "down": codec_down, "latency_s": latency_s,
    }  # fmt: skip
    percentages = _percentages(targets or TARGETS)
    if targets is not None and bandwidth is not None:
        raise ConfigError("--targets asks for a bandwidth and --bandwidth gives one; leave one of them out.")
    if convention not in CONVENTIONS:
        raise ConfigError(f"there is no convention {convention!r}; choose {', '.join(CONVENTIONS)}.")
    if convention != "steady":
        _refuse_beside(convention, {"--step-time": step_time, "--bandwidth": bandwidth, "--why": why or None})
        answers, setting, workload = _published(convention, model, method, percentages, options)
    else:
        from diloco.planning.models import load_workload

        workload = load_workload(model, step_s)
        setting = setting_for(workload, method, **options)
        answers = _steady(workload, setting, percentages, bandwidth)
    described = _described(workload, setting, convention)
    if as_json:
        typer.echo(json.dumps([{**answer, **described} for answer in answers], indent=1))
        return
    _print(answers, workload, setting, convention)
    if why:
        _print_why(answers, workload, setting)


def _percentages(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--targets {text!r} is not a list of percentages; write for example 50,80,95.") from None
    for value in values:
        if not 0 < value <= 100:
            raise ConfigError(f"a target of {value:g} % cannot be; give percentages above 0 and up to 100.")
    return values


def _refuse_beside(convention: str, given: dict[str, object]) -> None:
    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{option} has no effect on the published tables of {convention}; leave it out, or use --convention steady."
            )


def _published(
    convention: str, model: str, method: str, percentages: list[float], options: dict[str, Any]
) -> tuple[list[dict[str, Any]], "Setting", "Workload"]:
    from diloco.planning.conventions import published_run

    run = published_run(convention, model, method, **options)
    cells = run.printed([percent / 100 for percent in percentages])
    answers: list[dict[str, Any]] = []
    for percent, cell in zip(percentages, cells, strict=True):
        shown = None if cell.gbit_per_s is None else round(round(cell.gbit_per_s, 2), 1)
        answers.append({"target": _plain(percent), "gbit_per_s": shown, "printed": cell.text})
    return answers, run.setting, run.workload


def _steady(
    workload: "Workload", setting: "Setting", percentages: list[float], bandwidth: str | None
) -> list[dict[str, Any]]:
    from diloco.planning.units import RATE
    from diloco.planning.utilization import required_bit_per_s, utilization

    if bandwidth is not None:
        rate = RATE.parse(bandwidth, "--bandwidth", positive=True)
        return [
            {"gbit_per_s": _rounded(rate / 1e9), "utilization": _rounded(100 * utilization(workload, setting, rate))}
        ]
    found = [required_bit_per_s(workload, setting, percent / 100) for percent in percentages]
    return [
        {"target": _plain(percent), "gbit_per_s": None if math.isinf(rate) else _rounded(rate / 1e9)}
        for percent, rate in zip(percentages, found, strict=True)
    ]


def _plain(percent: float) -> float:
    return int(percent) if percent == int(percent) else percent


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _described(workload: "Workload", setting: "Setting", convention: str) -> dict[str, Any]:
    return {
        "convention": convention, "model": workload.name, "parameters": workload.num_parameters, "layers": workload.num_layers,
        "step_s": workload.step_s, "method": setting.method, "sync_every": setting.sync_every, "overlap": setting.overlap,
        "fragments": setting.num_fragments, "codec": setting.up, "codec_down": setting.down, "latency_s": setting.latency_s,
    }  # fmt: skip


def _print(answers: list[dict[str, Any]], workload: "Workload", setting: "Setting", convention: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from diloco.planning.units import RATE, TIME

    console = Console(highlight=False)
    console.print(
        f"[bold]{workload.name}[/], {setting.method}, H = {setting.sync_every}, τ = {setting.overlap}, P = {setting.num_fragments}, "
        f"{setting.up}, steps of {TIME.show(workload.step_s)}, {convention}"
    )
    table = Table(box=SIMPLE_HEAD)
    table.add_column("computing", justify="right")
    table.add_column("link", justify="right")
    for answer in answers:
        percent = answer.get("target", answer.get("utilization"))
        if "printed" in answer:
            shown = f"{answer['printed']} Gbit/s"
        elif answer["gbit_per_s"] is None:
            shown = "never: latency alone costs more"
        else:
            shown = RATE.show(answer["gbit_per_s"] * 1e9)
        table.add_row(f"{percent:.4g} %", shown)
    console.print(table)


def _print_why(answers: list[dict[str, Any]], workload: "Workload", setting: "Setting") -> None:
    from rich.console import Console

    from diloco.planning.explain import why

    reached = [answer["gbit_per_s"] for answer in answers if answer["gbit_per_s"] is not None]
    console = Console(highlight=False)
    for sentence in why(workload, setting, reached[-1] * 1e9 if reached else math.inf):
        console.print(f"- {sentence}")
