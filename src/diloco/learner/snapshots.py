"""Snapshots of the tensors that are sent. Taking one is the training thread's only work for a send."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.fragments import Layout
from diloco.core.memory import new_vector
from diloco.exchange.device_group import device_of
from diloco.learner.device import DeviceDisplacement, DeviceQueue
from diloco.learner.partition import Partition


@dataclass
class Snapshot:
    """A flat fp32 copy of a fragment's part, on the device of the parameters, complete once `ready` has happened; None:
    it is complete."""

    values: Tensor
    ready: torch.cuda.Event | None = None


class Snapshots:
    """Takes snapshots of the part of each fragment that this process exchanges, on the host into reused buffers.

    On CUDA a snapshot is one flat copy on the device, where a thread of the exchange encodes it on a side stream.
    """

    def __init__(self, layout: Layout, partition: Partition) -> None:
        self._partition = partition
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._queue: DeviceQueue | None = None
        self._exact = all(p.spec.dtype == "float32" for f in layout.fragments for p in f.tensors)

    @torch.no_grad()
    def take(self, fragment: int, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Copy a fragment's tensors. On CUDA the copy is asked for on the current stream."""
        device = device_of(tensors)
        if device.type == "cuda":
            flat = self._partition.gather(fragment, tensors).to(device)  # on the host where this rank holds none of it
            return Snapshot(flat, torch.cuda.current_stream(device).record_event())
        elements = self._partition.elements(fragment)
        num_elements = elements.stop - elements.start
        with self._lock:
            free = self._free.setdefault(num_elements, [])
            host = free.pop() if free else None
        if host is None:
            host = new_vector(num_elements)
        self._partition.gather(fragment, tensors, out=host)
        return Snapshot(host)

    @torch.no_grad()
    def displacement(self, fragment: int, anchor: Tensor | None, snapshot: Snapshot) -> Tensor | DeviceDisplacement:
        """Δ = anchor − θ: flat fp32 on the host, in the snapshot's own buffer; what encodes it, on a device.

        The anchor is first rounded to each parameter's dtype. Without an anchor the result is the snapshot itself.
        """
        if snapshot.values.device.type == "cuda":
            places = () if self._exact else self._partition.places(fragment)
            queue = self._queue_of(snapshot.values.device)
            return DeviceDisplacement(queue, snapshot.values, snapshot.ready, anchor, places)
        if anchor is None:
            return snapshot.values
        if self._exact:
            return torch.sub(anchor, snapshot.values, out=snapshot.values)
        for place in self._partition.places(fragment):
            part = place.elements
            rounded = anchor[part].to(getattr(torch, place.spec.dtype)).to(torch.float32)
            torch.sub(rounded, snapshot.values[part], out=snapshot.values[part])
        return snapshot.values

    def give_back(self, snapshot: Snapshot) -> None:
        """Return the buffer of a snapshot that is no longer needed; device memory goes back to torch."""
        if snapshot.values.device.type == "cuda":
            snapshot.values = snapshot.values.new_empty(0)
            return
        with self._lock:
            self._free[snapshot.values.numel()].append(snapshot.values)

    def _queue_of(self, device: torch.device) -> DeviceQueue:
        with self._lock:
            if self._queue is None:
                self._queue = DeviceQueue(device)
            return self._queue
