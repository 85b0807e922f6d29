"""The loss of group-relative policy optimisation, as pure functions of tensors.

A prompt has a group of G completions with rewards R. A completion is a sequence of at most T tokens, padded to T; each
of its tokens has the advantage A of its completion and four probabilities: π of the policy in training, π_old of the
trainer at the start of its step, π_rollout as recorded by the worker that generated it, π_ref of the reference model.

    A = R − mean(R), ÷ (σ(R) + 1e-4) if scaled                  DeepSeekMath (arXiv 2402.03300, section 4.1.2)
    r = π / π_old                                               PPO (arXiv 1707.06347, equation 6)
    c = min(r, 1 + ε_high)           where A ≥ 0                PPO, equation 7; ε_high ≠ ε_low: DAPO (arXiv 2503.14476)
        clamp(r, 1 − ε_low, δ)       where A < 0                two-sided clip: INTELLECT-2 (arXiv 2505.07291)
    w = min(π_old / π_rollout, cap)                             IMPALA (arXiv 1802.01561, section 4.1), Yao et al. 2025
    k = π_ref / π − ln(π_ref / π) − 1                           DeepSeekMath, equation 4
    l = −w·c·A + β·k                                            of one token

c·A is PPO's min(r·A, clamp(r, 1 − ε_low, 1 + ε_high)·A), with r ≤ δ in its first term. The loss of a batch is the mean
of l over all tokens (DAPO), the mean over sequences of their means (DeepSeekMath), or the sum over the number of
sequences times a constant (Dr. GRPO, arXiv 2503.20783).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diloco.core.choices import BELOW_1, Choice, checked, one_of, positive
from diloco.errors import ConfigError, LayoutError


def _positive_or(neutral: float | None) -> Callable[[str, object], float | None]:
    return lambda name, value: neutral if value == neutral else positive(name, value)


@dataclass(frozen=True)
class Loss(Choice):
    """Settings of the loss.

    Arguments:
        normalise: "tokens" (DAPO), "sequences" (DeepSeekMath) or "constant" (Dr. GRPO): what the loss is a mean over.
        clip_low: ε_low. In the first step on a batch r = 1; this limit and the next two act in later ones only.
        clip_high: ε_high (DAPO: 0.28).
        delta: δ, the ratio's limit where the advantage is negative; None: unlimited, as in PPO.
        kl: β, weight of the divergence from the reference model.
        scale: "group" divides advantages by their group's standard deviation; "none" does not (Dr. GRPO).
        importance_cap: cap of the importance weights w; None: no weights. Yao et al. 2025, "Your Efficient RL Framework
            Secretly Brings You Off-Policy RL Training" (fengyao.notion.site/off-policy-rl), apply them to language
            models.

    Raises ConfigError on a value out of range.
    """

    normalise: Literal["tokens", "sequences", "constant"] = checked(one_of("tokens", "sequences", "constant"), "tokens")
    clip_low: float = checked(BELOW_1, 0.2)
    clip_high: float = checked(positive, 0.28)
    delta: float | None = checked(_positive_or(None), 4.0)
    kl: float = checked(_positive_or(0.0), 0.0)
    scale: Literal["group", "none"] = checked(one_of("group", "none"), "group")
    importance_cap: float | None = checked(_positive_or(None), 2.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            raise ConfigError(
                f"Loss(delta=…) must be above 1 + clip_high, which is {1 + self.clip_high:g}, not {self.delta:g}."
            )


PRESETS = {
    "dapo": Loss(),
    "grpo": Loss(normalise="sequences", clip_high=0.2, kl=0.04),
    "dr_grpo": Loss(normalise="constant", clip_high=0.2, scale="none"),
}
"""Each paper's mean, β and scale; ε_high is DAPO's, or else equal to ε_low, as in PPO. δ and the importance weights,
which the three papers do not have, keep their defaults: rollouts of other places are always some versions old."""


def advantages(rewards: Tensor, scale: Literal["group", "none"]) -> Tensor:
    """Rewards [B, G] of B groups, relative to their group's mean; fp32 [B, G] from fp32.

    "group" also divides by the sample standard deviation (Bessel's correction) + 1e-4 (DeepSeekMath, section 4.1.2);
    "none" does not, since that weights a prompt by how easy or hard it is (Dr. GRPO, section 3.1).
    Raises LayoutError unless there are groups of at least 2.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise LayoutError(f"rewards have the shape {tuple(rewards.shape)}; give groups of at least 2, [B, G].")
    rewards = rewards - rewards[:, :1]  # equal rewards become exact zeros, and so do their advantages
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-4) if scale == "group" else centred


def policy_loss(
    log_probs: Tensor, old: Tensor, rollout: Tensor | None, reference: Tensor | None, advantages: Tensor, mask: Tensor,
    settings: Loss, *, num_tokens: float | None = None, num_sequences: float | None = None,
    max_tokens: int | None = None,
) -> Tensor:  # fmt: skip
    """The loss of N sequences, a scalar to minimise.

    With `num_tokens` and `num_sequences` of a whole batch, the losses of its micro-batches add up to that of the batch,
    whatever `settings.normalise`.

    Arguments:
        log_probs: ln π of each token, fp32 [N, T]; the only argument that gets a gradient.
        old: ln π_old [N, T]; for the first optimizer step on a batch, `log_probs` itself.
        rollout: ln π_rollout [N, T], needed for importance weights.
        reference: ln π_ref [N, T], needed for β > 0.
        advantages: A of each sequence [N].
        mask: 1 or True at the tokens that count [N, T]; other positions may hold anything.
        num_tokens: number of tokens that count, instead of those of `mask`. Where ranks average their gradients: the
            mean over ranks.
        num_sequences: number of sequences, instead of N; likewise.
        max_tokens: longest completion that a worker may generate, the constant of Dr. GRPO (section 3.2).

    Raises:
        ConfigError: `settings` need an argument that is None.
        LayoutError: the shapes do not fit.
    """
    _check(settings, rollout=rollout, reference=reference, max_tokens=max_tokens)
    _check_shapes(log_probs.shape, old=old, rollout=rollout, reference=reference, mask=mask)
    _check_shapes(log_probs.shape[:1], advantages=advantages)
    old, mask, advantages = old.detach(), mask.bool(), advantages[:, None]
    tokens = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    sequences = len(mask) if num_sequences is None else num_sequences

    def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
        return (numerator - denominator).masked_fill(~mask, 0.0)

    log_r = log_ratio(log_probs, old)
    low, high = math.log1p(-settings.clip_low), math.log1p(settings.clip_high)
    delta = math.inf if settings.delta is None else math.log(settings.delta)
    # Clipped before exp: a ratio that overflows would turn its zero gradient into NaN.
    clipped = torch.where(advantages < 0, log_r.clamp(low, delta), log_r.clamp(max=high)).exp()
    token_loss = -clipped * advantages
    if settings.importance_cap is not None and rollout is not None:
        log_w = log_ratio(old, rollout.detach())
        token_loss = token_loss * log_w.clamp(max=math.log(settings.importance_cap)).exp()
    if settings.kl and reference is not None:
        log_x = log_ratio(reference.detach(), log_probs)
        token_loss = token_loss + settings.kl * (torch.expm1(log_x) - log_x)
    token_loss = token_loss * mask

    if settings.normalise == "tokens":
        return token_loss.sum() / tokens
    if settings.normalise == "sequences":
        return (token_loss.sum(1) / mask.sum(1).clamp(min=1)).sum() / sequences
    assert max_tokens is not None
    return token_loss.sum() / (sequences * max_tokens)


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """ln π of tokens int64 [N, T] under logits [N, T, V] ÷ temperature: log-softmax in fp32, fp32 [N, T].

    The fp32 logits exist for one sequence at a time: the backward pass computes them again.
    Raises ConfigError unless the temperature is above 0, LayoutError when the shapes do not fit.
    """
    positive("temperature", temperature)
    _check_shapes(logits.shape[:2], tokens=tokens)

    def of_sequence(logits: Tensor, tokens: Tensor) -> Tensor:
        return (logits.float() / temperature).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)

    pairs = zip(logits, tokens, strict=True)
    return torch.stack(
        [checkpoint(of_sequence, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    )


def _check(settings: Loss, **arguments: Any) -> None:
    needs = (
        (settings.importance_cap is not None, "importance_cap", "rollout"),
        (settings.kl > 0, "kl", "reference"),
        (settings.normalise == "constant", "normalise", "max_tokens"),
    )
    for needed, setting, argument in needs:
        if needed and arguments[argument] is None:
            value = getattr(settings, setting)
            raise ConfigError(
                f"Loss({setting}={value!r}) needs {argument}, which is None; give it, or change {setting}."
            )


def _check_shapes(expected: torch.Size, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != expected:
            raise LayoutError(f"{name} has the shape {tuple(tensor.shape)}; it must have {tuple(expected)}.")
