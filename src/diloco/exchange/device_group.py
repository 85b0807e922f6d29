"""Between the ranks of a learner on GPUs: device memory crosses over the ranks' own process group, by NCCL.

The calls are made by the training thread between two steps, in the same order on every rank, as those of the training
itself are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diloco.errors import ExchangeError
from diloco.exchange.group import ranks_in, reason_of


class DeviceGroup:
    """`Group.all_to_all` for tensors on a device. All ranks of `ranks` must call it in the same order."""

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        self._ranks = ranks

    def all_to_all(self, send: Tensor, send_bytes: Sequence[int], receive_bytes: Sequence[int], what: str) -> Tensor:
        """`send` (uint8) is cut into one part per rank; returns the parts from all ranks, in rank order.

        Raises ExchangeError where the process group says that another rank is gone. NCCL says so late, or ends the
        process, as in the training's own collectives.
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
    """What crosses between devices like this one; None: it is the CPU, or the ranks have no NCCL group for them all."""
    if device.type == "cpu":
        return None
    members = ranks_in(ranks)
    candidates = [ranks] if isinstance(ranks, dist.ProcessGroup) else _groups_of(ranks)
    for group in candidates:
        if ranks_in(group) == members and f"{device.type}:nccl" in dist.get_backend_config(group):
            return DeviceGroup(group)
    return None


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Where a rank's tensors of the model are; where it takes part, if it holds none."""
    found = next((each.device for each in tensors.values()), None)
    if found is not None:
        return found
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    world = dist.group.WORLD
    assert world is not None
    return [world] if mesh.ndim > 1 else [mesh.get_group(), world]
