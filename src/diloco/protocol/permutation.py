"""A seeded permutation in constant memory."""

import hashlib


def permute(index: int, size: int, key: bytes) -> int:
    """A pseudo-random permutation of 0 … size−1 at `index`, in constant memory.

    A four-round Feistel network over the next even number of bits, walked until it falls into the range (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_ in range(4):
            mixed = hashlib.blake2b(right.to_bytes(8, "little") + bytes([round_]), digest_size=8, key=key).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        index = left << half | right
        if index < size:
            return index


def place_of_unit(unit: int, num_units: int, seed: int) -> int:
    """Which of `num_units` windows or samples unit `unit` of a run's leased data is (`protocol.leases`): every pass
    has an order of its own."""
    number, place = divmod(unit, num_units)
    return permute(place, num_units, seed.to_bytes(8, "little") + b"unit" + number.to_bytes(8, "little"))
