"""Fetching what the syncer publishes: decoded and verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load
from torch import Tensor

from diloco.core.contribution import Verdict
from diloco.core.fragments import Layout, digest
from diloco.core.method import Method
from diloco.core.session import calls
from diloco.core.update import Update, advance
from diloco.errors import DigestError
from diloco.exchange.base import Arrived, Model
from diloco.exchange.connection import Connection
from diloco.exchange.remote.requests import pull_request, update_of, verdicts_of
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import tensor_of


@dataclass(frozen=True)
class Holding:
    """A global fragment, flat fp32; with its outer state, where the outer optimizer is on the learners."""

    version: int
    theta: Tensor
    outer_state: Mapping[str, Tensor]


NOTHING = Holding(-1, torch.empty(0), {})


@dataclass(frozen=True)
class Download:
    """What a fetch has brought: a fragment at a version, or the static tensors (`held` None)."""

    held: Holding | None
    update: Update
    mean: Tensor | None
    starts_again: bool
    static: Mapping[str, Tensor]
    verdicts: tuple[Verdict, ...]

    def arrived(self, merged: int) -> Arrived:
        """As news for the training thread."""
        assert self.held is not None
        outer_state = self.held.outer_state if self.starts_again else None
        return Arrived(self.update, self.held.theta, merged, self.mean, outer_state)


class Receiver:
    """The newest global fragments, and how to get newer ones. `fetch` runs on one thread; the rest is guarded by the
    caller.

    Attributes:
        newest: per fragment.
        num_bytes: received as a joiner, and as a member of the run.
    """

    def __init__(self, connection: Connection, layout: Layout, method: Method) -> None:
        self.newest = [NOTHING for _ in layout.fragments]
        self.num_bytes = {"joins": 0, "updates": 0}
        self._connection, self._layout, self._method = connection, layout, method
        self._static: Mapping[str, Tensor] = {}

    def fetch(self, call: calls.Fetch) -> Download:
        """Fetch a part of the model.

        Raises:
            DigestError: it is not what the syncer published. Others as `Connection.pull`.
        """
        channel = "joins" if call.joining else "updates"
        header, buffer = self._connection.pull(channel, pull_request(call))
        self.num_bytes[channel] += len(buffer)
        verdicts, update = verdicts_of(header.verdicts), update_of(header)
        if call.fragment is None:
            return Download(None, update, None, False, load(bytes(buffer)), verdicts)
        held, mean = self._decode(call.fragment, header, buffer)
        starts_again = self._method.outer_at == "learners" and header.lossless
        return Download(held, update, mean, starts_again, {}, verdicts)

    def take(self, fetched: Download) -> None:
        """Hold what was fetched."""
        if fetched.held is None:
            self._static = fetched.static
        else:
            self.newest[fetched.update.fragment] = fetched.held

    @property
    def model(self) -> Model:
        """As it is held."""
        return Model(tuple(held.theta for held in self.newest), self._static)

    @property
    def outer_states(self) -> tuple[Mapping[str, Tensor], ...]:
        """By fragment, where the outer optimizer is on the learners; elsewhere empty."""
        return tuple(held.outer_state for held in self.newest) if self._method.outer_at == "learners" else ()

    def _decode(self, fragment: int, header: pb.PullHeader, buffer: memoryview) -> tuple[Holding, Tensor | None]:
        """The new fragment, and the merged outer gradient where the reply brings that."""
        mean = None
        if header.lossless:
            num_theta_bytes = header.num_bytes - header.outer_bytes
            outer_state = load(bytes(buffer[num_theta_bytes:])) if header.outer_bytes else {}
            new = Holding(header.version, tensor_of(buffer[:num_theta_bytes], torch.float32), outer_state)
        else:
            held = self.newest[fragment]
            advanced = advance(self._method, held.theta, held.outer_state, tensor_of(buffer))
            new, mean = Holding(header.version, advanced.theta, advanced.outer_state), advanced.mean
        if new.theta.numel() != self._layout.fragments[fragment].numel or digest(new.theta) != header.digest:
            raise DigestError(
                f"version {header.version} of fragment {fragment} is not what the syncer published (digest "
                f"{header.digest[:12]}); check both machines' memory and disks."
            )
        return new, mean
