"""The base of a fine-tuned model: frozen tensors that every learner loads itself (`Learner(static="digest")`).

Its digests are part of the layout, so a learner with another base cannot join. Nothing of it is sent or copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.core.layout import BaseTensor, TensorSpec
from diloco.errors import LayoutError

_BLOCK_BYTES = 64 * 2**20
"""What is copied from a device at once."""

SAMPLED_ELEMENTS = 64
"""Compared of every tensor at its check."""


def base_tensor(spec: TensorSpec, tensor: Tensor) -> BaseTensor:
    """A tensor of the base with its digest. Reads it once; one that is sharded, every rank gathers for it."""
    return BaseTensor(spec, digest_of(whole_of(tensor)))


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor; of one that is sharded, every rank gathers it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def digest_of(tensor: Tensor) -> str:
    """SHA-256 (hex) of a tensor's elements in row-major order: of any dtype, on any device."""
    plain = tensor.detach().as_subclass(Tensor)
    flat = plain.contiguous().view(-1).view(torch.uint8)
    hasher = hashlib.sha256()
    for start in range(0, flat.numel(), _BLOCK_BYTES):
        hasher.update(flat[start : start + _BLOCK_BYTES].cpu().numpy().data)
    return hasher.hexdigest()


@dataclass
class _Seen:
    """A tensor as it was when its digest was last known to be right."""

    tensor: Tensor
    address: int
    version: int | None
    sample: Tensor


class FrozenBase:
    """Notices that training changes a tensor of the base, without a copy of it.

    A check looks at the tensor's identity, address and version counter, and at 64 elements. It therefore sees that the
    tensor is replaced, in-place operations, and of writes that autograd does not count (through `.data`, by a kernel)
    those that reach one of the 64. Where identity, address or counter has changed, the digest is taken again: loading
    the same values once more is no change.

    Arguments:
        tensors: of the layout.
        find: gives the present tensor of a name.
    """

    def __init__(self, tensors: Sequence[BaseTensor], find: Callable[[str], Tensor]) -> None:
        self._digests = {each.spec.name: each.digest for each in tensors}
        for name in self._digests:  # of a sharded tensor, what is here
            if isinstance(tensor := find(name), DTensor):
                self._digests[name] = digest_of(local_of(tensor))
        self._find = find
        self._seen = {name: _seen(find(name)) for name in self._digests}

    def check(self, part: int, num_parts: int) -> None:
        """Check every `num_parts`-th tensor, from the one with index `part` on.

        Raises:
            LayoutError: training changed a tensor.
        """
        for name in list(self._digests)[part::num_parts]:
            tensor, before = self._find(name), self._seen[name]
            now = _seen(tensor)
            is_same = now.tensor is before.tensor and (now.address, now.version) == (before.address, before.version)
            if (is_same and torch.equal(now.sample, before.sample)) or self._is_unchanged(name, now):
                continue
            raise LayoutError(
                f"training changed {name!r}, which static='digest' takes for the same on every learner for the whole "
                "run; leave it as it was loaded (evaluate adapters without merging them), or make it trainable before "
                "the learner attaches."
            )

    def _is_unchanged(self, name: str, now: _Seen) -> bool:
        if digest_of(local_of(now.tensor)) != self._digests[name]:
            return False
        self._seen[name] = now
        return True


@torch.no_grad()
def _seen(tensor: Tensor) -> _Seen:
    local = local_of(tensor).as_subclass(Tensor)
    version = None if tensor.is_inference() else tensor._version
    return _Seen(tensor, local.data_ptr(), version, _sample(local))


def _sample(tensor: Tensor) -> Tensor:
    """Up to SAMPLED_ELEMENTS elements at even distances, as bytes."""
    found = tensor[_sampled(tensor.shape, tensor.device)] if tensor.dim() else tensor.reshape(1)
    return found.contiguous().view(torch.uint8)


@lru_cache(maxsize=64)
def _sampled(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """The indices of the sampled elements: a model has many tensors of few shapes."""
    places = torch.linspace(0, shape.numel() - 1, min(SAMPLED_ELEMENTS, shape.numel()), dtype=torch.float64).long()
    return torch.unravel_index(places.to(device), shape)
