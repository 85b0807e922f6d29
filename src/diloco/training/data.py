"""The sequences that a learner trains on: a pure function of (seed, shard, position), so resuming is exact.

The training tokens are cut into windows. A seeded permutation deals them into one shard per planned learner, and every
pass over a shard has its own order. Learners never share a window, whatever their pace. A stream over all shards (the
data-parallel baseline, and the warm start) draws at each step what all learners together draw at that step: paired
comparisons see the same data.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.errors import CheckpointError, ConfigError
from diloco.training.sources import Corpus, Tokens


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


@dataclass(frozen=True)
class ShardedWindows:
    """Windows of T + 1 tokens, of which neighbours share one, dealt into `num_shards` equal shards."""

    num_windows: int
    num_shards: int
    seed: int

    @property
    def shard_windows(self) -> int:
        """Windows in one shard; a remainder below `num_shards` is left out."""
        return self.num_windows // self.num_shards

    def window(self, shard: int, position: int) -> int:
        """The window that `shard` reads at `position` (0, 1, 2 … over all passes)."""
        epoch, place = divmod(position, self.shard_windows)
        seed = self.seed.to_bytes(8, "little")
        # Order within the pass first, then the deal, which is the same in every pass.
        place = permute(
            place, self.shard_windows, seed + b"pass" + shard.to_bytes(8, "little") + epoch.to_bytes(8, "little")
        )
        return permute(place * self.num_shards + shard, self.num_windows, seed + b"deal")


class Stream:
    """A learner's batches: at every draw `batch` sequences from each of `shards`.

    `position` is the number of sequences drawn from each shard so far. Raises ConfigError when the data has fewer
    windows than shards, or when a token is not in the vocabulary.
    """

    def __init__(
        self, corpus: Corpus, sequence_length: int, num_shards: int, shards: Sequence[int], batch: int, seed: int
    ) -> None:
        self.sequence_length = sequence_length
        self.batch = batch
        self.position = 0
        self._tokens = corpus.train
        self._vocab_size = corpus.vocab_size
        self._shards = ShardedWindows((len(corpus.train) - 1) // sequence_length, num_shards, seed)
        if self._shards.shard_windows < 1:
            raise ConfigError(
                f"the data has {self._shards.num_windows} sequences for {num_shards} learners; give more data"
            )
        self._fingerprint = corpus.fingerprint()
        self.select(shards)

    def select(self, shards: Sequence[int]) -> None:
        """Read from these shards from now on, at the same position."""
        self.shards = tuple(shards)
        if not all(0 <= shard < self._shards.num_shards for shard in self.shards):
            raise ConfigError(f"shard {max(self.shards)} does not exist; shards are 0 to {self._shards.num_shards - 1}")

    @property
    def num_rows(self) -> int:
        """Sequences in one batch."""
        return len(self.shards) * self.batch

    def next(self, rows: slice = slice(None)) -> Tensor:
        """The next batch: int64 (num_rows, sequence_length + 1), rows in shard order; of it only `rows`."""
        positions = range(self.position, self.position + self.batch)
        windows = [self._shards.window(shard, position) for shard in self.shards for position in positions]
        self.position += self.batch
        batch = _read_windows(self._tokens, windows[rows], self.sequence_length)
        if int(batch.max()) >= self._vocab_size:
            raise ConfigError(
                f"token {int(batch.max())} is outside the vocabulary of {self._vocab_size}; correct data.vocab_size"
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The cursor: position, and what it is a position in."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved cursor. Raises CheckpointError when it belongs to other data, seed or division."""
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"the checkpoint's data cursor has {key} = {state.get(key)} where this run has {value}; "
                    "resume with the same data, seed and number of learners"
                )
        self.position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "data": self._fingerprint,
            "sequence_length": self.sequence_length,
            "seed": self._shards.seed,
            "num_shards": self._shards.num_shards,
        }


def held_out_batches(corpus: Corpus, sequence_length: int, num_sequences: int, batch: int) -> list[Tensor]:
    """At most `num_sequences` held-out sequences, spread evenly; the same for all learners.

    Raises ConfigError when there is none.
    """
    available = (len(corpus.held_out) - 1) // sequence_length
    count = min(num_sequences, available)
    if count < 1:
        raise ConfigError(
            f"the held-out part has {len(corpus.held_out)} tokens, less than one sequence of {sequence_length} + 1; "
            "hold out more"
        )
    windows = [available * k // count for k in range(count)]
    return [
        _read_windows(corpus.held_out, windows[start : start + batch], sequence_length)
        for start in range(0, count, batch)
    ]


def _read_windows(tokens: Tokens, windows: Sequence[int], length: int) -> Tensor:
    return torch.from_numpy(
        np.stack([tokens.read(window * length, window * length + length + 1) for window in windows])
    )
