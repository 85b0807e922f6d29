"""The sequences that a learner trains on: the training tokens are cut into windows, which are dealt to the learners.

`Stream` reads fixed shards: a pure function of (seed, shard, position), so resuming is exact. A seeded permutation
deals the windows into one shard per planned learner, and every pass over a shard has its own order. Learners never
share a window, whatever their pace. A learner beyond the planned ones reads one of these shards, in an order of its
own. A stream over all shards (the data-parallel baseline, and the warm start) draws at
each step what all learners together draw at that step: paired comparisons see the same data.

`LeasedStream` reads what the syncer leases (`core.leases`): more, fewer or other learners neither skip a window nor
repeat one.

Where texts are read while training, `text_stream.TextStream` takes the place of `Stream`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.core.leases import DataSet
from diloco.core.permutation import permute, place_of_unit
from diloco.errors import CheckpointError, ConfigError
from diloco.learner import Learner
from diloco.learner.leased import LeasedUnits
from diloco.training.sources import Corpus, Tokens


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
        """The window that `shard` reads at `position` (0, 1, 2 … over all passes).

        A `shard` of `num_shards` or more is the one of its remainder, read in another order.
        """
        epoch, place = divmod(position, self.shard_windows)
        seed = self.seed.to_bytes(8, "little")
        # Order within the pass first, then the deal, which is the same in every pass.
        place = permute(
            place, self.shard_windows, seed + b"pass" + shard.to_bytes(8, "little") + epoch.to_bytes(8, "little")
        )
        return permute(place * self.num_shards + shard % self.num_shards, self.num_windows, seed + b"deal")


class Windows:
    """The training tokens as windows of T + 1 tokens, of which neighbours share one."""

    def __init__(self, corpus: Corpus, length: int) -> None:
        self.num = (len(corpus.train) - 1) // length
        self.fingerprint = corpus.fingerprint()
        self._tokens, self._length, self._vocab_size = corpus.train, length, corpus.vocab_size

    def read(self, windows: Sequence[int]) -> Tensor:
        """int64 (len(windows), T + 1). Raises ConfigError when a token is not in the vocabulary."""
        batch = _read_windows(self._tokens, windows, self._length)
        if int(batch.max()) >= self._vocab_size:
            raise ConfigError(
                f"token {int(batch.max())} is outside the vocabulary of {self._vocab_size}; correct data.vocab_size"
            )
        return batch


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
        self._windows = Windows(corpus, sequence_length)
        self._shards = ShardedWindows(self._windows.num, num_shards, seed)
        if self._shards.shard_windows < 1:
            raise ConfigError(
                f"the data has {self._shards.num_windows} sequences for {num_shards} learners; give more data"
            )
        self.select(shards)

    def select(self, shards: Sequence[int]) -> None:
        """Read from these shards from now on, at the same position."""
        self.shards = tuple(shards)

    @property
    def num_rows(self) -> int:
        """Sequences in one batch."""
        return len(self.shards) * self.batch

    def has_next(self) -> bool:
        """Passes follow each other without end."""
        return True

    def next(self, rows: slice = slice(None)) -> Tensor:
        """The next batch: int64 (num_rows, sequence_length + 1), rows in shard order; of it only `rows`."""
        positions = range(self.position, self.position + self.batch)
        windows = [self._shards.window(shard, position) for shard in self.shards for position in positions]
        self.position += self.batch
        return self._windows.read(windows[rows])

    def state_dict(self) -> dict[str, Any]:
        """The cursor: position, and what it is a position in."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved cursor. Raises CheckpointError when it belongs to other data, seed or division."""
        require_same(self._identity(), state)
        self.position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "data": self._windows.fingerprint,
            "sequence_length": self.sequence_length,
            "seed": self._shards.seed,
            "num_shards": self._shards.num_shards,
        }


class LeasedStream:
    """A learner's batches of leased windows: `batch` for each of `num_shares` learners until it leases, then `batch`.

    Before it leases, it reads the run's first windows, all by itself (the warm start).

    Arguments:
        lease_steps: inner steps that a lease lasts.

    Attributes:
        position: windows drawn so far of each share.
    """

    def __init__(
        self, corpus: Corpus, sequence_length: int, num_shares: int, batch: int, seed: int, lease_steps: int
    ) -> None:  # fmt: skip
        self.sequence_length, self.batch, self.position = sequence_length, batch, 0
        self._windows, self._seed, self._lease_steps = Windows(corpus, sequence_length), seed, lease_steps
        self._num_shares = num_shares
        self._units: LeasedUnits | None = None
        self._next: list[int] = []

    def select(self, shards: Sequence[int]) -> None:
        """Read for this many learners from now on."""
        self._num_shares = len(shards)

    def lease(self, learner: Learner) -> None:
        """Read from now on what the syncer leases to this learner."""
        identity = ":".join(f"{key}={value}" for key, value in self._identity().items())
        digest = hashlib.sha256(identity.encode()).hexdigest()
        data = DataSet(self._windows.num, 0, digest, self.sequence_length)
        self._units = learner.lease(data, num_ahead=self._lease_steps * self.num_rows)

    @property
    def num_rows(self) -> int:
        """Sequences in one batch."""
        return self._num_shares * self.batch

    def has_next(self) -> bool:
        """Draw the next batch; False where the learner was drained while it waited for a lease."""
        if not self._next:
            first = self.position * self._num_shares
            units = self._units
            self._next = list(range(first, first + self.num_rows)) if units is None else units.draw(self.num_rows)
        return bool(self._next)

    def next(self, rows: slice = slice(None)) -> Tensor:
        """The batch drawn: int64 (num_rows, sequence_length + 1); of it only `rows`."""
        windows = [place_of_unit(unit, self._windows.num, self._seed) for unit in self._next]
        self.position, self._next = self.position + self.batch, []
        if self._units is not None:
            self._units.take()
        return self._windows.read(windows[rows])

    def state_dict(self) -> dict[str, Any]:
        """What is read, and how far the warm start was; leased units are in the learner's state."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `Stream.load_state_dict`."""
        require_same(self._identity(), state)
        self.position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "data": self._windows.fingerprint,
            "sequence_length": self.sequence_length,
            "seed": self._seed,
            "num_shards": "leases",
        }


def require_same(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a saved cursor says the same as this run where this run says something."""
    for key, value in here.items():
        if saved.get(key) != value:
            raise CheckpointError(
                f"the checkpoint's data cursor has {key} = {saved.get(key)} where this run has {value}; "
                "resume with the same [data], seed and number of learners"
            )


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
