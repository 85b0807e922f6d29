"""The global model and its ledger as the syncer serves them at the end, and the loss of that model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from diloco.config import RunConfig
from diloco.errors import ExchangeError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
ANSWER_TIMEOUT_S = 60.0
PROMPT = "def "


@dataclass(frozen=True)
class Served:
    """The end of the run, as the syncer tells it.

    Attributes:
        tokens: trained by all learners, warm start included.
        versions: of each fragment.
        ledger: of each fragment: where every token of the common part went.
    """

    state: Mapping[str, Tensor]
    tokens: int
    versions: tuple[int, ...]
    ledger: tuple[dict[str, Any], ...]


def fetch_served(config: RunConfig) -> Served:
    """Ask the syncer once the learners have left, again while it is being restarted: for what it holds when all merges
    are done.

    Raises:
        ExchangeError: it does not come back.
    """
    from diloco.exchange.remote import fetch_model, fetch_status

    address, run = config.syncer.address, config.run.name

    def settled() -> dict[str, Any]:
        status: dict[str, Any] = fetch_status(address, run=run, insecure=config.syncer.insecure)
        if any(fragment["phase"] != "open" for fragment in status["fragments"]):
            raise ExchangeError("the syncer is still merging; ask again.")
        return status

    status = _patiently(settled)
    state = _patiently(lambda: fetch_model(address, run=run, insecure=config.syncer.insecure))
    fragments = status["fragments"]
    return Served(
        state=state,
        tokens=status["tokens"],
        versions=tuple(fragment["version"] for fragment in fragments),
        ledger=tuple(fragment["ledger"] for fragment in fragments),
    )


def _patiently(ask: Callable[[], T]) -> T:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            return ask()
        except ExchangeError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def judge(config: RunConfig, state: Mapping[str, Tensor], sample_bytes: int) -> tuple[float, str]:
    """Held-out loss of a model in nats per byte, on the sequences of the trainer's evaluations, and text it writes."""
    import torch

    from diloco.training.data.corpus import load_corpus
    from diloco.training.data.streams import held_out_batches
    from diloco.training.evaluate import evaluate
    from diloco.training.evaluate import sample_bytes as sample
    from diloco.training.model import build_model

    torch.set_num_threads(1)
    corpus = load_corpus(config.data)
    length = config.data.sequence_length
    model = build_model(config.model, corpus.vocab_size, length, config.run.seed)
    loss = evaluate(model, state, held_out_batches(corpus, length, config.evaluate.sequences, batch=32))
    return loss, sample(model, state, prompt=PROMPT, num_bytes=sample_bytes, context=length)


def resolved_method(config: RunConfig) -> dict[str, Any]:
    """Every value of the run's method, defaults filled in."""
    from diloco.core.presets import method_from_table

    return method_from_table(config.method).to_dict()
