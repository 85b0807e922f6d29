"""Why a link comes to what it comes to, in sentences with their numbers."""

from __future__ import annotations

import math

from diloco.planning.graph import costs_of, has_closed_form, pattern_of
from diloco.planning.question import Around, Graph, Question
from diloco.planning.settings import Setting
from diloco.planning.star import exchange_of
from diloco.planning.units import RATE, SIZE, TIME
from diloco.planning.wire import wire_format
from diloco.planning.workload import Workload


def why(question: Question, bit_per_s: float) -> list[str]:
    """Sentences on what a period of H steps computes and sends, and what it waits for on a link of `bit_per_s`."""
    if isinstance(question, Graph):
        step_s = costs_of(question.workload, question.setting, bit_per_s).step_s
        return [*_period(question.workload, question.setting, step_s), *_graph(question, bit_per_s)]
    return [*_period(question.workload, question.setting, question.workload.step_s), *_around(question, bit_per_s)]


def _period(workload: Workload, setting: Setting, step_s: float) -> list[str]:
    every, num_fragments, tau = setting.sync_every, setting.num_fragments, setting.overlap
    codec = wire_format(setting.up)
    least = RATE.show(workload.num_parameters * codec.bits_per_value / (every * step_s))
    sends = (
        "the whole model at once"
        if num_fragments == 1
        else f"{num_fragments} fragments, one every {every / num_fragments:.3g} steps"
        if num_fragments <= every
        else f"{num_fragments} fragments, {num_fragments / every:.3g} after a step in the mean"
    )
    sentences = [
        f"H = {every} steps compute for {TIME.show(every * step_s)}.",
        (
            f"Meanwhile {workload.num_parameters:,.0f} values of {codec.bits_per_value:g} bits ({setting.up}) are "
            f"sent: {sends}. "
            f"Carried without a pause that is {least}, the least that any overlap could do with."
        ),
    ]
    if setting.method == "decoupled":
        sentences.append("Nobody waits: a link that is too narrow makes H longer and answers older.")
    elif tau:
        slack = TIME.show(tau * step_s)
        sentences.append(
            f"With τ = {tau} a send may take {tau} inner step{'s' * (tau > 1)}, {slack}, before its answer is waited "
            "for."
        )
    else:
        sentences.append("With τ = 0 every send is waited for at once.")
    return sentences


def _graph(question: Graph, bit_per_s: float) -> list[str]:
    setting, num_layers = question.setting, question.workload.num_layers
    costs = costs_of(question.workload, setting, bit_per_s)
    compute_s, used = setting.sync_every * costs.step_s, question.value(bit_per_s)
    found = (
        "in closed form"
        if has_closed_form(pattern_of(num_layers, setting))
        else "by running the graph until it is periodic"
    )
    nodes = (
        f"A step is {3 * num_layers - 1} nodes of {TIME.show(costs.node_s)}; a layer is sent as soon as its gradient "
        "is there."
    )
    sentences = [nodes]
    if setting.down is not None:
        sentences.append(
            f"It comes back as {setting.down} on the other direction of the link, {TIME.show(costs.down_s)} a layer."
        )
    if setting.latency_s:
        sentences.append(f"Latency adds {TIME.show((1 if setting.down is None else 2) * setting.latency_s)} to each.")
    pace = "On a link without limit" if math.isinf(bit_per_s) else f"At {RATE.show(bit_per_s)}"
    sentences.append(
        f"{pace} a layer takes {TIME.show(costs.up_s)} on the link and the period {TIME.show(compute_s / used)}, "
        f"{TIME.show(compute_s / used - compute_s)} of it waiting: {100 * used:.4g} % ({found})."
    )
    return sentences


def _around(question: Around, bit_per_s: float) -> list[str]:
    learners, setting = question.learners, question.setting
    exchange = exchange_of(question.workload, setting, learners.merging)
    num, up, down = len(learners.speeds), max(exchange.up_bytes), max(exchange.down_bytes)
    share = min(bit_per_s, learners.syncer_bit_per_s / num)
    merge_s = exchange.merging.seconds(num * up)
    answer_s = 8 * (up + down) / share + 4 * setting.latency_s + merge_s
    pace = "on links without limit" if math.isinf(share) else f"at {RATE.show(share)}"
    sentences = [
        (f"A fragment is {SIZE.show(up)} up and {SIZE.show(down)} down; {pace} for each of {num} learners, and with "
         f"{TIME.show(merge_s)} for the merge and {TIME.show(4 * setting.latency_s)} of latency (up, notice, request, "
         "down), its answer "
         f"comes after {TIME.show(answer_s)} if nothing is before it."),
    ]  # fmt: skip
    found = question.predict(bit_per_s)
    if setting.method == "decoupled":
        late = "for ever" if math.isinf(found.stale_steps) else f"{found.stale_steps:.3g} steps"
        sentences.append(
            f"Run in virtual time, a fragment is merged every {found.period_steps:.4g} steps and an answer is {late} "
            "old."
        )
    else:
        each = ", ".join(f"{100 * value:.4g} %" for value in sorted(set(found.utilization)))
        sentences.append(f"Run in virtual time until it is periodic, the learners compute {each} of the time.")
    return sentences
