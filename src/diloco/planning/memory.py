"""Memory of a learner and of the syncer, and the syncer's storage, in bytes.

A learner's is that of all its ranks together, for fp32 parameters and AdamW. Not in it: activations, staging buffers,
and what does not grow with the model. In flight are the fragments whose sends are at most τ steps apart. Of each, the
device has a snapshot, or later the new value, and the host the encoded contribution, or later the update and the value
that it makes (docs/gpu.md, docs/islands.md).

The syncer has of every fragment the value, the outer momentum and, where updates are lossy, their residual and the
newest update; and a second value of the fragment that closes. `python -m benchmarks.memory` measures 2 to 5 % more.
The store names the newest versions of each fragment, and keeps superseded ones for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.config import SyncerTable
from diloco.planning.exchange_plan import PlannedFragment, exchange_of, fragments_of
from diloco.planning.settings import Setting
from diloco.planning.workload import Workload
from diloco.protocol.manifest import KEPT_VERSIONS

FP32_BYTES = 4
ADAMW_MOMENTS = 2
KEEP_S: float = SyncerTable.model_fields["keep_s"].default


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes of one learner.

    Attributes:
        parameters, gradients, optimizer: on the devices; the optimizer is the inner one.
        device_in_flight: on the devices, for the fragments in flight.
        anchors: on the host. Error feedback takes as much again.
        host_in_flight: on the host, for the fragments in flight.
    """

    parameters: float
    gradients: float
    optimizer: float
    device_in_flight: float
    anchors: float
    host_in_flight: float


@dataclass(frozen=True)
class SyncerMemory:
    """Bytes of the syncer: in memory, without the contributions in its spool, and in its store, with them."""

    memory: float
    storage: float


def learner_memory(workload: Workload, setting: Setting) -> LearnerMemory:
    """Return the memory of the learner that has most in flight."""
    exchange, fragments = exchange_of(workload, setting), fragments_of(workload, setting)
    schedule, every = exchange.schedule, setting.sync_every
    offsets, multiples = schedule.offsets or (), schedule.multiples
    device, host = 0.0, 0.0
    for held in exchange.held or [frozenset(range(len(fragments)))]:
        for first in held:  # what is in flight while it is
            near = [
                fragments[each]
                for each in held
                if (offsets[first] - offsets[each]) % (math.gcd(multiples[first], multiples[each]) * every)
                <= setting.overlap
            ]
            device = max(device, sum(FP32_BYTES * each.numel for each in near))
            host = max(host, sum(map(_on_host, near)))
    values = FP32_BYTES * sum(exchange.share(index) * each.numel for index, each in enumerate(fragments))
    return LearnerMemory(values, values, ADAMW_MOMENTS * values, device, values, host)


def _on_host(it: PlannedFragment) -> float:
    return max(it.up.encoded_bytes(it.numel), FP32_BYTES * it.numel + _update_bytes(it))


def _update_bytes(it: PlannedFragment) -> int:
    """Of an encoded update; a lossless one is the new value itself."""
    return 0 if it.down.name == "fp32" else it.down.encoded_bytes(it.numel)


def syncer_memory(workload: Workload, setting: Setting, num_learners: int) -> SyncerMemory:
    """Return the memory and storage of the syncer, which holds all fragments."""
    exchange, fragments = exchange_of(workload, setting), fragments_of(workload, setting)
    memory, storage = max(FP32_BYTES * each.numel for each in fragments), 0.0
    for each, multiple in zip(fragments, exchange.schedule.multiples, strict=True):
        values = 2 if each.down.name == "fp32" else 3
        version = values * FP32_BYTES * each.numel + _update_bytes(each)
        memory += version
        storage += version * (KEPT_VERSIONS + KEEP_S / (multiple * setting.sync_every * workload.step_s))
    return SyncerMemory(memory, storage + num_learners * max(exchange.up_bytes))
