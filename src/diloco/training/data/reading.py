"""Reads the documents of one learner and encodes them as tokens.

A `DocumentReader` goes through the documents of one learner, pass after pass; an `Encoder` makes tokens of them, a
batch of documents at a time.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diloco.errors import ConfigError, translated
from diloco.protocol.units import permute
from diloco.training.data.documents import Document, Documents, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_CHARACTERS = 1 << 18
BATCH_DOCUMENTS = 1024

BYTE_VOCABULARY = 256
SEPARATOR = b"\0"
"""End of a text where tokens are bytes: a byte that no text contains."""


@dataclass(frozen=True)
class DocumentShard:
    """The documents that belong to one of `num_shards` shards, from position `begin` until before `end` (part, row).

    The rows whose hash of `seed`, part and row is below `shared_fraction` of all values belong to every shard. Of the
    others, row r of part p belongs to shard (p + r) mod `num_shards`; with
    `by_parts`, part p to shard p mod `num_shards`.
    """

    shard: int = 0
    num_shards: int = 1
    by_parts: bool = False
    begin: tuple[int, int] = (0, 0)
    end: tuple[int, int] | None = None
    shared_fraction: float = 0.0
    seed: int = 0

    def may_continue(self, part: int, row: int) -> bool:
        """Whether this row or a later row of the part may belong to this shard."""
        if part < self.begin[0] or (self.end is not None and (part, row) >= self.end):
            return False
        return not self.by_parts or self.shared_fraction > 0 or part % self.num_shards == self.shard

    def contains(self, part: int, row: int) -> bool:
        """Whether a row belongs to this shard, where `may_continue` is true."""
        is_own = (part if self.by_parts else part + row) % self.num_shards == self.shard
        return (part, row) >= self.begin and (is_own or self._is_shared(part, row))

    def _is_shared(self, part: int, row: int) -> bool:
        if not self.shared_fraction:
            return False
        place = part.to_bytes(8, "little") + row.to_bytes(8, "little")
        key = self.seed.to_bytes(8, "little") + b"shared"
        return int.from_bytes(hashlib.blake2b(place, digest_size=8, key=key).digest()) < self.shared_fraction * 2**64


_ALL = DocumentShard()


class DocumentReader:
    """Reads the documents of a shard, pass after pass.

    Arguments:
        seed: permutes the parts in each pass; None: they stay in order.
        state: `state_dict` of a reader of the same documents and shard.
    """

    def __init__(
        self,
        documents: Documents,
        shard: DocumentShard = _ALL,
        seed: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._parts, self._shard, self._seed = documents.parts, shard, seed
        state = state or {"pass": 0, "place": 0, "row": 0, "cursor": None}
        self._pass, self._place, self._row = int(state["pass"]), int(state["place"]), int(state["row"])
        self._cursor: dict[str, Any] | None = state["cursor"]
        self._rows: Rows | None = None
        self._iterator: Iterator[Any] = iter(())

    def next(self) -> Document | None:
        """The next document; None at the end of a pass. The call after that starts the next pass."""
        while self._place < len(self._parts):
            index = self._part_at(self._place)
            row = self._next_row(index) if self._shard.may_continue(index, self._row) else None
            if row is None:
                self._place, self._row, self._cursor, self._rows = self._place + 1, 0, None, None
                continue
            number, self._row = self._row, self._row + 1
            if self._shard.contains(index, number):
                return self._parts[index].document(row, number)
        self._pass, self._place = self._pass + 1, 0
        return None

    def _next_row(self, index: int) -> Any | None:
        part = self._parts[index]
        with part.reading():
            if self._rows is None:
                self._rows = part.rows()
                if self._cursor is not None:
                    self._rows.load_state_dict(self._cursor)
                self._iterator = iter(self._rows)
            return next(self._iterator, None)

    def batch(self) -> tuple[list[Document], bool]:
        """About `BATCH_CHARACTERS` of documents, and whether the pass ends after them."""
        batch: list[Document] = []
        num_characters = 0
        while num_characters < BATCH_CHARACTERS and len(batch) < BATCH_DOCUMENTS:
            document = self.next()
            if document is None:
                return batch, True
            batch.append(document)
            num_characters += len(document.text)
        return batch, False

    def one_pass(self) -> Iterator[list[Document]]:
        """The remaining batches of the pass."""
        at_end = False
        while not at_end:
            batch, at_end = self.batch()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position of the reader, as plain values."""
        cursor = self._cursor if self._rows is None else self._rows.state_dict()
        return {"pass": self._pass, "place": self._place, "row": self._row, "cursor": cursor}

    def _part_at(self, place: int) -> int:
        if self._seed is None:
            return place
        key = self._seed.to_bytes(8, "little") + b"part" + self._pass.to_bytes(8, "little")
        return permute(place, len(self._parts), key)


def held_out_end(documents: Documents, num_held_out: int) -> tuple[int, int]:
    """The position (part, row) after the first `num_held_out` documents. Raises ConfigError if no document follows."""
    reader, state = DocumentReader(documents), {}
    for count in range(num_held_out + 1):
        state = reader.state_dict()
        if reader.next() is None:
            raise ConfigError(
                f"the data has {count} documents, and the first {num_held_out} are held out; lower "
                "data.held_out_documents, or name a held-out part"
            )
    return state["place"], state["row"]


class Encoder:
    """Encodes texts as bytes or by a tokenizer.

    Each text is followed by its end: the byte 0, or the end-of-sequence token if the tokenizer has one.

    Attributes:
        tokenizer: None for bytes.
        dtype: type of tokens in memory and in files, uint8, uint16 or uint32.
    """

    def __init__(self, name: str) -> None:
        self.tokenizer = None if name == "bytes" else load_tokenizer(name)
        self.vocab_size = BYTE_VOCABULARY if self.tokenizer is None else vocabulary_size(self.tokenizer)
        bits = 8 if self.tokenizer is None else 16 if self.vocab_size <= 1 << 16 else 32
        self.dtype = np.dtype(f"uint{bits}")

    def digest(self) -> str:
        """sha256 (hex) of the vocabulary and of the end-of-text token."""
        known: list[Any] = ["bytes"]
        if self.tokenizer is not None:
            known = [sorted(self.tokenizer.get_vocab().items()), self.tokenizer.eos_token_id]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def encode(self, batch: Sequence[Document]) -> npt.NDArray[Any]:
        """The tokens of a batch, in one array of `dtype`. A tokenizer raises ConfigError for text that is not UTF-8."""
        if self.tokenizer is None:
            raw = [each.text.encode() if isinstance(each.text, str) else each.text for each in batch]
            ended = [text + SEPARATOR if each.is_end else text for each, text in zip(batch, raw, strict=True)]
            return np.frombuffer(b"".join(ended), dtype=np.uint8)
        if not batch:
            return np.empty(0, dtype=self.dtype)
        texts = [_decoded(each) for each in batch]
        ids = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        tokens = [token for each, own in zip(batch, ids, strict=True) for token in (own + end if each.is_end else own)]
        return np.asarray(tokens, dtype=self.dtype)


def _decoded(document: Document) -> str:
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
    """Vocabulary size of a model for a tokenizer: its highest token + 1, since a tokenizer may skip numbers."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a `tokenizer.json`, a directory, or the hub. Raises ConfigError when that fails."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    advice = "give a tokenizer.json, a directory or a hub name"
    # The library raises Exception itself for a file that is not a tokenizer.
    with translated(Exception, ConfigError, f"cannot load the tokenizer {name}", advice):
        if name.endswith(".json"):
            return PreTrainedTokenizerFast(tokenizer_file=name)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    return tokenizer


def byte_tokenizer(context: int) -> "PreTrainedTokenizerBase":
    """A tokenizer of transformers for bytes: token i is the byte i of UTF-8 text, and there are no other tokens.

    Every text can be decoded from its tokens. The byte 0 ends a text.

    Arguments:
        context: maximum number of tokens of an input.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # The end of a text is an added token, which is found before the text is split into bytes.
    end = SEPARATOR.decode()
    vocabulary = {character if byte else end: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, model_max_length=context, clean_up_tokenization_spaces=False
    )
