"""`diloco plan measure`: this machine's step time and link to the syncer, for a site file."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diloco.cli._options import Json, Keys, LearnerName, Overrides, RunFile, with_keys
from diloco.cli._output import print_result, say_written
from diloco.config import RunConfig, load_config
from diloco.errors import StoreError, translated
from diloco.planning.site import with_measurement
from diloco.planning.units import RATE, SIZE, TIME
from diloco.tables import read_text
from diloco.whole_files import write_whole

if TYPE_CHECKING:
    from diloco.exchange.probe import LinkSpeed
    from diloco.training.rank_group import RankGroup
    from diloco.training.step_time import StepTime

DIGITS = 4
"""Significant digits of measurements."""


def command(
    run_file: RunFile,
    name: LearnerName = None,
    shard: Annotated[int, typer.Option(min=0, help="The shard of the data to read.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The site file to write or to extend by this site.")] = None,
    only: Annotated[Literal["step", "link"] | None, typer.Option(help="Measure only this.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the measurement of inner steps.")] = 10.0,
    keys: Keys = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: the time of an inner step, and rate and latency of its link to the running syncer.

    Works under torchrun, like `diloco train`.
    """
    name = name or f"learner-{shard}"
    config = load_config(run_file, with_keys(overrides, keys), learner=name)
    if out is not None:
        _read(out)  # fails before the measurement
    with ExitStack() as stack:
        job = None
        if only != "link":
            from diloco.training.rank_group import ranks_of_process

            job = stack.enter_context(ranks_of_process(config.train.device))
        is_first = job is None or job.is_first
        link = _measure_link(config, name) if is_first and only != "step" else None
        step = None if job is None else _measure_step_time(config, shard, seconds, job)
    if not is_first:
        return
    if out is not None:
        _write(out, config, name, step, link)
        say_written(out)
    values = {"learner": name, **(asdict(step) if step else {}), **(asdict(link) if link else {})}
    print_result(as_json, values, _sentences(name, step, link))


def _measure_link(config: RunConfig, name: str) -> "LinkSpeed":
    from diloco.exchange.probe import measure_link

    run, it = config.run.name, config.syncer
    return measure_link(it.address, run=run, learner=name, keys=it.keys, insecure=it.insecure)


def _measure_step_time(config: RunConfig, shard: int, seconds: float, job: "RankGroup") -> "StepTime":
    import torch

    from diloco.training.step_time import measure_step_time

    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    return measure_step_time(config, shard, seconds=seconds, ranks=job)


def _sentences(name: str, step: "StepTime | None", link: "LinkSpeed | None") -> str:
    lines = []
    if step is not None:
        lines.append(
            f"{name}: an inner step of {step.num_parameters:,} parameters takes {TIME.show(step.step_s)} "
            f"± {TIME.show(step.stdev_s)} ({step.num_steps} steps)"
        )
    if link is not None:
        lines.append(
            f"{name}: {RATE.show(link.up_bit_per_s)} up, {RATE.show(link.down_bit_per_s)} down, "
            f"{TIME.show(link.latency_s)} one way to the syncer (measured with {SIZE.show(link.num_bytes)})"
        )
    return "\n".join(lines)


def _write(path: Path, config: RunConfig, name: str, step: "StepTime | None", link: "LinkSpeed | None") -> None:
    measured: dict[str, Any] = {}
    budget = {"tokens": config.run.tokens, "tokens_per_step": config.tokens_per_full_step}
    defaults: dict[str, dict[str, Any]] = {"budget": {**budget, "sequence_length": config.data.sequence_length}}
    if step is not None:
        defaults = {"model": {"parameters": step.num_parameters, "layers": step.num_layers}, **defaults}
        jitter_percent = round(100 * step.stdev_s / step.step_s, 1)
        step_time = TIME.show(step.step_s, DIGITS)
        measured = {"accelerators": step.accelerators, "step_time": step_time, "jitter_percent": jitter_percent}
        if step.memory_bytes is not None:
            measured["memory"] = SIZE.show(step.memory_bytes, DIGITS)
    if link is not None:
        measured |= {"up": RATE.show(link.up_bit_per_s, DIGITS), "down": RATE.show(link.down_bit_per_s, DIGITS)}
        measured["latency"] = TIME.show(link.latency_s, DIGITS)
    text = with_measurement(_read(path), str(path), name, measured, defaults)
    with translated(OSError, StoreError, f"cannot write the site file {path}", "choose another --out"):
        write_whole(path, text)


def _read(path: Path) -> str:
    """The text of the existing site file; empty if there is none."""
    return read_text(path, "site file").removeprefix("\ufeff") if path.exists() else ""
