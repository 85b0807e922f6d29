"""The run file: defaults, errors that name the key, overrides, and a dump that reads back."""

import subprocess
import sys
from pathlib import Path

import pytest

from diloco.cli._options import with_keys
from diloco.config import RunConfig, dump_config, load_config, parse_config
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError
from diloco.tables import read_toml, write_toml

ROOT = Path(__file__).parents[2]
MINIMAL = '[run]\nname = "demo"\ntokens = 614400\n'


def test_a_minimal_file_resolves_to_the_default_run() -> None:
    config = parse_config(MINIMAL)
    assert config.dir == Path("runs/demo")
    assert config.state_dir == Path("runs/demo/syncer")
    assert config.schedule_steps == 600
    assert config.learner_batch == 16
    assert config.method == {"preset": "StreamingDiLoCo"}


@pytest.mark.parametrize(
    ("tables", "global_batch", "share"),
    [
        ("learners = 2", 16, 8),
        ("learners = 3", 18, 6),
        ("learners = 24", 24, 1),
        ("learners = 3\n[train]\naccumulate = 4", 24, 8),
        ("learners = 3\n[train]\nglobal_batch = 6", 6, 2),
    ],
)
def test_the_default_batch_divides_among_the_learners(tables: str, global_batch: int, share: int) -> None:
    config = parse_config(MINIMAL + tables)
    assert (config.train.global_batch, config.share) == (global_batch, share)
    assert f"global_batch = {global_batch}\n" in dump_config(config)
    assert parse_config(dump_config(config)) == config


def test_the_default_batch_is_the_same_for_all_learners() -> None:
    text = MINIMAL + "learners = 3\n[learner.a]\ntrain.accumulate = 2\n"
    batches = [parse_config(text, learner=name).train.global_batch for name in (None, "a", "b")]
    assert batches == [18, 18, 18]
    assert parse_config(text, overrides=["train.accumulate=4"], learner="b").train.global_batch == 24
    with pytest.raises(ConfigError, match=r"\[learner.a\]: train.global_batch = 18 must be a multiple of .* = 12"):
        parse_config(text.replace("accumulate = 2", "accumulate = 4"))


@pytest.mark.parametrize(("tokens", "warmup_steps"), [(100, 0), (50 * 1024, 5), (51 * 1024, 50)])
def test_a_loop_of_ones_own_is_not_measured_by_the_trainers_defaults(tokens: int, warmup_steps: int) -> None:
    config = parse_config(f'[run]\nname = "own"\ntokens = {tokens}\nlearners = 2\n')
    assert config.schedule.warmup_steps == warmup_steps
    assert parse_config(dump_config(config)) == config


def test_the_dump_reads_back_to_the_same_value() -> None:
    text = (
        MINIMAL + 'learners = 2\n[model]\ntype = "llama"\nhidden_size = 32\n'
        'rope_parameters = {rope_type = "default", rope_theta = 1e4}\n'
        + '[data]\nkind = "text"\npaths = ["a b.txt", "ü.txt"]\n[evaluate]\nprompt = "\\n\\"\\u007f"\n'
        + '[method]\npreset = "DiLoCo"\nfragments = {type = "Named", patterns = [["a.*"], ["b.*"]]}\n'
        "sync_every = 30\n[train]\nthreads = 1\n"
    )
    config = parse_config(text)
    assert config.model.settings["hidden_size"] == 32
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MINIMAL + "[train]\nglobal_bach = 8\n",
            'run.toml: unknown key "train.global_bach"; did you mean "global_batch"?',
        ),
        (MINIMAL + "[trian]\nclip = 8\n", 'run.toml: unknown key "trian"; did you mean "train"?'),
        ('[run]\nname = "x"\n', 'run.toml: "run.tokens" is missing'),
        (MINIMAL + "[train]\nglobal_batch = -3\n", "run.toml: train.global_batch = -3: input should be greater than 0"),
        (
            MINIMAL + "learners = 3\n[train]\nglobal_batch = 16\n",
            "train.global_batch = 16 must be a multiple of run.learners x train.accumulate = 3",
        ),
        (
            MINIMAL + '[train]\ntrains_experts = "0-3,2"\n',
            r"run.toml: \[train\] trains_experts='0-3,2' names 2 twice; name each number once",
        ),
        (MINIMAL + '[train]\ntrains_experts = ""\n', r"\[train\] trains_experts='' is not a list of numbers; write"),
        (MINIMAL + '[data]\nkind = "text"\n', r'\[data\] kind = "text" needs paths'),
        (MINIMAL + '[data]\npaths = ["a"]\n', "no effect"),
        (
            MINIMAL + 'learners = 2\n[data]\nshared_fraction = 0.1\ndeal = "leases"\n',
            'shared_fraction has no effect with deal = "leases", which gives each sequence to one learner',
        ),
        (MINIMAL + "[data]\nshared_fraction = 0.1\n", "data.shared_fraction has no effect with run.learners = 1"),
        (MINIMAL + "[data]\nshared_fraction = 1.5\n", "data.shared_fraction = 1.5: input should be less than or equal"),
        (MINIMAL + "[data]\nshared_fraction = -0.1\n", "data.shared_fraction = -0.1: input should be greater than or"),
        (MINIMAL + "[schedule]\nwarmup_steps = 600\n", "schedule.warmup_steps = 600 must be below"),
        (MINIMAL + "[warm_start]\nsteps = 600\n", "warm_start.steps = 600 leaves nothing"),
        (MINIMAL + "steps = 5\n[warm_start]\nsteps = 5\n", "warm_start.steps = 5 leaves nothing of run.steps"),
        (MINIMAL + "[syncer]\nkeys = 'a'\ninsecure = true\n", "insecure and keys contradict each other"),
        (MINIMAL + "[task.sums]\nsorce = 'x'\n", 'unknown key "task.sums.sorce"; did you mean "source"?'),
        (MINIMAL + "[task.source]\nsorce = 'x'\n", 'unknown key "task.source.sorce"; did you mean "source"?'),
        (MINIMAL + "[rl]\nclip_high = 0.3\n", 'unknown key "rl.clip_high"'),
        (MINIMAL + "[rl]\ndelta = 4.0\n", 'unknown key "rl.delta"'),
        (MINIMAL + "[syncer]\ntoken_file = 'x'\n", 'unknown key "syncer.token_file"'),
        (MINIMAL + "[syncer]\nstore = ''\n", 'syncer.store = "": string should have at least 1 character'),
        (MINIMAL + "[heal]\n", 'run.toml: unknown key "heal"; known are checkpoint, data'),
        ("run = 3\n", r"run.toml: run must be a table, \[run\]"),
        ("[run\n", "run.toml is not TOML"),
    ],
)
def test_errors_name_file_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load_config(path)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the run file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"the run file .*run\.toml is not UTF-8 text; save it as UTF-8"):
        load_config(tmp_path / "run.toml")


def test_overrides_are_toml_values_or_bare_words() -> None:
    config = parse_config(
        MINIMAL,
        overrides=[
            "train.global_batch=8",
            "schedule.kind=wsd",
            "method.outer={type='SGD', lr=1.0}",
            "model.hidden_size=32",
        ],
    )
    assert config.train.global_batch == 8
    assert config.schedule.kind == "wsd"
    assert config.method["outer"] == {"type": "SGD", "lr": 1.0}
    assert config.model.settings == {"hidden_size": 32}
    assert parse_config(MINIMAL, overrides=["method={preset='DiLoCo'}"]).method == {"preset": "DiLoCo"}
    with pytest.raises(ConfigError, match="not of the form"):
        parse_config(MINIMAL, overrides=["global_batch 8"])
    with pytest.raises(ConfigError, match=r'unknown key "train\.foo"'):
        parse_config(MINIMAL, overrides=["train.foo=8"])
    with pytest.raises(ConfigError, match="is a value, not a table"):
        parse_config(MINIMAL, overrides=["run.tokens.x=8"])


UNEQUAL = (
    MINIMAL
    + """learners = 2
[train]
batch = 4
[learner.site-b]
train.batch = 2
inner.lr = 1e-3
syncer.keys = "keys/site-b"
[learner."site c"]
train.accumulate = 4
"""
)


def test_a_learners_own_table_is_laid_over_the_others_and_overrides_over_both() -> None:
    plain, own, other = (parse_config(UNEQUAL, learner=name) for name in (None, "site-b", "learner-0"))
    assert (plain.learner_batch, plain.share, own.learner_batch) == (4, 8, 2)
    assert (own.inner.lr, own.inner.betas, own.syncer.keys) == (1e-3, (0.9, 0.95), "keys/site-b")
    assert other == plain.model_copy(update={"learner": {}})
    assert parse_config(UNEQUAL, learner="site c").train.batch == 4
    assert parse_config(UNEQUAL, overrides=["train.batch=8"], learner="site-b").learner_batch == 8
    assert parse_config(UNEQUAL, overrides=["learner.site-b.train.batch=8"], learner="site-b").learner_batch == 8
    assert parse_config(dump_config(own)) == own


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("train.bach = 3", r'run file: \[learner.x\]: unknown key "train.bach"; did you mean "batch"'),
        ("run.seed = 3", r"\[learner.x\] sets the table run, which all learners of a run share"),
        ("method.preset = 'DiLoCo'", "sets the table method"),
        ("train.global_batch = 8", "sets train.global_batch, which all"),
        ("train.batch = 3\ntrain.accumulate = 2", "train.batch = 3 must be a multiple of train.accumulate = 2"),
        ("train = 3", r"learner.x.train must be a table, \[learner.x.train\]"),
    ],
)
def test_a_learners_own_table_is_checked_whoever_reads_the_file(table: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(MINIMAL + f"[learner.x]\n{table}\n")


def test_a_schedule_of_synchronisations_comes_through_the_run_file() -> None:
    config = parse_config(MINIMAL + '[method]\npreset = "DiLoCo"\nsync_every = [[0, 10], [100, 30]]\n')
    assert method_from_table(config.method).sync_every == ((0, 10), (100, 30))
    assert parse_config(dump_config(config)) == config
    override = parse_config(MINIMAL, overrides=["method.preset=DiLoCo", "method.sync_every=[[0, 10], [100, 30]]"])
    assert override.method == config.method


def test_the_keys_of_a_command_replace_the_run_files(tmp_path: Path) -> None:
    keys = str(tmp_path / 'of "a" machine')
    assert parse_config(MINIMAL, overrides=with_keys(["syncer.keys=other"], keys)).syncer.keys == keys
    assert parse_config(MINIMAL, overrides=with_keys(None, None)).syncer.keys is None


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "run-file.md").read_text()
    for table, field in RunConfig.model_fields.items():
        section = text.split(f"## [{table}]")[1].split("\n## ")[0]
        for key in getattr(field.annotation, "model_fields", {}):
            assert f"`{key}`" in section, f"{table}.{key}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/run.toml")), ids=lambda path: path.parent.name)
def test_every_example_is_a_run_file_with_a_method(path: Path) -> None:
    method_from_table(load_config(path).method)


def test_reading_a_run_file_needs_no_torch() -> None:
    code = "import sys, diloco.config, diloco.events; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_whatever_tables_hold_reads_back() -> None:
    tables = {
        "a": {
            "text": 'quotes " and \\, a\nline, \x7f, \0, é, 😀',
            "small": 1e-7,
            "large": 1e16,
            "whole": 10**12,
            "yes": True,
        },
        "b c": {"": [], "within": {"x.y": 1, "z": [[1], [2]]}, "last": "after a table"},
    }
    rows = [{"n": 1, "of": [{"m": 1}, {"m": 2}]}, {"n": 2}]
    text = write_toml({**tables, "left out": None, "rows": [{**row, "left out": None} for row in rows]})
    assert read_toml(text, "text") == {**tables, "rows": rows}
    with pytest.raises(ConfigError, match="a value is not valid in TOML .*; use numbers, strings, lists, tables"):
        write_toml({"a": {"b": object()}})
