"""What rank 0 tells the other ranks of its learner: every event, as JSON and tensors."""

import json

import torch

from diloco.core.global_fragment import GlobalFragment
from diloco.core.update import Update
from diloco.exchange.base import Arrived, Event, Rejoined, StartingState
from diloco.exchange.island.rank_messages import MessageTensor, _in, _out
from diloco.protocol.contribution import Rejection


def test_every_event_crosses_as_plain_values_and_tensors() -> None:
    fragments = tuple(
        GlobalFragment(f, version, torch.rand(5), {"momentum": torch.rand(5), "steps": torch.tensor(3)}, None, f"d{f}")
        for f, version in enumerate((2, 1))
    )
    static = {"b": torch.rand(2, 2), "n": torch.tensor(7)}
    opened = StartingState("site-a", 3, 40, fragments, static, run_tokens=1234)
    update = Update(1, 4, 5, ("site-a", "site-b"), (1.0, 2.5), 0.5, "d1", lossless=False)
    events: list[Event] = [
        Rejoined(opened, "replaced"),
        Rejection(1, 4, "missed"),
        Arrived(update, fragments[1].bare, 3, mean=torch.rand(5)),
    ]
    told: list[MessageTensor] = []
    said = [_out(event, told, None) for event in events]
    tensors = [each.tensor for each in told]
    rejoined, rejected, arrived = (_in(each, tensors) for each in json.loads(json.dumps(said)))
    assert isinstance(rejoined, Rejoined)
    assert (rejoined.reason, rejoined.opened.versions, rejoined.opened.run_tokens) == ("replaced", (2, 1), 1234)
    assert rejoined.opened.fragments[1].theta is fragments[1].theta
    assert rejoined.opened.fragments[1].outer_state["momentum"] is fragments[1].outer_state["momentum"]
    assert rejoined.opened.static["n"] is static["n"]
    assert rejected == events[1]
    assert isinstance(arrived, Arrived)
    assert arrived.update == update
    assert arrived.held.theta is fragments[1].theta
    # Vectors of a fragment are sharded; counters and static tensors go to every rank whole.
    assert [each.fragment for each in told] == [0, 0, None, 1, 1, None, None, None, 1, 1]
