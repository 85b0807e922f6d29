"""`diloco tokenize`: shards that are whole or absent, the same bytes after a kill, and what a run makes of them."""

import gzip
import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from diloco.cli import main
from diloco.config import DataTable, RunConfig, dump_config
from diloco.errors import ConfigError, StoreError
from diloco.training.data import corpus, reading
from diloco.training.data.token_shards import (
    INDEX,
    UNFINISHED,
    ShardProgress,
    TokenIndex,
    read_index,
    write_token_shards,
)

Tiny = Callable[..., RunConfig]

ROWS = [f"{n} times {n} is {n * n}." for n in range(3000)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"body": row}) + "\n" for row in ROWS)
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = {"[UNK]": 0, "times": 1, "is": 2, ".": 3, **{str(n): n + 4 for n in range(3000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def table(**values: Any) -> DataTable:
    return DataTable.model_validate({"kind": "text", "text_column": "body", "sequence_length": 16, **values})


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


KILLED = """
import os, signal, sys
from diloco.config import DataTable
from diloco.training.data import reading
from diloco.training.data.token_shards import write_token_shards
reading.BATCH_DOCUMENTS = 100
last, shard_tokens, directory, table = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
def tell(made):
    if made.num_documents >= last:
        os.kill(os.getpid(), signal.SIGKILL)
from pathlib import Path
write_token_shards(DataTable.model_validate_json(table), Path(directory), shard_tokens=shard_tokens, report=tell)
"""


@pytest.mark.parametrize("kind", ["text", pytest.param("huggingface", marks=pytest.mark.slow)])
def test_what_is_made_after_kills_has_the_bytes_of_what_is_made_at_once(
    kind: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = table(paths=[rows], stream=True, held_out_documents=150)
    if kind == "huggingface":
        import datasets

        whole = datasets.Dataset.from_dict({"body": ROWS})
        whole.save_to_disk(str(tmp_path / "saved"), num_shards=2)
        data = table(kind="huggingface", dataset=str(tmp_path / "saved"))
    monkeypatch.setattr(reading, "BATCH_DOCUMENTS", 100)
    at_once, in_parts = tmp_path / "at_once", tmp_path / "in_parts"
    expected = write_token_shards(data, at_once, shard_tokens=9_000)
    assert len(expected.shards["train"]) > 4
    in_parts.mkdir()
    for name in (f".{UNFINISHED}.elsewhere.7", ".train-00000.bin.elsewhere.7"):  # of a kill in the first write
        (in_parts / name).touch()
    for documents, num_whole in [(300, 0), (1_900, 3)] if kind == "text" else [(1_900, 3)]:
        arguments = [str(documents), "9000", str(in_parts), data.model_dump_json()]
        killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
        assert killed.returncode == -signal.SIGKILL
        unfinished = json.loads((in_parts / UNFINISHED).read_text())
        assert sum(map(len, unfinished["shards"].values())) >= num_whole
        with pytest.raises(ConfigError, match="is not finished"):
            read_index(in_parts)
    with pytest.raises(ConfigError, match="was made with shard_tokens = 9000, which is now 8000"):
        write_token_shards(data, in_parts, shard_tokens=8_000)
    kept = (in_parts / "train-00001.bin").stat().st_ino
    write_token_shards(data, in_parts, shard_tokens=9_000)
    assert (in_parts / "train-00001.bin").stat().st_ino == kept  # it was whole, and went on after it
    assert contents(in_parts) == contents(at_once)
    assert (at_once / "train-00000.bin").stat().st_size < 9_000 + 100 * 64


def test_a_directory_of_shards_is_the_same_corpus_as_its_texts(rows: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("7 times 7 is 49.\n" * 50)
    for number, values in enumerate([{}, {"held_out_paths": [tmp_path / "held_out.txt"]}]):
        data = table(paths=[rows], tokenizer=str(tokenizer), **values)
        directory = tmp_path / str(number)
        index = write_token_shards(data, directory, shard_tokens=5_000)
        assert (index.dtype, index.vocab_size) == ("uint16", 3_004)
        direct = corpus.load_corpus(data)
        mapped = corpus.load_corpus(DataTable(kind="tokens", directory=directory, sequence_length=16))
        assert mapped.fingerprint() == direct.fingerprint()
        assert mapped.tokenizer is not None
        assert mapped.tokenizer.decode(mapped.train.read(0, 5).tolist()) == "0 times 0 is 0"
        assert all(isinstance(array, np.memmap) for array in mapped.train._arrays)
    assert index.total("num_documents", "train") == len(ROWS)
    assert index.total("num_documents", "held_out") == 1
    with pytest.raises(ConfigError, match="held_out_fraction has no effect"):
        corpus.load_corpus(DataTable(kind="tokens", directory=directory, held_out_fraction=0.2))
    with pytest.raises(ValueError, match="dtype has no effect beside directory, which determines all sources"):
        DataTable(kind="tokens", directory=directory, dtype="uint32")


@pytest.mark.parametrize("kind", ["text", "parquet", "saved", "loaded"])
def test_data_that_has_changed_is_noticed_wherever_it_has(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    path = tmp_path / "data"
    data = {
        "text": lambda: table(paths=[path]),
        "parquet": lambda: table(paths=[path / "*.parquet"]),
        "saved": lambda: table(kind="huggingface", dataset=str(path)),
        "loaded": lambda: table(kind="huggingface", dataset=str(path), stream=True, held_out_documents=1),
    }[kind]()

    def write(rows: list[str]) -> None:
        if kind == "text":
            path.write_text("\n".join(rows))
        elif kind == "saved":
            shutil.rmtree(path, ignore_errors=True)
            datasets.Dataset.from_dict({"body": rows}).save_to_disk(str(path))
        else:
            datasets.Dataset.from_dict({"body": rows}).to_parquet(str(path / "train.parquet"))

    def make(name: str) -> TokenIndex:
        return write_token_shards(data, tmp_path / name, shard_tokens=5_000)

    write(ROWS)
    made = make("whole")
    write(ROWS)
    assert make("whole") == made
    (tmp_path / "half").mkdir()
    half = {"made_from": made.made_from, "shards": {"train": [], "held_out": []}, "cursors": {}}
    (tmp_path / "half" / UNFINISHED).write_text(json.dumps(half))
    other = [*ROWS[:2_222], ROWS[2_222].replace("is", "as"), *ROWS[2_223:]]
    for rows in (other, [*ROWS, "one more"]):  # of the same size, but for compressed Parquet; and longer
        write(rows)
        for name in ("whole", "half"):
            with pytest.raises(ConfigError, match="was made with documents_sha256 ="):
                make(name)


def test_what_goes_wrong_while_shards_are_made_is_one_sentence(rows: Path, tokenizer: Path, tmp_path: Path) -> None:
    directory = tmp_path / "shards"
    data = table(paths=[rows], tokenizer=str(tokenizer))

    def fill(_: ShardProgress) -> None:
        (directory / "tokenizer").mkdir(exist_ok=True)
        if not (directory / "tokenizer" / "tokenizer.json").is_symlink():
            (directory / "tokenizer" / "tokenizer.json").symlink_to("/dev/full")

    with pytest.raises(StoreError, match=r"cannot write .*tokenizer \(.*No space left.*\); free disk space"):
        write_token_shards(data, directory, shard_tokens=5_000, report=fill)
    (directory / "tokenizer" / "tokenizer.json").unlink()
    first = directory / "train-00000.bin"
    raw = first.read_bytes()
    first.write_bytes(b"")
    with pytest.raises(StoreError, match="train-00000.bin differs from the sha256 of its index"):
        write_token_shards(data, directory, shard_tokens=5_000)
    first.write_bytes(raw)
    assert write_token_shards(data, directory, shard_tokens=5_000).tokenizer == "tokenizer"
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match="has no texts to train on"):
        write_token_shards(table(paths=[tmp_path / "empty.txt"]), tmp_path / "nothing", shard_tokens=5_000)
    held_out = table(paths=[rows], held_out_paths=[tmp_path / "empty.txt"])
    with pytest.raises(ConfigError, match="has no texts to hold out; check data.held_out_paths"):
        write_token_shards(held_out, tmp_path / "nothing held out", shard_tokens=5_000)


def test_an_empty_file_has_no_shard_and_an_empty_shard_no_tokens(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    directory = tmp_path / "shards"
    index = write_token_shards(table(paths=[tmp_path / "empty.txt", rows]), directory, shard_tokens=5_000)
    assert all(shard.num_tokens for shard in index.shards["train"])
    before = corpus.load_corpus(DataTable(kind="tokens", directory=directory))
    values = json.loads((directory / "index.json").read_text())
    for number in (0, len(index.shards["train"]) + 1):  # the first, and one after the last
        values["shards"]["train"].insert(number, {"num_tokens": 0, "num_documents": 0, "sha256": ""})
    for number, shard in reversed([*enumerate(values["shards"]["train"])]):
        file = directory / f"train-{number:05d}.bin"
        if shard["num_tokens"]:
            (directory / shard["file"]).rename(file)
        else:
            file.touch()
        shard["file"] = file.name
    (directory / "index.json").write_text(json.dumps(values))
    after = corpus.load_corpus(DataTable(kind="tokens", directory=directory))
    assert after.fingerprint() == before.fingerprint()


def test_a_wrong_directory_is_one_sentence(rows: Path, tmp_path: Path) -> None:
    directory = tmp_path / "shards"
    data = table(paths=[rows])

    def load() -> corpus.Corpus:
        return corpus.load_corpus(DataTable(kind="tokens", directory=directory, sequence_length=16))

    with pytest.raises(ConfigError, match="cannot read .*index.json"):
        load()
    index = write_token_shards(data, directory, shard_tokens=10_000)
    assert write_token_shards(data, directory, shard_tokens=10_000) == index  # and compares every shard
    first = directory / index.shards["train"][0].file
    raw = first.read_bytes()
    first.write_bytes(raw[:5] + b"?" + raw[6:])
    with pytest.raises(StoreError, match="train-00000.bin differs from the sha256 of its index"):
        write_token_shards(data, directory, shard_tokens=10_000)
    first.write_bytes(raw[:-1])
    with pytest.raises(ConfigError, match=f"has {len(raw) - 1} bytes where its index says {len(raw)}"):
        load()
    first.unlink()
    with pytest.raises(ConfigError, match="cannot read the token shard"):
        load()
    values = json.loads((directory / INDEX).read_text())
    shards = values["shards"]["train"]
    shard = shards[0]
    for key, value, message in [
        ("dtype", "float32", "dtype = .float32.: input should be 'uint8', 'uint16' or 'uint32'.*make it again"),
        ("format", 2, "cannot read .*index.json .*format = 2: input should be 1.*make it again"),
        ("shards", {"train": [{}]}, "cannot read .*index.json"),
        (
            "shards",
            {"train": [], "held_out": [{**shard, "file": "../a.bin"}]},
            "'../a.bin' is listed where held_out-00000",
        ),
        ("shards", {"train": [], "held_out": [{**shard, "file": "a\0b"}]}, r"'a\\x00b' is listed where held_out-00000"),
        ("shards", {"train": [], "held_out": [{"file": shard["file"], "num_tokens": 1}]}, "cannot read .*index.json"),
        ("shards", {"train": shards[::-1], "held_out": []}, "is listed where train-00000.bin should be"),
        ("made_from", 5, "cannot read .*index.json"),
        ("tokenizer", 5, "cannot read .*index.json"),
        ("vocab_size", -1, "cannot read .*vocab_size = -1: input should be greater"),
    ]:
        (directory / INDEX).write_text(json.dumps({**values, key: value}))
        with pytest.raises(ConfigError, match=message):
            load()
    (directory / INDEX).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r'data.kind = "stdlib" has no texts'):
        write_token_shards(DataTable(), directory, shard_tokens=1)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").touch()
    with pytest.raises(ConfigError, match="contains other files than token shards"):
        write_token_shards(data, tmp_path / "used", shard_tokens=1)


def test_the_command_line_makes_shards_trains_from_them_and_says_what_is_wrong(
    tiny: Tiny, tokenizer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.cli.tokenize.LINE_EVERY_S", 0.0)
    run_file = tmp_path / "run.toml"
    run_file.write_text(dump_config(tiny(f"data.tokenizer={tokenizer}", "train.threads=1")), encoding="utf-8")

    def call(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code or 0, *capfd.readouterr()

    texts_file = tmp_path / "texts.toml"
    texts_file.write_text(run_file.read_text())
    code, out, err = call("tokenize", str(run_file), str(tmp_path / "shards"), "--json")
    assert code == 0, err
    assert re.search(r"^[\d,]+ tokens \| 1 documents \| 0 whole shards \| [\d,]+ tokens/s$", err, re.MULTILINE)
    told = json.loads(out)
    assert (told["dtype"], told["vocab_size"], told["num_shards"]) == ("uint16", 3_004, 1)
    code, out, _ = call("tokenize", str(run_file), str(tmp_path / "shards"))
    assert code == 0
    given = tomllib.loads(out[out.index("[data]") :])["data"]
    assert given == {"kind": "tokens", "directory": str(tmp_path / "shards"), "sequence_length": 32}
    of_tokens = tiny("data.kind=tokens", "data.paths=[]", f"data.directory={given['directory']}", "train.threads=1")
    run_file.write_text(dump_config(of_tokens), encoding="utf-8")
    code, out, err = call("train", str(run_file), "--alone", "--json", "--set", "checkpoint.every_steps=10")
    assert code == 0, err
    assert json.loads(out)["steps"] == 20
    checkpoint = tmp_path / "run" / "baseline" / "checkpoints" / "step-0000000020"
    code, _, err = call("export", str(run_file), str(tmp_path / "out"), "--checkpoint", str(checkpoint))
    assert code == 0, err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 3_004
    assert (tmp_path / "out" / "tokenizer.json").exists()
    shard = tmp_path / "shards" / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[2:])
    code, _, err = call("train", str(run_file), "--alone", "--force")
    assert code == 2
    assert err.splitlines()[-1].startswith(f"diloco: token shard {shard} has ")
    for file, expected, message in [
        (texts_file, 1, "differs from the sha256 of its index"),
        (run_file, 2, "has no texts"),
    ]:
        code, _, err = call("tokenize", str(file), str(tmp_path / "shards"))
        assert (code, message in err.splitlines()[-1]) == (expected, True), err
