"""Every number of an advice, as its formula with the values in it; one line each."""

from __future__ import annotations

from collections.abc import Iterator

from diloco.planning.outcomes import (
    Case,
    Outcome,
    bit_per_s,
    given_up_after_s,
    reduce_s,
    reduced_bytes,
    slowest_bit_per_s,
)
from diloco.planning.penalty import Term
from diloco.planning.units import PRICE_PER_BYTE, RATE, SIZE, TIME, significant
from diloco.planning.wire import wire_format

ROUNDING = 1e-9
"""Of times that events add up to."""


def explain(case: Case, outcome: Outcome) -> list[str]:
    """Lines on the step, the utilisation, the hours, the bytes, the money and the loss penalty."""
    return [
        f"step: {_step(case, outcome)}",
        f"utilisation: {_utilization(case, outcome)}",
        f"hours: {_hours(case, outcome)}",
        f"bytes: {_bytes(case, outcome)}",
        f"money: {_money(case, outcome)}",
        f"loss: {_penalty(outcome)}",
    ]


def _step(case: Case, outcome: Outcome) -> str:
    slowest = max(case.learners, key=lambda learner: learner.step_s)
    computes = f"{slowest.name} computes longest, {TIME.show(slowest.step_s)}"
    setting = outcome.candidate.setting
    if setting.method == "data-parallel":
        size, rate = SIZE.show(reduced_bytes(case, outcome.candidate)), RATE.show(slowest_bit_per_s(case))
        return (
            f"{computes}; then 2·(1 − 1/M) of the {setting.up} gradient, {size}, at {rate} and a round trip: "
            f"{TIME.show(reduce_s(case, outcome.candidate))} more = {TIME.show(outcome.step_s)}"
        )
    if setting.method == "decoupled":
        prediction = outcome.prediction
        assert prediction is not None
        return (
            f"nobody waits; a fragment is merged every {prediction.period_steps:.4g} steps with "
            f"{prediction.contributors:.3g} of "
            f"{len(case.learners)} learners in it (events in virtual time)"
        )
    exchange = case.exchange(outcome.candidate)
    up, down = max(exchange.up_bytes), max(exchange.down_bytes)
    passes = {
        learner.name: 8 * up / bit_per_s(case, learner, "up")
        + 8 * down / bit_per_s(case, learner, "down")
        + 4 * learner.latency_s
        for learner in case.learners
    }
    name = max(passes, key=passes.__getitem__)
    computed_s, period_s = setting.sync_every * slowest.step_s, setting.sync_every * outcome.step_s
    waited_s = period_s - computed_s if period_s > (1 + ROUNDING) * computed_s else 0.0
    slack = (
        f"{TIME.show(setting.overlap * slowest.step_s)} of compute hide it" if setting.overlap else "nothing hides it"
    )
    merge_s = exchange.merging.seconds(len(case.learners) * up)
    there_and_back = (
        f"{TIME.show(passes[name] + merge_s)} to the syncer and back at {name} (bytes up and down, 4 latencies"
        f"{f', {TIME.show(merge_s)} to merge' if merge_s else ''})"
    )
    return (
        f"{computes}; a fragment of {SIZE.show(up)} takes {there_and_back} and with τ = {setting.overlap} {slack}; "
        f"of H = {setting.sync_every} steps {TIME.show(computed_s)} are computed and {TIME.show(waited_s)} waited: "
        f"{TIME.show(outcome.step_s)} a step (events in virtual time)"
    )


def _utilization(case: Case, outcome: Outcome) -> str:
    parts = []
    for learner, used, weight in zip(case.learners, outcome.utilization, case.weights, strict=True):
        step_s = learner.step_s / used
        parts.append(
            (weight, f"{learner.name} {TIME.show(learner.step_s)} / {TIME.show(step_s)} = {_percent(100 * used)}")
        )
    shown = [text for _, text in parts[:4]] + ([f"{len(parts) - 4} more"] if len(parts) > 4 else [])
    return f"{'; '.join(shown)}; by accelerators {_percent(100 * case.utilization(outcome))}"


def _hours(case: Case, outcome: Outcome) -> str:
    budget = case.budget
    if outcome.candidate.setting.method == "decoupled":
        per_s = sum(budget.tokens_per_step / len(case.learners) / learner.step_s for learner in case.learners)
        text = f"{budget.tokens:.6g} tokens / {per_s:.6g} tokens a second of all learners"
    else:
        text = (
            f"{budget.tokens:.6g} tokens / {budget.tokens_per_step:.6g} a step = {outcome.steps:.6g} steps × "
            f"{TIME.show(outcome.step_s, 4)}"
        )  # fmt: skip
    faults = case.site.faults
    if faults is not None:
        text += f", × {outcome.slowdown:.4g} for failures ({_slowdown(case, outcome)})"
    return f"{text} = {significant(outcome.hours, 4)} h"


def _slowdown(case: Case, outcome: Outcome) -> str:
    faults, num, method = case.site.faults, len(case.learners), outcome.candidate.setting.method
    assert faults is not None
    mtbf, repair = TIME.show(faults.mtbf), TIME.show(faults.repair)
    if method == "data-parallel":
        return f"1 + {num} × {repair} / {mtbf}: everybody stops"
    absent = f"1 + {repair} / {mtbf}: absent"
    if method == "decoupled" or num == 1:
        return absent
    return f"{absent}; × 1 + {num} × {TIME.show(given_up_after_s(outcome.step_s))} / {mtbf}: waited for until given up"


def _bytes(case: Case, outcome: Outcome) -> str:
    setting, num = outcome.candidate.setting, len(case.learners)
    each = f"{SIZE.show(outcome.up_bytes / num)} up and {SIZE.show(outcome.down_bytes / num)} down a learner"
    if setting.method == "data-parallel":
        return f"{outcome.steps:.6g} steps × {SIZE.show(reduced_bytes(case, outcome.candidate))} = {each}"
    exchange, bits = case.exchange(outcome.candidate), wire_format(setting.up).bits_per_value
    every: float = setting.sync_every
    who = f"{num} learners"
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
    num = len(case.learners)
    for place in case.site.site:
        if place.price_per_accelerator_hour is not None:
            number = place.learners * place.accelerators
            yield (
                f"{significant(outcome.hours, 4)} h × {number} × {3600 * place.price_per_accelerator_hour:.4g} USD/h "
                f"({place.name})"
            )
        for price, num_bytes, way in (
            (place.price_up, outcome.up_bytes, "up"),
            (place.price_down, outcome.down_bytes, "down"),
        ):
            if price is not None:
                size = SIZE.show(place.learners * num_bytes / num, 4)
                yield f"{size} × {PRICE_PER_BYTE.show(price)} ({place.name} {way})"
    syncer = case.site.syncer
    if syncer.price_per_hour is not None:
        yield f"{significant(outcome.hours, 4)} h × {syncer.shards} × {3600 * syncer.price_per_hour:.4g} USD/h (syncer)"
    for price, num_bytes, way in (
        (syncer.price_up, outcome.down_bytes, "up"),
        (syncer.price_down, outcome.up_bytes, "down"),
    ):
        if price is not None:
            yield f"{SIZE.show(num_bytes, 4)} × {PRICE_PER_BYTE.show(price)} (syncer {way})"


def _penalty(outcome: Outcome) -> str:
    penalty = outcome.penalty
    total = "unknown" if penalty.percent is None else f"{penalty.percent:+.2f} % of data parallel's"
    return " ".join([*(_term(term) for term in penalty.terms), "=", total])


def _term(term: Term) -> str:
    value = "unknown" if term.percent is None else f"{term.percent:+.2f} %"
    return f"{value} ({term.what}: {term.source})"


def _percent(value: float) -> str:
    return f"{value:.1f} %"
