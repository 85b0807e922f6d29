"""The arithmetic of one round, the same on every exchange: contributions in, a new global fragment and the bytes that carry it out.

    Δ̄ = scale · Merge({decode(payload_m)}, w)                 merge, in learner-id order, fp32
    Θ* = OuterOpt(Θ, Δ̄)                                        outer step
    lossless `down`:  Θ' = Θ*, the payload carries Θ'
    lossy `down`:     payload = encode(Θ* − Θ + e);  Θ' = Θ + decode(payload);  e' = (Θ* − Θ + e) − decode(payload)

Where the outer optimizer is on the learners (`outer_at="learners"`: delayed and eager updates) the merged outer gradient itself is
published, and everybody who holds the fragment takes the same outer step:

    payload = encode(Δ̄ + e);  Δ̄' = decode(payload);  Θ' = OuterOpt(Θ, Δ̄');  e' = Δ̄ + e − Δ̄'

The syncer adopts what it publishes: Θ' is computed from the payload by the same `advance` that every learner runs, so all
holders of a version hold the same bits. All tensors are flat fp32 on the host: a whole fragment, or a shard of it that starts at
a segment boundary (`codecs.SEGMENT_ELEMENTS`); every operation is elementwise or within a segment, so shards give the bits of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from diloco.core.elementwise import blocks
from diloco.core.layout import Placement
from diloco.core.merges import Encoded, merged_vector, refused_by
from diloco.core.method import Method

_EXPONENT = 0x7F800000
"""The bits of an fp32 number that are 0 in zeros and denormals only. Devices disagree on denormals."""


@dataclass(frozen=True)
class Update:
    """A published version of a fragment.

    Attributes:
        fragment: index of the fragment.
        base, version: the versions it joins.
        contributors, weights: whose work is in it, in merge order.
        scale: what the merged outer gradient was multiplied by.
        digest: of the new global fragment, fp32.
        lossless: True: the payload is the new fragment in fp32 and needs no base. False: it is the encoded change from `base`, or
            the encoded outer gradient that takes `base` to `version`.
    """

    fragment: int
    base: int
    version: int
    contributors: tuple[str, ...]
    weights: tuple[float, ...]
    scale: float
    digest: str
    lossless: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `as_dict` gave; JSON in between does no harm."""
        return cls(**{**values, "contributors": tuple(values["contributors"]), "weights": tuple(values["weights"])})


@dataclass(frozen=True)
class Closed:
    """A round's result: the new global fragment, the state that stays with its owner, and the bytes to publish.

    `refused`: the learners whose contributions were left out.
    """

    theta: Tensor
    outer_state: Mapping[str, Tensor]
    residual: Tensor | None
    payload: Tensor
    refused: tuple[str, ...] = ()


def close_round(
    method: Method,
    theta: Tensor,
    outer_state: Mapping[str, Tensor],
    residual: Tensor | None,
    contributions: Sequence[Encoded],
    places: Sequence[Placement],
    scale: float = 1.0,
) -> Closed:
    """Merge, take the outer step and encode the answer; inputs stay as they are.

    Arguments:
        theta: fp32 [n], the global fragment at the round's version.
        outer_state: of `method.outer`, flat fp32 [n] each.
        residual: fp32 [n], what earlier lossy updates left out; None stands for zeros.
        contributions: one of each learner, encoded with `method.up`, in learner-id order.
        places: the tensors of the fragment, or of the shard (`core.merges.shard_of`).
        scale: multiplies the merged outer gradient once, before the outer step: the part of the live weight that is in `contributions`.
            Those that the screen refuses do not contribute.

    Raises:
        NonFiniteError, CorruptPayloadError: a payload that cannot be used.
    """
    refused: tuple[str, ...] = ()
    if method.screen is not None:
        refused = refused_by(method.screen, method.up, contributions, places, theta.numel())
        scale = _scale_without(method, contributions, refused, scale)
        contributions = [each for each in contributions if each.learner not in refused]
    momentum = method.outer.momentum_of(outer_state)
    mean = merged_vector(method.merge, method.up, contributions, places, theta.numel(), momentum)
    if scale != 1.0:
        mean.mul_(scale)
    if method.outer_at == "learners":
        payload, residual, mean = _encoded(method, mean, residual)
        taken = _outer_step(method, theta, outer_state, mean)
        return Closed(taken.theta, taken.outer_state, residual, payload, refused)
    if method.exchanged == "gradients":  # the answer is the mean itself, a change from nothing
        theta, target = torch.zeros_like(theta), mean
    else:
        target, outer_state = method.outer.step(outer_state, theta, mean, out=mean)
    if method.down.lossless:
        new = flush_denormals(target)
        return Closed(new, outer_state, None, method.down.encode(new), refused)
    payload, residual, sent = _encoded(method, target.sub_(theta), residual)
    return Closed(flush_denormals(sent.add_(theta)), outer_state, residual, payload, refused)


def _scale_without(method: Method, contributions: Sequence[Encoded], refused: Sequence[str], scale: float) -> float:
    """What is refused is of learners that live and do not contribute."""
    if method.partial == "full" or not refused:
        return scale
    kept = math.fsum(each.weight for each in contributions if each.learner not in refused)
    return scale * (kept / math.fsum(each.weight for each in contributions))


def _encoded(method: Method, change: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Payload, what it leaves out, and what it says; `change` is written to."""
    if residual is not None:
        change = change.add_(residual)
    payload = method.down.encode(change)
    sent = method.down.decode(payload, change.numel())
    return payload, None if method.down.lossless else change.sub_(sent), sent


@dataclass(frozen=True)
class Advanced:
    """A new version as everybody computes it. `mean`: the merged outer gradient, where that is what is published."""

    theta: Tensor
    outer_state: Mapping[str, Tensor]
    mean: Tensor | None = None


def advance(method: Method, anchor: Tensor, outer_state: Mapping[str, Tensor], payload: Tensor) -> Advanced:
    """The new global fragment from the one held and an update's payload: the same bits as `close_round`'s.

    `outer_state`: of the outer optimizer at the version held, where it is on the learners; elsewhere it passes through.

    Raises:
        CorruptPayloadError: a payload of the wrong size or with non-finite content.
    """
    decoded = method.down.decode(payload, anchor.numel())
    if method.outer_at == "learners":
        return _outer_step(method, anchor, outer_state, decoded)
    if method.down.lossless:
        return Advanced(decoded, outer_state)
    if method.exchanged == "gradients":
        return Advanced(flush_denormals(decoded), outer_state)
    return Advanced(flush_denormals(decoded.add_(anchor)), outer_state)


def _outer_step(method: Method, theta: Tensor, outer_state: Mapping[str, Tensor], mean: Tensor) -> Advanced:
    new, state = method.outer.step(outer_state, theta, mean)
    return Advanced(flush_denormals(new), state, mean)


def update_of(
    method: Method,
    fragment: int,
    round_: int,
    contributions: Sequence[Encoded],
    closed: Closed,
    scale: float,
    digest: str,
) -> Update:
    """What is said of a closed round; those whose contributions were refused are not in it. `scale`: as given to `close_round`."""
    kept = [each for each in contributions if each.learner not in closed.refused]
    whole = method.down.lossless and method.outer_at == "syncer"
    return Update(
        fragment,
        round_,
        round_ + 1,
        tuple(each.learner for each in kept),
        tuple(each.weight for each in kept),
        _scale_without(method, contributions, closed.refused, scale),
        digest,
        whole,
    )


def flush_denormals(x: Tensor) -> Tensor:
    """Magnitudes below 2⁻¹²⁶ become +0, in place, so that devices with and without denormals hold the same bits."""
    for part in blocks(x):
        bits = x[part].view(torch.int32)
        bits.mul_(bits.bitwise_and(_EXPONENT).ne_(0))
    return x
