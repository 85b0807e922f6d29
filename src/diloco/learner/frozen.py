"""Frozen state: the parameters and persistent buffers of a learner's model that no gradient trains.

A learner that joins loads the run's values of the static tensors. Those with the role "local", and buffers without
floating-point values (counters), are its own from then on; training must not change the others. Averaged tensors are in
the fragments.

The base of a fine-tuned model are frozen tensors that every learner loads itself (`Learner(static="digest")`). Its
digests are part of the layout, so a learner with another base cannot join. The base is neither sent nor copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.core.layout import BaseTensor, Fragment, Layout, TensorSpec
from diloco.core.names import holder, named_parameters, tensor_names
from diloco.errors import LayoutError
from diloco.learner.pieces import Box, Units, local_of, parameter_of, read_dtensor

_BLOCK_BYTES = 64 * 2**20
"""Bytes that are copied from a device at once."""

SAMPLED_ELEMENTS = 64
"""Elements of every tensor that a check compares."""


def base_tensor(spec: TensorSpec, tensor: Tensor) -> BaseTensor:
    """A tensor of the base with its digest. Every rank gathers a sharded tensor for it."""
    return BaseTensor(spec, digest_of(whole_of(tensor)))


def whole_of(tensor: Tensor) -> Tensor:
    """The whole of a tensor; every rank gathers a sharded one."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def digest_of(tensor: Tensor) -> str:
    """SHA-256 (hex) of the elements of a tensor of any dtype, on any device, in row-major order."""
    plain = tensor.detach().as_subclass(Tensor)
    flat = plain.contiguous().view(-1).view(torch.uint8)
    hasher = hashlib.sha256()
    for start in range(0, flat.numel(), _BLOCK_BYTES):
        hasher.update(flat[start : start + _BLOCK_BYTES].cpu().numpy().data)
    return hasher.hexdigest()


@dataclass
class _Fingerprint:
    """The signs by which a check recognises an unchanged tensor, taken when its digest was last known."""

    tensor: Tensor
    address: int
    version: int | None
    sample: Tensor


class FrozenBase:
    """Detects that training changes a tensor of the base, without a copy of it.

    A check compares the tensor's identity, address and version counter, and 64 elements. It therefore detects a
    replaced tensor and in-place operations; writes that autograd does not count (through `.data`, by a kernel) are
    detected if they reach one of the 64 elements. Where identity, address or counter has changed, the digest is
    computed again: loading the same values once more is no change.

    Arguments:
        tensors: of the layout.
        find: returns the current tensor of a name.
    """

    def __init__(self, tensors: Sequence[BaseTensor], find: Callable[[str], Tensor]) -> None:
        self._digests = {each.spec.name: each.digest for each in tensors}
        for name in self._digests:  # of a sharded tensor, the digest of the local part
            if isinstance(tensor := find(name), DTensor):
                self._digests[name] = digest_of(local_of(tensor))
        self._find = find
        self._last = {name: _fingerprint(find(name)) for name in self._digests}

    def check(self, part: int, num_parts: int) -> None:
        """Check every `num_parts`-th tensor, from the one with index `part` on.

        Raises:
            LayoutError: training changed a tensor.
        """
        for name in list(self._digests)[part::num_parts]:
            tensor, before = self._find(name), self._last[name]
            now = _fingerprint(tensor)
            is_same = now.tensor is before.tensor and (now.address, now.version) == (before.address, before.version)
            if (is_same and torch.equal(now.sample, before.sample)) or self._is_unchanged(name, now):
                continue
            raise LayoutError(
                f"training changed {name!r}, which static='digest' requires to be the same on every learner for the "
                "whole run; leave it as it was loaded (evaluate adapters without merging them), or make it trainable "
                "before the learner attaches."
            )

    def _is_unchanged(self, name: str, now: _Fingerprint) -> bool:
        if digest_of(local_of(now.tensor)) != self._digests[name]:
            return False
        self._last[name] = now
        return True


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> _Fingerprint:
    local = local_of(tensor).as_subclass(Tensor)
    version = None if tensor.is_inference() else tensor._version
    return _Fingerprint(tensor, local.data_ptr(), version, _sample(local))


def _sample(tensor: Tensor) -> Tensor:
    """Up to SAMPLED_ELEMENTS elements at even distances, as bytes."""
    found = tensor[_sampled(tensor.shape, tensor.device)] if tensor.dim() else tensor.reshape(1)
    return found.contiguous().view(torch.uint8)


@lru_cache(maxsize=64)
def _sampled(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """The indices of the sampled elements: a model has many tensors of few shapes."""
    places = torch.linspace(0, shape.numel() - 1, min(SAMPLED_ELEMENTS, shape.numel()), dtype=torch.float64).long()
    return torch.unravel_index(places.to(device), shape)


Place = tuple[nn.Module, str]


class FrozenState:
    """The frozen state of one learner's model: loads the run's values, and detects when training changes one.

    Values are compared with a copy, because code may write through `.data` or replace the tensor. Changes of a
    parameter's `requires_grad` are detected too.
    """

    def __init__(self, model: nn.Module, layout: Layout, units: Units) -> None:
        self._units = units
        here = tensor_names(model)  # other ranks of the learner may hold other tensors
        self._places = {spec.name: holder(model, spec.name) for spec in layout.static if spec.name in here}
        self._local = {spec.name for spec in layout.static if spec.role == "local"}
        self._averaged = _averaged_places(model, layout)
        base = {each.spec.name: holder(model, each.spec.name) for each in layout.base if each.spec.name in here}
        self._base = FrozenBase(
            [each for each in layout.base if each.spec.name in here], lambda name: current(base[name])
        )
        self._copies: dict[str, Tensor] = {}
        self._has_joined = self._is_checked = False
        self._trained = {name: each for name, each in named_parameters(model) if each.requires_grad}
        self._untrained = {name: each for name, each in named_parameters(model) if not each.requires_grad}
        self._frozen_at_boundary: dict[str, Tensor] = {}

    def values(self) -> dict[str, Tensor]:
        """Host copies of the current static tensors, by name. Every rank gathers the whole of sharded ones."""
        whole = {name: whole_of(current(place)) for name, place in self._places.items()}
        return {name: each.to("cpu", copy=True).contiguous() for name, each in whole.items()}

    def averaged(self) -> dict[str, Tensor]:
        """The current averaged tensors, by their names in the layout; training may have replaced them."""
        return self._units.by_name({name: current(place) for name, place in self._averaged.items()})

    def counters(self) -> dict[str, Tensor]:
        """Host copies of the learner's own tensors: local ones, and buffers without floating-point values."""
        own = {name: current(place) for name, place in self._places.items() if self._is_own(name)}
        return {name: local_of(each).to("cpu", copy=True) for name, each in own.items()}

    @torch.no_grad()
    def load_counters(self, values: Mapping[str, Tensor]) -> None:
        """Restore what `counters` returned."""
        for name, value in values.items():
            local_of(current(self._places[name])).copy_(value)

    @torch.no_grad()
    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """Load the run's values; at a rejoin, not those of the tensors that are the learner's own."""
        for name in self._places.keys() & values.keys():
            if not (self._has_joined and self._is_own(name)):
                piece = read_dtensor(name, current(self._places[name]))
                piece.local.copy_(values[name][piece.box.within(Box.whole(piece.shape))])
        self._has_joined = True
        self._copies = {
            name: local_of(value).clone()
            for name, place in self._places.items()
            if name not in self._local and (value := current(place)).is_floating_point()
        }

    def check(self, part: int, num_parts: int) -> None:
        """Compare every `num_parts`-th floating-point tensor with the run's: the sends of a round check all of them.

        Arguments:
            part: the index of the first tensor to check, from 0 to `num_parts` − 1.

        Raises:
            LayoutError: training changed a tensor, so learners would silently differ.
        """
        self._base.check(part, num_parts)
        for name in list(self._copies)[part::num_parts]:
            if not torch.equal(local_of(current(self._places[name])), self._copies[name]):
                self._refuse(name)

    def check_boundary(self) -> None:
        """Check that no parameter was unfrozen and, at the first boundary, compare all tensors with the run's.

        Raises:
            LayoutError: training changed a tensor, or a parameter requires a gradient that did not.
        """
        if not self._is_checked:
            self.check(0, 1)
            self._is_checked = True
        for name, parameter in self._untrained.items():
            if parameter.requires_grad:
                raise LayoutError(
                    f"parameter {name!r} requires a gradient and did not when the learner attached, so its training "
                    "would not be exchanged; make it trainable before attaching (with learning rate 0 until it is to "
                    "train), or close this learner and attach a new one to a run of the model as it is now."
                )

    def check_trained(self, fragment: Fragment, trains: Sequence[int] | None) -> None:
        """Check that no parameter of a fragment to send was frozen for good: one that requires no gradient now, and has
        the value of the last send or adoption. A parameter that is frozen from time to time, as in a GAN, has moved.

        Arguments:
            trains: indices of the tensors that this learner trains; None: all.

        Raises:
            LayoutError: such a parameter.
        """
        for index, place in enumerate(fragment.tensors):
            name = place.spec.name
            if (own := self._frozen_later(place.spec)) is None or not (trains is None or index in trains):
                continue
            before = self._frozen_at_boundary.get(name)
            if before is not None and own.numel() and torch.equal(own, before):
                raise LayoutError(
                    f"parameter {name!r} requires no gradient any more and has not been trained since it was last "
                    "sent, so this learner holds the others back; name what it trains with trains=[…], or attach new "
                    "learners to a run of the model as it is now."
                )

    def boundary_ends(self, fragments: Iterable[Fragment]) -> None:
        """Copy the parameters frozen by now of the fragments that were sent or adopted at this boundary."""
        for spec in (place.spec for fragment in fragments for place in fragment.tensors):
            self._frozen_at_boundary.pop(spec.name, None)
            if (own := self._frozen_later(spec)) is not None:
                self._frozen_at_boundary[spec.name] = own.clone()

    def _frozen_later(self, spec: TensorSpec) -> Tensor | None:
        """The local values of a tensor whose parameter required a gradient and does not now; None for any other."""
        parameter = self._trained.get(parameter_of(spec))
        return None if parameter is None or parameter.requires_grad else self._units.local(spec.name, parameter)

    def _is_own(self, name: str) -> bool:
        tensor = current(self._places[name])
        is_number = not isinstance(tensor, nn.Parameter) and not tensor.is_floating_point()
        return name in self._local or is_number

    def _refuse(self, name: str) -> None:
        is_parameter = isinstance(current(self._places[name]), nn.Parameter)
        raise LayoutError(
            f"training changed {name!r}, a {'parameter that requires no gradient' if is_parameter else 'buffer'}, so "
            f"learners would drift apart; pass buffers={{{name!r}: 'average'}} to average it with the parameters or "
            "'local' for each learner to keep its own, make a parameter trainable before attaching, or use a model "
            "without running statistics (LayerNorm or GroupNorm for BatchNorm)."
        )


def exchanged_tensors(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The present tensors of a model's fragments: trainable parameters and averaged tensors, as the model holds them.

    By their names in the layout. The value for a unit is the whole tensor of which it is rows.
    """
    found: dict[str, Tensor] = {name: each for name, each in named_parameters(model) if each.requires_grad}
    averaged = {name: current(place) for name, place in _averaged_places(model, layout).items()}
    return Units(layout).by_name(found | averaged)


def averaged_tensors(layout: Layout) -> list[TensorSpec]:
    """The averaged tensors of a layout."""
    places = (place for fragment in layout.fragments for place in fragment.tensors)
    return [place.spec for place in places if place.spec.is_averaged]


def _averaged_places(model: nn.Module, layout: Layout) -> dict[str, Place]:
    """The places of the averaged tensors in this process, by the names that they have there."""
    here = tensor_names(model)
    names = dict.fromkeys(map(parameter_of, averaged_tensors(layout)))
    return {name: holder(model, name) for name in names if name in here}


def current(place: Place) -> Tensor:
    """The current tensor at a place.

    Raises:
        LayoutError: the tensor was removed.
    """
    module, attribute = place
    tensor = getattr(module, attribute, None)
    if not isinstance(tensor, Tensor):
        raise LayoutError(
            f"the model's {type(module).__name__} has no tensor {attribute!r} any more, which the run's model has; "
            "keep it, or close this learner and attach a new one."
        )
    return tensor
