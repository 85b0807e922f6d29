"""An image classifier on handwritten digits: `diloco` takes anything with parameters.

    python examples/digits/train.py              four learners in one process, beside the two controls; half a minute
    python examples/digits/train.py --syncer     four processes and a syncer; the same model, to the bit; a minute

The digits come with scikit-learn (1,797 images of 8 x 8 pixels), so nothing is downloaded.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import diloco
from diloco.exchange.base import Exchange

LEARNERS = 4
BATCH = 16  # images per learner and step
SYNC_EVERY = 20  # steps
METHOD = diloco.DiLoCo(
    sync_every=SYNC_EVERY,
    outer=diloco.Nesterov(lr=0.7, momentum=0.5),
    codec="e3m0",  # 4 bits each way
    quorum=diloco.AllLive(at_least=LEARNERS),  # a run of fixed membership: over a syncer, begin when all are there
)


class Classifier(nn.Sequential):
    """Two convolutions and a linear layer, 10,026 parameters. GroupNorm has no running statistics that learners could
    disagree on."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.GroupNorm(4, 16),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU(), nn.GroupNorm(4, 32),
            nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) in 0..1 with their classes, in one of two divisions of the training part over the
    learners."""

    images: Tensor
    classes: Tensor
    shards: list[Tensor]  # indices into the training part, one vector per learner
    judged: Tensor  # indices of what a model is judged by

    def batch(self, shard: int, generator: torch.Generator) -> Tensor:
        """Indices of a learner's next images."""
        own = self.shards[shard]
        return own[torch.randint(len(own), (BATCH,), generator=generator)]


def digits(division: str, split: str) -> Digits:
    """`division`: "mixed" shards are alike; with "by class" a learner sees two or three of the ten digits only."""
    data = load_digits()
    classes = torch.tensor(data.target)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    training, validation, test = order[:1200], order[1200:1400], order[1400:]
    if division == "by class":
        training = training[torch.argsort(classes[training], stable=True)]
        shards = list(training.chunk(LEARNERS))
    else:
        shards = [training[first::LEARNERS] for first in range(LEARNERS)]
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return Digits(images, classes, shards, test if split == "test" else validation)


@dataclass(frozen=True)
class Worth:
    """What a model is worth on images that it has not seen."""

    loss: float
    accuracy: float


def judge(state: dict[str, Tensor], data: Digits) -> Worth:
    model = Classifier()
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model(data.images[data.judged])
    classes = data.classes[data.judged]
    return Worth(float(F.cross_entropy(logits, classes)), float((logits.argmax(1) == classes).float().mean()))


def train(
    index: int, exchange: Exchange | None, data: Digits, seed: int, steps: int, shards: list[int]
) -> dict[str, Tensor]:
    """One learner's life: steps on batches of its shards; returns the global model. Without an exchange it is on its
    own."""
    torch.manual_seed(seed)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    learner = None if exchange is None else diloco.Learner(model, optimizer, method=METHOD, exchange=exchange)
    generators = {shard: torch.Generator().manual_seed(1000 * seed + shard) for shard in shards}
    for _ in range(steps):
        batch = torch.cat([data.batch(shard, generators[shard]) for shard in shards])
        F.cross_entropy(model(data.images[batch]), data.classes[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if learner is not None:
            learner.step(tokens=len(batch))
    if learner is None:
        return dict(model.state_dict())
    learner.finish(ends_run=True)  # all of them end after as many steps
    state = learner.global_state_dict()
    learner.close()
    return state


def in_process(data: Digits, seed: int, steps: int) -> dict[str, Tensor]:
    """All learners in this process; their global model."""
    return diloco.run_local(lambda i, exchange: train(i, exchange, data, seed, steps, [i]), learners=LEARNERS)[0]


def over_a_syncer(division: str, seed: int, steps: int) -> dict[str, Tensor]:
    """A syncer here, and every learner a process of its own that dials it. Elsewhere: `diloco syncer`, and the same
    learners."""
    from diloco.following.follower import newest_model
    from diloco.syncer.server import Options, Syncer

    with (
        tempfile.TemporaryDirectory() as directory,
        Syncer("digits", METHOD, Options("127.0.0.1:0", Path(directory))) as syncer,
    ):
        common = ["--address", syncer.address, "--division", division, "--steps", str(steps)]
        learners = [
            subprocess.Popen([sys.executable, __file__, "--learner", str(index), "--seed", str(seed), *common])
            for index in range(LEARNERS)
        ]
        codes = [learner.wait() for learner in learners]
        if any(codes):
            raise SystemExit(f"a learner failed (exit codes {codes})")
        return newest_model(syncer.address, run="digits").state_dict()


def dial(index: int, address: str, keys: Path | None = None) -> Exchange:
    """What a learner process does to take part; the first one gives the run its model."""
    return diloco.connect(address, run="digits", learner=f"learner-{index}", keys=keys, initialise="if-empty")


def sent_bytes(steps: int) -> tuple[int, int]:
    """What one learner sends in a run, with this method and with data parallel (a ring all-reduce of bf16
    gradients)."""
    num_parameters = sum(p.numel() for p in Classifier().parameters())
    own = METHOD.up.encoded_bytes(num_parameters) * (steps // SYNC_EVERY)
    return own, steps * 2 * num_parameters * 2 * (LEARNERS - 1) // LEARNERS


def row(name: str, worths: list[Worth], num_bytes: int) -> str:
    losses, accuracies = [worth.loss for worth in worths], [100 * worth.accuracy for worth in worths]
    spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"  {name:<34}{mean(losses):.3f}{spread:<9}  {mean(accuracies):5.1f} %   {num_bytes:>10,}"


def compare(division: str, split: str, seeds: range, steps: int) -> dict[str, list[Worth]]:
    """The global model beside what a learner reaches alone, and what all reach when they exchange every gradient."""
    data = digits(division, split)
    own, every = sent_bytes(steps)
    all_shards = list(range(LEARNERS))
    arms = {
        "DiLoCo, the global model": [judge(in_process(data, seed, steps), data) for seed in seeds],
        "a learner on its own": [judge(train(0, None, data, seed, steps, [0]), data) for seed in seeds],
        "data parallel": [judge(train(0, None, data, seed, steps, all_shards), data) for seed in seeds],
    }
    print(f"\nshards {division}; {LEARNERS} learners, {steps} steps of {BATCH} images each, {len(seeds)} seed(s)")
    print(f"  {'':<34}{'loss':<14}  accuracy   bytes sent by a learner")
    for (name, worths), num_bytes in zip(arms.items(), (own, 0, every), strict=True):
        print(row(name, worths, num_bytes))
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many runs of each arm")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--split", choices=("test", "validation"), default="test", help="validation: to choose settings on"
    )
    parser.add_argument(
        "--syncer", action="store_true", help="learners are processes; compare their model with the local run's"
    )
    parser.add_argument("--learner", type=int, help="be this learner, at --address")
    parser.add_argument("--address", help="of the syncer")
    parser.add_argument("--keys", type=Path, help="this learner's keys, where the syncer is on another machine")
    parser.add_argument("--division", choices=("mixed", "by class"), default="mixed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # such small tensors gain nothing from more
    if arguments.learner is not None:
        data, index = digits(arguments.division, arguments.split), arguments.learner
        exchange = dial(index, arguments.address, arguments.keys)
        train(index, exchange, data, arguments.seed, arguments.steps, [index])
    elif arguments.syncer:
        data = digits(arguments.division, arguments.split)
        served = over_a_syncer(arguments.division, arguments.seed, arguments.steps)
        local = in_process(data, arguments.seed, arguments.steps)
        worth = judge(served, data)
        same = all(torch.equal(value, local[name]) for name, value in served.items())
        print(
            f"over a syncer: loss {worth.loss:.3f}, accuracy {worth.accuracy:.1%}; the bits of the local run: "
            f"{'yes' if same else 'no'}"
        )
    else:
        for division in ("mixed", "by class"):
            compare(division, arguments.split, range(arguments.seeds), arguments.steps)


if __name__ == "__main__":
    main()
