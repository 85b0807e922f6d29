"""The project's own tasks as files that lm-eval reads: a YAML file and a JSON-lines file for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from diloco.errors import ConfigError, StoreError, translated
from diloco.evaluation.documents import Document, arithmetic_documents, bracket_documents, cloze_documents

OWN_TASKS = ("diloco_arithmetic", "diloco_brackets", "diloco_cloze")
NUM_DOCUMENTS = 500

# JSON is YAML, and quotes what has to be quoted. Choices stand where the context ends, without a space between.
_TASK = """# What is asked: docs/evaluate.md. Written by `diloco tasks`.
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
num_fewshot: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def write_task_files(
    directory: Path, names: Sequence[str], *, text: str | None = None, num: int = NUM_DOCUMENTS, seed: int = 0,
    context: int = 200,
) -> None:  # fmt: skip
    """Write the files of some of `OWN_TASKS`. The same arguments write the same documents.

    Arguments:
        directory: made where there is none; lm-eval takes it as `include_path`. The YAML files name its place.
        text: that `diloco_cloze` takes its words from.
        num: documents of each task, at most.
        context: characters before the word that is left out, at most.

    Raises:
        ConfigError: a cloze without a text, or with one that is too short.
        StoreError: the directory cannot be written.
    """
    with translated(OSError, StoreError, f"cannot write tasks to {directory}", "choose another directory"):
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            documents = _documents(name, text, num, seed, context)
            data = (directory / f"{name}.jsonl").resolve()
            lines = (json.dumps(asdict(each), ensure_ascii=False) for each in documents)
            data.write_text("\n".join(lines) + "\n", encoding="utf-8")
            cache = json.dumps(str((directory / ".cache").resolve()))
            (directory / f"{name}.yaml").write_text(
                _TASK.format(name=name, data=json.dumps(str(data)), cache=cache), encoding="utf-8"
            )


def _documents(name: str, text: str | None, num: int, seed: int, context: int) -> list[Document]:
    if name == "diloco_brackets":
        return bracket_documents(num, seed)
    if name == "diloco_arithmetic":
        return arithmetic_documents(num, seed)
    if text is None:
        raise ConfigError("diloco_cloze asks for words of a text; give one with --text FILE or --run RUN_FILE")
    documents = cloze_documents(text, num, seed, context)
    if not documents:
        raise ConfigError(
            f"a text of {len(text)} characters is too short for diloco_cloze, which needs four words of equal length; "
            "give more text"
        )
    return documents
