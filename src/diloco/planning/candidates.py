"""The methods that the adviser compares: a grid of H, τ, P and codecs, each as a plan and as the `[method]` table of a
run file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diloco.planning.settings import LAYERS_PER_FRAGMENT, MethodName, Setting, setting_for
from diloco.planning.workload import Workload

DILOCO_GRID = [(every, codec) for every in (30, 50, 100, 200, 500) for codec in ("bf16", "e3m0")]
STREAMING_GRID = [(100, 1, "bf16"), *((every, tau, "e3m0") for every in (30, 50, 100, 200, 500) for tau in (1, 5))]
EAGER_GRID = [(every, "e3m0") for every in (30, 100)]
DECOUPLED_GRID = [(24, "bf16"), (24, "int4"), (96, "int4")]
"""(H, codec), with τ between for Streaming. Down the wire goes the same codec."""

TITLES: dict[MethodName, str] = {
    "data-parallel": "data parallel",
    "diloco": "DiLoCo",
    "streaming": "Streaming DiLoCo",
    "eager": "eager updates",
    "decoupled": "Decoupled DiLoCo",
}
DECOUPLED_FRAGMENTS = 24


@dataclass(frozen=True)
class Candidate:
    """A method to compare.

    Attributes:
        setting: its numbers.
        table: its `[method]` table.
    """

    setting: Setting
    table: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.title}, {self.detail}"

    @property
    def title(self) -> str:
        """What people call it."""
        return TITLES[self.setting.method]

    @property
    def detail(self) -> str:
        """Its numbers."""
        it = self.setting
        numbers = [f"H = {it.sync_every}", f"τ = {it.overlap}", f"P = {it.num_fragments}", it.up]
        shown = {"data-parallel": (3,), "diloco": (0, 3), "eager": (0, 3)}.get(it.method, (0, 1, 2, 3))
        return ", ".join(numbers[i] for i in shown)


def candidates(workload: Workload) -> Iterator[Candidate]:
    """All of the grid."""
    yield Candidate(setting_for(workload, "data-parallel"), {"preset": "DataParallel", "codec": "bf16"})
    for every, codec in DILOCO_GRID:
        yield Candidate(
            setting_for(workload, "diloco", sync_every=every, up=codec),
            {"preset": "DiLoCo", "sync_every": every, "codec": codec},
        )
    for every, tau, codec in STREAMING_GRID:
        yield Candidate(
            setting_for(workload, "streaming", sync_every=every, overlap=tau, up=codec),
            {"preset": "StreamingDiLoCo", "sync_every": every, "overlap": tau, "codec": codec,
             "fragments": {"type": "ByLayer", "layers": LAYERS_PER_FRAGMENT, "pattern": "strided"}},
        )  # fmt: skip
    for every, codec in EAGER_GRID:
        yield Candidate(
            setting_for(workload, "eager", sync_every=every, num_fragments=1, up=codec),
            {"preset": "EagerDiLoCo", "sync_every": every, "codec": codec},
        )
    for every, codec in DECOUPLED_GRID:
        num_fragments = min(DECOUPLED_FRAGMENTS, workload.num_layers)
        yield Candidate(
            setting_for(workload, "decoupled", sync_every=every, num_fragments=num_fragments, up=codec),
            {"preset": "DecoupledDiLoCo", "sync_every": every, "codec": codec,
             "fragments": {"type": "Balanced", "num_fragments": num_fragments}},
        )  # fmt: skip
