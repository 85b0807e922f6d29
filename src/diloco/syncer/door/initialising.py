"""The Initialise call: a learner uploads the run's initial model, once."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import grpc
import torch

from diloco.core.buffers import new_buffer
from diloco.core.fragments import Layout
from diloco.core.global_fragment import GlobalFragment
from diloco.errors import BusyError, CorruptPayloadError, LayoutError, StoreError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.tensors import tensor_of, tensors_of
from diloco.exchange.wire.values import value_of
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Claim
from diloco.run import validation
from diloco.run.ports import InitialModel
from diloco.syncer.door.audit import Audit
from diloco.syncer.door.messages import layout_of
from diloco.syncer.door.open_calls import OpenTransfers
from diloco.syncer.door.receiving import IncomingModel
from diloco.syncer.hosting import HostedDriver, SyncerDriver, while_waiting
from diloco.syncer.keys.certificates import Caller

MAX_STATIC_ELEMENT_BYTES, MAX_STATIC_HEADER_BYTES = 16, 4096
"""Bounds on the size of a static tensor: bytes of an element, and of its header."""


@dataclass
class Initialising:
    """Receives the run's initial model, from one learner at a time.

    Arguments:
        host, transfers, audit, resumed: as in `Service`.
        incoming: keeps the received part of an interrupted upload.
    """

    host: Callable[[], HostedDriver]
    transfers: OpenTransfers
    audit: Audit
    incoming: IncomingModel
    resumed: Callable[[str, str, int], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def receive(
        self, caller: Caller, header: pb.InitialiseHeader, stream: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.InitialiseReply]:
        """The replies to an Initialise call of an authorised caller."""
        layout, seen = layout_of(header.layout), value_of(Claim, header).seen
        _check_sizes(list(header.part_bytes), layout)
        with self.transfers.open(header.learner, None, "Initialise", context):  # ends this learner's earlier one
            if not self._lock.acquire(blocking=False):
                raise BusyError(
                    "another learner initialises the run; repeat the call, which is accepted if that upload breaks off."
                )
            try:
                self.host().ask(_require_uninitialised)
                yield from self._receive(header, layout, seen, stream)
                self.audit.admitted("Initialise", caller, header.learner, context.peer())
                yield pb.InitialiseReply()
            finally:
                self._lock.release()

    def _receive(
        self, header: pb.InitialiseHeader, layout: Layout, seen: Lineage | None, stream: Iterator[bytes]
    ) -> Iterator[pb.InitialiseReply]:
        resumed = partial(self.resumed, header.learner, "joins")
        buffer = yield from self.incoming.receive(header, stream, _room_for_model, resumed)
        whole = pb.Received(num_bytes=len(buffer), all=True)
        with ThreadPoolExecutor(1, thread_name_prefix="diloco-initialise") as worker:
            making = worker.submit(self._initial_model, header, layout, seen, buffer)
            yield from (pb.InitialiseReply(received=whole) for _ in while_waiting(making))
            model = making.result()

        waiting = self.host().until_done(lambda driver, done: driver.initialise(model, done))
        yield from (pb.InitialiseReply(received=whole) for _ in waiting)

    def _initial_model(
        self, header: pb.InitialiseHeader, layout: Layout, seen: Lineage | None, buffer: memoryview
    ) -> InitialModel[GlobalFragment]:
        """Check the upload and compute its digests; takes seconds for each GB."""
        thetas, start = [], 0
        for num_bytes in header.part_bytes[:-1]:
            thetas.append(tensor_of(buffer[start : start + num_bytes], torch.float32))
            start += num_bytes
        static = bytes(buffer[start:])
        for fragment, theta in zip(layout.fragments, thetas, strict=True):
            if not torch.isfinite(theta).all():
                raise LayoutError(
                    f"fragment {fragment.index} of the initial model is not finite; start from other weights."
                )
        _check_static(layout, static)
        if seen is not None:
            validation.check_run_id(seen.run_id)
        return self.host().jobs.initial(
            layout, thetas, static, learner=header.learner, source=header.source, step=header.step,
            tokens=header.tokens, run_id=secrets.token_hex(16) if seen is None else seen.run_id,
            epoch=1 if seen is None else seen.epoch + 1,
        )  # fmt: skip


def _check_sizes(sizes: list[int], layout: Layout) -> None:
    """Check the announced sizes against the layout, before memory is reserved."""
    expected = [4 * fragment.numel for fragment in layout.fragments]
    if not sizes or sizes[:-1] != expected:
        raise CorruptPayloadError(f"the model has parts of {sizes[:-1]} bytes and its layout needs {expected}.")
    most = MAX_STATIC_HEADER_BYTES + sum(
        MAX_STATIC_HEADER_BYTES + MAX_STATIC_ELEMENT_BYTES * spec.numel for spec in layout.static
    )
    if sizes[-1] > most:
        raise CorruptPayloadError(
            f"the model's {len(layout.static)} static tensors have {sizes[-1]} bytes, more than the maximum of {most}."
        )


def _require_uninitialised(driver: SyncerDriver) -> None:
    if driver.state.is_initialised:
        raise driver.state.already_initialised()


def _room_for_model(num_bytes: int) -> memoryview:
    """Reserve memory; the system maps its pages as bytes arrive."""
    try:
        return new_buffer(num_bytes)
    except (MemoryError, OSError, OverflowError) as error:
        raise StoreError(f"a model of {num_bytes} bytes does not fit into the syncer's memory ({error}).") from error


def _check_static(layout: Layout, static: bytes) -> None:
    """Check the static tensors' names against the layout."""
    tensors = tensors_of(static, "the static tensors")
    if set(tensors) != {spec.name for spec in layout.static}:
        raise LayoutError(
            f"the model has the static tensors {sorted(tensors)} and its layout names "
            f"{[s.name for s in layout.static]}."
        )
