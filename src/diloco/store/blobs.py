"""The bytes of an object: a safetensors file with a description, and its hash.

The metadata of the file has two entries of JSON: `diloco`, the description, and `hashes`, the hash of each tensor. The
hash of an object is SHA-256 of its header, and so covers every byte: a reader verifies the header, and then each tensor
that it reads. The hash of a tensor is BLAKE3 of its bytes; of Θ it is the published digest, so that Θ is hashed once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from diloco.core.layout import Digest
from diloco.exchange.wire.tensors import bytes_of
from diloco.run.objects import Blob

DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32, "F64": torch.float64, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip
"""Of tensors in objects, as safetensors names them."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_DESCRIBED, _HASHES = "diloco", "hashes"


class Blake3:
    """BLAKE3 of tensors' bytes, part by part like `Digest`."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def update(self, part: Tensor, /) -> None:
        """Add the next elements."""
        self._hasher.update(bytes_of(part))

    def hex(self) -> str:
        """The hash of all parts so far, 32 bytes in hex."""
        return self._hasher.hexdigest()


def hasher_of(name: str) -> Digest | Blake3:
    """The hasher of a tensor with this name."""
    return Digest() if name == "theta" else Blake3()


def new_blob(tensors: Mapping[str, Tensor], described: Mapping[str, Any], digests: Mapping[str, str]) -> Blob:
    """The object with these tensors, as views of their memory. `digests`: hashes of tensors that are known already."""
    entries, hashes, parts, first = dict[str, Any](), dict[str, str](), list[memoryview](), 0
    for name, tensor in sorted(tensors.items(), key=lambda it: (-it[1].element_size(), it[0])):  # aligned
        parts.append(bytes_of(tensor.contiguous()))
        last = first + len(parts[-1])
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, last]}
        hashes[name] = digests.get(name) or blake3(parts[-1]).hexdigest()
        first = last
    metadata = {_DESCRIBED: json.dumps(described), _HASHES: json.dumps(hashes)}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return Blob(hashlib.sha256(head).hexdigest(), (head, *parts))


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in an object: its bytes are those from `first` to `last` after the header, and have this hash."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int
    hash: str


@dataclass(frozen=True)
class ObjectHead:
    """The beginning of a safetensors file.

    Attributes:
        data: its bytes.
        described: the metadata.
        entries: its tensors by name, in the order of their bytes.
    """

    data: bytes
    described: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]

    @classmethod
    def from_bytes(cls, data: bytes) -> ObjectHead:
        """From the beginning of a file, up to the first tensor. Raises one of `MALFORMED` for any other bytes."""
        header = json.loads(data[8:])
        metadata = header.pop("__metadata__")
        described, hashes = (json.loads(metadata[key]) for key in (_DESCRIBED, _HASHES))
        entries, end = dict[str, TensorEntry](), 0
        for name, entry in header.items():
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            first, last = entry["data_offsets"]
            if not all(type(each) is int and each >= 0 for each in (*shape, first, last)):
                raise ValueError(f"the place of tensor {name!r}")
            if first != end or last - first != prod(shape) * dtype.itemsize:
                raise ValueError(f"the size of tensor {name!r}")
            entries[name], end = TensorEntry(dtype, shape, first, last, str(hashes[name])), last
        if not isinstance(described, dict):
            raise TypeError("no description")
        return cls(data, described, entries)

    @property
    def num_bytes(self) -> int:
        """Of the whole object."""
        return len(self.data) + max((each.last for each in self.entries.values()), default=0)
