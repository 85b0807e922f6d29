"""Explanations of a link's value, in sentences with their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from diloco.core.codecs.formats import wire_format
from diloco.planning.graph import costs_of, has_closed_form, pattern_of
from diloco.planning.question import Around, Graph, Question
from diloco.planning.star import exchange_of
from diloco.planning.units import RATE, SIZE, TIME


def why(question: Question, bit_per_s: float) -> list[str]:
    """Sentences on what a period of H steps computes and sends, and what it waits for on a link of `bit_per_s`."""
    if isinstance(question, Graph):
        step_s = costs_of(question.workload, question.setting, bit_per_s).step_s
        return [*_period(question, step_s), *_graph(question, bit_per_s)]
    return [*_period(question, question.workload.step_s), *_around(question, bit_per_s)]


def _period(question: Question, step_s: float) -> Iterator[str]:
    setting, num_parameters = question.setting, question.workload.num_parameters
    every, num_fragments, tau = setting.sync_every, setting.num_fragments, setting.overlap
    bits = wire_format(setting.up).bits_per_value
    if num_fragments == 1:
        sends = "the whole model at once"
    elif num_fragments <= every:
        sends = f"{num_fragments} fragments, one every {every / num_fragments:.3g} steps"
    else:
        sends = f"{num_fragments} fragments, {num_fragments / every:.3g} after a step in the mean"
    least = RATE.show(num_parameters * bits / (every * step_s))
    yield f"H = {every} steps compute for {TIME.show(every * step_s)}."
    yield (
        f"Meanwhile {num_parameters:,.0f} values of {bits:g} bits ({setting.up}) are sent: {sends}. "
        f"Carried without a pause that is {least}, the least that any overlap could do with."
    )
    if setting.method == "decoupled":
        yield "Learners never wait: a link that is too narrow makes H longer and answers older."
    elif tau:
        send = f"{tau} inner step{'s' * (tau > 1)}, {TIME.show(tau * step_s)}"
        yield f"With τ = {tau} a send may take {send}, before its answer is waited for."
    else:
        yield "With τ = 0 every send is waited for at once."


def _graph(question: Graph, bit_per_s: float) -> Iterator[str]:
    setting, num_layers = question.setting, question.workload.num_layers
    costs = costs_of(question.workload, setting, bit_per_s)
    compute_s, used = setting.sync_every * costs.step_s, question.value(bit_per_s)
    nodes = f"{3 * num_layers - 1} nodes of {TIME.show(costs.node_s)}"
    yield f"A step is {nodes}; a layer is sent as soon as its gradient is there."
    if setting.down is not None:
        down = TIME.show(costs.down_s)
        yield f"It comes back as {setting.down} on the other direction of the link, {down} a layer."
    if setting.latency_s:
        yield f"Latency adds {TIME.show((1 if setting.down is None else 2) * setting.latency_s)} to each."
    link = "On a link without limit" if math.isinf(bit_per_s) else f"At {RATE.show(bit_per_s)}"
    is_exact = has_closed_form(pattern_of(num_layers, setting))
    found = "in closed form" if is_exact else "by running the graph until it is periodic"
    yield (
        f"{link} a layer takes {TIME.show(costs.up_s)} on the link and the period {TIME.show(compute_s / used)}, "
        f"{TIME.show(compute_s / used - compute_s)} of it waiting: {100 * used:.4g} % ({found})."
    )


def _around(question: Around, bit_per_s: float) -> Iterator[str]:
    learners, setting = question.learners, question.setting
    exchange = exchange_of(question.workload, setting, learners.merging)
    num, up, down = len(learners.speeds), max(exchange.up_bytes), max(exchange.down_bytes)
    share = min(bit_per_s, learners.syncer_bit_per_s / num)
    merge_s, latency_s = exchange.merging.seconds(num * up), 4 * setting.latency_s
    answer_s = 8 * (up + down) / share + latency_s + merge_s
    links = "on links without limit" if math.isinf(share) else f"at {RATE.show(share)}"
    yield (
        f"A fragment is {SIZE.show(up)} up and {SIZE.show(down)} down; {links} for each of {num} learners, and with "
        f"{TIME.show(merge_s)} for the merge and {TIME.show(latency_s)} of latency (up, notice, request, down), its "
        f"answer comes after {TIME.show(answer_s)} if nothing is before it."
    )
    found = question.predict(bit_per_s)
    if setting.method == "decoupled":
        age = "is never adopted" if math.isinf(found.stale_steps) else f"is {found.stale_steps:.3g} steps old"
        yield f"Run in virtual time, a fragment is merged every {found.period_steps:.4g} steps and an answer {age}."
    else:
        each = ", ".join(f"{100 * value:.4g} %" for value in sorted(set(found.utilization)))
        yield f"Run in virtual time until it is periodic, the learners compute {each} of the time."
