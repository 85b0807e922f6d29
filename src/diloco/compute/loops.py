"""The compiled loops, as tensors call them: flat, contiguous, on the host. Lengths are their callers' to check."""

from diloco.compute.payloads import can_read, decode, decoded_squares, encode, encode_cast, weighted_sum
from diloco.compute.vectors import adopt, block_sums, change, flush_denormals, land, outer_step

__all__ = ["adopt", "block_sums", "can_read", "change", "decode", "decoded_squares", "encode", "encode_cast",
           "flush_denormals", "land", "outer_step", "weighted_sum"]  # fmt: skip
