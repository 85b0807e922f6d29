"""Roles of the tensors beside the trained parameters, by `Learner(buffers=…, static=…)`.

Roles are a part of the layout, whose digests are compared when a learner joins. So all learners of a run must give the
same answers, and the error names a tensor whose roles differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import Tensor, nn

from diloco.core.fragments import TRAINABLE_DTYPES, describe, layout_of
from diloco.core.layout import BaseTensor, Layout, TensorSpec
from diloco.core.method import Method
from diloco.core.names import holder, named_children, named_parameters, tensor_names
from diloco.errors import ConfigError, LayoutError
from diloco.learner.frozen import base_tensor, current
from diloco.learner.pieces import Gather

Buffers = Literal["refuse", "average", "local"]
BUFFERS: tuple[Buffers, ...] = get_args(Buffers)

Static = Literal["exchange", "digest"]
STATIC: tuple[Static, ...] = get_args(Static)


@dataclass(frozen=True)
class ModelDescription:
    """The tensors of a model, or of the part of one that a rank holds, by their roles.

    Attributes:
        exchanged: tensors of the fragments: trained parameters, then averaged tensors.
        static, base: all other tensors. In these, and among the averaged tensors, frozen parameters precede buffers;
            otherwise tensors are in model order.
        buffers: the names of all buffers among the tensors.
        children: the order of the modules that contain them (`core.names.named_children`).
    """

    exchanged: tuple[TensorSpec, ...]
    static: tuple[TensorSpec, ...]
    base: tuple[BaseTensor, ...]
    buffers: tuple[str, ...]
    children: Mapping[str, Sequence[str]]

    def layout(self, method: Method) -> Layout:
        """The layout of the model, cut by the method. Raises as `layout_of`."""
        return layout_of(self.exchanged, self.static, method.fragments, self.base)


def described(
    model: nn.Module, method: Method, buffers: Buffers | Mapping[str, Buffers], static: Static, gather: Gather
) -> ModelDescription:
    """The description of a model.

    Arguments:
        buffers, static: as in `Learner`.
        gather: gives the shapes of sharded parameters.

    Raises:
        ConfigError: an unknown answer, or a tensor that cannot be averaged.
    """
    if static not in STATIC:
        raise ConfigError(f"static={static!r} is not valid; use 'exchange' or 'digest'.")
    trained, others = describe(model)
    parameters = dict(named_parameters(model))
    trained = tuple(replace(spec, shape=gather(spec.name, parameters[spec.name]).shape) for spec in trained)
    tensors = {spec.name: current(holder(model, spec.name)) for spec in others}
    answered = _answered(others, tensors, buffers)
    averaged = [spec for spec in answered if spec.is_averaged]
    if averaged and method.exchanged == "gradients":
        raise ConfigError(
            f"{averaged[0].name!r} cannot be averaged by {method.name}, which exchanges gradients, and it has none; "
            "use buffers='local', or a method that exchanges outer gradients."
        )
    kept = [spec for spec in answered if not spec.is_averaged]
    brought = [spec for spec in kept if static == "digest" and not spec.role and not is_counter(tensors[spec.name])]
    names = {spec.name for spec in brought}
    return ModelDescription(
        (*trained, *averaged),
        tuple(spec for spec in kept if spec.name not in names),
        tuple(base_tensor(spec, tensors[spec.name]) for spec in brought),
        tuple(spec.name for spec in others if not isinstance(tensors[spec.name], nn.Parameter)),
        named_children(model),
    )


def require_answers(model: nn.Module, buffers: Buffers | Mapping[str, Buffers], found: ModelDescription) -> None:
    """Check the answers against the tensors of all ranks of the learner.

    Arguments:
        model: of this rank.
        found: the description over all ranks.

    Raises:
        ConfigError: a pattern matches no buffer and no frozen parameter.
        LayoutError: training is known to change a tensor for which the answer is "refuse".
    """
    compared = (*found.static, *(each.spec for each in found.base))
    averaged = (spec for spec in found.exchanged if spec.is_averaged)
    names = [spec.name for spec in (*averaged, *compared)]
    for pattern in buffers if isinstance(buffers, Mapping) else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"buffers={{{pattern!r}: …}} matches no buffer and no frozen parameter of the model.")
    here = tensor_names(model)
    unanswered = [spec.name for spec in compared if not spec.role and spec.name in here]
    _refuse_changing(model, {id(current(holder(model, name))): name for name in unanswered})


def is_counter(tensor: Tensor) -> bool:
    """Whether it is a buffer of one whole number, such as BatchNorm's `num_batches_tracked`."""
    return not isinstance(tensor, nn.Parameter) and not tensor.is_floating_point() and tensor.numel() == 1


def _answered(
    specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor], buffers: Buffers | Mapping[str, Buffers]
) -> list[TensorSpec]:
    """The specs with their roles."""
    by_name = isinstance(buffers, Mapping)  # only patterns apply to frozen parameters
    answers = dict(buffers) if isinstance(buffers, Mapping) else {"*": buffers}
    for pattern, answer in answers.items():
        if answer not in BUFFERS:
            where = f" of {pattern!r}" if by_name else ""
            raise ConfigError(
                f"buffers={answer!r}{where} is not valid; use 'refuse', 'average' or 'local', or {{pattern: answer}}."
            )
    found = []
    for spec in specs:
        tensor = tensors[spec.name]
        answer = next((each for pattern, each in answers.items() if fnmatchcase(spec.name, pattern)), "refuse")
        applies = by_name or not isinstance(tensor, nn.Parameter)
        if answer == "refuse" or not applies or not tensor.is_floating_point():
            found.append(spec)
        elif answer == "local":
            found.append(replace(spec, role="local"))
        elif spec.dtype not in TRAINABLE_DTYPES:
            raise ConfigError(
                f"{spec.name!r} is {spec.dtype}, and only {', '.join(TRAINABLE_DTYPES)} can be averaged; convert it, "
                f"or keep it local with buffers={{{spec.name!r}: 'local'}}."
            )
        else:
            is_variance = spec.name.rpartition(".")[2] == "running_var"
            found.append(replace(spec, role="variance" if is_variance else "averaged"))
    return found


def _refuse_changing(model: nn.Module, names: Mapping[int, str]) -> None:
    """Refuse tensors that the next forward pass changes. `names`: of the tensors to check, by identity."""
    for tensor, owner in _changed_by_forward(model):
        if (name := names.get(id(tensor))) is not None:
            raise LayoutError(
                f"training changes {name!r} ({owner}), which learners do not exchange, so they would drift apart; pass "
                "buffers='average' to average it with the parameters or buffers='local' for each learner to keep its "
                "own, or use a model without it (LayerNorm or GroupNorm for BatchNorm)."
            )


def _changed_by_forward(model: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """The buffers that a forward pass in the modules' present modes is known to change, each with its kind in words."""
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.utils.parametrizations import _SpectralNorm
    from torch.nn.utils.spectral_norm import SpectralNorm

    for module in model.modules():
        if not module.training:
            continue
        if isinstance(module, _NormBase) and module.running_mean is not None and module.momentum != 0:
            yield module.running_mean, f"running statistics of {type(module).__name__}"
        elif isinstance(module, _SpectralNorm) and hasattr(module, "_u"):
            yield module._u, "spectral norm"
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield getattr(module, f"{hook.name}_u"), f"spectral norm of {type(module).__name__}"
