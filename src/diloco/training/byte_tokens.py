"""Bytes as tokens for programs that ask for a tokenizer: token i is the byte i of UTF-8 text, and there are no others.

The byte 0 ends each text of the training data (`training.sources`), so it is the end of a text here too.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "\0"


def byte_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a byte model that takes `context` tokens at most; any text comes back from its tokens."""
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    # "\0" stands for itself, as a token that is found in the text before it is cut into bytes.
    del vocabulary[_characters()[0]]
    vocabulary[END] = 0
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, model_max_length=context, clean_up_tokenization_spaces=False
    )


def _characters() -> list[str]:
    """The printable character that stands for each byte inside a byte-level tokenizer (GPT-2's table): itself where it
    is printable Latin-1, and the rest in order from U+0100 on."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]
