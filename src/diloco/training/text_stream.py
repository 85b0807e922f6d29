"""Sequences from documents that are read while training: neither the texts nor their tokens are held, or written.

Each shard of a run reads its documents (`dealing.Deal`), cuts their tokens into windows of T + 1 tokens of which
neighbours share one, and draws from a buffer of windows: the one drawn is replaced by the next one read. At the end of
a pass the buffer is emptied, and what is less than a window is left out; so every pass draws every window once. The
place that is drawn from the buffer follows from seed, shard and number of the draw.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diloco.errors import ConfigError
from diloco.training.data import require_same
from diloco.training.dealing import Deal, Reader
from diloco.training.encoding import TextSource
from diloco.training.rows import Document


class ShardStream:
    """The sequences of one shard, pass after pass. A `shard` of `num_shards` or more is the one of its remainder, with
    another order of the parts and other draws.

    Attributes:
        num_drawn: sequences drawn so far.
    """

    def __init__(
        self,
        source: TextSource,
        length: int,
        shard: int,
        num_shards: int,
        seed: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        documents, parts = source.documents, len(source.documents.parts)
        deal = Deal(shard % num_shards, num_shards, documents.by_parts and parts % num_shards == 0, begin=source.begin)
        self._encoder, self._length = source.encoder, length
        self._name = f"shard {shard} of {num_shards}"
        self._key = seed.to_bytes(8, "little") + b"draw" + shard.to_bytes(8, "little")
        order = seed + (shard // num_shards << 32)  # seeds are below 2**32
        self._reader = Reader(documents, deal, order, None if state is None else state["reader"])
        self._buffer = np.empty((source.shuffle_sequences, length + 1), dtype=np.int32)
        self._pending: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.num_drawn = self._num_buffered = 0
        self._is_over = False  # the pass is read to its end
        if state is not None:
            self._pending, buffer = state["pending"].numpy().copy(), state["buffer"].numpy()
            self.num_drawn, self._num_buffered, self._is_over = int(state["num_drawn"]), len(buffer), state["is_over"]
            self._buffer[: len(buffer)] = buffer

    @property
    def num_held_tokens(self) -> int:
        """Tokens in memory, less than in the buffer and one batch of documents."""
        return self._num_buffered * (self._length + 1) + len(self._pending)

    def draw(self) -> npt.NDArray[np.int32]:
        """The next sequence, int32 (T + 1,). Raises ConfigError when a whole pass has none."""
        self._fill()
        if not self._num_buffered:
            self._pending, self._is_over = self._pending[:0], False
            self._fill()
            if not self._num_buffered:
                raise ConfigError(
                    f"{self._name} of the stream has less than one sequence of {self._length} + 1 tokens; give more "
                    "data, or hold out less of it (data.held_out_documents)"
                )
        number = self.num_drawn.to_bytes(8, "little")
        place = int.from_bytes(hashlib.blake2b(number, digest_size=8, key=self._key).digest(), "little")
        place %= self._num_buffered
        drawn: npt.NDArray[np.int32] = self._buffer[place].copy()
        self._num_buffered -= 1
        self._buffer[place] = self._buffer[self._num_buffered]
        self.num_drawn += 1
        return drawn

    def _fill(self) -> None:
        """Fill the buffer, as far as the pass goes."""
        while self._num_buffered < len(self._buffer) and (window := self._window()) is not None:
            self._buffer[self._num_buffered] = window
            self._num_buffered += 1

    def _window(self) -> npt.NDArray[np.int32] | None:
        """The next window of the pass; None where it is over."""
        while len(self._pending) <= self._length:
            if self._is_over:
                return None
            batch, self._is_over = self._reader.batch()
            # What follows a piece of a file is mostly another learner's, so each piece has an end.
            tokens = self._encoder.encode([Document(each.text) for each in batch])
            self._pending = np.concatenate([self._pending, tokens.astype(np.int32)])
        window, self._pending = self._pending[: self._length + 1], self._pending[self._length :]
        return window

    def state_dict(self) -> dict[str, Any]:
        """Where the reader is, and all that was read and not drawn."""
        return {
            "reader": self._reader.state_dict(),
            "pending": torch.from_numpy(self._pending.copy()),
            "buffer": torch.from_numpy(self._buffer[: self._num_buffered].copy()),
            "num_drawn": self.num_drawn,
            "is_over": self._is_over,
        }


class TextStream:
    """A learner's batches, as those of `data.Stream`: at every draw `batch` sequences from each of `shards`.

    A position beyond what was drawn is reached at the next draw, by reading up to there; an earlier one by reading from
    the beginning.

    Attributes:
        position: sequences drawn so far from each shard.
    """

    def __init__(
        self, source: TextSource, sequence_length: int, num_shards: int, shards: Sequence[int], batch: int, seed: int
    ) -> None:
        self.sequence_length, self.batch, self.position = sequence_length, batch, 0
        self._source, self._fingerprint = source, source.fingerprint()
        self._num_shards, self._seed = num_shards, seed
        self._streams: dict[int, ShardStream] = {}
        self.select(shards)

    def select(self, shards: Sequence[int]) -> None:
        """Read from these shards from now on, at the same position."""
        self.shards = tuple(shards)
        self._streams = {shard: stream for shard, stream in self._streams.items() if shard in self.shards}

    @property
    def num_rows(self) -> int:
        """Sequences in one batch."""
        return len(self.shards) * self.batch

    @property
    def num_held_tokens(self) -> int:
        """Tokens in memory."""
        return sum(stream.num_held_tokens for stream in self._streams.values())

    def has_next(self) -> bool:
        """Passes follow each other without end."""
        return True

    def next(self, rows: slice = slice(None)) -> Tensor:
        """The next batch: int64 (num_rows, sequence_length + 1), rows in shard order; of it only `rows`."""
        streams = [self._at_position(shard) for shard in self.shards]
        drawn = np.stack([stream.draw() for stream in streams for _ in range(self.batch)])
        self.position += self.batch
        return torch.from_numpy(drawn[rows].astype(np.int64))

    def _at_position(self, shard: int) -> ShardStream:
        stream = self._streams.get(shard)
        if stream is None or stream.num_drawn > self.position:
            stream = self._streams[shard] = self._open(shard)
        while stream.num_drawn < self.position:
            stream.draw()
        return stream

    def _open(self, shard: int, state: dict[str, Any] | None = None) -> ShardStream:
        return ShardStream(self._source, self.sequence_length, shard, self._num_shards, self._seed, state)

    def state_dict(self) -> dict[str, Any]:
        """The cursor: position, what it is a position in, and the state of each shard that was read."""
        streams = {str(shard): stream.state_dict() for shard, stream in self._streams.items()}
        return {"position": self.position, **self._identity(), "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved cursor. Raises CheckpointError when it belongs to other data, seed or division."""
        require_same(self._identity(), state)
        self.position = int(state["position"])
        self._streams = {
            shard: self._open(shard, state["streams"][str(shard)])
            for shard in self.shards
            if str(shard) in state["streams"]
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "data": self._fingerprint,
            "sequence_length": self.sequence_length,
            "seed": self._seed,
            "num_shards": self._num_shards,
            "shuffle_sequences": self._source.shuffle_sequences,
        }
