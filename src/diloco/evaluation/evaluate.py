"""Evaluate exports on the held-out data of a run or of files, and by tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from diloco.config import load_config
from diloco.errors import ConfigError
from diloco.evaluation.builtin_tasks import BUILTIN_TASKS, write_task_files
from diloco.evaluation.exports import LONGEST, Export, context_of, held_out_loss, load_export, text_batches
from diloco.evaluation.harness import Harness, require_harness
from diloco.evaluation.scores import ExportScores, TaskResult
from diloco.tables import read_text
from diloco.training.data.corpus import Corpus, load_corpus
from diloco.training.data.streams import held_out_batches
from diloco.training.rank_group import choose_device

MAX_CLOZE_TOKENS = 1_000_000
"""Of held-out data, for the words that a cloze leaves out."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What is to be found out about exports.

    Attributes:
        task_files: directories of task files for lm-eval.
        texts: files of held-out text; or `run`, a run file with `overrides`, whose held-out data is meant.
        sequences, context: of `texts`: so many windows, of so many tokens (None: what all exports take).
        limit: documents of each task, at most.
        batch: sequences that a model is given at a time.
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


def evaluate_exports(paths: Sequence[Path], wanted: EvaluationRequest) -> list[ExportScores]:
    """The scores of every export, in order. Exports with the same tokenizer are given the same sequences and documents.

    Raises:
        ConfigError: something that was asked for cannot be: no export, no such task, a missing package.
        ExchangeError: the data of a task cannot be had here.
    """
    if wanted.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {wanted.device} is not known; use cpu or cuda")
    device = str(choose_device(wanted.device))
    contexts = [context_of(path) for path in paths]
    config = None if wanted.run is None else load_config(wanted.run, wanted.overrides)
    corpus = None if config is None else load_corpus(config.data)
    text = "\n".join(read_text(path, "text") for path in wanted.texts)
    length = _length(paths, contexts, wanted) if config is None else config.data.sequence_length
    num_windows = wanted.sequences if config is None else config.evaluate.sequences
    found: list[ExportScores] = []
    with ExitStack() as stack:
        harness = _harness(stack, wanted, text if corpus is None else None, corpus) if wanted.tasks else None
        for name, path in zip(_names(paths), paths, strict=True):
            export = load_export(path, device)  # one at a time is in memory
            results: list[TaskResult] = []
            if corpus is not None:
                _check_vocabulary(export, corpus)
                results.append(held_out_loss(export.model, held_out_batches(corpus, length, num_windows, wanted.batch)))
            elif text:
                results.append(held_out_loss(export.model, _batches_of(text, export, length, wanted)))
            if harness is not None:
                results += harness.run(export, limit=wanted.limit, batch=wanted.batch)
            found.append(ExportScores(name, export.num_parameters, {result.name: result for result in results}))
    return found


def _harness(stack: ExitStack, wanted: EvaluationRequest, text: str | None, corpus: Corpus | None) -> Harness:
    """The tasks; the project's own among them are written to a directory that goes with the stack."""
    require_harness()
    names = [name for name in BUILTIN_TASKS if name in wanted.tasks]
    if "diloco_cloze" in names and corpus is not None:
        text = held_out_text(corpus)
    own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diloco-tasks-")))
    write_task_files(own, names, text=text or None)
    return Harness(wanted.tasks, [own, *wanted.task_files])


def held_out_text(corpus: Corpus) -> str:
    """The beginning of a corpus' held-out part, as text. Raises ConfigError where its tokens are not text."""
    tokens = corpus.held_out.read(0, min(len(corpus.held_out), MAX_CLOZE_TOKENS))
    if corpus.is_bytes:
        return bytes(tokens.tolist()).decode("utf-8", errors="replace")
    if corpus.tokenizer is None:
        raise ConfigError("diloco_cloze needs text, and the run's data is tokens without a tokenizer; drop the task")
    return str(corpus.tokenizer.decode(tokens.tolist()))


def _length(paths: Sequence[Path], contexts: Sequence[int], wanted: EvaluationRequest) -> int:
    """Tokens of a sequence of text that all exports take."""
    longest, path = min(zip(contexts, paths, strict=True))
    if wanted.context is not None and wanted.context > longest:
        raise ConfigError(f"--context {wanted.context} is more than the {longest} tokens that {path} takes; lower it")
    return min(longest, LONGEST) if wanted.context is None else wanted.context


def _batches_of(text: str, export: Export, length: int, wanted: EvaluationRequest) -> list[Tensor]:
    tokens = export.required_tokenizer().encode(text, add_special_tokens=False, verbose=False)
    batches = text_batches(tokens, length, wanted.sequences, wanted.batch)
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
            f"{export.path} knows {vocab_size} tokens, and the data of --run has {corpus.vocab_size}; give the run "
            "file that it was exported with"
        )


def _names(paths: Sequence[Path]) -> list[str]:
    """The exports by their last parts, or by their paths where these are the same."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]
