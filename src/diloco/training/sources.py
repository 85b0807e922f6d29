"""Sources of tokens: a corpus of training and of held-out tokens, in memory or memory-mapped."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diloco.config import DataTable
from diloco.errors import ConfigError, translated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_VOCABULARY = 256
# A byte that no source file contains marks the end of each.
_SEPARATOR = b"\0"
# Parts of the standard library that are tests, tables, or not there in every installation of the same version.
_STDLIB_SKIPPED = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "encodings",
    "pydoc_data",
}


class Tokens:
    """A sequence of tokens over one or more one-dimensional arrays, which may be memory maps."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self._arrays = [array for array in arrays if len(array)]
        self._ends = list(accumulate(len(array) for array in self._arrays))

    @classmethod
    def joined(cls, parts: Iterable["Tokens"]) -> "Tokens":
        """The parts one after the other."""
        return cls([array for part in parts for array in part._arrays])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens start … stop−1 as int64; both must lie within the sequence."""
        parts = []
        begin = 0
        for array, end in zip(self._arrays, self._ends, strict=True):
            if start < end and stop > begin:
                parts.append(array[max(start, begin) - begin : min(stop, end) - begin])
            begin = end
        return np.concatenate(parts).astype(np.int64)

    def split_tail(self, fraction: float) -> tuple["Tokens", "Tokens"]:
        """Split off the last `fraction` of the tokens."""
        cut = len(self) - int(len(self) * fraction)
        head, tail, begin = [], [], 0
        for array, end in zip(self._arrays, self._ends, strict=True):
            head.append(array[: max(0, cut - begin)])
            tail.append(array[max(0, cut - begin) :])
            begin = end
        return Tokens(head), Tokens(tail)


@dataclass(frozen=True)
class Corpus:
    """Training tokens, held-out tokens and what is needed to read them.

    `tokenizer` is None for bytes and for token files; `is_bytes` says that a token is a byte.
    """

    train: Tokens
    held_out: Tokens
    vocab_size: int
    is_bytes: bool = False
    tokenizer: "PreTrainedTokenizerBase | None" = None

    def fingerprint(self) -> str:
        """sha256 (hex) of sizes and of 64 stretches spread over both parts: identifies a corpus without reading all."""
        digest = hashlib.sha256(str(self.vocab_size).encode())
        for tokens in (self.train, self.held_out):
            digest.update(str(len(tokens)).encode())
            for k in range(64):
                start = len(tokens) * k // 64
                digest.update(tokens.read(start, min(start + 64, len(tokens))).astype("<i8").tobytes())
        return digest.hexdigest()


def load_corpus(data: DataTable) -> Corpus:
    """The corpus that a run file describes. Raises ConfigError when it cannot be read or is too short."""
    corpus = {"stdlib": _stdlib, "text": _text, "tokens": _token_files, "huggingface": _huggingface}[data.kind](data)
    for part, tokens in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(tokens) <= data.sequence_length:
            raise ConfigError(
                f"the {part} part of the data has {len(tokens)} tokens, not enough for one sequence of "
                f"{data.sequence_length}; give more data or lower data.sequence_length"
            )
    return corpus


def _stdlib(_: DataTable) -> Corpus:
    """The `.py` files of the running interpreter's standard library, in path order; one in twenty is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    train: list[bytes] = []
    held_out: list[bytes] = []
    for relative in sorted(_stdlib_files(root)):
        # By a hash of the path, not by the place in the list: adding a file elsewhere moves nothing.
        bucket = int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4], "big") % 20
        (train if bucket else held_out).append((root / relative).read_bytes())
    return Corpus(_as_bytes(train), _as_bytes(held_out), BYTE_VOCABULARY, is_bytes=True)


def _stdlib_files(root: Path) -> Iterator[str]:
    """Paths from `root`. Skipped folders are not entered: ten times as many files may be installed there."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        relative = Path(folder).relative_to(root).as_posix()
        if not relative.startswith("config-"):
            yield from (name if relative == "." else f"{relative}/{name}" for name in names if name.endswith(".py"))


def _as_bytes(texts: Sequence[bytes]) -> Tokens:
    """The bytes of all texts, each followed by a separator."""
    return Tokens([np.frombuffer(b"".join(text + _SEPARATOR for text in texts), dtype=np.uint8)])


def _text(data: DataTable) -> Corpus:
    if data.tokenizer == "bytes":
        parts = _split(data, lambda path: _as_bytes([_read(path)]))
        return Corpus(*parts, BYTE_VOCABULARY, is_bytes=True)
    tokenizer = load_tokenizer(data.tokenizer)
    parts = _split(data, lambda path: _tokenise(tokenizer, [_read(path).decode("utf-8", errors="replace")]))
    return Corpus(*parts, len(tokenizer), tokenizer=tokenizer)


def _token_files(data: DataTable) -> Corpus:
    assert data.vocab_size is not None  # checked by DataTable
    return Corpus(*_split(data, lambda path: Tokens([_map(path, data.dtype)])), data.vocab_size)


def _split(data: DataTable, load: Callable[[Path], Tokens]) -> tuple[Tokens, Tokens]:
    """The training and the held-out part of files."""
    train = Tokens.joined(map(load, data.paths))
    if not data.held_out_paths:
        return train.split_tail(data.held_out_fraction)
    return train, Tokens.joined(map(load, data.held_out_paths))


def _read(path: Path) -> bytes:
    with translated(OSError, ConfigError, f"cannot read the data file {path}", "check data.paths"):
        return path.read_bytes()


def _map(path: Path, dtype: str) -> npt.NDArray[Any]:
    """A memory map of a token file. Raises ConfigError unless it is one-dimensional and of an unsigned type."""
    failed = f"cannot map the token file {path}"
    with translated((OSError, ValueError), ConfigError, failed, "check data.paths and data.dtype"):
        if path.suffix == ".npy":
            array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        else:
            array = np.memmap(path, dtype=f"<{np.dtype(dtype).str[1:]}", mode="r")
    if array.ndim != 1 or array.dtype.kind != "u":
        raise ConfigError(
            f"the token file {path} holds {array.dtype} of shape {array.shape}; give one row of unsigned integers"
        )
    return array


def _huggingface(data: DataTable) -> Corpus:
    tokenizer = None if data.tokenizer == "bytes" else load_tokenizer(data.tokenizer)

    def tokens(split: str) -> Tokens:
        texts = _dataset_texts(data, split)
        return _as_bytes([text.encode() for text in texts]) if tokenizer is None else _tokenise(tokenizer, texts)

    train = tokens(data.split)
    parts = (train, tokens(data.held_out_split)) if data.held_out_split else train.split_tail(data.held_out_fraction)
    if tokenizer is None:
        return Corpus(*parts, BYTE_VOCABULARY, is_bytes=True)
    return Corpus(*parts, len(tokenizer), tokenizer=tokenizer)


def _dataset_texts(data: DataTable, split: str) -> list[str]:
    """The texts of a split, one per row: from a directory of `save_to_disk`, or by `load_dataset`."""
    import datasets

    assert data.dataset is not None  # checked by DataTable
    path = Path(data.dataset)
    failed = f'cannot load column "{data.text_column}" of split "{split}" of the dataset {data.dataset}'
    advice = "check data.dataset, data.split and data.text_column"
    with translated((OSError, ValueError, KeyError), ConfigError, failed, advice):
        if (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(data.dataset)[split]
        elif (path / "state.json").is_file():
            rows = datasets.load_from_disk(data.dataset)
        else:
            rows = datasets.load_dataset(data.dataset, data.dataset_config, split=split)
        return list(rows[data.text_column])


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """A tokenizer from a `tokenizer.json`, a directory, or the hub. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    advice = "give a tokenizer.json, a directory or a hub name"
    with translated((OSError, ValueError), ConfigError, f"cannot load the tokenizer {name}", advice):
        if name.endswith(".json"):
            return PreTrainedTokenizerFast(tokenizer_file=name)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    return tokenizer


def _tokenise(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> Tokens:
    """Token ids of all texts in one array, each text followed by the end-of-sequence token where there is one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    arrays = []
    for start in range(0, len(texts), 1024):
        batch = tokenizer(texts[start : start + 1024], add_special_tokens=False, verbose=False)["input_ids"]
        arrays.append(np.asarray([token for ids in batch for token in ids + end], dtype=dtype))
    return Tokens([np.concatenate(arrays)] if arrays else [])
