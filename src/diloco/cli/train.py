"""`diloco train`: one learner's part of a run, with the syncer, over a process group, or alone."""

import json
import signal
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.errors import AlreadyInitialisedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer

    from diloco.config import RunConfig
    from diloco.training.alone import LearnerLike
    from diloco.training.loop import Attach, Part, Summary, Trainer
    from diloco.training.progress import Progress


def command(
    run_file: Annotated[Path, typer.Argument(help="The run file (TOML).")],
    name: Annotated[str | None, typer.Option(help="Name of this learner; default learner-<shard>.")] = None,
    shard: Annotated[int | None, typer.Option(min=0, help="Which shard of the data this learner reads.")] = None,
    initialise: Annotated[
        bool, typer.Option("--initialise", help="Give the run its model, after the warm start.")
    ] = False,
    collective: Annotated[
        bool, typer.Option("--collective", help="No syncer: every rank that torchrun started is a learner of its own.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="The data-parallel baseline: every shard and the full batch, no syncer.")
    ] = False,
    isolated: Annotated[bool, typer.Option("--isolated", help="A learner that never communicates, no syncer.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from this learner's newest checkpoint.")] = False,
    resume_from: Annotated[Path | None, typer.Option(help="Continue from this checkpoint directory.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value, instead of what the run file says; repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; progress goes to standard error.")
    ] = False,
) -> None:
    """Train one learner's part of the run that RUN_FILE describes. Started by torchrun, the ranks are one learner
    together."""
    from diloco.config import load_config

    if alone and isolated:
        raise ConfigError("--alone and --isolated are two different controls; choose one")
    if (alone or isolated) and initialise:
        raise ConfigError("--initialise has no effect without a syncer; leave it out")
    if collective:
        if alone or isolated or initialise or name is not None or shard is not None or resume_from is not None:
            raise ConfigError(
                "--collective makes every rank a learner with its own name and shard; drop the other options"
            )
        shard = _own_rank()
    name = name or ("baseline" if alone else "isolated" if isolated else f"learner-{shard or 0}")
    config = load_config(run_file, overrides or (), learner=name)
    if shard is None and not alone and config.run.learners > 1:
        raise ConfigError(f"--shard is missing; give each learner its own of 0 to {config.run.learners - 1}")
    if shard is not None and shard >= config.run.learners:
        raise ConfigError(f"--shard {shard} does not exist; shards are 0 to {config.run.learners - 1}")

    from diloco.training.checkpoint import latest_checkpoint
    from diloco.training.loop import CHECKPOINTS
    from diloco.training.part import Part

    if resume and resume_from is None:
        resume_from = latest_checkpoint(config.dir / name / CHECKPOINTS)
    part = Part(
        name=name,
        role="baseline" if alone else "isolated" if isolated else "learner",
        shard=shard or 0,
        initialise=initialise,
        resume_from=resume_from,
    )
    _train(config, part, collective, as_json)


def _own_rank() -> int:
    """Which of the ranks that torchrun started this is."""
    import os

    from diloco.training.job import started_by_torchrun

    if not started_by_torchrun():
        raise ConfigError(
            "--collective is for the ranks of a torchrun; start it as torchrun --nproc-per-node LEARNERS -m diloco train …"
        )
    return int(os.environ["RANK"])


def _train(config: "RunConfig", part: "Part", collective: bool, as_json: bool) -> None:
    import torch

    from diloco.training.job import started_by_torchrun

    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    with ExitStack() as stack:
        if started_by_torchrun():
            trainer, speaks = _of_ranks(stack, config, part, collective, as_json)
        else:
            trainer, speaks = _trainer(config, part, as_json), True
        with _stops_on_signals(trainer):
            summary = trainer.train()
    if speaks:
        _print(summary, as_json)


def _trainer(config: "RunConfig", part: "Part", as_json: bool) -> "Trainer":
    """This process alone is the learner."""
    from diloco.training.loop import Trainer

    attach = _connector(config, part) if part.role == "learner" else None
    return Trainer(config, part, attach=attach, progress=_progress(config, as_json))


def _of_ranks(
    stack: ExitStack, config: "RunConfig", part: "Part", collective: bool, as_json: bool
) -> "tuple[Trainer, bool]":
    """This process is a rank of the learner, or with `collective` a learner among the ranks; and whether it is the
    first."""
    from diloco.training.inner import choose_device
    from diloco.training.job import Job, local_rank, process_group
    from diloco.training.loop import Trainer

    group = stack.enter_context(process_group(choose_device(config.train.device, local_rank())))
    job = Job(group)
    stack.callback(job.close)
    progress = _progress(config, as_json) if job.first else None
    if not collective:
        attach = _connector(config, part) if part.role == "learner" else None
        return Trainer(config, part, attach=attach, progress=progress, job=job), job.first
    if job.size != config.run.learners:
        raise ConfigError(
            f"there are {job.size} ranks and run.learners = {config.run.learners}; start one for each learner"
        )

    from diloco.core.presets import method_from_table
    from diloco.training.together import attach_over, together_over

    attach = attach_over(group, method_from_table(config.method), config.train.trains)
    together = together_over(group, job)
    return Trainer(config, part, attach=attach, progress=progress, together=together), job.first


def _progress(config: "RunConfig", as_json: bool) -> "Progress":
    from diloco.training.progress import make_progress

    return make_progress(sys.stderr if as_json else sys.stdout, config.train.log_every_s)


def _print(summary: "Summary", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary.to_dict()))
    else:
        typer.echo(
            f"{summary.name} trained {summary.tokens:,} tokens in {summary.steps:,} steps and {summary.seconds:.1f} s; "
            f"held-out loss of the global model {summary.held_out_loss:.4f}"
        )


@contextmanager
def _stops_on_signals(trainer: "Trainer") -> "Iterator[None]":
    """The first Ctrl-C or SIGTERM ends training after the current step, with a checkpoint; the second ends the
    process."""
    before: dict[int, Any] = {}

    def stop(number: int, _: object) -> None:
        trainer.stop()
        signal.signal(number, before[number])

    for number in (signal.SIGINT.value, signal.SIGTERM.value):
        before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _connector(config: "RunConfig", part: "Part") -> "Attach":
    """How a learner of this run reaches the syncer."""
    syncer = config.syncer

    def attach(model: "nn.Module", optimizer: "Optimizer", steps: int, tokens: int) -> "LearnerLike":
        import diloco

        def connect(initialise: bool) -> "LearnerLike":
            exchange = diloco.connect(
                syncer.address,
                run=config.run.name,
                token=read_token(syncer.token_file),
                learner=part.name,
                ca=syncer.ca,
                insecure=syncer.insecure,
                initialise=initialise,
                initial_step=steps,
                initial_tokens=tokens,
                source=_source(config, part),
            )
            return diloco.Learner(model, optimizer, exchange=exchange, trains=config.train.trains or None)

        if not part.initialise:
            return connect(initialise=False)
        try:
            return connect(initialise=True)
        except AlreadyInitialisedError:
            # Started again after a crash: what it gave the run before is the run's model now.
            if part.resume_from is None:
                raise
            return connect(initialise=False)

    return attach


def _source(config: "RunConfig", part: "Part") -> str:
    """Where a model that this part gives the run comes from."""
    if part.resume_from is not None or config.warm_start.checkpoint is not None:
        return "checkpoint"
    return "seed" if config.model.weights is None else "weights"


def read_token(path: Path | None) -> str | None:
    """The secret in a token file; None without one. Raises ConfigError when it cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path} ({error}); check syncer.token_file") from error
