"""A fragment at a version. `close` merges contributions into the next one; `apply_update` makes it from the update.

    Δ̄ = scale · Merge({decode(payload_m)}, w)                 merge, in learner-id order, fp32
    Θ* = OuterOpt(Θ, Δ̄)                                        outer step
    lossless `down`:  Θ' = Θ*, the payload is Θ' itself
    lossy `down`:     payload = encode(Θ* − Θ + e);  Θ' = Θ + decode(payload);  e' = (Θ* − Θ + e) − decode(payload)

Where the outer optimizer is on the learners (`outer_at="learners"`: delayed and eager updates) the merged outer
gradient itself is published, and every holder of the fragment takes the same outer step:

    payload = encode(Δ̄ + e);  Δ̄' = decode(payload);  Θ' = OuterOpt(Θ, Δ̄');  e' = Δ̄ + e − Δ̄'

Tensors that are averaged take no outer step: theirs is `core.averaged`.

Both compute Θ' from the payload, so all holders of a version hold the same bits. Both go run by run of whole segments
(`codecs.SEGMENT_ELEMENTS`): besides the old and the new version they need memory for a run. Closed in place, only Θ has
an old and a new version. All tensors are flat fp32 on the host: a whole fragment, or a shard of it that starts at a
segment boundary. Every operation is elementwise or within a segment, so shards give the bits of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from diloco.core.averaged import AveragedElements
from diloco.core.codecs import SEGMENT_ELEMENTS
from diloco.core.codecs.codec import Scratch
from diloco.core.layout import Digest, Placement, digest
from diloco.core.memory import flush_denormals, new_like, new_vector
from diloco.core.merges import Encoded, merged_runs, refused_by
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import CorruptPayloadError, DigestError, NonFiniteError, VersionError

_RUN_ELEMENTS = 32 * SEGMENT_ELEMENTS
"""What is decoded at once of an update: enough to spread the cost of a call, few enough for a processor's cache."""


@dataclass(frozen=True, eq=False)
class GlobalFragment:
    """A global fragment at a version, or a shard of one. Its tensors are not written to, but by `close` in place.

    Attributes:
        fragment: index of the fragment.
        version: 0 is the initial model; −1 stands for none.
        theta: fp32 [n].
        outer_state: of `method.outer`, flat fp32 [n] each and 0-dimensional counters; empty where no outer step is
            taken.
        residual: fp32 [n], what lossy updates have left out so far; None stands for zeros.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """With tensors of its own."""
        residual = None if self.residual is None else self.residual.clone()
        outer_state = {name: each.clone() for name, each in self.outer_state.items()}
        return replace(self, theta=self.theta.clone(), outer_state=outer_state, residual=residual)

    @property
    def bare(self) -> Self:
        """Θ and its version only, for a learner that takes no outer steps itself."""
        return replace(self, outer_state={}, residual=None)

    def part(self, elements: slice) -> Self:
        """A shard of it."""
        theta, residual = self.theta[elements], None if self.residual is None else self.residual[elements]
        state = _within(self.outer_state, elements)
        return replace(self, theta=theta, outer_state=state, residual=residual, digest=digest(theta))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: tensors, not copied, and plain values."""
        state = {"version": self.version, "theta": self.theta, "residual": self.residual}
        return {**state, "outer": dict(self.outer_state)}

    @classmethod
    def from_state_dict(cls, fragment: int, state: Mapping[str, Any]) -> Self:
        """What `state_dict` gave. Raises ValueError, TypeError or LookupError for anything else."""
        version, theta, outer, residual = (state[name] for name in ("version", "theta", "outer", "residual"))
        if type(version) is not int or version < 0 or not all(isinstance(each, Tensor) for each in outer.values()):
            raise ValueError(f"fragment {fragment} at version {str(version)[:40]!r}")
        if not isinstance(theta, Tensor) or not (residual is None or isinstance(residual, Tensor)):
            raise TypeError(f"fragment {fragment} without tensors")
        return cls(fragment, version, theta, outer, residual, digest(theta))


@dataclass(frozen=True, eq=False)
class Publication:
    """A merged round: the next version, and the update that is published.

    Attributes:
        held: the next version.
        update: its description, without the learners whose contributions were refused.
        payload: uint8, as it goes over the wire; the memory of `held.theta` where the update is lossless.
        refused: learners whose contributions the method's screen has left out.
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
) -> Publication:
    """Merge, take the outer step and encode the answer.

    Arguments:
        contributions: one of each learner, encoded with `method.up`, in learner-id order.
        places: the tensors of the fragment, or of the shard (`core.merges.shard_of`).
        scale: multiplies the merged outer gradient once, before the outer step: the part of the live weight that is in
            `contributions`. It falls with those that the screen refuses.
        in_place: once nothing can refuse the round any more, the residual is overwritten by the next one, and so is the
            outer state where the outer optimizer is on the syncer. Of `held`, the caller may then use only what
            learners fetch; the rest belongs to the new version. Without it, `held` stays as it is. The bits are the
            same.

    Raises (`held` is as before then, in place too):
        CorruptPayloadError: a contribution that cannot be decoded.
        NonFiniteError: a result that fp32 or `method.down` cannot hold.
    """
    num_elements = held.theta.numel()
    refused: tuple[str, ...] = ()
    if method.screen is not None:
        refused = refused_by(method.screen, method.up, contributions, places, num_elements)
    kept = [each for each in contributions if each.learner not in refused]
    scale = _scale_without(method, contributions, kept, scale)
    momentum = method.outer.momentum_of(held.outer_state)
    closing = _Closing(method, held, AveragedElements(places), in_place=in_place)
    for run, merged in merged_runs(method.merge, method.up, kept, places, num_elements, momentum, out=closing.theta):
        if scale != 1.0:
            merged.mul_(scale)
        closing.encode(run)
    try:
        for run in _runs(num_elements):
            closing.close(run)
    except CorruptPayloadError as error:  # not a refusal: what is held may be overwritten
        raise AssertionError(f"{method.down.name} cannot decode what it has encoded.") from error
    new = closing.made(held.version + 1)
    learners, weights = tuple(each.learner for each in kept), tuple(each.weight for each in kept)
    update = Update(
        held.fragment, held.version, new.version, learners, weights, scale, new.digest, lossless=_sends_theta(method)
    )
    return Publication(new, update, closing.payload, refused)


def _sends_theta(method: Method) -> bool:
    """Whether an update's payload is the new fragment itself."""
    return method.down.lossless and method.outer_at == "syncer"


def _scale_without(method: Method, contributions: Sequence[Encoded], kept: Sequence[Encoded], scale: float) -> float:
    """The scale without the refused contributions: their learners count as live and not contributing."""
    if method.partial == "full" or len(kept) == len(contributions):
        return scale
    return scale * (math.fsum(each.weight for each in kept) / math.fsum(each.weight for each in contributions))


@dataclass(frozen=True, eq=False)
class AppliedUpdate:
    """The version after an update.

    Attributes:
        mean: the merged outer gradient, fp32 [n], where that is what is published.
        segments: the digests of the segments of `held.theta` (`layout.Digest.segments`).
    """

    held: GlobalFragment
    mean: Tensor | None = None
    segments: bytes = b""


def apply_lossless_update(
    update: Update, payload: Tensor, num_elements: int, outer_state: Mapping[str, Tensor], *, verify: bool = True
) -> AppliedUpdate:
    """The version of a lossless update, which needs no earlier one; its `theta` is the payload's memory.

    Arguments:
        verify: as in `apply_update`.

    Raises:
        CorruptPayloadError: not the bytes of `num_elements` fp32 numbers.
        DigestError: other bits than were published.
    """
    _require_size(update, payload, 4 * num_elements)
    theta, whole = payload.view(torch.float32), Digest()
    whole.update(theta)
    if verify:
        require_digest(update, whole.hex())
    new = GlobalFragment(update.fragment, update.version, theta, outer_state, None, whole.hex())
    return AppliedUpdate(new, segments=whole.segments)


def apply_update(
    method: Method,
    held: GlobalFragment,
    update: Update,
    payload: Tensor,
    places: Sequence[Placement],
    *,
    verify: bool = True,
) -> AppliedUpdate:
    """The version that an update leads to, in the bits of `close`.

    The residual stays as it is in `held`, and so does the outer state where the outer optimizer is on the syncer: only
    the author of the updates holds them.

    Arguments:
        places: the tensors of the fragment.
        verify: False: the update's digest is of a shard; the caller compares the result's with the other holders'.

    Raises:
        VersionError: a lossy update of another version than is held.
        CorruptPayloadError: a payload of the wrong size or with non-finite content.
        DigestError: other bits than were published.
    """
    num_elements = held.theta.numel()
    if update.lossless:
        return apply_lossless_update(update, payload, num_elements, held.outer_state, verify=verify)
    if update.base != held.version:
        raise VersionError(
            f"the update of fragment {update.fragment} takes version {update.base} to {update.version}, and version "
            f"{held.version} is held; fetch the fragment whole."
        )
    _require_size(update, payload, method.down.encoded_bytes(num_elements))
    next_ = _NextVersion(method, held, AveragedElements(places), steps=method.outer_at == "learners")
    mean = new_like(held.theta) if method.outer_at == "learners" else None
    for run in _runs(num_elements):
        if mean is not None:
            next_.step(run, next_.decode(payload, run, mean[run]))
        elif method.exchanged == "gradients":  # the update is the mean itself, a change from nothing
            next_.decode(payload, run, next_.theta[run])
        else:
            next_.decode(payload, run, next_.theta[run]).add_(held.theta[run])
        next_.finish(run)
    new = next_.made(update.version)
    if verify:
        require_digest(update, new.digest)
    return AppliedUpdate(new, mean, next_.segments)


def published_mean(method: Method, payload: Tensor, num_elements: int) -> Tensor | None:
    """The merged outer gradient that a payload says, fp32 [num_elements], where that is what is published."""
    return method.down.decode(payload, num_elements) if method.outer_at == "learners" else None


class _NextVersion:
    """The version after `held` while it is made, run by run of whole segments and in order.

    A residual, and an outer state that is not stepped, pass through.

    Attributes:
        theta: the new one.
    """

    def __init__(self, method: Method, held: GlobalFragment, averaged: AveragedElements, *, steps: bool) -> None:
        self._method, self._held, self._averaged = method, held, averaged
        self._digest = Digest()
        self._scratch = Scratch(held.theta.device)
        self._outer_state = _like(held.outer_state) if steps else held.outer_state
        self._residual = held.residual
        self.theta = new_like(held.theta)

    def decode(self, payload: Tensor, run: slice, out: Tensor) -> Tensor:
        """What the payload says of a run."""
        return self._method.down.decode(payload[self._span(run)], out.numel(), out, self._scratch)

    def step(self, run: slice, delta: Tensor) -> None:
        """The outer step of a run, into `theta` and the new outer state. `delta` may be that part of `theta`."""
        self._step(run, delta, self.theta[run], _within(self._outer_state, run))

    def finish(self, run: slice) -> None:
        """A run of `theta` is there."""
        self._averaged.floor(run, self.theta[run])
        self._digest.update(flush_denormals(self.theta[run]))

    def _step(self, run: slice, delta: Tensor, out: Tensor, new_state: dict[str, Tensor]) -> None:
        """The outer step of a run, written to `out` and `new_state`. `delta` may be `out`."""
        held, state = self._held, _within(self._held.outer_state, run)
        self._averaged.step(self._method.outer, run, state, held.theta[run], delta, out, new_state)

    def made(self, version: int) -> GlobalFragment:
        """All runs are there."""
        return GlobalFragment(
            self._held.fragment, version, self.theta, self._outer_state, self._residual, self._digest.hex()
        )

    @property
    def segments(self) -> bytes:
        """The digests of its segments."""
        return self._digest.segments

    def _span(self, run: slice) -> slice:
        """The bytes of a run in a payload."""
        first, last = run.start // SEGMENT_ELEMENTS, -(-run.stop // SEGMENT_ELEMENTS)
        return self._method.down.segment_span(self.theta.numel(), first, last)


class _Closing(_NextVersion):
    """The next version from merged outer gradients, with the payload that says so.

    All runs are encoded, each of which may be refused, before the first is closed. In place, and where learners take
    it, the outer step of a run is taken twice, first in scratch: that takes less time than the memory of another state.
    """

    def __init__(self, method: Method, held: GlobalFragment, averaged: AveragedElements, *, in_place: bool) -> None:
        super().__init__(method, held, averaged, steps=method.exchanged != "gradients")
        down = method.down
        self._encoding = Scratch(held.theta.device)
        self._steps = method.outer_at == "syncer" and method.exchanged != "gradients"
        self._drafts = in_place and self._steps
        if self._drafts:
            self._outer_state = {name: each if each.dim() else each.clone() for name, each in held.outer_state.items()}
        if down.lossless:
            self._residual = None
        elif held.residual is None or not in_place:
            self._residual = new_like(held.theta)
        if _sends_theta(method):
            self.payload = self.theta.view(torch.uint8)
        else:
            self.payload = new_vector(down.encoded_bytes(held.theta.numel()), torch.uint8)

    def encode(self, run: slice) -> None:
        """Encode a run, whose merged outer gradient is in `theta`. Nothing is written to what is held."""
        change, new_state = self.theta[run], _within(self._outer_state, run)
        if self._drafts:
            change, new_state = self._draft(run), self._draft_state(run)
        self._change(run, change, new_state)
        if _sends_theta(self._method):
            self._require_finite(change)
        else:
            self._method.down.encode(change, self.payload[self._span(run)], self._encoding)
        if self._method.outer_at == "learners":  # where theirs overflows, so does the one that `close` takes
            sent = self.decode(self.payload, run, self._draft(run))
            self._step(run, sent, sent, new_state)
            self._require_finite(sent)
        if self._steps or self._method.outer_at == "learners":
            for each in new_state.values():  # one that overflows stays so, even where this step is finite
                if each.dim():
                    self._require_finite(each)

    def close(self, run: slice) -> None:
        """Close a run that has been encoded."""
        new = self.theta[run]
        if self._drafts:
            self._change(run, new, _within(self._outer_state, run))
        if not _sends_theta(self._method):
            sent = self.decode(self.payload, run, self._scratch.take("sent", (new.numel(),), torch.float32))
            if self._residual is not None:
                torch.sub(new, sent, out=self._residual[run])
            if self._steps:
                torch.add(sent, self._held.theta[run], out=new)
            elif self._method.outer_at == "learners":
                self.step(run, sent)
            else:  # the answer is the mean itself, a change from nothing
                new.copy_(sent)
        self.finish(run)

    def _change(self, run: slice, out: Tensor, new_state: dict[str, Tensor]) -> Tensor:
        """What is sent of a run: new elements or their change, or the merged outer gradient; and what earlier updates
        left out of it."""
        held, delta = self._held, self.theta[run]
        if self._steps:
            self._step(run, delta, out, new_state)
            if not _sends_theta(self._method):
                out.sub_(held.theta[run])
        if held.residual is not None:
            out.add_(held.residual[run])
        return out

    def _draft(self, run: slice) -> Tensor:
        return self._scratch.take("draft", (run.stop - run.start,), torch.float32)

    def _draft_state(self, run: slice) -> dict[str, Tensor]:
        return {
            name: self._scratch.take(name, (run.stop - run.start,), each.dtype) if each.dim() else each.clone()
            for name, each in self._held.outer_state.items()
        }

    def _require_finite(self, new: Tensor) -> None:
        low, high = torch.aminmax(new)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteError(
                f"the outer step of fragment {self._held.fragment} from version {self._held.version} overflows fp32; "
                "find the learner that diverged, or lower the outer learning rate."
            )


def _runs(num_elements: int) -> Iterator[slice]:
    for start in range(0, num_elements, _RUN_ELEMENTS):
        yield slice(start, min(start + _RUN_ELEMENTS, num_elements))


def _like(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Room for the next outer state: a copy of its counters, and vectors to be written to."""
    return {name: new_like(each) if each.dim() else each.clone() for name, each in state.items()}


def _within(state: Mapping[str, Tensor], elements: slice) -> dict[str, Tensor]:
    """The part of an outer state that belongs to these elements."""
    return {name: each[elements] if each.dim() else each for name, each in state.items()}


def _require_size(update: Update, payload: Tensor, num_bytes: int) -> None:
    if payload.dtype != torch.uint8 or payload.shape != (num_bytes,):
        raise CorruptPayloadError(
            f"the update of fragment {update.fragment} to version {update.version} has {num_bytes} bytes, not "
            f"{tuple(payload.shape)} of {payload.dtype}; fetch it again."
        )


def require_digest(update: Update, found: str) -> None:
    if found != update.digest:
        raise DigestError(
            f"version {update.version} of fragment {update.fragment} is not what was published (digest "
            f"{update.digest[:12]}, here {found[:12]}); check both machines' memory and disks."
        )
