"""Detection of private master weights of an optimizer, which an adoption would silently fail to reach.

Two tests of each parameter, until one has a result:

    at a send          an fp32 tensor of the optimizer, under any key, with the shape of a bf16 or fp16 parameter, that
                       rounds to the parameter's present values is its master copy
    after an adoption  the parameter returns within one step to its value from before the adoption

The second test finds copies that are not reachable from the optimizer. Let b be the value of sampled elements before
the adoption, a the value adopted, and c and e those one and two steps later. If the adoption moved the parameter at
least 8 times as far as an inner step, ‖a − b‖ ≥ 8·‖e − c‖, then ‖c − b‖ ≤ ‖a − b‖/4 means that the adopted value was
lost, and ‖c − a‖ ≤ ‖a − b‖/4 that it was kept. Otherwise (a high learning rate, a short adoption) there is no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.core.fragments import Fragment, Layout
from diloco.errors import ConfigError
from diloco.learner.optimizers import require_model_parameters
from diloco.learner.pieces import Units, local_of

MIN_STEPS = 8
"""The least length of an adoption with a result, in lengths of an inner step."""

NEAR = 4
"""A value has returned to another one if their distance is at most the adoption's length divided by this."""

SAMPLED_TENSORS, MIN_ELEMENTS, SAMPLED_ELEMENTS = 16, 64, 256
"""Sampled are the 16 largest tensors of a fragment, if they have at least 64 elements, and 256 elements of each."""

MAX_ADOPTIONS = 32
"""Adoptions of a fragment after which tests without a result end."""

HALF = (torch.bfloat16, torch.float16)


class MasterWeightDetector:
    """Detects private master weights of one learner's optimizers.

    Arguments:
        optimizers: that train the model.
        layout: of the model.
        parameters: as `LearnerTensors.parameters`.
        units: cuts this process's piece of a tensor out of them.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], layout: Layout, parameters: Mapping[str, Tensor],
        units: Units,
    ) -> None:  # fmt: skip
        self._optimizers, self._parameters, self._units = optimizers, parameters, units
        self._at_attaching = [each for o in optimizers for group in o.param_groups for each in group["params"]]
        # Samples after the first step of half-precision parameters, as long as their test has no result.
        self._first: dict[str, Tensor] = {}
        self._has_stepped = False
        self._samples = [_AdoptionSamples(fragment, parameters, units) for fragment in layout.fragments]

    def check_groups(self) -> None:
        """Raise ConfigError if an optimizer was given other tensors than the model's after the learner attached."""
        known = {id(each) for each in (*self._at_attaching, *self._parameters.values())}
        require_model_parameters(self._optimizers, known)

    @torch.no_grad()
    def check_copies(self, fragment: Fragment) -> None:
        """The test at a send, of a fragment's parameters that have moved since the first step.

        A parameter that has not moved, or whose elements are all equal, may equal another tensor by chance.

        Raises:
            ConfigError: an optimizer keeps a master copy.
        """
        names = [name for name in fragment.names if name in self._first]
        kept = list(self._kept()) if names else []
        for name in names:
            parameter, own = local_of(self._parameters[name]), self._units.local(name, self._parameters[name])
            if torch.equal(_sample(own), self._first[name]) or bool((parameter == parameter.flatten()[0]).all()):
                continue
            del self._first[name]
            for optimizer, key, tensor in kept:
                if tensor.numel() == parameter.numel() and _rounds_to(tensor, parameter):
                    raise ConfigError(
                        f"{type(optimizer).__name__} keeps master weights of {name!r} ({key}), which adopting a global "
                        "value would not reach; use an optimizer that trains the model's own parameters, or a model in "
                        "fp32 under autocast."
                    )

    def stepped(self) -> None:
        """The test after an adoption. Call it after each inner step, before any parameter is written.

        Raises:
            ConfigError: a parameter has lost the adopted value.
        """
        if not self._has_stepped:
            self._has_stepped = True
            half = {
                name: self._units.local(name, each) for name, each in self._parameters.items() if each.dtype in HALF
            }
            self._first = {name: _sample(each) for name, each in half.items() if each.numel()}
        for samples in self._samples:
            if (name := samples.stepped()) is not None:
                kinds = ", ".join(type(each).__name__ for each in self._optimizers)
                raise ConfigError(
                    f"one step of {kinds} after a global value was adopted, {name!r} is back where it was before, so "
                    "adopting has no effect: the optimizer keeps weights of its own; use one that trains the model's "
                    "own parameters, or a model in fp32 under autocast."
                )

    def begin(self) -> None:
        """Forget samples: the learner joins, or rejoins, and its parameters are overwritten."""
        for samples in self._samples:
            samples.around = []

    @contextmanager
    def writing(self, fragment: int) -> Iterator[None]:
        """The context in which a fragment's parameters are adopted."""
        samples = self._samples[fragment]
        before = samples.sample()
        yield
        samples.written(before)

    def _kept(self) -> Iterator[tuple[torch.optim.Optimizer, str, Tensor]]:
        """The fp32 tensors in the optimizers' state and attributes, with their keys."""
        own = {id(each) for each in self._parameters.values()}
        for optimizer in self._optimizers:
            seen: set[int] = set()
            for key, tensor in _tensors_of(vars(optimizer), "", seen):
                if tensor.dtype == torch.float32 and id(tensor) not in own:
                    yield optimizer, key, local_of(tensor)


def _tensors_of(value: object, key: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers and optimizers, each with the innermost name that leads to it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _tensors_of(each, repr(name) if isinstance(name, str) else key, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_of(each, key, seen)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors_of(vars(value), key, seen)


def _rounds_to(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether an fp32 tensor rounds to a parameter's values; a few elements are compared first."""
    mine, theirs = tensor.reshape(-1), parameter.reshape(-1)
    if mine.device != theirs.device:
        mine = mine.to(theirs.device)
    step = max(1, theirs.numel() // 64)
    return torch.equal(mine[::step].to(theirs.dtype), theirs[::step]) and torch.equal(mine.to(theirs.dtype), theirs)


@dataclass
class _AdoptionSamples:
    """Samples of a fragment's parameters around its last adoption.

    Attributes:
        num_adoptions: sampled so far.
        around: samples before the adoption (b), after it (a), and one step later (c); empty: no adoption is under test.
    """

    fragment: Fragment
    parameters: Mapping[str, Tensor]
    units: Units
    num_adoptions: int = 0
    around: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = [each.spec.name for each in self.fragment.tensors if not each.spec.is_averaged]
        names = [name for name in trained if name in self.parameters]
        sizes = {name: self._local(name).numel() for name in names}
        large = sorted((name for name in names if sizes[name] >= MIN_ELEMENTS), key=lambda name: -sizes[name])
        self.names = large[:SAMPLED_TENSORS]  # without a result

    def sample(self) -> Tensor:
        """fp32 [tensors, elements] on the host."""
        rows = [_sample(self._local(name)) for name in self.names]
        return torch.stack(rows).cpu() if rows else torch.empty(0, SAMPLED_ELEMENTS)

    def _local(self, name: str) -> Tensor:
        return self.units.local(name, self.parameters[name])

    def written(self, before: Tensor) -> None:
        """Begin the test of an adoption. `before`: a sample from before it."""
        self.num_adoptions += 1
        if self.num_adoptions > MAX_ADOPTIONS:
            self.names = []
        self.around = [before, self.sample()] if self.names else []

    def stepped(self) -> str | None:
        """Continue the test after an inner step. Returns the name of a parameter that has lost the adopted value."""
        if not self.around:
            return None
        self.around.append(self.sample())
        if len(self.around) < 4:
            return None
        (before, adopted, once, twice), self.around = self.around, []
        length = (adopted - before).norm(dim=1)
        is_long = (length > 0) & (length >= MIN_STEPS * (twice - once).norm(dim=1))
        is_lost = is_long & (NEAR * (once - before).norm(dim=1) <= length)
        holds = is_long & (NEAR * (once - adopted).norm(dim=1) <= length)
        if bool(is_lost.any()):
            return self.names[int(is_lost.int().argmax())]
        self.names = [name for name, done in zip(self.names, holds.tolist(), strict=True) if not done]
        return None


def _sample(tensor: Tensor) -> Tensor:
    """SAMPLED_ELEMENTS elements at even distances, fp32; of a smaller tensor some elements repeatedly."""
    places = torch.linspace(0, tensor.numel() - 1, SAMPLED_ELEMENTS, dtype=torch.float64).long().to(tensor.device)
    if tensor.is_contiguous():
        return tensor.view(-1)[places].float()
    return tensor[torch.unravel_index(places, tensor.shape)].float()
