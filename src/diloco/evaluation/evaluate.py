"""Evaluate exports on the held-out data of a run or of files, and by tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from diloco.config import load_config
from diloco.errors import ConfigError
from diloco.evaluation.builtin_tasks import BUILTIN_TASKS, write_task_files
from diloco.evaluation.exports import LONGEST, Export, context_of, held_out_loss, load_export
from diloco.evaluation.harness import Harness
from diloco.evaluation.scores import ExportScores, TaskResult
from diloco.tables import read_text
from diloco.training.data.corpus import Corpus, Tokens, load_corpus
from diloco.training.data.streams import held_out_batches, spaced_windows
from diloco.training.rank_group import choose_device

MAX_CLOZE_TOKENS = 1_000_000
"""Limit for the held-out data that the cloze task takes its words from."""


@dataclass(frozen=True)
class EvaluationRequest:
    """The evaluations to run on exports.

    Attributes:
        task_files: directories of task files for lm-eval.
        texts: files of held-out text.
        run, overrides: a run file, whose held-out data is used in place of `texts`.
        sequences, context: number and length of the windows of `texts`; context None: the longest that all exports
            accept.
        limit: maximum number of documents of each task.
        batch: sequences in a batch.
    """

    tasks: tuple[str, ...] = ()
    task_files: tuple[Path, ...] = ()
    texts: tuple[Path, ...] = ()
    run: Path | None = None
    overrides: tuple[str, ...] = ()
    sequences: int = 256
    context: int | None = None
    limit: int | None = None
    batch: int = 16
    device: str = "cpu"


class EvaluationData:
    """The data and tasks of a request, loaded once for all exports. Exports with the same tokenizer
    get the same sequences and documents.

    Arguments:
        contexts: of the exports, by path (`context_of`).

    Attributes:
        device: where exports are to be loaded.

    Raises:
        ConfigError: an unknown task, a missing package, or a request that does not fit the exports.
    """

    def __init__(self, request: EvaluationRequest, contexts: Mapping[Path, int]) -> None:
        if request.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device {request.device} is not known; use cpu or cuda")
        self.device, self._request = str(choose_device(request.device)), request
        config = None if request.run is None else load_config(request.run, request.overrides)
        self._corpus = None if config is None else load_corpus(config.data)
        self._text = "\n".join(read_text(path, "text") for path in request.texts)
        self._length = _length(contexts, request) if config is None else config.data.sequence_length
        self._num_windows = request.sequences if config is None else config.evaluate.sequences
        with ExitStack() as stack:
            text = self._text if self._corpus is None else None
            self._harness = _harness(stack, request, text, self._corpus) if request.tasks else None
            self._opened = stack.pop_all()

    def close(self) -> None:
        """Remove the files of the tasks."""
        self._opened.close()

    def of(self, name: str, export: Export) -> ExportScores:
        """The scores of an export.

        Raises:
            ConfigError: it does not fit the request. ExchangeError: the data of a task cannot be loaded.
        """
        request, corpus, results = self._request, self._corpus, list[TaskResult]()
        if corpus is not None:
            _check_vocabulary(export, corpus)
            batches = held_out_batches(corpus, self._length, self._num_windows, request.batch)
            results.append(held_out_loss(export.model, batches))
        elif request.texts:
            results.append(held_out_loss(export.model, _batches_of(self._text, export, self._length, request)))
        if self._harness is not None:
            results += self._harness.run(export, limit=request.limit, batch=request.batch)
        return ExportScores(name, export.num_parameters, {result.name: result for result in results})


def evaluate_exports(paths: Sequence[Path], request: EvaluationRequest) -> list[ExportScores]:
    """The scores of every export, in order.

    Raises:
        ConfigError: not an export; others as `EvaluationData`. ExchangeError: the data of a task cannot be loaded.
    """
    with closing(EvaluationData(request, {path: context_of(path) for path in paths})) as evaluation:
        named = zip(_names(paths), paths, strict=True)
        return [evaluation.of(name, load_export(path, evaluation.device)) for name, path in named]  # one at a time


def _harness(stack: ExitStack, request: EvaluationRequest, text: str | None, corpus: Corpus | None) -> Harness:
    """The harness of the tasks, with the built-in ones in a directory that `stack` removes."""
    names = [name for name in BUILTIN_TASKS if name in request.tasks]
    if "diloco_cloze" in names and corpus is not None:
        text = held_out_text(corpus)
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-tasks-")))
    write_task_files(directory, names, text=text or None)
    return Harness(request.tasks, [directory, *request.task_files])


def held_out_text(corpus: Corpus) -> str:
    """The beginning of the held-out part of a corpus, as text. Raises ConfigError if its tokens cannot be decoded."""
    tokens = corpus.held_out.read(0, min(len(corpus.held_out), MAX_CLOZE_TOKENS))
    if corpus.is_bytes:
        return bytes(tokens.tolist()).decode("utf-8", errors="replace")
    if corpus.tokenizer is None:
        raise ConfigError("diloco_cloze needs text, but the run's data is tokens without a tokenizer; remove the task")
    return str(corpus.tokenizer.decode(tokens.tolist()))


def _length(contexts: Mapping[Path, int], request: EvaluationRequest) -> int:
    """Tokens of a window of text that all exports accept."""
    path, longest = min(contexts.items(), key=lambda it: it[::-1])
    if request.context is not None and request.context > longest:
        raise ConfigError(
            f"--context {request.context} is more than the {longest} tokens that {path} accepts; lower it"
        )
    return min(longest, LONGEST) if request.context is None else request.context


def _batches_of(text: str, export: Export, length: int, request: EvaluationRequest) -> list[Tensor]:
    tokens = export.required_tokenizer().encode(text, add_special_tokens=False, verbose=False)
    batches = spaced_windows(Tokens([np.asarray(tokens)]), length, request.sequences, request.batch)
    if sum(map(len, batches)) < 2:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, less than two sequences of {length} + 1; give more text or lower "
            "--context"
        )
    return batches


def _check_vocabulary(export: Export, corpus: Corpus) -> None:
    vocab_size = export.model.config.get_text_config().vocab_size
    if vocab_size < corpus.vocab_size:
        raise ConfigError(
            f"{export.path} has a vocabulary of {vocab_size}, and the data of --run one of {corpus.vocab_size}; give "
            "the run file that it was exported with"
        )


def _names(paths: Sequence[Path]) -> list[str]:
    """The names of the exports: the last parts of their paths, or the whole paths unless these differ."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]
