"""The held-out loss of a global model, and a sample of its text. The model that is being trained does not change."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco.config import RunConfig
from diloco.learner.frozen import digest_of
from diloco.training.data.corpus import Corpus
from diloco.training.data.streams import held_out_batches
from diloco.training.expert_parallel import is_sharded
from diloco.training.learners import AnyLearner
from diloco.training.rank_group import RankGroup

BATCH = 32
TEMPERATURE = 0.8


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; logits (B, T, V), targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, state: Mapping[str, Tensor], batches: Sequence[Tensor]) -> float:
    """Mean loss in nats per token of `model` with the values of `state`, over int64 batches (B, T + 1)."""
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64), 0
    with _evaluating(model):
        values = _matched(model, state)
        for batch in batches:
            batch = batch.to(device)
            logits = torch.func.functional_call(model, values, (batch[:, :-1],)).logits
            tokens = batch[:, 1:].numel()
            total += next_token_loss(logits, batch[:, 1:]).cpu().double() * tokens
            count += tokens
    return float(total / count)


@torch.no_grad()
def sample_bytes(
    model: nn.Module, state: Mapping[str, Tensor], *, prompt: str, num_bytes: int, context: int, seed: int = 0
) -> str:
    """Text that a byte model generates after a prompt; the same for the same arguments.

    Arguments:
        context: the longest input of the model, in tokens.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode()) or [ord("\n")]
    with _evaluating(model):
        values = _matched(model, state)
        for _ in range(num_bytes):
            window = torch.tensor([tokens[-context:]], device=device)
            logits = torch.func.functional_call(model, values, (window,)).logits[0, -1, :256]
            probabilities = torch.softmax(logits.float().cpu() / TEMPERATURE, dim=-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens[len(tokens) - num_bytes :]).decode("utf-8", errors="replace")


def _matched(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` in the devices and dtypes of `model`, with one name for each tied tensor."""
    values: dict[int, tuple[str, Tensor]] = {}
    for name, own in model.state_dict(keep_vars=True).items():
        if name in state and id(own) not in values:
            values[id(own)] = (name, state[name].to(own.device, own.dtype))
    return dict(values.values())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def global_values(model: nn.Module, learner: AnyLearner, ranks: RankGroup) -> Iterator[Mapping[str, Tensor] | None]:
    """The values to evaluate a learner's global model with; None on a rank that computes nothing.

    All ranks enter the context together. A sharded model computes on all of them, with the global values in place.
    """
    if is_sharded(model):
        with learner.global_model():
            yield {}
    else:
        state = learner.global_state_dict()  # on every rank: all have a part in it
        yield state if ranks.is_first else None


class HeldOutEvaluator:
    """Evaluates a learner's global model on the held-out sequences of a run, each global model once.

    Arguments:
        losses: losses by the digest of the global model, shared by the evaluators of one process; None: this evaluator
            remembers its last loss.

    Attributes:
        model: computes the loss; the learner's.
    """

    def __init__(
        self, model: nn.Module, corpus: Corpus, config: RunConfig, losses: dict[Hashable, float] | None = None
    ) -> None:
        self.model = model
        self._table = config.evaluate
        self._context = config.data.sequence_length
        self._is_bytes = corpus.is_bytes
        self._batches = held_out_batches(corpus, self._context, config.evaluate.sequences, BATCH)
        self._is_shared = losses is not None
        self._losses: dict[Hashable, float] = {} if losses is None else losses

    @property
    def num_sequences(self) -> int:
        """Number of sequences that a loss averages."""
        return sum(len(batch) for batch in self._batches)

    def known(self, learner: AnyLearner) -> float | None:
        """The loss of the learner's current global model; None: it has not been evaluated."""
        return self._losses.get(self._key(learner))

    def loss(self, learner: AnyLearner, ranks: RankGroup) -> float:
        """The held-out loss of the learner's current global model, in nats per token; every rank calls it."""
        with global_values(self.model, learner, ranks) as state:
            own = 0.0 if state is None else evaluate(self.model, state, self._batches)
        loss = ranks.from_first(own)
        if not self._is_shared:
            self._losses.clear()
        self._losses[self._key(learner)] = loss
        return loss

    def _key(self, learner: AnyLearner) -> Hashable:
        if self._is_shared:
            return tuple(map(digest_of, learner.global_state_dict().values()))
        return learner.steps, learner.versions

    def sample(self, learner: AnyLearner, ranks: RankGroup) -> str:
        """Text that the learner's global model generates after the run's prompt; empty unless its tokens are bytes, and
        on a rank that computes nothing. Every rank calls it."""
        table = self._table
        with global_values(self.model, learner, ranks) as state:
            if state is None or not (self._is_bytes and table.sample_bytes):
                return ""
            return sample_bytes(
                self.model, state, prompt=table.prompt, num_bytes=table.sample_bytes, context=self._context
            )
