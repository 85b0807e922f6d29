"""Every number of an advice, as its formula with the values in it; one line each."""

from __future__ import annotations

from collections.abc import Iterator

from diloco.core.codecs.formats import wire_format
from diloco.planning.outcomes import DEADLINES, Case, Outcome
from diloco.planning.units import PRICE_PER_BYTE, RATE, SIZE, TIME, significant

ROUNDING = 1e-9
"""Of times that events add up to."""


def explain(case: Case, outcome: Outcome) -> list[str]:
    """Lines on the step, the utilisation, the hours, the bytes, the money and the loss penalty."""
    steps = {"data-parallel": _data_parallel_step, "decoupled": _decoupled_step}
    step = steps.get(outcome.candidate.setting.method, _scheduled_step)
    return [
        f"step: {step(case, outcome)}",
        f"utilisation: {_utilization(case, outcome)}",
        f"hours: {_hours(case, outcome)}",
        f"bytes: {_bytes(case, outcome)}",
        f"money: {_money(case, outcome)}",
        f"loss: {_penalty(outcome)}",
    ]


def _computes_longest(case: Case) -> str:
    slowest = max(case.learners, key=lambda learner: learner.step_s)
    return f"{slowest.name} computes longest, {TIME.show(slowest.step_s)}"


def _data_parallel_step(case: Case, outcome: Outcome) -> str:
    up = outcome.candidate.setting.up
    size, rate = SIZE.show(case.reduced_bytes(outcome.candidate)), RATE.show(case.slowest_bit_per_s)
    return (
        f"{_computes_longest(case)}; then 2·(1 − 1/M) of the {up} gradient, {size}, at {rate} and a round trip: "
        f"{TIME.show(case.reduce_s(outcome.candidate))} more = {TIME.show(outcome.step_s)}"
    )


def _decoupled_step(case: Case, outcome: Outcome) -> str:
    found = outcome.prediction
    assert found is not None
    return (
        f"learners never wait; a fragment is merged every {found.period_steps:.4g} steps with {found.contributors:.3g} "
        f"of {len(case.learners)} learners in it (events in virtual time)"
    )


def _scheduled_step(case: Case, outcome: Outcome) -> str:
    it, exchange = outcome.candidate.setting, case.exchange(outcome.candidate)
    up, down = max(exchange.up_bytes), max(exchange.down_bytes)
    passes = {}
    for each in case.learners:
        up_s, down_s = 8 * up / case.bit_per_s(each, "up"), 8 * down / case.bit_per_s(each, "down")
        passes[each.name] = up_s + down_s + 4 * each.latency_s
    name = max(passes, key=passes.__getitem__)
    step_s = max(learner.step_s for learner in case.learners)
    computed_s, period_s = it.sync_every * step_s, it.sync_every * outcome.step_s
    waited_s = period_s - computed_s if period_s > (1 + ROUNDING) * computed_s else 0.0
    slack = f"{TIME.show(it.overlap * step_s)} of compute hide it" if it.overlap else "nothing hides it"
    merge_s = exchange.merging.seconds(len(case.learners) * up)
    merging = f", {TIME.show(merge_s)} to merge" if merge_s else ""
    return (
        f"{_computes_longest(case)}; a fragment of {SIZE.show(up)} takes {TIME.show(passes[name] + merge_s)} to the "
        f"syncer and back at {name} (bytes up and down, 4 latencies{merging}) and with τ = {it.overlap} {slack}; "
        f"of H = {it.sync_every} steps {TIME.show(computed_s)} are computed and {TIME.show(waited_s)} waited: "
        f"{TIME.show(outcome.step_s)} a step (events in virtual time)"
    )


def _utilization(case: Case, outcome: Outcome) -> str:
    parts = []
    for learner, used in zip(case.learners, outcome.utilization, strict=True):
        step_s = TIME.show(learner.step_s / used)
        parts.append(f"{learner.name} {TIME.show(learner.step_s)} / {step_s} = {_percent(100 * used)}")
    shown = parts[:4] + ([f"{len(parts) - 4} more"] if len(parts) > 4 else [])
    return f"{'; '.join(shown)}; by accelerators {_percent(100 * case.utilization(outcome))}"


def _hours(case: Case, outcome: Outcome) -> str:
    tokens, per_step = case.budget.tokens, case.budget.tokens_per_step
    if outcome.candidate.setting.method == "decoupled":
        per_s = sum(per_step / len(case.learners) / learner.step_s for learner in case.learners)
        text = f"{tokens:.6g} tokens / {per_s:.6g} tokens a second of all learners"
    else:
        steps = f"{outcome.steps:.6g} steps × {TIME.show(outcome.step_s, 4)}"
        text = f"{tokens:.6g} tokens / {per_step:.6g} a step = {steps}"
    if case.site.faults is not None:
        text += f", × {outcome.slowdown:.4g} for failures ({_slowdown(case, outcome)})"
    return f"{text} = {significant(outcome.hours, 4)} h"


def _slowdown(case: Case, outcome: Outcome) -> str:
    faults, num, method = case.site.faults, len(case.learners), outcome.candidate.setting.method
    assert faults is not None
    mtbf, repair = TIME.show(faults.mtbf), TIME.show(faults.repair)
    if method == "data-parallel":
        return f"1 + {num} × {repair} / {mtbf}: all learners stop"
    absent = f"1 + {repair} / {mtbf}: absent"
    if method == "decoupled" or num == 1:
        return absent
    given_up_s = DEADLINES.lost_after_s(outcome.step_s)
    return f"{absent}; × 1 + {num} × {TIME.show(given_up_s)} / {mtbf}: waited for until given up"


def _bytes(case: Case, outcome: Outcome) -> str:
    setting, num = outcome.candidate.setting, len(case.learners)
    each = f"{SIZE.show(outcome.up_bytes / num)} up and {SIZE.show(outcome.down_bytes / num)} down a learner"
    if setting.method == "data-parallel":
        return f"{outcome.steps:.6g} steps × {SIZE.show(case.reduced_bytes(outcome.candidate))} = {each}"
    exchange, bits = case.exchange(outcome.candidate), wire_format(setting.up).bits_per_value
    every, who = float(setting.sync_every), f"{num} learners"
    if setting.method == "decoupled" and outcome.prediction is not None:
        every = outcome.prediction.period_steps
        who = f"{outcome.prediction.contributors:.3g} contributions and {num} updates"
    return (
        f"{outcome.steps:.6g} steps / {every:.4g} × {who} × {SIZE.show(sum(exchange.up_bytes))} "
        f"({case.workload.num_parameters:.4g} values of {bits:.4g} bits) = {each}"
    )


def _money(case: Case, outcome: Outcome) -> str:
    if outcome.usd is None:
        return "unknown: the site file has no prices"
    return " + ".join(_costs(case, outcome)) + f" = {outcome.usd:.6g} USD"


def _costs(case: Case, outcome: Outcome) -> Iterator[str]:
    num, hours = len(case.learners), significant(outcome.hours, 4)
    up_bytes, down_bytes = outcome.up_bytes, outcome.down_bytes
    for place in case.site.site:
        if place.price_per_accelerator_hour is not None:
            number, price = place.learners * place.accelerators, 3600 * place.price_per_accelerator_hour
            yield f"{hours} h × {number} × {price:.4g} USD/h ({place.name})"
        share = place.learners / num
        yield from _traffic(place.name, place.price_up, share * up_bytes, place.price_down, share * down_bytes)
    syncer = case.site.syncer
    if syncer.price_per_hour is not None:
        yield f"{hours} h × {syncer.shards} × {3600 * syncer.price_per_hour:.4g} USD/h (syncer)"
    yield from _traffic("syncer", syncer.price_up, down_bytes, syncer.price_down, up_bytes)


def _traffic(
    name: str, price_up: float | None, up_bytes: float, price_down: float | None, down_bytes: float
) -> Iterator[str]:
    for price, num_bytes, way in ((price_up, up_bytes, "up"), (price_down, down_bytes, "down")):
        if price is not None:
            yield f"{SIZE.show(num_bytes, 4)} × {PRICE_PER_BYTE.show(price)} ({name} {way})"


def _penalty(outcome: Outcome) -> str:
    parts = []
    for term in outcome.penalty.terms:
        value = "unknown" if term.percent is None else f"{term.percent:+.2f} %"
        parts.append(f"{value} ({term.what}: {term.source})")
    total = outcome.penalty.percent
    parts += ["=", "unknown" if total is None else f"{total:+.2f} % of data parallel's"]
    return " ".join(parts)


def _percent(value: float) -> str:
    return f"{value:.1f} %"
