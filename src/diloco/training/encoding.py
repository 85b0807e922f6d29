"""Texts as tokens, a batch of documents at a time."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diloco.errors import ConfigError, translated
from diloco.training.rows import SEPARATOR, Document, Documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_VOCABULARY = 256

_CHUNK_TOKENS = 1 << 23


class Encoder:
    """Texts as bytes, or by a tokenizer, each text followed by its end: the byte 0, or the end-of-sequence token where
    there is one.

    Attributes:
        tokenizer: None for bytes.
        dtype: of tokens in memory and in files, uint8, uint16 or uint32.
    """

    def __init__(self, name: str) -> None:
        self.tokenizer = None if name == "bytes" else load_tokenizer(name)
        self.vocab_size = BYTE_VOCABULARY if self.tokenizer is None else vocabulary_size(self.tokenizer)
        bits = 8 if self.tokenizer is None else 16 if self.vocab_size <= 1 << 16 else 32
        self.dtype = np.dtype(f"uint{bits}")

    def digest(self) -> str:
        """sha256 (hex) of the vocabulary and of the end of a text."""
        known: list[Any] = ["bytes"]
        if self.tokenizer is not None:
            known = [sorted(self.tokenizer.get_vocab().items()), self.tokenizer.eos_token_id]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def encode(self, batch: Sequence[Document]) -> npt.NDArray[Any]:
        """The tokens of a batch, in one array of `dtype`. Raises ConfigError where a tokenizer is given no UTF-8."""
        if not batch:
            return np.empty(0, dtype=self.dtype)
        if self.tokenizer is None:
            parts = [_bytes_of(each.text) + (SEPARATOR if each.is_end else b"") for each in batch]
            return np.frombuffer(b"".join(parts), dtype=np.uint8)
        texts = [_text_of(each) for each in batch]
        ids = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        tokens = [token for each, own in zip(batch, ids, strict=True) for token in (own + end if each.is_end else own)]
        return np.asarray(tokens, dtype=self.dtype)

    def gathered(self, batches: Iterable[Sequence[Document]]) -> list[npt.NDArray[Any]]:
        """The tokens of all batches, in few arrays."""
        chunks: list[npt.NDArray[Any]] = []
        filled = _CHUNK_TOKENS
        for batch in batches:
            tokens = self.encode(batch)
            while len(tokens):
                if filled == _CHUNK_TOKENS:
                    chunks.append(np.empty(_CHUNK_TOKENS, dtype=self.dtype))
                    filled = 0
                fitting, tokens = np.split(tokens, [_CHUNK_TOKENS - filled])
                chunks[-1][filled : filled + len(fitting)] = fitting
                filled += len(fitting)
        return [*chunks[:-1], *(chunk[:filled] for chunk in chunks[-1:])]


@dataclass(frozen=True)
class TextSource:
    """The documents of a stream from `begin` on, as `Deal` counts, and how they become sequences."""

    documents: Documents
    encoder: Encoder
    begin: tuple[int, int]
    shuffle_sequences: int

    def fingerprint(self) -> str:
        """sha256 (hex) of what says which tokens are read."""
        told = [self.documents.digest(), self.encoder.digest(), self.begin]
        return hashlib.sha256(repr(told).encode()).hexdigest()


def _bytes_of(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _text_of(document: Document) -> str:
    if isinstance(document.text, str):
        return document.text
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the text of the data file {document.path} is not UTF-8 at byte {document.begin + error.start} "
            f'(0x{document.text[error.start]:02x}); convert it, or set data.tokenizer = "bytes"'
        ) from error


def vocabulary_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """How many tokens a model needs to know: up to the highest one of the tokenizer, which may skip numbers."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """A tokenizer from a `tokenizer.json`, a directory, or the hub. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    advice = "give a tokenizer.json, a directory or a hub name"
    # Of a file that is no tokenizer, the library raises Exception itself.
    with translated(Exception, ConfigError, f"cannot load the tokenizer {name}", advice):
        if name.endswith(".json"):
            return PreTrainedTokenizerFast(tokenizer_file=name)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    return tokenizer
