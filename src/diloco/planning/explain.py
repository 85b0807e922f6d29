"""Why a method needs the bandwidth that it needs, in sentences with their numbers."""

from __future__ import annotations

from diloco.planning.models import Workload
from diloco.planning.settings import Setting
from diloco.planning.units import RATE, TIME
from diloco.planning.utilization import costs_of, has_closed_form, pattern_of, utilization
from diloco.planning.wire import wire_format


def why(workload: Workload, setting: Setting, bit_per_s: float) -> list[str]:
    """Sentences on what a period of H steps computes and sends, and what it waits for on a link of `bit_per_s`."""
    costs = costs_of(workload, setting, bit_per_s)
    pattern = pattern_of(workload.num_layers, setting)
    every, num_fragments, tau = setting.sync_every, setting.num_fragments, setting.overlap
    compute_s = every * costs.step_s
    codec = wire_format(setting.up)
    period_bits = workload.num_parameters * codec.bits_per_value
    used = utilization(workload, setting, bit_per_s)
    sends = (
        "the whole model at once"
        if num_fragments == 1
        else f"{num_fragments} fragments, one every {every / num_fragments:.3g} steps"
    )
    slack = (
        "every send is waited for before the next forward pass reaches its layers"
        if tau == 0
        else f"a send may take {tau} inner step{'s' * (tau > 1)}, {TIME.show(tau * costs.step_s)}, before its answer is waited for"
    )
    found = "from the closed form" if has_closed_form(pattern) else "by running the graph until it is periodic"
    sentences = [
        f"H = {every} steps compute for {TIME.show(compute_s)}, {3 * workload.num_layers - 1} nodes of {TIME.show(costs.node_s)} each.",
        (f"In that time {workload.num_parameters:.4g} values of {codec.bits_per_value:g} bits ({setting.up}) are sent: "
         f"{sends}. Carried without a pause that is {RATE.show(period_bits / compute_s)}, the least that any overlap could do with."),
        f"With τ = {tau} {slack}.",
        (f"At {RATE.show(bit_per_s)} a layer takes {TIME.show(costs.up_s)} on the link and the period {TIME.show(compute_s / used)}, "
         f"{TIME.show(compute_s / used - compute_s)} of it waiting: {100 * used:.4g} % ({found})."),
    ]  # fmt: skip
    if setting.down is not None:
        sentences.insert(
            2, f"The answer comes back as {setting.down} on the other direction, {TIME.show(costs.down_s)} a layer."
        )
    if setting.latency_s:
        passes = 1 if setting.down is None else 2
        sentences.insert(-1, f"Latency adds {TIME.show(passes * setting.latency_s)} to each reduction.")
    return sentences
