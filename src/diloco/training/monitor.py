"""Reports of a learner's training: events for programs, a status for people, points for trackers, held-out losses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco import events as ev
from diloco.event_log import EventLog
from diloco.tracking.feed import Feed
from diloco.tracking.values import Point, learner_values, trainer_point
from diloco.training.held_out import HeldOutEvaluator
from diloco.training.inner import StepResult
from diloco.training.learners import AnyLearner
from diloco.training.progress import ProgressDisplay, status_line
from diloco.training.spec import LearnerSpec, Summary
from diloco.training.state import TrainingState

FragmentVersions = tuple[tuple[int, str], ...]
"""The version and digest of each fragment."""


def fragment_versions(learner: AnyLearner) -> FragmentVersions:
    """The fragment versions that a learner has adopted; none without an exchange."""
    return tuple(zip(learner.versions, learner.digests, strict=True))


class Monitor:
    """Reports on a learner after every step. Every rank has one, since ranks evaluate together; the first one reports.

    Arguments:
        event_log: path of the events file; None on all ranks but the first, which then report nothing.
        feed: the trackers of the first rank; None: no trackers.
    """

    def __init__(
        self,
        spec: LearnerSpec,
        training: TrainingState,
        evaluator: HeldOutEvaluator,
        event_log: Path | None,
        progress: ProgressDisplay,
        feed: Feed | None,
    ) -> None:
        self._spec, self._training, self._evaluator = spec, training, evaluator
        self._config, self._ranks, self._clock = training.config, training.ranks, training.clock
        self._log = None if event_log is None else EventLog(event_log, who=spec.name, clock=self._clock.stamp)
        self._progress = ProgressDisplay() if event_log is None else progress
        self._feed = None if event_log is None else feed
        self._last_logged = (self._clock.seconds(), 0)  # time and tokens
        self._waits = (0.0, 0)

    def append(self, event: ev.Event) -> None:
        """Write an event."""
        if self._log is not None:
            stamped = self._log.append(event)
            if self._feed is not None and (point := trainer_point(stamped)) is not None:
                self._feed.put(point)

    def say(self, text: str) -> None:
        """Show people one sentence about this learner."""
        self._progress.say(f"{self._spec.name} {text}")

    def prepared(self) -> None:
        """Report that training starts: model and data are in place, and the next step is the first."""
        training, role = self._training, self._spec.role
        self.append(
            ev.RunStarted(
                run=self._config.run.name,
                learners=self._config.run.learners,
                num_parameters=sum(p.numel() for p in training.model.parameters()),
                step=training.step,
                tokens=training.tokens,
                role=role,
                shard=None if role == "baseline" else self._spec.shard,
                method=self._config.method,
            )
        )
        held = fragment_versions(training.learner)
        self._adopted(((-1, ""),) * len(held))
        for each in self._spec.unusable:
            self.say(f"cannot use its checkpoint: {each.error}; the checkpoint is kept as {each.kept}")
            self.append(each)
        self._last_logged = (self._clock.seconds(), training.tokens)

    def stepped(self, lr: float, result: StepResult, before: FragmentVersions, *, warming_up: bool) -> None:
        """Report one inner step.

        Arguments:
            lr: learning rate of the step.
            before: fragment versions that the learner held before the step.
        """
        config, training, step = self._config, self._training, self._training.step
        self._adopted(before)
        if step % config.train.log_every_steps == 0:
            loss = self._ranks.mean(float(result.loss))
            metrics = training.metrics()
            self._log_step(loss, lr, float(result.gradient_norm))
            self._log_exchange(metrics)
            if (load := training.mixture.load(step)) is not None:
                self.append(load)
            training.learner.log(training_loss=loss)
        if self._progress.is_due():
            self._progress.show(self._status(lr, float(result.loss), "warm start" if warming_up else ""))
        if config.evaluate.every_steps and step % config.evaluate.every_steps == 0:
            self._evaluate()

    def finished(self, reason: str, seconds: float, *, evaluates: bool = True) -> Summary:
        """Report the end of training, with a last evaluation unless `evaluates` is False. Returns the summary."""
        training = self._training
        loss, sample = None, ""
        if evaluates:
            loss, sample = self._evaluate(), self._evaluator.sample(training.learner, self._ranks)
        step, tokens = training.step, training.tokens
        if sample:
            self.append(ev.Sampled(step=step, prompt=self._config.evaluate.prompt, text=sample))
        self.append(ev.Finished(steps=step, tokens=tokens, seconds=seconds, reason=reason, loss=loss))
        return Summary(
            name=self._spec.name,
            role=self._spec.role,
            reason=reason,
            steps=step,
            tokens=tokens,
            run_tokens=training.run_tokens,
            held_out_loss=loss,
            seconds=seconds,
            step_s=training.inner_s / max(1, training.num_steps),
            sample=sample,
            metrics=training.metrics(),
        )

    def _adopted(self, before: FragmentVersions) -> None:
        """Report the fragments that have another version or digest than before."""
        after = fragment_versions(self._training.learner)
        for fragment, (old, new) in enumerate(zip(before, after, strict=True)):
            if new != old and new[0] >= 0:  # it has no version of a fragment that this learner does not hold
                version, digest = new
                self.append(ev.Adopted(step=self._training.step, fragment=fragment, version=version, digest=digest))

    def _log_step(self, loss: float, lr: float, gradient_norm: float) -> None:
        now, tokens = self._clock.seconds(), self._training.tokens
        since, before = self._last_logged
        self._last_logged = (now, tokens)
        rate = (tokens - before) / max(1e-9, now - since)
        self.append(
            ev.Stepped(
                step=self._training.step, loss=loss, lr=lr, tokens=tokens, tokens_per_s=rate,
                gradient_norm=gradient_norm,
            )
        )  # fmt: skip

    def _log_exchange(self, metrics: Mapping[str, Any]) -> None:
        """Report a learner's counters, and how long its training thread has waited since the last report."""
        step = self._training.step
        if self._feed is not None and (values := learner_values(metrics)):
            self._feed.put(Point(step, self._clock.stamp(), values))
        seconds, times = float(metrics.get("blocked_s", 0.0)), int(metrics.get("num_blocked", 0))
        if times > self._waits[1]:
            self.append(ev.Waited(step=step, seconds=seconds - self._waits[0], times=times - self._waits[1]))
        self._waits = (seconds, times)

    def _status(self, lr: float, loss: float, note: str) -> str:
        training = self._training
        return status_line(
            self._spec.name, training.step, loss, lr, training.tokens_per_s, training.run_tokens,
            self._config.run.tokens, training.metrics(), note,
        )  # fmt: skip

    def _evaluate(self) -> float:
        """The held-out loss of the global model, on all ranks; the first rank computes it."""
        learner, step = self._training.learner, self._training.step
        if (known := self._evaluator.known(learner)) is not None:
            return known
        loss = self._evaluator.loss(learner, self._ranks)
        if self._training.part is None:  # the syncer shows the loss of the global model
            learner.log(held_out_loss=loss)
        self.append(
            ev.Evaluated(
                step=step,
                tokens=self._training.run_tokens,
                loss=loss,
                num_sequences=self._evaluator.num_sequences,
                versions=learner.versions,
                of_part=self._training.part is not None,
            )
        )
        model = "the global model" if self._training.part is None else "its part of the global model"
        self.say(f"step {step}: held-out loss of {model} {loss:.4f}")
        return loss

    def close(self) -> None:
        """Close the events file."""
        if self._log is not None:
            self._log.close()
