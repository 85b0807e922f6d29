"""`diloco plan goodput`: the share of the accelerators' time that trains the model when chips fail."""

from dataclasses import asdict, replace
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.text import Text

from diloco.cli._options import Json, PicturesPage, parse_list
from diloco.cli._output import make_table, print_result, say_written
from diloco.errors import ConfigError
from diloco.planning.goodput import CONFIDENCE, FailureTimes, Fleet, Goodput, LearnerSpeeds, Mode, simulate
from diloco.planning.pictures import goodput_pictures, mode_title
from diloco.planning.units import TIME
from diloco.report.frame import require_html, write_drawings


def command(
    chips: Annotated[int, typer.Option(min=1, help="Chips of all learners together.")],
    learners: Annotated[int, typer.Option(min=1, help="Number of learners, with equal numbers of chips.")] = 1,
    mode: Annotated[Mode, typer.Option(help="Method; which chips stop when one fails.")] = "decoupled",
    mtbi: Annotated[str, typer.Option(help="Mean time between interruptions of one chip.")] = "1 y",
    repair: Annotated[str, typer.Option(help="Time from a failure until replacement chips are available.")] = "65 s",
    down: Annotated[str, typer.Option(help="Pause to continue without the failed chips.")] = "15 s",
    up: Annotated[str, typer.Option(help="Pause to add replacement chips.")] = "15 s",
    step: Annotated[str, typer.Option(help="Time of an inner step; failures are detected at its end.")] = "4 s",
    jitter: Annotated[float, typer.Option(min=0, help="Standard deviation of step times, in percent.")] = 0.0,
    speeds: Annotated[str | None, typer.Option(help="Relative speeds of the learners, such as 1,1,0.6,0.6.")] = None,
    elastic_learners: Annotated[
        bool | None,
        typer.Option(help="A decoupled learner continues without failed chips (default), or stops until the repair."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 0,
    out: PicturesPage = None,
    as_json: Json = False,
) -> None:
    """Goodput, the probability that all learners are down, and the lost time by cause; simulated and by formula.

    The default times reproduce the published table of Decoupled DiLoCo; give your own.
    """
    require_html(out)
    times = FailureTimes(
        mtbi_s=TIME.parse(mtbi, "--mtbi", positive=True),
        down_s=TIME.parse(down, "--down"),
        repair_s=TIME.parse(repair, "--repair"),
        up_s=TIME.parse(up, "--up"),
        step_s=TIME.parse(step, "--step", positive=True),
    )
    if mode != "decoupled" and elastic_learners is not None:
        raise ConfigError(f"--elastic-learners has no effect with --mode {mode}; drop it, or use --mode decoupled.")
    relative = () if speeds is None else parse_list("--speeds", speeds, float, "numbers", "1,1,0.6,0.6")
    fleet = Fleet(chips, learners, mode, times, LearnerSpeeds(jitter / 100, relative), elastic_learners is not False)
    modes = (mode,) if as_json and out is None else get_args(Mode)
    found = {each: simulate(replace(fleet, mode=each), seed) for each in modes}
    print_result(as_json, _plain(fleet, found[mode], seed), lambda: _print(fleet, found, seed), indent=1)
    if out is not None:
        lead = f"{fleet.chips:,} chips: goodput of {found[mode].goodput:.1f} %. Made by diloco plan goodput."
        write_drawings(out, f"Goodput, {mode_title(fleet, mode)}", lead, goodput_pictures(fleet, found, seed))
        say_written(out)


def _plain(fleet: Fleet, it: Goodput, seed: int) -> dict[str, Any]:
    plain = asdict(fleet)
    return {
        "goodput_percent": it.goodput, "confidence_interval_percent": it.interval, "confidence": CONFIDENCE,
        "closed_form_percent": it.closed_form, "waiting_percent": it.waiting, "stopped_percent": it.stopped,
        "uptime_percent": 100 - it.all_stopped, "all_stopped_percent": it.all_stopped,
        "runs": it.num_runs, "seed": seed,
        **{key: plain[key] for key in ("mode", "chips", "learners", "elastic_learners", "times", "speeds")},
    }  # fmt: skip


def _print(fleet: Fleet, found: dict[Mode, Goodput], seed: int) -> None:
    times, rows = fleet.times, []
    for mode, it in found.items():
        name = f"{mode} × {fleet.learners}" if mode == "decoupled" else mode
        half = (it.interval[1] - it.interval[0]) / 2
        shares = (_percent(it.closed_form), f"{it.waiting:.1f} %", f"{it.stopped:.1f} %", _percent(it.all_stopped))
        row = (name, f"{it.goodput:.1f} ± {half:.1f}", *shares)
        rows.append([Text(cell, "bold") for cell in row] if mode == fleet.mode else row)
    console = Console(highlight=False)
    console.print(
        f"{fleet.chips:,} chips, each interrupted once in {TIME.show(times.mtbi_s)}; down {times.down_s:g} s, repair "
        f"{times.repair_s:g} s, up {times.up_s:g} s, step {times.step_s:g} s",
        soft_wrap=True,
    )
    console.print(make_table(("", "goodput, %", "formula", "waiting", "stopped", "all down"), rows))
    console.print(
        "± is the 95 % confidence interval of the simulation (from failure to failure, "
        f"{found[fleet.mode].num_runs} runs, seed {seed}). Default times are fitted to a published table; measure "
        "yours.",
        style="dim",
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} %" if value >= 0.1 else f"{value:.1g} %"
