"""Tasks of reinforcement learning: prompts made from seeds, and the score of a completion.

A task is two functions, of the user's own module, of reasoning-gym or of verifiers; a reward model may replace the
second. Only `Task.load` imports torch, and only for a reward model.
"""

import asyncio
import hashlib
import importlib
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Protocol

from diloco.config import TaskTable
from diloco.errors import ConfigError, required_library, translated
from diloco.tables import nearest

GYM = "reasoning-gym:"
"""Prefix of a source that is a task of reasoning-gym."""

VERIFIERS = "verifiers:"
"""Prefix of a source that is an environment of verifiers."""

TRIES = 10_000
"""Maximum number of seeds tried for a prompt of the wanted part."""

MAX_SEED = 2**31
"""Seeds are below it, as numpy's generators demand."""


class Source(Protocol):
    """The two functions of a task."""

    def sample(self, seed: int) -> Mapping[str, Any] | str:
        """A prompt, as a function of the seed: its text; or a mapping of plain JSON with that as "prompt", "answer" if
        there is one, and what else the score needs."""
        ...

    def score(self, prompt: Mapping[str, Any], completion: str) -> float:
        """The finite score of a completion. `prompt`: as sampled, with its "seed"; a text as {"prompt": text}."""
        ...


class Task:
    """One task of a run.

    Raises:
        ConfigError: the settings name no task, or have no effect for it.
    """

    def __init__(self, name: str, settings: TaskTable) -> None:
        self._name, self._settings = name, settings
        if settings.source.startswith(GYM):
            self._source: Source = GymTask(name, settings)
        elif settings.source.startswith(VERIFIERS):
            self._source = EnvironmentTask(name, settings)
        else:
            self._source = _own_task(name, settings)
        if settings.reward_model is not None and not settings.exact:
            raise ConfigError(f"task.{name}.exact has no effect with a reward_model; drop it")
        self._classifier: _Classifier | None = None

    def load(self) -> None:
        """Load the reward model, if the task has one. Raises ConfigError if that fails."""
        if (path := self._settings.reward_model) is not None:
            self._classifier = _Classifier(path)

    def prompt(self, number: int, *, held_out: bool = False) -> dict[str, Any]:
        """The prompt with this number of the held-out part, or of the other one: what the task sampled, and its "seed".

        A prompt is held out by the SHA-256 of its text, so that no seed leads to a held-out text in training. The seeds
        tried are a hash of the number and the attempt.

        Raises:
            ConfigError: the task raised, its sample is not a prompt, or no seed led to the wanted part.
        """
        fraction = self._settings.held_out
        if held_out and fraction == 0:
            raise ConfigError(f"task.{self._name} has no held-out prompts; set task.{self._name}.held_out")
        for attempt in range(TRIES):
            seed = _hashed(f"{number} {attempt}") % MAX_SEED
            prompt = self._sample(seed)
            if (_hashed(prompt["prompt"]) < fraction * 2**64) == held_out:
                return prompt
        part = "is held out" if held_out else "is not held out"
        raise ConfigError(
            f"task.{self._name}.held_out = {fraction}: none of {TRIES} sampled prompts {part}; change the "
            "fraction, or give the task more prompts"
        )

    def score(self, prompt: Mapping[str, Any], completion: str) -> float:
        """The score of a completion, unchecked: it may be no number, and the task may raise anything. With a reward
        model, call `load` before."""
        if self._classifier is not None:
            return self._classifier.score(prompt["prompt"] + completion)
        return self._source.score(prompt, completion)

    def _sample(self, seed: int) -> dict[str, Any]:
        failed = f"task.{self._name}: the sample of seed {seed}"
        raised = Exception, SystemExit
        with translated(raised, ConfigError, f"{failed} raised an error", "correct the task or its settings"):
            sample = self._source.sample(seed)
            sample = {"prompt": sample} if isinstance(sample, str) else dict(sample)
        with translated(
            (TypeError, ValueError, RecursionError), ConfigError, f"{failed} is not JSON", "return plain values"
        ):
            plain: dict[str, Any] = json.loads(json.dumps({**sample, "seed": seed}, allow_nan=False))
            str(plain.get("prompt")).encode()  # no lone surrogates
        if not isinstance(plain.get("prompt"), str) or not plain["prompt"]:
            raise ConfigError(f'{failed} has no text "prompt"; return the text, or a mapping with it')
        return plain


class Tasks:
    """The tasks of a run, whose prompts take turns.

    Attributes:
        tasks: each by its name, in alphabetical order.

    Raises:
        ConfigError: as `Task`; or there are none.
    """

    def __init__(self, settings: Mapping[str, TaskTable]) -> None:
        if not settings:
            raise ConfigError("the run has no task; add a table [task.NAME]")
        self.tasks = {name: Task(name, settings[name]) for name in sorted(settings)}

    def prompt(self, number: int, *, held_out: bool = False) -> tuple[str, dict[str, Any]]:
        """The name of the task of `task_of`, and its prompt with the quotient of `number` and the number of tasks.
        Raises ConfigError as `Task.prompt`."""
        name = task_of(number, self.tasks)
        return name, self.tasks[name].prompt(number // len(self.tasks), held_out=held_out)


def task_of(number: int, names: Collection[str]) -> str:
    """The task of a prompt: `number` modulo the number of tasks selects it, in alphabetical order."""
    return sorted(names)[number % len(names)]


class GymTask:
    """A task of reasoning-gym. The seed of a sample is its index in a data set with seed 0; where the library bounds
    the index, it is the seed of a data set of one sample.

    Raises:
        ConfigError: the library is not installed, or has no such task, setting or field of a template.
    """

    def __init__(self, name: str, settings: TaskTable) -> None:
        key, self._task = f"task.{name}", settings.source.removeprefix(GYM)
        self._key, self._exact, self._template = key, settings.exact, settings.template
        self._settings = dict(settings.settings)
        with required_library("reasoning_gym", extra="rl", by=f'{key}.source = "{settings.source}" needs'):
            from reasoning_gym.factory import DATASETS, create_dataset
        if self._task not in DATASETS:
            raise ConfigError(
                f'{key}.source: reasoning-gym has no task "{self._task}"; {nearest(self._task, list(DATASETS))}'
            )
        known = [each.name for each in fields(DATASETS[self._task][1]) if each.name not in ("seed", "size")]
        for setting in self._settings:
            if setting not in known:
                raise ConfigError(f'unknown key "{key}.settings.{setting}"; {nearest(setting, known)}')
        self._create = create_dataset
        # The library checks settings by assertions and by whatever their use raises.
        with translated(Exception, ConfigError, f"{key}.settings do not suit {self._task}", "correct them"):
            self._dataset = create_dataset(self._task, size=1, seed=0, **self._settings)
            entry = self._entry(0)
        if self._exact and not isinstance(entry["answer"], str):
            raise ConfigError(f"{key}.exact: {self._task} has no single right answer; set {key}.exact = false")
        self._prompt(entry)

    def sample(self, seed: int) -> dict[str, Any]:
        entry = self._entry(seed)
        return {"prompt": self._prompt(entry), "answer": entry["answer"]}

    def score(self, prompt: Mapping[str, Any], completion: str) -> float:
        if self._exact:
            return float(completion.strip() == prompt["answer"].strip())
        # Made again, since entries may hold what JSON changes: tuples, and keys that are numbers.
        score: float = self._dataset.score_answer(completion.strip(), self._entry(prompt["seed"]))
        return score

    def _entry(self, seed: int) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = self._dataset[seed]
        except IndexError:
            entry = self._create(self._task, size=1, seed=seed, **self._settings)[0]
        return entry

    def _prompt(self, entry: Mapping[str, Any]) -> str:
        known = {**entry["metadata"], "question": entry["question"]}
        known.pop("answer", None)
        failed, advice = (
            f"{self._key}.template = {self._template!r} has a wrong field",
            f"known are {', '.join(sorted(known))}",
        )
        with translated((LookupError, ValueError, TypeError, AttributeError), ConfigError, failed, advice):
            return self._template.format(**known)


class EnvironmentTask:
    """A single-turn environment of verifiers 0.4: its task number `seed`, modulo their number, with its system prompt
    first. A completion is scored as the reply of a trace, without a runtime.

    Raises:
        ConfigError: library or environment cannot be loaded, or the environment is not of this kind.
    """

    def __init__(self, name: str, settings: TaskTable) -> None:
        _refuse_unused(name, settings, "template", "exact")
        key, environment = f"task.{name}", settings.source.removeprefix(VERIFIERS)
        failed, advice = f'{key}.source = "{settings.source}" cannot be loaded', "install verifiers and the environment"
        with translated(Exception, ConfigError, failed, f"{advice}, and correct {key}.settings"):
            from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

            config = taskset_config_type(environment)(**{**settings.settings, "id": environment})
            taskset = load_taskset(config)
            self._tasks = list(taskset) if taskset.bounded else []
            scores = [reward for task in self._tasks[:1] for reward in (*task.hooks("reward"), *task.plugged_judges())]
            tools = [
                tool for task in self._tasks[:1] for tool in (*taskset.toolsets(config), *task.toolsets(task.config))
            ]
        if not scores or tools or any(map(_needs_runtime, scores)):
            raise ConfigError(
                f'{key}.source = "{settings.source}" is not a finite environment with rewards, or needs tools or a '
                "runtime; choose another"
            )

    def sample(self, seed: int) -> str:
        data = self._tasks[seed % len(self._tasks)].data
        return "\n\n".join(text for text in (data.system_prompt, data.prompt_text) if text)

    def score(self, prompt: Mapping[str, Any], completion: str) -> float:
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls

        task = self._tasks[prompt["seed"] % len(self._tasks)]
        asked = vf.MessageNode(message=vf.UserMessage(content=prompt["prompt"]))
        reply = vf.MessageNode(parent=0, sampled=True, message=vf.AssistantMessage(content=completion))
        seen = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent, state = vf.AgentInfo(config=vf.AgentConfig()), state_cls(type(task))()
        trace = vf.Trace(task=seen, agent=agent, state=state, nodes=[asked, reply])
        asyncio.run(task.score(trace))
        return float(trace.reward)


def _needs_runtime(reward: Any) -> bool:
    runtime = inspect.signature(getattr(reward, "score", reward)).parameters.get("runtime")
    return runtime is not None and runtime.default is inspect.Parameter.empty


def _refuse_unused(name: str, settings: TaskTable, *unused: str) -> None:
    for key in unused:
        if getattr(settings, key) != TaskTable.model_fields[key].get_default(call_default_factory=True):
            raise ConfigError(f'task.{name}.{key} has no effect with source = "{settings.source}"; drop it')


def _own_task(name: str, settings: TaskTable) -> Source:
    """The module of a dotted path, or its object after the colon; a class is called without arguments."""
    _refuse_unused(name, settings, "template", "exact", "settings")
    key = f"task.{name}"
    module, _, path = settings.source.partition(":")
    failed = f'{key}.source = "{settings.source}" cannot be loaded'
    advice = (
        "name a module on PYTHONPATH (for `diloco rl`, also one beside the run file), "
        '"module:object", "reasoning-gym:NAME" or "verifiers:NAME"'
    )
    with translated(Exception, ConfigError, failed, advice):  # an import runs anything
        found: Any = importlib.import_module(module)
        for attribute in path.split(".") if path else ():
            found = getattr(found, attribute)
        if isinstance(found, type):
            found = found()
    for function in ("sample", "score"):
        if not callable(getattr(found, function, None)):
            raise ConfigError(
                f'{key}.source = "{settings.source}" has no function {function}; a task has sample and score'
            )
    source: Source = found
    return source


class _Classifier:
    """A sequence classifier of one label.

    Raises:
        ConfigError: `path` has none, or has no tokenizer.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with required_library("transformers", extra="train", by="a reward_model needs"):
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        failed = f'reward_model = "{path}" cannot be loaded'
        with translated(
            (OSError, ValueError, KeyError, RuntimeError), ConfigError, failed, "name a sequence classifier"
        ):
            self._model = AutoModelForSequenceClassification.from_pretrained(path).eval()
            self._tokenizer = AutoTokenizer.from_pretrained(path)
        if self._model.config.num_labels != 1:
            raise ConfigError(
                f'reward_model = "{path}" has {self._model.config.num_labels} labels; name a classifier with one'
            )

    def score(self, text: str) -> float:
        """The logit of a text. Raises ValueError for more tokens than the tokenizer allows."""
        import torch

        tokens = self._tokenizer(text, return_tensors="pt")["input_ids"]  # int64 (1, T)
        if tokens.shape[1] > (most := self._tokenizer.model_max_length):
            raise ValueError(f"{tokens.shape[1]} tokens are more than the {most} of {self._path}")
        with torch.inference_mode():
            return float(self._model(input_ids=tokens).logits[0, 0])


def _hashed(text: str) -> int:
    """A whole number of 64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
