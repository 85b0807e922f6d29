"""Canonical names: the tensors of a model without the wrappers' components in their names.

`torch.compile`, `DistributedDataParallel`, `nn.DataParallel`, FSDP1 and activation checkpointing wrap a module into
another one, and thereby add `_orig_mod.`, `module.`, `_fsdp_wrapped_module.` or `_checkpoint_wrapped_module.` to the
names of its tensors. Without these components a wrapped model and a plain one have the same layout, and exported
weights load into the plain model. Several parts of one model (`Parts`) have the names of the whole model.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes under which wrappers hold the wrapped module; no other module has a child of such a name."""


def _wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute under which a wrapper holds the wrapped module; None: the module is no wrapper."""
    if isinstance(module, DistributedDataParallel | nn.DataParallel):
        return "module"
    return next((attribute for attribute in _WRAPPED if attribute in module._modules), None)


class Parts(nn.Module):
    """Parts of one model, such as the pipeline stages of a rank, whose indices do not occur in canonical names."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(str(index), part)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around it."""
    while (attribute := _wrapped_attribute(module)) is not None:
        inner = module._modules[attribute]
        assert inner is not None
        module = inner
    return module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """As `model.named_parameters()`, in the same order, under canonical names."""
    seen: set[int] = set()
    for path, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield path + name, parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As `model.named_buffers(remove_duplicate=False)`, in the same order, under canonical names."""
    for path, module in named_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield path + name, buffer


def buffer_holders(model: nn.Module) -> dict[str, nn.Module]:
    """The module that holds each persistent buffer, by the buffer's canonical name."""
    return {
        path + name: module
        for path, module in named_modules(model)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def tensor_names(model: nn.Module) -> set[str]:
    """The canonical names of all parameters and buffers."""
    return {name for name, _ in named_parameters(model)} | {name for name, _ in named_buffers(model)}


def named_children(model: nn.Module) -> dict[str, list[str]]:
    """The names of the children, None among them, of every module with several children; by canonical path."""
    found: dict[str, list[str]] = {}
    for path, module in named_modules(model):
        names = found.setdefault(path.removesuffix("."), [])
        names.extend(name for name in module._modules if name not in names)
    return {path: names for path, names in found.items() if len(names) > 1}


def canonical_key(model: nn.Module, key: str) -> str:
    """A key of `model.state_dict()` without the wrappers' components, which some wrappers remove themselves."""
    module: nn.Module | None = model
    kept = []
    for component in key.split("."):
        while module is not None and (attribute := _wrapped_attribute(module)) is not None:
            module = module._modules[attribute]
            if component == attribute:
                break
        else:
            if not isinstance(module, Parts):
                kept.append(component)
            module = None if module is None else module._modules.get(component)
    return ".".join(kept)


def holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module and the attribute that hold the tensor with this canonical name."""
    *path, attribute = name.split(".")
    top = unwrapped(model)
    for part in top.children() if isinstance(top, Parts) else [top]:
        module = unwrapped(part)
        for component in path:
            if (child := module._modules.get(component)) is None:
                break
            module = unwrapped(child)
        else:
            if hasattr(module, attribute):
                return module, attribute
    raise KeyError(name)


def named_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module that is no wrapper, with the canonical prefix of its tensors' names; a shared module repeatedly."""
    module = unwrapped(module)
    if isinstance(module, Parts):
        for part in module.children():
            yield from named_modules(part, path)
        return
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from named_modules(child, f"{path}{name}.")
