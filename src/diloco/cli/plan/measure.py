"""`diloco plan measure`: the step time of this machine and its link to the syncer, into the site file."""

import json
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from diloco.config import RunConfig
    from diloco.exchange.probe import LinkSpeed
    from diloco.training.job import Job
    from diloco.training.step_time import StepTime

DIGITS = 4
"""Significant digits of what is measured."""


class MeasuredPart(StrEnum):
    """What to measure."""

    STEP = "step"
    LINK = "link"


def command(
    run_file: Annotated[Path, typer.Argument(help="The run file: its model, its data, its syncer.")],
    name: Annotated[str | None, typer.Option(help="Name of this learner; default learner-<shard>.")] = None,
    shard: Annotated[int, typer.Option(min=0, help="Which shard of the data to read.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="The site file to write, or to extend by this learner's site.")
    ] = None,
    only: Annotated[MeasuredPart | None, typer.Option(help="Measure the inner step, or the link, alone.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long inner steps are taken.")] = 10.0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value, instead of what the run file says; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine: the time of an inner step, and rate and latency of its link to the running syncer. As
    `diloco train`, under torchrun too."""
    from diloco.config import load_config

    name = name or f"learner-{shard}"
    config = load_config(run_file, overrides or (), learner=name)
    if shard >= config.run.learners:
        raise ConfigError(f"--shard {shard} does not exist; shards are 0 to {config.run.learners - 1}")
    if out is not None:
        _read(out)  # before anything is measured
    with ExitStack() as stack:
        job = _job(stack, config) if only is not MeasuredPart.LINK else None
        first = job is None or job.first
        link = _measure_link(config, name) if first and only is not MeasuredPart.STEP else None
        pace = _measure_pace(config, shard, seconds, job) if job is not None else None
    if not first:
        return
    if out is not None:
        _write(out, config, name, pace, link)
        typer.echo(f"written to {out}", err=True)
    values = {"learner": name, **(asdict(pace) if pace else {}), **(asdict(link) if link else {})}
    typer.echo(json.dumps(values) if as_json else _sentence(name, pace, link))


def _job(stack: ExitStack, config: "RunConfig") -> "Job":
    """The ranks that torchrun started, as one learner; or this process."""
    from diloco.training.inner import choose_device
    from diloco.training.job import Job, local_rank, process_group, started_by_torchrun

    if not started_by_torchrun():
        return Job()
    job = Job(stack.enter_context(process_group(choose_device(config.train.device, local_rank()))))
    stack.callback(job.close)
    return job


def _measure_link(config: "RunConfig", name: str) -> "LinkSpeed":
    from diloco.cli.train import read_token
    from diloco.exchange.probe import measure_link

    syncer = config.syncer
    return measure_link(
        syncer.address, run=config.run.name, learner=name, token=read_token(syncer.token_file), ca=syncer.ca, insecure=syncer.insecure
    )  # fmt: skip


def _measure_pace(config: "RunConfig", shard: int, seconds: float, job: "Job") -> "StepTime":
    import torch

    from diloco.training.step_time import measure_pace

    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    return measure_pace(config, shard, seconds=seconds, job=job)


def _sentence(name: str, pace: "StepTime | None", link: "LinkSpeed | None") -> str:
    from diloco.planning.units import RATE, SIZE, TIME

    lines = []
    if pace is not None:
        lines.append(
            f"{name}: an inner step of {pace.num_parameters:,} parameters takes {TIME.show(pace.step_s)} "
            f"± {TIME.show(pace.stdev_s)} ({pace.num_steps} steps)"
        )
    if link is not None:
        lines.append(
            f"{name}: {RATE.show(link.up_bit_per_s)} up, {RATE.show(link.down_bit_per_s)} down, {TIME.show(link.latency_s)} "
            f"one way to the syncer ({SIZE.show(link.num_bytes)} sent to measure it)"
        )
    return "\n".join(lines)


def _write(path: Path, config: "RunConfig", name: str, pace: "StepTime | None", link: "LinkSpeed | None") -> None:
    from diloco.planning.edit import with_measurement
    from diloco.planning.units import RATE, SIZE, TIME

    measured: dict[str, Any] = {}
    defaults: dict[str, dict[str, Any]] = {
        "budget": {
            "tokens": config.run.tokens,
            "tokens_per_step": config.tokens_per_full_step,
            "sequence_length": config.data.sequence_length,
        }
    }
    if pace is not None:
        defaults = {"model": {"parameters": pace.num_parameters, "layers": pace.num_layers}} | defaults
        measured = {
            "accelerators": pace.accelerators,
            "step_time": TIME.show(pace.step_s, DIGITS),
            "jitter_percent": round(100 * pace.stdev_s / pace.step_s, 1),
        }
        if pace.memory_bytes is not None:
            measured["memory"] = SIZE.show(pace.memory_bytes, DIGITS)
    if link is not None:
        measured |= {
            "up": RATE.show(link.up_bit_per_s, DIGITS),
            "down": RATE.show(link.down_bit_per_s, DIGITS),
            "latency": TIME.show(link.latency_s, DIGITS),
        }
    text = with_measurement(_read(path), str(path), name, measured, defaults)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the site file {path} ({error.strerror}); choose another --out") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the site file {path} ({error}); check the path") from error
