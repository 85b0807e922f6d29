"""A run in virtual time: the trainer, the learners and the syncer's state machine as they are, a network and faults
that are modelled.

The learners of a run file train their model in this process, one at a time. An inner step takes as long as the site
file (or the tape of a recorded run) says, a transfer as long as the links let it, and everything else no time; nothing
depends on how fast this machine is. Events are those of a real run, with `t` counted from the run's beginning.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from diloco import events
from diloco.config import RunConfig
from diloco.core.method import Method
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError, DrainedError, ExchangeError
from diloco.event_log import EventLog
from diloco.exchange.local import Local, Lost, run_virtual
from diloco.exchange.virtual.run import VirtualRun
from diloco.learner import Learner
from diloco.planning.recorded_run import SIMULATED
from diloco.protocol.steering import Pool
from diloco.report.drawing import Kind, Span
from diloco.simulation.scenario import Losses, Scenario, read_losses
from diloco.syncer.journal import Journal
from diloco.syncer.metrics import SyncerMetrics
from diloco.training.checkpoint import latest_checkpoint
from diloco.training.data.corpus import load_corpus
from diloco.training.learners import AnyLearner
from diloco.training.loop import CHECKPOINTS, Trainer
from diloco.training.progress import ProgressDisplay
from diloco.training.spec import Clock, LearnerSpec, SharedInputs, Summary


@dataclass(frozen=True)
class LearnerTime:
    """Seconds of a learner: computing, waiting for answers, gone.

    `utilisation`: the share of its time in the run, from its first step to its last and while it was there, that it
    computed.
    """

    compute_s: float
    waiting_s: float
    stopped_s: float

    @property
    def utilisation(self) -> float:
        """compute ÷ (compute + waiting)."""
        there_s = self.compute_s + self.waiting_s
        return self.compute_s / there_s if there_s else 0.0


@dataclass
class SimulationResult:
    """The result of a simulated run.

    Attributes:
        summaries: what each learner's trainer says; None for one that was killed and did not come back, or found no
            place in a pool that had shrunk.
        spans: what each learner did when.
        loss: held-out loss of the newest global model that a learner ended with, nats per token; None if none ended.
        duration_s: virtual seconds until the last learner ended, or was killed.
        tokens: trained by the run, as the syncer has counted them.
        losses, training_losses: in virtual time, of the global model and of the learners' steps: see `read_losses`.
    """

    summaries: dict[str, Summary | None]
    spans: dict[str, list[Span]] = field(default_factory=dict)
    loss: float | None = None
    duration_s: float = 0.0
    tokens: int = 0
    losses: Losses = field(default_factory=list)
    training_losses: Losses = field(default_factory=list)

    def times(self) -> dict[str, LearnerTime]:
        """The time of each learner."""

        def total(spans: Sequence[Span], kind: Kind) -> float:
            return math.fsum(each.end_s - each.begin_s for each in spans if each.kind == kind)

        return {
            name: LearnerTime(total(spans, "compute"), total(spans, "waiting"), total(spans, "stopped"))
            for name, spans in self.spans.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        learners = {}
        for name, each in self.times().items():
            summary = self.summaries[name]
            known = {} if summary is None else {
                "steps": summary.steps, "tokens": summary.tokens, "num_bytes": summary.metrics.get("num_bytes", {}),
                "merges": summary.metrics.get("merges", 0), "incarnation": summary.metrics.get("incarnation", 0),
            }  # fmt: skip
            learners[name] = {**asdict(each), "utilisation": each.utilisation, **known}
        return {"loss": self.loss, "duration_s": self.duration_s, "tokens": self.tokens, "learners": learners}


def simulate(
    configs: Mapping[str, RunConfig], scenario: Scenario, directory: Path, *, progress: ProgressDisplay | None = None
) -> SimulationResult:
    """Train a run in virtual time, its events and checkpoints in `directory` as a real run's are in its own.

    Arguments:
        configs: the run as each of its learners reads it, by name, in the order of their shards. The first one makes
            the warm start and initialises the run; it starts as soon as any other.
        progress: shows how the first learner goes.

    Raises:
        ConfigError: learners that cannot be, or a method that a syncer cannot run.
    """
    method = method_to_simulate(configs)
    data = next(iter(configs.values())).data
    return _Simulation(configs, method, scenario, directory, SharedInputs(load_corpus(data)), progress).play()


def method_to_simulate(configs: Mapping[str, RunConfig]) -> Method:
    """The run's method. Raises ConfigError as `simulate` does."""
    first = next(iter(configs.values()))
    method = method_from_table(first.method)
    if method.exchanged == "gradients":
        raise ConfigError(
            "a syncer cannot run DataParallel on gradients, so there is nothing to simulate; `diloco plan utilization` "
            "compares with it."
        )
    if len(configs) != first.run.learners:
        raise ConfigError(
            f"run.learners = {first.run.learners} and there are {len(configs)} learners to simulate; make them equal."
        )
    if (pool := Pool.of(first.pool_values)) is not None:
        pool.require(method.quorum.at_least)
    return method


class _Simulation:
    """A run being simulated."""

    def __init__(
        self, configs: Mapping[str, RunConfig], method: Method, scenario: Scenario, directory: Path,
        shared: SharedInputs, progress: ProgressDisplay | None,
    ) -> None:  # fmt: skip
        self._names = list(configs)
        self._configs = [
            config.model_copy(update={"run": config.run.model_copy(update={"dir": directory})})
            for config in configs.values()
        ]
        self._method, self._scenario, self._directory = method, scenario, directory
        self._shared, self._progress = shared, progress
        self._spans: list[list[Span]] = [[] for _ in configs]
        self._ended_s = [0.0] * len(configs)

    def play(self) -> SimulationResult:
        run = self._configs[0].run.name
        starts_s = self._scenario.starts_s or [0.0] * len(self._names)
        path = self._directory / "syncer" / "events.jsonl"
        with EventLog(path, "syncer", clock=lambda: self._run.time.now) as log:
            journal = Journal(log, SyncerMetrics(run))
            self._run = VirtualRun(
                self._names,
                self._scenario.step_s,
                starts_s,
                self._scenario.network,
                self._scenario.faults,
                journal,
                self._watch,
                Pool.of(self._configs[0].pool_values),
            )
            log.append(events.SyncerStarted(run=run, address=SIMULATED, method=self._method.to_dict()))
            ended = self._lives()
            done = SimulationResult({
                name: None if isinstance(each, Lost) else each for name, each in zip(self._names, ended, strict=True)
            })  # fmt: skip
            self._log_traffic(log, done)
            self._account(done)
            self._log_end(log, done)
        logs = (self._directory / name / "events.jsonl" for name in self._names)
        done.losses, done.training_losses = read_losses(logs)
        return done

    def _lives(self) -> list[Summary | Lost]:
        try:
            return run_virtual(self._life, self._run)
        except ExchangeError as error:
            if self._run.has_model:
                raise
            first = self._names[0]
            raise ConfigError(
                f"{first}, which initialises the run, is killed before it has and does not come back; let it come "
                "back, or be killed later."
            ) from error

    def _life(self, index: int, exchange: Local) -> Summary | Lost:
        """Train one learner as `diloco train` would."""
        config, name = self._configs[index], self._names[index]
        exchange.initialises = index == 0
        first = index == 0 and not exchange.run_exists
        steps_alone = itertools.count()

        def now_s() -> float:
            return exchange.now_s

        def attach(model: nn.Module, optimizer: Optimizer, steps: int, tokens: int) -> AnyLearner:
            exchange.initial_step, exchange.initial_tokens = steps, tokens
            return Learner(
                model, optimizer, method=self._method, exchange=exchange, trains=config.train.trains or None,
                overlap=config.train.overlap, rewarm_steps=config.train.rewarm_steps,
            )  # fmt: skip

        def stepped_alone() -> None:
            began_s = exchange.now_s
            exchange.sleep(self._warm_step_s(index, next(steps_alone)))
            self._watch("compute", index, began_s, exchange.now_s)

        checkpoints = self._directory / name / CHECKPOINTS
        resume_from = latest_checkpoint(checkpoints) if checkpoints.is_dir() else None
        part = LearnerSpec(name, "learner", shard=index, initialise=first, resume_from=resume_from)
        trainer = Trainer(
            config, part, attach, self._progress if first else None, clock=Clock(now_s, now_s, stepped_alone),
            shared=self._shared,
        )  # fmt: skip
        try:
            summary: Summary | Lost = trainer.train()
        except DrainedError:  # when it came, or came back, the pool had shrunk
            summary = Lost()
        self._ended_s[index] = exchange.now_s
        return summary

    def _warm_step_s(self, index: int, step: int) -> float:
        known_s, config = self._scenario.warm_step_s(step), self._configs[index]
        if known_s is not None:
            return known_s
        return self._scenario.step_s(index, 0) * config.train.global_batch / config.learner_batch

    def _watch(self, kind: Kind, learner: int, began_s: float, ended_s: float) -> None:
        """Record a span; touching spans of a kind become one."""
        spans = self._spans[learner]
        for place in range(len(spans) - 1, max(-1, len(spans) - 4), -1):
            if spans[place].kind == kind and spans[place].end_s == began_s:
                spans[place] = Span(spans[place].begin_s, ended_s, kind)
                return
        spans.append(Span(began_s, ended_s, kind))

    def _log_traffic(self, log: EventLog, done: SimulationResult) -> None:
        for name, summary in done.summaries.items():
            if summary is not None:
                sent = summary.metrics["num_bytes"]
                received = {"contributions": sent.get("contributions", 0)}
                log.append(
                    events.Traffic(
                        learner=name,
                        received_bytes=received,
                        sent_bytes={key: n for key, n in sent.items() if key not in received},
                    )
                )

    def _log_end(self, log: EventLog, done: SimulationResult) -> None:
        driver = self._run.driver
        steps = 0 if driver is None else driver.state.step
        log.append(events.Finished(steps=steps, tokens=done.tokens, seconds=done.duration_s, reason="stopped"))

    def _account(self, done: SimulationResult) -> None:
        """Fill in loss, duration and each learner's spans; time that is neither compute nor absence is waiting."""
        killed_s = {fault.learner: fault.at_s for fault in self._scenario.faults if fault.back_s is None}
        done.duration_s = max(end_s or killed_s.get(index, 0.0) for index, end_s in enumerate(self._ended_s))
        done.tokens = 0 if self._run.driver is None else self._run.driver.state.run_tokens
        newest = [each for each in done.summaries.values() if each is not None]
        if newest:
            done.loss = max(newest, key=lambda each: sum(each.metrics["versions"])).held_out_loss
        for index, name in enumerate(self._names):
            end_s = self._ended_s[index] or done.duration_s
            stopped = [
                Span(fault.at_s, min(end_s, end_s if fault.back_s is None else fault.back_s), "stopped")
                for fault in self._scenario.faults
                if fault.learner == index and fault.at_s < (self._ended_s[index] or math.nextafter(end_s, math.inf))
            ]
            computed = (each for each in self._spans[index] if each.kind == "compute")
            busy = sorted([*stopped, *computed], key=lambda each: each.begin_s)
            waiting, at_s = [], busy[0].begin_s if busy else end_s  # waiting begins with the first step
            for each in busy:
                if each.begin_s > at_s:
                    waiting.append(Span(at_s, each.begin_s, "waiting"))
                at_s = max(at_s, each.end_s)
            if end_s > at_s:
                waiting.append(Span(at_s, end_s, "waiting"))
            done.spans[name] = [*self._spans[index], *stopped, *waiting]
