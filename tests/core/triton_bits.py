"""What the Triton kernels write and read, against the codecs' torch operations on the CPU: `python -m
tests.core.triton_bits`. Run by Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

import os

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

from tests.core.test_codecs_chunked import adversarial  # noqa: E402

from diloco.core.codecs import SEGMENT_ELEMENTS, codec_from_name, triton_blocks  # noqa: E402
from diloco.core.codecs.blocks import ScaledBlocks  # noqa: E402

NAMES = ("int8", "int4", "e3m0", "int8:2", "int4:2", "e3m0:4", "int8:4096", "int4:512", "e3m0:2048")


def whole_segments() -> dict[str, torch.Tensor]:
    """Awkward vectors repeated to fill a segment, each of two scales, and random ones of several segments."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2 * SEGMENT_ELEMENTS, generator=generator)
    wide *= torch.exp2(torch.randint(-149, 127, wide.shape, generator=generator).float())
    cases = {"random": torch.randn(2 * SEGMENT_ELEMENTS, generator=generator), "wide": wide}
    for name, x in adversarial().items():
        cases[name] = x.repeat(-(-SEGMENT_ELEMENTS // len(x)))[:SEGMENT_ELEMENTS].contiguous()
    return {name: x.clamp(-3.3e38, 3.3e38) for name, x in cases.items()}


def main() -> None:
    device = "cuda" if GPU else "cpu"
    for name in NAMES:
        codec = codec_from_name(name)
        assert isinstance(codec, ScaledBlocks)
        for case, x in whole_segments().items():
            expected, rows = codec.encode(x), len(x) // SEGMENT_ELEMENTS
            payload = torch.full_like(expected, 0xA5, device=device)
            own = x.to(device).view(rows, -1)
            largest = triton_blocks.encode(
                own, payload.view(rows, -1), codec.family, codec.block, codec.levels, codec.largest_scale
            )
            assert largest == int(x.abs().amax().view(torch.int32)), (name, case)
            assert torch.equal(payload.cpu(), expected), (name, case)
            out = torch.full_like(own, torch.nan)
            triton_blocks.decode(payload.view(rows, -1), out, codec.family, codec.block)
            decoded = codec.decode(expected, len(x))
            assert torch.equal(out.cpu().view(-1).view(torch.int32), decoded.view(torch.int32)), (name, case)
        x[7] = torch.nan
        largest = triton_blocks.encode(
            x.to(device).view(rows, -1), payload.view(rows, -1), codec.family, codec.block, codec.levels,
            codec.largest_scale,
        )  # fmt: skip
        assert largest > 0x7F800000, name
        print(f"{name}: the CPU's bits, {'on the GPU' if GPU else 'by the interpreter'}")


if __name__ == "__main__":
    main()
