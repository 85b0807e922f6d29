"""A learner that says how many tokens an inner step of it has at most is held to that."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.syncer.runs import RUN, Net, Raw, layout, method, start, status_of, versions_of

import diloco
from diloco import events
from diloco.errors import ConfigError, PayloadError
from diloco.event_log import read_events
from diloco.exchange.dialling import fetch_status
from diloco.syncer.server import Syncer

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))
SAID = r"'liar' reports \d+ tokens in \d+ inner steps, but declared at most 5 a step when it joined"


def ledgers(syncer: Syncer) -> list[dict[str, Any]]:
    syncer.driver.drain()
    return [fragment["ledger"] for fragment in status_of(syncer)["fragments"]]


@pytest.mark.parametrize(
    "lie",
    [
        lambda it: it.beat(3, 16),
        lambda it: it.beat(3, 15, earlier_tokens=10**12),
        lambda it: it.push(ONES, tokens=11, steps=2, trained=15, step=3),
        lambda it: it.push(ONES, tokens=10, steps=2, trained=16, step=3),
        lambda it: it.leave(10**12),
    ],
    ids=["heartbeat", "earlier incarnations", "work", "trained", "goodbye"],
)
def test_more_tokens_than_the_declared_step_has_are_refused(lie: Callable[[Raw], Any], tmp_path: Path) -> None:
    """To that learner, on the record; the others go on. A syncer that was started again knows what was said."""
    with start(tmp_path, method(at_least=2)) as syncer:
        honest, liar = Raw(syncer.address, "honest"), Raw(syncer.address, "liar")
        with closing(honest.connection), closing(liar.connection):
            honest.initialise()
            honest.join()
            liar.join(tokens_per_step=5)
            liar.beat(2, 10)
            assert status_of(syncer)["learners"]["liar"]["tokens_per_step"] == 5
            assert status_of(syncer)["learners"]["honest"]["tokens_per_step"] is None
            before = ledgers(syncer)
            with pytest.raises(PayloadError, match=SAID):
                lie(liar)
            assert ledgers(syncer) == before
    log = read_events(tmp_path / "state" / "events.jsonl")
    [refused] = [each for each in log if isinstance(each, events.Refused)]
    assert refused.reason == "PayloadError"
    assert re.search(SAID, refused.text)
    with start(tmp_path, method(at_least=2)) as syncer:
        for raw in (honest, liar):
            raw.connection = Raw(syncer.address).connection
        with closing(honest.connection), closing(liar.connection):
            for raw in (honest, liar):
                raw.beat(2, 10)
            with pytest.raises(PayloadError, match=SAID):
                lie(liar)
            for raw in (honest, liar):
                assert raw.push(ONES, tokens=10, steps=2, trained=10, step=4)
            syncer.driver.drain()
            assert versions_of(syncer)[0] == 1
            assert ledgers(syncer)[0]["merged"] == 20


def test_a_learner_declares_its_step_when_it_connects(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = diloco.connect(syncer.address, run=RUN, learner="a", initialise=True, tokens_per_step=5)
        with diloco.Learner(model, optimizer, exchange=exchange) as learner:

            def steps(num: int, tokens: int) -> None:
                for _ in range(num):
                    model(torch.ones(1, 4)).sum().backward()
                    optimizer.step()
                    learner.step(tokens=tokens)

            steps(8, tokens=5)
            assert fetch_status(syncer.address, run=RUN)["learners"]["a"]["tokens_per_step"] == 5  # type: ignore[index]
            with pytest.raises(PayloadError, match="declared at most 5 a step when it joined"):
                steps(10_000, tokens=50)
        assert all(ledger["merged"] + ledger["pending"] <= 40 for ledger in ledgers(syncer))


@pytest.mark.parametrize("given", [0, -1, 1.5, True])
def test_a_step_size_is_a_whole_number(given: Any) -> None:
    with pytest.raises(ConfigError, match="tokens_per_step must be a whole number of at least 1"):
        diloco.connect("127.0.0.1:1", run=RUN, tokens_per_step=given)


def test_a_step_size_beyond_any_training_is_refused(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address)
        with closing(raw.connection):
            raw.initialise()
            with pytest.raises(PayloadError, match="tokens in an inner step"):
                raw.join(tokens_per_step=2**63)
