"""The torchft processes of `test_torchft.py`, and what both implementations train: model, data, inner optimizer.

    python torchft_peer.py lighthouses 3
        prints the addresses of three lighthouses and serves until its input is closed
    python torchft_peer.py learner '{"replica": 0, "lighthouses": [...], "cases": [[2, 1, 0.5, "adamw"], ...], ...}'
        trains one replica; "out" names the file for its parameters

A learner runs torchft's DiLoCo on every case in turn, under a lighthouse and a manager of its own, and writes every
parameter after every step.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SYNC_EVERY = 8
STEPS = 24
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


class Case(NamedTuple):
    """One point of the grid: P fragments, τ, α, and the inner optimizer."""

    num_fragments: int
    overlap: int
    mix: float
    inner: str


def make_model() -> nn.Sequential:
    """Four linear layers, the same on every learner."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def make_inner(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def batches(replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each learner's own data."""
    generator = torch.Generator().manual_seed(100 + replica)
    for _ in range(STEPS):
        yield torch.randn(16, 6, generator=generator), torch.randn(16, 6, generator=generator)


def train_step(model: nn.Module, inner: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    inner.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    inner.step()


def fragments_of(model: nn.Sequential, num_fragments: int) -> list[nn.Module]:
    """Consecutive layers; the names in `model` are unchanged."""
    per_fragment = len(model) // num_fragments
    return [nn.ModuleList(model[i * per_fragment : (i + 1) * per_fragment]) for i in range(num_fragments)]


def _torchft_run(replica: int, lighthouse: str, case: Case) -> list[dict[str, Tensor]]:
    from datetime import timedelta

    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    model = make_model()
    inner = make_inner(case.inner, model)
    fragments = fragments_of(model, case.num_fragments)
    outer = [
        torch.optim.SGD(fragment.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        for fragment in fragments
    ]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=500)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), load_state_dict=None, state_dict=None, min_replica_size=2,
        use_async_quorum=False, timeout=timeout, quorum_timeout=timeout, connect_timeout=timeout, rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"learner_{replica}",
        hostname="127.0.0.1", init_sync=False,
    )  # fmt: skip
    trajectory = []
    try:
        with DiLoCo(manager, fragments, inner, outer, SYNC_EVERY, fragment_sync_delay=case.overlap,
                    fragment_update_alpha=case.mix):  # fmt: skip
            for batch in batches(replica):
                train_step(model, inner, batch)
                trajectory.append({name: p.detach().clone() for name, p in model.named_parameters()})
        expected = STEPS // SYNC_EVERY * case.num_fragments
        if manager.current_step() != expected:
            raise RuntimeError(f"torchft committed {manager.current_step()} synchronisations, not {expected}")
    finally:
        manager.shutdown()
    return trajectory


def _serve_lighthouses(count: int) -> None:
    from torchft.coordination import LighthouseServer

    servers = [
        LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100, quorum_tick_ms=10)
        for _ in range(count)
    ]
    # It advertises the machine's host name, which need not resolve.
    addresses = [f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}" for server in servers]
    print(json.dumps(addresses), flush=True)
    sys.stdin.read()
    for server in servers:
        server.shutdown()


def _learn(task: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    tensors = {}
    for index, (lighthouse, case) in enumerate(zip(task["lighthouses"], task["cases"], strict=True)):
        for step, parameters in enumerate(_torchft_run(task["replica"], lighthouse, Case(*case)), start=1):
            tensors.update({f"{index}/{step}/{name}": value for name, value in parameters.items()})
    save_file(tensors, task["out"])


if __name__ == "__main__":
    if sys.argv[1] == "lighthouses":
        _serve_lighthouses(int(sys.argv[2]))
    else:
        _learn(json.loads(sys.argv[2]))
