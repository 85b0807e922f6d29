"""`diloco simulate`: a run file in virtual time, over modelled links and faults."""

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.config import RunConfig
    from diloco.planning.site import Site
    from diloco.simulation.scenario import Scenario
    from diloco.simulation.virtual_run import Simulated


def command(
    run_file: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    site: Annotated[
        Path | None,
        typer.Option(help="Site file: step times, links, faults. Without it steps take 1 s and nothing else does."),
    ] = None,
    tape: Annotated[
        Path | None,
        typer.Option(help="Directory of a recorded run: its step times, arrivals and losses; a site file adds links."),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where events go; default <run.dir>-simulated.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Remove an earlier simulation from there.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value, instead of what the run file says; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train the run that RUN_FILE describes in virtual time, over modelled links and faults."""
    from diloco.config import load_config
    from diloco.planning import pictures
    from diloco.planning.site import load_site

    pictures.require()
    place = None if site is None else load_site(site)
    config = load_config(run_file, overrides or ())
    names, scenario_of = _scene(config, place, tape)
    configs = {name: load_config(run_file, overrides or (), learner=name) for name in names}
    directory = directory or config.dir.with_name(f"{config.dir.name}-simulated")
    earlier = _earlier(directory, replace)

    import torch

    from diloco.simulation.virtual_run import method_to_simulate, simulate
    from diloco.training.progress import make_progress

    method_to_simulate(configs)  # before anything is removed
    if earlier:
        shutil.rmtree(directory)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    progress = make_progress(sys.stderr if as_json else sys.stdout, config.train.log_every_s)
    done = simulate(configs, scenario_of(), directory, progress=progress)
    (directory / "simulation.json").write_text(json.dumps(done.to_dict(), indent=1) + "\n", encoding="utf-8")
    files = _draw(done, directory, config)
    if as_json:
        typer.echo(json.dumps(done.to_dict()))
    else:
        _print(done)
        typer.echo(f"see {files[-1]}")


def _scene(config: "RunConfig", site: "Site | None", tape: Path | None) -> "tuple[list[str], Any]":
    """The learners' names, and what makes the scene once the options are known to be right."""
    from diloco.planning.tape import read_tape

    recorded = None if tape is None else read_tape(tape)
    if recorded is not None and site is not None and len(recorded) != len(site.names):
        raise ConfigError(
            f"the recorded run has {len(recorded)} learners and the site file {len(site.names)}; describe the links of each."
        )
    if recorded is not None:
        names = [each.name for each in recorded]
    elif site is not None:
        names = list(site.names)
    else:
        names = [f"learner-{shard}" for shard in range(config.run.learners)]

    def scenario() -> "Scenario":
        from diloco.simulation.scenario import Scenario, scenario_of_site, scenario_of_tape

        if recorded is not None:
            return scenario_of_tape(recorded, None if site is None else site.network())
        return Scenario() if site is None else scenario_of_site(site, config)

    return names, scenario


def _earlier(directory: Path, replace: bool) -> bool:
    """Whether there is an earlier simulation, which may be replaced. Raises ConfigError for anything else that is
    there."""
    from diloco.planning.tape import is_simulation

    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    if not is_simulation(directory):
        raise ConfigError(f"{directory} exists and holds something else than a simulation; name another with --dir.")
    if not replace:
        raise ConfigError(f"{directory} exists; give --replace to simulate anew there, or name another with --dir.")
    return True


def _print(done: "Simulated") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("learner")
    heads = ("steps", "busy", "computing s", "waiting s", "gone s", "merges", "up MB", "down MB")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, each in done.to_dict()["learners"].items():
        num_bytes = each.get("num_bytes", {})
        down = num_bytes.get("updates", 0) + num_bytes.get("joins", 0)
        table.add_row(
            name, f"{each['steps']:,}" if "steps" in each else "lost", f"{each['utilisation']:.1%}", f"{each['compute_s']:,.1f}",
            f"{each['waiting_s']:,.1f}", f"{each['stopped_s']:,.1f}", str(each.get("merges", "")),
            f"{num_bytes.get('contributions', 0) / 1e6:.2f}", f"{down / 1e6:.2f}",
        )  # fmt: skip
    Console().print(table)
    loss = "nobody ended the run" if done.loss is None else f"held-out loss of the global model {done.loss:.4f}"
    typer.echo(f"{done.duration_s:,.1f} s of virtual time; {loss}")


def _draw(done: "Simulated", directory: Path, config: "RunConfig") -> list[Path]:
    """Who did what when, and the loss against time."""
    from diloco.planning import pictures

    heads = ("learner", "utilisation", "computing, s", "waiting, s", "gone, s")
    rows = [
        (name, f"{each.utilisation:.1%}", f"{each.compute_s:,.1f}", f"{each.waiting_s:,.1f}", f"{each.stopped_s:,.1f}")
        for name, each in done.times().items()
    ]
    found = [pictures.Picture(
        "timeline", "Who did what", "Each learner's time; its transfers run beside it.", pictures.timeline(done.spans), heads, rows
    )]  # fmt: skip
    if len(done.losses) > 1:
        curve = pictures.Line("global model", [at for at, _ in done.losses], [loss for _, loss in done.losses])
        axes = pictures.Axis("virtual time, s"), pictures.Axis("held-out loss, nats per token")
        found.append(pictures.Picture(
            "loss", "Loss against time", "Of the global model, as the first learner held it.",
            pictures.lines([curve], *axes), ("virtual time, s", "loss"), [(f"{at:,.1f}", f"{loss:.4f}") for at, loss in done.losses],
        ))  # fmt: skip
    text = f"{config.run.name} in virtual time: {done.duration_s:,.1f} s."
    return pictures.write(directory, "simulation", f"Simulation of {config.run.name}", text, found)
