"""Engines: in this process, against servers that answer as documented, and against `transformers serve`."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

from diloco.config import ModelTable
from diloco.core.layout import Layout, gather, place, spec_of
from diloco.errors import ConfigError, LayoutError, NonFiniteError
from diloco.following.follower import FollowedModel
from diloco.rl.engines import (
    Completion,
    EngineError,
    OpenAIEngine,
    TransformersEngine,
    VLLMEngine,
    log_probs_of,
    sampled,
)
from diloco.rl.tokenizer import Tokenizer, open_tokenizer
from diloco.training.model import build_model

LETTERS = "abcdefg"
VOCABULARY = 1 + len(LETTERS)
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
"""Of log-probabilities in fp32 that were computed in another order: some units of the last place."""

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
}  # fmt: skip
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 1, 2, 3, 4, 5, 6], [7, 7]]


def a_model(seed: int = 0, kind: str = "llama", vocab_size: int = VOCABULARY) -> PreTrainedModel:
    """With weights large enough that every earlier token matters."""
    model = build_model(ModelTable.model_validate({"type": kind, **SIZES[kind]}), vocab_size, 32, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5, generator=generator)
    return model


def version(model: PreTrainedModel, number: int = 1) -> FollowedModel:
    """A run's version of this model; a tied weight has the first of its names."""
    tensors = dict(model.named_parameters())
    fragment = place(0, [spec_of(name, tensor) for name, tensor in tensors.items()])
    theta, layout = gather(fragment, tensors), Layout((fragment,), ())
    return FollowedModel("letters", "1", 1, (number,), (f"digest {number}",), 0, 0, layout, (theta,), {})


def by_a_full_pass(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def written(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens.tolist() for completion in group] for group in groups]


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_are_those_of_a_full_pass(kind: str, temperature: float) -> None:
    model = a_model(kind=kind)
    groups = TransformersEngine(model, 0).generate(PROMPTS, num=5, max_tokens=6, temperature=temperature, seed=1)
    assert [len(group) for group in groups] == [5] * len(PROMPTS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for each in group:
            assert (each.tokens.dtype, each.logprobs.dtype) == (torch.int32, torch.float32)
            expected = by_a_full_pass(model, prompt, each.tokens.tolist(), temperature)
            torch.testing.assert_close(each.logprobs, expected, **CLOSE)
            again = log_probs_of(model, prompt, each.tokens.tolist(), temperature)
            torch.testing.assert_close(again, expected, **CLOSE)


def test_a_completion_ends_with_the_end_token_or_is_cut() -> None:
    groups = TransformersEngine(a_model(), 0).generate(PROMPTS, num=32, max_tokens=4, temperature=2.0, seed=1)
    completions = [each for group in groups for each in group]
    assert {each.ended for each in completions} == {True, False}
    assert {len(each.tokens) for each in completions} == {1, 2, 3, 4}
    for each in completions:
        assert len(each.tokens) == len(each.logprobs)
        assert 0 not in each.tokens[:-1]
        assert each.ended == (int(each.tokens[-1]) == 0)
        assert each.ended or len(each.tokens) == 4


def test_generation_stops_once_every_completion_has_ended() -> None:
    model, passes = a_model(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    ((first, *_),) = TransformersEngine(model, VOCABULARY).generate(
        [[1, 2]], num=2, max_tokens=4, temperature=0.0, seed=0
    )
    assert len(passes) == len(first.tokens) == 4
    TransformersEngine(model, int(first.tokens[0])).generate([[1, 2]], num=2, max_tokens=4, temperature=0.0, seed=0)
    assert len(passes) == 5


def test_a_seed_gives_its_completions_and_leaves_the_state_of_torch_alone() -> None:
    engine, before = TransformersEngine(a_model(), 0), torch.get_rng_state()
    first, same, other = (
        written(engine.generate(PROMPTS, num=4, max_tokens=8, temperature=1.0, seed=seed)) for seed in (7, 7, 8)
    )
    assert first == same
    assert first != other
    assert len({tuple(tokens) for group in first for tokens in group}) > 8
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_batch_gives_what_its_prompts_give_alone(kind: str) -> None:
    model = a_model(kind=kind)
    engine = TransformersEngine(model, 0)
    together = engine.generate(PROMPTS, num=2, max_tokens=8, temperature=0.0, seed=1)
    for prompt, (one, two) in zip(PROMPTS, together, strict=True):
        ((alone,),) = engine.generate([prompt], num=1, max_tokens=8, temperature=0.0, seed=2)
        assert one.tokens.tolist() == two.tokens.tolist() == alone.tokens.tolist()
        torch.testing.assert_close(one.logprobs, alone.logprobs, **CLOSE)
        torch.testing.assert_close(one.logprobs, by_a_full_pass(model, prompt, one.tokens.tolist(), 1.0), **CLOSE)
        with torch.no_grad():
            assert one.tokens[0] == model(torch.tensor([prompt])).logits[0, -1].argmax()


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.8), (0.5, 16 / 17)])
def test_tokens_are_drawn_with_their_probabilities(temperature: float, share: float) -> None:
    """0.8 and 0.2 are 4 to 1, at temperature 0.5 4² to 1. A binomial count is within 4 standard deviations of its mean
    in all but one of 16,000 seeds, and this seed is fixed."""
    num = 20_000
    logits = torch.tensor([-math.inf, math.log(0.2), -math.inf, math.log(0.8), -math.inf]).repeat(num, 1)
    tokens, logprobs = sampled(logits, temperature, torch.Generator().manual_seed(3))
    assert set(tokens[:, 0].tolist()) == {1, 3}
    assert abs((tokens == 3).sum().item() - num * share) < 4 * math.sqrt(num * share * (1 - share))
    expected = torch.where(tokens == 3, math.log(share), math.log1p(-share))
    torch.testing.assert_close(logprobs, expected, **CLOSE)


def test_a_loaded_version_replaces_the_weights() -> None:
    engine, other = TransformersEngine(a_model(0), 0), a_model(1)
    engine.load(version(other))
    expected = TransformersEngine(other, 0).generate(PROMPTS, num=2, max_tokens=8, temperature=1.0, seed=1)
    assert written(engine.generate(PROMPTS, num=2, max_tokens=8, temperature=1.0, seed=1)) == written(expected)
    with pytest.raises(LayoutError, match="has shape"):
        engine.load(version(a_model(vocab_size=VOCABULARY + 1)))
    engine.close()


def test_prompts_that_the_model_cannot_take_and_a_model_that_diverged() -> None:
    model = a_model()
    engine = TransformersEngine(model, 0)
    with pytest.raises(ConfigError, match="no tokens"):
        engine.generate([[1], []], num=1, max_tokens=2, temperature=1.0, seed=0)
    with pytest.raises(ConfigError, match="a prompt of 9 tokens and max_tokens = 24 exceed the 32 tokens"):
        engine.generate(PROMPTS, num=1, max_tokens=24, temperature=1.0, seed=0)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = math.nan
    with pytest.raises(NonFiniteError, match="diverged"):
        engine.generate(PROMPTS, num=1, max_tokens=2, temperature=1.0, seed=0)


# --- the tokenizer ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every token is a letter; 0 is the end."""
    fast = FastTokenizer(models.BPE({"<end>": 0} | {letter: 1 + at for at, letter in enumerate(LETTERS)}, []))
    fast.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>").save_pretrained(folder)
    return open_tokenizer(str(folder))


def test_tokenizers_by_name(letters: Tokenizer) -> None:
    assert (letters.end_token, letters.vocab_size, letters.encode("cab")) == (0, VOCABULARY, [3, 1, 2])
    assert letters.decode([3, 1, 2, 0]) == "cab"
    of_bytes = open_tokenizer("bytes")
    assert (of_bytes.end_token, of_bytes.vocab_size, of_bytes.encode("é")) == (0, 256, [0xC3, 0xA9])
    assert of_bytes.decode([0xC3, 0xA9, 0xC3, 0]) == "é\ufffd"
    assert re.fullmatch("[0-9a-f]{64}", letters.digest)
    assert letters.digest != of_bytes.digest == open_tokenizer("bytes").digest
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        open_tokenizer(f"{letters.name}/tokenizer.json")


# --- servers that answer as documented --------------------------------------------------------------------------------

Answer = Callable[[dict[str, Any]], tuple[int, object]]


class Stub(ThreadingHTTPServer):
    """Answers each path by a function of the request; keeps the requests."""

    daemon_threads = True
    answers: dict[str, Answer]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.answers, self.requests, self.released = {}, [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    requests: list[tuple[str, dict[str, Any]]]

    def hang(self, _request: dict[str, Any]) -> tuple[int, object]:
        self.released.wait()
        return 503, "too late"


class StubHandler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, request))
        status, answer = self.server.answers[self.path](request)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def a_choice(text: str, finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish_reason, **more}


def named(*pairs: tuple[str, float]) -> dict[str, Any]:
    names, values = zip(*pairs, strict=True)
    return {"tokens": names, "token_logprobs": values, "top_logprobs": None, "text_offset": None}


@pytest.fixture
def engine(stub: Stub, letters: Tokenizer, tmp_path: Path) -> OpenAIEngine:
    """Of a model that no version has yet."""
    return OpenAIEngine(f"{stub.url}/v1/", tmp_path / "served", a_model(9), letters)


def test_a_server_that_gives_log_probabilities(stub: Stub, engine: OpenAIEngine, tmp_path: Path) -> None:
    choices = [
        a_choice("ab", logprobs=named(("a", -0.5), ("b", -0.25), ("<end>", -1.0))),
        a_choice("dee", "length", logprobs=named(("token_id:4", -2.0), ("token_id:5", -3.0), ("token_id:5", -4.0))),
    ]
    stub.answers["/v1/completions"] = lambda request: (200, {"choices": choices * request["n"]})
    with pytest.raises(EngineError, match="has no version"):
        engine.generate(PROMPTS, num=1, max_tokens=3, temperature=1.0, seed=0)
    engine.load(version(a_model(1)))
    groups = engine.generate(PROMPTS, num=2, max_tokens=3, temperature=1.0, seed=0)
    for group in groups:
        assert [(it.tokens.tolist(), it.logprobs.tolist(), it.ended) for it in group] == [
            ([1, 2, 0], [-0.5, -0.25, -1.0], True), ([4, 5, 5], [-2.0, -3.0, -4.0], False)
        ]  # fmt: skip
    folder = (tmp_path / "served").resolve()
    assert [request for _, request in stub.requests] == [
        {
            "model": str(folder), "prompt": prompt, "max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "logprobs": 1,
            "n": 2, "seed": request["seed"],
        }
        for prompt, (_, request) in zip(PROMPTS, stub.requests, strict=True)
    ]  # fmt: skip
    assert len({request["seed"] for _, request in stub.requests}) == len(PROMPTS)

    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(saved.lm_head.weight, a_model(1).lm_head.weight)
    assert AutoTokenizer.from_pretrained(folder)("cab")["input_ids"] == [3, 1, 2]
    assert (saved.generation_config.do_sample, saved.generation_config.eos_token_id) == (True, 0)
    engine.load(version(a_model(2), 2))
    engine.generate(PROMPTS[:1], num=1, max_tokens=3, temperature=1.0, seed=0)
    newer = Path(stub.requests[-1][1]["model"])
    assert newer != folder
    assert torch.equal(AutoModelForCausalLM.from_pretrained(newer).lm_head.weight, a_model(2).lm_head.weight)
    engine.close()


def test_a_server_of_texts_alone(stub: Stub, engine: OpenAIEngine) -> None:
    """It takes no tokens, and ignores `n` and `logprobs`."""
    texts = iter(["ab", "cabc", "", "a?b"])

    def answer(request: dict[str, Any]) -> tuple[int, object]:
        if not isinstance(request["prompt"], str):
            return 400, {"detail": "prompt must be a string."}
        text = next(texts)
        return 200, {"choices": [a_choice(text, "length" if len(text) == 4 else "stop")]}

    stub.answers["/v1/completions"] = answer
    model = a_model(1)
    engine.load(version(model))
    ((*completions,),) = engine.generate([[1, 2, 3]], num=3, max_tokens=4, temperature=0.5, seed=5)
    assert [(it.tokens.tolist(), it.ended) for it in completions] == [
        ([1, 2, 0], True), ([3, 1, 2, 3], False), ([0], True),
    ]  # fmt: skip
    for each in completions:
        torch.testing.assert_close(
            each.logprobs, by_a_full_pass(model, [1, 2, 3], each.tokens.tolist(), 0.5), **CLOSE
        )  # fmt: skip
    assert [request["prompt"] for _, request in stub.requests] == [[1, 2, 3], "abc", "abc", "abc"]
    assert len({request["seed"] for _, request in stub.requests[1:]}) == 3


@pytest.mark.parametrize(
    ("temperature", "logprobs"),
    [
        (0.5, named(("a", -7.0), ("b", -7.0), ("<end>", -7.0))),  # possibly without the temperature
        (1.0, named(("a", -7.0), ("b", -7.0))),  # without the end
        (1.0, named(("a\ufffd", -7.0), ("b", -7.0), ("<end>", -7.0))),
        (1.0, named(("ab", -7.0), ("<end>", -7.0))),
    ],
)
def test_log_probabilities_of_the_own_copy_where_the_servers_do_not_fit(
    stub: Stub, engine: OpenAIEngine, temperature: float, logprobs: dict[str, Any]
) -> None:
    stub.answers["/v1/completions"] = lambda _: (200, {"choices": [a_choice("ab", logprobs=logprobs)]})
    model = a_model(1)
    engine.load(version(model))
    (((completion,),)) = engine.generate([[5]], num=1, max_tokens=4, temperature=temperature, seed=0)
    assert completion.tokens.tolist() == [1, 2, 0]
    torch.testing.assert_close(completion.logprobs, by_a_full_pass(model, [5], [1, 2, 0], temperature), **CLOSE)


def test_bytes_that_are_no_text_are_recorded_as_they_come_back(stub: Stub, tmp_path: Path) -> None:
    model = a_model(1, vocab_size=256)
    engine = OpenAIEngine(stub.url, tmp_path / "served", model, open_tokenizer("bytes"))
    engine.load(version(model))
    stub.answers["/v1/completions"] = lambda _: (200, {"choices": [a_choice("a\ufffd", "length")]})
    ((completion,),) = engine.generate([[5]], num=1, max_tokens=3, temperature=1.0, seed=0)
    assert (completion.tokens.tolist(), completion.ended) == ([97, 0xEF, 0xBF], False)
    torch.testing.assert_close(
        completion.logprobs, by_a_full_pass(model, [5], completion.tokens.tolist(), 1.0), **CLOSE
    )  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, {"error": "out of\nmemory"}), r"with status 500 .*out of\\nmemory"),
        ((404, b"no such model"), "with status 404 .no such model.; look into its log"),
        ((422, {"detail": "unexpected"}), "with status 422"),
        ((200, b"<html>"), "is not JSON"),
        ((200, b'{"choices": [{"text'), "is not JSON"),
        ((200, []), "cannot be used"),
        ((200, {"choices": []}), "it has no completion"),
        ((200, {"choices": ["ab"]}), "cannot be used"),
        ((200, {"choices": [{"text": None, "finish_reason": "stop"}]}), "cannot be used"),
        ((200, {"choices": [a_choice("", logprobs=named(("token_id:8", -1.0)))]}), "outside the model's 8"),
        ((200, {"choices": [a_choice("", logprobs=named(("token_id:-1", -1.0)))]}), "outside the model's 8"),
        ((200, {"choices": [a_choice("", "length", logprobs=named(("a", math.nan)))]}), "inf or NaN"),
        ((200, {"choices": [a_choice("", "length", logprobs={"tokens": ["a"], "token_logprobs": [None]})]}), "used"),
    ],
)
def test_answers_that_cannot_be_used(
    stub: Stub, engine: OpenAIEngine, answer: tuple[int, object], message: str
) -> None:  # fmt: skip
    stub.answers["/v1/completions"] = lambda _: answer
    engine.load(version(a_model(1)))
    with pytest.raises(EngineError, match=message) as raised:
        engine.generate(PROMPTS, num=2, max_tokens=3, temperature=1.0, seed=0)
    assert "\n" not in str(raised.value)


def test_a_server_that_hangs_or_is_not_there(stub: Stub, letters: Tokenizer, tmp_path: Path) -> None:
    stub.answers["/v1/completions"] = stub.hang
    hanging = OpenAIEngine(stub.url, tmp_path / "served", a_model(), letters, timeout_s=0.2)
    hanging.load(version(a_model(1)))
    with pytest.raises(EngineError, match="does not answer /v1/completions .timed out.; check that it runs"):
        hanging.generate(PROMPTS, num=1, max_tokens=3, temperature=1.0, seed=0)
    with Stub() as closed:
        pass
    absent = OpenAIEngine(closed.url, tmp_path / "served", a_model(), letters)
    absent.load(version(a_model(1)))
    with pytest.raises(EngineError, match="does not answer"):
        absent.generate(PROMPTS, num=1, max_tokens=3, temperature=1.0, seed=0)
    for url in ("localhost:8000", "ftp://localhost", "http://"):
        with pytest.raises(ConfigError, match="is not the URL of an engine"):
            OpenAIEngine(url, tmp_path / "served", a_model(), letters)


def test_vllm_loads_a_version_and_names_tokens_by_number(stub: Stub, letters: Tokenizer, tmp_path: Path) -> None:
    logprobs = named(("token_id:3", -0.5), ("token_id:0", -0.25))
    stub.answers["/v1/completions"] = lambda request: (
        200, {"choices": [{**a_choice("c", logprobs=logprobs), "index": at} for at in range(request["n"])]}
    )  # fmt: skip
    stub.answers["/collective_rpc"] = lambda _: (200, {"results": [None]})
    stub.answers["/reset_prefix_cache"] = lambda _: (200, b"")
    engine = VLLMEngine(stub.url, tmp_path / "served", a_model(), letters, served="policy")
    engine.load(version(a_model(1)))
    groups = engine.generate(PROMPTS, num=3, max_tokens=3, temperature=1.0, seed=0)
    assert written(groups) == [[[3, 0]] * 3] * len(PROMPTS)
    assert groups[0][0].logprobs.tolist() == [-0.5, -0.25]
    weights = {"weights_path": str((tmp_path / "served").resolve())}
    assert stub.requests[:2] == [
        ("/collective_rpc", {"method": "reload_weights", "kwargs": weights}), ("/reset_prefix_cache", {})
    ]  # fmt: skip
    completions = stub.requests[2:]
    assert sorted(request["prompt"] for _, request in completions) == sorted(PROMPTS)
    for path, request in completions:
        assert path == "/v1/completions"
        assert request == {
            "model": "policy", "prompt": request["prompt"], "n": 3, "seed": request["seed"], "max_tokens": 3,
            "temperature": 1.0, "top_p": 1.0, "logprobs": 1, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "stop_token_ids": [0], "return_tokens_as_token_ids": True,
        }  # fmt: skip
    stub.answers["/collective_rpc"] = lambda _: (500, b"Internal Server Error")
    with pytest.raises(EngineError, match="/collective_rpc with status 500"):
        engine.load(version(a_model(2), 2))
    with pytest.raises(EngineError, match="has no version"):
        engine.generate(PROMPTS, num=1, max_tokens=3, temperature=1.0, seed=0)


# --- transformers serve -----------------------------------------------------------------------------------------------


@pytest.fixture
def transformers_serve(tmp_path: Path) -> Iterator[str]:
    """The URL of a process of it."""
    log = tmp_path / "serve.log"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with open(log, "wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        running = re.compile(r"running on http://localhost:(\d+)|running on http://127\.0\.0\.1:(\d+)")
        try:
            until(lambda: bool(running.search(log.read_text())) or process.poll() is not None, "it does not start", 120)
            found = running.search(log.read_text())
            assert found is not None, log.read_text()
            yield f"http://127.0.0.1:{found[1] or found[2]}"
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not is_serve_available(), reason="transformers serve needs fastapi, uvicorn and openai")
def test_transformers_serve(transformers_serve: str, letters: Tokenizer, tmp_path: Path) -> None:
    engine = OpenAIEngine(transformers_serve, tmp_path / "served", a_model(), letters, timeout_s=120)
    for number in (1, 2):
        model = a_model(number)
        engine.load(version(model, number))
        own = TransformersEngine(model, letters.end_token)
        greedy = engine.generate(PROMPTS, num=1, max_tokens=6, temperature=0.0, seed=0)
        assert written(greedy) == written(own.generate(PROMPTS, num=1, max_tokens=6, temperature=0.0, seed=0))
        drawn = engine.generate(PROMPTS, num=4, max_tokens=6, temperature=1.0, seed=3)
        assert written(drawn) == written(engine.generate(PROMPTS, num=4, max_tokens=6, temperature=1.0, seed=3))
        assert len({tuple(tokens) for group in written(drawn) for tokens in group}) > 4
        for prompt, group in zip(PROMPTS, drawn, strict=True):
            for each in group:
                expected = by_a_full_pass(model, prompt, each.tokens.tolist(), 1.0)
                torch.testing.assert_close(each.logprobs, expected, **CLOSE)
