"""Batches that a learner trains on: sequences of T + 1 tokens; consecutive sequences share one token.

`Stream` divides the windows of tokens in memory, or memory-mapped, into one fixed shard per planned learner. The
sequences of a shard are a pure function of (seed, shard, position), so resuming is exact. A share of the windows
(`data.shared_fraction`) is in every shard, and each of the others in one, whatever the pace of the learners. A learner
beyond the planned ones reads one of these shards, in another order. A stream over all shards (the data-parallel
baseline, and the warm start) draws at each step the sequences that all learners together draw at that step, so that
paired comparisons see the same data.

`LeasedStream` reads the windows that the syncer leases (`protocol.leases`): no window is skipped or repeated when the
number of learners changes.

`TextStream` reads texts while training; neither the texts nor their tokens are kept in memory or written to disk. Each
shard reads its documents (`reading.DocumentShard`) and draws from a shuffle buffer of windows: the next window that is
read replaces the drawn one. At the end of a pass the buffer is emptied and a remainder shorter than a window is left
out, so every pass draws every window once. A hash of seed, shard and number of the draw selects the window.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diloco.errors import CheckpointError, ConfigError
from diloco.learner import Learner
from diloco.learner.leased_units import LeasedUnits
from diloco.protocol.leases import DataSet
from diloco.protocol.units import permute, place_of_unit
from diloco.training.data.corpus import Corpus, TextSource, Tokens
from diloco.training.data.reading import DocumentReader, DocumentShard


class BatchStream:
    """A learner's batches: at every draw `batch` sequences of each of `shards`.

    Attributes:
        identity: the data, seed and division that `position` refers to.
        position: sequences drawn so far from each shard.
        sharing: what is dealt to all learners, for people; empty where nothing is.
    """

    sharing = ""

    def __init__(self, shards: Sequence[int], batch: int, identity: dict[str, Any]) -> None:
        self.batch, self.position, self.identity = batch, 0, identity
        self.select(shards)

    def select(self, shards: Sequence[int]) -> None:
        """Continue with these shards at the same position."""
        self.shards = tuple(shards)

    @property
    def num_rows(self) -> int:
        """Sequences in one batch."""
        return len(self.shards) * self.batch

    def has_next(self) -> bool:
        """Whether there is another batch. By default there always is, pass after pass."""
        return True

    def next(self, rows: slice = slice(None)) -> Tensor:
        """`rows` of the next batch, which is int64 (num_rows, T + 1) in shard order."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The position, and the identity of the data."""
        return {"position": self.position, **self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises CheckpointError when it belongs to other data, seed or division."""
        for key, value in self.identity.items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"the checkpoint's data cursor has {key} = {state.get(key)} where this run has {value}; "
                    "resume with the same [data], seed and number of learners"
                )
        self.position = int(state["position"])


@dataclass(frozen=True)
class ShardedWindows:
    """Windows of T + 1 tokens: `num_shared` of them are in every shard, the others divided into `num_shards` equal
    parts."""

    num_windows: int
    num_shards: int
    seed: int
    num_shared: int = 0

    @property
    def own_windows(self) -> int:
        """Windows that only one shard has; a remainder below `num_shards` windows is left out."""
        return (self.num_windows - self.num_shared) // self.num_shards

    @property
    def shard_windows(self) -> int:
        """Windows of one shard."""
        return self.own_windows + self.num_shared

    def window(self, shard: int, position: int) -> int:
        """The window of `shard` at `position` (0, 1, 2 … over all passes).

        A shard of `num_shards` or more has the windows of shard mod `num_shards`, in another order.
        """
        epoch, place = divmod(position, self.shard_windows)
        seed = self.seed.to_bytes(8, "little")
        # First the order within the pass, then the division into shards, which is the same in every pass.
        place = permute(
            place, self.shard_windows, seed + b"pass" + shard.to_bytes(8, "little") + epoch.to_bytes(8, "little")
        )
        own = place - self.num_shared  # negative: a shared window
        index = place if own < 0 else self.num_shared + own * self.num_shards + shard % self.num_shards
        return permute(index, self.num_windows, seed + b"deal")


class WindowStream(BatchStream):
    """Batches of windows of the training tokens."""

    def __init__(
        self, corpus: Corpus, length: int, shards: Sequence[int], batch: int, seed: int, division: object
    ) -> None:
        identity = {"data": corpus.fingerprint(), "sequence_length": length, "seed": seed, "num_shards": division}
        super().__init__(shards, batch, identity)
        self._corpus, self._length, self._seed = corpus, length, seed
        self._num_windows = (len(corpus.train) - 1) // length

    def _read(self, windows: Sequence[int]) -> Tensor:
        """int64 (len(windows), T + 1). Raises ConfigError when a token is not in the vocabulary."""
        batch = _read_windows(self._corpus.train, windows, self._length)
        if int(batch.max()) >= self._corpus.vocab_size:
            raise ConfigError(
                f"token {int(batch.max())} is outside the vocabulary of {self._corpus.vocab_size}; correct "
                "data.vocab_size"
            )
        return batch


class Stream(WindowStream):
    """Batches of fixed shards.

    Arguments:
        shared_fraction: share of the windows that every shard has, rounded up to whole windows.

    Raises ConfigError when the data leaves a shard no window of its own (unless all are shared), or a token is outside
    the vocabulary.
    """

    def __init__(
        self, corpus: Corpus, sequence_length: int, num_shards: int, shards: Sequence[int], batch: int, seed: int,
        shared_fraction: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(corpus, sequence_length, shards, batch, seed, num_shards)
        self.identity["shared_fraction"] = shared_fraction
        num_shared = math.ceil(shared_fraction * self._num_windows)
        self._sharded = ShardedWindows(self._num_windows, num_shards, seed, num_shared)
        if self._sharded.own_windows < 1 and shared_fraction < 1:
            shared = f", of which data.shared_fraction = {shared_fraction} shares {num_shared}; lower it, or"
            also = shared if num_shared else ";"
            raise ConfigError(
                f"the data has {self._num_windows} sequences for {num_shards} learners{also} give more data"
            )
        if num_shared:
            self.sharing = (
                f"deals {num_shared} of {self._num_windows} sequences to all {num_shards} learners in every pass, and "
                f"{self._sharded.own_windows} others to each"
            )

    def next(self, rows: slice = slice(None)) -> Tensor:
        """The next batch, as `BatchStream.next`."""
        positions = range(self.position, self.position + self.batch)
        windows = [self._sharded.window(shard, position) for shard in self.shards for position in positions]
        self.position += self.batch
        return self._read(windows[rows])


class LeasedStream(WindowStream):
    """Batches of leased windows.

    Before the first lease (in the warm start) it reads the first windows of the run, which belong to it alone.

    Arguments:
        shards: only their number matters.
        lease_steps: inner steps that a lease covers.
    """

    def __init__(
        self, corpus: Corpus, sequence_length: int, shards: Sequence[int], batch: int, seed: int, lease_steps: int
    ) -> None:  # fmt: skip
        super().__init__(corpus, sequence_length, shards, batch, seed, "leases")
        self._lease_steps = lease_steps
        self._units: LeasedUnits | None = None
        self._next: list[int] = []

    def lease(self, learner: Learner) -> None:
        """Continue with the windows that the syncer leases to this learner."""
        identity = ":".join(f"{key}={value}" for key, value in self.identity.items())
        data = DataSet(self._num_windows, 0, hashlib.sha256(identity.encode()).hexdigest(), self._length)
        self._units = learner.lease(data, num_ahead=self._lease_steps * self.num_rows)

    def has_next(self) -> bool:
        """Draw the next batch. False where the learner was drained while it waited for a lease."""
        if not self._next:
            first = self.position * len(self.shards)
            units = self._units
            self._next = list(range(first, first + self.num_rows)) if units is None else units.draw(self.num_rows)
        return bool(self._next)

    def next(self, rows: slice = slice(None)) -> Tensor:
        """The drawn batch, as `BatchStream.next`."""
        windows = [place_of_unit(unit, self._num_windows, self._seed) for unit in self._next]
        self.position, self._next = self.position + self.batch, []
        if self._units is not None:
            self._units.take()
        return self._read(windows[rows])


class TextShard:
    """The sequences of one shard of a stream of texts, pass after pass.

    A shard of `num_shards` or more has the documents of shard mod `num_shards`, with another order of the parts and
    other draws.

    Attributes:
        num_drawn: sequences drawn so far.
    """

    def __init__(self, stream: "TextStream", shard: int, state: dict[str, Any] | None = None) -> None:
        source, num_shards, seed = stream.source, stream.num_shards, stream.seed
        documents, parts = source.documents, len(source.documents.parts)
        documents_of_shard = DocumentShard(
            shard % num_shards, num_shards, documents.by_parts and parts % num_shards == 0, source.begin,
            shared_fraction=stream.shared_fraction, seed=seed,
        )  # fmt: skip
        self._encoder, self._length = source.encoder, stream.length
        self._name = f"shard {shard} of {num_shards}"
        self._key = seed.to_bytes(8, "little") + b"draw" + shard.to_bytes(8, "little")
        # Seeds are below 2**32. Shards with common documents have orders of their own.
        order = seed + ((shard if stream.shared_fraction else shard // num_shards) << 32)
        self._reader = DocumentReader(documents, documents_of_shard, order, None if state is None else state["reader"])
        self._buffer = np.empty((source.shuffle_sequences, stream.length + 1), dtype=np.int32)
        self._pending: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.num_drawn = self._num_buffered = 0
        self._is_over = False  # the reader is at the end of the pass
        if state is not None:
            self._pending, buffer = state["pending"].numpy().copy(), state["buffer"].numpy()
            self.num_drawn, self._num_buffered, self._is_over = int(state["num_drawn"]), len(buffer), state["is_over"]
            self._buffer[: len(buffer)] = buffer

    def draw(self) -> npt.NDArray[np.int32]:
        """The next sequence, int32 (T + 1,). Raises ConfigError when a pass has no sequence."""
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
        """Fill the buffer, up to the end of the pass."""
        while self._num_buffered < len(self._buffer) and (window := self._window()) is not None:
            self._buffer[self._num_buffered] = window
            self._num_buffered += 1

    def _window(self) -> npt.NDArray[np.int32] | None:
        """The next window of the pass; None at its end."""
        while len(self._pending) <= self._length:
            if self._is_over:
                return None
            batch, self._is_over = self._reader.batch()
            # The next piece of a file mostly belongs to another learner, so each piece gets an end of text.
            tokens = self._encoder.encode([replace(each, is_end=True) for each in batch])
            self._pending = np.concatenate([self._pending, tokens.astype(np.int32)])
        window, self._pending = self._pending[: self._length + 1], self._pending[self._length :]
        return window

    def state_dict(self) -> dict[str, Any]:
        """The position of the reader, and the tokens that were read and not drawn."""
        return {
            "reader": self._reader.state_dict(),
            "pending": torch.from_numpy(self._pending.copy()),
            "buffer": torch.from_numpy(self._buffer[: self._num_buffered].copy()),
            "num_drawn": self.num_drawn,
            "is_over": self._is_over,
        }


class TextStream(BatchStream):
    """Batches of texts that are read while training.

    Attributes:
        source, length, num_shards, seed, shared_fraction: as given; all of its shards have them in common.

    After a change of `position` the next draw reads up to the new position; for an earlier position it reads from the
    beginning.
    """

    def __init__(
        self, source: TextSource, sequence_length: int, num_shards: int, shards: Sequence[int], batch: int, seed: int,
        shared_fraction: float = 0.0,
    ) -> None:  # fmt: skip
        self.source, self.length, self.num_shards, self.seed = source, sequence_length, num_shards, seed
        self.shared_fraction = shared_fraction
        self._streams: dict[int, TextShard] = {}
        identity = {
            "data": source.fingerprint(),
            "sequence_length": sequence_length,
            "seed": seed,
            "num_shards": num_shards,
            "shuffle_sequences": source.shuffle_sequences,
            "shared_fraction": shared_fraction,
        }
        super().__init__(shards, batch, identity)
        if shared_fraction:
            self.sharing = f"deals {shared_fraction} of the texts to all {num_shards} learners in every pass"

    def select(self, shards: Sequence[int]) -> None:
        """As `BatchStream.select`; drops the buffers of other shards."""
        super().select(shards)
        self._streams = {shard: stream for shard, stream in self._streams.items() if shard in self.shards}

    def next(self, rows: slice = slice(None)) -> Tensor:
        """The next batch, as `BatchStream.next`."""
        streams = [self._at_position(shard) for shard in self.shards]
        drawn = np.stack([stream.draw() for stream in streams for _ in range(self.batch)])
        self.position += self.batch
        return torch.from_numpy(drawn[rows].astype(np.int64))

    def _at_position(self, shard: int) -> TextShard:
        stream = self._streams.get(shard)
        if stream is None or stream.num_drawn > self.position:
            stream = self._streams[shard] = TextShard(self, shard)
        while stream.num_drawn < self.position:
            stream.draw()
        return stream

    def state_dict(self) -> dict[str, Any]:
        """As `BatchStream.state_dict`, with the state of each shard that was read."""
        return {**super().state_dict(), "streams": {str(m): stream.state_dict() for m, stream in self._streams.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `BatchStream.load_state_dict`."""
        super().load_state_dict(state)
        saved = {int(shard): each for shard, each in state["streams"].items()}
        self._streams = {shard: TextShard(self, shard, saved[shard]) for shard in self.shards if shard in saved}


def held_out_batches(corpus: Corpus, sequence_length: int, num_sequences: int, batch: int) -> list[Tensor]:
    """At most `num_sequences` evenly spaced held-out sequences; the same for all learners.

    Raises ConfigError when there is none.
    """
    batches = spaced_windows(corpus.held_out, sequence_length, num_sequences, batch)
    if not batches:
        raise ConfigError(
            f"the held-out part has {len(corpus.held_out)} tokens, less than one sequence of {sequence_length} + 1; "
            "hold out more"
        )
    return batches


def spaced_windows(tokens: Tokens, length: int, num_windows: int, batch: int) -> list[Tensor]:
    """At most `num_windows` evenly spaced windows, as batches: int64 (B, length + 1)."""
    available = (len(tokens) - 1) // length
    count = max(0, min(num_windows, available))
    windows = [available * k // count for k in range(count)]
    return [_read_windows(tokens, windows[start : start + batch], length) for start in range(0, count, batch)]


def _read_windows(tokens: Tokens, windows: Sequence[int], length: int) -> Tensor:
    return torch.from_numpy(
        np.stack([tokens.read(window * length, window * length + length + 1) for window in windows])
    )
