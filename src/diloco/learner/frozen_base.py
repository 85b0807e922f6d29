"""The base of a fine-tuned model: frozen tensors that every learner loads itself (`Learner(static="digest")`).

Its digests are part of the layout, so a learner with another base cannot join. The base is neither sent nor copied.
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
from diloco.learner.pieces import local_of

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
