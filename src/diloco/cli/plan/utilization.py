"""`diloco plan utilization`: the link that a utilisation needs, or the utilisation on a link."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco.cli._shared import PicturesPage, make_table, parse_list, say_written
from diloco.errors import ConfigError
from diloco.planning.bandwidth import GraphLinkModel, LinkModel, SyncerLinkModel, required_bit_per_s
from diloco.planning.discrete_events import Merging
from diloco.planning.pictures import link_pictures
from diloco.planning.published_tables import CONVENTIONS, published_run
from diloco.planning.settings import Setting, setting_for
from diloco.planning.units import RATE, TIME
from diloco.planning.workload import Workload, load_workload
from diloco.report.frame import require_html, write_drawings

TARGETS = "50,80,90,95,99"
DIGITS = 6
"""Significant digits of JSON values; the search is no more precise."""
DECOUPLED_LEARNERS = 8
"""The paper's."""

Answers = list[dict[str, Any]]

DECOUPLED_COLUMNS = {
    "period_steps": "H achieved", "stale_steps": "answer's age, steps", "contributors": "learners in a merge"
}  # fmt: skip
"""Further columns for decoupled learners, by key of an answer."""


def command(
    model: Annotated[
        str, typer.Option(help="1b, 10b, 100b, llama-405b, deepseek-v3, a .toml file or a transformers config.json.")
    ],
    method: Annotated[str, typer.Option(help="data-parallel, diloco, streaming, eager or decoupled.")] = "streaming",
    sync_every: Annotated[
        int | None, typer.Option(metavar="H", help="Inner steps between two synchronisations.")
    ] = None,
    overlap: Annotated[int | None, typer.Option(metavar="N", help="Inner steps a send may take; eager: H.")] = None,
    fragments: Annotated[
        int | None, typer.Option(metavar="P", help="Fragments; of three layers each by default.")
    ] = None,
    codec: Annotated[
        str, typer.Option(help="Of contributions: fp32, bf16, e3m0, int4, 2bit, topk-128-2bit, …")
    ] = "bf16",
    codec_down: Annotated[
        str | None,
        typer.Option(help="Of updates, on the other direction. Without a syncer the default is one pass."),
    ] = None,
    latency: Annotated[str | None, typer.Option(help='Of each pass, for example "20 ms".')] = None,
    step_time: Annotated[str | None, typer.Option(help='Of an inner step, for example "310 ms".')] = None,
    learners: Annotated[
        int | None, typer.Option(metavar="M", help="M learners around a syncer, instead of reductions among learners.")
    ] = None,
    speeds: Annotated[str | None, typer.Option(help="Of the learners around a syncer, relative: 1,1,0.5.")] = None,
    syncer: Annotated[
        str | None, typer.Option(help='Link of each shard of the syncer, for example "10 Gbit/s".')
    ] = None,
    shards: Annotated[int | None, typer.Option(help="Shards of the syncer.")] = None,
    merge: Annotated[
        str | None, typer.Option(help='Merge rate of a shard, for example "1 GB/s"; unlimited by default.')
    ] = None,
    targets: Annotated[str | None, typer.Option(help=f"In percent; {TARGETS} by default.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help='Print the utilisation on this link instead, for example "1 Gbit/s".')
    ] = None,
    convention: Annotated[
        str, typer.Option(help="steady, or a paper's own: streaming-diloco, scaling-laws.")
    ] = "steady",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per target.")] = False,
    out: PicturesPage = None,
) -> None:
    """Bandwidth that a compute utilisation needs, or utilisation on a given link.

    Decoupled learners always compute; their percentages are of the planned pace of merges.
    """
    require_html(out)
    options: dict[str, Any] = {
        "sync_every": sync_every, "overlap": overlap, "num_fragments": fragments, "up": codec, "down": codec_down,
        "latency_s": 0.0 if latency is None else TIME.parse(latency, "--latency"),
    }  # fmt: skip
    if targets is not None and bandwidth is not None:
        raise ConfigError("--targets asks for a bandwidth and --bandwidth gives one; leave one of them out.")
    percentages = _percentages(TARGETS if targets is None else targets)
    topology = {"--learners": learners, "--speeds": speeds, "--syncer": syncer, "--shards": shards, "--merge": merge}
    if convention not in CONVENTIONS:
        raise ConfigError(f"there is no convention {convention!r}; choose {', '.join(CONVENTIONS)}.")
    if convention != "steady":
        own = {"--step-time": step_time, "--bandwidth": bandwidth, "--out": out}
        _refuse_beside(convention, {**own, **topology})
        answers, workload, setting = _published(convention, model, method, percentages, options)
        link_model, measure, never = None, "computing", ""
    else:
        link_model = _link_model(model, method, step_time, options, topology)
        answers = _steady(link_model, percentages, bandwidth)
        workload, setting = link_model.workload, link_model.setting
        measure, never = link_model.measure, link_model.never
    if as_json:
        _print_json(answers, workload, setting, convention, measure)
    else:
        _print(answers, workload, setting, convention, measure, never)
    if out is not None and link_model is not None:
        _draw(answers, link_model, out)


def _percentages(text: str) -> tuple[float, ...]:
    values = parse_list("--targets", text, float, "percentages", "50,80,95")
    for value in values:
        if not 0 < value <= 100:
            raise ConfigError(f"a target of {value:g} % is out of range; give percentages above 0 and up to 100.")
    return values


def _refuse_beside(convention: str, given: dict[str, object]) -> None:
    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{option} has no effect on the published tables of {convention}; leave it out, or use --convention "
                "steady."
            )


def _link_model(
    model: str, method: str, step_time: str | None, options: dict[str, Any], topology: dict[str, Any]
) -> LinkModel:
    step_s = None if step_time is None else TIME.parse(step_time, "--step-time", positive=True)
    workload = load_workload(model, step_s)
    setting = setting_for(workload, method, **options)
    if setting.method != "decoupled" and all(value is None for value in topology.values()):
        return GraphLinkModel(workload, setting)
    setting = replace(setting, down=setting.down or setting.up)  # a syncer always sends updates
    return _syncer_model(workload, setting, topology)


def _syncer_model(workload: Workload, setting: Setting, topology: dict[str, Any]) -> SyncerLinkModel:
    """Return the model of learners around a syncer with these options."""
    num, text, shards = topology["--learners"], topology["--speeds"], topology["--shards"]
    if shards is not None and shards < 1:
        raise ConfigError(f"a syncer has at least one shard, not {shards}; give --shards 1 or more.")
    if shards is not None and topology["--syncer"] is None and topology["--merge"] is None:
        raise ConfigError(f"--shards {shards} has no effect without a limit of each; add --syncer or --merge.")
    if num is not None and num < 1:
        raise ConfigError(f"{num} learners train nothing; give --learners 1 or more.")
    if text is None:
        speeds = (1.0,) * (DECOUPLED_LEARNERS if num is None else num)
    else:
        speeds = parse_list("--speeds", text, float, "numbers", "1,1,0.5")
        if num not in (None, len(speeds)):
            raise ConfigError(f"--speeds {text} is of {len(speeds)} learners, not of {num}; give one for each.")
    rate, merged = (
        math.inf if topology[option] is None else (shards or 1) * RATE.parse(topology[option], option, positive=True)
        for option in ("--syncer", "--merge")
    )
    return SyncerLinkModel(workload, setting, speeds, rate, Merging(bytes_per_s=merged / 8))


def _published(
    convention: str, model: str, method: str, percentages: tuple[float, ...], options: dict[str, Any]
) -> tuple[Answers, Workload, Setting]:
    run = published_run(convention, model, method, **options)
    cells = run.cells([percent / 100 for percent in percentages])
    answers: Answers = []
    for percent, cell in zip(percentages, cells, strict=True):
        shown = None if cell.gbit_per_s is None else round(round(cell.gbit_per_s, 2), 1)
        answers.append({"target": _plain(percent), "gbit_per_s": shown, "printed": cell.text})
    return answers, run.workload, run.setting


def _steady(link_model: LinkModel, percentages: tuple[float, ...], bandwidth: str | None) -> Answers:
    if bandwidth is not None:
        rate = RATE.parse(bandwidth, "--bandwidth", positive=True)
        value = _rounded(100 * link_model.value(rate))
        return [{"gbit_per_s": _rounded(rate / 1e9), link_model.measure: value, **link_model.details(rate)}]
    answers: Answers = []
    rates = required_bit_per_s(link_model, [percent / 100 for percent in percentages])
    for percent, rate in zip(percentages, rates, strict=True):
        gbit_per_s = None if math.isinf(rate) else _rounded(rate / 1e9)
        answers.append({"target": _plain(percent), "gbit_per_s": gbit_per_s, **link_model.details(rate)})
    return answers


def _plain(percent: float) -> float:
    return int(percent) if percent == int(percent) else percent


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _print_json(answers: Answers, workload: Workload, setting: Setting, convention: str, measure: str) -> None:
    """Print the answers, each with its inputs."""
    asked = {
        "measure": measure, "convention": convention, "model": workload.name, "parameters": workload.num_parameters,
        "layers": workload.num_layers, "step_s": workload.step_s, "method": setting.method,
        "sync_every": setting.sync_every, "overlap": setting.overlap, "fragments": setting.num_fragments,
        "codec": setting.up, "codec_down": setting.down, "latency_s": setting.latency_s,
    }  # fmt: skip
    typer.echo(json.dumps([{**answer, **asked} for answer in answers], indent=1))


def _print(
    answers: Answers, workload: Workload, setting: Setting, convention: str, measure: str, never: str = ""
) -> None:
    """Print a table, and the reason why a target is unreachable."""
    console = Console(highlight=False)
    console.print(
        f"[bold]{workload.name}[/], {setting}, steps of {TIME.show(workload.step_s)}, {convention}", soft_wrap=True
    )
    shown = [key for key in DECOUPLED_COLUMNS if measure == "pace" and any(key in answer for answer in answers)]
    rows, is_unreached = [], False
    for answer in answers:
        gbit_per_s = answer["gbit_per_s"]
        if "printed" in answer:
            link = f"{answer['printed']} Gbit/s"
        else:
            link = "never" if gbit_per_s is None else RATE.show(gbit_per_s * 1e9)
            is_unreached |= gbit_per_s is None
        more = (f"{answer[key]:.4g}" if key in answer else "" for key in shown)
        percent = answer.get("target", answer.get(measure))  # the target, or the value on a given link
        rows.append((f"{percent:.4g} %", link, *more))
    heads = (measure, "link", *(DECOUPLED_COLUMNS[key] for key in shown))
    console.print(make_table(heads, rows, num_text=0))
    if is_unreached:
        console.print(f"never: {never}.")


def _draw(answers: Answers, link_model: LinkModel, out: Path) -> None:
    """Write a page. Raises ConfigError if no link reaches any target."""
    reached = {
        f"{answer['target']:g} %" if "target" in answer else "this link": 1e9 * answer["gbit_per_s"]
        for answer in answers
        if answer["gbit_per_s"] is not None
    }
    if not reached:
        raise ConfigError("no link reaches any target, so there is nothing to draw; lower --targets.")
    title = f"{link_model.workload.name}, {link_model.setting.method}"
    text = "Utilisation against bandwidth, and the activities of one period. Made by diloco plan utilization."
    write_drawings(out, title, text, link_pictures(link_model, reached))
    say_written([out])
