"""The corpus of a run: training and held-out tokens, in memory or memory-mapped, or the texts of a stream."""

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diloco.config import DataTable
from diloco.errors import ConfigError, translated
from diloco.training.data.documents import Documents, FilePart, named_files, open_documents
from diloco.training.data.reading import (
    BYTE_VOCABULARY,
    SEPARATOR,
    DocumentReader,
    DocumentShard,
    Encoder,
    held_out_end,
    load_tokenizer,
)
from diloco.training.data.token_shards import read_index

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Parts of the standard library that are tests or tables, or that not every installation of a version has.
_STDLIB_SKIPPED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3",
    "ensurepip", "encodings", "pydoc_data",
}  # fmt: skip


class Tokens:
    """A sequence of tokens over one or more one-dimensional arrays, which may be memory maps."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self._arrays = [array for array in arrays if len(array)]
        self._ends = list(accumulate(len(array) for array in self._arrays))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens start … stop−1 as int64; both must be within the sequence."""
        parts = []
        index = bisect_right(self._ends, start)  # the first array that ends after `start`
        while start < stop:
            begin = self._ends[index] - len(self._arrays[index])
            parts.append(self._arrays[index][start - begin : stop - begin])
            start, index = self._ends[index], index + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)

    def split_tail(self, fraction: float) -> tuple["Tokens", "Tokens"]:
        """Split off the last `fraction` of the tokens."""
        cut = len(self) - int(len(self) * fraction)
        cuts = [max(0, cut - end + len(array)) for array, end in zip(self._arrays, self._ends, strict=True)]
        pairs = [(array[:cut], array[cut:]) for array, cut in zip(self._arrays, cuts, strict=True)]
        return Tokens([head for head, _ in pairs]), Tokens([tail for _, tail in pairs])


@dataclass(frozen=True)
class TextSource:
    """The training documents of a stream, from position `begin` on (part, row), and how they become sequences."""

    documents: Documents
    encoder: Encoder
    begin: tuple[int, int]
    shuffle_sequences: int

    def fingerprint(self) -> str:
        """sha256 (hex) of everything that determines the tokens."""
        parts = [self.documents.digest(), self.encoder.digest(), self.begin]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """Training tokens, held-out tokens, and how to decode them.

    Attributes:
        train: empty where `texts` is set.
        is_bytes: every token is a byte.
        tokenizer: None for bytes and for token files.
        texts: the texts of a stream; None: the corpus has training tokens.
    """

    train: Tokens
    held_out: Tokens
    vocab_size: int
    is_bytes: bool = False
    tokenizer: "PreTrainedTokenizerBase | None" = None
    texts: TextSource | None = None

    def fingerprint(self) -> str:
        """sha256 (hex) of the sizes and of 64 excerpts of each part, which identifies a corpus without reading all
        of it."""
        digest = hashlib.sha256(str(self.vocab_size).encode())
        for tokens in (self.train, self.held_out):
            digest.update(str(len(tokens)).encode())
            for k in range(64):
                start = len(tokens) * k // 64
                digest.update(tokens.read(start, min(start + 64, len(tokens))).astype("<i8").tobytes())
        return digest.hexdigest()


def load_corpus(data: DataTable) -> Corpus:
    """Load the corpus of a run file. Raises ConfigError when it cannot be read or is too short."""
    corpus = {"stdlib": _stdlib, "text": _texts, "tokens": _tokens, "huggingface": _texts}[data.kind](data)
    for part, tokens in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(tokens) <= data.sequence_length and not (data.stream and part == "training"):
            raise ConfigError(
                f"the {part} part of the data has {len(tokens)} tokens, not enough for one sequence of "
                f"{data.sequence_length}; give more data or lower data.sequence_length"
            )
    return corpus


def _stdlib(_: DataTable) -> Corpus:
    """The `.py` files of the running interpreter's standard library, in path order; one in twenty is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for relative in sorted(_stdlib_files(root)):
        # By a hash of the path, not by the index in the list: an added file moves no other file.
        bucket = int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4], "big") % 20
        parts[not bucket].append((root / relative).read_bytes() + SEPARATOR)
    train, held_out = (Tokens([np.frombuffer(b"".join(texts), dtype=np.uint8)]) for texts in parts)
    return Corpus(train, held_out, BYTE_VOCABULARY, is_bytes=True)


def _stdlib_files(root: Path) -> Iterator[str]:
    """Paths relative to `root`. Skipped folders, which may hold ten times as many files, are not searched."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        relative = Path(folder).relative_to(root).as_posix()
        if not relative.startswith("config-"):
            yield from (name if relative == "." else f"{relative}/{name}" for name in names if name.endswith(".py"))


def _texts(data: DataTable) -> Corpus:
    """Texts of files or of a data set: their tokens, or with `stream` the texts themselves."""
    train, held_out_texts = open_documents(data)
    encoder, texts = Encoder(data.tokenizer), None
    held_out = None if held_out_texts is None else _encoded(encoder, held_out_texts)
    if data.stream:
        tokens, begin = Tokens([]), (0, 0)
        if held_out is None:
            begin = held_out_end(train, data.held_out_documents)
            held_out = _encoded(encoder, train, DocumentShard(end=begin))
        texts = TextSource(train, encoder, begin, data.shuffle_sequences)
    else:
        tokens = _encoded(encoder, train)
        if held_out is None:
            tokens, held_out = tokens.split_tail(data.held_out_fraction)
    return Corpus(tokens, held_out, encoder.vocab_size, encoder.tokenizer is None, encoder.tokenizer, texts)


def _encoded(encoder: Encoder, documents: Documents, shard: DocumentShard | None = None) -> Tokens:
    """The tokens of documents; files whose bytes are the tokens are memory-mapped."""
    plain = [part for part in documents.parts if isinstance(part, FilePart) and part.is_plain]
    if shard is not None or encoder.tokenizer is not None or len(plain) < len(documents.parts):
        return Tokens(
            [encoder.encode(batch) for batch in DocumentReader(documents, shard or DocumentShard()).one_pass()]
        )
    arrays: list[npt.NDArray[Any]] = []
    for part in plain:
        with part.reading():
            if part.path.stat().st_size:
                arrays += [np.memmap(part.path, dtype=np.uint8, mode="r"), np.frombuffer(SEPARATOR, dtype=np.uint8)]
    return Tokens(arrays)


def _tokens(data: DataTable) -> Corpus:
    if data.directory is None:
        assert data.vocab_size is not None  # checked by DataTable
        train, held_out = (Tokens([_map(path, data.dtype) for path in paths]) for paths in named_files(data))
        parts = (train, held_out) if data.held_out_paths else train.split_tail(data.held_out_fraction)
        return Corpus(*parts, data.vocab_size)
    index = read_index(data.directory)
    train, held_out = Tokens(index.arrays("train")), Tokens(index.arrays("held_out"))
    if len(held_out) and data.held_out_fraction != DataTable.model_fields["held_out_fraction"].default:
        raise ConfigError(f"data.held_out_fraction has no effect: {data.directory} has a held-out part; remove the key")
    parts = (train, held_out) if len(held_out) else train.split_tail(data.held_out_fraction)
    tokenizer = None if index.tokenizer is None else load_tokenizer(index.tokenizer_name)
    return Corpus(*parts, index.vocab_size, tokenizer is None, tokenizer)


def _map(path: Path, dtype: str) -> npt.NDArray[Any]:
    """Map a token file into memory. Raises ConfigError unless it is one-dimensional and of an unsigned type."""
    failed = f"cannot map the token file {path}"
    with translated((OSError, ValueError), ConfigError, failed, "check data.paths and data.dtype"):
        if path.suffix == ".npy":
            array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        else:
            array = np.memmap(path, dtype=f"<{np.dtype(dtype).str[1:]}", mode="r")
    if array.ndim != 1 or array.dtype.kind != "u":
        raise ConfigError(
            f"the token file {path} holds {array.dtype} of shape {array.shape}; give a one-dimensional array "
            "of unsigned integers"
        )
    return array
