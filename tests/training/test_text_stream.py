"""Documents, streams of them, and token shards: read in bounded memory, and resumed to the bit."""

import gzip
import hashlib
import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.cli import main
from diloco.config import DataTable, RunConfig, dump_config
from diloco.errors import CheckpointError, ConfigError
from diloco.training.data.corpus import load_corpus
from diloco.training.data.documents import PIECE_BYTES, open_documents
from diloco.training.data.reading import BATCH_CHARACTERS, DocumentReader, DocumentShard
from diloco.training.data.streams import Stream, TextStream

LENGTH = 16
ROWS = [f"{n} {hashlib.sha256(bytes([n % 256, n // 256])).hexdigest()[: 20 + n % 40]}" for n in range(400)]

Tables = dict[str, dict[str, Any]]
Tiny = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """The same rows in every kind of file and data set, and a plain text."""
    import datasets
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": row, "n": n}) + "\n" for n, row in enumerate(ROWS)]
    (directory / "a.jsonl").write_text("".join(lines[:150]))
    with gzip.open(directory / "b.jsonl.gz", "wt") as file:
        file.write("".join(lines[150:]))
    (directory / "plain.txt").write_text("".join(f"{row} été\n" for row in ROWS) * 50)
    rows = datasets.Dataset.from_dict({"text": ROWS, "n": list(range(len(ROWS)))})
    rows.to_parquet(str(directory / "rows.parquet"), batch_size=90)
    for part in range(3):
        rows.select(range(100 * part, 400 if part == 2 else 100 * part + 100)).to_parquet(
            str(directory / f"part-{part}.parquet"), batch_size=30
        )
    rows.save_to_disk(str(directory / "saved"), num_shards=2)
    (directory / "hub").mkdir()
    for part in range(4):
        rows.shard(4, part).to_json(str(directory / "hub" / f"train-{part}.jsonl"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ROWS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], show_progress=False)
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return {
        "jsonl": {"kind": "text", "paths": [directory / "a.jsonl", directory / "b.jsonl.gz"]},
        "plain": {"kind": "text", "paths": [directory / "plain.txt"], "held_out_documents": 1},
        "tokens": {"kind": "text", "paths": [directory / "*.jsonl*"], "tokenizer": str(directory / "tokenizer.json")},
        "parquet": {"kind": "text", "paths": [directory / "rows.parquet"]},
        "parquets": {"kind": "text", "paths": [directory / "part-*.parquet"]},
        "saved": {"kind": "huggingface", "dataset": str(directory / "saved")},
        "hub": {"kind": "huggingface", "dataset": str(directory / "hub")},
    }


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def table(values: dict[str, Any], **more: Any) -> DataTable:
    held_out = {} if "held_out_documents" in values else {"held_out_documents": 10}
    return DataTable.model_validate(
        {"stream": True, "sequence_length": LENGTH, "shuffle_sequences": 32, **held_out, **values, **more}
    )


def stream(data: DataTable, shards: list[int], num_shards: int = 2, seed: int = 3) -> TextStream:
    corpus = load_corpus(data)
    assert corpus.texts is not None
    return TextStream(corpus.texts, LENGTH, num_shards, shards, 4, seed)


KINDS = ["jsonl", "plain", "tokens", "parquet", "parquets", "saved", "hub"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_resumes_to_the_bit_in_any_pass(tables: Tables, kind: str) -> None:
    data = table(tables[kind])
    first = stream(data, [1])
    for num_batches in (1, 40, 120):  # the first pass ends between
        for _ in range(num_batches):
            first.next()
        second = stream(data, [1])
        second.load_state_dict(json_and_tensors(first.state_dict()))
        expected = [first.next() for _ in range(30)]
        assert all(torch.equal(batch, second.next()) for batch in expected)
        skipped = stream(data, [1])
        skipped.position = first.position - 30 * 4
        assert all(torch.equal(batch, skipped.next()) for batch in expected)  # as a late joiner


def json_and_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint gives it back."""
    from diloco.training.checkpoint import from_bytes, to_bytes

    return from_bytes(to_bytes(state))


@pytest.mark.parametrize(("kind", "num_shards"), [(kind, 2) for kind in KINDS] + [("hub", 3)])
def test_a_pass_deals_every_document_to_one_learner(tables: Tables, kind: str, num_shards: int) -> None:
    data = table(tables[kind])
    corpus = load_corpus(data)
    assert corpus.texts is not None
    documents, begin = corpus.texts.documents, corpus.texts.begin
    by_parts = documents.by_parts and len(documents.parts) % num_shards == 0
    assert by_parts is (kind == "hub" and num_shards == 2)
    held_out = [each.text for batch in DocumentReader(documents, DocumentShard(end=begin)).one_pass() for each in batch]
    assert len(held_out) == data.held_out_documents
    readers = [
        DocumentReader(documents, DocumentShard(m, num_shards, by_parts, begin), seed=1) for m in range(num_shards)
    ]
    passes = []
    for _ in range(2):
        read = [[each.text for batch in reader.one_pass() for each in batch] for reader in readers]
        assert all(len(texts) >= 3 for texts in read)
        passes.append(read)
        everything = sorted(text for texts in [held_out, *read] for text in texts)
        assert everything == sorted(
            each.text for batch in DocumentReader(documents, DocumentShard()).one_pass() for each in batch
        )
        assert kind == "plain" or everything == sorted(ROWS)
    assert [sorted(texts) for texts in passes[0]] == [sorted(texts) for texts in passes[1]]  # the same deal


@pytest.mark.parametrize(("kind", "num_shards", "fraction"), [("jsonl", 3, 0.25), ("hub", 2, 0.25), ("hub", 2, 1.0)])
def test_shared_documents_are_read_by_every_learner_and_the_others_as_they_are_dealt(
    tables: Tables, kind: str, num_shards: int, fraction: float
) -> None:
    texts = load_corpus(table(tables[kind])).texts
    assert texts is not None

    def read(fraction: float = 0.0, seed: int = 0) -> list[list[str]]:
        by_parts = kind == "hub"
        shards = [
            DocumentShard(m, num_shards, by_parts, texts.begin, shared_fraction=fraction, seed=seed)
            for m in range(num_shards)
        ]
        readers = [DocumentReader(texts.documents, shard, seed=1) for shard in shards]
        passes = [
            [[str(each.text) for batch in reader.one_pass() for each in batch] for reader in readers] for _ in range(2)
        ]
        assert [sorted(each) for each in passes[0]] == [sorted(each) for each in passes[1]]  # the same in every pass
        return passes[0]

    dealt, shared = read(), read(fraction, seed=3)
    common = set.intersection(*map(set, shared))
    num_rows = sum(map(len, dealt))
    assert num_rows == len(ROWS) - 10
    assert len(common) == num_rows if fraction == 1 else 0.18 * num_rows < len(common) < 0.32 * num_rows
    for own, read_now in zip(dealt, shared, strict=True):
        assert len(read_now) == len(set(read_now))
        assert set(read_now) == set(own) | common
    assert set.intersection(*map(set, read(fraction, seed=4))) != common or fraction == 1


def test_a_stream_with_shared_documents_resumes_to_the_bit_and_has_an_order_of_its_own(tables: Tables) -> None:
    def shared(shard: int, fraction: float = 0.5) -> TextStream:
        source = load_corpus(table(tables["hub"])).texts
        assert source is not None
        return TextStream(source, LENGTH, 2, [shard], 4, 3, fraction)

    first, second, everything = shared(1), shared(1), [shared(m, 1.0) for m in (0, 1, 3)]
    for _ in range(150):  # beyond the first pass
        first.next()
    second.load_state_dict(json_and_tensors(first.state_dict()))
    assert all(torch.equal(first.next(), second.next()) for _ in range(30))
    with pytest.raises(CheckpointError, match="shared_fraction = 0.5 where this run has 0.25"):
        shared(1, 0.25).load_state_dict(first.state_dict())
    assert len({tuple(each.next().flatten().tolist()) for each in everything}) == 3
    assert first.sharing == "deals 0.5 of the texts to all 2 learners in every pass"


def test_learners_draw_no_window_twice_in_a_pass_and_each_pass_has_its_order(tables: Tables) -> None:
    data = table(tables["parquet"])
    learners = [stream(data, [m]) for m in range(2)]
    expected = windows_of_a_pass(data)
    drawn: list[list[bytes]] = []
    for m, learner in enumerate(learners):
        of_one_pass = len(expected[m])
        rows = [row for _ in range(2 * of_one_pass // 4 + 1) for row in learner.next().numpy()]
        first, second = rows[:of_one_pass], rows[of_one_pass : 2 * of_one_pass]
        assert sorted(map(bytes_of, first)) == sorted(map(bytes_of, second)) == expected[m]
        assert list(map(bytes_of, first)) != list(map(bytes_of, second))
        drawn.append(list(map(bytes_of, first)))
    assert not set(drawn[0]) & set(drawn[1])
    whole = stream(data, [0, 1])  # the baseline draws what the learners draw together
    pair = [stream(data, [m]) for m in range(2)]
    assert all(torch.equal(whole.next(), torch.cat([each.next() for each in pair])) for _ in range(9))
    whole.select([1])
    assert torch.equal(whole.next(), pair[1].next())
    further = stream(data, [3])  # of a run of two: shard 1 in another order
    again = [bytes_of(row) for _ in range(len(expected[1]) // 4 + 1) for row in further.next().numpy()]
    assert sorted(again[: len(expected[1])]) == expected[1]
    assert again[: len(expected[1])] != drawn[1]


def windows_of_a_pass(data: DataTable) -> list[list[bytes]]:
    """The windows of each of two learners in their first pass, sorted, by the documents' order of that pass."""
    corpus = load_corpus(data)
    assert corpus.texts is not None
    found = []
    for m in range(2):
        reader = DocumentReader(corpus.texts.documents, DocumentShard(m, 2, begin=corpus.texts.begin), seed=3)
        tokens = np.concatenate([corpus.texts.encoder.encode(batch) for batch in reader.one_pass()]).astype(np.int64)
        starts = range(0, len(tokens) - LENGTH, LENGTH)
        found.append(sorted(bytes_of(tokens[start : start + LENGTH + 1]) for start in starts))
    return found


def bytes_of(row: np.ndarray[Any, Any]) -> bytes:
    return row.astype("<i8").tobytes()


def test_what_a_stream_holds_is_bounded_by_its_buffer_and_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with path.open("w") as file:
        for n in range(6 * BATCH_CHARACTERS // 64):
            file.write(f"{n:063d}\n")
        file.write("é" * (3 * PIECE_BYTES))  # a line that is longer than a piece
    data = table({"kind": "text", "paths": [path], "held_out_documents": 2}, shuffle_sequences=100)
    one = stream(data, [0], num_shards=1)
    most = 0
    for _ in range(path.stat().st_size // LENGTH // 4 + 10):
        one.next()
        held = one.state_dict()["streams"]["0"]
        most = max(most, held["buffer"].numel() + held["pending"].numel())
    assert most <= 100 * (LENGTH + 1) + BATCH_CHARACTERS + 3 * PIECE_BYTES < path.stat().st_size / 4
    (train, _) = open_documents(data)
    texts = [each.text for batch in DocumentReader(train, DocumentShard()).one_pass() for each in batch]
    assert b"".join(text if isinstance(text, bytes) else text.encode() for text in texts) == path.read_bytes()
    assert all(isinstance(text, bytes) and text.decode() for text in texts)  # no character is cut


@pytest.mark.parametrize("kind", ["saved", "hub", "parquet"])
def test_a_stream_knows_a_copy_of_its_data_and_other_data(tables: Tables, kind: str, tmp_path: Path) -> None:
    import datasets

    source = Path(tables[kind].get("dataset") or tables[kind]["paths"][0])
    copy = tmp_path / ("copy" if source.is_dir() else "copy.parquet")
    data = table({**tables[kind], **({"dataset": str(copy)} if source.is_dir() else {"paths": [copy]})})

    def resume() -> None:
        stream(data, [0]).load_state_dict(first.state_dict())

    first = stream(table(tables[kind]), [0])
    first.next()
    if source.is_dir():
        shutil.copytree(source, copy)
    else:
        shutil.copy(source, copy)
    resume()
    rows = [*ROWS[:222], ROWS[222].replace("222", "999"), *ROWS[223:]]
    if kind == "saved":
        shutil.rmtree(copy)
        datasets.Dataset.from_dict({"text": rows, "n": list(range(len(ROWS)))}).save_to_disk(str(copy), num_shards=2)
    elif kind == "hub":
        with (copy / "train-2.jsonl").open("a") as file:
            file.write(json.dumps({"text": "one more", "n": 400}) + "\n")
    else:
        datasets.Dataset.from_dict({"text": [*rows, "one more"]}).to_parquet(str(copy))
    with pytest.raises(CheckpointError, match="data cursor"):
        resume()


def test_streams_refuse_what_they_cannot_do(tables: Tables, tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    both.write_text("".join(json.dumps({"text": row, "body": row.upper()}) + "\n" for row in ROWS))
    first = stream(table({"kind": "text", "paths": [both]}), [0])
    with pytest.raises(CheckpointError, match="data cursor has data ="):
        stream(table({"kind": "text", "paths": [both], "text_column": "body"}), [0]).load_state_dict(first.state_dict())
    first = stream(table(tables["jsonl"]), [0])
    first.next()
    for other in (
        stream(table(tables["jsonl"], shuffle_sequences=8), [0]),
        stream(table(tables["jsonl"]), [0], num_shards=3),
        stream(table(tables["jsonl"]), [0], seed=4),
        stream(table(tables["plain"]), [0]),
    ):
        with pytest.raises(CheckpointError, match="data cursor"):
            other.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match=r"has 400 documents, and the first 400 are held out"):
        load_corpus(table({**tables["jsonl"], "held_out_documents": 400}))
    (tmp_path / "held_out.txt").write_text("x" * 99)
    few = table(tables["jsonl"], held_out_paths=[tmp_path / "held_out.txt"], held_out_documents=256)
    assert len(load_corpus(few).held_out) == 100
    with pytest.raises(ConfigError, match="shard 399 of 999 of the stream .* hold out less of it"):
        stream(few, [399], num_shards=999).next()
    for values, message in [
        ({"deal": "leases"}, 'deal = "leases" needs the number of sequences'),
        ({"held_out_fraction": 0.5}, "held_out_fraction has no effect with stream"),
        ({"kind": "stdlib", "paths": ()}, "stream has no effect with kind"),
        ({"stream": False}, "shuffle_sequences has no effect without stream"),
        ({"held_out_paths": ["x"]}, "held_out_documents has no effect with held-out paths"),
    ]:
        with pytest.raises(ValueError, match=message):
            table(tables["jsonl"], **values)


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "no JSON": ("a.jsonl", b'{"text": "one"}\n{"text": "tw', "row 2 of .*a.jsonl is not JSON"),
    "no object": ("a.jsonl", b'["one"]\n', "row 1 of .*a.jsonl is a list, not an object"),
    "no column": ("a.jsonl", b'{"body": "one", "id": 1}\n', r'row 1 of .* no column "text" \(it has body, id\)'),
    "no text": ("a.jsonl", b'{"text": null}\n', 'row 1 of .* has a NoneType in "text", not a text'),
    "cut off": (
        "a.jsonl.gz",
        gzip.compress(b'{"text": "one"}\n' * 99)[:-20],
        "cannot read the data file .*a.jsonl.gz",
    ),
    "no gzip": ("a.txt.gz", b"plain", "cannot read the data file .*a.txt.gz"),
    "no Parquet": ("a.parquet", b"plain", "cannot read the data file .*a.parquet"),
    "zstandard": ("a.jsonl.zst", b"x", "compress it with gzip instead"),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("is_stream", [True, False])
def test_broken_files_are_one_sentence(what: str, is_stream: bool, tmp_path: Path) -> None:
    name, content, message = BROKEN[what]
    (tmp_path / name).write_bytes(content)
    more: dict[str, Any] = {} if is_stream else {"stream": False, "shuffle_sequences": 1024, "held_out_documents": 256}
    data = table({"kind": "text", "paths": [tmp_path / name]}, **more)
    with pytest.raises(ConfigError, match=message):
        stream(data, [0]).next() if is_stream else load_corpus(data)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_in_another_encoding_is_one_sentence_and_bytes_are_bytes(
    name: str, tables: Tables, tmp_path: Path
) -> None:
    text = "été\n" * PIECE_BYTES
    raw = text.encode() + "été".encode("latin-1")
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    values = {"kind": "text", "paths": [tmp_path / name], "sequence_length": LENGTH}
    with pytest.raises(ConfigError, match=rf"{name} is not UTF-8 at byte {len(text.encode())} \(0xe9\); convert it"):
        load_corpus(DataTable.model_validate({**values, "tokenizer": tables["tokens"]["tokenizer"]}))
    known = tables["tokens"]
    data = table({**known, "held_out_documents": 256}, paths=values["paths"], held_out_paths=known["paths"])
    with pytest.raises(ConfigError, match=rf"{name} is not UTF-8 at byte {len(text.encode())} \(0xe9\); convert it"):
        stream(data, [0], num_shards=1).next()
    corpus = load_corpus(DataTable.model_validate(values))
    assert len(corpus.train) + len(corpus.held_out) == len(raw) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_rows_give_the_same_tokens_in_memory(tables: Tables, kind: str) -> None:
    values = {key: value for key, value in tables[kind].items() if key != "held_out_documents"}
    corpus = load_corpus(DataTable.model_validate({"sequence_length": LENGTH, **values}))
    whole = np.concatenate([part.read(0, len(part)) for part in (corpus.train, corpus.held_out)])
    if kind == "plain":
        assert bytes(whole.astype(np.uint8)) == values["paths"][0].read_bytes() + b"\0"
    elif kind == "tokens":
        assert corpus.tokenizer is not None
        assert corpus.tokenizer.decode(whole.tolist()) == "".join(ROWS)
    else:
        assert bytes(whole.astype(np.uint8)) == "".join(f"{row}\0" for row in ROWS).encode()
    streamed = Stream(corpus, LENGTH, 2, [0], 4, seed=1)
    assert streamed.next().shape == (4, LENGTH + 1)


@pytest.mark.parametrize(
    "arguments",
    [["--alone"], ["--isolated", "--shard", "1", "--set", "warm_start.steps=4"]],
    ids=["the baseline", "after a warm start"],
)
def test_a_run_from_a_stream_resumes_to_the_bit(
    arguments: list[str], tables: Tables, tiny: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [str(path) for path in tables["jsonl"]["paths"]]
    streamed = [
        "data.stream=true", "data.shuffle_sequences=16", "data.held_out_documents=40", "data.shared_fraction=0.25",
    ]  # fmt: skip
    config = tiny("train.threads=1", "checkpoint.every_steps=10", *streamed, f"data.paths={paths}")
    run_file = tmp_path / "run.toml"
    run_file.write_text(dump_config(config), encoding="utf-8")
    call = ["train", str(run_file), "--json", *arguments]
    folder = tmp_path / "run" / ("baseline" if "--alone" in arguments else "isolated") / "checkpoints"

    def train(*more: str) -> bytes:
        with pytest.raises(SystemExit) as ended:
            main([*call, *more])
        told = capfd.readouterr()
        assert "deals 0.25 of the texts to all 2 learners in every pass" in told.err
        assert not ended.value.code, told.err
        assert json.loads(told.out)["steps"] == 20
        return (folder / "step-0000000020" / "tensors.safetensors").read_bytes()

    at_once = train()
    shutil.rmtree(folder / "step-0000000020")
    assert train("--resume") == at_once  # weights, optimizer, buffers of the stream


def test_the_tables_of_the_page_about_data_are_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    found = [
        tomllib.loads(block)["data"] for block in re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    ]
    kinds = ["text", "tokens", "huggingface", "huggingface", "stdlib"]
    assert [DataTable.model_validate(each).kind for each in found] == kinds
