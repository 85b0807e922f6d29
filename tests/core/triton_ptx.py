"""What the Triton kernels become on an NVIDIA GPU, without one: `python -m tests.core.triton_ptx`.

They are compiled for compute capability 8.0 and 9.0, and the assembly is searched for what would change bits: fused
multiply-add, approximate division, subnormal numbers flushed to zero.
"""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diloco.core.codecs import SEGMENT_ELEMENTS, codec_from_name, triton_blocks
from diloco.core.codecs.blocks import ScaledBlocks

INEXACT = r"\bfma\.|\bmad\.\w*\.?f32|\.ftz|\.approx|div\.full"
POINTERS = {"x": "*fp32", "payload": "*u8", "largest": "*i32"}
NUMBERS = {"num_blocks": "i32", "reciprocal": "fp32", "largest_scale": "fp32"}


def assembly(name: str, *, encodes: bool, capability: int) -> str:
    codec = codec_from_name(name)
    assert isinstance(codec, ScaledBlocks)
    kernel = triton_blocks._encode_blocks if encodes else triton_blocks._decode_blocks
    types = {**POINTERS, "out": "*u8" if encodes else "*fp32", **NUMBERS}
    constants = {
        "levels": codec.levels, "kind": triton_blocks._KINDS[codec.family].value, "half": codec.block // 2,
        "segment_blocks": SEGMENT_ELEMENTS // codec.block, "segment_bytes": codec.encoded_bytes(SEGMENT_ELEMENTS),
        "blocks": max(1, triton_blocks._PROGRAM_ELEMENTS // codec.block),
    }  # fmt: skip
    signature = {each: types.get(each, "constexpr") for each in kernel.arg_names}
    source = ASTSource(
        kernel, signature, {(i,): constants[each] for i, each in enumerate(kernel.arg_names) if each in constants}
    )
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})
    ptx: str = compiled.asm["ptx"]
    return ptx


def main() -> None:
    for name in ("int8", "int4", "e3m0"):
        for capability in (80, 90):
            for encodes in (True, False):
                ptx = assembly(name, encodes=encodes, capability=capability)
                assert ("div.rn.f32" in ptx) == encodes, name
                assert not (found := re.findall(INEXACT, ptx)), (name, capability, encodes, set(found))
        print(f"{name}: compiled, exact instructions only")


if __name__ == "__main__":
    main()
