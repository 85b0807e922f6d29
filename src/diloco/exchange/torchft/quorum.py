"""Membership over a torchft lighthouse: quorums, heartbeats, and a process group that follows the membership."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from diloco.errors import ConfigError, ExchangeError
from diloco.exchange.group import Group, reason_of, unresponsive

HEARTBEAT_S = 0.5


class QuorumClient:
    """A member's place in the quorums of a lighthouse.

    Arguments:
        replica, lighthouse, host, timeout_s: as given to `TorchFT`.

    Attributes:
        closing: set by the owner when this member leaves; it ends every pause.
        group: the members of the newest quorum; None before the first, and after a failure until the next.

    Raises:
        ConfigError: torchft is not installed.
    """

    def __init__(self, replica: str, lighthouse: str, host: str, timeout_s: float) -> None:
        try:
            from torchft import ProcessGroupGloo
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            raise ConfigError('torchft is not installed; pip install "diloco[torchft]".') from error
        self.closing = threading.Event()
        self.group: QuorumGroup | None = None
        self._key: tuple[Any, ...] = ()
        self._replica = replica
        self._timeout = timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
        self._lighthouse = lighthouse
        self._client_kind: Any = LighthouseClient
        self._client: Any = LighthouseClient(lighthouse, self._timeout)
        self._pg: Any = ProcessGroupGloo(timeout=self._timeout)
        self._store: Any = vars(dist)["TCPStore"](host, 0, is_master=True, wait_for_workers=False)
        self._store_address = f"{host}:{self._store.port}"
        self._heart = threading.Thread(target=self._beat, name="diloco-torchft-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the heartbeats to the lighthouse."""
        self._heart.start()

    def assemble(self) -> QuorumGroup:
        """Request a quorum from the lighthouse; configure a new process group if the quorum has changed."""
        try:
            quorum = self._client.quorum(
                self._replica, self._timeout, address="", store_address=self._store_address, step=0, world_size=1
            )
        except (RuntimeError, TimeoutError) as error:
            raise ExchangeError(
                f"the lighthouse at {self._lighthouse} gave no quorum ({reason_of(error)}); check that it runs."
            ) from error
        members = sorted(quorum.participants, key=lambda each: each.replica_id)
        replicas = [each.replica_id for each in members]
        key = (quorum.quorum_id, *replicas)
        if key == self._key and self.group is not None:
            return self.group
        rank = replicas.index(self._replica)
        prefix = f"{members[0].store_address}/diloco/{quorum.quorum_id}"
        try:
            self._pg.configure(prefix, self._replica, rank, len(members), quorum.quorum_id)
        except (RuntimeError, TimeoutError) as error:  # a member died while the group was made
            self.forget()
            raise ExchangeError(
                f"the process group of {len(members)} learners could not be made ({reason_of(error)})."
            ) from error
        self.group, self._key = QuorumGroup(self._pg, rank, replicas, self._timeout_s), key
        return self.group

    def forget(self) -> None:
        """Configure a new group for the next quorum, even if its members are the same."""
        self.group, self._key = None, ()

    def close(self) -> None:
        """Leave: end the heartbeats and the connections. `closing` must be set."""
        if self._heart.is_alive():
            self._heart.join()
        self._pg.shutdown()

    def _beat(self) -> None:
        """Send heartbeats, over a client of their own: a quorum request blocks its client."""
        client = self._client_kind(self._lighthouse, self._timeout)
        while not self.closing.is_set():
            try:
                client.heartbeat(self._replica)
            except (RuntimeError, TimeoutError):  # the next quorum request raises it
                self.closing.wait(HEARTBEAT_S)
            self.closing.wait(HEARTBEAT_S)


class QuorumGroup(Group):
    """`Group` over the process group that torchft has configured for one quorum. `replicas`: its members in rank
    order."""

    def __init__(self, pg: Any, rank: int, replicas: Sequence[str], timeout_s: float) -> None:
        self.rank, self.size, self._timeout_s = rank, len(replicas), timeout_s
        self._replicas = replicas
        self._gloo = pg
        self._exchanges = 0

    def _lost(self, what: str, reason: str, ranks: Collection[int] = ()) -> str:
        """As in `Group`, without the advice to start all ranks again: the next quorum excludes lost members."""
        who = unresponsive([self._replicas[rank] for rank in ranks], "another learner", self._timeout_s)
        return f"{what} did not get through, because {who} ({reason})."
