"""Engines generate completions with a version of a run's global model.

`TransformersEngine` runs the model in this process. `OpenAIEngine` and `VLLMEngine` are clients of a server.
"""

from __future__ import annotations

import hashlib
import http
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from diloco.errors import MAX_FOREIGN, ConfigError, EngineError, NonFiniteError, translated
from diloco.escaping import MALFORMED, read_json
from diloco.following.copies import FollowedFolder
from diloco.following.follower import FollowedModel
from diloco.rl.tokenizer import Tokenizer
from diloco.training.model import load_state

log = logging.getLogger("diloco")

TOKEN_ID = "token_id:"
"""Prefix of a token's number where a server names tokens by numbers."""

INVALID = (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.UNPROCESSABLE_ENTITY)
"""Status codes for a request that the server does not understand."""

ADVICE = "look into its log"


class RefusedError(EngineError):
    """The server of an engine calls a request invalid."""


@dataclass(frozen=True, eq=False)
class Completion:
    """What a model wrote after a prompt.

    Attributes:
        tokens: int32 [n], n >= 1, with the end token if it ended.
        logprobs: fp32 [n], log-probability of each token at the sampling temperature, under the weights that ran. Those
            of temperature 0 are those of temperature 1.
        ended: False: it was cut at `max_tokens`.
    """

    tokens: Tensor
    logprobs: Tensor
    ended: bool


class Engine(Protocol):
    """Generates completions with the version that was loaded last."""

    def load(self, model: FollowedModel) -> None:
        """Use this version from now on.

        Raises:
            LayoutError: it is not a version of the engine's model. EngineError: the server does not take it.
            StoreError: it cannot be written for the server.
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], *, num: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        """Generate `num` completions of each prompt.

        Arguments:
            prompts: tokens, at least one each.
            max_tokens: of a completion.
            temperature: 0: the most probable token each time.
            seed: the same seed, prompts and version give the same completions, as far as the engine can repeat itself.

        Raises:
            ConfigError: a prompt is empty, or longer than the model's context allows. NonFiniteError: the model gives
            inf or NaN. EngineError: the server fails.
        """

    def close(self) -> None:
        """Free what the engine holds."""


# --- in this process --------------------------------------------------------------------------------------------------


class TransformersEngine:
    """A model of transformers in this process. Prompts form one batch: the caller decides how many fit into memory.

    Arguments:
        model: a causal language model, of this engine alone.
        end_token: ends a completion.
    """

    def __init__(self, model: PreTrainedModel, end_token: int) -> None:
        self._model, self._end_token = model.eval(), end_token

    def load(self, model: FollowedModel) -> None:
        """See `Engine`."""
        load_state(self._model, model.state_dict())

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], *, num: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        """See `Engine`."""
        _require_context(self._model, prompts, max_tokens)
        ids, mask = _padded(prompts, self._model.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        # Each prompt runs once; its completions start from copies of its keys and values. With the sampling below, that
        # takes half the processor time of `model.generate` for short completions of a small model.
        first = self._model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1
        )
        cache = first.past_key_values
        cache.batch_repeat_interleave(num)
        logits, mask, position = (it.repeat_interleave(num, 0) for it in (first.logits, mask, positions[:, -1:]))
        generator = torch.Generator(self._model.device).manual_seed(seed)
        is_over = torch.zeros(len(logits), dtype=torch.bool, device=self._model.device)
        drawn: list[tuple[Tensor, Tensor]] = []
        while True:
            drawn.append(sampled(logits[:, -1], temperature, generator))
            tokens = drawn[-1][0]
            is_over |= tokens[:, 0] == self._end_token
            if len(drawn) == max_tokens or is_over.all():
                break
            mask, position = torch.cat([mask, torch.ones_like(tokens)], 1), position + 1
            logits = self._model(
                input_ids=tokens, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
            ).logits
        tokens, logprobs = (torch.cat(steps, 1).cpu() for steps in zip(*drawn, strict=True))
        if not logprobs.isfinite().all():
            raise NonFiniteError("the model gives inf or NaN; its training has diverged, or its dtype is too narrow")
        rows = [self._completion(*row) for row in zip(tokens, logprobs, strict=True)]
        return [rows[at : at + num] for at in range(0, len(rows), num)]

    def _completion(self, tokens: Tensor, logprobs: Tensor) -> Completion:
        """Cut a row after its end token."""
        kept = _cut(tokens.tolist(), self._end_token, len(tokens))
        return Completion(tokens[: len(kept)].int(), logprobs[: len(kept)].clone(), kept[-1] == self._end_token)

    def close(self) -> None:
        """See `Engine`: it holds nothing but the model."""


def sampled(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a token of each row.

    By inversion of the cumulative distribution, with one uniform number and sums in fp64 for each row.

    Arguments:
        logits: [n, vocabulary].

    Returns:
        tokens int64 [n, 1] and their log-probabilities fp32 [n, 1].
    """
    logprobs = _log_softmax(logits, temperature)
    if temperature == 0:
        tokens = logprobs.argmax(-1, keepdim=True)
    else:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        uniform = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device, generator=generator)
        # From the right, so that a token of probability 0 is never drawn.
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # where the product is rounded up, or NaN
    return tokens, logprobs.gather(1, tokens)


@torch.no_grad()
def log_probs_of(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Log-probabilities of a completion's tokens after a prompt, fp32 [n], as in `Completion`: a pass of the model."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0]
    return _log_softmax(logits, temperature).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.float() / (temperature or 1.0), -1)


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts and their attention mask, int64 [prompts, longest], padded on the left."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _context(model: PreTrainedModel) -> int | None:
    found: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found


def _require_context(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    if not shortest:
        raise ConfigError("a prompt has no tokens; give it at least one")
    if (context := _context(model)) is not None and longest + max_tokens > context:
        raise ConfigError(
            f"a prompt of {longest} tokens and max_tokens = {max_tokens} exceed the {context} tokens of the model's "
            "context; lower max_tokens or shorten the prompts"
        )


def _cut(tokens: list[int], end_token: int, max_tokens: int) -> list[int]:
    """The tokens up to the first end token, at most `max_tokens`."""
    num = tokens.index(end_token) + 1 if end_token in tokens else len(tokens)
    return tokens[: min(num, max_tokens)]


# --- a server ---------------------------------------------------------------------------------------------------------


class OpenAIEngine:
    """A client of a server with OpenAI's completions interface (`POST /v1/completions`) that loads the model which a
    request names, as `transformers serve` does.

    Each version is written to a folder, which the server must be able to read under the same path. Prompts are sent as
    tokens, or as text where the server refuses tokens. Log-probabilities are the server's where it names each token and
    the temperature is 0 or 1 (servers may give them without the temperature); otherwise this worker's copy of the model
    computes them.

    A completion that comes back as text is encoded again. Its tokens may differ from the sampled ones: bytes that are
    not UTF-8 become U+FFFD, and different tokens may spell one text. The log-probabilities are those of the recorded
    tokens, so they are right for what is recorded; but such tokens were not drawn from exactly that distribution. Nor
    were those after a prompt that was sent as text, if the server's tokenizer puts a beginning before it.

    Arguments:
        url: of the server, like "http://localhost:8000".
        folder: of this worker alone; absent, empty, or of the same run.
        model: this worker's own copy of the run's model.
        timeout_s: how long the server may be silent; loading a version is part of its first request.
        parallel: requests at a time. `transformers serve` repeats the completions of a seed only with 1. It keeps every
            version in memory for its `--model-timeout`.

    Raises:
        ConfigError: an invalid URL.
    """

    def __init__(
        self, url: str, folder: Path, model: PreTrainedModel, tokenizer: Tokenizer, *,
        timeout_s: float = 300.0, parallel: int = 1,
    ) -> None:  # fmt: skip
        self._url = url.rstrip("/").removesuffix("/v1")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"{url!r} is not the URL of an engine; give one like http://localhost:8000")
        self._path, self._model, self._tokenizer = folder, model.eval(), tokenizer
        self._timeout_s, self._parallel = timeout_s, parallel
        self._copies: FollowedFolder | None = None
        self._served: str | None = None
        self._takes_tokens = True
        self._options: Mapping[str, object] = {}
        model.config.use_cache = True  # off in training
        # Servers sample as this file says; without it, that of transformers takes the most probable token each time.
        end = tokenizer.end_token
        model.generation_config = GenerationConfig(
            do_sample=True, top_k=0, top_p=1.0, eos_token_id=end, pad_token_id=end
        )

    def load(self, model: FollowedModel) -> None:
        """See `Engine`."""
        self._served = None
        load_state(self._model, model.state_dict())
        self._copies = self._copies or FollowedFolder(self._path, model.run, "engine", self._write)
        self._copies.update(model)
        self._served = self._served_name(self._path.resolve())

    def _write(self, _state: Mapping[str, Tensor], out: Path) -> None:
        disable_progress_bar()  # transformers draws one for every file
        self._model.save_pretrained(out)
        self._tokenizer.save(out, _context(self._model) or 1 << 30)
        for file in out.glob("*.safetensors"):
            shutil.copymode(out / "config.json", file)  # written for this user alone

    def _served_name(self, folder: Path) -> str:
        """The name under which the server has the version in this directory, which no other version had before."""
        return str(folder)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, num: int, max_tokens: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        """See `Engine`."""
        _require_context(self._model, prompts, max_tokens)
        if self._served is None:
            raise EngineError(f"the engine at {self._url} has no version of the model; load one")
        request = {
            "model": self._served, "max_tokens": max_tokens, "temperature": temperature, "top_p": 1.0, "logprobs": 1,
            **self._options,
        }  # fmt: skip

        def completions_of(place: int) -> list[Completion]:
            found: list[Completion] = []
            while len(found) < num:  # a server may ignore `n`
                missing, number = num - len(found), _seed_of(seed, place, len(found))
                choices = self._choices(prompts[place], {**request, "n": missing, "seed": number})[:missing]
                found += [self._completion(prompts[place], it, max_tokens, temperature) for it in choices]
            return found

        with ThreadPoolExecutor(self._parallel) as threads:
            return list(threads.map(completions_of, range(len(prompts))))

    def _choices(self, prompt: Sequence[int], request: dict[str, Any]) -> list[Any]:
        """What the server answers, at least one."""
        path, answer = "/v1/completions", None
        if self._takes_tokens:
            try:
                answer = self._post(path, {**request, "prompt": list(prompt)})
            except RefusedError as error:
                log.info("the prompt is sent as text: %s", error)
        if answer is None:
            answer = self._post(path, {**request, "prompt": self._tokenizer.decode(prompt)})
            self._takes_tokens = False
        found = read_json(answer, f"the answer of {self._url}{path}", EngineError, ADVICE)
        with self._readable():
            choices: list[Any] = [*found["choices"]]
            if not choices:
                raise ValueError("it has no completion (choices)")
        return choices

    def _completion(self, prompt: Sequence[int], choice: Any, max_tokens: int, temperature: float) -> Completion:
        end = self._tokenizer.end_token
        with self._readable():
            named = self._named(choice.get("logprobs"))
            tokens = self._tokenizer.encode(choice["text"]) if named is None else named[0]
            if not tokens or (choice["finish_reason"] == "stop" and tokens[-1] != end):
                tokens = [*tokens, end]  # a text has no end token, and a server need not name it
            tokens = _cut(tokens, end, max_tokens)
            if max(tokens) >= (size := self._model.config.get_text_config().vocab_size) or min(tokens) < 0:
                raise ValueError(f"a token is outside the model's {size}")
            logprobs = None
            if named is not None and len(named[1]) >= len(tokens) and temperature in (0, 1):
                logprobs = torch.tensor(named[1][: len(tokens)], dtype=torch.float32)
                if not logprobs.isfinite().all():
                    raise ValueError("a log-probability is inf or NaN")
        if logprobs is None:
            logprobs = log_probs_of(self._model, prompt, tokens, temperature)
        return Completion(torch.tensor(tokens, dtype=torch.int32), logprobs, tokens[-1] == end)

    def _named(self, given: Any) -> tuple[list[int], list[float]] | None:
        """The tokens and log-probabilities of a choice; None: not given, or a name is not that of one token."""
        if not given or not given.get("tokens"):
            return None
        tokens: list[int] = []
        for name in given["tokens"]:
            own = [int(name[len(TOKEN_ID) :])] if name.startswith(TOKEN_ID) else self._tokenizer.encode(name)
            if len(own) != 1 or "\ufffd" in name:  # part of a character
                return None
            tokens += own
        return tokens, given["token_logprobs"]

    def _readable(self) -> AbstractContextManager[None]:
        return translated(
            MALFORMED, EngineError, f"the engine at {self._url} gives an answer that cannot be used", ADVICE
        )

    def _post(self, path: str, request: object) -> bytes:
        """The body of the answer."""
        url = urlsplit(self._url)
        kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
        headers = {"Content-Type": "application/json"}
        failed, advice = f"the engine at {self._url} does not answer {path}", "check that it runs, or raise its timeout"
        with translated((OSError, HTTPException), EngineError, failed, advice):
            with closing(kind(url.netloc, timeout=self._timeout_s)) as connection:
                connection.request("POST", url.path + path, json.dumps(request), headers)
                response = connection.getresponse()
                body = response.read()
        if response.status == http.HTTPStatus.OK:
            return body
        text = " ".join(body[:MAX_FOREIGN].decode(errors="replace").split())
        message = f"the engine at {self._url} answers {path} with status {response.status} ({text}); {ADVICE}"
        raise (RefusedError if response.status in INVALID else EngineError)(message)

    def close(self) -> None:
        """See `Engine`. The newest version stays in the folder."""


class VLLMEngine(OpenAIEngine):
    """A client of vLLM. It follows vLLM's documentation, and has not been run against vLLM.

    A version is loaded by `POST /collective_rpc` with the method `reload_weights` and its argument `weights_path`; then
    `POST /reset_prefix_cache` drops the keys and values of the version before. vLLM has both only with
    VLLM_SERVER_DEV_MODE=1, so that no stranger may reach it. It is started with any model of the same configuration, as
    `diloco export` writes one. Prompts and completions are tokens.

    Arguments:
        served: name of the model, `--served-model-name` of the server. Others as `OpenAIEngine`.
    """

    def __init__(
        self, url: str, folder: Path, model: PreTrainedModel, tokenizer: Tokenizer, *, served: str,
        timeout_s: float = 300.0, parallel: int = 16,
    ) -> None:  # fmt: skip
        super().__init__(url, folder, model, tokenizer, timeout_s=timeout_s, parallel=parallel)
        self._model_name = served
        # Without these, vLLM samples as the generation_config.json that it was started with says.
        self._options = {
            "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [tokenizer.end_token],
            "return_tokens_as_token_ids": True,
        }  # fmt: skip

    def _served_name(self, folder: Path) -> str:
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self._post("/reset_prefix_cache", {})
        return self._model_name


def _seed_of(*place: int) -> int:
    """A seed of 48 bits, which any JSON parser reads exactly."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=6).digest())
