"""`diloco simulate`: a run file in virtual time, over modelled links and faults."""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from diloco.cli._options import Overrides, RunFile
from diloco.cli._output import make_table, print_result
from diloco.config import RunConfig, load_config, require_holders
from diloco.core.arithmetic import choose
from diloco.errors import ConfigError
from diloco.planning.recorded_run import RecordedLearner, is_simulation, read_recorded_run
from diloco.planning.site import Site, load_site
from diloco.report.frame import write_drawings

if TYPE_CHECKING:
    from diloco.simulation.result import SimulationResult


def command(
    run_file: RunFile,
    site: Annotated[
        Path | None, typer.Option(help="Site file: step times, links, faults. Default: steps of 1 s, ideal links.")
    ] = None,
    recorded_run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A recorded run: its step times, arrivals and absences.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Output directory; default <run.dir>-simulated.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Remove an earlier simulation in the directory.")] = False,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train the run that RUN_FILE describes in virtual time, over modelled links and faults."""
    config = load_config(run_file, overrides or ())
    choose(config.run.arithmetic)
    require_holders(config, str(run_file))
    modelled = None if site is None else load_site(site)
    recorded = None if recorded_run is None else read_recorded_run(recorded_run)
    names = _names(config, modelled, recorded)
    if unknown := [name for name in _own_names(config) if name not in names]:
        typer.echo(
            f"{run_file}: without the settings of [learner.{unknown[0]}], since the learners are {', '.join(names)}",
            err=True,
        )
    configs = {name: load_config(run_file, overrides or (), learner=name) for name in names}
    directory = directory or config.dir.with_name(f"{config.dir.name}-simulated")
    has_earlier = _has_earlier(directory, replace)

    import torch

    from diloco.simulation import virtual_run
    from diloco.training.progress import make_progress

    virtual_run.method_to_simulate(configs)  # checks it before anything is removed
    if has_earlier:
        shutil.rmtree(directory)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    progress = make_progress(sys.stderr if as_json else sys.stdout, config.train.log_every_s)
    if recorded is not None:
        scenario = virtual_run.scenario_of_recorded_run(recorded, None if modelled is None else modelled.network())
    else:
        scenario = virtual_run.Scenario() if modelled is None else virtual_run.scenario_of_site(modelled, config)
    done = virtual_run.simulate(configs, scenario, directory, progress=progress)
    (directory / "simulation.json").write_text(json.dumps(done.to_dict(), indent=1) + "\n", encoding="utf-8")
    page = directory / "simulation.html"
    _draw(done, page, config)
    print_result(as_json, done.to_dict(), lambda: _print(done, page))


def _names(config: RunConfig, site: Site | None, recorded: Sequence[RecordedLearner] | None) -> list[str]:
    """The learners' names: of the recorded run or the site file, otherwise of tables of the run file, or learner-SHARD.
    Raises ConfigError where a recorded run and a site file differ in their number."""
    if recorded is not None and site is not None and len(recorded) != len(site.names):
        raise ConfigError(
            f"the recorded run has {len(recorded)} learners and the site file {len(site.names)}; use equal numbers."
        )
    if recorded is not None:
        return [each.name for each in recorded]
    if site is not None:
        return site.names
    names = [f"learner-{shard}" for shard in range(config.run.learners)]
    others = iter([name for name in _own_names(config) if name not in names])
    return [name if name in config.learner else next(others, name) for name in names]


def _own_names(config: RunConfig) -> list[str]:
    """The names that tables of the run file give to planned learners: not those of controls, or of additional ones."""
    return [name for name in config.learner if not re.fullmatch(r"learner-\d+|baseline|isolated", name)]


def _has_earlier(directory: Path, replace: bool) -> bool:
    """Whether the directory holds an earlier simulation, to be replaced. Raises ConfigError for any other content."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    if not is_simulation(directory):
        raise ConfigError(f"{directory} exists and is not a simulation; name another directory with --dir.")
    if not replace:
        raise ConfigError(f"{directory} has a simulation; give --replace to replace it, or name another with --dir.")
    return True


def _print(done: "SimulationResult", page: Path) -> None:
    heads = ("learner", "steps", "busy", "computing s", "waiting s", "gone s", "merges", "up MB", "down MB")
    rows = []
    for name, each in done.to_dict()["learners"].items():
        num_bytes = each.get("num_bytes", {})
        up, down = num_bytes.get("contributions", 0), num_bytes.get("updates", 0) + num_bytes.get("joins", 0)
        seconds = (f"{each[key]:,.1f}" for key in ("compute_s", "waiting_s", "stopped_s"))
        steps, merges = f"{each['steps']:,}" if "steps" in each else "lost", str(each.get("merges", ""))
        rows.append(
            (name, steps, f"{each['utilisation']:.1%}", *seconds, merges, f"{up / 1e6:.2f}", f"{down / 1e6:.2f}")
        )
    Console().print(make_table(heads, rows, ruled=False))
    loss = "no learner finished" if done.loss is None else f"held-out loss of the global model {done.loss:.4f}"
    typer.echo(f"{done.duration_s:,.1f} s of virtual time; {loss}\nsee {page}")


def _draw(done: "SimulationResult", page: Path, config: RunConfig) -> None:
    """Draw each learner's timeline and the loss against time."""
    from diloco.simulation.result import NO_LOSS, pictures

    drawn = pictures(done)
    text = f"{config.run.name} in virtual time: {done.duration_s:,.1f} s."
    if len(drawn) == 1:
        text = f"{text} {NO_LOSS}"
    write_drawings(page, f"Simulation of {config.run.name}", text, drawn)
