"""`diloco train`: one learner's part of a run, with the syncer, over a process group, or alone."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._beginning import check_directory, is_over
from diloco.cli._shared import JsonSummary, Keys, LearnerName, Overrides, RunFile, with_keys
from diloco.cli._signals import ending_by_signals
from diloco.errors import AlreadyInitialisedError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from diloco.config import RunConfig
    from diloco.tracking.feed import Feed
    from diloco.training.learners import AnyLearner, Attach
    from diloco.training.loop import Trainer
    from diloco.training.rank_group import RankGroup
    from diloco.training.spec import LearnerSpec, StopRequest, Summary

STOPPED = 128 + signal.SIGTERM
"""Exit code of a supervised part that a signal has stopped: it is not done, and is to be started again."""


def command(
    run_file: RunFile,
    name: LearnerName = None,
    shard: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Shard of the data this learner reads; beyond run.learners, one of theirs in another order.",
        ),
    ] = None,
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
    force: Annotated[
        bool, typer.Option("--force", help="Begin anew where an earlier start has written, and keep that elsewhere.")
    ] = False,
    supervised: Annotated[
        bool,
        typer.Option(
            "--supervised",
            help="The same command is run again whenever it fails or is stopped: continue from the newest checkpoint "
            "where there is one, give the run its model only where it has none, and end with exit code 143 when "
            "stopped by a signal.",
        ),
    ] = False,
    keys: Keys = None,
    overrides: Overrides = None,
    as_json: JsonSummary = False,
) -> None:
    """Train one learner's part of the run that RUN_FILE describes. Started by torchrun, the ranks are one learner."""
    from diloco.config import load_config

    if alone and isolated:
        raise ConfigError("--alone and --isolated are two different controls; choose one")
    if (alone or isolated) and initialise:
        raise ConfigError("--initialise has no effect without a syncer; leave it out")
    if supervised and (collective or resume or resume_from is not None):
        raise ConfigError(
            "--supervised decides itself whether to resume; drop --resume, --resume-from and --collective"
        )
    if collective:
        if alone or isolated or initialise or name is not None or shard is not None or resume_from is not None:
            raise ConfigError(
                "--collective makes every rank a learner with its own name and shard; drop the other options"
            )
        shard = _own_rank()
    name = name or ("baseline" if alone else "isolated" if isolated else f"learner-{shard or 0}")
    config = load_config(run_file, with_keys(overrides, keys), learner=name)
    if collective and config.pool is not None:
        raise ConfigError("[pool] needs a syncer, since the members of a process group stay the same; leave it out")
    if shard is None and not alone and config.run.learners > 1 and config.data.deal == "shards":
        raise ConfigError(f"--shard is missing; give each learner its own of 0 to {config.run.learners - 1}")
    if shard is not None and shard >= config.run.learners and config.data.deal == "shards":
        typer.echo(
            f"{name}: the run is planned for {config.run.learners} learners; as a further one it reads shard "
            f"{shard % config.run.learners}, in an order of its own",
            err=True,
        )

    from diloco.core.presets import method_from_table
    from diloco.training.checkpoint import latest_checkpoint, list_checkpoints
    from diloco.training.loop import CHECKPOINTS
    from diloco.training.spec import LearnerSpec, Role

    method_from_table(config.method)  # also where no syncer would refuse it

    role: Role = "baseline" if alone else "isolated" if isolated else "learner"
    part = LearnerSpec(name, role, shard or 0, initialise, resume_from, supervised)
    checkpoints = config.dir / name / CHECKPOINTS
    if (resume and resume_from is None) or (supervised and list_checkpoints(checkpoints)):
        part = replace(part, resume_from=latest_checkpoint(checkpoints))
        joins = role == "learner" and not collective  # where no checkpoint can be used
        _train(config, part, collective, as_json, checkpoints if joins else None)
        return
    begins_anew = resume_from is None and not supervised
    _train(config, part, collective, as_json, force=force if begins_anew else None)


def _own_rank() -> int:
    """The rank that torchrun gave this process."""
    from diloco.training.rank_group import started_by_torchrun

    if not started_by_torchrun():
        raise ConfigError(
            "--collective is for the ranks of a torchrun; start it as torchrun --nproc-per-node LEARNERS -m diloco "
            "train …"
        )
    return int(os.environ["RANK"])


def _train(
    config: "RunConfig", part: "LearnerSpec", collective: bool, as_json: bool, checkpoints: Path | None = None,
    force: bool | None = None,
) -> None:  # fmt: skip
    """Train the part, where the run has something left to train.

    Arguments:
        checkpoints: where the newest usable one is looked for.
        force: of a part that begins anew, which does so in a directory of its own: set aside what an earlier start has
            written there. None: it goes on.
    """
    from diloco.tracking.feed import open_feed, persistent_id
    from diloco.tracking.trackers import require_packages

    require_packages(config.track.trackers)

    import torch

    from diloco.training.rank_group import ranks_of_process

    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    feed = None
    with ExitStack() as at_the_end:  # trackers end after the ranks have parted
        with ranks_of_process(config.train.device) as job:
            if part.role == "learner" and not collective and _is_over(config, part, job):
                if as_json and job.is_first:
                    typer.echo(json.dumps({"name": part.name, "reason": "finished"}))
                return
            if force is not None and (collective or job.is_first):
                _clear(config, part.name, force)
            if checkpoints is not None:
                part = _with_usable(part, checkpoints, job)
            if config.track.trackers and (collective or job.is_first):
                feed = at_the_end.enter_context(open_feed(config, part.name, persistent_id(config.dir / part.name)))
            trainer = _trainer(config, part, job, collective, as_json, feed)
            what = "writing a checkpoint" if job.is_first else None
            with ending_by_signals(trainer.stop, what, again=not part.supervised):
                summary = trainer.train()
        if job.is_first:
            _print(summary, as_json)
    if part.supervised and summary.reason == "stopped":
        raise typer.Exit(STOPPED)


def _clear(config: "RunConfig", name: str, force: bool) -> None:
    from diloco.training.loop import CHECKPOINTS

    kept = check_directory(config, name, config.dir / name / CHECKPOINTS, force=force)
    if kept is not None:
        typer.echo(f"{name}: the earlier start is kept as {kept}", err=True)


def _is_over(config: "RunConfig", part: "LearnerSpec", job: "RankGroup") -> bool:
    """Whether there is nothing left to train; the first rank asks, and all know."""
    over = False
    if job.is_first:
        begins = part.resume_from is None and not part.supervised
        over = is_over(
            config, part.name, initialise=part.initialise, begins=begins, waits=part.supervised,
            say=lambda text: typer.echo(text, err=True),
        )  # fmt: skip
    return job.any(over)


def _with_usable(part: "LearnerSpec", checkpoints: Path, job: "RankGroup") -> "LearnerSpec":
    """The part with its newest usable checkpoint, or without one where there is none.

    The first rank looks, and sets aside what cannot be used; the others look when that is done.
    """
    from diloco.training.checkpoint import list_checkpoints, newest_usable

    unusable = newest_usable(checkpoints)[1] if job.is_first else ()
    job.any(False)
    found = list_checkpoints(checkpoints)
    if not found and part.initialise and not part.supervised:
        raise CheckpointError(
            f"no checkpoint in {checkpoints} can be used (they are kept there as unusable-*), so there is no model to "
            "give the run; leave out --resume to begin with a new one, or --initialise to join the run."
        )
    # One that has trained before does not begin the run anew: without its checkpoint it waits for the run's model.
    initialise = part.initialise and bool(found)
    return replace(part, resume_from=found[-1] if found else None, unusable=unusable, initialise=initialise)


def _trainer(
    config: "RunConfig", part: "LearnerSpec", job: "RankGroup", collective: bool, as_json: bool, feed: "Feed | None"
) -> "Trainer":
    """The trainer of this process: a rank of the learner that the job is, or with `collective` a learner of its own."""
    from diloco.training.loop import Trainer
    from diloco.training.progress import make_progress
    from diloco.training.spec import StopRequest

    progress = make_progress(sys.stderr if as_json else sys.stdout, config.train.log_every_s) if job.is_first else None
    if not collective:
        stopping = StopRequest()
        attach = _connector(config, part, stopping) if part.role == "learner" else None
        return Trainer(config, part, attach=attach, progress=progress, ranks=job, stop_request=stopping, feed=feed)
    if job.size != config.run.learners:
        raise ConfigError(f"{job.size} ranks and run.learners = {config.run.learners}: start one rank for each learner")

    from diloco.core.presets import method_from_table
    from diloco.training.learners import attach_to_group

    assert job.process_group is not None  # `--collective` is refused without torchrun
    method = method_from_table(config.method)
    attach = attach_to_group(job.process_group, method, config.train.trains, config.train.overlap)
    return Trainer(config, part, attach=attach, progress=progress, peers=job, feed=feed)


def _print(summary: "Summary", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary.to_dict()))
    else:
        loss = (
            "" if summary.held_out_loss is None else f"; held-out loss of the global model {summary.held_out_loss:.4f}"
        )
        trained = f"{summary.tokens:,} tokens in {summary.steps:,} steps and {summary.seconds:.1f} s"
        again = "; with --resume the same command goes on" if summary.reason == "stopped" and summary.steps else ""
        typer.echo(f"{summary.name} trained {trained}{loss}{again}")


def _connector(config: "RunConfig", part: "LearnerSpec", stopping: "StopRequest") -> "Attach":
    """The function that connects a learner of this run to the syncer. `stopping`: ends its waiting."""
    syncer = config.syncer

    def attach(model: "nn.Module", optimizer: "Optimizer", steps: int, tokens: int) -> "AnyLearner":
        import diloco
        from diloco.training.checkpoint import lineage_of

        def connect(initialise: bool) -> "AnyLearner":
            exchange = diloco.connect(
                syncer.address,
                run=config.run.name,
                learner=part.name,
                keys=syncer.keys,
                insecure=syncer.insecure,
                initialise=initialise,
                initial_step=steps,
                initial_tokens=tokens,
                source=_source(config, part),
                lineage=None if part.resume_from is None else lineage_of(part.resume_from),
                tokens_per_step=config.learner_batch * config.data.sequence_length,
            )
            stopping.interrupt_with(exchange.interrupt)
            trains, overlap = config.train.trains or None, config.train.overlap
            with ExitStack() as refused:  # its threads would outlive it: an exchange that is refused is closed
                refused.callback(exchange.close)
                learner = diloco.Learner(
                    model, optimizer, exchange=exchange, trains=trains, overlap=overlap,
                    rewarm_steps=config.train.rewarm_steps,
                )  # fmt: skip
                refused.pop_all()
            stopping.interrupt_with(learner.interrupt)  # which tells the other ranks
            return learner

        try:
            return connect(part.initialise)
        except AlreadyInitialisedError:
            # Restarted after a crash: what this learner gave the run before is the run's model now.
            if part.resume_from is None and not part.supervised:
                raise
            return connect(initialise=False)

    return attach


def _source(config: "RunConfig", part: "LearnerSpec") -> str:
    """The source of the model that this part gives the run."""
    if part.resume_from is not None or config.warm_start.checkpoint is not None:
        return "checkpoint"
    return "seed" if config.model.weights is None else "weights"
