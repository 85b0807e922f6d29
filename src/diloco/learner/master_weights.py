"""Master weights that an optimizer keeps for itself: adopting a global value would not reach them, in silence.

Two looks, both only until they have an answer:

    at a send          an fp32 tensor of the optimizer, under whatever key, of the shape of a bf16 or fp16 parameter
                       that rounds to the parameter's present values is its master copy
    after an adoption  one step later the parameter is back where it was before the adoption: what was written is lost

The second finds copies that the first cannot reach. With b before the adoption, a adopted, c one step and e two steps
later, over elements at even distances in a parameter, it concludes only where the adoption moved the parameter at least
8 times as far as an inner step does, ‖a − b‖ ≥ 8·‖e − c‖: then ‖c − b‖ ≤ ‖a − b‖/4 says that the write is lost, and
‖c − a‖ ≤ ‖a − b‖/4 that it holds. A high learning rate, or an adoption that hardly moves anything, says neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.core.fragments import Fragment, Layout
from diloco.errors import ConfigError
from diloco.learner.frozen_base import local_of

MIN_STEPS = 8
"""How many inner steps long an adoption must be to say something."""

NEAR = 4
"""What is within this part of the adoption's length of a place has returned to it."""

SAMPLED_TENSORS, MIN_ELEMENTS, SAMPLED_ELEMENTS = 16, 64, 256
"""The largest tensors of a fragment with at least so many elements, and how many elements of each."""

MAX_ADOPTIONS = 32
"""After so many adoptions of a fragment without an answer, it is not looked at any more."""

HALF = (torch.bfloat16, torch.float16)


class MasterWeightDetector:
    """Looks for master weights of one learner's optimizers.

    Arguments:
        optimizers: that train the model.
        layout: of the model.
        parameters: by their names in the layout.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], layout: Layout, parameters: Mapping[str, Tensor]
    ) -> None:
        self._optimizers, self._parameters = optimizers, parameters
        self._known = {id(each): each for optimizer in optimizers for each in _trained_by(optimizer)}
        self._first: dict[str, Tensor] = {}  # of half precision, without an answer yet: samples after the first step
        self._has_stepped = False
        self._writes = [_Writes(fragment, parameters) for fragment in layout.fragments]

    def check_groups(self) -> None:
        """Look whether an optimizer was given tensors since the learner attached that are not the model's.

        Raises:
            ConfigError: it was.
        """
        known = self._known.keys() | {id(each) for each in self._parameters.values()}
        for optimizer in self._optimizers:
            if strangers := [each for each in _trained_by(optimizer) if id(each) not in known]:
                raise ConfigError(
                    f"{type(optimizer).__name__} was given {len(strangers)} tensor(s) after the learner was attached "
                    "that are no parameters of its model, such as a new module's or private master weights, so their "
                    "training is not exchanged; make all of the model and its optimizers before attaching."
                )

    @torch.no_grad()
    def look(self, fragment: Fragment) -> None:
        """Look for master copies of a fragment's parameters that have moved since the first step.

        One that has not moved, or whose elements are all the same, may equal another tensor by chance.

        Raises:
            ConfigError: there is a master copy.
        """
        names = [name for name in fragment.names if name in self._first]
        kept = list(self._kept()) if names else []
        for name in names:
            parameter = local_of(self._parameters[name])
            if torch.equal(_sample(parameter), self._first[name]) or bool((parameter == parameter.flatten()[0]).all()):
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
        """Called after an inner step, before anything is written: what has become of the last adoption?

        Raises:
            ConfigError: a parameter is back where it was before.
        """
        if not self._has_stepped:
            self._has_stepped = True
            half = {name: local_of(each) for name, each in self._parameters.items() if each.dtype in HALF}
            self._first = {name: _sample(each) for name, each in half.items() if each.numel()}
        for writes in self._writes:
            if (name := writes.stepped()) is not None:
                kinds = ", ".join(type(each).__name__ for each in self._optimizers)
                raise ConfigError(
                    f"one step of {kinds} after a global value was adopted, {name!r} is back where it was before, so "
                    "adopting has no effect: the optimizer keeps weights of its own; use one that trains the model's "
                    "own parameters, or a model in fp32 under autocast."
                )

    def begin(self) -> None:
        """The learner joins, maybe again: its parameters are overwritten, which is no adoption to look at."""
        for writes in self._writes:
            writes.around = []

    @contextmanager
    def writing(self, fragment: int) -> Iterator[None]:
        """Inside, a fragment's parameters are adopted."""
        writes = self._writes[fragment]
        before = writes.sample()
        yield
        writes.written(before)

    def _kept(self) -> Iterator[tuple[torch.optim.Optimizer, str, Tensor]]:
        """The fp32 tensors that the optimizers keep, with their keys."""
        own = {id(each) for each in self._parameters.values()}
        for optimizer in self._optimizers:
            seen: set[int] = set()
            for key, tensor in _tensors_of(vars(optimizer), "", seen):
                if tensor.dtype == torch.float32 and id(tensor) not in own:
                    yield optimizer, key, local_of(tensor)


def _trained_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


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
    """Whether an fp32 tensor rounds to a parameter's values, by a few elements first."""
    mine, theirs = tensor.reshape(-1), parameter.reshape(-1)
    if mine.device != theirs.device:
        mine = mine.to(theirs.device)
    step = max(1, theirs.numel() // 64)
    return torch.equal(mine[::step].to(theirs.dtype), theirs[::step]) and torch.equal(mine.to(theirs.dtype), theirs)


@dataclass
class _Writes:
    """Samples of a fragment's parameters around its last adoption: what was there, what was adopted, one step later."""

    fragment: Fragment
    parameters: Mapping[str, Tensor]
    num_adoptions: int = 0
    around: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = [each.spec.name for each in self.fragment.tensors if not each.spec.is_averaged]
        names = [name for name in trained if name in self.parameters]
        sizes = {name: local_of(self.parameters[name]).numel() for name in names}
        large = sorted((name for name in names if sizes[name] >= MIN_ELEMENTS), key=lambda name: -sizes[name])
        self.names = large[:SAMPLED_TENSORS]  # without an answer yet

    def sample(self) -> Tensor:
        """fp32 [tensors, elements] on the host."""
        rows = [_sample(local_of(self.parameters[name])) for name in self.names]
        return torch.stack(rows).cpu() if rows else torch.empty(0, SAMPLED_ELEMENTS)

    def written(self, before: Tensor) -> None:
        """The fragment was adopted."""
        self.num_adoptions += 1
        if self.num_adoptions > MAX_ADOPTIONS:
            self.names = []
        self.around = [before, self.sample()] if self.names else []

    def stepped(self) -> str | None:
        """After an inner step: the name of a parameter that has lost what was written to it, if there is one."""
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
    """SAMPLED_ELEMENTS elements at even distances, fp32; of a smaller tensor some of them twice."""
    places = torch.linspace(0, tensor.numel() - 1, SAMPLED_ELEMENTS, dtype=torch.float64).long().to(tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)].float()
