"""The run file of an advised method: what the site file says filled in, what only its owner knows left as comments."""

from __future__ import annotations

import math
from typing import Any

from diloco.config import parse_config
from diloco.planning import scaling_laws
from diloco.planning.candidates import Candidate
from diloco.planning.outcomes import Case
from diloco.tables import write_toml

WARMUP_STEPS, WARMUP_FRACTION = 1000, 0.05
HEAD_DIM = 64
SYNCER = "syncer.example.org:7700"


def run_file(case: Case, candidate: Candidate, name: str = "advised") -> str:
    """The text of a run file for `diloco syncer` and `diloco train`. Raises ConfigError where it would not be valid."""
    budget, num = case.budget, len(case.learners)
    steps = math.ceil(budget.tokens / budget.tokens_per_step)
    head = f"# Advised: {candidate.title}, {candidate.detail}; for the learners {', '.join(case.site.names)}.\n"
    if candidate.setting.method == "data-parallel":
        head += (
            "# Data parallel has no syncer: start one rank for each learner as torchrun … -m diloco train … "
            "--collective.\n"
        )
    parts = [
        head + write_toml({"run": {"name": name, "tokens": round(budget.tokens), "learners": num}}),
        _model(case),
        "# Say what to train on; docs/run-file.md lists the kinds.\n"
        + write_toml({"data": {"kind": "stdlib", "sequence_length": budget.sequence_length}}),
        write_toml({"train": {"global_batch": round(budget.tokens_per_step / budget.sequence_length)}}),
        write_toml({"schedule": {"warmup_steps": min(WARMUP_STEPS, int(WARMUP_FRACTION * steps))}}),
        *_inner(case, candidate),
        write_toml({"method": candidate.table}),
        "# What learners dial. Certificates and tokens: `diloco keys init` and `diloco keys add`.\n"
        + write_toml({"syncer": {"address": SYNCER}}),
    ]
    text = "\n".join(parts)
    parse_config(text, source="the advised run file")
    return text


def _model(case: Case) -> str:
    table = case.site.model
    if table is not None and table.config is not None:
        return write_toml({"model": {"config": str(table.config)}})
    workload = case.workload
    width = HEAD_DIM * max(1, round(math.sqrt(workload.num_parameters / (12 * workload.num_layers)) / HEAD_DIM))
    settings: dict[str, Any] = {
        "type": "llama",
        "hidden_size": width,
        "intermediate_size": 8 * width // 3,
        "num_hidden_layers": workload.num_layers,
        "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": width // HEAD_DIM,
    }
    note = (
        f"# A decoder of about {workload.num_parameters:.3g} parameters besides its embeddings; put your own model "
        "here.\n"
    )
    return note + write_toml({"model": settings})


def _inner(case: Case, candidate: Candidate) -> list[str]:
    """The fitted learning rate, within the range of the fit."""
    num_parameters, num = case.workload.num_parameters, len(case.learners)
    low, high = scaling_laws.PARAMETERS
    if not low <= num_parameters <= high or num > max(scaling_laws.LEARNERS):
        return []
    alone = candidate.setting.method == "data-parallel"
    lr = scaling_laws.DATA_PARALLEL_LR(num_parameters) if alone else scaling_laws.INNER_LR(num_parameters, num)
    note = "# The peak that arXiv 2503.09799 fits to models of this size.\n"
    return [note + write_toml({"inner": {"lr": float(f"{lr:.2g}")}})]
