"""`diloco plan utilization`: the bandwidth that keeps the learners computing."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco.cli._options import PicturesPage, parse_list
from diloco.cli._output import make_table, print_result, say_written
from diloco.errors import ConfigError
from diloco.planning.bandwidth import GraphLinkModel, LinkModel, SyncerLinkModel, required_bit_per_s, required_of_syncer
from diloco.planning.exchange_plan import Merging
from diloco.planning.memory import learner_bytes, syncer_bytes
from diloco.planning.pictures import link_pictures
from diloco.planning.published_tables import CONVENTIONS, PublishedRun, published_run
from diloco.planning.settings import SAME_SHARE, ExpertSetting, Setting, setting_for
from diloco.planning.units import RATE, SIZE, TIME
from diloco.planning.workload import Workload, load_workload
from diloco.report.frame import require_html, write_drawings

TARGETS = "50,80,90,95,99"
DIGITS = 6
"""Significant digits of JSON output; the search is no more precise."""
DECOUPLED_LEARNERS = 8
"""As in the paper."""

ONE_LINK, ONE_MEMORY = "100 Gbit/s", "2 TB"
"""What one host is taken to have."""

Rows = list[dict[str, Any]]
Source = LinkModel | PublishedRun
"""What rows are computed with: a model, or the simulation of a published table."""

DECOUPLED_COLUMNS = {
    "period_steps": "H achieved", "stale_steps": "answer's age, steps", "contributors": "learners in a merge"
}  # fmt: skip
"""Additional columns for decoupled learners, by key of a row."""


def command(
    model: Annotated[
        str, typer.Option(help="1b, 10b, 100b, llama-405b, deepseek-v3, a .toml file or a transformers config.json.")
    ],
    method: Annotated[str, typer.Option(help="data-parallel, diloco, streaming, eager or decoupled.")] = "streaming",
    sync_every: Annotated[int | None, typer.Option(metavar="H", help="Inner steps between synchronisations.")] = None,
    overlap: Annotated[int | None, typer.Option(metavar="N", help="Inner steps a send may take; eager: H.")] = None,
    fragments: Annotated[int | None, typer.Option(metavar="P", help="Default: one for each three layers.")] = None,
    codec: Annotated[str, typer.Option(help="Codec up: fp32, bf16, e3m0, int4, 2bit, topk-128-2bit, …")] = "bf16",
    codec_down: Annotated[str | None, typer.Option(help="Codec down; default with a syncer: as up.")] = None,
    expert_groups: Annotated[
        int | None, typer.Option(metavar="G", help="Send a mixture's experts apart, in G groups, with a syncer.")
    ] = None,
    expert_every: Annotated[int | None, typer.Option(metavar="K", help="Send experts every K·H steps.")] = None,
    expert_codec: Annotated[str | None, typer.Option(help="Codec of experts, up and down; default: as others.")] = None,
    trained_groups: Annotated[
        int | None, typer.Option(metavar="N", help="Groups of experts that each learner trains; default: all.")
    ] = None,
    experts_held: Annotated[
        float | None, typer.Option(metavar="F", help="Share of the experts that each learner holds, in whole groups.")
    ] = None,
    latency: Annotated[str | None, typer.Option(help='Latency of each pass, for example "20 ms".')] = None,
    step_time: Annotated[str | None, typer.Option(help='Time of an inner step, for example "310 ms".')] = None,
    learners: Annotated[
        int | None, typer.Option(metavar="M", help="Use a syncer with M learners, instead of a reduction.")
    ] = None,
    speeds: Annotated[str | None, typer.Option(help="Relative speeds of learners with a syncer: 1,1,0.5.")] = None,
    syncer: Annotated[str | None, typer.Option(help='Link of a shard of the syncer, such as "10 Gbit/s".')] = None,
    shards: Annotated[int | None, typer.Option(help="Shards of the syncer.")] = None,
    syncer_memory: Annotated[
        str | None, typer.Option(help=f"With --experts-held: memory of the syncer's host; default {ONE_MEMORY}.")
    ] = None,
    merge: Annotated[str | None, typer.Option(help='Merge rate of a shard, such as "1 GB/s".')] = None,
    targets: Annotated[str | None, typer.Option(help=f"Target percentages; default {TARGETS}.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help='Evaluate this link instead, such as "1 Gbit/s".')] = None,
    convention: Annotated[str, typer.Option(help="steady, or a paper's: streaming-diloco, scaling-laws.")] = "steady",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per target.")] = False,
    out: PicturesPage = None,
) -> None:
    """The bandwidth that keeps the learners computing, or how much they compute on a given link.

    Decoupled learners always compute: their percentages are of the intended pace of merges.
    """
    require_html(out)
    options: dict[str, Any] = {
        "sync_every": sync_every, "overlap": overlap, "num_fragments": fragments, "up": codec, "down": codec_down,
        "latency_s": 0.0 if latency is None else TIME.parse(latency, "--latency"),
        "experts": _experts(
            expert_groups, every=expert_every, trained=trained_groups, codec=expert_codec, held=experts_held
        ),
    }  # fmt: skip
    if syncer_memory is not None and experts_held is None:
        raise ConfigError("--syncer-memory has no effect without --experts-held; add it, or drop the memory.")
    if targets is not None and bandwidth is not None:
        raise ConfigError("--targets asks for a bandwidth and --bandwidth gives one; drop one of them.")
    percentages = _percentages(TARGETS if targets is None else targets)
    topology = {"--learners": learners, "--speeds": speeds, "--syncer": syncer, "--shards": shards, "--merge": merge}
    if convention not in CONVENTIONS:
        raise ConfigError(f"there is no convention {convention!r}; choose {', '.join(CONVENTIONS)}.")
    if convention != "steady":
        own = {
            "--step-time": step_time, "--bandwidth": bandwidth, "--out": out, "--experts-held": experts_held,
            "--expert-groups": options.pop("experts"),
        }  # fmt: skip
        _refuse_beside(convention, {**own, **topology})
        source: Source
        source = run = published_run(convention, model, method, **options)
        rows = _published(run, percentages)
    else:
        source = _link_model(model, method, step_time, options, topology)
        rows = _steady(source, percentages, bandwidth)
    needs = {}
    if experts_held is not None and isinstance(source, SyncerLinkModel):
        needs = _needs(source, SIZE.parse(syncer_memory or ONE_MEMORY, "--syncer-memory", positive=True))
    plain = [{**row, **needs} for row in _plain_rows(rows, source, convention)]
    print_result(as_json, plain, lambda: _print(rows, source, convention, needs), indent=1)
    if out is not None and not isinstance(source, PublishedRun):
        _draw(rows, source, out)


def _experts(groups: int | None, **given: Any) -> ExpertSetting | None:
    given = {key: value for key, value in given.items() if value is not None}
    if groups is not None or "held" in given:
        return ExpertSetting(groups or 0, **given)
    if given:
        raise ConfigError("the options of experts have no effect without --expert-groups; add it, or drop them.")
    return None


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
                f"{option} has no effect on the published tables of {convention}; drop it, or use --convention steady."
            )


def _link_model(
    model: str, method: str, step_time: str | None, options: dict[str, Any], topology: dict[str, Any]
) -> LinkModel:
    step_s = None if step_time is None else TIME.parse(step_time, "--step-time", positive=True)
    workload = load_workload(model, step_s)
    setting = setting_for(workload, method, **options)
    is_reduction = setting.method != "decoupled" and setting.experts is None
    if is_reduction and all(value is None for value in topology.values()):
        return GraphLinkModel(workload, setting)
    setting = replace(setting, down=setting.down or setting.up)  # a syncer always sends updates down
    return _syncer_model(workload, setting, topology)


def _syncer_model(workload: Workload, setting: Setting, topology: dict[str, Any]) -> SyncerLinkModel:
    """Learners around a syncer, from the options."""
    num, text, shards = topology["--learners"], topology["--speeds"], topology["--shards"]
    for option in ("--learners", "--shards"):
        if topology[option] is not None and topology[option] < 1:
            raise ConfigError(f"{option} {topology[option]} is too few; give {option} 1 or more.")
    if shards is not None and topology["--syncer"] is None and topology["--merge"] is None:
        raise ConfigError(f"--shards {shards} has no effect without the rate of a shard; add --syncer or --merge.")
    if text is None:
        speeds = (1.0,) * (DECOUPLED_LEARNERS if num is None else num)
    else:
        speeds = parse_list("--speeds", text, float, "numbers", "1,1,0.5")
        if num not in (None, len(speeds)):
            raise ConfigError(f"--speeds {text} has {len(speeds)} speeds for {num} learners; give one for each.")
    if (held := setting.experts and setting.experts.held) and held * len(speeds) < 1 - SAME_SHARE:
        raise ConfigError(
            f"{len(speeds)} learners with a share of {held:.3g} each do not hold all experts; give --learners "
            f"{math.ceil(1 / held)} or more."
        )
    rate, merged = (
        math.inf if topology[option] is None else (shards or 1) * RATE.parse(topology[option], option, positive=True)
        for option in ("--syncer", "--merge")
    )
    return SyncerLinkModel(workload, setting, speeds, rate, Merging(bytes_per_s=merged / 8))


def _published(run: PublishedRun, percentages: tuple[float, ...]) -> Rows:
    rows: Rows = []
    for percent, cell in zip(percentages, run.cells([percent / 100 for percent in percentages]), strict=True):
        shown = None if cell.gbit_per_s is None else round(round(cell.gbit_per_s, 2), 1)
        rows.append({"target": _plain(percent), "gbit_per_s": shown, "printed": cell.text})
    return rows


def _steady(link_model: LinkModel, percentages: tuple[float, ...], bandwidth: str | None) -> Rows:
    if bandwidth is not None:
        rate = RATE.parse(bandwidth, "--bandwidth", positive=True)
        value = _rounded(100 * link_model.value(rate))
        return [{"gbit_per_s": _rounded(rate / 1e9), link_model.measure: value, **link_model.details(rate)}]
    rows: Rows = []
    rates = required_bit_per_s(link_model, [percent / 100 for percent in percentages])
    for percent, rate in zip(percentages, rates, strict=True):
        gbit_per_s = None if math.isinf(rate) else _rounded(rate / 1e9)
        rows.append({"target": _plain(percent), "gbit_per_s": gbit_per_s, **link_model.details(rate)})
    return rows


def _plain(percent: float) -> float:
    return int(percent) if percent == int(percent) else percent


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _plain_rows(rows: Rows, source: Source, convention: str) -> Rows:
    """Each row with the question, as plain values."""
    workload, setting = source.workload, source.setting
    asked = {
        "measure": source.measure, "convention": convention, "model": workload.name,
        "parameters": workload.num_parameters, "layers": workload.num_layers, "step_s": workload.step_s,
        "method": setting.method, "sync_every": setting.sync_every, "overlap": setting.overlap,
        "fragments": setting.num_fragments, "codec": setting.up, "codec_down": setting.down,
        "latency_s": setting.latency_s, "experts": setting.experts and asdict(setting.experts),
        **_bytes_per_step(source),
    }  # fmt: skip
    return [{**row, **asked} for row in rows]


def _bytes_per_step(source: Source) -> dict[str, float]:
    """Mean bytes that a learner sends and receives in an inner step, with a syncer."""
    if not isinstance(source, SyncerLinkModel):
        return {}
    exchange, every = source.exchange, source.setting.sync_every
    sizes = {"up_bytes_per_step": exchange.up_bytes, "down_bytes_per_step": exchange.down_bytes}
    return {key: exchange.per_interval(each) / every for key, each in sizes.items()}


def _needs(source: SyncerLinkModel, host_bytes: float) -> dict[str, Any]:
    """Bytes of a learner that holds a part of the experts, the syncer's needs, and what one host lacks of these."""
    workload, setting, num = source.workload, source.setting, len(source.speeds)
    assert setting.experts is not None
    whole = replace(setting, experts=replace(setting.experts, held=None))
    rate, (memory, storage) = required_of_syncer(source, 0.95), syncer_bytes(workload, setting, num)
    link = RATE.parse(ONE_LINK) if math.isinf(source.syncer_bit_per_s) else source.syncer_bit_per_s
    at_link, with_memory, words = f"a link of {RATE.show(link)}", f"{SIZE.show(host_bytes)} of memory", list[str]()
    if link < rate < math.inf:
        longer = math.ceil(setting.sync_every * rate / link)
        words.append(f"at {at_link}: raise --sync-every to about {longer}, or choose a --codec of fewer bits")
    if memory > host_bytes:
        drop = "" if setting.down == "fp32" else ", or drop the residual with --codec-down fp32"
        words.append(f"with {with_memory}, and a run has no second one: take a larger host{drop}")
    words = [f"one syncer does not suffice {each}" for each in words]
    return {
        "learners": num, "learner_bytes": learner_bytes(workload, setting),
        "learner_bytes_all_held": learner_bytes(workload, whole),
        "syncer_memory": memory, "syncer_storage": storage, "syncer_bit_per_s": None if math.isinf(rate) else rate,
        "syncer_words": words or [f"one syncer suffices, with {at_link} and {with_memory}"],
    }  # fmt: skip


def _print_needs(console: Console, needs: dict[str, Any]) -> None:
    part, whole = needs["learner_bytes"], needs["learner_bytes_all_held"]
    cells = [(key.replace("_", ": ", 1).replace("_", " "), SIZE.show(part[key]), SIZE.show(whole[key])) for key in part]
    console.print(make_table(("memory of a learner, all ranks", "part held", "all held"), cells))
    rate, memory, storage = needs["syncer_bit_per_s"], needs["syncer_memory"], needs["syncer_storage"]
    link = "" if rate is None else f", and for 95 % a link of {RATE.show(rate)}"
    console.print(
        f"the syncer of {needs['learners']} learners holds all: {SIZE.show(memory)} of memory, {SIZE.show(storage)} of "
        f"storage{link}",
        soft_wrap=True,
    )
    for each in needs["syncer_words"]:
        console.print(each, soft_wrap=True)


def _print(rows: Rows, source: Source, convention: str, needs: dict[str, Any]) -> None:
    """Print a table, and the reason if a target is never reached."""
    console, workload, measure = Console(highlight=False), source.workload, source.measure
    steps = f"steps of {TIME.show(workload.step_s)}"
    console.print(f"[bold]{workload.name}[/], {source.setting.label}, {steps}, {convention}", soft_wrap=True)
    shown = [key for key in DECOUPLED_COLUMNS if measure == "pace" and any(key in row for row in rows)]
    cells = []
    for row in rows:
        gbit_per_s = row["gbit_per_s"]
        link = "never" if gbit_per_s is None else RATE.show(gbit_per_s * 1e9)
        if "printed" in row:
            link = f"{row['printed']} Gbit/s"
        more = (f"{row[key]:.4g}" if key in row else "" for key in shown)
        percent = row.get("target", row.get(measure))  # the target, or the result for a given link
        cells.append((f"{percent:.4g} %", link, *more))
    heads = (measure, "link", *(DECOUPLED_COLUMNS[key] for key in shown))
    console.print(make_table(heads, cells, num_text=0))
    if per_step := _bytes_per_step(source):
        up, down = map(SIZE.show, per_step.values())
        console.print(f"a learner's bytes in the mean of its inner steps: {up} up, {down} down")
    if needs:
        _print_needs(console, needs)
    if not isinstance(source, PublishedRun) and any(row["gbit_per_s"] is None for row in rows):
        console.print(f"never: {source.never}.")


def _draw(rows: Rows, link_model: LinkModel, out: Path) -> None:
    """Write a page. Raises ConfigError if no link reaches any target."""
    reached = {
        f"{row['target']:g} %" if "target" in row else "this link": 1e9 * row["gbit_per_s"]
        for row in rows
        if row["gbit_per_s"] is not None
    }
    if not reached:
        raise ConfigError("no link reaches any target, so there is nothing to draw; lower --targets.")
    title = f"{link_model.workload.name}, {link_model.setting.method}"
    text = "Utilisation against the link's rate, and one period in time. Made by diloco plan utilization."
    write_drawings(out, title, text, link_pictures(link_model, reached))
    say_written(out)
