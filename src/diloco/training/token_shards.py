"""A directory of token shards: files of bare tokens, and an index that says what they are.

    index.json              sizes, dtype, vocabulary, sha256 of each shard, what they were made from; written last
    unfinished.json         instead of it while shards are being made: those that are whole, and where reading goes on
    train-00000.bin …       tokens, little-endian, documents one after the other
    held_out-00000.bin …    likewise, where the data names a held-out part
    tokenizer/              where tokens are not bytes

A shard ends with the batch of documents that fills it, so the cursor after it says all: what is made after a kill has
the same bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.config import DataTable
from diloco.errors import ConfigError, StoreError, translated
from diloco.plain_json import MALFORMED
from diloco.training.dealing import Deal, Reader, held_out_end
from diloco.training.documents import open_documents
from diloco.training.encoding import Encoder
from diloco.training.rows import Documents
from diloco.whole_files import hidden_name, remove_leftovers, write_whole

FORMAT = 1
INDEX, UNFINISHED, TOKENIZER = "index.json", "unfinished.json", "tokenizer"
PARTS = ("held_out", "train")
_PARTIAL = tuple(f".{name}" for name in (*PARTS, UNFINISHED, INDEX))
"""How the hidden names of files begin that are being written, or that a kill has left."""
_MADE_FROM = (
    "kind", "paths", "held_out_paths", "tokenizer", "dataset", "dataset_config", "split", "held_out_split",
    "text_column",
)  # fmt: skip


@dataclass(frozen=True)
class TokenIndex:
    """What the index of a directory says.

    Attributes:
        dtype: numpy's name of the type of a token.
        made_from: keys of the `[data]` table, the sha256 of the documents, and what a shard was to hold.
        shards: by part, `train` and `held_out`: `file`, `num_tokens`, `num_documents` and `sha256` of each.
    """

    directory: Path
    dtype: str
    vocab_size: int
    tokenizer: str | None
    made_from: dict[str, Any]
    shards: dict[str, list[dict[str, Any]]]

    @property
    def tokenizer_name(self) -> str:
        """What `load_tokenizer` takes, or `bytes`."""
        return "bytes" if self.tokenizer is None else str(self.directory / self.tokenizer)

    def num(self, what: str, part: str) -> int:
        """`num_tokens` or `num_documents` of a part."""
        return sum(shard[what] for shard in self.shards[part])

    def arrays(self, part: str) -> list[npt.NDArray[Any]]:
        """Memory maps of the shards of a part. Raises ConfigError for one that has not the size of the index."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        arrays: list[npt.NDArray[Any]] = []
        for shard in self.shards[part]:
            path, expected = self.directory / shard["file"], shard["num_tokens"] * dtype.itemsize
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

    def check(self) -> None:
        """Read every shard. Raises StoreError for one whose bytes are not those that were written."""
        _check_bytes(self.directory, self.shards)


def read_index(directory: Path) -> TokenIndex:
    """The index of a directory that `diloco tokenize` wrote. Raises ConfigError unless there is a whole one."""
    path = directory / INDEX
    if not path.exists() and (directory / UNFINISHED).exists():
        raise ConfigError(f"{directory} is not finished; run `diloco tokenize` again, which goes on where it was")
    failed, advice = f"cannot read {path}", "give a directory that `diloco tokenize` wrote"
    with translated((OSError, *MALFORMED), ConfigError, failed, advice):
        values = json.loads(path.read_bytes())
        made, vocab_size, tokenizer = int(values["format"]), int(values["vocab_size"]), values["tokenizer"]
        index = TokenIndex(
            directory, values["dtype"], vocab_size, None if tokenizer is None else Path(tokenizer).name,
            dict(values["made_from"]), _checked(values["shards"]),
        )  # fmt: skip
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}")
    if made != FORMAT:
        raise ConfigError(f"{path} has format {made} and this version reads {FORMAT}; make it again")
    if index.dtype not in ("uint8", "uint16", "uint32"):
        raise ConfigError(f"{path} has dtype {index.dtype}, which is none of uint8, uint16 and uint32; make it again")
    return index


def _check_bytes(directory: Path, shards: dict[str, list[dict[str, Any]]]) -> None:
    for shard in [shard for part in PARTS for shard in shards[part]]:
        path = directory / shard["file"]
        with translated(OSError, StoreError, f"cannot read the token shard {path}", "make the directory again"):
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != shard["sha256"]:
            raise StoreError(
                f"the bytes of the token shard {path} are not those of its index; remove the directory and make it "
                "again"
            )


def _shard_name(part: str, number: int) -> str:
    return f"{part}-{number:05d}.bin"


def _checked(shards: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The shards of each part. Raises an error of `MALFORMED` where a value is missing or wrong."""
    for part in PARTS:
        for number, shard in enumerate(shards[part]):
            if shard["file"] != _shard_name(part, number):
                raise ValueError(f"{shard['file']!r} is where {_shard_name(part, number)} should be")
    kinds = {"file": str, "num_tokens": int, "num_documents": int, "sha256": str}
    return {part: [{key: kind(shard[key]) for key, kind in kinds.items()} for shard in shards[part]] for part in PARTS}


@dataclass(frozen=True)
class Made:
    """How far a directory is: `num_shards` whole ones and the one being written.

    Attributes:
        num_new_tokens: of `num_tokens`, those that this process has made.
    """

    num_documents: int
    num_tokens: int
    num_new_tokens: int
    num_shards: int


def write_token_shards(
    data: DataTable, directory: Path, *, shard_tokens: int, tell: Callable[[Made], None] = lambda _: None
) -> TokenIndex:
    """Write the tokens of a `text` or `huggingface` table as shards; goes on where an earlier call was ended.

    A directory that is complete is compared with its index, shard by shard. Local data is read whole before anything
    else, to compare it with what the directory was made from.

    Arguments:
        shard_tokens: a shard ends with the batch of documents (`dealing.BATCH_CHARACTERS`) that brings it to so many.
        tell: called after every batch.

    Raises:
        ConfigError: the data cannot be read, or the directory was made from other data.
        StoreError: the disk refuses, or a shard was changed.
    """
    if data.kind not in ("text", "huggingface"):
        raise ConfigError(f'data.kind = "{data.kind}" has no texts to tokenise; use "text" or "huggingface"')
    train, held_out = open_documents(data)
    encoder = Encoder(data.tokenizer)
    made_from = {key: value for key, value in data.model_dump(mode="json").items() if key in _MADE_FROM}
    made_from |= {
        "documents_sha256": [each.digest(whole=True) for each in (train, held_out) if each is not None],
        "held_out_documents": data.held_out_documents if data.stream and held_out is None else None,
        "vocabulary": encoder.digest(),
        "shard_tokens": shard_tokens,
    }
    if (directory / INDEX).exists():
        index = read_index(directory)
        _require_same(directory / INDEX, index.made_from, made_from)
        index.check()
        return index
    with translated(OSError, StoreError, f"cannot write to {directory}", "free disk space or choose another directory"):
        directory.mkdir(parents=True, exist_ok=True)
        return _Writer(directory, encoder, made_from, shard_tokens, tell).write(_spans(data, train, held_out))


def _spans(data: DataTable, train: Documents, held_out: Documents | None) -> list[tuple[Documents, Deal]]:
    """What is held out, and what is trained on. Nothing is held out here where a fraction of the tokens is to be."""
    if held_out is not None:
        return [(held_out, Deal()), (train, Deal())]
    end = held_out_end(train, data.held_out_documents) if data.stream else (0, 0)
    return [(train, Deal(end=end)), (train, Deal(begin=end))]


def _require_same(path: Path, made_from: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        if made_from.get(key) != value:
            raise ConfigError(
                f"{path} says {key} = {json.dumps(made_from.get(key))} where it would be {json.dumps(value)} now; "
                "remove the directory or choose another one"
            )


class _Writer:
    """Makes the shards of a directory, and its index at the end."""

    def __init__(
        self,
        directory: Path,
        encoder: Encoder,
        made_from: dict[str, Any],
        shard_tokens: int,
        tell: Callable[[Made], None],
    ) -> None:
        self._directory, self._encoder, self._shard_tokens, self._tell = directory, encoder, shard_tokens, tell
        self._made_from = made_from
        self._shards: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
        self._cursors: dict[str, Any] = {}
        self._num_new_tokens = 0

    def write(self, spans: Sequence[tuple[Documents, Deal]]) -> TokenIndex:
        self._continue()
        for part, (documents, deal) in zip(PARTS, spans, strict=True):
            if self._cursors.get(part) != "done":
                self._write_part(part, Reader(documents, deal, state=self._cursors.get(part)))
        if not self._shards["train"]:
            raise ConfigError("the data has no texts to train on; check data.paths or data.dataset")
        if self._encoder.tokenizer is not None:
            path = self._directory / TOKENIZER
            # Of a full disk the library raises Exception itself.
            with translated(Exception, StoreError, f"cannot write {path}", "free disk space"):
                self._encoder.tokenizer.save_pretrained(path)
        values = {
            "format": FORMAT,
            "dtype": self._encoder.dtype.name,
            "vocab_size": self._encoder.vocab_size,
            "tokenizer": None if self._encoder.tokenizer is None else TOKENIZER,
            "made_from": self._made_from,
            "shards": self._shards,
        }
        for path in self._directory.iterdir():
            if path.name.startswith(_PARTIAL):  # of a process on another host; nothing of it is needed any more
                path.unlink(missing_ok=True)
        write_whole(self._directory / INDEX, json.dumps(values, indent=1) + "\n")
        (self._directory / UNFINISHED).unlink(missing_ok=True)
        return read_index(self._directory)

    def _continue(self) -> None:
        """Take over what an earlier process has made whole."""
        path = self._directory / UNFINISHED
        for part in PARTS:
            remove_leftovers(self._directory, f"{part}-*")
        if path.exists():
            with translated(MALFORMED, StoreError, f"{path} cannot be read", "remove the directory"):
                values = json.loads(path.read_bytes())
                made_from, self._cursors = dict(values["made_from"]), dict(values["cursors"])
                self._shards = _checked(values["shards"])
            _require_same(path, made_from, self._made_from)
            _check_bytes(self._directory, self._shards)
        elif not all(path.name.startswith(_PARTIAL) for path in self._directory.iterdir()):
            raise ConfigError(f"{self._directory} holds something else than token shards; choose another directory")
        self._save()

    def _save(self) -> None:
        values = {"made_from": self._made_from, "shards": self._shards, "cursors": self._cursors}
        write_whole(self._directory / UNFINISHED, json.dumps(values, indent=1) + "\n")

    def _write_part(self, part: str, reader: Reader) -> None:
        is_over = False
        while not is_over:
            shard, is_over = self._write_shard(_shard_name(part, len(self._shards[part])), reader)
            if shard is not None:
                self._shards[part].append(shard)
            self._cursors[part] = "done" if is_over else reader.state_dict()
            self._save()

    def _write_shard(self, name: str, reader: Reader) -> tuple[dict[str, Any] | None, bool]:
        """Write the next shard, and say whether there is nothing after it. None: nothing was left for it."""
        num_tokens = num_documents = 0
        found, is_over = hashlib.sha256(), False
        partial = self._directory / hidden_name(name)
        try:
            with partial.open("wb") as file:
                while num_tokens < self._shard_tokens and not is_over:
                    batch, is_over = reader.batch()
                    tokens = self._encoder.encode(batch)
                    raw = tokens.astype(self._encoder.dtype.newbyteorder("<"), copy=False).tobytes()
                    file.write(raw)
                    found.update(raw)
                    num_tokens += len(tokens)
                    num_documents += sum(each.is_end for each in batch)
                    self._num_new_tokens += len(tokens)
                    self._tell(self._made(num_tokens, num_documents))
                file.flush()
                os.fsync(file.fileno())
            if num_tokens:
                partial.replace(self._directory / name)
        finally:
            partial.unlink(missing_ok=True)
        shard = {"file": name, "num_tokens": num_tokens, "num_documents": num_documents, "sha256": found.hexdigest()}
        return shard if num_tokens else None, is_over

    def _made(self, num_tokens: int, num_documents: int) -> Made:
        whole = [shard for shards in self._shards.values() for shard in shards]
        return Made(
            sum(shard["num_documents"] for shard in whole) + num_documents,
            sum(shard["num_tokens"] for shard in whole) + num_tokens,
            self._num_new_tokens,
            len(whole),
        )
