"""What every merge costs, as a ratio to a memory copy of the fragment.

    python -m benchmarks.merges [--quick]

Eight learners send 10 million elements in int4; the fragment has tensors of a transformer's sizes. A copy of it in fp32
is measured beside every merge, in turns, on one thread. All times are processor time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco.core.codecs import Int4
from diloco.core.layout import Placement, TensorSpec
from diloco.core.merges import MERGES, Encoded, Merge, RadialDirectional, merge_into

NUM_LEARNERS = 8
NUM_ELEMENTS = 10_000_000
RADIAL_TARGET = 80.0
"""Copies that a radial merge may take: half of what three decodes took."""


def run(quick: bool) -> list[dict[str, Any]]:
    """One row per merge: name, value (processor seconds per GB of fp32), ratio to a copy's time (median, in turns),
    target, met."""
    repeats = 3 if quick else 5
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _rows(repeats)
    finally:
        torch.set_num_threads(num_threads)


def _rows(repeats: int) -> list[dict[str, Any]]:
    contributions, places, momentum = _inputs(NUM_ELEMENTS)
    copied = torch.empty_like(momentum)
    rows: list[dict[str, Any]] = []
    for how in (kind() for kind in MERGES):
        seconds, ratios = [], []
        for _ in range(repeats):
            copy = min(_seconds(lambda: copied.copy_(momentum)) for _ in range(3))
            seconds.append(_seconds(partial(_merge, how, contributions, places, momentum)))
            ratios.append(seconds[-1] / copy)
        ratio = statistics.median(ratios)
        target = RADIAL_TARGET if isinstance(how, RadialDirectional) else None
        rows.append(
            {
                "name": str(how),
                "value": statistics.median(seconds) / (4e-9 * NUM_ELEMENTS),
                "unit": "s/GB",
                "ratio": ratio,
                "target": target,
                "met": None if target is None else ratio <= target,
            }
        )
    return rows


def _merge(how: Merge, contributions: list[Encoded], places: tuple[Placement, ...], momentum: Tensor) -> None:
    merge_into(torch.empty_like(momentum), how, Int4(), contributions, places, momentum)


def _inputs(num_elements: int) -> tuple[list[Encoded], tuple[Placement, ...], Tensor]:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(num_elements, generator=generator)
    contributions = [
        Encoded(
            f"learner-{i}",
            (Int4().encode(common + torch.randn(num_elements, generator=generator)),),
            1.0 + i / 8,
            i % 3,
        )
        for i in range(NUM_LEARNERS)
    ]
    return contributions, places_of(num_elements), common


def places_of(num_elements: int) -> tuple[Placement, ...]:
    """An embedding of a tenth, then matrices of 12 · width² in blocks with two vectors each, as a transformer has
    them."""
    width = max(8, int((num_elements / 120) ** 0.5))
    sizes = {"embed.weight": num_elements // 10}
    left = num_elements - num_elements // 10
    layer = 0
    while left:
        for name, size in (("norm", width), ("attention", 4 * width**2), ("up", 4 * width**2), ("down", 4 * width**2)):
            sizes[f"layers.{layer}.{name}.weight"] = min(size, left)
            left -= min(size, left)
        layer += 1
    places, offset = [], 0
    for name, size in sizes.items():
        places.append(Placement(TensorSpec(name, (size,), "float32"), offset))
        offset += size
    return tuple(places)


def _seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    print(f"{'':60s}{'s/GB':>8s}{'copies':>8s}")
    for row in run(parser.parse_args().quick):
        print(f"{row['name']:60s}{row['value']:8.2f}{row['ratio']:8.1f}")


if __name__ == "__main__":
    main()
