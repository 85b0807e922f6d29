"""How much each learner's contribution counts in a merge."""

from collections.abc import Collection, Sequence

from diloco.core.choices import nearest
from diloco.errors import ConfigError

WEIGHTS = ("uniform", "tokens", "tokens^2/steps", "discounted")


def weights_of(kind: str, tokens: Sequence[int], steps: Sequence[int], staleness: Sequence[int]) -> list[float]:
    """The weight of each learner's contribution.

        "uniform"         1: i.i.d. shards (DiLoCo, arXiv 2311.08105)
        "tokens"          the tokens it was trained on: unequal shards (same paper, appendix)
        "tokens^2/steps"  tokens · (tokens / steps), quantity times rate: learners of unequal speed (Decoupled DiLoCo,
                          arXiv 2604.21428)
        "discounted"      tokens / (1 + 0.25·staleness): work on older versions counts less

    `tokens`, `steps` and `staleness` (in versions) have one entry per learner. Raises ConfigError for another kind, and
    for tokens without steps.
    """
    match kind:
        case "uniform":
            return [1.0 for _ in tokens]
        case "tokens":
            return [float(each) for each in tokens]
        case "tokens^2/steps":
            return [_tokens_times_rate(*each) for each in zip(tokens, steps, strict=True)]
        case "discounted":
            return [each / (1 + 0.25 * age) for each, age in zip(tokens, staleness, strict=True)]
    raise ConfigError(f"{kind!r} is not a known weight{nearest(kind, WEIGHTS)}")


def merge_weights(kind: str, tokens: Sequence[int], steps: Sequence[int], staleness: Sequence[int]) -> list[float]:
    """The weights of a merge: `weights_of` its contributions, or 1 for each if all of these are 0 (no tokens)."""
    weights = weights_of(kind, tokens, steps, staleness)
    return weights if any(weights) else [1.0 for _ in weights]


def shares_of(
    tokens: Sequence[int], routed: Sequence[Sequence[int]], trained: Sequence[Collection[int] | None],
    is_averaged: Sequence[bool],
) -> list[tuple[float, ...]]:  # fmt: skip
    """By learner and tensor, the factor of the learner's weight in the merge of that tensor, for experts of a mixture.

    An expert is trained on the tokens that were routed to it: a learner of weight w and n tokens, r of them routed to
    the expert, counts with w·r / n, so that weights by tokens become those by the expert's own tokens. The factor is 1
    for averaged tensors, which tokens do not train, and for experts to which no learner routed a token. It is never
    above 1, so that no report of a learner raises its weight.

    Arguments:
        tokens: of each learner.
        routed: by learner and tensor, the tokens routed to the tensor's expert.
        trained: by learner, indices of the tensors that it trains; None: all.
        is_averaged: by tensor.
    """
    has_tokens = [
        any(of[i] for of, own in zip(routed, trained, strict=True) if own is None or i in own)
        for i in range(len(is_averaged))
    ]
    return [
        tuple(
            min(1.0, of[i] / max(num, 1)) if has_tokens[i] and not is_averaged[i] else 1.0
            for i in range(len(is_averaged))
        )
        for num, of in zip(tokens, routed, strict=True)
    ]


def _tokens_times_rate(tokens: int, steps: int) -> float:
    if tokens == 0:
        return 0.0
    if steps < 1:
        raise ConfigError(f"{tokens} tokens in {steps} steps have no rate; report the steps with the tokens.")
    return tokens * (tokens / steps)
