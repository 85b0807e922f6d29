"""The adviser: candidate methods, their ranked estimates, and the run file of one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from diloco.config import parse_config
from diloco.errors import ConfigError
from diloco.planning import scaling_laws
from diloco.planning.run_estimate import AdviceInputs, RunEstimate, cost_usd, estimate_run
from diloco.planning.settings import LAYERS_PER_FRAGMENT, NAMES, Setting, setting_for
from diloco.planning.site import Site
from diloco.planning.units import SIZE
from diloco.planning.workload import Workload
from diloco.tables import write_toml

TRAINING_BYTES = 16
"""Memory per parameter on every accelerator: fp32 weight, gradient and AdamW's two moments. All ranks of a learner hold
the same model."""

ALIKE, ROUNDING = 0.01, 1e-9
"""Relative difference of hours, money or bytes that counts as equal, and its rounding error."""

PenaltyStatus = Literal["allowed", "not allowed", "not known"]
PENALTY_STATUSES: tuple[PenaltyStatus, ...] = get_args(PenaltyStatus)
"""Best first."""

RankBy = Literal["hours", "usd", "bytes"]


def advice_inputs(site: Site) -> AdviceInputs:
    """Return the adviser's inputs from a site file.

    Raises:
        ConfigError: no `[model]` or `[budget]`, a batch that cannot be divided among the learners, or a model that does
            not fit an accelerator.
    """
    workload = site.workload()
    if site.budget is None:
        raise ConfigError("the site file has no training budget; add [budget] with tokens and tokens_per_step")
    needed = TRAINING_BYTES * workload.num_parameters
    for place in site.site:
        if place.memory is not None and place.memory < needed:
            raise ConfigError(
                f"the model does not fit site {place.name}: its {workload.num_parameters:.4g} parameters take "
                f"{SIZE.show(needed)} on every accelerator ({TRAINING_BYTES} bytes each to train) and there are "
                f"{SIZE.show(place.memory)}; take a smaller model, or larger accelerators"
            )
    learners = site.learners()
    sequences = site.budget.tokens_per_step / site.budget.sequence_length
    if sequences % len(learners):
        share = site.budget.sequence_length * len(learners)
        good = max(1, round(site.budget.tokens_per_step / share)) * share
        raise ConfigError(
            f"budget.tokens_per_step = {site.budget.tokens_per_step:.12g} is not the same number of whole sequences of "
            f"{site.budget.sequence_length} tokens for each of {len(learners)} learners; write {good}"
        )
    return AdviceInputs(site, workload, site.budget, learners)


def candidates(workload: Workload) -> Iterator[Setting]:
    """Yield the candidate settings: a grid of H, τ and codecs, with the same codec in both directions."""
    yield setting_for(workload, "data-parallel")
    intervals = (30, 50, 100, 200, 500)
    for every in intervals:
        for codec in ("bf16", "e3m0"):
            yield setting_for(workload, "diloco", sync_every=every, up=codec)
    yield setting_for(workload, "streaming", sync_every=100, overlap=1)
    for every in intervals:
        for tau in (1, 5):
            yield setting_for(workload, "streaming", sync_every=every, overlap=tau, up="e3m0")
    for every in (30, 100):
        yield setting_for(workload, "eager", sync_every=every, num_fragments=1, up="e3m0")
    for every, codec in ((24, "bf16"), (24, "int4"), (96, "int4")):
        yield setting_for(workload, "decoupled", sync_every=every, up=codec)


def advise(inputs: AdviceInputs, by: RankBy = "hours") -> list[RunEstimate]:
    """Return the estimates of all candidates, the best first.

    Candidates with an allowed penalty precede those with a known one, which precede the others. Each group is sorted by
    hours, money or bytes (`by`), where values within one percent are equal, then by penalty, then by bytes.

    Raises:
        ConfigError: ranking by money without any price.
    """
    if by == "usd" and cost_usd(inputs, 1.0, 0.0, 0.0) is None:
        raise ConfigError("the site file has no prices to rank by; add price_per_accelerator_hour to a site")
    estimates = [estimate_run(inputs, setting) for setting in candidates(inputs.workload)]
    groups = ([each for each in estimates if penalty_status(inputs, each) == wanted] for wanted in PENALTY_STATUSES)
    return [estimate for group in groups for estimate in _ordered(group, by)]


def penalty_status(inputs: AdviceInputs, estimate: RunEstimate) -> PenaltyStatus:
    """Return whether the loss penalty is known and within the budget."""
    if estimate.penalty.percent is None:
        return "not known"
    return "allowed" if estimate.penalty.percent <= inputs.budget.loss_penalty_percent else "not allowed"


def _ordered(group: Sequence[RunEstimate], by: RankBy) -> list[RunEstimate]:
    def cost(estimate: RunEstimate) -> float:
        return {"hours": estimate.hours, "usd": estimate.usd or 0.0, "bytes": estimate.total_bytes}[by]

    least = min(map(cost, group), default=0.0)

    def key(estimate: RunEstimate) -> tuple[float, ...]:
        more = cost(estimate) / least if least > 0 else 1.0
        return (
            math.floor(math.log(more) / math.log1p(ALIKE) + ROUNDING),
            round(estimate.penalty.percent or 0.0, 2),
            estimate.total_bytes,
            estimate.hours,
        )

    return sorted(group, key=key)


# --- the run file -----------------------------------------------------------------------------------------------------

WARMUP_STEPS, WARMUP_FRACTION = 1000, 0.05
HEAD_DIM = 64
SYNCER = "syncer.example.org:7700"


def run_file(inputs: AdviceInputs, setting: Setting, name: str = "advised") -> str:
    """Return a run file for `diloco syncer` and `diloco train` with the site file's values; its owner completes data
    and address. Raises ConfigError where it would be invalid."""
    budget, num = inputs.budget, len(inputs.learners)
    head = f"# Advised: {setting.label}; for the learners {', '.join(inputs.site.names)}."
    if setting.method == "data-parallel":
        head += (
            "\n# Data parallel has no syncer: start one rank for each learner as torchrun … -m diloco train … "
            "--collective."
        )
    warmup_steps = min(WARMUP_STEPS, int(WARMUP_FRACTION * math.ceil(inputs.num_steps)))
    parts = [
        (head, {"run": {"name": name, "tokens": round(budget.tokens), "learners": num}}),
        _model(inputs),
        (
            "# Say what to train on; docs/run-file.md lists the kinds.",
            {"data": {"kind": "stdlib", "sequence_length": budget.sequence_length}},
        ),
        ("", {"train": {"global_batch": round(budget.tokens_per_step / budget.sequence_length)}}),
        ("", {"schedule": {"warmup_steps": warmup_steps}}),
        *_inner(inputs, setting),
        ("", {"method": method_table(setting)}),
        (
            "# The address that learners dial. Keys: `diloco keys init` and `diloco keys add`.",
            {"syncer": {"address": SYNCER}},
        ),
    ]
    text = "\n".join(note + "\n" * bool(note) + write_toml(table) for note, table in parts)
    parse_config(text, source="the advised run file")
    return text


def method_table(setting: Setting) -> dict[str, Any]:
    """Return the `[method]` table of a candidate."""
    table: dict[str, Any] = {"preset": NAMES[setting.method][1]}
    if setting.method != "data-parallel":
        table["sync_every"] = setting.sync_every
    if setting.method == "streaming":
        table["overlap"] = setting.overlap
    table["codec"] = setting.up
    if setting.method == "streaming":
        table["fragments"] = {"type": "ByLayer", "layers": LAYERS_PER_FRAGMENT, "pattern": "strided"}
    if setting.method == "decoupled":
        table["fragments"] = {"type": "Balanced", "num_fragments": setting.num_fragments}
    return table


def _model(inputs: AdviceInputs) -> tuple[str, dict[str, Any]]:
    """Return a note and the `[model]` table."""
    table = inputs.site.model
    if table is not None and table.config is not None:
        return "", {"model": {"config": str(table.config)}}
    workload = inputs.workload
    heads = max(1, round(math.sqrt(workload.num_parameters / (12 * workload.num_layers)) / HEAD_DIM))
    settings = {
        "type": "llama",
        "hidden_size": HEAD_DIM * heads,
        "intermediate_size": 8 * HEAD_DIM * heads // 3,
        "num_hidden_layers": workload.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    size = f"{workload.num_parameters:.3g}"
    note = f"# A decoder of about {size} parameters besides its embeddings; put your own model here."
    return note, {"model": settings}


def _inner(inputs: AdviceInputs, setting: Setting) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a note and the `[inner]` table with the fitted learning rate, within the range of the fit."""
    num_parameters, num = inputs.workload.num_parameters, len(inputs.learners)
    low, high = scaling_laws.PARAMETERS
    if low <= num_parameters <= high and num <= max(scaling_laws.LEARNERS):
        law = scaling_laws.LAWS["data_parallel_lr" if setting.method == "data-parallel" else "inner_lr"]
        note = "# The peak that arXiv 2503.09799 fits to models of this size."
        yield note, {"inner": {"lr": float(f"{law(num_parameters, num):.2g}")}}
