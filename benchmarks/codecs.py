"""Encode and decode speed of every codec on one thread, as a ratio to an fp32 memory copy measured in the same run.

With --errors instead: what every codec and some of other parameters lose, as docs/protocol.md shows it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco.core.codecs import CODECS, Codec, SignPruned, TopK, TwoBit

_FOUR_BIT_TARGETS = {"encode": 0.10, "decode": 0.40}


def run(quick: bool) -> list[dict[str, Any]]:
    """One row per codec and direction: name, gb_per_s (fp32 side), ratio to the memory copy, target and met (or None).

    Buffers are larger than the caches. Each repeat times everything once, a memory copy before each measurement; a
    ratio is the median over the repeats of copy time ÷ own time.
    """
    num_elements, repeats = (1 << 22, 7) if quick else (1 << 24, 15)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _rows(num_elements, repeats)
    finally:
        torch.set_num_threads(num_threads)


def _rows(num_elements: int, repeats: int) -> list[dict[str, Any]]:
    x = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    actions: dict[tuple[str, str], Callable[[], object]] = {}
    for name, codec in CODECS.items():
        payload = codec.encode(x)
        actions[name, "encode"] = partial(codec.encode, x, payload)
        actions[name, "decode"] = partial(codec.decode, payload, num_elements, out)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in actions}
    ratios: dict[tuple[str, str], list[float]] = {key: [] for key in actions}
    copies: list[float] = []
    for action in actions.values():
        action()
    for _ in range(repeats):
        for key, action in actions.items():
            copies.append(_seconds(lambda: out.copy_(x)))
            seconds[key].append(_seconds(action))
            ratios[key].append(copies[-1] / seconds[key][-1])
    gigabytes = num_elements * 4 / 1e9
    rows: list[dict[str, Any]] = [
        {
            "name": "memory copy",
            "gb_per_s": gigabytes / statistics.median(copies),
            "ratio": 1.0,
            "target": None,
            "met": None,
        }
    ]
    for (name, direction), measured in ratios.items():
        ratio = statistics.median(measured)
        target = _FOUR_BIT_TARGETS[direction] if name in ("int4", "e3m0") else None
        rows.append(
            {
                "name": f"{name} {direction}",
                "gb_per_s": gigabytes / statistics.median(seconds[name, direction]),
                "ratio": ratio,
                "target": target,
                "met": None if target is None else ratio >= target,
            }
        )
    return rows


def errors(num_elements: int = 1 << 22) -> list[dict[str, Any]]:
    """One row per codec: name, bits per element, and the error's root mean square ÷ the vector's own for two
    distributions.

    Gaussian values, and Student's t with 3 degrees of freedom, whose heavy tails are the harder case for one scale a
    block.
    """
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(num_elements, generator=generator)
    chi_squared = torch.randn(3, num_elements, generator=generator).square_().sum(0)
    heavy = torch.randn(num_elements, generator=generator) / (chi_squared / 3).sqrt_()
    others = [
        TwoBit(block=b, range_sigmas=r) for r in (6.0, 4.0) for b in (64, 256, 1024, 4096, 32768) if (b, r) != (4096, 6)
    ]
    sparse = [TopK(k, values) for k in (32, 128, 512) for values in ("fp32", "bf16", "2bit")]
    pruned = [SignPruned(fraction, "bf16") for fraction in (0.25, 0.5, 0.75)]
    codecs: dict[str, Codec] = CODECS | {codec.name: codec for codec in (*others, *sparse, *pruned)}
    return [
        {
            "name": name,
            "bits": codec.format.bits_per_value,
            "gaussian": _error(codec, gaussian),
            "heavy": _error(codec, heavy),
        }
        for name, codec in codecs.items()
    ]


def _error(codec: Codec, x: Tensor) -> float:
    lost = x - codec.decode(codec.encode(x), x.numel())
    return float(lost.double().square().mean().sqrt() / x.double().square().mean().sqrt())


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller buffers and fewer repeats")
    parser.add_argument("--errors", action="store_true", help="what is lost instead of how long it takes")
    arguments = parser.parse_args()
    if arguments.errors:
        print(f"{'':22s}{'bits':>10s}{'Gaussian':>12s}{'heavy tails':>12s}")
        for row in errors():
            print(f"{row['name']:22s}{row['bits']:10.5g}{row['gaussian']:12.3g}{row['heavy']:12.3g}")
        return
    print(f"{'':24s}{'GB/s':>8s}{'ratio':>8s}{'target':>8s}")
    for row in run(arguments.quick):
        target = "" if row["target"] is None else f"{row['target']:.2f} {'met' if row['met'] else 'MISSED'}"
        print(f"{row['name']:24s}{row['gb_per_s']:8.2f}{row['ratio']:8.2f}   {target}")


if __name__ == "__main__":
    main()
