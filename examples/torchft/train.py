"""Learners over torchft's elastic process group: kill one, see the other go on, start it again. Each command in a
terminal of its own.

    torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1 --join_timeout_ms 1000
    python examples/torchft/train.py a
    python examples/torchft/train.py b

`docs/integrations.md` says what happens, and what to set on several machines.
"""

import argparse
import time

import torch
from torch import nn

import diloco
from diloco.exchange.torchft import TorchFT

METHOD = diloco.StreamingDiLoCo(sync_every=20, overlap=2, mix=0.0, fragments=diloco.Balanced(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replica", help="this learner's name: unique, and the same after a restart")
    parser.add_argument("--lighthouse", default="http://127.0.0.1:29510")
    parser.add_argument("--host", default="127.0.0.1", help="where the other learners reach this machine")
    parser.add_argument("--steps", type=int, default=2000, help="of the run; default %(default)s")
    chosen = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exchange = TorchFT(chosen.replica, lighthouse=chosen.lighthouse, host=chosen.host)
    with diloco.Learner(model, optimizer, method=METHOD, exchange=exchange) as learner:
        say(chosen.replica, f"takes part from step {learner.steps}, with versions {learner.versions}")
        data = torch.Generator().manual_seed(sum(chosen.replica.encode()) + learner.steps)  # its own, and not again
        while learner.steps < chosen.steps:
            x = torch.randn(256, 64, generator=data)
            loss = (model(x) - teacher(x).detach()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(x))
            if learner.steps % 100 == 0:
                say(
                    chosen.replica,
                    f"step {learner.steps}, loss {loss.item():.4f}, learners: {exchange.overview.num_live}",
                )
    say(chosen.replica, f"done; blocked for {learner.metrics()['blocked_s']:.1f} s")


def say(replica: str, what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {replica}: {what}", flush=True)


if __name__ == "__main__":
    main()
