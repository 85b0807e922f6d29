"""A group of completions as bytes, and back: a safetensors file with its facts as JSON in the metadata."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Self

import torch
from safetensors.torch import save
from torch import Tensor

from diloco.errors import CorruptPayloadError, PayloadError, translated
from diloco.escaping import MALFORMED
from diloco.exchange.wire.tensors import tensors_of
from diloco.protocol.leases import GroupRules

MAX_GROUP_BYTES = 5 << 20
"""Of one group: 16 completions of 40,000 tokens."""

DTYPES = {
    "prompt": torch.int32, "tokens": torch.int32, "lengths": torch.int32, "ended": torch.bool,
    "log_probs": torch.float32,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class CompletionGroup:
    """Completions of one prompt.

    Attributes:
        number: of the prompt in the run.
        task: its name.
        seed: of the generation.
        versions, weights: as in `protocol.groups.Made`.
        tokenizer: its digest.
        temperature: at which the tokens were drawn.
        prompt: tokens, int32 [P].
        tokens: of all completions, one after the other, int32 [N].
        lengths: of each completion, int32 [G].
        ended: whether it ended by itself; otherwise it was cut off, bool [G].
        log_probs: of the tokens, under the weights that have generated them, fp32 [N].
    """

    number: int
    task: str
    seed: int
    versions: tuple[int, ...]
    weights: str
    tokenizer: str
    temperature: float
    prompt: Tensor
    tokens: Tensor
    lengths: Tensor
    ended: Tensor
    log_probs: Tensor

    def to_bytes(self) -> bytes:
        """As a file."""
        facts = {name: value for name, value in vars(self).items() if name not in DTYPES}
        return save({name: getattr(self, name) for name in DTYPES}, {"group": json.dumps(facts)})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """The group that `to_bytes` has written.

        Raises:
            CorruptPayloadError: it is none.
        """
        what = "the bytes of the group"
        tensors = tensors_of(data, what)
        with translated(MALFORMED, CorruptPayloadError, f"{what} lack its description", "send it again"):
            size = int.from_bytes(data[:8], "little")
            values: dict[str, Any] = json.loads(json.loads(bytes(data[8 : 8 + size]))["__metadata__"]["group"])
            group = cls(**{**values, "versions": tuple(values["versions"]), **tensors})
            if any(
                getattr(group, name).dtype != dtype or getattr(group, name).dim() != 1 for name, dtype in DTYPES.items()
            ):
                raise ValueError(f"its tensors have the types {[each.dtype for each in tensors.values()]}")
        return group

    def check(self, rules: GroupRules) -> None:
        """Check that a trainer can use it.

        Raises:
            PayloadError: it cannot.
        """
        num, longest = self.lengths.numel(), int(self.lengths.max()) if self.lengths.numel() else 0
        ids = torch.cat([self.prompt, self.tokens])
        num_tokens = int(self.lengths.sum(dtype=torch.int64))
        if num != rules.group_size or self.ended.numel() != num or int((self.lengths < 1).sum()):
            raise PayloadError(f"it has {num} completions, and the run's groups have {rules.group_size}.")
        if longest > rules.max_tokens or not 0 < self.prompt.numel() <= rules.max_prompt_tokens:
            raise PayloadError(
                f"its prompt has {self.prompt.numel()} tokens and its longest completion {longest}; the run takes 1 to "
                f"{rules.max_prompt_tokens}, and up to {rules.max_tokens}."
            )
        if num_tokens != self.tokens.numel() or num_tokens != self.log_probs.numel():
            raise PayloadError(
                f"its completions have {num_tokens} tokens, and it has {self.tokens.numel()} tokens and "
                f"{self.log_probs.numel()} log-probabilities."
            )
        if int(ids.min()) < 0 or int(ids.max()) >= rules.vocab_size:
            bad = ids[(ids < 0) | (ids >= rules.vocab_size)][0]
            raise PayloadError(f"token {int(bad)} is outside the vocabulary of {rules.vocab_size}.")
        if not bool(torch.isfinite(self.log_probs).all()) or bool((self.log_probs > 1e-3).any()):
            raise PayloadError("a log-probability is not a finite number of at most 0.")

    def split(self, values: Tensor) -> list[Tensor]:
        """`tokens`, `log_probs`, … of each completion."""
        return list(values.split(self.lengths.tolist()))


def hash_of(data: bytes | memoryview) -> str:
    """The digest by which a group's bytes are known."""
    return hashlib.sha256(data).hexdigest()
