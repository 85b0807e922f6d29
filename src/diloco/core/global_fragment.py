"""The arithmetic of a round, on a global fragment at a version: `close` makes the next version from contributions, and
the update that is published; `apply_update` makes the same version from that update.

    Δ̄ = scale · Merge({decode(payload_m)}, w)                 merge, in learner-id order, fp32
    Θ* = OuterOpt(Θ, Δ̄)                                        outer step

An update is one of three kinds, by the method; e is the residual, the error feedback of the party that closes rounds:

    whole fragment   outer step on the syncer, lossless `down`
                     payload = Θ*;  Θ' = Θ*
    change           outer step on the syncer, lossy `down`
                     payload = encode(Θ* − Θ + e);  Θ' = Θ + decode(payload);  e' = (Θ* − Θ + e) − decode(payload)
    mean             outer step on the learners (delayed and eager updates): every holder of Θ takes the same step
                     payload = encode(Δ̄ + e);  Δ̄' = decode(payload);  Θ' = OuterOpt(Θ, Δ̄');  e' = Δ̄ + e − Δ̄'

Where gradients are exchanged, no outer step is taken, and Θ' = Δ̄ is the mean gradient. Averaged tensors have an outer
step of their own (`core.averaged`).

`close` and `apply_update` both compute Θ' from the payload, so all holders of a version have the same bits. Both work
run by run, a run being several whole segments (`codecs.SEGMENT_ELEMENTS`), in as many threads as the caller has
(`memory.Each`): beside the old and the new version they need memory for one run of each thread only. A fragment closed
in place has two copies of Θ, and one of all else. All tensors are flat fp32 on the host: a whole fragment, or a shard
of it that starts at a segment boundary. Every operation is elementwise or within a segment, so shards give the bits of
the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.averaged import AveragedElements
from diloco.core.codecs import SEGMENT_ELEMENTS
from diloco.core.layout import Placement, digest, digest_of_segments, segment_digests
from diloco.core.memory import Each, flush_denormals, is_finite, new_like, new_vector, one_by_one
from diloco.core.merges import Encoded, merge_into, refused_by
from diloco.core.merges.decoding import RUN_SEGMENTS
from diloco.core.method import Method
from diloco.core.outer import require_fit
from diloco.core.update import Update
from diloco.errors import CorruptPayloadError, DigestError, NonFiniteError, VersionError

_RUN_ELEMENTS = RUN_SEGMENTS * SEGMENT_ELEMENTS


@dataclass(frozen=True, eq=False)
class GlobalFragment:
    """A global fragment at a version, or a shard of one; `held` where a party holds it. Only `close` in place writes to
    its tensors.

    Attributes:
        fragment: index of the fragment.
        version: 0 is the initial model; −1: none yet, or of a fragment that a learner does not hold.
        theta: fp32 [n].
        outer_state: of `method.outer`, flat fp32 [n] each and 0-dimensional counters; empty where no outer step is
            taken.
        residual: e, fp32 [n], what lossy updates have left out so far; None: zeros.
        digest: of `theta` (`layout.Digest`).
    """

    fragment: int
    version: int
    theta: Tensor
    outer_state: Mapping[str, Tensor]
    residual: Tensor | None
    digest: str

    @classmethod
    def first(cls, method: Method, fragment: int, theta: Tensor, version: int = 0) -> Self:
        """A fragment of the initial model, with the outer state before the first step."""
        return cls(fragment, version, theta, method.outer.init(theta.numel()), None, digest(theta))

    @classmethod
    def nothing(cls, fragment: int) -> Self:
        """A fragment that a learner does not hold: no elements."""
        theta = torch.empty(0)
        return cls(fragment, -1, theta, {}, None, digest(theta))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with tensors of its own."""
        residual = None if self.residual is None else self.residual.clone()
        outer_state = {name: each.clone() for name, each in self.outer_state.items()}
        return replace(self, theta=self.theta.clone(), outer_state=outer_state, residual=residual)

    @property
    def bare(self) -> Self:
        """Θ and its version without outer state and residual, for a learner that takes no outer steps itself."""
        return replace(self, outer_state={}, residual=None)

    def part(self, elements: slice) -> Self:
        """The shard with these elements."""
        theta, residual = self.theta[elements], None if self.residual is None else self.residual[elements]
        state = _within(self.outer_state, elements)
        return replace(self, theta=theta, outer_state=state, residual=residual, digest=digest(theta))

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: tensors, not copied, and plain values."""
        state = {"version": self.version, "theta": self.theta, "residual": self.residual}
        return {**state, "outer": dict(self.outer_state)}

    @classmethod
    def from_state_dict(cls, fragment: int, state: Mapping[str, Any]) -> Self:
        """The inverse of `state_dict`. Raises ValueError, TypeError or LookupError for any other value."""
        version, theta, outer, residual = (state[name] for name in ("version", "theta", "outer", "residual"))
        if type(version) is not int or version < 0 or not all(isinstance(each, Tensor) for each in outer.values()):
            raise ValueError(f"fragment {fragment} at version {str(version)[:40]!r}")
        if not isinstance(theta, Tensor) or not (residual is None or isinstance(residual, Tensor)):
            raise TypeError(f"fragment {fragment} without tensors")
        return cls(fragment, version, theta, outer, residual, digest(theta))


@dataclass(frozen=True, eq=False)
class Publication:
    """The result of a round: the next version, and the update to publish.

    Attributes:
        held: the next version.
        update: its metadata, without the learners whose contributions were refused.
        payload: uint8, as sent over the wire; the memory of `held.theta` where the update is the whole fragment.
        refused: learners whose contributions the method's screen refused.
    """

    held: GlobalFragment
    update: Update
    payload: Tensor
    refused: tuple[str, ...] = ()


def close(
    method: Method,
    held: GlobalFragment,
    contributions: Sequence[Encoded],
    places: Sequence[Placement],
    scale: float = 1.0,
    *,
    in_place: bool = False,
    each: Each = one_by_one,
) -> Publication:
    """Merge, take the outer step and encode the answer.

    Arguments:
        held: the version before the round.
        contributions: one per learner, encoded with `method.up`, in learner-id order.
        places: the tensors of the fragment, or of the shard (`core.merges.shard_of`).
        scale: the factor of the merged outer gradient: the part of the live weight that is in `contributions`. It is
            reduced by the weight of contributions that the screen refuses.
        in_place: the residual is overwritten by the next one, and so is the outer state where the outer optimizer is on
            the syncer, after the last operation that can fail. Of `held`, the caller may afterwards use only what
            learners fetch (`bare`; with the outer step on the learners, the outer state too); all else belongs to the
            new version. False: `held` does not change. The bits are the same.
        each: works through the runs; the bits do not depend on it.

    Raises (`held` is unchanged then, in place too):
        CorruptPayloadError: a contribution that cannot be decoded.
        NonFiniteError: a result that fp32 or `method.down` cannot hold.
    """
    num_elements = held.theta.numel()
    arithmetic.prepare(num_elements)
    refused: tuple[str, ...] = ()
    if method.screen is not None:
        refused = refused_by(method.screen, method.up, contributions, places, num_elements, each)
    kept = [it for it in contributions if it.learner not in refused]
    scale = _scale_without(method, contributions, kept, scale)
    momentum = method.outer.momentum_of(held.outer_state)
    closing = _Closing(method, held, AveragedElements(places), in_place=in_place)

    def encode(run: slice) -> None:
        if scale != 1.0:
            closing.theta[run].mul_(scale)
        closing.encode(run)

    merge_into(closing.theta, method.merge, method.up, kept, places, momentum, final=encode, each=each)
    try:
        segments = b"".join(each(closing.close, _runs(num_elements)))
    except CorruptPayloadError as error:  # a defect, and not a refusal: `held` may be partly overwritten
        raise AssertionError(f"{method.down.name} cannot decode what it has encoded.") from error
    new = closing.finished(held.version + 1, segments)
    learners, weights = tuple(it.learner for it in kept), tuple(it.weight for it in kept)
    update = Update(
        held.fragment,
        held.version,
        new.version,
        learners,
        weights,
        scale,
        new.digest,
        lossless=_publishes_whole(method),
    )
    return Publication(new, update, closing.payload, refused)


def _publishes_whole(method: Method) -> bool:
    """Whether updates are of the kind "whole fragment"."""
    return method.down.lossless and method.outer_at == "syncer"


def _scale_without(method: Method, contributions: Sequence[Encoded], kept: Sequence[Encoded], scale: float) -> float:
    """The scale of a round without its refused contributions, whose learners count as live and not contributing."""
    if method.partial == "full" or len(kept) == len(contributions):
        return scale
    return scale * (math.fsum(each.weight for each in kept) / math.fsum(each.weight for each in contributions))


@dataclass(frozen=True, eq=False)
class AppliedUpdate:
    """The version after an update.

    Attributes:
        held: that version.
        mean: Δ̄', fp32 [n], of an update of the kind "mean".
        segments: the digests of the segments of `held.theta` (`layout.Digest.segments`).
    """

    held: GlobalFragment
    mean: Tensor | None = None
    segments: bytes = b""


def apply_lossless_update(
    update: Update, payload: Tensor, num_elements: int, outer_state: Mapping[str, Tensor], *, verify: bool = True,
    each: Each = one_by_one,
) -> AppliedUpdate:  # fmt: skip
    """The version of an update with the whole fragment, which needs no base; its `theta` is the payload's memory.

    Arguments:
        verify, each: as in `apply_update`.

    Raises:
        CorruptPayloadError: a payload that is not `num_elements` fp32 numbers.
        DigestError: the bits differ from those published.
    """
    _require_size(update, payload, 4 * num_elements)
    theta = payload.view(torch.float32)
    segments = b"".join(each(lambda run: segment_digests(theta[run]), _runs(num_elements, 8 * _RUN_ELEMENTS)))
    new = GlobalFragment(update.fragment, update.version, theta, outer_state, None, digest_of_segments(segments))
    if verify:
        require_digest(update, new.digest)
    return AppliedUpdate(new, segments=segments)


def apply_update(
    method: Method,
    held: GlobalFragment,
    update: Update,
    payload: Tensor,
    places: Sequence[Placement],
    *,
    verify: bool = True,
    each: Each = one_by_one,
) -> AppliedUpdate:
    """The version after an update, with the bits of `close`.

    The residual is that of `held`, and so is the outer state where the outer optimizer is on the syncer: only the party
    that closes rounds computes these.

    Arguments:
        places: the tensors of the fragment.
        verify: compare the digests. False where the update's digest is of a shard, which the caller compares itself.
        each: works through the runs; the bits do not depend on it.

    Raises:
        VersionError: a lossy update whose base is not the version held.
        CorruptPayloadError: a payload of the wrong size or with non-finite content.
        DigestError: the bits differ from those published.
    """
    num_elements = held.theta.numel()
    if update.lossless:
        return apply_lossless_update(update, payload, num_elements, held.outer_state, verify=verify, each=each)
    if update.base != held.version:
        raise VersionError(
            f"the update of fragment {update.fragment} from version {update.base} to {update.version} does not fit "
            f"version {held.version}; fetch the whole fragment."
        )
    _require_size(update, payload, method.down.encoded_bytes(num_elements))
    next_ = _NextVersion(method, held, AveragedElements(places), steps=method.outer_at == "learners")
    mean = new_like(held.theta) if method.outer_at == "learners" else None

    def advance(run: slice) -> bytes:
        if mean is not None:
            next_.step(run, next_.decode(payload, run, mean[run]))
        elif method.exchanged == "gradients":  # the payload is the mean gradient, which replaces the one before
            next_.decode(payload, run, next_.theta[run])
        else:
            next_.decode(payload, run, next_.theta[run]).add_(held.theta[run])
        return next_.finish(run)

    arithmetic.prepare(num_elements)
    segments = b"".join(each(advance, _runs(num_elements)))
    new = next_.finished(update.version, segments)
    if verify:
        require_digest(update, new.digest)
    return AppliedUpdate(new, mean, segments)


def published_mean(method: Method, payload: Tensor, num_elements: int) -> Tensor | None:
    """Δ̄', fp32 [num_elements], of an update of the kind "mean"; None for the other kinds."""
    return method.down.decode(payload, num_elements) if method.outer_at == "learners" else None


class _NextVersion:
    """The version after `held` while it is computed, run by run. Threads may work on several runs at once.

    Arguments:
        steps: whether an outer step is taken. Otherwise the outer state is that of `held`; so is the residual.

    Attributes:
        theta: Θ', valid in the runs that are finished.
    """

    def __init__(self, method: Method, held: GlobalFragment, averaged: AveragedElements, *, steps: bool) -> None:
        self._method, self._held, self._averaged = method, held, averaged
        self._outer_state = _like(held.outer_state) if steps else held.outer_state
        self._residual = held.residual
        self.theta = new_like(held.theta)

    def decode(self, payload: Tensor, run: slice, out: Tensor) -> Tensor:
        """The decoded values of a run."""
        return self._method.down.decode(payload[self._span(run)], out.numel(), out)

    def step(self, run: slice, delta: Tensor) -> None:
        """Take the outer step of a run, into `theta` and the new outer state. `delta` may be a part of `theta`."""
        self._step(run, delta, self.theta[run], _within(self._outer_state, run))

    def finish(self, run: slice) -> bytes:
        """Finish a run whose Θ' is in `theta`: floor variances, flush denormals. Returns its segments' digests."""
        self._averaged.floor(run, self.theta[run])
        return segment_digests(flush_denormals(self.theta[run]))

    def _step(self, run: slice, delta: Tensor, out: Tensor, new_state: dict[str, Tensor]) -> None:
        """Take the outer step of a run, written to `out` and `new_state`. `delta` may be `out`."""
        held, state = self._held, _within(self._held.outer_state, run)
        self._averaged.step(self._method.outer, run, state, held.theta[run], delta, out, new_state)

    def finished(self, version: int, segments: bytes) -> GlobalFragment:
        """The new version, once all runs are finished. `segments`: the digests of the segments of `theta`."""
        whole = digest_of_segments(segments)
        return GlobalFragment(self._held.fragment, version, self.theta, self._outer_state, self._residual, whole)

    def _span(self, run: slice) -> slice:
        """The bytes of a run in a payload."""
        first, last = run.start // SEGMENT_ELEMENTS, -(-run.stop // SEGMENT_ELEMENTS)
        return self._method.down.segment_span(self.theta.numel(), first, last)


class _Closing(_NextVersion):
    """The next version from merged outer gradients, and the payload of its update.

    Two passes over the runs. `encode`, which fails on non-finite results, reads `held` only; `close` writes the new
    version, in place over the residual and outer state of `held`. So `encode` of all runs precedes `close` of the
    first. Two kinds of rounds therefore take the outer step of a run twice, in `encode` on scratch (a draft): those
    closed in place, and those whose outer step is on the learners. That takes less time than a second state in memory.
    """

    def __init__(self, method: Method, held: GlobalFragment, averaged: AveragedElements, *, in_place: bool) -> None:
        super().__init__(method, held, averaged, steps=method.exchanged != "gradients")
        down = method.down
        require_fit(method.outer, held.outer_state, theta=held.theta, delta=self.theta, residual=held.residual)
        self._steps = method.outer_at == "syncer" and method.exchanged != "gradients"
        self._drafts = in_place and self._steps
        if self._drafts:
            self._outer_state = {name: each if each.dim() else each.clone() for name, each in held.outer_state.items()}
        if down.lossless:
            self._residual = None
        elif held.residual is None or not in_place:
            self._residual = new_like(held.theta)
        if _publishes_whole(method):
            self.payload = self.theta.view(torch.uint8)
        else:
            self.payload = new_vector(down.encoded_bytes(held.theta.numel()), torch.uint8)

    def encode(self, run: slice) -> None:
        """Encode a run, whose merged outer gradient is in `theta`, and check that its outer step is finite."""
        if (loops := self._loops(run)) is not None:
            change, e = self._draft(run), self._residual_of(run)
            memory = self._held.theta[run], self.theta[run], self._momentum(run)
            if _publishes_whole(self._method):
                is_fine = loops.outer_step(self._method.outer, *memory, change, self._draft(run))
            elif is_fine := loops.change(self._method.outer, *memory, e, change):
                self._method.down.encode(change, self.payload[self._span(run)])
            if is_fine:
                return  # otherwise torch finds what is not finite
        change, new_state = self.theta[run], _within(self._outer_state, run)
        if self._drafts:
            change, new_state = self._draft(run), self._draft_state(run)
        self._change(run, change, new_state)
        if _publishes_whole(self._method):
            self._require_finite(change)
        else:
            self._method.down.encode(change, self.payload[self._span(run)])
        if self._method.outer_at == "learners":  # every holder takes this step
            sent = self.decode(self.payload, run, self._draft(run))
            self._step(run, sent, sent, new_state)
            self._require_finite(sent)
        if self._steps or self._method.outer_at == "learners":
            for each in new_state.values():  # a state that overflows stays so, even where this step is finite
                if each.dim():
                    self._require_finite(each)

    def close(self, run: slice) -> bytes:
        """Close a run that has been encoded; returns the digests of its segments."""
        new = self.theta[run]
        if (loops := self._loops(run)) is not None and self._residual is not None:
            sent = self.decode(self.payload, run, self._draft(run))
            loops.land(
                self._method.outer, self._held.theta[run], self._momentum(run), self._residual_of(run), sent, new,
                self._residual[run],
            )  # fmt: skip
            return segment_digests(new)
        if self._drafts:
            self._change(run, new, _within(self._outer_state, run))
        if not _publishes_whole(self._method):
            sent = self.decode(self.payload, run, self._draft(run))
            if self._residual is not None:
                torch.sub(new, sent, out=self._residual[run])
            if self._steps:
                torch.add(sent, self._held.theta[run], out=new)
            elif self._method.outer_at == "learners":
                self.step(run, sent)
            else:  # gradients are exchanged
                new.copy_(sent)
        return self.finish(run)

    def _loops(self, run: slice) -> ModuleType | None:
        """The compiled loops of a run that is closed in place; None: use torch operations."""
        e, whole = self._held.residual, _publishes_whole(self._method)
        fits = self._drafts and self._method.outer.formula is not None and (not whole or e is None)
        return arithmetic.loops() if fits and not self._averaged.are_in(run) else None

    def _momentum(self, run: slice) -> Tensor:
        return self._outer_state[self._method.outer.vectors[0]][run]

    def _residual_of(self, run: slice) -> Tensor | None:
        return None if self._held.residual is None else self._held.residual[run]

    def _change(self, run: slice, out: Tensor, new_state: dict[str, Tensor]) -> Tensor:
        """Compute the values to publish of a run, Θ*, Θ* − Θ + e or Δ̄ + e by the kind of update, into `out`."""
        held, delta = self._held, self.theta[run]
        if self._steps:
            self._step(run, delta, out, new_state)
            if not _publishes_whole(self._method):
                out.sub_(held.theta[run])
        if held.residual is not None:
            out.add_(held.residual[run])
        return out

    def _draft(self, run: slice) -> Tensor:
        return torch.empty(run.stop - run.start)

    def _draft_state(self, run: slice) -> dict[str, Tensor]:
        return {
            name: torch.empty(run.stop - run.start) if each.dim() else each.clone()
            for name, each in self._held.outer_state.items()
        }

    def _require_finite(self, new: Tensor) -> None:
        if not is_finite(new):
            raise NonFiniteError(
                f"the outer step of fragment {self._held.fragment} from version {self._held.version} overflows fp32; "
                "find the learner that diverged, or lower the outer learning rate."
            )


def _runs(num_elements: int, size: int = _RUN_ELEMENTS) -> Iterator[slice]:
    for start in range(0, num_elements, size):
        yield slice(start, min(start + size, num_elements))


def _like(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The memory of a new outer state: uninitialised vectors, and copies of the counters."""
    return {name: new_like(each) if each.dim() else each.clone() for name, each in state.items()}


def _within(state: Mapping[str, Tensor], elements: slice) -> dict[str, Tensor]:
    """Views of the part of an outer state at these elements."""
    return {name: each[elements] if each.dim() else each for name, each in state.items()}


def _require_size(update: Update, payload: Tensor, num_bytes: int) -> None:
    if payload.dtype != torch.uint8 or payload.shape != (num_bytes,):
        raise CorruptPayloadError(
            f"the update of fragment {update.fragment} to version {update.version} has {num_bytes} bytes, not "
            f"{tuple(payload.shape)} of {payload.dtype}; fetch it again."
        )


def require_digest(update: Update, found: str) -> None:
    """Raise DigestError unless `found` is the update's digest."""
    if found != update.digest:
        raise DigestError(
            f"version {update.version} of fragment {update.fragment} has digest {found[:12]}, the published one is "
            f"{update.digest[:12]}; check both machines' memory and disks."
        )
