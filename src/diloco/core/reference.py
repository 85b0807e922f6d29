"""The whole family in one plain loop: what a run computes, without machines, threads or a network.

A run is a list of events, carried out in order:

    ("gradient", m)                learner m computes the gradient of its next inner step
    ("step", m)                    and takes the step; data parallel exchanges in between
    ("send", m, p)                 learner m encodes its outer gradient of fragment p, Δ = anchor − θ
    ("merge", p, senders, scale)   the oldest contribution in flight of each sender is merged, in learner order; the
                                   mean times `scale` and the outer optimizer make the next version of fragment p
    ("adopt", m, p, version)       learner m adopts a version of fragment p
    ("eager", m, p, due, sent)     learner m takes an outer step of its own: the mean of version `due` has come (None:
                                   none has), the fragment was sent at this boundary, or both

`scheduled` lists the events of a method whose rounds are scheduled. Where the syncer calls or learners push, the
network decides their order, and the caller gives the list.

Every exchange agrees with `Reference` to the bit. It computes with whole vectors and keeps every version. Of a Method's
answers it uses codecs, weights, merges, outer optimizers and adoptions, each from its own file.

DiLoCo, arXiv 2311.08105, algorithm 1; Streaming DiLoCo, arXiv 2501.18512, algorithm 2; Eager updates, arXiv 2502.12996,
algorithm 3; Asynchronous Local-SGD, arXiv 2401.09135, algorithm 2; Decoupled DiLoCo, arXiv 2604.21428.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from diloco.core import adopt
from diloco.core.layout import Layout, Placement
from diloco.core.merges import Encoded, merged_runs
from diloco.core.merges.screens import refused_by
from diloco.core.method import Method
from diloco.core.outer import State
from diloco.core.quorum import AllLive
from diloco.core.weights import merge_weights
from diloco.errors import ConfigError

Event = tuple[Any, ...]


def scheduled(
    method: Method, num_learners: int, num_fragments: int, num_steps: int, overlaps: Mapping[int, int] | None = None
) -> Iterator[Event]:
    """The events of learners in step, all of which live to the end and wait for every answer.

    Arguments:
        overlaps: τ of the learners that have one of their own.

    Raises:
        ConfigError: the method's rounds are not scheduled, or it leaves contributions out at random.
    """
    if not isinstance(method.quorum, AllLive) or method.quorum.drop:
        raise ConfigError(f"the order of events under {method.quorum} is not known beforehand; list them.")
    learners, schedule = range(num_learners), method.schedule(num_fragments)
    versions = [0] * num_fragments
    answers: dict[tuple[int, int], list[tuple[int, int]]] = {(m, p): [] for p in range(num_fragments) for m in learners}
    for step in range(1, num_steps + 1):
        yield from (("gradient", m) for m in learners)
        if method.exchanged != "gradients":
            yield from (("step", m) for m in learners)
        sent = schedule.sends(step)
        for p in sent:
            yield from (("send", m, p) for m in learners)
            yield "merge", p, tuple(learners), 1.0
            versions[p] += 1
            for m in learners:
                answers[m, p].append((step + (overlaps or {}).get(m, method.overlap), versions[p]))
        for (m, p), awaited in answers.items():
            due = awaited.pop(0)[1] if awaited and awaited[0][0] <= step else None
            if isinstance(method.adopt, adopt.Eager) and (due is not None or p in sent):
                yield "eager", m, p, due, p in sent
            elif due is not None:
                yield "adopt", m, p, due
        if method.exchanged == "gradients":
            yield from (("step", m) for m in learners)


class Model(Protocol):
    """One learner's model, data and inner optimizer. Tensors have the layout's names and are changed in place."""

    def gradient(self) -> None:
        """Compute the gradients of the next inner step."""

    def step(self) -> int:
        """Take the step. Returns its tokens."""

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that are exchanged."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Their gradients."""

    def trained(self, fragment: int) -> frozenset[int] | None:
        """Indices of the fragment's tensors that this learner trains; None: all."""


class Version(NamedTuple):
    """Θ, the outer state, what a lossy wire has left out so far, and the merged outer gradient as published."""

    theta: Tensor
    outer_state: State
    residual: Tensor | None = None
    mean: Tensor | None = None


class SentGradient(NamedTuple):
    """A contribution in flight. `residual`: the learner's before it."""

    payload: Tensor
    base: int
    tokens: int
    steps: int
    residual: Tensor | None


@dataclass
class LearnerFragment:
    """One learner's work on one fragment; vectors are flat fp32.

    Attributes:
        anchor: what outer gradients are measured from.
        origin: the parameters as last sent; None: not since the last adoption.
        version: adopted.
        tokens, steps: trained and not sent.
        in_flight: contributions, oldest first.
        residual: error feedback.
        outer_state, newest, added: of eager updates: the learner's own outer state, its newest outer gradient as
            decoded, and the shares of it that its anchor has taken and that are not subtracted yet, oldest first.
    """

    anchor: Tensor
    outer_state: State
    origin: Tensor | None = None
    version: int = 0
    tokens: int = 0
    steps: int = 0
    in_flight: list[SentGradient] = field(default_factory=list)
    residual: Tensor | None = None
    newest: Tensor | None = None
    added: list[Tensor] = field(default_factory=list)


class Reference:
    """A run of one method, in which all models start as the first.

    Attributes:
        versions: of each fragment, from version 0 on.
        work: by learner and fragment.
    """

    def __init__(self, method: Method, layout: Layout, models: Sequence[Model]) -> None:
        self.method, self.models = method, models
        self.places = [fragment.tensors for fragment in layout.fragments]
        thetas = [_flat(places, models[0].tensors()) for places in self.places]
        self.versions = [[Version(theta, method.outer.init(theta.numel()))] for theta in thetas]
        self.work = [[LearnerFragment(theta, method.outer.init(theta.numel())) for theta in thetas] for _ in models]
        for model in models:
            for places, theta in zip(self.places, thetas, strict=True):
                _write(places, model.tensors(), theta)

    def run(self, events: Iterable[Event]) -> None:
        """Carry out events in order."""
        for event in events:
            match event:
                case "gradient", m:
                    self.models[m].gradient()
                case "step", m:
                    tokens = self.models[m].step()
                    for work in self.work[m]:
                        work.tokens, work.steps = work.tokens + tokens, work.steps + 1
                case "send", m, p:
                    self._send(m, p)
                case "merge", p, senders, scale:
                    self._merge(p, senders, scale)
                case "adopt", m, p, version:
                    self._adopt(m, p, version)
                case "eager", m, p, due, sent:
                    self._step_eagerly(m, p, due, sent=sent)
                case _:
                    raise ConfigError(f"{event} is no event of a run; see diloco.core.reference.")

    def _send(self, m: int, p: int) -> None:
        """Send Q(Δ + β·e), e being what earlier encodings lost; e ← Δ + β·e − sent."""
        method, model, work, places = self.method, self.models[m], self.work[m][p], self.places[p]
        if method.exchanged == "gradients":
            total = _flat(places, model.gradients())
        else:
            theta = _flat(places, model.tensors())
            total = _rounded(places, work.anchor if work.origin is None else work.origin) - theta
            work.origin = None if isinstance(method.adopt, adopt.Eager) else theta
        if work.residual is not None:
            total = total + work.residual * method.error_feedback
        payload = method.up.encode(total)
        work.in_flight.append(SentGradient(payload, work.version, work.tokens, work.steps, work.residual))
        work.newest, work.tokens, work.steps = method.up.decode(payload, total.numel()), 0, 0
        if method.error_feedback:
            work.residual = total - work.newest

    def _merge(self, p: int, senders: Sequence[int], scale: float) -> None:
        """Δ̄ = merge({Δ_m, w_m}), and the next version. The residual of what a screen refuses is taken back."""
        method, places, last, round_ = self.method, self.places[p], self.versions[p][-1], len(self.versions[p]) - 1
        taken = {m: [self.work[m][p].in_flight.pop(0) for _ in range(senders.count(m))] for m in sorted(set(senders))}
        tokens, steps = ([sum(getattr(c, of) for c in own) for own in taken.values()] for of in ("tokens", "steps"))
        ages = [max(round_ - c.base for c in own) for own in taken.values()]
        weights = merge_weights(method.weight, tokens, steps, ages)
        encoded = [
            Encoded(f"{m:06d}", tuple(c.payload for c in own), weight, age, self.models[m].trained(p))
            for (m, own), weight, age in zip(taken.items(), weights, ages, strict=True)
        ]
        mean, momentum = torch.empty_like(last.theta), method.outer.momentum_of(last.outer_state)
        refused = refused_by(method.screen, method.up, encoded, places, mean.numel()) if method.screen else ()
        for m in map(int, refused):
            self.work[m][p].residual = taken[m][0].residual
        kept = [each for each in encoded if each.learner not in refused]
        if method.partial == "scale" and refused:
            scale *= math.fsum(each.weight for each in kept) / math.fsum(weights)
        for _ in merged_runs(method.merge, method.up, kept, places, mean.numel(), momentum, out=mean):
            pass
        self.versions[p].append(_close(method, places, last, mean if scale == 1 else mean * scale))

    def _adopt(self, m: int, p: int, version: int) -> None:
        """θ ← adopt(θ, Θ); the anchor becomes Θ. Where gradients are exchanged, Θ is their mean."""
        work, places, theta, how = self.work[m][p], self.places[p], self.versions[p][version].theta, self.method.adopt
        if self.method.exchanged == "gradients":
            _write(places, self.models[m].gradients(), theta)
        else:
            _write(places, self.models[m].tensors(), theta, how, work.anchor if work.origin is None else work.origin)
        if not how.keeps_pending:
            work.tokens = work.steps = 0
        work.anchor, work.origin, work.version = theta, None, version

    def _step_eagerly(self, m: int, p: int, due: int | None, *, sent: bool) -> None:
        """anchor_m ← OuterOpt(anchor_m, Δ̄^(t−H) − 1/M·Δ_m^(t−H) + 1/M·Δ_m^(t)); work since the send is added to it."""
        work, places, before, delta = self.work[m][p], self.places[p], self.work[m][p].anchor, None
        if due is not None and (mean := self.versions[p][due].mean) is not None:
            delta, work.version = mean - work.added.pop(0), due
        if sent and work.newest is not None:
            own = work.newest * (1.0 / len(self.models))
            work.added.append(own)
            delta = own if delta is None else delta + own
        if delta is not None:
            stepped, work.outer_state = _outer_step(self.method, places, work.outer_state, before, delta)
            work.anchor = _floored(places, stepped)
        _write(places, self.models[m].tensors(), work.anchor, None if sent else adopt.KeepDisplacement(), before)


def _close(method: Method, places: Sequence[Placement], last: Version, mean: Tensor) -> Version:
    """Take the outer step, or publish the mean itself. A lossy wire carries what it can of either; the rest is kept."""
    steps = method.exchanged != "gradients" and method.outer_at == "syncer"
    new, state = _outer_step(method, places, last.outer_state, last.theta, mean) if steps else (mean, last.outer_state)
    residual = None
    if not method.down.lossless:
        change = new - last.theta if steps else new
        if last.residual is not None:
            change = change + last.residual
        said = method.down.decode(method.down.encode(change), change.numel())
        residual, new = change - said, said + last.theta if steps else said
    mean = new
    if method.outer_at == "learners":
        new, state = _outer_step(method, places, last.outer_state, last.theta, mean)
    return Version(_floored(places, new), state, residual, mean)


def _outer_step(
    method: Method, places: Sequence[Placement], state: State, theta: Tensor, delta: Tensor
) -> tuple[Tensor, State]:
    """OuterOpt(Θ, Δ̄). Averaged tensors, such as running statistics, take Θ − Δ̄ and have no state."""
    new, new_state = method.outer.step(state, theta, delta)
    for part in (place.elements for place in places if place.spec.is_averaged):
        new[part] = method.outer.average(theta[part], delta[part])
        for each in (each for each in new_state.values() if each.dim()):
            each[part] = 0
    return new, new_state


def _floored(places: Sequence[Placement], theta: Tensor) -> Tensor:
    """No variance below 0, and no denormals."""
    for part in (place.elements for place in places if place.spec.role == "variance"):
        theta[part] = theta[part].clamp(min=0)
    return torch.where(theta.abs() < torch.finfo(torch.float32).tiny, 0.0, theta)


def _flat(places: Sequence[Placement], tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[place.spec.name].detach().flatten().float() for place in places])


def _rounded(places: Sequence[Placement], flat: Tensor) -> Tensor:
    """As the tensors' dtypes hold it."""
    return torch.cat([flat[place.elements].to(getattr(torch, place.spec.dtype)).float() for place in places])


@torch.no_grad()
def _write(
    places: Sequence[Placement], tensors: Mapping[str, Tensor], flat: Tensor, how: adopt.Adopt | None = None,
    origin: Tensor | None = None,
) -> None:  # fmt: skip
    """Set tensors to `flat`, or to `how` of themselves and `flat`."""
    for place in places:
        own, new = tensors[place.spec.name], flat[place.elements]
        if how is not None and not (how.needs_origin and place.spec.is_averaged):
            start = None if origin is None else origin[place.elements]
            new = how.adopt(own.flatten().float(), new, start)
        own.copy_(new.view(own.shape))
