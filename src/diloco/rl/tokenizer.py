"""The tokenizer of prompts and completions: that of a run's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import ConfigError
from diloco.training.data.reading import SEPARATOR, Encoder, byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Tokenizer:
    """Made by `open_tokenizer`.

    Attributes:
        end_token: ends a completion.
        vocab_size: one more than the highest token.
        digest: sha256 (hex) of the vocabulary and of the end token.
    """

    name: str
    end_token: int
    vocab_size: int
    digest: str
    _loaded: PreTrainedTokenizerBase | None = field(repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without an end."""
        if self._loaded is None:
            return list(text.encode())
        found: list[int] = self._loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens below `vocab_size`; the end token has none, and bytes that are not UTF-8 become U+FFFD."""
        kept = [token for token in tokens if token != self.end_token]
        if self._loaded is None:
            return bytes(kept).decode(errors="replace")
        return str(self._loaded.decode(kept, clean_up_tokenization_spaces=False))

    def save(self, folder: Path, context: int) -> None:
        """Write the files that `from_pretrained` of transformers loads. `context`: maximum tokens of an input."""
        loaded = byte_tokenizer(context) if self._loaded is None else self._loaded
        loaded.save_pretrained(folder)


def open_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by the name that `data.tokenizer` of a run file has: "bytes" (tokens are the bytes of UTF-8, and 0 is
    the end), a `tokenizer.json`, a directory, or a name of the hub.

    Raises:
        ConfigError: it cannot be loaded, or has no end.
    """
    encoder = Encoder(name)
    end = SEPARATOR[0] if encoder.tokenizer is None else encoder.tokenizer.eos_token_id
    if end is None:
        raise ConfigError(
            f"the tokenizer {name} has no end-of-sequence token, so that no completion ends; give it one, save it "
            "with save_pretrained, and name that directory"
        )
    return Tokenizer(name, end, encoder.vocab_size, encoder.digest(), encoder.tokenizer)
