"""A run by its preset's defaults takes any model, cuts it alike for all learners, and says how."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.docs.blocks import ROOT, blocks_of
from tests.processes import ForkedSyncer
from tests.syncer.runs import RUN, start
from torch import nn

import diloco
from diloco.core.fragments import Layout
from diloco.errors import ConfigError
from diloco.event_log import read_events
from diloco.events import Initialised
from diloco.exchange.dialling import fetch_status

CUT = "4 fragments: Balanced(num_fragments=4), as its tensors' names hold no list of layers"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 4)
        self.rnn = nn.GRU(4, 8, batch_first=True)
        self.head = nn.Linear(8, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def learn(address: str, name: str, *, initialise: bool, budget: int) -> Layout:
    generator = torch.Generator().manual_seed(len(name))
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exchange = diloco.connect(address, run="demo", learner=name, initialise=initialise)
    with diloco.Learner(model, optimizer, exchange=exchange) as learner:
        while learner.run_tokens < budget:
            tokens = torch.randint(17, (2, 9), generator=generator)
            nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=16)
        learner.finish()
        return learner.layout


def test_a_gru_is_trained_by_the_readmes_run_file(tmp_path: Path) -> None:
    budget = 2 * 16 * 30
    text = next(
        block.text for block in blocks_of((ROOT / "README.md").read_text(), "README.md") if block.language == "toml"
    )
    for pattern, by in (
        (r"\ntokens = .*", f"\ntokens = {budget}"),  # fewer than the steps of the trainer's warm-up
        (r"\nlearners = 2", "\nlearners = 3"),  # which do not share the trainer's batch of 16
        (r"\nkeys = .*", ""),
        (r"(\npreset = .*)", r"\1\nsync_every = 10"),
    ):
        text, number = re.subn(pattern, by, text)
        assert number == 1
    syncer = ForkedSyncer(tmp_path, text)
    try:
        with ThreadPoolExecutor(2) as pool:
            learners = [
                pool.submit(learn, syncer.address, name, initialise=name == "paris", budget=budget)
                for name in ("paris", "oslo")
            ]
            paris, oslo = (learner.result() for learner in learners)
        assert paris == oslo
        assert len(paris.fragments) == 4
        assert fetch_status(syncer.address, run="demo")["cut"] == CUT
        log = (tmp_path / "syncer.log").read_text()
        assert len(re.findall(f"initialised by paris .* parameters in {re.escape(CUT)}\n", log)) == 1
        events = read_events(tmp_path / "state" / "events.jsonl")
        assert [event.cut for event in events if isinstance(event, Initialised)] == [CUT]
        syncer.kill()
        syncer.start()
        assert fetch_status(syncer.address, run="demo")["cut"] == CUT
    finally:
        syncer.kill()


@pytest.mark.parametrize("given", [False, True])
def test_a_model_that_the_method_cannot_cut_is_one_sentence_with_what_to_set(given: bool, tmp_path: Path) -> None:
    method = diloco.DecoupledDiLoCo()
    refused = r"Balanced\(24\) is more fragments than the 7 trainable tensors of the model; "
    table = r'\[method\] fragments = { type = "Balanced", num_fragments = 7 }'
    advice = rf"set {table} in the run file, before the run has a model, or fragments=diloco.Balanced\(7\)\.$"
    with start(tmp_path, method) as syncer:
        exchange = diloco.connect(syncer.address, run=RUN, learner="paris", initialise=True)
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with closing(exchange), pytest.raises(ConfigError, match=refused + advice):
            diloco.Learner(model, optimizer, exchange=exchange, method=method if given else None)
