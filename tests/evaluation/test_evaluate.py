"""`diloco evaluate` on small exports, with the real lm-eval."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.cli import main
from diloco.config import parse_config
from diloco.errors import ConfigError
from diloco.evaluation.exports import held_out_loss, load_export
from diloco.evaluation.harness import Harness
from diloco.training.data.corpus import Tokens, load_corpus
from diloco.training.data.reading import byte_tokenizer
from diloco.training.data.streams import held_out_batches, spaced_windows
from diloco.training.held_out import evaluate
from diloco.training.model import build_model
from diloco.training.pretrained import export_run

RUN = """
[run]
name = "small"
tokens = 1000
[model]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
[data]
kind = "text"
paths = ["{text}"]
held_out_fraction = 0.5
sequence_length = 32
[schedule]
warmup_steps = 0
[evaluate]
sequences = 40
"""
TEXT = "".join(
    f"{place} words are written here, and other words follow them near that number {place}.\n" for place in range(99)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two exports of one run file, with other initial values each."""
    folder = tmp_path_factory.mktemp("exports")
    (folder / "text.txt").write_text(TEXT)
    (folder / "run.toml").write_text(RUN.format(text=folder / "text.txt"))
    for seed, name in enumerate(("first", "second")):
        config = parse_config((folder / "run.toml").read_text(), overrides=[f"run.seed={seed}"])
        model = build_model(config.model, 256, 32, seed)
        export_run(model.state_dict(), config, folder / name)
    return folder


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, arguments), "--json"])
    assert ended.value.code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, arguments)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_byte_model_brings_a_tokenizer_that_any_text_comes_back_from(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "first")
    for text in ("def f():\n\treturn 1", "Āé 𝄞 €", "one\0two", "  two  spaces ", "<|pad|></s>", ""):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (len(tokenizer), tokenizer.eos_token_id) == (256, 0)


def test_the_held_out_loss_is_that_of_a_direct_computation_and_of_the_trainer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (result,) = evaluated(capsys, folder / "first", "--run", folder / "run.toml")["exports"][0]["results"]
    config = parse_config((folder / "run.toml").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "first")
    batches = held_out_batches(load_corpus(config.data), 32, 40, 8)
    assert result["value"] == pytest.approx(evaluate(model, model.state_dict(), batches), rel=1e-6)
    windows = torch.cat(batches)
    with torch.no_grad():
        each = F.cross_entropy(model(windows[:, :-1]).logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(1)
    assert result["value"] == pytest.approx(float(each.mean()), rel=1e-6)
    assert result["error"] == pytest.approx(
        float(each.std() / len(each) ** 0.5), rel=1e-4
    )  # 40 blocks of a window each
    assert result["num"] == 40
    assert result["low"] < result["value"] < result["high"]


def test_many_windows_are_blocks_of_neighbours(folder: Path) -> None:
    model = load_export(folder / "first").model
    tokens = list(TEXT.encode())
    batches = spaced_windows(Tokens([np.array(tokens)]), 16, 200, batch=32)
    assert sum(map(len, batches)) == 200
    assert torch.equal(batches[0][0], torch.tensor(tokens[:17]))
    result = held_out_loss(model, batches)
    assert result.score.num == len(result.values) == len(set(result.documents)) == 64
    assert held_out_loss(model, batches) == result


def test_exports_stand_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = folder / "first"
    found = evaluated(
        capsys, same, folder / "second", "--run", folder / "run.toml", "--limit", 25,
        "--tasks", "diloco_brackets,diloco_arithmetic,diloco_cloze",
    )  # fmt: skip
    first, second = found["exports"]
    names = {(it["task"], it["metric"]) for it in first["results"]}
    assert names == {(it["task"], it["metric"]) for it in second["results"]} == {
        ("held-out loss", "nats per token"), ("diloco_arithmetic", "acc"), ("diloco_brackets", "acc"),
        ("diloco_cloze", "acc"),
    }  # fmt: skip
    for result in first["results"][1:]:
        assert result["num"] == 25
        assert 0 <= result["low"] < result["high"] <= 1
    gaps = {it["result"]: it for it in found["differences"]}
    assert len(gaps) == 4
    loss = gaps["held-out loss, nats per token"]
    assert loss["value"] == pytest.approx(second["results"][0]["value"] - first["results"][0]["value"])
    assert loss["error"] > 0


def test_an_export_beside_itself_differs_by_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(
        capsys, folder / "first", folder / "first", "--text", folder / "text.txt", "--tasks", "diloco_brackets",
        "--limit", 30,
    )  # fmt: skip
    assert len(found["differences"]) == 2
    for gap in found["differences"]:
        assert (gap["value"], gap["error"], gap["low"], gap["high"]) == (0.0, 0.0, 0.0, 0.0)


def test_a_model_that_knows_the_answer_gets_it(folder: Path, tmp_path: Path) -> None:
    """lm-eval is asked what is meant: a model that continues any "a" with "b" is right where that is the answer."""
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"text": "a", "choices": ["b", "c"], "answer": place % 2}) for place in range(10))
    )
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{{{text}}}}'\n"
        f"dataset_kwargs:\n  data_files: {{test: {tmp_path}/data.jsonl}}\n  cache_dir: {tmp_path}/cache\n"
        "doc_to_choice: choices\ndoc_to_target: answer\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n"
    )
    export = load_export(folder / "first")
    with torch.no_grad():
        for parameter in export.model.model.layers.parameters():
            parameter.zero_()  # the embedding of a token alone says what follows
        table = export.model.get_input_embeddings().weight
        table.zero_()
        table[ord("a"), 0] = 1.0
        table[ord("b"), 0] = 2.0
    (result,) = Harness(["mine"], [tmp_path]).run(export)
    assert result.values == tuple(float(place % 2 == 0) for place in range(10))
    assert (result.score.value, result.score.num) == (0.5, 10)


def test_the_table_says_what_is_better(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", str(folder / "first"), str(folder / "second"), "--run", str(folder / "run.toml")])
    shown = capsys.readouterr().out
    assert "token ↓" in shown
    assert "minus first" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_cannot_be_evaluated_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export = folder / "first"
    assert "nothing to evaluate" in refused(capsys, export)
    assert f"{tmp_path} is not an export" in refused(capsys, tmp_path, "--text", folder / "text.txt")
    assert "two sources" in refused(capsys, export, "--text", folder / "text.txt", "--run", folder / "run.toml")
    assert "--set has no effect" in refused(capsys, export, "--text", folder / "text.txt", "--set", "a.b=1")
    (tmp_path / "empty.txt").touch()
    assert "the text has 0 tokens, less than two" in refused(capsys, export, "--text", tmp_path / "empty.txt")
    assert "the 32 tokens that" in refused(capsys, export, "--text", folder / "text.txt", "--context", 64)
    assert "not a directory of task files" in refused(capsys, export, "--tasks", "x", "--task-files", tmp_path / "no")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "lm_eval", None)
        assert "pip install 'diloco[eval]'" in refused(capsys, export, "--tasks", "diloco_brackets")
    (tmp_path / "config.json").write_text((export / "config.json").read_text())
    assert "cannot load the export" in refused(capsys, tmp_path, "--text", folder / "text.txt")


@pytest.mark.slow
def test_an_unknown_task_is_named_with_the_nearest_known_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match='has no task helaswag; did you mean "hellaswag"'):
        Harness(["helaswag"])


def test_an_export_without_a_tokenizer_has_no_tasks(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / "first" / name).read_bytes())
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_export(tmp_path).required_tokenizer()
    byte_tokenizer(32).save_pretrained(tmp_path)
    assert load_export(tmp_path).required_tokenizer().encode("a") == [97]
