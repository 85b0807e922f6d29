"""Bytes of a mixture's islands as the planner counts them are those that cross a real wire."""

import copy
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.syncer.runs import RUN, LearnerThreads, start
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

import diloco
from diloco.core.fragments import Experts, Whole
from diloco.core.quorum import AllLive
from diloco.exchange.base import Exchange
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.planning.exchange_plan import exchange_of
from diloco.planning.settings import ExpertSetting, setting_for
from diloco.planning.workload import load_workload

CONFIG = MixtralConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
EVERY, INTERVALS = 2, 4


@pytest.mark.parametrize("part", [{"trained": 2}, {"held": 0.5}], ids=["trained", "held"])
def test_an_island_sends_the_experts_of_its_part(tmp_path: Path, part: dict[str, Any]) -> None:
    """One that trains a part receives all; one that holds a part receives no others."""
    CONFIG.save_pretrained(tmp_path)
    workload = load_workload(str(tmp_path / "config.json"), step_s=1.0)
    experts = ExpertSetting(groups=4, every=2, codec="e3m0", **part)
    setting = setting_for(workload, "diloco", sync_every=EVERY, up="bf16", down="fp32", experts=experts)
    exchange = exchange_of(workload, setting)
    up, down = (INTERVALS * exchange.per_interval(each) for each in (exchange.up_bytes, exchange.down_bytes))
    fragments = Experts(groups=4, trunk=Whole(), every=2, up="e3m0", down="e3m0")
    method = replace(
        diloco.DiLoCo(sync_every=EVERY, fragments=fragments, quorum=AllLive(at_least=2)),
        up=diloco.BF16(), down=diloco.FP32(),
    )  # fmt: skip

    def life(own: str, exchange: Exchange) -> dict[str, int]:
        torch.manual_seed(0)
        model, given = MixtralForCausalLM(CONFIG), dict[str, Any](trains_experts=own)
        if "held" in part:
            config = copy.deepcopy(CONFIG)
            config.num_local_experts = 2
            given = {"holds_experts": f"{own} of 4", "whole": model}
            model = MixtralForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters())
        with diloco.Learner(model, optimizer, exchange=exchange, **given) as learner:
            for _ in range(EVERY * INTERVALS):
                tokens = torch.randint(CONFIG.vocab_size, (2, 9))
                F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=16)
            counted: dict[str, int] = learner.metrics()["num_bytes"]
            return counted

    with start(tmp_path, method) as syncer, LearnerThreads(2) as threads:
        parts = {"amsterdam": "0-1", "basel": "2-3"}
        islands = [
            threads.submit(life, own, threads.connect(syncer.address, learner=name, initialise="if-empty"))
            for name, own in parts.items()
        ]
        counted = [island.result(timeout=300) for island in islands]
        with closing(Connection(syncer.address)) as connection:
            reply = connection.call("control", "Status", pb.StatusRequest(run=RUN), pb.StatusReply)
        wire = json.loads(reply.status)["num_bytes"]
    for name, island in zip(parts, counted, strict=True):
        assert island["contributions"] == up
        assert island["updates"] == down
        assert up <= wire[name]["contributions"]["received"]
        assert down <= wire[name]["updates"]["sent"]
