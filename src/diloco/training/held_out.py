"""The global model on the held-out part, without touching the model being trained."""

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco.config import RunConfig
from diloco.training.data.corpus import Corpus
from diloco.training.data.streams import held_out_batches
from diloco.training.learners import AnyLearner

BATCH = 32


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; logits (B, T, V), targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, state: Mapping[str, Tensor], batches: Sequence[Tensor]) -> float:
    """Mean loss in nats per token of `model` with the values of `state`, over int64 batches (B, T + 1)."""
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64), 0
    with _evaluating(model):
        values = _fitted(model, state)
        for batch in batches:
            batch = batch.to(device)
            logits = torch.func.functional_call(model, values, (batch[:, :-1],)).logits
            tokens = batch[:, 1:].numel()
            total += next_token_loss(logits, batch[:, 1:]).cpu().double() * tokens
            count += tokens
    return float(total / count)


@torch.no_grad()
def sample_bytes(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    prompt: str,
    num_bytes: int,
    context: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> str:
    """Text continued by a byte model; `context` is the longest input it takes. Same arguments, same text."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode()) or [ord("\n")]
    start = len(prompt.encode())
    with _evaluating(model):
        values = _fitted(model, state)
        for _ in range(num_bytes):
            window = torch.tensor([tokens[-context:]], device=device)
            logits = torch.func.functional_call(model, values, (window,)).logits[0, -1, :256]
            chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(tokens[-num_bytes:] if start == 0 else tokens[start:]).decode("utf-8", errors="replace")


def digest_of(state: Mapping[str, Tensor]) -> str:
    """A digest of names and values."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in state.items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _fitted(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


class HeldOutEvaluator:
    """Evaluates a learner's global model on the run's held-out sequences, and need not do so twice.

    Arguments:
        losses: where several judges share what they found: by the digest of the global model.
    """

    def __init__(
        self, model: nn.Module, corpus: Corpus, config: RunConfig, losses: dict[Hashable, float] | None = None
    ) -> None:
        self._model = model
        self._table = config.evaluate
        self._context = config.data.sequence_length
        self._is_bytes = corpus.is_bytes
        self._batches = held_out_batches(corpus, self._context, config.evaluate.sequences, BATCH)
        self._shared = losses is not None
        self._losses: dict[Hashable, float] = {} if losses is None else losses

    @property
    def num_sequences(self) -> int:
        """How many sequences a loss is the mean of."""
        return sum(len(batch) for batch in self._batches)

    def known(self, learner: AnyLearner) -> float | None:
        """The loss of the learner's present global model, if it was evaluated before."""
        return self._losses.get(self._key(learner))

    def loss(self, state: Mapping[str, Tensor]) -> float:
        """The held-out loss of a global model in nats per token; the model being trained stays as it is."""
        return evaluate(self._model, state, self._batches)

    def remember(self, learner: AnyLearner, loss: float) -> None:
        """Remember the loss of the learner's present global model."""
        if not self._shared:
            self._losses.clear()  # the last one is enough
        self._losses[self._key(learner)] = loss

    def _key(self, learner: AnyLearner) -> Hashable:
        return digest_of(learner.global_state_dict()) if self._shared else (learner.steps, learner.versions)

    def sample(self, state: Mapping[str, Tensor]) -> str:
        """Text that a global model writes after the run's prompt; empty where its tokens are not bytes."""
        if not (self._is_bytes and self._table.sample_bytes):
            return ""
        return sample_bytes(
            self._model,
            state,
            prompt=self._table.prompt,
            num_bytes=self._table.sample_bytes,
            context=self._context,
        )
