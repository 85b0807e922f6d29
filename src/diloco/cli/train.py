"""`diloco train`: one learner's part of a run, with the syncer, over a process group, or alone."""

import json
import os
import signal
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diloco.cli._options import JsonSummary, Keys, LearnerName, Overrides, RunFile, with_keys
from diloco.cli._output import print_result
from diloco.cli._preflight import check_directory, look_at_run, with_usable_checkpoint
from diloco.cli._signals import ending_by_signals
from diloco.config import RunConfig, load_config
from diloco.core.arithmetic import choose
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from diloco.core.method import Method
    from diloco.exchange.remote.remote import Remote
    from diloco.protocol.session.joining import Initialises
    from diloco.tracking.feed import Feed
    from diloco.training.learners import AnyLearner, Attach, Deal, Holding
    from diloco.training.loop import Trainer
    from diloco.training.rank_group import RankGroup
    from diloco.training.spec import LearnerSpec, StopRequest, Summary

STOPPED = 128 + signal.SIGTERM
"""Exit code of a supervised part that a signal has stopped: it is not done, and must be started again."""


def command(
    run_file: RunFile,
    name: LearnerName = None,
    shard: Annotated[
        int | None,
        typer.Option(
            min=0, help="Shard of the data to read; from run.learners on, a planned learner's shard in another order."
        ),
    ] = None,
    initialise: Annotated[
        Literal["if-empty", "once"] | None,
        typer.Option(
            help="Give the run its model after a warm start. if-empty: only if it has none, and continue from this "
            "learner's newest checkpoint: the same command serves every start. once: an error if it has one.",
        ),
    ] = None,
    collective: Annotated[
        bool, typer.Option("--collective", help="Make each rank of torchrun a learner; no syncer.")
    ] = False,
    alone: Annotated[bool, typer.Option("--alone", help="Train the data-parallel baseline; no syncer.")] = False,
    isolated: Annotated[bool, typer.Option("--isolated", help="Train without communication; no syncer.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from this learner's newest checkpoint.")] = False,
    resume_from: Annotated[Path | None, typer.Option(help="Continue from this checkpoint directory.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Begin anew, and move earlier files aside.")] = False,
    supervised: Annotated[
        bool,
        typer.Option(
            "--supervised",
            help="For a supervisor that reruns the same command after a failure or a stop: continue from the newest "
            "checkpoint if there is one, as with --initialise if-empty, and exit with code 143 after a signal.",
        ),
    ] = False,
    keys: Keys = None,
    overrides: Overrides = None,
    as_json: JsonSummary = False,
) -> None:
    """Train one learner's part of the run that RUN_FILE describes. Started by torchrun, the ranks are one learner."""

    if alone and isolated:
        raise ConfigError("--alone and --isolated are two different controls; choose one")
    if (alone or isolated) and initialise:
        raise ConfigError("--initialise has no effect without a syncer; drop it")
    if supervised and (collective or resume or resume_from is not None):
        raise ConfigError("--supervised itself decides when to resume; drop --resume, --resume-from and --collective")
    if collective:
        if alone or isolated or initialise or name is not None or shard is not None or resume_from is not None:
            raise ConfigError("--collective gives every rank its own name and shard; drop the other options")
        shard = _own_rank()
    name = name or ("baseline" if alone else "isolated" if isolated else f"learner-{shard or 0}")
    config = load_config(run_file, with_keys(overrides, keys), learner=name)
    choose(config.run.arithmetic)
    if collective and config.pool is not None:
        raise ConfigError("[pool] needs a syncer, since a process group has fixed membership; drop it")
    if shard is None and not alone and config.run.learners > 1 and config.data.deal == "shards":
        raise ConfigError(f"--shard is missing; give each learner its own of 0 to {config.run.learners - 1}")
    if shard is not None and shard >= config.run.learners and config.data.deal == "shards":
        typer.echo(
            f"{name}: the run is planned for {config.run.learners} learners; as an additional one it reads shard "
            f"{shard % config.run.learners}, in its own order",
            err=True,
        )

    from diloco.core.presets import method_from_table
    from diloco.training.checkpoint import latest_checkpoint, list_checkpoints
    from diloco.training.loop import CHECKPOINTS
    from diloco.training.spec import LearnerSpec, Role

    method_from_table(config.method, str(run_file))  # checks it in runs without a syncer, too

    role: Role = "baseline" if alone else "isolated" if isolated else "learner"
    checkpoints = config.dir / name / CHECKPOINTS
    continues = supervised or (initialise == "if-empty" and not force)
    resumes = resume_from is None and (resume or (continues and bool(list_checkpoints(checkpoints))))
    if resumes:
        resume_from = latest_checkpoint(checkpoints)
    begins_anew = resume_from is None and not continues
    initialises: Initialises = initialise is not None
    if initialises and (initialise == "if-empty" or not begins_anew):  # it may have given the run its model before
        initialises = "if-empty"
    part = LearnerSpec(name, role, shard or 0, initialises, resume_from, supervised)
    can_fall_back = resumes and role == "learner" and not collective
    _train(config, part, collective, as_json, force if begins_anew else None, can_fall_back=can_fall_back)


def _own_rank() -> int:
    """The rank that torchrun gave this process."""
    from diloco.training.rank_group import started_by_torchrun

    if not started_by_torchrun():
        raise ConfigError(
            "--collective needs torchrun; start it as torchrun --nproc-per-node LEARNERS -m diloco train …"
        )
    return int(os.environ["RANK"])


def _train(
    config: RunConfig, part: "LearnerSpec", collective: bool, as_json: bool, force: bool | None, *, can_fall_back: bool
) -> None:
    """Train the part, unless the run is finished.

    Arguments:
        force: for a part that begins anew: move an earlier start out of its directory. None: the part continues.
        can_fall_back: use an older checkpoint, or none, if the newest one is unusable.
    """
    from diloco.tracking.feed import open_feed, persistent_id
    from diloco.tracking.trackers import require_packages

    require_packages(config.track.trackers)

    import torch

    from diloco.training.rank_group import ranks_of_process

    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    feed = None
    with ExitStack() as at_the_end:  # trackers close after the process group
        with ranks_of_process(config.train.device) as job:
            if part.role == "learner" and not collective:
                run = look_at_run(config, part, begins_anew=force is not None) if job.is_first else None
                if job.any(run == "over"):
                    if as_json and job.is_first:
                        typer.echo(json.dumps({"name": part.name, "reason": "finished"}))
                    return
                if job.any(run == "has model"):
                    part = replace(part, initialise=False)
            if force is not None and (collective or job.is_first):
                check_directory(config, part.name, force=force)
            if can_fall_back:
                part = with_usable_checkpoint(config, part, job)
            if config.track.trackers and (collective or job.is_first):
                feed = at_the_end.enter_context(open_feed(config, part.name, persistent_id(config.dir / part.name)))
            trainer = _trainer(config, part, job, collective, as_json, feed)
            what = "writing a checkpoint" if job.is_first else None
            with ending_by_signals(trainer.stop, what, again=not part.supervised):
                summary = trainer.train()
        if job.is_first:
            is_part = config.train.holds_experts is not None and part.role == "learner"
            model = "its part of the global model" if is_part else "the global model"
            print_result(as_json, asdict(summary), _sentence(summary, model))
    if part.supervised and summary.reason == "stopped":
        raise typer.Exit(STOPPED)


def _trainer(
    config: RunConfig, part: "LearnerSpec", job: "RankGroup", collective: bool, as_json: bool, feed: "Feed | None"
) -> "Trainer":
    """The trainer of this process: one rank of a learner, or with `collective` a whole learner."""
    from diloco.training.loop import Trainer
    from diloco.training.progress import make_progress
    from diloco.training.spec import StopRequest

    progress = make_progress(sys.stderr if as_json else sys.stdout, config.train.log_every_s) if job.is_first else None
    if not collective:
        stopping = StopRequest()
        attach = _connector(config, part, stopping) if part.role == "learner" else None
        return Trainer(
            config, part, attach=attach, progress=progress, ranks=job, stop_request=stopping, feed=feed,
            deal=_dealer(config, part, stopping),
        )  # fmt: skip
    if job.size != config.run.learners:
        raise ConfigError(f"{job.size} ranks and run.learners = {config.run.learners}: start one rank for each learner")

    from diloco.core.presets import method_from_table
    from diloco.training.learners import attach_to_group

    assert job.process_group is not None  # `--collective` is refused without torchrun
    method = method_from_table(config.method)
    attach = attach_to_group(job.process_group, method, config.train)
    return Trainer(config, part, attach=attach, progress=progress, peers=job, feed=feed)


def _sentence(summary: "Summary", model: str) -> str:
    loss = "" if summary.held_out_loss is None else f"; held-out loss of {model} {summary.held_out_loss:.4f}"
    trained = f"{summary.tokens:,} tokens up to step {summary.steps:,}, in {summary.seconds:.1f} s"
    again = "; --resume continues from here" if summary.reason == "stopped" and summary.steps else ""
    return f"{summary.name} trained {trained}{loss}{again}"


def _connector(config: RunConfig, part: "LearnerSpec", stopping: "StopRequest") -> "Attach":
    """The function that connects this learner to the syncer; `stopping` interrupts its waiting."""
    syncer = config.syncer
    before: Remote | None = None  # of this learner with other experts
    lineage: dict[str, Any] | None = None  # of the run that its checkpoint is of

    def attach(model: "nn.Module", optimizer: "Optimizer", steps: int, tokens: int, holding: "Holding") -> "AnyLearner":
        import diloco
        from diloco.training.checkpoint import lineage_of
        from diloco.training.mixture import buffer_roles

        nonlocal before, lineage
        if before is not None and before.lineage is not None:
            lineage = asdict(before.lineage)
        elif before is None and part.resume_from is not None:  # later it may have been superseded, and deleted
            lineage = lineage_of(part.resume_from)
        before = exchange = diloco.connect(
            syncer.address,
            run=config.run.name,
            learner=part.name,
            keys=syncer.keys,
            insecure=syncer.insecure,
            initialise=part.initialise if holding.experts is None or holding.whole is not None else False,
            initial_step=steps,
            initial_tokens=tokens,
            source=_source(config, part),
            lineage=lineage,
            tokens_per_step=config.learner_batch * config.data.sequence_length,
        )
        stopping.interrupt_with(exchange.interrupt)
        exchange.is_dealt, table = holding.is_dealt, config.train
        with ExitStack() as refused:  # closes the exchange, and so ends its threads, if the learner refuses it
            refused.callback(exchange.close)
            learner = diloco.Learner(
                model, optimizer, exchange=exchange, trains=table.trains or None, trains_experts=table.trains_experts,
                holds_experts=holding.experts, whole=holding.whole, overlap=table.overlap,
                rewarm_steps=0 if holding.again else table.rewarm_steps, buffers=buffer_roles(model),
            )  # fmt: skip
            refused.pop_all()
        stopping.interrupt_with(learner.interrupt)  # also interrupts the other ranks
        return learner

    return attach


def _dealer(config: RunConfig, part: "LearnerSpec", stopping: "StopRequest") -> "Deal":
    """The function that asks the syncer for experts, where it deals them."""
    syncer = config.syncer

    def deal(method: "Method", size: int) -> tuple[int, ...]:
        import diloco

        exchange = diloco.connect(
            syncer.address, run=config.run.name, learner=part.name, keys=syncer.keys, insecure=syncer.insecure
        )
        stopping.interrupt_with(exchange.interrupt)
        with closing(exchange):
            return exchange.deal(exchange.method(method), size)

    return deal


def _source(config: RunConfig, part: "LearnerSpec") -> str:
    """The origin of the model with which this part initialises the run."""
    if part.resume_from is not None or config.warm_start.checkpoint is not None:
        return "checkpoint"
    return "seed" if config.model.weights is None else "weights"
