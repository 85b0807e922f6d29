"""Runs tasks by lm-eval (EleutherAI's evaluation harness, the extra `eval`) on a loaded export."""

from __future__ import annotations

import io
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, ExchangeError, first_line, required_library
from diloco.evaluation.exports import Export
from diloco.evaluation.scores import Score, TaskResult
from diloco.tables import nearest

BATCH = 16
FEWSHOT_SEED = 1234
"""The default of lm-eval."""
BOOTSTRAPS = 1000
"""Resamples for the standard errors of metrics that are not means."""


def require_harness() -> None:
    """Raise ConfigError unless lm-eval and its requirements for models of transformers are installed."""
    for library in ("lm_eval", "accelerate"):
        with required_library(library, extra="eval", by="tasks need"):
            __import__(library)


class Harness:
    """Tasks by name: those of `directories` first, then those of lm-eval.

    Arguments:
        directories: directories of task files.

    Raises:
        ConfigError: lm-eval is not installed, a directory does not exist, or a task is unknown.
    """

    def __init__(self, tasks: Sequence[str], directories: Sequence[Path] = ()) -> None:
        require_harness()
        from lm_eval.tasks import TaskManager

        for directory in directories:
            if not directory.is_dir():
                raise ConfigError(f"{directory} is not a directory of task files; check --task-files")
        with _quietly():
            self._manager = TaskManager(include_path=list(directories), include_defaults=False)
            if unknown := self._unknown(tasks):  # loading the tasks of lm-eval reads 14,000 files in 10 s
                self._manager = TaskManager(include_path=list(directories))
                unknown = self._unknown(tasks)
        if unknown:
            known = self._manager.all_tasks
            raise ConfigError(f"lm-eval has no task {unknown[0]}; {_nearest(unknown[0], known)}")
        self._tasks = tuple(tasks)

    def _unknown(self, tasks: Sequence[str]) -> list[str]:
        known = set(self._manager.all_tasks)
        return [name for name in tasks if name not in known]

    def run(self, export: Export, *, limit: int | None = None, batch: int = BATCH) -> list[TaskResult]:
        """The scores of an export: every metric of every task, and the means of groups of tasks.

        Arguments:
            limit: maximum number of documents of each task.

        Raises:
            ConfigError: the export has no tokenizer, or a task does not fit the model.
            ExchangeError: the data of a task cannot be loaded.
        """
        tokenizer = export.required_tokenizer()
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        with _quietly(), _failures(self._tasks):
            model = HFLM(
                pretrained=export.model, tokenizer=tokenizer, batch_size=batch, max_length=export.context,
                device=str(export.model.device),
            )  # fmt: skip
            loaded = self._manager.load(list(self._tasks))
            # As `lm_eval.simple_evaluate`, which also inspects git and the machine.
            for task in loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=FEWSHOT_SEED)
            found: dict[str, Any] = lm_eval.evaluate(
                lm=model, task_dict=loaded, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=True
            )
        return list(_results(found))


def _results(found: Mapping[str, Any]) -> Iterator[TaskResult]:
    """The result of each metric, with the values of single documents if the metric is their mean."""
    for task, measures in {**found["results"], **found.get("groups", {})}.items():
        for key, value in measures.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            higher = found.get("higher_is_better", {}).get(task, {}).get(metric, True)
            better = "higher" if higher in (True, None) else "lower"
            samples = [it for it in found["samples"].get(task, ()) if it["filter"] == filter_name]
            values = [it.get(metric) for it in samples]
            numbers = [float(each) for each in values if isinstance(each, int | float)]
            is_mean = bool(numbers) and len(numbers) == len(values)
            if is_mean and math.isclose(sum(numbers) / len(numbers), value, abs_tol=1e-9):
                documents = tuple(str(it["doc_hash"]) for it in samples)
                yield TaskResult(task, metric, better, Score.of(numbers), documents, tuple(numbers))
                continue
            error = measures.get(f"{metric}_stderr,{filter_name}")
            known = error if isinstance(error, float) and math.isfinite(error) else None
            num = found["n-samples"].get(task, {}).get("effective", 0) or len(samples)
            yield TaskResult(task, metric, better, Score.with_error(float(value), known, num))


def _nearest(name: str, known: Sequence[str]) -> str:
    """Suggest the nearest known name, since the list of names is too long for a message."""
    advice = nearest(name, known)
    return advice if advice.startswith("did you mean") else "lm-eval ls tasks lists them"


@contextmanager
def _failures(tasks: Sequence[str]) -> Iterator[None]:
    """A context that turns the errors of lm-eval, which raises those of its parts, into errors of this package."""
    named = ", ".join(tasks)
    try:
        yield
    except OSError as error:  # also raised when the hub cannot be reached
        raise ExchangeError(
            f"the data of {named} cannot be loaded ({first_line(error)}); load it on a machine that reaches the hub, "
            "or use tasks with local files (--task-files)"
        ) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"lm-eval cannot run {named} on this model ({type(error).__name__}: {first_line(error)}); check the tasks"
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """A context without progress messages of lm-eval, and without progress bars outside a terminal."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
