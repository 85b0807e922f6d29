"""Five methods at equal tokens, by held-out loss and by tasks that a small model learns. Writes the table of
studies/tasks.md.

python -m studies.tasks              train what is missing in results/tasks.json, then write the table
python -m studies.tasks --jobs 2     two seeds at a time, one thread each
python -m studies.tasks --show       write the table of the finished runs, and train nothing

A model of 165 thousand parameters (the reference trainer's small Llama) on bytes: of four sequences one is the source
of Python's standard library, one bracket texts, two sums. The tasks are those of `diloco evaluate`, run by lm-eval.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import diloco
from diloco.config import DataTable, ModelTable
from diloco.core.fragments import scatter
from diloco.core.method import Method
from diloco.core.outer import Nesterov
from diloco.evaluation.builtin_tasks import BUILTIN_TASKS, SUMMANDS, brackets, is_held_out, write_task_files
from diloco.evaluation.evaluate import held_out_text
from diloco.evaluation.exports import Export, held_out_loss
from diloco.evaluation.harness import Harness
from diloco.evaluation.scores import Score, t_quantile
from diloco.exchange.base import Exchange
from diloco.training.data.corpus import Corpus, load_corpus
from diloco.training.data.reading import byte_tokenizer
from diloco.training.data.streams import held_out_batches
from diloco.training.model import build_model
from studies.arms import in_flight_at_the_end
from studies.pages import filled

PAGE = Path(__file__).parent / "tasks.md"
RESULTS = Path(__file__).parent / "results" / "tasks.json"
SEEDS = (0, 1, 2, 3)
STEPS, WARM, WARMUP = 1200, 300, 50
BATCH, SEQUENCE, LEARNERS, SYNC_EVERY = 16, 64, 4, 30
LR = 4e-3
KINDS = ("text", "arithmetic", "brackets", "arithmetic")
"""Of the sequences of a batch, in turn: each of the four learners has the same mixture."""
OUTER = {"outer": Nesterov(lr=0.7, momentum=0.8)}
METHODS: dict[str, Method | None] = {
    "data parallel": None,
    "DiLoCo": diloco.DiLoCo(sync_every=SYNC_EVERY, **OUTER),
    "Streaming, 4 bits": diloco.StreamingDiLoCo(sync_every=SYNC_EVERY, overlap=1, codec="e3m0", **OUTER),
    "eager": diloco.EagerDiLoCo(sync_every=SYNC_EVERY, outer=Nesterov(lr=0.4, momentum=0.8)),
    "Decoupled": diloco.DecoupledDiLoCo(sync_every=SYNC_EVERY, **OUTER),
    "isolated": None,
}
LOSS = "held-out loss"


@cache
def _corpus() -> Corpus:
    return load_corpus(DataTable(kind="stdlib", sequence_length=SEQUENCE))


def batch(seed: int, step: int) -> Tensor:
    """The sequences of one step of all learners, int64 (BATCH, SEQUENCE + 1): a function of the seed and the step."""
    return torch.stack(
        [_sequence(KINDS[row % len(KINDS)], random.Random(f"{seed} {step} {row}")) for row in range(BATCH)]
    )


def _sequence(kind: str, rng: random.Random) -> Tensor:
    if kind == "text":
        start = rng.randrange(len(_corpus().train) - SEQUENCE - 1)
        return torch.from_numpy(_corpus().train.read(start, start + SEQUENCE + 1))
    text = "\n"
    while len(text) <= SEQUENCE:
        text += training_line(rng, kind)
    return torch.tensor(list(text[: SEQUENCE + 1].encode()))


def training_line(rng: random.Random, kind: str) -> str:
    """A line of training text for a task, "brackets" or "arithmetic", with its line end."""
    if kind == "brackets":
        return brackets(rng, rng.randint(4, 12)) + "\n"
    while True:
        a, b = rng.randrange(SUMMANDS), rng.randrange(SUMMANDS)
        if not is_held_out(a, b):
            return f"{a}+{b}={a + b}\n"


def part_of(tokens: Tensor, learner: int) -> Tensor:
    """A learner's share of a batch."""
    size = BATCH // LEARNERS
    return tokens[learner * size : (learner + 1) * size]


def _new(seed: int) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    model = build_model(ModelTable(), 256, SEQUENCE, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, tokens: Tensor, step: int) -> None:
    """One inner step; denormals are flushed in here, they slow a model of this size down by half."""
    decayed = 0.05 + 0.95 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2
    optimizer.param_groups[0]["lr"] = LR * (step / WARMUP if step <= WARMUP else decayed)
    torch.set_flush_denormal(True)
    F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.set_flush_denormal(False)


Start = tuple[dict[str, Tensor], dict[str, Any]]
"""Of a model and its inner optimizer, after the warm start."""


def warm_started(seed: int) -> Start:
    """The first quarter, on one model at the full batch."""
    model, optimizer = _new(seed)
    for step in range(1, WARM + 1):
        _step(model, optimizer, batch(seed, step), step)
    return model.state_dict(), optimizer.state_dict()


def _begun(seed: int, start: Start) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    model, optimizer = _new(seed)
    model.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    return model, optimizer


def train(label: str, seed: int, start: Start) -> dict[str, Tensor]:
    """The global model at the end."""
    method = METHODS[label]
    if method is not None:
        return _train_together(method, seed, start)
    model, optimizer = _begun(seed, start)
    for step in range(WARM + 1, STEPS + 1):
        tokens = batch(seed, step)
        _step(model, optimizer, part_of(tokens, 0) if label == "isolated" else tokens, step)
    return model.state_dict()


def _train_together(method: Method, seed: int, start: Start) -> dict[str, Tensor]:
    def life(index: int, exchange: Exchange) -> tuple[int, dict[str, Tensor]]:
        model, optimizer = _begun(seed, start)
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            for step in range(WARM + 1, STEPS + 1):
                _step(model, optimizer, part_of(batch(seed, step), index), step)
                learner.step(tokens=SEQUENCE * BATCH // LEARNERS)
            exchange.stepped()  # a learner leaves only when the step after its last one would be over
            learner.state_dict()  # answers that are on their way
            state = learner.global_state_dict()
            if in_flight_at_the_end(method):  # what the run has published, whether or not it has been adopted
                published = exchange.state_dict()["fragments"]
                for place, fragment in enumerate(learner.layout.fragments):
                    state.update(scatter(fragment, published[str(place)]["theta"]))
            return sum(learner.versions), state

    return max(diloco.run_local(life, learners=LEARNERS), key=lambda ended: ended[0])[1]


def scores(state: Mapping[str, Tensor]) -> dict[str, float]:
    """Of a global model: held-out loss of the text in nats per byte, and the share of right answers of each task."""
    model = build_model(ModelTable(), 256, SEQUENCE, 0)
    model.load_state_dict(dict(state))
    export = Export(Path("model"), model.eval(), byte_tokenizer(SEQUENCE), SEQUENCE)
    loss = held_out_loss(model, held_out_batches(_corpus(), SEQUENCE, 512, 64))
    with tempfile.TemporaryDirectory() as directory:
        write_task_files(Path(directory), BUILTIN_TASKS, text=held_out_text(_corpus()))
        found = Harness(BUILTIN_TASKS, [Path(directory)]).run(export)
    return {LOSS: loss.score.value} | {result.task: result.score.value for result in found}


def run_seed(seed: int, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Train and evaluate some methods with one seed."""
    torch.set_num_threads(1)
    started = time.monotonic()
    start = warm_started(seed)
    found = {}
    for label in labels:
        result = scores(train(label, seed, start))
        found[label] = {"scores": result, "seconds": round(time.monotonic() - started, 1)}
        print(f"{time.strftime('%H:%M:%S')} seed {seed}, {label}: {result}", flush=True)
        started = time.monotonic()
    return found


# --- the table --------------------------------------------------------------------------------------------------------


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """`runs`: by method and seed."""
    measures = (LOSS, *BUILTIN_TASKS)
    lines = [f"| | {' | '.join(measures)} |", "|---|" + "---|" * len(measures)]
    for label in METHODS:
        cells = [_cell(runs, label, measure) for measure in measures]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(runs: Mapping[str, Mapping[str, Any]], label: str, measure: str) -> str:
    def values(of: str) -> list[float]:
        return [runs[of][str(seed)]["scores"][measure] for seed in SEEDS]

    mean = statistics.fmean(values(label))
    if label == "data parallel":
        half = t_quantile(len(SEEDS) - 1) * statistics.stdev(values(label)) / math.sqrt(len(SEEDS))
        return f"{mean:.3f} ± {half:.3f}"
    gaps = [theirs - ours for theirs, ours in zip(values(label), values("data parallel"), strict=True)]
    gap = Score.of(gaps)
    return f"{mean:.3f} ({gap.value:+.3f} ± {(gap.high or 0.0) - gap.value:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at the same time, one thread each")
    parser.add_argument("--show", action="store_true", help="write the table of the finished runs, and train nothing")
    given = parser.parse_args()
    runs: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    missing = {seed: [label for label in METHODS if str(seed) not in runs.get(label, {})] for seed in SEEDS}
    missing = {seed: labels for seed, labels in missing.items() if labels}
    if missing and not given.show:
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            for seed, found in zip(missing, pool.map(run_seed, missing, missing.values()), strict=True):
                for label, result in found.items():
                    runs.setdefault(label, {})[str(seed)] = result
                RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    seconds = sum(it["seconds"] for by_seed in runs.values() for it in by_seed.values())
    print(f"{seconds:.0f} s of training and evaluation in all")
    PAGE.write_text(filled(PAGE.read_text(), {"methods-by-tasks": table(runs)}))


if __name__ == "__main__":
    main()
