"""Transfers between host and CUDA device: through pinned memory, on streams beside the training's.

Anchors and residuals stay on the host. A displacement is encoded on the device run by run: a run's anchor and residual
are copied to the device, its payload and new residual back. docs/gpu.md gives the reasons.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core.codecs import SEGMENT_ELEMENTS, Codec, compress
from diloco.core.layout import Placement
from diloco.core.memory import new_vector
from diloco.exchange.group import device_of
from diloco.learner.partition import Partition

RUN_ELEMENTS = 256 * SEGMENT_ELEMENTS
"""Elements that are copied at a time: 32 MiB of fp32."""

Key = tuple[int, int]
"""(fragment, version)."""


class DeviceQueue:
    """A stream of its own, and the pinned memory through which it copies; used by one thread at a time.

    On the CPU there is no stream and nothing is pinned, and the values are the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    @contextmanager
    def held(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run what follows on the stream, once `after` has happened on the device."""
        with self._lock, torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            yield

    def up(self, name: str, source: Tensor) -> Tensor:
        """A device copy of host values. Call `synchronize` before the next copy of this name."""
        staging = self._staged(name, source).copy_(source)
        return staging.to(self.device, non_blocking=True)

    def down(self, name: str, source: Tensor, into: Tensor) -> None:
        """Copy device values to the host. On return this copy, and all earlier work of the stream, is complete."""
        staging = self._staged(name, source).copy_(source, non_blocking=True)
        self.synchronize()
        into.copy_(staging)

    def synchronize(self) -> None:
        """Wait until all work of the stream is complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def mark(self) -> torch.cuda.Event | None:
        """An event at the present end of the stream's work; None on the CPU."""
        return None if self._stream is None else self._stream.record_event()

    def _staged(self, name: str, like: Tensor) -> Tensor:
        staging = self._staging.get(name)
        if staging is None or staging.numel() < like.nbytes:
            pinned = self._stream is not None
            staging = self._staging[name] = torch.empty(like.nbytes, dtype=torch.uint8, pin_memory=pinned)
        return staging[: like.nbytes].view(like.dtype)


class DeviceDisplacement:
    """Δ = anchor − θ of a fragment whose snapshot θ is on a device; encoded there, run by run.

    Arguments:
        theta: flat fp32 on the device.
        ready: the event at which `theta` is complete.
        anchor: flat fp32 on the host; None: θ itself is encoded.
        places: the tensors, to whose dtypes the anchor is first rounded.
    """

    def __init__(
        self, queue: DeviceQueue, theta: Tensor, ready: torch.cuda.Event | None, anchor: Tensor | None,
        places: Sequence[Placement],
    ) -> None:  # fmt: skip
        self._queue, self._theta, self._ready = queue, theta, ready
        self._anchor, self._places = anchor, places

    def encode(self, codec: Codec) -> Tensor:
        """The payload of Δ, uint8 on the host. Raises as `Codec.encode`."""
        payload = new_vector(codec.encoded_bytes(self._theta.numel()), torch.uint8)
        with self._queue.held(self._ready):
            for elements, place in self._runs(codec):
                self._queue.down("payload", codec.encode(self._delta(elements)), payload[place])
        return payload

    def compress(self, codec: Codec, residual: Tensor | None, decay: float) -> tuple[Tensor, Tensor]:
        """(payload, new residual) on the host, of Δ and a residual on the host; `core.codecs.compress`, bit for bit."""
        payload = new_vector(codec.encoded_bytes(self._theta.numel()), torch.uint8)
        after = new_vector(self._theta.numel())
        with self._queue.held(self._ready):
            for elements, place in self._runs(codec):
                before = None if residual is None else self._queue.up("residual", residual[elements])
                encoded, left = compress(codec, self._delta(elements), before, decay)
                self._queue.down("payload", encoded, payload[place])
                self._queue.down("left", left, after[elements])
        return payload, after

    def _runs(self, codec: Codec) -> Iterator[tuple[slice, slice]]:
        """(elements, payload bytes) of each run, whole segments but for the last."""
        num_elements, num_segments = self._theta.numel(), -(-self._theta.numel() // SEGMENT_ELEMENTS)
        run_segments = RUN_ELEMENTS // SEGMENT_ELEMENTS
        for first in range(0, num_segments, run_segments):
            last = min(first + run_segments, num_segments)
            elements = slice(first * SEGMENT_ELEMENTS, min(last * SEGMENT_ELEMENTS, num_elements))
            yield elements, codec.segment_span(num_elements, first, last)

    def _delta(self, elements: slice) -> Tensor:
        theta = self._theta[elements]
        if self._anchor is None:
            return theta
        delta = torch.empty_like(theta).copy_(self._queue.up("anchor", self._anchor[elements]))
        for place in self._places:
            start, stop = max(place.elements.start, elements.start), min(place.elements.stop, elements.stop)
            if start < stop:
                part = delta[start - elements.start : stop - elements.start]
                part.copy_(part.to(getattr(torch, place.spec.dtype)))
        return delta.sub_(theta)


class DeviceUploads:
    """Copies new global values to the device during training, so that an adoption is a copy within the device.

    On the CPU nothing is copied. All methods run on the training thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._queue = DeviceQueue(device)
        self._started: dict[Key, Future[tuple[Tensor, torch.cuda.Event | None]]] = {}
        self._thread = ThreadPoolExecutor(1, "diloco-upload") if device.type == "cuda" else None

    def start(self, key: Key, theta: Tensor) -> None:
        """Start the copy of a version (flat fp32 on the host)."""
        if self._thread is not None and key not in self._started:
            self._started[key] = self._thread.submit(self.copy, theta)

    def take(self, key: Key, theta: Tensor) -> Tensor:
        """The version on the device, for use on the current stream; `theta` itself if its copy was not started."""
        started = self._started.pop(key, None)
        if started is None:
            return theta
        value, complete = started.result()
        if complete is not None:
            stream = torch.cuda.current_stream(value.device)
            stream.wait_event(complete)
            value.record_stream(stream)
        return value

    def keep(self, keys: Collection[Key]) -> None:
        """Discard the copies of all other versions."""
        self._started = {key: started for key, started in self._started.items() if key in keys}

    def copy(self, theta: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy on the device, made run by run, and the event at which it is complete."""
        with self._queue.held():
            value = torch.empty(theta.numel(), dtype=theta.dtype, device=self._queue.device)
            for start in range(0, theta.numel(), RUN_ELEMENTS):
                run = slice(start, min(start + RUN_ELEMENTS, theta.numel()))
                value[run].copy_(self._queue.up("theta", theta[run]))
                self._queue.synchronize()  # before the pinned memory is reused
            return value, self._queue.mark()


@dataclass
class DeviceSnapshot:
    """A flat fp32 copy of a fragment's part on the parameters' device. `ready`: the event of its completion; None: it
    is complete already."""

    values: Tensor
    ready: torch.cuda.Event | None = None


class Snapshots:
    """Takes snapshots of the part of each fragment that this process exchanges, on the host into reused buffers.

    On CUDA a snapshot is one flat copy on the device, where a thread of the exchange encodes it on a side stream.

    Arguments:
        device: of the parameters.
    """

    def __init__(self, partition: Partition, device: torch.device) -> None:
        self._partition, self._queue = partition, DeviceQueue(device)
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    @torch.no_grad()
    def take(self, fragment: int, tensors: Mapping[str, Tensor]) -> DeviceSnapshot:
        """Copy a fragment's tensors. On CUDA the copy is queued on the current stream."""
        device = device_of(tensors)
        if device.type == "cuda":
            flat = self._partition.gather(fragment, tensors).to(device)  # on the host where this rank holds none of it
            return DeviceSnapshot(flat, torch.cuda.current_stream(device).record_event())
        elements = self._partition.elements(fragment)
        num_elements = elements.stop - elements.start
        with self._lock:
            free = self._free.setdefault(num_elements, [])
            host = free.pop() if free else None
        if host is None:
            host = new_vector(num_elements)
        self._partition.gather(fragment, tensors, out=host)
        return DeviceSnapshot(host)

    @torch.no_grad()
    def displacement(
        self, fragment: int, anchor: Tensor | None, snapshot: DeviceSnapshot
    ) -> Tensor | DeviceDisplacement:
        """Δ = anchor − θ: on the host flat fp32, in the snapshot's own buffer; on CUDA an object that encodes it.

        The anchor is first rounded to each parameter's dtype. Without an anchor the result is the snapshot itself.
        """
        if snapshot.values.device.type == "cuda":
            places = self._partition.places(fragment)
            return DeviceDisplacement(self._queue, snapshot.values, snapshot.ready, anchor, places)
        if anchor is None:
            return snapshot.values
        for place in self._partition.places(fragment):
            part = place.elements
            rounded = anchor[part].to(getattr(torch, place.spec.dtype)).to(torch.float32)
            torch.sub(rounded, snapshot.values[part], out=snapshot.values[part])
        return snapshot.values

    def give_back(self, snapshot: DeviceSnapshot) -> None:
        """Return the buffer of a snapshot that is no longer needed; device memory goes back to torch."""
        if snapshot.values.device.type == "cuda":
            snapshot.values = snapshot.values.new_empty(0)
            return
        with self._lock:
            self._free[snapshot.values.numel()].append(snapshot.values)
