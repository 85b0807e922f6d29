"""Separate connections between the ranks of a process group: our traffic never mixes with the user's collectives.

They are gloo's, whatever backend the given group has, because the exchanged tensors are on the host. The ranks find
each other through the given group's store. `torch.distributed.new_group` cannot make them: it needs every rank of the
world, or else names a group after the number of groups of its process, which may differ between two ranks.

All data is sent as bytes, mostly by one primitive: an all-to-all with a size for every pair, built on gloo's sends and
receives. gloo's own all-to-all posts a send before the receive from the same peer, and then the two directions of a
link often alternate.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from diloco import errors
from diloco.core.memory import new_vector
from diloco.errors import ConfigError, DilocoError, ExchangeError
from diloco.escaping import printable, read_json

log = logging.getLogger("diloco")

FRAME_BYTES = 2048
"""Size of a small message that every rank sends to every other; JSON, padded with spaces."""

SIGNALS_AFTER_S = 1.0
"""Interval at which a process that waits for other ranks handles its signals, such as Ctrl-C."""

SAME_VERSION = "start all ranks with the same version of diloco"

TEXT_CHARACTERS = 256
"""Maximum length of an error's text in a frame; escaped as JSON it fits beside the other values of a frame."""


class Group:
    """Collective operations on host tensors. All ranks of `parent` must call every method in the same order.

    Arguments:
        parent: the process group or device mesh (of any number of dimensions) whose ranks take part; None: all.
        timeout_s: how long an operation waits for the other ranks.

    Raises:
        ConfigError: there is no process group, or this process is not in it.
        ExchangeError: (every method) another rank is lost or did not answer in time; names the rank, if it is known,
            and the operation that failed.

    Attributes:
        parent: as given; all ranks if that was None.
        rank, size: this process's rank, and the number of ranks.
    """

    def __init__(self, parent: dist.ProcessGroup | DeviceMesh | None, *, timeout_s: float) -> None:
        require_process_group()
        world = dist.group.WORLD
        assert world is not None
        self.parent = world if parent is None else parent
        members = ranks_in(self.parent)
        if dist.get_rank() not in members:
            raise ConfigError("this process is not a member of the process group it was given; pass one that it is in.")
        self.rank = members.index(dist.get_rank())
        self.size = len(members)
        self._timeout_s = timeout_s
        with self._named("connecting the ranks"):
            # Ranks make their groups one after the other, so the first `size` arrivals belong to the first group, the
            # next `size` to the second one.
            group = parent if isinstance(parent, dist.ProcessGroup) else world
            store = PrefixStore(f"diloco/{members}", group.get_group_store())
            number = (store.add("arrivals", 1) - 1) // self.size
            store = PrefixStore(str(number), store)
            # Any: torch's stubs leave its methods out.
            self._gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=timeout_s))
        self._exchanges = 0  # their number; the tag of the newest

    def all_to_all(self, send: Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], what: str) -> Tensor:
        """Send one part of `send` (uint8) to each rank; returns the parts from all ranks, in rank order."""
        return self._exchange(send.split(list(send_bytes)), receive_bytes, what)

    def gather(self, part: Tensor, sizes_bytes: Sequence[int], what: str) -> Tensor:
        """Every rank's `part` (uint8, of the size that `sizes_bytes` gives for the rank), joined in rank order."""
        return self._exchange([part] * self.size, sizes_bytes, what)

    def collect(self, part: Tensor, sizes_bytes: Sequence[int], what: str) -> Tensor:
        """On rank 0 every rank's `part` (uint8, of these sizes), joined in rank order; on other ranks nothing."""
        send = [part.numel() if rank == 0 else 0 for rank in range(self.size)]
        return self.all_to_all(part, send, sizes_bytes if self.rank == 0 else [0] * self.size, what)

    def scatter(self, whole: Tensor | None, sizes_bytes: Sequence[int], what: str) -> Tensor:
        """This rank's part (uint8, of the size that `sizes_bytes` gives for it) of what rank 0 holds; None on the other
        ranks."""
        send = torch.empty(0, dtype=torch.uint8) if whole is None else whole
        receive = [sizes_bytes[self.rank] if rank == 0 else 0 for rank in range(self.size)]
        return self.all_to_all(send, [0] * self.size if whole is None else sizes_bytes, receive, what)

    def gather_frames(self, values: dict[str, Any], what: str) -> list[dict[str, Any]]:
        """Every rank's small message (plain values whose JSON fits into FRAME_BYTES), in rank order."""
        frame = json.dumps(values).encode().ljust(FRAME_BYTES)
        assert len(frame) == FRAME_BYTES
        gathered = self.gather(to_tensor(frame), [FRAME_BYTES] * self.size, what)
        return [read_frame(each) for each in gathered.split(FRAME_BYTES)]

    def gather_values(self, values: Any, what: str) -> list[Any]:
        """Every rank's plain values of any size, in rank order."""
        message = to_tensor(json.dumps(values).encode())
        sizes = [int(frame["bytes"]) for frame in self.gather_frames({"bytes": message.numel()}, what)]
        parts = split(self.gather(message, sizes, what), sizes)
        return [read_json(to_bytes(part), f"a rank's message in {what}", ExchangeError, SAME_VERSION) for part in parts]

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Overwrite `tensor` (contiguous, any dtype) with rank 0's, in place."""
        if tensor.numel():
            with self._named(what), self._kept():
                self._connections.broadcast([as_bytes(tensor)], dist.BroadcastOptions()).wait()

    def sum(self, values: Sequence[int], what: str, *, remind_after_s: float | None = None) -> list[int]:
        """The sum over ranks of each integer. `remind_after_s`: warn when the other ranks take longer than this."""
        numbers = torch.tensor(values, dtype=torch.int64)
        with self._named(what), self._kept():
            work = self._connections.allreduce([numbers], dist.AllreduceOptions())
            if remind_after_s is None:
                work.wait()
            else:
                self._wait(work, what, remind_after_s)
        return [int(number) for number in numbers.tolist()]

    def _wait(self, work: Any, what: str, remind_after_s: float) -> None:
        """Wait for the other ranks, handle signals meanwhile, and warn at doubled times."""
        began_s, remind_at_s = time.monotonic(), remind_after_s
        while True:
            with suppress(RuntimeError):  # a timeout, or a failure
                work.wait(timedelta(seconds=min(remind_at_s, SIGNALS_AFTER_S)))
            if work.is_completed():
                work.wait()
                return
            if (waited_s := time.monotonic() - began_s) >= remind_at_s:
                log.warning(
                    "rank %d of %d has waited %.0f s for other ranks in %s; they are slower, or wait for this rank in "
                    "another call.", self.rank, self.size, waited_s, what,
                )  # fmt: skip
                remind_at_s = 2 * waited_s

    @property
    def _connections(self) -> Any:
        if self._gloo is None:
            raise ExchangeError("this rank has left its group; make a new Learner on all ranks.")
        return self._gloo

    def disconnect(self) -> None:
        """Close the connections, at once or when another thread's operation ends; ranks that wait for this one get an
        error then."""
        self._gloo = None

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep the connections during an operation: closing them, gloo waits for it and lets no other thread run."""
        connections = self._connections
        try:
            yield
        finally:
            del connections  # an error holds this frame

    def _exchange(self, parts: Sequence[Tensor], receive_bytes: Sequence[int], what: str) -> Tensor:
        """Send part r to rank r; returns the parts from all ranks, in rank order."""
        received = new_vector(sum(receive_bytes), torch.uint8)
        places = received.split(list(receive_bytes))
        places[self.rank].copy_(parts[self.rank])
        if lost := self._cross(parts, places):
            reason = next(iter(lost.values()))
            raise ExchangeError(self._lost(what, reason_of(reason), sorted(lost))) from reason
        return received

    def _cross(self, parts: Sequence[Tensor], places: Sequence[Tensor]) -> dict[int, RuntimeError]:
        """Send parts, receive into places; returns the lost ranks in order of failure, with their errors.

        Receives are posted first: a receive requests the peer's part over the connection that carries the part for the
        peer, and the request would queue behind that part. If a rank is lost, the transfers with the other ranks are
        still finished, so that these see only that rank as lost; those with the lost rank are not awaited, since gloo
        may never end a send to a peer that closed the connection. The errors hold no frame, whose works would keep the
        connections open.
        """
        self._exchanges += 1
        later = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        lost: dict[int, RuntimeError] = {}
        works: list[tuple[int, Any]] = []
        gloo = self._connections
        for start, ranks, ends in ((gloo.recv, later[::-1], places), (gloo.send, later, parts)):
            for rank in ranks:
                if ends[rank].numel():
                    try:
                        works.append((rank, start([ends[rank]], rank, self._exchanges)))
                    except RuntimeError as error:
                        lost.setdefault(rank, error.with_traceback(None))
        for rank, work in works:
            if rank in lost:
                continue
            try:
                work.wait()
            except RuntimeError as error:
                lost[rank] = error.with_traceback(None)
        return lost

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Translate torch's error for a lost or silent peer, which is a bare RuntimeError."""
        try:
            yield
        except RuntimeError as error:
            raise ExchangeError(self._lost(what, reason_of(error))) from error

    def _lost(self, what: str, reason: str, ranks: Collection[int] = ()) -> str:
        """The error text for lost peers. `ranks`: the lost ones, if they are known."""
        who = unresponsive([f"rank {rank}" for rank in ranks], "another rank", self._timeout_s)
        return (
            f"{what} did not get through, because {who}; a process group has fixed membership, so start all ranks "
            f"again from a checkpoint ({reason})."
        )


def ranks_in(group: object) -> list[int]:
    """The ranks of a process group in their order, or of a device mesh. Other objects have none: torch gives an integer
    in place of a group to a process that is not in it."""
    if isinstance(group, DeviceMesh):
        members: list[int] = group.mesh.flatten().tolist()
        return members
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []


def require_process_group() -> None:
    """Raise ConfigError unless torch.distributed is initialised."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "there is no process group; call torch.distributed.init_process_group first, in processes started by "
            "torchrun."
        )


def unresponsive(names: Sequence[str], other: str, timeout_s: float) -> str:
    """The first part of a sentence about learners that did not answer; `other`: if no name is known."""
    verb = "are" if len(names) > 1 else "is"
    return f"{' and '.join(names) or other} {verb} lost or silent for more than {timeout_s:g} s"


def read_frame(frame: Tensor) -> dict[str, Any]:
    """A small message of another rank.

    Raises:
        ExchangeError: it is malformed.
    """
    values = read_json(to_bytes(frame), "a message of another rank", ExchangeError, SAME_VERSION)
    if not isinstance(values, dict):
        raise ExchangeError(f"a message of another rank is a {type(values).__name__}; {SAME_VERSION}.")
    return values


def attempt(work: Callable[[], Any]) -> tuple[Any, DilocoError | None]:
    """Return the result, or the error, which the other ranks must receive before it is raised."""
    try:
        return work(), None
    except DilocoError as error:
        return None, error


def error_values(error: DilocoError | None, most: int | None = None) -> list[str] | None:
    """An error as plain values, from which `error_of` makes it again; `most`: characters of its text."""
    return None if error is None else [type(error).__name__, str(error)[:most]]


def error_of(name: str, text: str) -> DilocoError:
    """The error of this package with this class name and text, as another rank sent it."""
    kind, text = getattr(errors, name, None), printable(text).strip() or "it gives no reason"
    if isinstance(kind, type) and issubclass(kind, DilocoError):
        return kind(text)
    return ExchangeError(f"{printable(name)}: {text}")


def reason_of(error: Exception) -> str:
    """The reason in an error text of torch, gloo, NCCL or torchft, without status fields, source file and advice."""
    text = str(error).strip() or type(error).__name__
    if found := re.search(r'message: "([^"]+)"|\nLast error:\s*(\S.*)', text):
        return found[1] or found[2]
    return re.sub(r"^\[\S+\] ", "", text.splitlines()[0]).split(". ")[0].rstrip(".")


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8."""
    return tensor.view(-1).view(torch.uint8)


def to_tensor(raw: bytes) -> Tensor:
    """Bytes as a uint8 tensor."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    """A uint8 tensor as bytes."""
    return tensor.numpy().tobytes()


def split(joined: Tensor, sizes_bytes: Sequence[int]) -> list[Tensor]:
    """The parts of a joined uint8 tensor, each aligned so that it can be viewed in any dtype."""
    parts = joined.split(list(sizes_bytes))
    starts = accumulate(sizes_bytes, initial=0)
    return [part if start % 8 == 0 else part.clone() for part, start in zip(parts, starts, strict=False)]


# --- between devices --------------------------------------------------------------------------------------------------


class DeviceGroup:
    """`Group.all_to_all` for tensors on a device, over the ranks' own process group, by NCCL.

    Only the training thread may call it, between two steps and in the same order on every rank, as with the collectives
    of the training.
    """

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        self._ranks = ranks

    def all_to_all(self, send: Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], what: str) -> Tensor:
        """Send one part of `send` (uint8) to each rank; returns the parts from all ranks, in rank order.

        Raises ExchangeError if the process group reports a lost rank. NCCL reports it late, or ends the process, as in
        the collectives of the training.
        """
        received = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=send.device)
        try:
            dist.all_to_all_single(received, send, list(receive_bytes), list(send_bytes), group=self._ranks)
        except RuntimeError as error:
            raise ExchangeError(
                f"{what} did not get through between the devices of this learner's ranks; start all ranks again from a "
                f"checkpoint ({reason_of(error)})."
            ) from error
        return received


def device_group(ranks: dist.ProcessGroup | DeviceMesh, device: torch.device) -> DeviceGroup | None:
    """The group for tensors on devices like this one; None: it is the CPU, or no NCCL group has exactly these ranks."""
    if device.type == "cpu":
        return None
    members = ranks_in(ranks)
    candidates = [ranks] if isinstance(ranks, dist.ProcessGroup) else _groups_of(ranks)
    for group in candidates:
        if ranks_in(group) == members and f"{device.type}:nccl" in dist.get_backend_config(group):
            return DeviceGroup(group)
    return None


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """The device of a rank's tensors; if it has none, the current GPU, or else the CPU."""
    found = next((each.device for each in tensors.values()), None)
    if found is not None:
        return found
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    world = dist.group.WORLD
    assert world is not None
    return [world] if mesh.ndim > 1 else [mesh.get_group(), world]
