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

NAMES: dict[MethodName, tuple[str, str]] = {
    "data-parallel": ("data parallel", "DataParallel"),
    "diloco": ("DiLoCo", "DiLoCo"),
    "streaming": ("Streaming DiLoCo", "StreamingDiLoCo"),
    "eager": ("eager updates", "EagerDiLoCo"),
    "decoupled": ("Decoupled DiLoCo", "DecoupledDiLoCo"),
}
"""By method: its title in a table, and its preset."""
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
        """The method's name in a table."""
        return NAMES[self.setting.method][0]

    @property
    def detail(self) -> str:
        """The numbers of the method that matter for it."""
        it = self.setting
        numbers = [f"H = {it.sync_every}", f"τ = {it.overlap}", f"P = {it.num_fragments}", it.up]
        shown = {"data-parallel": (3,), "diloco": (0, 3), "eager": (0, 3)}.get(it.method, (0, 1, 2, 3))
        return ", ".join(numbers[i] for i in shown)


def candidates(workload: Workload) -> Iterator[Candidate]:
    """Yield every candidate of the grid."""
    strided = {"type": "ByLayer", "layers": LAYERS_PER_FRAGMENT, "pattern": "strided"}
    num_fragments = min(DECOUPLED_FRAGMENTS, workload.num_layers)
    balanced = {"type": "Balanced", "num_fragments": num_fragments}
    yield _candidate(workload, "data-parallel", "bf16")
    for every, codec in DILOCO_GRID:
        yield _candidate(workload, "diloco", codec, every)
    for every, tau, codec in STREAMING_GRID:
        yield _candidate(workload, "streaming", codec, every, tau, fragments=strided)
    for every, codec in EAGER_GRID:
        yield _candidate(workload, "eager", codec, every, num_fragments=1)
    for every, codec in DECOUPLED_GRID:
        yield _candidate(workload, "decoupled", codec, every, num_fragments=num_fragments, fragments=balanced)


def _candidate(
    workload: Workload,
    method: MethodName,
    codec: str,
    every: int | None = None,
    tau: int | None = None,
    *,
    num_fragments: int | None = None,
    fragments: dict[str, Any] | None = None,
) -> Candidate:
    setting = setting_for(workload, method, sync_every=every, overlap=tau, num_fragments=num_fragments, up=codec)
    table = {"preset": NAMES[method][1], "sync_every": every, "overlap": tau, "codec": codec, "fragments": fragments}
    return Candidate(setting, {key: value for key, value in table.items() if value is not None})
