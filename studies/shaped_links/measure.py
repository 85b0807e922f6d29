"""The cells: each a run of the real thing beside what the planner says of it."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.__main__ import machine

from diloco.planning.exchange_plan import Merging
from diloco.planning.graph import utilization
from diloco.planning.settings import setting_for
from studies.shaped_links import report
from studies.shaped_links.cases import (
    DECOUPLED,
    IN_TURNS,
    MODEL,
    STEP_S,
    STREAMING,
    SYNC_EVERY,
    Case,
    Span,
    exchange_for,
    length_of,
    prediction,
)
from studies.shaped_links.links import Sites, bit_per_s, payload_bit_per_s, shaped
from studies.shaped_links.runs import Measured, run_collective, run_ours, run_torchft

UNEVEN = 0.01
CALIBRATION_STEPS = 3 * SYNC_EVERY


@dataclass(frozen=True)
class Wanted:
    """What to run.

    Attributes:
        rates: for every case.
        in_turns: rates for called rounds with K = 1.
        collective, torchft: rates for a process group's learners and for torchft's.
    """

    cases: tuple[Case, ...]
    rates: tuple[str, ...]
    in_turns: tuple[str, ...]
    collective: tuple[str, ...]
    torchft: tuple[str, ...]
    span: Span


class Told(NamedTuple):
    """What the planner is told of a case, measured on links that are not shaped: seconds of a round on the syncer,
    latency one way."""

    merge_s: float
    latency_s: float


def measure(wanted: Wanted) -> dict[str, Any]:
    """All runs, and what they come to."""
    began_s, found = time.monotonic(), _machine()
    cases = {*wanted.cases, *([DECOUPLED] if wanted.in_turns else [])}
    told = {case: _told(case) for case in sorted(cases, key=lambda case: case.name)}
    rows = [_cell(case, rate, wanted.span, told[case]) for case in wanted.cases for rate in wanted.rates]
    in_turns = [_in_turns(rate, wanted.span, told[DECOUPLED]) for rate in wanted.in_turns]
    collective = [_equals_cell("a process group", run_collective, rate, wanted.span) for rate in wanted.collective]
    peer = [_equals_cell("torchft", run_torchft, rate, wanted.span) for rate in wanted.torchft]
    return {
        "study": report.NAME,
        "step_s": STEP_S,
        "sync_every": SYNC_EVERY,
        "told": {
            case.name: {"fragment_bytes": exchange_for(case).up_bytes[0], **it._asdict()} for case, it in told.items()
        },
        "rows": rows,
        "in_turns": in_turns,
        "collective": collective,
        "torchft": peer,
        "summary": report.summary(rows) if rows else None,
        "machine": {**found, "load_after": round(os.getloadavg()[0], 1)},
        "seconds": round(time.monotonic() - began_s),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _told(case: Case) -> Told:
    _say(f"{case.name}, not shaped: what the syncer takes for a round …")
    with shaped(None) as sites:
        measured = run_ours(sites, case, CALIBRATION_STEPS, CALIBRATION_STEPS * STEP_S, pings=True)
    assert measured.latency_s is not None
    return Told(measured.merge_s, measured.latency_s)


def _cell(case: Case, rate: str, span: Span, told: Told) -> dict[str, Any]:
    """The prediction is for as many steps as are run; of called rounds, in the long run."""
    known: Any = (case, payload_bit_per_s(rate), told.latency_s, Merging(told.merge_s))
    num_steps = length_of(prediction(*known), case, span)
    found = prediction(*known, None if case.is_called else num_steps)
    expected_s = num_steps * STEP_S / found.mean_utilization
    _say(f"{case.name} at {rate}: {num_steps} steps, {expected_s:.0f} s …")
    load = os.getloadavg()[0]
    with shaped(rate) as sites:
        measured = run_ours(sites, case, num_steps, expected_s)
    both = (found.mean_utilization, fmean(measured.utilization))
    if measured.period_steps is not None:
        both = (found.period_steps, measured.period_steps)
    judged = "period_steps" if case.is_called else "utilization"
    row = {"method": case.name, "bit_per_s": bit_per_s(rate), "judged": judged, **report.beside(*both)}
    _say(f"  predicted {both[0]:.3f}, measured {both[1]:.3f}: {100 * row['error']:+.1f} %")
    return {**row, "merge_s": measured.merge_s, "blocked_s": measured.blocked_s, **_facts(measured, load)}


def _in_turns(rate: str, span: Span, told: Told) -> dict[str, Any]:
    """K = 1, and what the planner says where the links differ by one percent."""
    row = _cell(IN_TURNS, rate, span, told)
    known: Any = (IN_TURNS, payload_bit_per_s(rate), told.latency_s, Merging(told.merge_s))
    return {**row, "predicted_uneven": prediction(*known, narrower=UNEVEN).period_steps}


def _equals_cell(name: str, run: Callable[[Sites, int, float], Measured], rate: str, span: Span) -> dict[str, Any]:
    """Learners that reduce among themselves, streaming in fp32, beside the plan for learners among equals."""
    setting = setting_for(
        MODEL, "streaming", sync_every=SYNC_EVERY, overlap=STREAMING.overlap, num_fragments=STREAMING.num_fragments,
        up=STREAMING.codec,
    )  # fmt: skip
    found = utilization(MODEL, setting, payload_bit_per_s(rate))
    num_steps = SYNC_EVERY * max(1, round(span.seconds * found / (SYNC_EVERY * STEP_S)))
    _say(f"{name} at {rate}: {num_steps} steps …")
    load = os.getloadavg()[0]
    with shaped(rate) as sites:
        measured = run(sites, num_steps, num_steps * STEP_S / found)
    row = {"bit_per_s": bit_per_s(rate), **report.beside(found, fmean(measured.utilization))}
    _say(f"  planned {found:.3f}, measured {row['measured']:.3f}")
    return {**row, **_facts(measured, load)}


def _facts(measured: Measured, load: float) -> dict[str, Any]:
    """What every run leaves."""
    return {
        "utilization": fmean(measured.utilization), "by_learner": measured.utilization, "num_steps": measured.num_steps,
        "step_s": measured.step_s, "load": round(load, 1),
    }  # fmt: skip


def _machine() -> dict[str, Any]:
    tcp = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    real_time = os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)
    return {**machine(), "kernel": platform.release(), "tcp": tcp, "real_time": real_time}


def _say(text: str) -> None:
    """For who waits."""
    print(text, file=sys.stderr, flush=True)
