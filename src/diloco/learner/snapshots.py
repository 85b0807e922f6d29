"""Snapshots of the tensors that are sent. Taking one is the training thread's only work for a send."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.fragments import Layout
from diloco.learner.partition import Partition


@dataclass
class Snapshot:
    """A flat fp32 host copy of a fragment's part, complete once `ready` has happened; None: it is complete."""

    host: Tensor
    ready: torch.cuda.Event | None = None
    device: Tensor | None = None  # kept until the copy from it is done


class Snapshots:
    """Takes snapshots into reused host buffers, of the part of each fragment that this process exchanges.

    On CUDA a snapshot is one flat copy on the device, which a side stream then copies to pinned memory.
    """

    def __init__(self, layout: Layout, partition: Partition) -> None:
        self._partition = partition
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._exact = all(p.spec.dtype == "float32" for f in layout.fragments for p in f.tensors)

    @torch.no_grad()
    def take(self, fragment: int, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Copy a fragment's tensors. Returns before the copy from a CUDA device to the host is complete."""
        device = next(iter(tensors.values())).device
        elements = self._partition.elements(fragment)
        num_elements = elements.stop - elements.start
        with self._lock:
            free = self._free.setdefault(num_elements, [])
            host = free.pop() if free else None
        if host is None:
            host = torch.empty(num_elements, dtype=torch.float32, pin_memory=device.type == "cuda")
        if device.type != "cuda":
            self._partition.gather(fragment, tensors, out=host)
            return Snapshot(host)
        flat = self._partition.gather(fragment, tensors)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            host.copy_(flat, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return Snapshot(host, ready, flat)

    @torch.no_grad()
    def displacement(self, fragment: int, anchor: Tensor | None, snapshot: Snapshot) -> Tensor:
        """Δ = anchor − θ, flat fp32 on the host, in the snapshot's own buffer.

        The anchor is first rounded to each parameter's dtype. Without an anchor the result is the snapshot itself.
        """
        if snapshot.ready is not None:
            snapshot.ready.synchronize()
        if anchor is None:
            return snapshot.host
        if self._exact:
            return torch.sub(anchor, snapshot.host, out=snapshot.host)
        for place in self._partition.places(fragment):
            part = place.elements
            rounded = anchor[part].to(getattr(torch, place.spec.dtype)).to(torch.float32)
            torch.sub(rounded, snapshot.host[part], out=snapshot.host[part])
        return snapshot.host

    def give_back(self, snapshot: Snapshot) -> None:
        """Return the buffer of a snapshot that is no longer needed."""
        with self._lock:
            self._free[snapshot.host.numel()].append(snapshot.host)
