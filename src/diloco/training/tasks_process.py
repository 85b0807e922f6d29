"""The process that runs a run's tasks on one global model, for `training.tasks`.

Standard input: one line of JSON with the run file and the weights; where it closes, the trainer has ended, and so does
this process. Standard output: one JSON object, with `scores` or with an `error` in one sentence.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

NICENESS = 10
"""Training goes first where processors are short."""


def main() -> None:
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_trainer, name="stdin", daemon=True).start()
    os.nice(NICENESS)
    answer, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    from diloco.errors import DilocoError

    try:
        found: dict[str, Any] = {"scores": scores(Path(job["config"]), Path(job["weights"]))}
    except DilocoError as error:
        found = {"error": str(error)}
    answer.write(json.dumps(found))
    answer.flush()


def scores(config_file: Path, weights: Path) -> list[dict[str, Any]]:
    """The scores of a run's tasks, each in its first metric, as plain `TaskScore`s."""
    import torch
    from safetensors.torch import load_file

    from diloco.config import load_config
    from diloco.core.session.requests import TaskScore
    from diloco.evaluation.exports import Export
    from diloco.evaluation.harness import Harness
    from diloco.evaluation.task_files import OWN_TASKS, write_task_files
    from diloco.run.sense import MAX_TASKS
    from diloco.training.exported import held_out_text
    from diloco.training.job import choose_device
    from diloco.training.model import build_model, load_state
    from diloco.training.pretrained import vocabulary
    from diloco.training.sources import load_corpus

    config = load_config(config_file)
    table = config.evaluate
    torch.set_num_threads(table.tasks_threads)
    length = config.data.sequence_length
    vocab_size, tokenizer = vocabulary(config)
    model = build_model(config.model, vocab_size, length, config.run.seed)
    load_state(model, load_file(weights))
    device = choose_device(table.tasks_device)
    export = Export(weights, model.eval().to(device), tokenizer, length)
    with tempfile.TemporaryDirectory(prefix="diloco-tasks-") as own:
        names = [name for name in OWN_TASKS if name in table.tasks]
        text = held_out_text(load_corpus(config.data)) if "diloco_cloze" in names else None
        write_task_files(Path(own), names, text=text)
        results = Harness(table.tasks, [Path(own), *table.task_files]).run(export, limit=table.tasks_limit)
    first = {result.task: result for result in reversed(results)}
    asked: Sequence[str] = [*(name for name in table.tasks if name in first), *first]
    told = [first[name] for name in list(dict.fromkeys(asked))[:MAX_TASKS]]
    return [asdict(TaskScore(it.task, it.score.value, it.score.error, it.score.num)) for it in told]


def _end_with_the_trainer() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
