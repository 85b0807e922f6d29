"""The whole family in one plain loop: what a run computes, without machines, threads or a network.

A run is a list of events, executed in order:

    ("gradient", m)                learner m computes the gradient of its next inner step
    ("step", m)                    learner m takes that step: θ ← InnerOpt(θ, g). Data parallel exchanges g in between
    ("send", m, p)                 learner m encodes its outer gradient of fragment p, Δ_m = anchor − θ
    ("merge", p, senders, scale)   Δ̄ = scale · merge of the senders' contributions;  Θ ← OuterOpt(Θ, Δ̄) is the next
                                   version of fragment p. Each occurrence of a learner in `senders` takes its oldest
                                   contribution in flight: one that was late for a merge is in the next, beside a newer
    ("adopt", m, p, version)       θ ← adopt(θ, Θ); learner m measures from this version of fragment p now
    ("eager", m, p, due, sent)     learner m takes an outer step of its own, anchor_m ← OuterOpt(anchor_m, Δ̃_m), where
                                   the mean of version `due` has arrived (None: none has), where the fragment was sent
                                   at this boundary, or both. It takes the place of "adopt" in eager updates

`scheduled` lists the events of a method whose rounds are scheduled. Where the syncer calls or learners push, the
network decides their order, and the caller gives the list.

Every exchange agrees with `Reference` to the bit. `Reference` computes with whole vectors and keeps every version. Of a
Method's answers it uses codecs, weights, merges, outer optimizers and adoptions, each from its own file.

DiLoCo, arXiv 2311.08105, algorithm 1; Streaming DiLoCo, arXiv 2501.18512, algorithm 2; Eager updates, arXiv 2502.12996,
algorithm 3; Asynchronous Local-SGD, arXiv 2401.09135, algorithm 2; Decoupled DiLoCo, arXiv 2604.21428.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from diloco.core import adopt
from diloco.core.layout import Layout, Placement
from diloco.core.merges import Encoded, merge_into
from diloco.core.merges.screens import refused_by
from diloco.core.method import Method
from diloco.core.outer import State
from diloco.core.quorum import AllLive
from diloco.core.weights import merge_weights, shares_of
from diloco.errors import ConfigError

Event = tuple[Any, ...]


def scheduled(
    method: Method, num_learners: int, num_fragments: int, num_steps: int, overlaps: Mapping[int, int] | None = None,
    holders: Sequence[Sequence[int]] | None = None,
) -> Iterator[Event]:  # fmt: skip
    """The events of learners that step together, stay to the end and wait for every answer.

    Arguments:
        overlaps: τ by learner, for those whose overlap differs from the method's.
        holders: the learners that hold each fragment; None: all hold all.

    Raises:
        ConfigError: the method's rounds are not scheduled, or it leaves contributions out at random.
    """
    if not isinstance(method.quorum, AllLive) or method.quorum.drop:
        raise ConfigError(f"the order of events under {method.quorum} is not known beforehand; list them.")
    learners, schedule = range(num_learners), method.schedule(num_fragments)
    versions = [0] * num_fragments
    # By learner and fragment: (inner step, version) of the versions on their way, which are applied after that step.
    due: dict[tuple[int, int], list[tuple[int, int]]] = {(m, p): [] for p in range(num_fragments) for m in learners}
    for step in range(1, num_steps + 1):
        yield from (("gradient", m) for m in learners)
        if method.exchanged != "gradients":
            yield from (("step", m) for m in learners)
        sent = schedule.sends(step)
        for p in sent:
            senders = tuple(learners if holders is None else holders[p])
            if not senders:
                continue
            yield from (("send", m, p) for m in senders)
            yield "merge", p, senders, 1.0
            versions[p] += 1
            for m in senders:
                due[m, p].append((step + (overlaps or {}).get(m, method.overlap), versions[p]))
        for (m, p), on_their_way in due.items():
            version = on_their_way.pop(0)[1] if on_their_way and on_their_way[0][0] <= step else None
            if isinstance(method.adopt, adopt.Eager) and (version is not None or p in sent):
                yield "eager", m, p, version, p in sent
            elif version is not None:
                yield "adopt", m, p, version
        if method.exchanged == "gradients":
            yield from (("step", m) for m in learners)


class Model(Protocol):
    """One learner's model, data and inner optimizer. Tensors have the layout's names and are changed in place. A model
    without a fragment's tensors does not hold it: it neither sends nor adopts it."""

    def gradient(self) -> None:
        """Compute the gradients of the next inner step."""

    def step(self) -> int:
        """Take the step; return the number of tokens that it was computed on."""

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that are exchanged."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Their gradients."""

    def trained(self, fragment: int) -> frozenset[int] | None:
        """Indices of the fragment's tensors that this learner trains; None: all."""

    def routed(self, fragment: int) -> Sequence[int] | None:
        """Of a group of experts, the tokens so far that were routed to the expert of each tensor; None: not counted."""


class Version(NamedTuple):
    """A version of the global fragment.

    Attributes:
        theta: Θ, flat fp32; where gradients are exchanged, the mean gradient in its place.
        outer_state: of the outer optimizer after this version's step.
        residual: error feedback of a lossy `down`: what the updates so far have left out; None: nothing.
        mean: what was published; where the outer step is on the learners, Δ̄. None: of the initial model.
    """

    theta: Tensor
    outer_state: State
    residual: Tensor | None = None
    mean: Tensor | None = None


class SentGradient(NamedTuple):
    """A contribution in flight: an encoded outer gradient, its base version, and the work in it.

    Attributes:
        residual: the learner's error feedback before this encoding.
        routed: by tensor, those of its tokens that were routed to the tensor's expert; empty: not counted.
    """

    payload: Tensor
    base: int
    tokens: int
    steps: int
    residual: Tensor | None
    routed: tuple[int, ...] = ()


@dataclass
class LearnerFragment:
    """One fragment in one learner; vectors are flat fp32.

    Attributes:
        anchor: Θ of the version adopted last; outer gradients are measured from it. In eager updates, anchor_m.
        origin: θ as it was sent, if the fragment was sent since its last adoption (an overlap): the next outer gradient
            is measured from it, because the work before it is in flight already.
        version: of the anchor.
        tokens, steps: trained since the last send.
        routed: by tensor, the tokens routed to its expert when `tokens` was last 0; empty: 0.
        in_flight: contributions that are not merged, oldest first.
        residual: e of error feedback.
        outer_state: of eager updates: the learner's own.
        newest: of eager updates: Δ_m^(t), the newest outer gradient as decoded from its payload.
        added: of eager updates: 1/M · Δ_m of each round whose mean has not arrived, oldest first. It is in the anchor,
            and is subtracted from that mean.
    """

    anchor: Tensor
    outer_state: State
    origin: Tensor | None = None
    version: int = 0
    tokens: int = 0
    steps: int = 0
    routed: tuple[int, ...] = ()
    in_flight: list[SentGradient] = field(default_factory=list)
    residual: Tensor | None = None
    newest: Tensor | None = None
    added: list[Tensor] = field(default_factory=list)


class Reference:
    """A run of one method, in which all models start as the first, or with the tensors in `start`.

    Attributes:
        versions: of each fragment, from version 0 on.
        learners: of each learner, its fragments.
    """

    def __init__(
        self, method: Method, layout: Layout, models: Sequence[Model], start: Mapping[str, Tensor] | None = None
    ) -> None:
        self.models = models
        self.places = [fragment.tensors for fragment in layout.fragments]
        self.methods = [method.for_fragment(p) for p in range(len(self.places))]
        thetas = [_flat(places, models[0].tensors() if start is None else start) for places in self.places]
        states = [how.outer.init(theta.numel()) for how, theta in zip(self.methods, thetas, strict=True)]
        self.versions = [[Version(theta, state)] for theta, state in zip(thetas, states, strict=True)]
        self.learners = [list(map(LearnerFragment, thetas, states)) for _ in models]
        for model in models:
            for places, theta in zip(self.places, thetas, strict=True):
                if places[0].spec.name in model.tensors():
                    _write(places, model.tensors(), theta)

    def run(self, events: Iterable[Event]) -> None:
        """Execute events in order."""
        for event in events:
            match event:
                case "gradient", m:
                    self.models[m].gradient()
                case "step", m:
                    tokens = self.models[m].step()
                    for own in self.learners[m]:
                        own.tokens, own.steps = own.tokens + tokens, own.steps + 1
                case "send", m, p:
                    self._send(m, p)
                case "merge", p, senders, scale:
                    self._merge(p, senders, scale)
                case "adopt", m, p, version:
                    self._adopt(m, p, version)
                case "eager", m, p, due, sent:
                    self._step_eagerly(m, p, due, sent=sent)
                case _:
                    raise ConfigError(f"{event} is not an event of a run; see diloco.core.reference.")

    def _send(self, m: int, p: int) -> None:
        """Send Q(Δ + β·e), where e is what earlier encodings lost; then e ← Δ + β·e − decoded.

        The anchor is rounded to the dtypes of the model first, so that a learner that did not move sends zeros.
        """
        method, model, own, places = self.methods[p], self.models[m], self.learners[m][p], self.places[p]
        if method.exchanged == "gradients":
            total = _flat(places, model.gradients())
        else:
            theta = _flat(places, model.tensors())
            total = _rounded(places, own.anchor if own.origin is None else own.origin) - theta
            own.origin = None if isinstance(method.adopt, adopt.Eager) else theta
        if own.residual is not None:
            total = total + own.residual * method.error_feedback
        payload = method.up.encode(total)
        routed = tuple(model.routed(p) or ())
        since = tuple(map(operator.sub, routed, own.routed or (0,) * len(routed)))
        own.in_flight.append(SentGradient(payload, own.version, own.tokens, own.steps, own.residual, since))
        own.routed = routed
        own.newest, own.tokens, own.steps = method.up.decode(payload, total.numel()), 0, 0
        if method.error_feedback:
            own.residual = total - own.newest

    def _merge(self, p: int, senders: Sequence[int], scale: float) -> None:
        """Δ̄ = scale · merge({Δ_m, w_m}), and the next version. A learner whose contribution a screen refuses takes
        back its residual from before that contribution."""
        method, places, last, round_ = self.methods[p], self.places[p], self.versions[p][-1], len(self.versions[p]) - 1
        taken = {m: [self.learners[m][p].in_flight.pop(0) for _ in range(senders.count(m))] for m in sorted({*senders})}
        tokens, steps = ([sum(getattr(c, of) for c in sent) for sent in taken.values()] for of in ("tokens", "steps"))
        ages = [max(round_ - c.base for c in sent) for sent in taken.values()]
        weights = merge_weights(method.weight, tokens, steps, ages)
        shares = self._shares(p, taken, tokens)
        encoded = [
            Encoded(f"{m:06d}", tuple(c.payload for c in sent), weight, age, self.models[m].trained(p), share)
            for (m, sent), weight, age, share in zip(taken.items(), weights, ages, shares, strict=True)
        ]
        mean, momentum = torch.empty_like(last.theta), method.outer.momentum_of(last.outer_state)
        refused = refused_by(method.screen, method.up, encoded, places, mean.numel()) if method.screen else ()
        for m in map(int, refused):
            self.learners[m][p].residual = taken[m][0].residual
        kept = [each for each in encoded if each.learner not in refused]
        if method.partial == "scale" and refused:
            scale *= math.fsum(each.weight for each in kept) / math.fsum(weights)
        merge_into(mean, method.merge, method.up, kept, places, momentum)
        self.versions[p].append(_close(method, places, last, mean if scale == 1 else mean * scale))

    def _shares(
        self, p: int, taken: Mapping[int, Sequence[SentGradient]], tokens: Sequence[int]
    ) -> Sequence[tuple[float, ...] | None]:
        """By learner, the factor of its weight in the merge of each tensor; None: 1. Of an expert, it is the part of
        the learner's tokens that were routed to it."""
        if not all(c.routed for sent in taken.values() for c in sent):
            return [None] * len(taken)
        routed = [[sum(each) for each in zip(*(c.routed for c in sent), strict=True)] for sent in taken.values()]
        trained = [self.models[m].trained(p) for m in taken]
        return shares_of(tokens, routed, trained, [place.spec.is_averaged for place in self.places[p]])

    def _adopt(self, m: int, p: int, version: int) -> None:
        """θ ← adopt(θ, Θ), and the anchor becomes Θ. Where gradients are exchanged, each becomes the mean: g_m ← Θ."""
        own, model, theta, method = (
            self.learners[m][p],
            self.models[m],
            self.versions[p][version].theta,
            self.methods[p],
        )
        tensors, how = model.gradients() if method.exchanged == "gradients" else model.tensors(), method.adopt
        _write(self.places[p], tensors, theta, how, own.anchor if own.origin is None else own.origin)
        if not how.keeps_pending:
            own.tokens = own.steps = 0
            own.routed = tuple(model.routed(p) or ())
        own.anchor, own.origin, own.version = theta, None, version

    def _step_eagerly(self, m: int, p: int, due: int | None, *, sent: bool) -> None:
        """anchor_m ← OuterOpt(anchor_m, Δ̄^(t−H) − 1/M·Δ_m^(t−H) + 1/M·Δ_m^(t)), each term where there is one.

        θ_m ← anchor_m at a send. Between sends, the work since the last one is added: it is in no outer gradient yet.
        """
        own, places, before, delta = self.learners[m][p], self.places[p], self.learners[m][p].anchor, None
        if due is not None and (mean := self.versions[p][due].mean) is not None:
            delta, own.version = mean - own.added.pop(0), due
        if sent and own.newest is not None:
            share = own.newest * (1.0 / len(self.models))
            own.added.append(share)
            delta = share if delta is None else delta + share
        if delta is not None:
            stepped, own.outer_state = _outer_step(self.methods[p], places, own.outer_state, before, delta)
            own.anchor = _floored(places, stepped)
        _write(places, self.models[m].tensors(), own.anchor, None if sent else adopt.KeepDisplacement(), before)


def _close(method: Method, places: Sequence[Placement], last: Version, mean: Tensor) -> Version:
    """The next version as each holder computes it from the payload that is published.

        outer step on the syncer     Θ' = OuterOpt(Θ, Δ̄);  lossy: change = Θ' − Θ + e, then Θ' = Θ + Q(change)
        gradients, no outer step     Θ' = Δ̄;               lossy: change = Δ̄ + e,      then Θ' = Q(change)
        outer step on the learners   Δ̄ is published, lossy as in the second line, and every holder of the fragment
                                     takes the same step with what it decodes: Θ' = OuterOpt(Θ, Δ̄)

    where Q encodes and decodes, and e ← change − Q(change) is the syncer's error feedback.
    """
    steps = method.exchanged != "gradients" and method.outer_at == "syncer"
    new, state = _outer_step(method, places, last.outer_state, last.theta, mean) if steps else (mean, last.outer_state)
    residual = None
    if not method.down.lossless:
        change = new - last.theta if steps else new
        if last.residual is not None:
            change = change + last.residual
        decoded = method.down.decode(method.down.encode(change), change.numel())
        residual, new = change - decoded, decoded + last.theta if steps else decoded
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
    """Set variances below 0, and denormals, to 0: devices differ in how they treat denormals."""
    for part in (place.elements for place in places if place.spec.role == "variance"):
        theta[part] = theta[part].clamp(min=0)
    return torch.where(theta.abs() < torch.finfo(torch.float32).tiny, 0.0, theta)


def _flat(places: Sequence[Placement], tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[place.spec.name].detach().flatten().float() for place in places])


def _rounded(places: Sequence[Placement], flat: Tensor) -> Tensor:
    """A flat fp32 vector rounded to the dtype of each tensor in it."""
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
