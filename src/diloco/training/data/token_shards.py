"""A directory of token shards: files of bare tokens, and an index that describes them.

    index.json              sizes, dtype, vocabulary, sha256 of each shard, what they were made from; written last
    unfinished.json         instead of it while shards are being made: the whole ones, and where reading goes on
    train-00000.bin …       tokens, little-endian, documents one after the other
    held_out-00000.bin …    likewise, where the data names a held-out part
    tokenizer/              where tokens are not bytes

A shard ends with the batch of documents that fills it, so the cursor after it determines the rest: what is made after a
kill has the same bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from diloco.config import DataTable
from diloco.errors import ConfigError, StoreError, translated
from diloco.escaping import MALFORMED
from diloco.tables import Table, validate
from diloco.training.data.documents import Documents, open_documents
from diloco.training.data.reading import DocumentReader, DocumentShard, Encoder, held_out_end
from diloco.whole_files import hidden_name, remove_leftovers, write_whole

INDEX, UNFINISHED, TOKENIZER = "index.json", "unfinished.json", "tokenizer"
PartName = Literal["held_out", "train"]
PARTS: tuple[PartName, ...] = ("held_out", "train")
_PARTIAL = tuple(f".{name}" for name in (*PARTS, UNFINISHED, INDEX))
"""How the hidden names of files begin that are being written, or that a kill has left."""
_MADE_FROM = {
    "kind", "paths", "held_out_paths", "tokenizer", "dataset", "dataset_config", "split", "held_out_split",
    "text_column",
}  # fmt: skip


class TokenShard(Table):
    """A file of tokens."""

    file: str
    num_tokens: int = Field(ge=0)
    num_documents: int = Field(ge=0)
    sha256: str


class _Shards(Table):
    """The whole shards of a directory.

    Attributes:
        made_from: keys of the `[data]` table, the sha256 of the documents, and what a shard was to hold.
    """

    made_from: dict[str, Any]
    shards: dict[PartName, list[TokenShard]]

    @model_validator(mode="after")
    def _named_in_order(self) -> Self:
        for part in PARTS:
            for number, shard in enumerate(self.shards[part]):
                if shard.file != _shard_name(part, number):
                    raise ValueError(f"{shard.file!r} is where {_shard_name(part, number)} should be")
        return self

    @property
    def whole(self) -> list[TokenShard]:
        """The shards of both parts."""
        return [shard for part in PARTS for shard in self.shards[part]]

    def check(self, path: Path, made_from: dict[str, Any]) -> None:
        """Compare the shards beside the file at `path`, which this is, and what they were made from.

        Raises ConfigError for other data, StoreError for a shard whose bytes are not those that were written.
        """
        for key, value in made_from.items():
            if self.made_from.get(key) != value:
                raise ConfigError(
                    f"{path} says {key} = {json.dumps(self.made_from.get(key))} where it would be {json.dumps(value)} "
                    "now; remove the directory or choose another one"
                )
        for shard in self.whole:
            place = path.with_name(shard.file)
            with translated(OSError, StoreError, f"cannot read the token shard {place}", "make the directory again"):
                with place.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                raise StoreError(
                    f"the bytes of the token shard {place} are not those of its index; remove the directory and make "
                    "it again"
                )


class PartialIndex(_Shards):
    """The file in place of the index while shards are made. `cursors`: state of the reader of each begun part."""

    cursors: dict[PartName, Any]


class TokenIndex(_Shards):
    """The index of a directory.

    Attributes:
        dtype: numpy's name of the type of a token.
    """

    directory: Path = Field(exclude=True)
    format: Literal[1]
    dtype: Literal["uint8", "uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    tokenizer: str | None

    @property
    def tokenizer_name(self) -> str:
        """What `load_tokenizer` takes, or `bytes`."""
        return "bytes" if self.tokenizer is None else str(self.directory / Path(self.tokenizer).name)

    def num(self, what: Literal["num_tokens", "num_documents"], part: PartName) -> int:
        """Tokens or documents of a part."""
        return sum(getattr(shard, what) for shard in self.shards[part])

    def arrays(self, part: PartName) -> list[npt.NDArray[Any]]:
        """Memory maps of the shards of a part. Raises ConfigError for one that has not the size of the index."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        arrays: list[npt.NDArray[Any]] = []
        for shard in self.shards[part]:
            path, expected = self.directory / shard.file, shard.num_tokens * dtype.itemsize
            with translated(OSError, ConfigError, f"cannot read the token shard {path}", "copy the whole directory"):
                size = path.stat().st_size
                if size != expected:
                    raise ConfigError(
                        f"token shard {path} has {size} bytes where its index says {expected}; copy the directory "
                        "again, or make it again with `diloco tokenize`"
                    )
                if expected:
                    arrays.append(np.memmap(path, dtype=dtype, mode="r"))
        return arrays


def read_index(directory: Path) -> TokenIndex:
    """The index of a directory that `diloco tokenize` wrote. Raises ConfigError unless there is a whole one."""
    path = directory / INDEX
    if not path.exists() and (directory / UNFINISHED).exists():
        raise ConfigError(f"{directory} is not finished; run `diloco tokenize` again, which goes on where it was")
    advice = "give a directory that `diloco tokenize` wrote, or make it again"
    with translated((OSError, *MALFORMED), ConfigError, f"cannot read {path}", advice):
        return validate(TokenIndex, {**json.loads(path.read_bytes()), "directory": directory}, "its values")


@dataclass
class ShardProgress:
    """What is made of a directory: `num_shards` whole ones and the one being written.

    Attributes:
        num_new_tokens: of `num_tokens`, those that this process has made.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_new_tokens: int = 0
    num_shards: int = 0


def write_token_shards(
    data: DataTable, directory: Path, *, shard_tokens: int, tell: Callable[[ShardProgress], None] = lambda _: None
) -> TokenIndex:
    """Write the tokens of a `text` or `huggingface` table as shards; goes on where an earlier call was ended.

    A directory that is complete is compared with its index, shard by shard. Local data is read whole before anything
    else, to compare it with what the directory was made from.

    Arguments:
        shard_tokens: a shard ends with the batch of documents (`reading.BATCH_CHARACTERS`) that brings it to so many.
        tell: called after every batch.

    Raises:
        ConfigError: the data cannot be read, or the directory was made from other data.
        StoreError: the disk refuses, or a shard was changed.
    """
    if data.kind not in ("text", "huggingface"):
        raise ConfigError(f'data.kind = "{data.kind}" has no texts to tokenise; use "text" or "huggingface"')
    train, held_out = open_documents(data)
    encoder = Encoder(data.tokenizer)
    made_from = data.model_dump(mode="json", include=_MADE_FROM) | {
        "documents_sha256": [each.digest(whole=True) for each in (train, held_out) if each is not None],
        "held_out_documents": data.held_out_documents if data.stream and held_out is None else None,
        "vocabulary": encoder.digest(),
        "shard_tokens": shard_tokens,
    }
    if (directory / INDEX).exists():
        index = read_index(directory)
        index.check(directory / INDEX, made_from)
        return index
    if held_out is None:  # of a fraction of the tokens, a run holds out the last ones
        end = held_out_end(train, data.held_out_documents) if data.stream else (0, 0)
        readings = {"held_out": (train, DocumentShard(end=end)), "train": (train, DocumentShard(begin=end))}
    else:
        readings = {"held_out": (held_out, DocumentShard()), "train": (train, DocumentShard())}
    with translated(OSError, StoreError, f"cannot write to {directory}", "free disk space or choose another directory"):
        directory.mkdir(parents=True, exist_ok=True)
        writer = _Writer(directory, encoder, made_from, shard_tokens, tell)
        for part in PARTS:
            writer.write_part(part, *readings[part])
        return writer.finish()


class _Writer:
    """Makes the shards of a directory after those that an earlier process has made whole, and its index at the end."""

    def __init__(
        self,
        directory: Path,
        encoder: Encoder,
        made_from: dict[str, Any],
        shard_tokens: int,
        tell: Callable[[ShardProgress], None],
    ) -> None:
        self._directory, self._encoder, self._shard_tokens, self._tell = directory, encoder, shard_tokens, tell
        self._unfinished = PartialIndex(made_from=made_from, shards={part: [] for part in PARTS}, cursors={})
        path = directory / UNFINISHED
        for part in PARTS:
            remove_leftovers(directory, f"{part}-*")
        if path.exists():
            with translated(MALFORMED, StoreError, f"{path} cannot be read", "remove the directory"):
                self._unfinished = validate(PartialIndex, json.loads(path.read_bytes()), "its values")
            self._unfinished.check(path, made_from)
        elif not all(path.name.startswith(_PARTIAL) for path in directory.iterdir()):
            raise ConfigError(f"{directory} holds something else than token shards; choose another directory")
        self._shards, self._cursors = self._unfinished.shards, self._unfinished.cursors
        whole = self._unfinished.whole
        num_documents = sum(shard.num_documents for shard in whole)
        self._made = ShardProgress(num_documents, sum(shard.num_tokens for shard in whole), num_shards=len(whole))
        _write(path, self._unfinished)

    def write_part(self, part: PartName, documents: Documents, deal: DocumentShard) -> None:
        """Make the shards of a part that are not there yet."""
        cursor = self._cursors.get(part)
        reader = None if cursor == "done" else DocumentReader(documents, deal, state=cursor)
        while reader is not None:
            shard, is_over = self._write_shard(_shard_name(part, len(self._shards[part])), reader)
            if shard.num_tokens:
                self._shards[part].append(shard)
                self._made.num_shards += 1
            self._cursors[part] = "done" if is_over else reader.state_dict()
            _write(self._directory / UNFINISHED, self._unfinished)
            reader = None if is_over else reader

    def _write_shard(self, name: str, reader: DocumentReader) -> tuple[TokenShard, bool]:
        """Write the next shard, but an empty one, and return whether there is nothing after it."""
        made = self._made
        tokens_before, documents_before = made.num_tokens, made.num_documents
        found, is_over = hashlib.sha256(), False
        partial = self._directory / hidden_name(name)
        try:
            with partial.open("wb") as file:
                while made.num_tokens - tokens_before < self._shard_tokens and not is_over:
                    batch, is_over = reader.batch()
                    tokens = self._encoder.encode(batch)
                    raw = tokens.astype(self._encoder.dtype.newbyteorder("<"), copy=False).tobytes()
                    file.write(raw)
                    found.update(raw)
                    made.num_documents += sum(each.is_end for each in batch)
                    made.num_tokens += len(tokens)
                    made.num_new_tokens += len(tokens)
                    self._tell(made)
                file.flush()
                os.fsync(file.fileno())
            if made.num_tokens > tokens_before:
                partial.replace(self._directory / name)
        finally:
            partial.unlink(missing_ok=True)
        num_tokens, num_documents = made.num_tokens - tokens_before, made.num_documents - documents_before
        shard = TokenShard(file=name, num_tokens=num_tokens, num_documents=num_documents, sha256=found.hexdigest())
        return shard, is_over

    def finish(self) -> TokenIndex:
        """Write the tokenizer and the index. Raises ConfigError where there is nothing to train on."""
        directory, tokenizer = self._directory, self._encoder.tokenizer
        if not self._shards["train"]:
            raise ConfigError("the data has no texts to train on; check data.paths or data.dataset")
        if tokenizer is not None:
            # Of a full disk the library raises Exception itself.
            with translated(Exception, StoreError, f"cannot write {directory / TOKENIZER}", "free disk space"):
                tokenizer.save_pretrained(directory / TOKENIZER)
        for path in directory.iterdir():
            if path.name.startswith(_PARTIAL):  # of a process on another host; nothing of it is needed any more
                path.unlink(missing_ok=True)
        values = {
            "format": 1,
            "dtype": self._encoder.dtype.name,
            "vocab_size": self._encoder.vocab_size,
            "tokenizer": None if tokenizer is None else TOKENIZER,
            "made_from": self._unfinished.made_from,
            "shards": self._shards,
        }
        index = TokenIndex.model_validate({**values, "directory": directory})
        _write(directory / INDEX, index)
        (directory / UNFINISHED).unlink(missing_ok=True)
        return index


def _write(path: Path, values: _Shards) -> None:
    write_whole(path, json.dumps(values.model_dump(mode="json"), indent=1) + "\n")


def _shard_name(part: str, number: int) -> str:
    return f"{part}-{number:05d}.bin"
