"""One process of the world that test_group.py looks at.

python -m tests.exchange.group_life DIRECTORY RANK WORLD_SIZE
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.exchange.scenarios import Result
from tests.exchange.worlds import join_world, write
from torch import Tensor, nn

import diloco
from diloco.core.fragments import make_layout
from diloco.errors import ExchangeError
from diloco.exchange.group import DeviceGroup, Group
from diloco.learner.partition import Partition, partition_of
from diloco.learner.pieces import Box, Piece

FOR_EVER_S = 3600.0
"""A rank that waits so long for another is a hang, which the test's own deadline ends."""

BULK_BYTES = 32_000_000
"""Much more than sockets hold."""

WORLD_SIZE = 3

PART_BYTES = [[3, 0, 5_000_001], [0, 0, 0], [2_000_003, 1, 4]]
"""What each rank (row) has for each (column): nothing, little, and more than sockets hold."""

DEAD = 2


def part_of(source: int, target: int, number: int) -> Tensor:
    """What one rank has for another in one of several exchanges."""
    generator = torch.Generator().manual_seed(100 * number + 10 * source + target)
    return torch.randint(256, (PART_BYTES[source][target],), dtype=torch.uint8, generator=generator)


def exchanges_unequal_and_empty_parts(rank: int, directory: Path) -> dict[str, Any]:
    """Several exchanges in a row, of every kind; which of them brought what they should."""
    group, world = Group(None, timeout_s=FOR_EVER_S), dist.group.WORLD
    assert world is not None
    ranks = range(group.size)
    right = []
    for number in range(3):
        send = torch.cat([part_of(rank, target, number) for target in ranks])
        received = group.all_to_all(send, PART_BYTES[rank], [PART_BYTES[source][rank] for source in ranks], "parts")
        right.append(torch.equal(received, torch.cat([part_of(source, rank, number) for source in ranks])))
        over_gloo = DeviceGroup(world).all_to_all(
            send, PART_BYTES[rank], [PART_BYTES[source][rank] for source in ranks], "parts"
        )
        right.append(torch.equal(over_gloo, received))
        own = part_of(rank, DEAD, number)
        gathered = group.gather(own, [PART_BYTES[source][DEAD] for source in ranks], "parts")
        right.append(torch.equal(gathered, torch.cat([part_of(source, DEAD, number) for source in ranks])))
    group.disconnect()
    return {"right": right}


def loses_a_rank_in_a_bulk_exchange(rank: int, directory: Path) -> dict[str, Any]:
    """The last one. Rank 2 takes what rank 0 brings and dies before it gives its own; rank 1 comes to the exchange
    after that."""
    group = Group(None, timeout_s=FOR_EVER_S)
    store = dist.distributed_c10d._get_default_store()
    sizes = [BULK_BYTES] * group.size
    alive = (directory / "alive").open("w")
    if rank == DEAD:
        fcntl.flock(alive, fcntl.LOCK_EX)  # until the process ends
    dist.barrier()
    if rank == DEAD:
        taken = (bulk(), [0, 0, BULK_BYTES], sizes, "the bulk")
        threading.Thread(target=group.all_to_all, args=taken, daemon=True).start()
        store.wait(["rank 0 exchanges"])
        os._exit(9)
    if rank == 0:
        store.set("rank 0 exchanges", "")
    else:
        fcntl.flock(alive, fcntl.LOCK_EX)
    errors = [error_of(lambda: group.gather(bulk(), sizes, "the bulk"))]
    if rank == 0:
        group.disconnect()
        store.wait(["rank 1 has its errors"])  # the process lives on, and keeps the error as a Future does
    else:
        errors.append(error_of(lambda: group.gather_frames({}, "the next one")))
        store.set("rank 1 has its errors", "")
    alive.close()
    return {"errors": [str(error) for error in errors]}


def error_of(act: Callable[[], object]) -> ExchangeError | None:
    try:
        act()
    except ExchangeError as error:
        return error
    return None


def bulk() -> Tensor:
    return torch.ones(BULK_BYTES, dtype=torch.uint8)


def moves_pieces_by_both_transports(rank: int, directory: Path) -> dict[str, Any]:
    """Fragments of a model that the ranks hold in unequal rows, of two dtypes, gathered and spread over the host's
    connections and over the ranks' own process group: NCCL where every rank has a GPU, else gloo on the CPU."""
    on_gpus = torch.cuda.device_count() >= WORLD_SIZE
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    ranks = dist.new_group(backend="nccl" if on_gpus else "gloo")
    group = Group(ranks, timeout_s=FOR_EVER_S)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 11, bias=False).bfloat16(), nn.Linear(11, 5))
    layout = make_layout(model, diloco.Balanced(2))
    whole = {name: value.detach() for name, value in model.named_parameters()}
    boxes = [{name: rows_of(tuple(value.shape), source) for name, value in whole.items()} for source in range(3)]
    pieces = {
        name: value[tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))]
        .clone().to(device)
        for name, value in whole.items() for box in [boxes[rank][name]]
    }  # fmt: skip

    def gather(name: str, tensor: Tensor) -> Piece:
        return Piece(tuple(whole[name].shape), boxes[rank][name], tensor)

    own = DeviceGroup(ranks).all_to_all
    chosen = partition_of(layout, pieces, gather, group)
    partitions = [
        Partition(layout, rank, boxes, gather, group.all_to_all),
        Partition(layout, rank, boxes, gather, own, device),
        chosen,
    ]
    right = []
    for fragment in layout.fragments:
        parts = [partition.gather(fragment.index, pieces).cpu() for partition in partitions]
        right += [torch.equal(part, parts[0]) for part in parts[1:]]
        elements = partitions[0].elements(fragment.index)
        flat = torch.cat([whole[place.spec.name].float().flatten() for place in fragment.tensors])
        right.append(torch.equal(parts[0], flat[elements]))
        for partition in partitions:
            found = partition.spread(fragment.index, parts[0].to(device), device)
            right.append(all(torch.equal(found[name], pieces[name].float()) for name in found))
    group.disconnect()
    dist.destroy_process_group(ranks)
    return {"right": right, "over": "nccl" if chosen._wire.type == "cuda" else "host"}


def rows_of(shape: tuple[int, ...], rank: int) -> Box:
    """All of a vector, which is a replica; of a matrix, one row, two, or the rest."""
    if len(shape) == 1:
        return Box.whole(shape)
    first, stop = ((0, 1), (1, 3), (3, shape[0]))[rank]
    return Box(shape, (first, 0), (stop - first, shape[1]))


def leaves_while_a_thread_waits(rank: int, directory: Path) -> dict[str, Any]:
    """Rank 0 disconnects while a thread of its own waits for the others, who then come."""
    group, store = Group(None, timeout_s=FOR_EVER_S), dist.distributed_c10d._get_default_store()
    sums: list[list[int]] = []
    if rank == 0:
        waits = Heard()
        thread = threading.Thread(target=lambda: sums.append(group.sum([1], "a sum", remind_after_s=0.01)))
        thread.start()
        waits.heard.wait()
        group.disconnect()
        store.set("rank 0 has left", "")
        thread.join()
        return {"sums": sums}
    store.wait(["rank 0 has left"])
    sums.append(group.sum([1], "a sum"))
    return {"sums": sums, "error": str(error_of(lambda: group.sum([1], "the next one")))}


class Heard(logging.Handler):
    """`heard` is set by the first warning of a rank that waits for others."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard = threading.Event()
        logging.getLogger("diloco").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.set()


LIVES = [
    exchanges_unequal_and_empty_parts, moves_pieces_by_both_transports, leaves_while_a_thread_waits,
    loses_a_rank_in_a_bulk_exchange,
]  # fmt: skip


def main(directory: Path, rank: int, world_size: int) -> None:
    join_world(directory, rank, world_size)
    for life in LIVES:
        write(directory, life.__name__, rank, Result({}, life(rank, directory)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
