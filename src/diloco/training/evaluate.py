"""The global model on the held-out part, without touching the model being trained."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
