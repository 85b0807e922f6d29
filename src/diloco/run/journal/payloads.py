"""Payloads of a journal: their digests, and kept payloads read back."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Layout
from diloco.core.layout import digest as theta_digest
from diloco.core.method import Method
from diloco.errors import CorruptPayloadError
from diloco.run.ports import InitialModel, SavedRun
from diloco.run.tensor_jobs import TensorJobs, TensorSlot

_OUTER, _STATE = "outer.", ".safetensors"

FRAGMENT = "fragment-"
"""Prefix of the names of fragments."""


class Keep(Protocol):
    """Stores payloads."""

    def __call__(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store bytes, given in parts; return whether this succeeded."""

    def has_any(self, prefix: str) -> bool:
        """Whether a payload with this prefix is kept."""


def contribution_name(digest: str) -> str:
    """Return the name under which a contribution's payload is kept."""
    return f"contribution-{digest}"


def fragment_name(index: int, version: int, digest: str) -> str:
    """Return the name under which an initial fragment of a driver is kept."""
    return f"{FRAGMENT}{index}-{version}-{digest}"


class TensorPayloads:
    """Computes digests and keeps payloads (`recorder.PayloadsPort`).

    Arguments:
        keep: stores payloads; None: only their digests are journalled.
    """

    def __init__(self, keep: Keep | None = None) -> None:
        self._keep = keep

    def check(self, slot: TensorSlot, *, is_usable: bool) -> Mapping[str, Any]:
        """As `recorder.PayloadsPort`."""
        data = _bytes_of(slot.tensor)
        if self._keep is None or not is_usable:
            return {"crc32": f"{zlib.crc32(data):08x}"}
        digest = hashlib.sha256(data).hexdigest()
        return {"payload": digest, "kept": self._keep(contribution_name(digest), [data])}

    def begin(self, model: InitialModel[GlobalFragment]) -> None:
        """As `recorder.PayloadsPort`."""
        if self._keep is not None:
            for each in model.fragments:
                self._keep(fragment_name(each.fragment, each.version, each.digest), [_bytes_of(each.theta)])

    def resume(self, saved: SavedRun[GlobalFragment]) -> None:
        """As `recorder.PayloadsPort`: as safetensors, with outer state and residual."""
        if self._keep is None or self._keep.has_any(FRAGMENT):
            return
        for each in saved.fragments:
            tensors = {"theta": each.theta, **{_OUTER + name: value for name, value in each.outer_state.items()}}
            if each.residual is not None:
                tensors["residual"] = each.residual
            data = memoryview(save({name: value.contiguous() for name, value in tensors.items()}))
            self._keep(fragment_name(each.fragment, each.version, each.digest) + _STATE, [data])


class TensorFormats:
    """The formats of the journal of a run with tensors, and its kept payloads (`replay_ports.Formats`).

    Arguments:
        read: returns a kept payload by name; None: it is not kept.
    """

    layout, method = staticmethod(Layout.from_dict), staticmethod(Method.from_dict)

    def __init__(self, read: Callable[[str], bytearray | None]) -> None:
        self._read = read

    def jobs(self, method: Method) -> TensorJobs:
        """As `replay_ports.Formats`."""
        return TensorJobs(method, seconds=None)

    def contribution(self, digest: str) -> Tensor | None:
        """As `replay_ports.Formats`."""
        data = self._read(contribution_name(digest))
        return None if data is None else _tensor_of(data, torch.uint8)

    def fragment(self, method: Method, index: int, version: int, digest: str) -> GlobalFragment | None:
        """As `replay_ports.Formats`. Raises CorruptPayloadError if its digest differs."""
        name = fragment_name(index, version, digest)
        if (data := self._read(name)) is not None:
            held = GlobalFragment.first(method.for_fragment(index), index, _tensor_of(data, torch.float32), version)
        elif (data := self._read(name + _STATE)) is not None:
            tensors = load(bytes(data))
            outer = {key.removeprefix(_OUTER): value for key, value in tensors.items() if key.startswith(_OUTER)}
            theta = tensors["theta"]
            held = GlobalFragment(index, version, theta, outer, tensors.get("residual"), theta_digest(theta))
        else:
            return None
        if held.digest != digest:
            raise CorruptPayloadError(
                f"the kept version {version} of fragment {index} has digest {held.digest[:16]}, not {digest[:16]}."
            )
        return held

    def digest(self, payload: Tensor) -> str:
        """As `replay_ports.Formats`."""
        return hashlib.sha256(_bytes_of(payload)).hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _tensor_of(data: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
