"""Published scaling laws: expected loss, and initial values for learning rates and batch.

All numbers are from "Scaling Laws for DiLoCo" (arXiv 2503.09799): power laws f(N, M) = A·N^a·M^b in the number of
parameters N and of learners M, fitted to decoders trained on 20 tokens per parameter with H = 30. An estimate says what
is extrapolated, and unmeasured values are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from diloco.core.choices import whole_number
from diloco.planning.units import amount
from diloco.planning.workload import PUBLISHED

SEQUENCE_LENGTH = 2048
"""Tokens per sequence of the batch fits. The paper's unit is inferred: with it the fits reproduce its batch sizes."""

PARAMETERS = (35e6, 2.4e9)
LEARNERS = (1, 2, 4, 8)
TOKENS_PER_PARAMETER = 20
SYNC_EVERY = 30
"""The range in which the fits were measured."""

OUTER_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
OUTER_LR_PARAMETERS = 335e6
"""Best outer learning rate by number of learners, independent of N from `OUTER_LR_PARAMETERS` on."""


@dataclass(frozen=True)
class PowerLaw:
    """f(N, M) = factor · N^parameters · M^learners."""

    factor: float
    parameters: float
    learners: float = 0.0

    def __call__(self, num_parameters: float, num_learners: int = 1) -> float:
        return self.factor * math.pow(num_parameters, self.parameters) * math.pow(num_learners, self.learners)


LAWS = {name: PowerLaw(**law) for name, law in PUBLISHED["laws"].items()}
"""By attribute of `ScalingEstimate`."""
LOSS, DATA_PARALLEL_LOSS = LAWS["loss"], LAWS["data_parallel_loss"]


@dataclass(frozen=True)
class ScalingEstimate:
    """The fits for one model: DiLoCo with M learners, and data parallel.

    Attributes:
        loss, data_parallel_loss: held-out, nats per token of the paper's data and tokenizer: comparable with each other
            only.
        loss_penalty_percent: `loss` above `data_parallel_loss`; negative where DiLoCo is better. The error of the fits
            is up to 1.7 % of the published losses, that of the penalty up to 1.1 points, at 35M; from 180M on 1.1 % and
            0.7 points.
        inner_lr, data_parallel_lr: peak learning rate of AdamW.
        batch_sequences, batch_tokens, data_parallel_batch_sequences: global batch over all learners.
        outer_lr: of Nesterov SGD; None where unmeasured.
        warnings: a sentence for each input outside the measured range.
    """

    num_parameters: float
    num_learners: int
    loss: float
    data_parallel_loss: float
    loss_penalty_percent: float
    inner_lr: float
    data_parallel_lr: float
    batch_sequences: float
    batch_tokens: float
    data_parallel_batch_sequences: float
    outer_lr: float | None
    warnings: tuple[str, ...]


def estimate_scaling(
    num_parameters: float, num_learners: int, *, sync_every: int = SYNC_EVERY, tokens: float | None = None
) -> ScalingEstimate:
    """Evaluate the fits.

    Arguments:
        num_parameters: N.
        num_learners: M; 1 is DiLoCo with a single learner, which is not data parallel.
        sync_every: H. The fits do not depend on it; a value other than theirs has a warning.
        tokens: the token budget; None: 20 per parameter, as in the fits.

    Raises:
        ConfigError: a number that is not positive, or not whole.

    Source: arXiv 2503.09799, the joint fits in N and M, and the table of best outer learning rates.
    """
    amount("the number of parameters", num_parameters)
    whole_number("the number of learners", num_learners, minimum=1)
    whole_number("sync_every", sync_every, minimum=1)
    if tokens is not None:
        amount("the number of tokens", tokens)
    fits = {name: law(num_parameters, num_learners) for name, law in LAWS.items()}
    penalty_percent = 100 * (fits["loss"] / fits["data_parallel_loss"] - 1)
    batch_tokens, outer_lr = fits["batch_sequences"] * SEQUENCE_LENGTH, OUTER_LR.get(num_learners)
    return ScalingEstimate(
        num_parameters, num_learners, loss_penalty_percent=penalty_percent, batch_tokens=batch_tokens,
        outer_lr=outer_lr, warnings=tuple(_outside(num_parameters, num_learners, sync_every, tokens)), **fits,
    )  # fmt: skip


def _outside(num_parameters: float, num_learners: int, sync_every: int, tokens: float | None) -> Iterator[str]:
    """Yield a warning for each input outside the measured range."""
    low, high = PARAMETERS
    if not low <= num_parameters <= high:
        yield f"the fits were measured from 35M to 2.4B parameters; {num_parameters:.3g} is extrapolated"
    if num_learners > max(LEARNERS):
        yield f"the fits were measured with 1 to 8 learners; {num_learners} is extrapolated"
    if tokens is not None and not 0.9 <= tokens / (TOKENS_PER_PARAMETER * num_parameters) <= 1.1:
        ratio = tokens / num_parameters
        yield (f"the fits were measured at 20 tokens per parameter; at {ratio:.3g} the losses below do not apply")
    if sync_every != SYNC_EVERY:
        yield (
            f"the fits were measured at H = 30; at H = {sync_every} the best outer learning rate differs (it grows "
            "with H)"
        )
    if num_learners not in OUTER_LR:
        yield (
            f"the best outer learning rate was measured for 1, 2, 4 and 8 learners; for {num_learners} it is not known"
        )
    elif num_parameters < OUTER_LR_PARAMETERS:
        yield (
            "the best outer learning rate was found to be independent of N from 335M parameters on; this model is "
            "smaller"
        )
