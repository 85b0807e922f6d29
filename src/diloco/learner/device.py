"""Snapshots of what a learner sends, encoded beside training; and transfers between host and CUDA device, through
pinned memory and on streams beside the training's.

Anchors and residuals stay on the host. A displacement is encoded run by run, on the host while a run is in a core's
cache. On a device a run's anchor and residual are copied to it, its payload and new residual back. docs/islands.md has
the reasons.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.codecs import SEGMENT_ELEMENTS, Codec, compress
from diloco.core.layout import Placement
from diloco.core.memory import new_vector
from diloco.core.merges.decoding import within
from diloco.exchange.group import device_of
from diloco.learner.partition import Partition

RUN_SEGMENTS = 256
"""Segments that are copied between host and device at a time: 32 MiB of fp32."""
RUN_ELEMENTS = RUN_SEGMENTS * SEGMENT_ELEMENTS

_HOST_RUN_SEGMENTS = 4
"""Segments that are encoded at a time on the host."""

Key = tuple[int, int]
"""(fragment, version)."""


class DeviceQueue:
    """A stream of its own, and the pinned memory through which it copies; used by one thread at a time.

    On the CPU there is no stream and no copy.
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
        """Host values on the device. Call `synchronize` before the next copy of this name."""
        if self._stream is None:
            return source
        staging = self._staged(name, source).copy_(source)
        return staging.to(self.device, non_blocking=True)

    def down(self, name: str, source: Tensor, into: Tensor) -> None:
        """Copy device values to the host. On return this copy, and all earlier work of the stream, is complete."""
        if self._stream is None:
            if source is not into:
                into.copy_(source)
            return
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
            staging = self._staging[name] = torch.empty(like.nbytes, dtype=torch.uint8, pin_memory=True)
        return staging[: like.nbytes].view(like.dtype)


class Displacement:
    """Δ = anchor − θ of a fragment with the snapshot θ; encoded where that is, run by run.

    Arguments:
        theta: flat fp32.
        ready: the event at which `theta` is complete; None: it is complete.
        anchor: flat fp32 on the host; None: θ itself is encoded.
        places: the tensors, to whose dtypes the anchor is first rounded.
    """

    def __init__(
        self, queue: DeviceQueue, theta: Tensor, ready: torch.cuda.Event | None, anchor: Tensor | None,
        places: Sequence[Placement],
    ) -> None:  # fmt: skip
        self._queue, self._theta, self._ready = queue, theta, ready
        self._on_host = theta.device.type == "cpu"
        dtypes = ((each.elements, getattr(torch, each.spec.dtype)) for each in places)
        self._anchor, self._rounded = anchor, [each for each in dtypes if each[1] != torch.float32]

    def encode(self, codec: Codec) -> Tensor:
        """The payload of Δ, uint8 on the host. Raises as `Codec.encode`."""
        payload = self._new_payload(codec)
        with self._queue.held(self._ready):
            for elements, place in self._runs(codec):
                into = payload[place]
                encoded = codec.encode(self._delta(elements), into if self._on_host else None)
                self._queue.down("payload", encoded, into)
        return payload

    def compress(self, codec: Codec, residual: Tensor | None, decay: float) -> tuple[Tensor, Tensor]:
        """(payload, new residual) on the host, of Δ and a residual on the host; `core.codecs.compress`, bit for bit."""
        payload, after = self._new_payload(codec), new_vector(self._theta.numel())
        with self._queue.held(self._ready):
            for elements, place in self._runs(codec):
                before = None if residual is None else self._queue.up("residual", residual[elements])
                into, rest = payload[place], after[elements]
                out, left = (into, rest) if self._on_host else (None, None)
                encoded, left = compress(codec, self._delta(elements, left), before, decay, out=out, left=left)
                self._queue.down("payload", encoded, into)
                self._queue.down("left", left, rest)
        return payload, after

    def _new_payload(self, codec: Codec) -> Tensor:
        arithmetic.prepare(self._theta.numel(), self._theta.device)
        return new_vector(codec.encoded_bytes(self._theta.numel()), torch.uint8)

    def _runs(self, codec: Codec) -> Iterator[tuple[slice, slice]]:
        """(elements, payload bytes) of each run, whole segments but for the last."""
        num_elements, num_segments = self._theta.numel(), -(-self._theta.numel() // SEGMENT_ELEMENTS)
        run_segments = _HOST_RUN_SEGMENTS if self._on_host else RUN_SEGMENTS
        for first in range(0, num_segments, run_segments):
            last = min(first + run_segments, num_segments)
            elements = slice(first * SEGMENT_ELEMENTS, min(last * SEGMENT_ELEMENTS, num_elements))
            yield elements, codec.segment_span(num_elements, first, last)

    def _delta(self, elements: slice, out: Tensor | None = None) -> Tensor:
        theta = self._theta[elements]
        if self._anchor is None:
            return theta
        anchor = self._queue.up("anchor", self._anchor[elements])
        if rounded := list(within(elements, self._rounded)):
            anchor = anchor.clone()
            for part, dtype in rounded:
                anchor[part] = anchor[part].to(dtype)
        return torch.sub(anchor, theta, out=out)


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
    def displacement(self, fragment: int, anchor: Tensor | None, snapshot: DeviceSnapshot) -> Displacement:
        """Δ = anchor − θ, the anchor first rounded to each parameter's dtype; without an anchor the snapshot itself."""
        return Displacement(self._queue, snapshot.values, snapshot.ready, anchor, self._partition.places(fragment))

    def give_back(self, snapshot: DeviceSnapshot) -> None:
        """Return the buffer of a snapshot that is no longer needed; device memory goes back to torch."""
        if snapshot.values.device.type == "cuda":
            snapshot.values = snapshot.values.new_empty(0)
            return
        with self._lock:
            self._free[snapshot.values.numel()].append(snapshot.values)
