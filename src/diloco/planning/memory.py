"""Memory of a learner and of the syncer, and the syncer's storage, in bytes.

A learner's is that of all its ranks together, with fp32 parameters and AdamW. Not in it: activations, staging buffers,
error feedback, which takes as much as the anchors, and what does not grow with the model. In flight are the fragments
whose sends are at most τ steps apart. Of each, the device has a snapshot, later the new value, and the host the encoded
contribution, later the update and the value that it makes (docs/islands.md).

The syncer has of every fragment the value, the outer momentum and, where updates are lossy, their residual and the
newest update; and a second value of the fragment that closes. `python -m benchmarks.memory` measures 2 to 5 % more.
The store names the newest versions of each fragment, and keeps superseded ones for a while.
"""

import math

from diloco.config import SyncerTable
from diloco.planning.exchange_plan import PlannedFragment, exchange_of, fragments_of
from diloco.planning.settings import Setting
from diloco.planning.workload import Workload
from diloco.protocol.manifest import KEPT_VERSIONS

FP32_BYTES = 4
KEEP_S: float = SyncerTable.model_fields["keep_s"].default


def learner_bytes(workload: Workload, setting: Setting) -> dict[str, float]:
    """Return what a learner has on its devices and hosts, by place and kind; in flight, of the learner with most."""
    exchange, fragments = exchange_of(workload, setting), fragments_of(workload, setting)
    first, multiples, every = exchange.schedule.offsets or (), exchange.schedule.multiples, setting.sync_every
    device, host, repeats = 0.0, 0.0, math.lcm(*multiples)
    for held in exchange.held or [frozenset(range(len(fragments)))]:
        for step in {first[p] + turn * every for p in held for turn in range(0, repeats, multiples[p])}:
            near = [fragments[p] for p in held if (step - first[p]) % (multiples[p] * every) <= setting.overlap]
            device = max(device, sum(FP32_BYTES * each.numel for each in near))
            host = max(host, sum(max(each.up_bytes, FP32_BYTES * each.numel + _update_bytes(each)) for each in near))
    values = FP32_BYTES * sum(exchange.share(index) * each.numel for index, each in enumerate(fragments))
    return {
        "device_parameters": values, "device_gradients": values, "device_inner_optimizer": 2 * values,
        "device_in_flight": device, "host_anchors": values, "host_in_flight": host,
    }  # fmt: skip


def syncer_bytes(workload: Workload, setting: Setting, num_learners: int) -> tuple[float, float]:
    """Return the syncer's memory, without the contributions in its spool, and its storage, with them."""
    exchange, fragments = exchange_of(workload, setting), fragments_of(workload, setting)
    memory, storage = max(FP32_BYTES * each.numel for each in fragments), num_learners * max(exchange.up_bytes)
    for each, multiple in zip(fragments, exchange.schedule.multiples, strict=True):
        version = (3 if _update_bytes(each) else 2) * FP32_BYTES * each.numel + _update_bytes(each)
        memory += version
        storage += version * (KEPT_VERSIONS + KEEP_S / (multiple * setting.sync_every * workload.step_s))
    return memory, storage


def _update_bytes(it: PlannedFragment) -> int:
    """Of an encoded update; a lossless one is the new value itself."""
    return 0 if it.is_lossless else it.down_bytes
