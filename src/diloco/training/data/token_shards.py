"""A directory of token shards: files of bare tokens, and an index that describes them.

    index.json              sizes, dtype, vocabulary, sha256 of each shard, source of the texts; written last
    unfinished.json         while shards are being written: the complete shards, and the position of the reader
    train-00000.bin …       tokens, little-endian, document after document
    held_out-00000.bin …    likewise, if the data has a held-out part
    tokenizer/              unless tokens are bytes

A shard ends with the batch of documents that fills it, so the position of the reader after it determines the following
shards: a restart after a crash writes the same bytes.
"""

import hashlib
import json
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
from diloco.whole_files import whole_file, write_whole

INDEX, UNFINISHED, TOKENIZER = "index.json", "unfinished.json", "tokenizer"
PartName = Literal["held_out", "train"]
PARTS: tuple[PartName, ...] = ("held_out", "train")
_PARTIAL = tuple(f".{name}" for name in (*PARTS, UNFINISHED, INDEX))
"""Prefixes of the names of partial files, which are being written or were left by a crash."""
_NOTHING = (0, 0)
"""The end of documents of which none are read."""
_ADVICE: dict[PartName, str] = {
    "held_out": "to hold out; check data.held_out_paths or data.held_out_split",
    "train": "to train on; check data.paths or data.dataset",
}
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
    """The complete shards of a directory.

    Attributes:
        made_from: keys of the `[data]` table, the sha256 of the documents, and the requested size of a shard.
    """

    made_from: dict[str, Any]
    shards: dict[PartName, list[TokenShard]]

    @model_validator(mode="after")
    def _named_in_order(self) -> Self:
        for part in PARTS:
            for number, shard in enumerate(self.shards[part]):
                if shard.file != _shard_name(part, number):
                    raise ValueError(f"{shard.file!r} is listed where {_shard_name(part, number)} should be")
        return self

    @property
    def whole(self) -> list[TokenShard]:
        """The shards of both parts."""
        return [shard for part in PARTS for shard in self.shards[part]]

    def check(self, path: Path, made_from: dict[str, Any]) -> None:
        """Compare the shards beside this index, whose file is `path`, and their source.

        Raises ConfigError for another source, StoreError for a shard with other bytes than were written.
        """
        for key, value in made_from.items():
            if self.made_from.get(key) != value:
                raise ConfigError(
                    f"{path} was made with {key} = {json.dumps(self.made_from.get(key))}, which is now "
                    f"{json.dumps(value)}; remove the directory or choose another one"
                )
        for shard in self.whole:
            place = path.with_name(shard.file)
            with translated(OSError, StoreError, f"cannot read the token shard {place}", "make the directory again"):
                with place.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                raise StoreError(
                    f"the token shard {place} differs from the sha256 of its index; remove the directory and make it "
                    "again"
                )


class PartialIndex(_Shards):
    """The index while shards are being written. `cursors`: state of the reader of each started part, or "done"."""

    cursors: dict[PartName, Any]


class TokenIndex(_Shards):
    """The index of a directory.

    Attributes:
        dtype: numpy name of the type of a token.
    """

    directory: Path = Field(exclude=True)
    format: Literal[1]
    dtype: Literal["uint8", "uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    tokenizer: str | None

    @property
    def tokenizer_name(self) -> str:
        """The argument of `load_tokenizer`, or `bytes`."""
        return "bytes" if self.tokenizer is None else str(self.directory / Path(self.tokenizer).name)

    def total(self, counter: Literal["num_tokens", "num_documents"], part: PartName) -> int:
        """Number of tokens or documents of a part."""
        return sum(getattr(shard, counter) for shard in self.shards[part])

    def arrays(self, part: PartName) -> list[npt.NDArray[Any]]:
        """Memory maps of the shards of a part. Raises ConfigError for a shard of another size than in the index."""
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
    """Read the index of a directory that `diloco tokenize` wrote. Raises ConfigError unless it is complete."""
    path = directory / INDEX
    if not path.exists() and (directory / UNFINISHED).exists():
        raise ConfigError(f"{directory} is not finished; run `diloco tokenize` again to continue it")
    advice = "give a directory that `diloco tokenize` wrote, or make it again"
    with translated((OSError, *MALFORMED), ConfigError, f"cannot read {path}", advice):
        return validate(TokenIndex, {**json.loads(path.read_bytes()), "directory": directory}, "its values")


@dataclass
class ShardProgress:
    """Progress of writing a directory, with the shard that is being written.

    Attributes:
        num_new_tokens: tokens that this process has written.
        num_shards: complete shards.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_new_tokens: int = 0
    num_shards: int = 0


def write_token_shards(
    data: DataTable, directory: Path, *, shard_tokens: int, report: Callable[[ShardProgress], None] = lambda _: None
) -> TokenIndex:
    """Write the tokens of a `text` or `huggingface` table as shards, or continue an earlier call that was interrupted.

    The shards of a complete directory are compared with its index. Local data is first read completely, to compare it
    with the source of the directory.

    Arguments:
        shard_tokens: a shard ends with the batch of documents (`reading.BATCH_CHARACTERS`) that reaches this size.
        report: called after every batch.

    Raises:
        ConfigError: the data cannot be read, or the directory was made from other data.
        StoreError: the directory cannot be written, or a shard was changed.
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
    if held_out is None:  # a run holds out a fraction at the end of the tokens itself
        end = held_out_end(train, data.held_out_documents) if data.stream else _NOTHING
        readings = {"held_out": (train, DocumentShard(end=end)), "train": (train, DocumentShard(begin=end))}
    else:
        readings = {"held_out": (held_out, DocumentShard()), "train": (train, DocumentShard())}
    with translated(OSError, StoreError, f"cannot write to {directory}", "free disk space or choose another directory"):
        directory.mkdir(parents=True, exist_ok=True)
        writer = _Writer(directory, encoder, made_from, shard_tokens, report)
        for part in PARTS:
            writer.write_part(part, *readings[part])
        return writer.finish()


class _Writer:
    """Writes the shards of a directory that an earlier process has not completed, and finally the index."""

    def __init__(
        self,
        directory: Path,
        encoder: Encoder,
        made_from: dict[str, Any],
        shard_tokens: int,
        report: Callable[[ShardProgress], None],
    ) -> None:
        self._directory, self._encoder, self._shard_tokens, self._report = directory, encoder, shard_tokens, report
        self._unfinished = PartialIndex(made_from=made_from, shards={part: [] for part in PARTS}, cursors={})
        path = directory / UNFINISHED
        if path.exists():
            with translated(MALFORMED, StoreError, f"{path} cannot be read", "remove the directory"):
                self._unfinished = validate(PartialIndex, json.loads(path.read_bytes()), "its values")
            self._unfinished.check(path, made_from)
        elif not all(path.name.startswith(_PARTIAL) for path in directory.iterdir()):
            raise ConfigError(f"{directory} contains other files than token shards; choose another directory")
        self._shards, self._cursors = self._unfinished.shards, self._unfinished.cursors
        whole = self._unfinished.whole
        num_documents = sum(shard.num_documents for shard in whole)
        self._progress = ShardProgress(num_documents, sum(shard.num_tokens for shard in whole), num_shards=len(whole))
        _write(path, self._unfinished)

    def write_part(self, part: PartName, documents: Documents, shard: DocumentShard) -> None:
        """Write the remaining shards of a part. Raises ConfigError if it has no tokens."""
        cursor = self._cursors.get(part)
        at_end = cursor == "done"
        reader = DocumentReader(documents, shard, state=None if at_end else cursor)
        while not at_end:
            written, at_end = self._write_shard(_shard_name(part, len(self._shards[part])), reader)
            if written.num_tokens:
                self._shards[part].append(written)
                self._progress.num_shards += 1
            self._cursors[part] = "done" if at_end else reader.state_dict()
            _write(self._directory / UNFINISHED, self._unfinished)
        if not self._shards[part] and shard.end != _NOTHING:
            raise ConfigError(f"the data has no texts {_ADVICE[part]}")

    def _write_shard(self, name: str, reader: DocumentReader) -> tuple[TokenShard, bool]:
        """Write the next shard unless it is empty. Returns it, and whether it is the last one."""
        progress = self._progress
        tokens_before, documents_before = progress.num_tokens, progress.num_documents
        found, at_end = hashlib.sha256(), False
        with whole_file(self._directory / name) as partial, partial.open("wb") as file:
            while progress.num_tokens - tokens_before < self._shard_tokens and not at_end:
                batch, at_end = reader.batch()
                tokens = self._encoder.encode(batch)
                raw = tokens.astype(self._encoder.dtype.newbyteorder("<"), copy=False).tobytes()
                file.write(raw)
                found.update(raw)
                progress.num_documents += sum(each.is_end for each in batch)
                progress.num_tokens += len(tokens)
                progress.num_new_tokens += len(tokens)
                self._report(progress)
        if progress.num_tokens == tokens_before:
            (self._directory / name).unlink()
        num_tokens, num_documents = progress.num_tokens - tokens_before, progress.num_documents - documents_before
        shard = TokenShard(file=name, num_tokens=num_tokens, num_documents=num_documents, sha256=found.hexdigest())
        return shard, at_end

    def finish(self) -> TokenIndex:
        """Write the tokenizer and the index."""
        directory, tokenizer = self._directory, self._encoder.tokenizer
        if tokenizer is not None:
            # The library raises Exception itself when the disk is full.
            with translated(Exception, StoreError, f"cannot write {directory / TOKENIZER}", "free disk space"):
                tokenizer.save_pretrained(directory / TOKENIZER)
        for path in directory.iterdir():
            if path.name.startswith(_PARTIAL):  # left by a process of another host
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
