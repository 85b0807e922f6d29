"""Reproduction of the papers' printed tables by their own conventions: for comparison, not for buying a link.

    streaming-diloco   2H steps; a fragment is sent every g steps in turn   arXiv 2501.18512 table 4, 2502.12996 table 5
    scaling-laws       H + 10 steps of DiLoCo, 11 of data parallel          arXiv 2503.09799 table 6

In both, a reduction is one pass of 16 bits per value (4 for FP4), and reductions due after the end are not counted. The
printed value is the last bandwidth of a grid whose utilisation does not exceed the target, so it misses the target. The
interval g is not H / P. The papers describe the graph; these rules were inferred from their tables. They are known for
the published settings only, and others are refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from diloco.errors import ConfigError
from diloco.planning.graph import Costs, Pattern, run_utilization, strided
from diloco.planning.settings import LAYERS_PER_FRAGMENT, Setting, setting_for
from diloco.planning.workload import PRESETS, PUBLISHED, Workload

CONVENTIONS = ("steady", *PUBLISHED["conventions"])

GRID_GBIT_PER_S = tuple(10.0 ** (-1 + 4 * i / 49) for i in range(50))
"""numpy.logspace(-1, 3, 50)."""
BITS = {"bf16": 16, "e3m0": 4}
"""Bits per value in the papers, without scales."""


class TableCell(NamedTuple):
    """A cell of a table: its text, and its bandwidth on the grid; None: below the whole grid."""

    text: str
    gbit_per_s: float | None


@dataclass(frozen=True)
class PublishedRun:
    """The simulation behind one row of a paper's table.

    Attributes:
        workload: the model, with the step time of this paper.
        setting: method and its numbers.
        pattern: layers launched after each step.
        num_steps: length of the run.
    """

    workload: Workload
    setting: Setting
    pattern: Pattern
    num_steps: int

    measure = "computing"

    def utilization(self, gbit_per_s: float) -> float:
        """Compute ÷ wall clock over the run."""
        num_layers, bits = self.workload.num_layers, self.workload.num_parameters * BITS[self.setting.up]
        costs = Costs(num_layers, self.workload.step_s / (3 * num_layers), bits / num_layers / (gbit_per_s * 1e9))
        return run_utilization(self.pattern, costs, self.num_steps)

    def cells(self, targets: Sequence[float]) -> list[TableCell]:
        """Return the cells of these targets (0 to 1): the last grid point whose utilisation does not exceed the
        target."""
        at = lru_cache(self.utilization)
        return [_cell(bisect_right(GRID_GBIT_PER_S, target, key=at) - 1) for target in targets]


def _cell(index: int) -> TableCell:
    if index < 0:
        return TableCell(f"below {GRID_GBIT_PER_S[0]:g}", None)
    if index == len(GRID_GBIT_PER_S) - 1:
        return TableCell("1000.0+", GRID_GBIT_PER_S[-1])
    return TableCell(f"{round(round(GRID_GBIT_PER_S[index], 2), 1):.1f}", GRID_GBIT_PER_S[index])


def published_run(
    convention: str, model: str, method: str, *, sync_every: int | None = None, overlap: int | None = None,
    num_fragments: int | None = None, up: str = "bf16", down: str | None = None, latency_s: float = 0.0,
) -> PublishedRun:  # fmt: skip
    """Return the run of one row of a paper's table. H is that of the table: data parallel, which has no H, runs as long
    as the others.

    Raises:
        ConfigError: a setting that the paper did not publish.
    """
    table = PUBLISHED["conventions"][convention]
    of_one_step = convention == "scaling-laws" and method == "data-parallel"  # a row of its own
    every = (1 if of_one_step else 100) if sync_every is None else sync_every
    for what, value in (("model", model), ("method", method), ("codec", up)):
        _check(convention, what, value, table[f"{what}s"])
    if of_one_step:
        _check(convention, "sync-every", every, (1,))
    elif not (method == "data-parallel" and every == 1):
        _check(convention, "sync-every", every, table["sync_every"])
    if down is not None or latency_s:
        raise ConfigError(
            f"the convention {convention} has no {'--codec-down' if down else '--latency'}; leave it out, or use "
            "--convention steady."
        )
    step_s = table.get("step_s", {}).get(model, PRESETS[model].step_s)
    workload = replace(PRESETS[model], step_s=step_s)
    own_every = None if method == "data-parallel" else every
    setting = setting_for(workload, method, sync_every=own_every, overlap=overlap, num_fragments=num_fragments, up=up)
    if setting.method in ("streaming", "eager"):
        _check(convention, "fragments", setting.num_fragments, (-(-workload.num_layers // LAYERS_PER_FRAGMENT),))
    _check(convention, "overlap", setting.overlap, {"streaming": (0, 1, every), "eager": (every,)}.get(method, (0,)))
    num_steps = every + 10 if convention == "scaling-laws" else 2 * (100 if every == 1 else every)
    return PublishedRun(workload, setting, _pattern(workload.num_layers, setting), num_steps)


def _pattern(num_layers: int, setting: Setting) -> Pattern:
    """The launches of a setting (module docstring): fragment ⌊t / g⌋ mod P after steps g, 2g, … or, for τ ≥ 1, 1, 1
    + g, …"""
    every, tau = setting.sync_every, setting.overlap
    if setting.method in ("data-parallel", "diloco"):
        return Pattern(every, {every: range(num_layers, 0, -1)}, tau)
    fragments, interval = strided(num_layers, setting.num_fragments), _interval(every, setting.num_fragments)
    period, first = interval * len(fragments), interval if tau == 0 else 1
    sent = range(first, period + 1, interval)
    return Pattern(period, {step: fragments[step // interval % len(fragments)] for step in sent}, tau)


def _interval(sync_every: int, num_fragments: int) -> int:
    """The interval g between the sends of two fragments, in steps."""
    return sync_every // (num_fragments + 1) + 1 if sync_every == 100 else 1


def _check(convention: str, what: str, value: object, published: Sequence[object]) -> None:
    if value not in published:
        known = ", ".join(map(str, published))
        raise ConfigError(
            f"the convention {convention} has no --{what} {value}: its paper published {known}; use one of these, or "
            "--convention steady."
        )
