"""Side by side with torchft 0.2: the same model, data and optimizers give the same parameters at every step."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.torchft_peer import (
    OUTER_LR,
    OUTER_MOMENTUM,
    STEPS,
    SYNC_EVERY,
    Case,
    batches,
    make_inner,
    make_model,
    train_step,
)
from torch import Tensor, nn

import diloco
from diloco.exchange.base import Exchange

PEER = Path(__file__).with_name("torchft_peer.py")
DEADLINE_S = 500

# P fragments, τ < H/P, α; torchft has one fragment in flight at a time.
CASES = [
    Case(num_fragments, overlap, mix, inner)
    for num_fragments, overlaps in ((1, (0, 1, 7)), (2, (0, 1, 3)), (4, (0, 1)))
    for overlap in overlaps
    for mix, inner in ((0.0, "adamw"), (0.25, "sgd"), (0.5, "adamw"))
]

# Both sides do the same fp32 operations, but torchft steps with fused multiply-adds and mixes with `lerp`; a difference
# of a rounding of numbers around 1 grows a little over 24 steps.
TOLERANCE = 1e-6


def offsets_of(num_fragments: int, overlap: int, sync_every: int) -> tuple[int, ...]:
    """torchft counts to the application, this project to the send."""
    return tuple((p + 1) * sync_every // num_fragments - overlap for p in range(num_fragments))


# --- what torchft does ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What two torchft learners hold after every step of every case, as "case/step/parameter"."""
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed; it has wheels for Linux on x86-64 only")
    folder = tmp_path_factory.mktemp("torchft")
    # torchft lets environment variables beat arguments.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCHFT")}
    processes: list[subprocess.Popen[str]] = []

    def start(name: str, *arguments: str) -> subprocess.Popen[str]:
        with open(folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, str(PEER), *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            )  # fmt: skip
        processes.append(process)
        return process

    def log_of(name: str) -> str:
        return (folder / f"{name}.log").read_text()[-2000:]

    try:
        lighthouse = start("lighthouse", "lighthouses", str(len(CASES)))
        assert lighthouse.stdout is not None
        addresses = json.loads(lighthouse.stdout.readline() or "null")
        assert addresses is not None, log_of("lighthouse")
        learners = [
            start(
                f"learner-{replica}",
                "learner",
                json.dumps(
                    {"replica": replica, "lighthouses": addresses, "cases": CASES, "out": str(folder / f"{replica}.st")}
                ),
            )
            for replica in range(2)
        ]
        for replica, learner in enumerate(learners):
            assert learner.wait(DEADLINE_S) == 0, log_of(f"learner-{replica}")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [load_file(folder / f"{replica}.st") for replica in range(2)]


# --- what this project does -------------------------------------------------------------------------------------------


def ours(case: Case) -> list[list[dict[str, Tensor]]]:
    per_fragment = 4 // case.num_fragments
    method = diloco.StreamingDiLoCo(
        sync_every=SYNC_EVERY,
        overlap=case.overlap,
        offsets=offsets_of(case.num_fragments, case.overlap, SYNC_EVERY),
        mix=case.mix,
        fragments=diloco.Named(
            [[f"{p * per_fragment + i}.*" for i in range(per_fragment)] for p in range(case.num_fragments)]
        ),
        codec="fp32",
        outer=diloco.Nesterov(lr=OUTER_LR, momentum=OUTER_MOMENTUM),
    )

    def train(index: int, exchange: Exchange) -> list[dict[str, Tensor]]:
        model = make_model()
        inner = make_inner(case.inner, model)
        trajectory = []
        with diloco.Learner(model, inner, method=method, exchange=exchange) as learner:
            for batch in batches(index):
                train_step(model, inner, batch)
                learner.step(tokens=len(batch[0]))
                trajectory.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return trajectory

    return diloco.run_local(train, learners=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "case"),
    list(enumerate(CASES)),
    ids=[f"P={c.num_fragments}-tau={c.overlap}-alpha={c.mix}-{c.inner}" for c in CASES],
)
def test_every_parameter_after_every_step_is_torchfts(theirs: list[dict[str, Tensor]], index: int, case: Case) -> None:
    differences = {
        (learner, step, name): (value - theirs[learner][f"{index}/{step}/{name}"]).abs().max().item()
        for learner, trajectory in enumerate(ours(case))
        for step, parameters in enumerate(trajectory, start=1)
        for name, value in parameters.items()
    }
    assert len(differences) == 2 * STEPS * 8  # both learners, every step, four weights and four biases
    worst = max(differences, key=differences.__getitem__)
    assert differences[worst] <= TOLERANCE, f"learner, step, parameter {worst} is off by {differences[worst]:.2e}"


# --- torchft's published trajectory -----------------------------------------------------------------------------------

GOLDEN = {
    0: (1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59),
    1: (1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47),
}


@pytest.mark.parametrize("overlap", GOLDEN)
def test_golden_trajectory(overlap: int) -> None:
    """torchft's regression test: inner SGD lr 1, a constant gradient of 2, outer SGD lr 2, weights from 1, H = 6, P =
    2."""
    method = diloco.StreamingDiLoCo(
        sync_every=6, overlap=overlap, offsets=offsets_of(2, overlap, 6), mix=0.0, codec="fp32",
        fragments=diloco.Named([["0.*"], ["1.*"]]), outer=diloco.SGD(lr=2.0),
    )  # fmt: skip

    def train(index: int, exchange: Exchange) -> list[float]:
        model = nn.ModuleList(nn.Linear(3, 4, bias=False) for _ in range(2))
        nn.init.ones_(model[0].weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        values = [1.0]
        with diloco.Learner(model, inner, method=method, exchange=exchange) as learner:
            for _ in range(15):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 2.0)
                inner.step()
                learner.step(tokens=1)
                assert model[0].weight.unique().numel() == 1
                values.append(model[0].weight[0, 0].item())
        return values

    for trajectory in diloco.run_local(train, learners=2):
        assert tuple(trajectory) == GOLDEN[overlap]
