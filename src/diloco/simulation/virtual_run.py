"""A simulated run: the real trainer, learners and syncer state machine, on a modelled network with modelled faults.

The learners of a run file train their model in this process, one at a time, in virtual time. An inner step takes the
time of the site file (or of a recorded run), a transfer that of its links, everything else none; the result does not
depend on this machine's speed. Events are those of a real run, with `t` counted from the start of the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load
from torch import nn
from torch.optim import Optimizer

from diloco import events
from diloco.config import RunConfig
from diloco.core.layout import Layout, named_tensors
from diloco.core.method import Method
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError, DrainedError, ExchangeError
from diloco.event_log import EventLog
from diloco.exchange.local import Local, Lost, run_virtual
from diloco.exchange.virtual.delivery import Fault
from diloco.exchange.virtual.run import VirtualRun
from diloco.learner import Learner
from diloco.planning.network import Network
from diloco.planning.recorded_run import SIMULATED, RecordedLearner
from diloco.planning.site import Site
from diloco.protocol.steering import Pool
from diloco.report.drawing import Kind, Span
from diloco.simulation.result import SimulationResult, read_losses
from diloco.syncer.journal import Journal
from diloco.syncer.metrics import SyncerMetrics
from diloco.training.checkpoint import latest_checkpoint
from diloco.training.data.corpus import load_corpus
from diloco.training.data.streams import held_out_batches
from diloco.training.held_out import BATCH, evaluate
from diloco.training.learners import AnyLearner, Holding
from diloco.training.loop import CHECKPOINTS, Trainer
from diloco.training.mixture import buffer_roles
from diloco.training.model import build_model
from diloco.training.progress import ProgressDisplay
from diloco.training.rank_group import choose_device
from diloco.training.spec import Clock, LearnerSpec, SharedInputs, Summary


@dataclass(frozen=True)
class Scenario:
    """Step times, links, starts and faults of a simulated run.

    Attributes:
        step_s: seconds of a learner's n-th inner step at its own batch (learner index, n from 0).
        network: the links; None: transfers are instantaneous.
        faults: learners to kill, and times.
        starts_s: start of each learner; None: all at 0.
        warm_step_s: seconds of the n-th step of the warm start (n from 0), at the full batch; where it returns None,
            the first step's seconds are scaled by the size of the full batch.
    """

    step_s: Callable[[int, int], float] = lambda *_: 1.0
    network: Network | None = None
    faults: Sequence[Fault] = ()
    starts_s: Sequence[float] | None = None
    warm_step_s: Callable[[int], float | None] = lambda _: None


def scenario_of_site(site: Site, run: RunConfig) -> Scenario:
    """Return the scenario of a site file. Random failures cover a hundred times the length of an undisturbed run."""
    learners = site.learners()
    horizon_s = 100.0 * run.schedule_steps * max(each.step_s for each in learners)
    faults = [Fault(*outage) for outage in site.outages(horizon_s)]
    return Scenario(lambda index, step: learners[index].step_seconds(step, run.run.seed), site.network(), faults)


def scenario_of_recorded_run(recorded: Sequence[RecordedLearner], network: Network | None) -> Scenario:
    """Return the scenario of a recorded run, over other links; None: instantaneous transfers."""
    faults = [Fault(index, at_s, back_s) for index, each in enumerate(recorded) for at_s, back_s in each.absences]
    starts_s = [each.start_s for each in recorded]
    first = next((each for each in recorded if each.warm_step_times), recorded[0])
    return Scenario(lambda index, step: recorded[index].step_s(step), network, faults, starts_s, first.warm_step_s)


def simulate(
    configs: Mapping[str, RunConfig], scenario: Scenario, directory: Path, *, progress: ProgressDisplay | None = None
) -> SimulationResult:
    """Train a run in virtual time and write its events and checkpoints to `directory`, as a real run does.

    Arguments:
        configs: the run's configuration of each learner, by name, in the order of their shards. The first learner makes
            the warm start and initialises the run; none may start before it.
        progress: shows the progress of the first learner.

    Raises:
        ConfigError: an invalid number of learners, or a method that a syncer cannot run.
    """
    method = method_to_simulate(configs)
    data = next(iter(configs.values())).data
    return _Simulation(configs, method, scenario, directory, SharedInputs(load_corpus(data)), progress).run()


def method_to_simulate(configs: Mapping[str, RunConfig]) -> Method:
    """Return the run's method. Raises ConfigError as `simulate` does."""
    first = next(iter(configs.values()))
    method = method_from_table(first.method)
    if method.exchanged == "gradients":
        raise ConfigError(
            "a syncer cannot run DataParallel on gradients, so there is nothing to simulate; `diloco plan utilization` "
            "has its utilisation."
        )
    if len(configs) != first.run.learners:
        raise ConfigError(
            f"run.learners = {first.run.learners} and there are {len(configs)} learners to simulate; make them equal."
        )
    if (pool := Pool.of(first.pool_values)) is not None:
        pool.require(method.quorum.at_least)
    return method


class _Simulation:
    """The simulation of one run."""

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

    def run(self) -> SimulationResult:
        run = self._configs[0].run.name
        starts_s = self._scenario.starts_s or [0.0] * len(self._names)
        path = self._directory / "syncer" / "events.jsonl"
        with EventLog(path, "syncer", clock=lambda: self._run.time.now) as log:
            journal = Journal(log, SyncerMetrics(run))
            scenario, pool = self._scenario, Pool.of(self._configs[0].pool_values)
            self._run = VirtualRun(
                self._names, scenario.step_s, starts_s, scenario.network, scenario.faults, journal, self._record, pool
            )
            log.append(events.SyncerStarted(run=run, address=SIMULATED, method=self._method.to_dict()))
            ended = zip(self._names, self._train_all(), strict=True)
            result = SimulationResult({name: None if isinstance(each, Lost) else each for name, each in ended})
            self._log_traffic(log, result)
            self._account(result)
            steps = 0 if self._run.driver is None else self._run.driver.state.step
            log.append(events.Finished(steps=steps, tokens=result.tokens, seconds=result.duration_s, reason="stopped"))
        logs = (self._directory / name / "events.jsonl" for name in self._names)
        result.losses, result.training_losses = read_losses(logs)
        if any(config.train.holds_experts is not None for config in self._configs):  # they evaluate their parts
            result.loss = self._loss_of_whole_model()
            result.losses = [] if result.loss is None else [(result.duration_s, result.loss)]
        return result

    def _train_all(self) -> list[Summary | Lost]:
        try:
            return run_virtual(self._train, self._run)
        except ExchangeError as error:
            if self._run.has_model:
                raise
            first = self._names[0]
            raise ConfigError(
                f"{first}, which initialises the run, is killed before that and never restarted; restart it, or kill "
                "it later."
            ) from error

    def _train(self, index: int, exchange: Local) -> Summary | Lost:
        """Train one learner as `diloco train` would."""
        config, name = self._configs[index], self._names[index]
        exchange.initialises = index == 0
        first = index == 0 and not exchange.run_exists
        steps_alone = itertools.count()

        def now_s() -> float:
            return exchange.now_s

        def attach(
            model: nn.Module, optimizer: Optimizer, steps: int, tokens: int, holding: Holding
        ) -> AnyLearner:  # fmt: skip
            exchange.initial_step, exchange.initial_tokens = steps, tokens
            own, rewarm_steps = (exchange.again(), 0) if holding.again else (exchange, config.train.rewarm_steps)
            own.is_dealt = holding.is_dealt
            return Learner(
                model, optimizer, method=self._method, exchange=own, trains=config.train.trains or None,
                trains_experts=config.train.trains_experts, holds_experts=holding.experts, whole=holding.whole,
                overlap=config.train.overlap, rewarm_steps=rewarm_steps, buffers=buffer_roles(model),
            )  # fmt: skip

        def stepped_alone() -> None:
            began_s = exchange.now_s
            exchange.sleep(self._warm_step_s(index, next(steps_alone)))
            self._record("compute", index, began_s, exchange.now_s)

        checkpoints = self._directory / name / CHECKPOINTS
        resume_from = latest_checkpoint(checkpoints) if checkpoints.is_dir() else None
        part = LearnerSpec(name, "learner", shard=index, initialise=first, resume_from=resume_from)
        trainer = Trainer(
            config, part, attach, self._progress if first else None, clock=Clock(now_s, now_s, stepped_alone),
            shared=self._shared, deal=exchange.deal,
        )  # fmt: skip
        try:
            summary: Summary | Lost = trainer.train()
        except DrainedError:  # the pool had shrunk when it joined
            summary = Lost()
        self._ended_s[index] = exchange.now_s
        return summary

    def _loss_of_whole_model(self) -> float | None:
        """The held-out loss of the syncer's model, with all experts and free routing; None: the run has no model."""
        if self._run.driver is None or not self._run.has_model:
            return None
        config, corpus, held = self._configs[0], self._shared.corpus, self._run.driver.state.model
        length, layout = config.data.sequence_length, held.layout
        assert isinstance(layout, Layout)
        thetas = [held.held(index).theta for index in range(len(held.versions))]
        state = named_tensors(layout, thetas) | (load(held.static) if held.static else {})
        model: nn.Module = build_model(config.model, corpus.vocab_size, length, config.run.seed)
        batches = held_out_batches(corpus, length, config.evaluate.sequences, BATCH)
        return evaluate(model.to(choose_device(config.train.device)), state, batches)

    def _warm_step_s(self, index: int, step: int) -> float:
        known_s, config = self._scenario.warm_step_s(step), self._configs[index]
        if known_s is not None:
            return known_s
        return self._scenario.step_s(index, 0) * config.train.global_batch / config.learner_batch

    def _record(self, kind: Kind, learner: int, began_s: float, ended_s: float) -> None:
        self._spans[learner].append(Span(began_s, ended_s, kind))

    def _log_traffic(self, log: EventLog, result: SimulationResult) -> None:
        for name, summary in result.summaries.items():
            if summary is not None:
                sent = dict(summary.metrics["num_bytes"])
                received = {"contributions": sent.pop("contributions", 0)}
                log.append(events.Traffic(learner=name, received_bytes=received, sent_bytes=sent))

    def _account(self, result: SimulationResult) -> None:
        """Set loss, duration and the learners' spans; time that is neither compute nor absence is waiting."""
        killed_s = {fault.learner: fault.at_s for fault in self._scenario.faults if fault.back_s is None}
        result.duration_s = max(end_s or killed_s.get(index, 0.0) for index, end_s in enumerate(self._ended_s))
        result.tokens = 0 if self._run.driver is None else self._run.driver.state.run_tokens
        ended = [each for each in result.summaries.values() if each is not None]
        if ended:
            result.loss = max(ended, key=lambda each: sum(each.metrics["versions"])).held_out_loss
        for index, name in enumerate(self._names):
            end_s = self._ended_s[index] or result.duration_s
            stopped = [
                Span(fault.at_s, min(end_s, end_s if fault.back_s is None else fault.back_s), "stopped")
                for fault in self._scenario.faults
                if fault.learner == index and fault.at_s < (self._ended_s[index] or math.nextafter(end_s, math.inf))
            ]
            computed = (each for each in self._spans[index] if each.kind == "compute")
            busy = sorted([*stopped, *computed], key=lambda each: each.begin_s)
            waiting, at_s = [], busy[0].begin_s if busy else end_s  # waiting starts at the first step
            for each in busy:
                if each.begin_s > at_s:
                    waiting.append(Span(at_s, each.begin_s, "waiting"))
                at_s = max(at_s, each.end_s)
            if end_s > at_s:
                waiting.append(Span(at_s, end_s, "waiting"))
            result.spans[name] = [*self._spans[index], *stopped, *waiting]
