"""Watches a part of a run train: how fast, what it adopts, what it waits for, and how good the global model is."""

from diloco import events as ev
from diloco.config import RunConfig
from diloco.training.held_out import HeldOutEvaluator
from diloco.training.inner import StepResult
from diloco.training.learners import AnyLearner
from diloco.training.progress import StepStatus
from diloco.training.rank_group import RankGroup
from diloco.training.reporter import Reporter
from diloco.training.spec import LearnerSpec, Summary
from diloco.training.state import TrainingState

Holdings = tuple[tuple[int, str], ...]
"""The version and digest of each fragment."""


def holdings(learner: AnyLearner) -> Holdings:
    """What a learner has adopted; nothing without an exchange."""
    return tuple(zip(learner.versions, learner.digests, strict=True))


class Monitor:
    """Reports on a part after every step. Every rank of a part has one, since some results are shared."""

    def __init__(
        self,
        config: RunConfig,
        part: LearnerSpec,
        island: TrainingState,
        judge: HeldOutEvaluator,
        job: RankGroup,
        reporter: Reporter,
    ) -> None:
        self._config = config
        self._part = part
        self._island = island
        self._judge = judge
        self._job = job
        self._reporter = reporter

    def begins(self) -> None:
        """The part is what it will be."""
        config, part = self._config, self._part
        self._reporter.append(
            ev.RunStarted(
                run=config.run.name,
                learners=config.run.learners,
                num_parameters=sum(p.numel() for p in self._island.model.parameters()),
                step=self._island.step,
                tokens=self._island.tokens,
                role=part.role,
                shard=None if part.role == "baseline" else part.shard,
                method=config.method,
            )
        )
        held = holdings(self._island.learner)
        self._reporter.adopted(self._island.step, ((-1, ""),) * len(held), held)

    def stepped(self, lr: float, result: StepResult, held: Holdings, *, warming_up: bool) -> None:
        """A step was taken at this learning rate, before which the learner held these fragments."""
        config, island, step = self._config, self._island, self._island.step
        self._reporter.adopted(step, held, holdings(island.learner))
        if step % config.train.log_every_steps == 0:
            loss, norm = self._job.mean(float(result.loss)), float(result.gradient_norm)
            self._reporter.stepped(step, loss=loss, lr=lr, tokens=island.tokens, gradient_norm=norm)
            self._reporter.exchanged(step, island.learner.metrics())
            island.learner.log(training_loss=loss)
        if self._reporter.wants_status():
            self._reporter.show(self._status(lr, float(result.loss), "warm start" if warming_up else ""))
        if config.evaluate.every_steps and step % config.evaluate.every_steps == 0:
            self._evaluate()

    def finished(self, reason: str, seconds: float, *, evaluates: bool = True) -> Summary:
        """The last step was taken: evaluate, if there is time for it, and say what the part comes to."""
        island = self._island
        loss, sample = None, ""
        if evaluates:
            loss = self._evaluate()
            state = island.learner.global_state_dict()  # every rank has a part in it
            sample = self._judge.sample(state) if self._job.first else ""
        step, tokens = island.step, island.tokens
        if sample:
            self._reporter.append(ev.Sampled(step=step, prompt=self._config.evaluate.prompt, text=sample))
        self._reporter.append(ev.Finished(steps=step, tokens=tokens, seconds=seconds, reason=reason, loss=loss))
        return Summary(
            name=self._part.name,
            role=self._part.role,
            reason=reason,
            steps=step,
            tokens=tokens,
            run_tokens=island.run_tokens,
            held_out_loss=loss,
            seconds=seconds,
            step_s=island.inner_s / max(1, island.num_steps),
            sample=sample,
            metrics=island.learner.metrics(),
        )

    def _status(self, lr: float, loss: float, note: str) -> StepStatus:
        island, metrics = self._island, self._island.learner.metrics()
        num_bytes = metrics.get("num_bytes", {})
        num_updates = metrics.get("updates", 0)
        return StepStatus(
            name=self._part.name,
            step=island.step,
            loss=loss,
            lr=lr,
            tokens_per_s=island.tokens_per_s,
            run_tokens=island.run_tokens,
            budget=self._config.run.tokens,
            versions=island.learner.versions,
            sent_bytes=num_bytes.get("contributions", 0),
            received_bytes=num_bytes.get("updates", 0) + num_bytes.get("joins", 0),
            participation=metrics["merges"] / num_updates if num_updates else None,
            note=note,
        )

    def _evaluate(self) -> float:
        """The global model's loss; the first rank finds it, and all know it."""
        learner = self._island.learner
        loss = self._judge.known(learner)
        if loss is not None:
            return loss
        state = learner.global_state_dict()  # every rank has a part in it
        loss = self._job.shared(self._judge.loss(state) if self._job.first else 0.0)
        self._judge.remember(learner, loss)
        learner.log(held_out_loss=loss)
        step = self._island.step
        self._reporter.append(
            ev.Evaluated(
                step=step,
                tokens=self._island.run_tokens,
                loss=loss,
                num_sequences=self._judge.num_sequences,
                versions=learner.versions,
            )
        )
        self._reporter.say(f"step {step}: held-out loss of the global model {loss:.4f}")
        return loss
