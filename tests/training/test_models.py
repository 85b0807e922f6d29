"""Models from a configuration, with weights, and out again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from diloco.config import ModelTable, parse_config
from diloco.errors import ConfigError, LayoutError
from diloco.training.held_out import evaluate, sample_bytes
from diloco.training.model import build_model
from diloco.training.pretrained import export_run

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def table(**keys: Any) -> ModelTable:
    return ModelTable.model_validate({**SMALL, **keys})


def test_the_default_model_and_its_seed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    models = [build_model(ModelTable(), 256, 64, seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(p.numel() for p in models[0].parameters()) == 165_056
    first, same, other = (model.model.embed_tokens.weight for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_other_architectures_and_dtypes() -> None:
    gpt = build_model(ModelTable.model_validate({"type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}), 256, 32, 0)
    assert type(gpt).__name__ == "GPT2LMHeadModel"
    assert gpt.config.vocab_size == 256
    assert build_model(table(dtype="bfloat16"), 256, 32, 0).dtype == torch.bfloat16


def test_errors_name_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match='unknown key "model.hiden_size".*did you mean "hidden_size"'):
        build_model(table(hiden_size=8), 256, 32, 0)
    with pytest.raises(ConfigError, match=r'unknown model.type = "lama"'):
        build_model(table(type="lama"), 256, 32, 0)
    with pytest.raises(ConfigError, match="below the data's 256"):
        build_model(table(vocab_size=100), 256, 32, 0)
    with pytest.raises(ConfigError, match="there is no model configuration"):
        build_model(ModelTable(config=Path("none.json")), 256, 32, 0)


def test_a_config_file_describes_the_model(tmp_path: Path) -> None:
    build_model(table(), 256, 32, 0).config.to_json_file(tmp_path / "config.json")
    model = build_model(ModelTable(config=tmp_path / "config.json"), 256, 32, 0)
    assert model.config.hidden_size == 16


def test_weights_from_a_file_and_a_directory(tmp_path: Path) -> None:
    source = build_model(table(), 256, 32, seed=5)
    source.save_pretrained(tmp_path / "pretrained")
    save_file({name: p.detach() for name, p in source.named_parameters()}, tmp_path / "weights.safetensors")
    for loaded in (
        build_model(table(weights=str(tmp_path / "weights.safetensors")), 256, 32, seed=0),
        build_model(ModelTable(weights=str(tmp_path / "pretrained")), 256, 32, seed=0),
    ):
        for name, value in source.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
        assert loaded.config.use_cache is False


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = build_model(table(), 256, 32, seed=5)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    path = tmp_path / "weights.safetensors"
    for change, message in [
        ({"extra": torch.ones(1)}, "no tensor extra"),
        ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight has shape \[3\] where the model has \[16\]"),
        ({"model.norm.weight": None}, "model.norm.weight of the model is missing"),
    ]:
        changed = {**weights, **change}
        save_file({name: value for name, value in changed.items() if value is not None}, path)
        with pytest.raises(ConfigError, match=message):
            build_model(table(weights=str(path)), 256, 32, seed=0)
    path.write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="cannot read the weights"):
        build_model(table(weights=str(path)), 256, 32, seed=0)
    with pytest.raises(ConfigError, match="brings its own configuration"):
        build_model(table(weights=str(tmp_path)), 256, 32, seed=0)
    with pytest.raises(ConfigError, match=r"cannot load model.weights"):
        build_model(ModelTable(weights=str(tmp_path)), 256, 32, seed=0)


@pytest.mark.parametrize("names", ["one", "other", "both"])
def test_an_export_loads_in_transformers_with_the_same_loss(tmp_path: Path, names: str) -> None:
    config = parse_config(
        '[run]\nname="x"\ntokens=100000\n[data]\nsequence_length=32\n[model]\n'
        + "".join(f"{k} = {v}\n" for k, v in SMALL.items())
    )
    model = build_model(config.model, 256, 32, seed=5)
    state = dict(model.state_dict())
    drop = {"one": "lm_head.weight", "other": "model.embed_tokens.weight", "both": None}[names]
    state = {name: value for name, value in state.items() if name != drop}
    export_run(state, config, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    batches = [torch.arange(66).reshape(2, 33)]
    # The same arithmetic on the same values.
    assert evaluate(loaded, dict(loaded.state_dict()), batches) == evaluate(model, state, batches)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # that of the umask
    assert loaded.config.use_cache


def test_an_export_of_another_model_is_refused(tmp_path: Path) -> None:
    config = parse_config('[run]\nname="x"\ntokens=100000\n')
    with pytest.raises(
        LayoutError, match=r"not the one of \[model\] \(.* has shape .*\); export it with --raw, which writes"
    ):
        export_run(build_model(table(), 256, 64, seed=5).state_dict(), config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_evaluation_uses_the_given_state_and_leaves_the_model_alone() -> None:
    model, other = (build_model(table(), 256, 32, seed) for seed in (1, 2))
    model.train()
    batches = [torch.arange(66).reshape(2, 33), torch.arange(33).reshape(1, 33)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert evaluate(model, dict(other.state_dict()), batches) == evaluate(other, dict(other.state_dict()), batches)
    assert evaluate(model, dict(model.state_dict()), batches) != evaluate(other, dict(other.state_dict()), batches)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    model = build_model(table(), 256, 32, seed=1)
    state = dict(model.state_dict())
    texts = [sample_bytes(model, state, prompt="def ", num_bytes=40, context=32, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
