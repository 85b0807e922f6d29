"""Sources, shards and cursors."""

import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.config import DataTable, RunConfig
from diloco.errors import CheckpointError, ConfigError
from diloco.protocol.units import permute
from diloco.training.data.corpus import Corpus, Tokens, load_corpus
from diloco.training.data.streams import ShardedWindows, Stream, held_out_batches
from diloco.training.pretrained import vocabulary


def corpus(num_tokens: int, vocab_size: int = 1 << 16) -> Corpus:
    """Token i has the value i, so a batch says where it came from."""
    tokens = np.arange(num_tokens, dtype=np.uint16)
    return Corpus(Tokens([tokens]), Tokens([tokens]), vocab_size)


@given(size=st.integers(1, 600), key=st.binary(min_size=1, max_size=16))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_permute_is_a_permutation(size: int, key: bytes) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@given(windows=st.integers(1, 200), shards=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_shards_are_disjoint_equal_and_complete_in_every_pass(windows: int, shards: int, seed: int) -> None:
    deal = ShardedWindows(windows, shards, seed)
    n = deal.shard_windows
    for epoch in range(2):
        dealt = [[deal.window(m, epoch * n + i) for i in range(n)] for m in range(shards)]
        assert len({w for shard in dealt for w in shard}) == n * shards
        if epoch == 0:
            first = [set(shard) for shard in dealt]
    assert first == [set(shard) for shard in dealt]


def test_passes_over_a_shard_have_their_own_orders() -> None:
    deal = ShardedWindows(100, 2, 0)
    orders = [[deal.window(1, epoch * 50 + i) for i in range(50)] for epoch in range(2)]
    assert orders[0] != orders[1]


@given(
    windows=st.integers(1, 200), shards=st.integers(1, 7), seed=st.integers(0, 2**32 - 1), shared=st.integers(0, 200)
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_shared_windows_are_in_every_shard_once_a_pass_and_the_others_in_one(
    windows: int, shards: int, seed: int, shared: int
) -> None:
    shared = min(shared, windows)
    deal = ShardedWindows(windows, shards, seed, shared)
    n = deal.shard_windows
    assert n == shared + (windows - shared) // shards
    passes = []
    for epoch in range(2):
        dealt = [[deal.window(m, epoch * n + i) for i in range(n)] for m in range(2 * shards)]
        reads = Counter(window for shard in dealt[:shards] for window in shard)
        expected = {1: (n - shared) * shards, shards: shared} if shards > 1 else {1: n}
        assert Counter(reads.values()) == {times: number for times, number in expected.items() if number}
        assert all(len(set(shard)) == n for shard in dealt)
        passes.append([set(shard) for shard in dealt])
        for m in range(shards):  # learners beyond the planned ones
            assert set(dealt[shards + m]) == set(dealt[m])
    assert passes[0] == passes[1]  # the same share of every pass
    alone = ShardedWindows(windows, windows + 1, seed, shared)  # a planned number that leaves nothing to deal
    assert {alone.window(0, i) for i in range(shared)} <= passes[0][0]


def test_each_learner_has_an_order_of_its_own_for_the_shared_windows() -> None:
    deal = ShardedWindows(1000, 3, 5, 100)
    orders = [[deal.window(m, i) for i in range(deal.shard_windows)] for m in (0, 1, 2, 4)]
    shared = set.intersection(*map(set, orders))
    assert len(shared) == 100
    assert len({tuple(window for window in order if window in shared) for order in orders}) == 4
    first = [next(i for i, window in enumerate(order) if window in shared) for order in orders]
    assert max(first) < 30  # they are spread over the pass: a quarter of a shard


def test_all_windows_may_be_shared_and_none_is_the_deal_without_sharing() -> None:
    everything = Stream(corpus(1001), 10, 3, [2], 100, seed=5, shared_fraction=1.0)
    assert sorted(int(row[0]) for row in everything.next()) == list(range(0, 1000, 10))
    whole = Stream(corpus(1001), 10, 3, range(3), 4, seed=5, shared_fraction=0.2)
    parts = [Stream(corpus(1001), 10, 3, [m], 4, seed=5, shared_fraction=0.2) for m in range(3)]
    for _ in range(14):  # beyond one pass of 20 + 26
        assert torch.equal(whole.next(), torch.cat([each.next() for each in parts]))
    assert whole.sharing == "deals 20 of 100 sequences to all 3 learners in every pass, and 26 others to each"
    assert not Stream(corpus(1001), 10, 3, [2], 4, seed=5).sharing
    tiny_share = Stream(corpus(1001), 10, 3, [2], 4, seed=5, shared_fraction=1e-9)
    assert tiny_share.sharing.startswith("deals 1 of 100")  # rounded up: a share that is set shares something


def test_the_order_of_sequences_is_fixed() -> None:
    # A golden value: another order would silently unpair runs and spoil resuming across versions.
    assert [ShardedWindows(1000, 3, 17).window(2, i) for i in range(6)] == [533, 571, 675, 803, 558, 30]
    assert [ShardedWindows(1000, 3, 17, 250).window(2, i) for i in range(6)] == [149, 290, 192, 232, 480, 534]


def test_a_batch_is_a_window_with_its_next_token() -> None:
    stream = Stream(corpus(101), 10, 1, [0], 3, seed=1)
    batch = stream.next()
    assert batch.dtype == torch.int64
    assert batch.shape == (3, 11)
    for row in batch.tolist():
        assert row == list(range(row[0], row[0] + 11))
        assert row[0] % 10 == 0


def test_the_full_batch_is_what_the_learners_draw_together() -> None:
    streams = [Stream(corpus(1001), 10, 3, [m], 4, seed=5) for m in range(3)]
    full = Stream(corpus(1001), 10, 3, range(3), 4, seed=5)
    for _ in range(12):  # beyond one pass
        assert torch.equal(full.next(), torch.cat([stream.next() for stream in streams]))


def test_a_learner_beyond_the_planned_ones_reads_one_of_their_shards_in_an_order_of_its_own() -> None:
    deal = ShardedWindows(1000, 3, 5)
    planned, further = ([deal.window(shard, i) for i in range(deal.shard_windows)] for shard in (1, 7))
    assert set(planned) == set(further)
    assert sum(a == b for a, b in zip(planned, further, strict=True)) < 10  # of 333; by chance it is one
    drawn = Stream(corpus(10_001), 10, 3, [7], 333, seed=5).next()
    assert [int(row[0]) // 10 for row in drawn] == further


def test_a_cursor_resumes_exactly_and_knows_where_it_belongs() -> None:
    for shared_fraction in (0.0, 0.3):
        first, second = (Stream(corpus(1001), 10, 2, [1], 4, 5, shared_fraction) for _ in range(2))
        for _ in range(20):
            first.next()
        second.load_state_dict(first.state_dict())
        assert torch.equal(first.next(), second.next())
    for other in (
        Stream(corpus(1011), 10, 2, [1], 4, 5, 0.3),
        Stream(corpus(1001), 11, 2, [1], 4, 5, 0.3),
        Stream(corpus(1001), 10, 3, [1], 4, 5, 0.3),
        Stream(corpus(1001), 10, 2, [1], 4, 6, 0.3),
        Stream(corpus(1001), 10, 2, [1], 4, seed=5),
    ):
        with pytest.raises(CheckpointError, match="data cursor"):
            other.load_state_dict(first.state_dict())


def test_impossible_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 sequences for 3 learners"):
        Stream(corpus(21), 10, 3, [0], 4, seed=0)
    with pytest.raises(
        ConfigError,
        match="10 sequences for 3 learners, of which data.shared_fraction = 0.9 shares 9; lower it, or give",
    ):
        Stream(corpus(101), 10, 3, [0], 4, 0, 0.9)
    with pytest.raises(ConfigError, match="outside the vocabulary of 5"):
        Stream(corpus(101, vocab_size=5), 10, 1, [0], 10, seed=0).next()


def test_held_out_sequences_are_fixed_and_spread() -> None:
    batches = held_out_batches(corpus(1001), 10, 5, batch=2)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [int(row[0]) for batch in batches for row in batch] == [0, 200, 400, 600, 800]
    assert sum(len(batch) for batch in held_out_batches(corpus(101), 10, 50, batch=8)) == 10


def test_tokens_read_across_arrays() -> None:
    tokens = Tokens([np.arange(3, dtype=np.uint8), np.arange(0, dtype=np.uint8), np.arange(3, 10, dtype=np.uint16)])
    assert len(tokens) == 10
    assert tokens.read(1, 6).tolist() == [1, 2, 3, 4, 5]
    head, tail = tokens.split_tail(0.8)
    assert (len(head), len(tail)) == (2, 8)
    assert tail.read(0, 8).tolist() == list(range(2, 10))


def test_the_standard_library_is_a_corpus_with_a_held_out_part() -> None:
    data = load_corpus(DataTable())
    assert len(data.train) > 2_000_000
    assert len(data.held_out) > 50_000
    # enum.py is held out everywhere, by the hash of its path; this module's own file is not there at all.
    held_out = bytes(data.held_out.read(0, len(data.held_out)).astype(np.uint8))
    train = bytes(data.train.read(0, len(data.train)).astype(np.uint8))
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "enum.py").read_bytes() in held_out
    assert (root / "enum.py").read_bytes() not in train
    assert (root / "argparse.py").read_bytes() in train
    assert data.fingerprint() == load_corpus(DataTable()).fingerprint()


def test_text_files_are_bytes_or_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two two " * 40)
    (tmp_path / "b.txt").write_text("three " * 40)
    paths = (tmp_path / "a.txt", tmp_path / "b.txt")
    data = load_corpus(DataTable(kind="text", paths=paths, held_out_fraction=0.25, sequence_length=8))
    assert len(data.train) + len(data.held_out) == 40 * 12 + 40 * 6 + 2
    assert data.is_bytes
    tokenizer = word_tokenizer(tmp_path)
    data = load_corpus(
        DataTable(kind="text", paths=paths[:1], held_out_paths=paths[1:], tokenizer=str(tokenizer), sequence_length=8)
    )
    assert data.train.read(0, 6).tolist() == [1, 2, 2, 1, 2, 2]
    assert set(data.held_out.read(0, 40).tolist()) == {3}
    assert data.vocab_size == 4


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_what_is_held_out_is_not_trained_on_and_no_file_is_read_twice(kind: str, tmp_path: Path) -> None:
    for name in ("a.txt", "val.txt"):
        (tmp_path / name).write_bytes(b"x" * 200)
    (tmp_path / "link").symlink_to(tmp_path / "val.txt")
    (tmp_path / "sub").mkdir()
    vocabulary = {"vocab_size": 1 << 16} if kind == "tokens" else {}

    def load(**paths: list[Path]) -> Corpus:
        return load_corpus(DataTable.model_validate({"kind": kind, "sequence_length": 8, **vocabulary, **paths}))

    apart = load(paths=[tmp_path / "a*.txt"], held_out_paths=[tmp_path / "val.txt"])
    assert len(apart.held_out) in (100, 201)  # of two bytes; or with the end of a text
    for paths, held_out, name in [
        (["*.txt"], ["val.txt"], "val.txt"),
        (["val.txt"], ["link"], "link"),
        (["a.txt", "sub/../a.txt"], [], "sub/../a.txt"),
        (["a.txt"], ["val.txt", "v*"], "val.txt"),
    ]:
        with pytest.raises(ConfigError, match=f"name the file {tmp_path / name} twice"):
            load(paths=[tmp_path / each for each in paths], held_out_paths=[tmp_path / each for each in held_out])


def test_a_vocabulary_goes_up_to_its_highest_token_and_a_wrong_tokenizer_is_one_sentence(
    tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one three " * 400)
    tokenizer = word_tokenizer(tmp_path, three=70_000)
    config = tiny(f"data.paths=['{tmp_path / 'a.txt'}']", f"data.tokenizer={tokenizer}")
    found = load_corpus(config.data)
    assert (found.vocab_size, found.train.read(0, 2).tolist()) == (70_001, [1, 70_000])
    assert vocabulary(config)[0] == 70_001  # what `diloco export` builds
    for text in ("{}", '{"model":'):
        tokenizer.write_text(text)
        with pytest.raises(ConfigError, match=r"cannot load the tokenizer .*; give a tokenizer.json, a directory or a"):
            load_corpus(config.data)


def word_tokenizer(directory: Path, three: int = 3) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": three}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def test_token_files_are_memory_mapped(tmp_path: Path) -> None:
    np.arange(500, dtype="<u4").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", np.arange(500, 600, dtype=np.uint16))
    table = DataTable(
        kind="tokens", paths=(tmp_path / "a.bin", tmp_path / "b.npy"), dtype="uint32", vocab_size=600, sequence_length=8
    )
    data = load_corpus(table)
    assert (len(data.train), len(data.held_out)) == (570, 30)
    assert data.train.read(495, 505).tolist() == list(range(495, 505))
    assert data.held_out.read(0, 30).tolist() == list(range(570, 600))
    assert isinstance(data.train._arrays[0], np.memmap)


def test_bad_token_files_are_one_sentence(tmp_path: Path) -> None:
    np.save(tmp_path / "signed.npy", np.arange(50))
    np.save(tmp_path / "square.npy", np.zeros((5, 5), dtype=np.uint16))
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "empty.bin").write_bytes(b"")
    for name, message in [
        ("signed.npy", "a one-dimensional array of unsigned integers"),
        ("square.npy", "a one-dimensional array of unsigned integers"),
        ("odd.bin", "cannot map"),
        ("empty.bin", "cannot map"),
        ("none.bin", "cannot map"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_corpus(DataTable(kind="tokens", paths=(tmp_path / name,), vocab_size=9))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("offline")
def test_hugging_face_datasets_load_from_disk_and_by_name(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"one two {i}" for i in range(50)], "n": list(range(50))})
    rows.save_to_disk(str(tmp_path / "flat"))
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "named").mkdir()
    rows.to_json(str(tmp_path / "named" / "train.jsonl"))

    def load(**keys: object) -> Corpus:
        return load_corpus(
            DataTable.model_validate({"kind": "huggingface", "sequence_length": 8, "held_out_fraction": 0.2, **keys})
        )

    expected = b"one two 0\0one two 1\0"
    for dataset in ("flat", "splits", "named"):
        data = load(dataset=str(tmp_path / dataset))
        assert bytes(data.train.read(0, 20).astype(np.uint8)) == expected, dataset
    split = load(dataset=str(tmp_path / "splits"), held_out_split="validation")
    assert bytes(split.held_out.read(0, 20).astype(np.uint8)) == expected
    tokenized = load(dataset=str(tmp_path / "flat"), tokenizer=str(word_tokenizer(tmp_path)))
    assert tokenized.train.read(0, 3).tolist() == [1, 2, 0]
    with pytest.raises(ConfigError, match='column "body"'):
        load(dataset=str(tmp_path / "flat"), text_column="body")
    with pytest.raises(ConfigError, match='"train" is both trained on and held out'):
        load(dataset=str(tmp_path / "splits"), held_out_split="train")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.jsonl").write_text('{"text": "one"}\n{"text": [')
    for name in ("broken", "bad"):  # the library says no more than "An error occurred", and its cause says which
        with pytest.raises(ConfigError, match=r"cannot load column .*\((?!An error occurred).*\); check data.dataset"):
            load(dataset=str(tmp_path / name))
    for keys in ({"split": "other"}, {"held_out_split": "validation"}):
        with pytest.raises(ConfigError, match="^.*flat is a single split"):
            load(dataset=str(tmp_path / "flat"), **keys)
    with pytest.raises(ConfigError, match='split "other"'):
        load(dataset=str(tmp_path / "splits"), split="other")
    with pytest.raises(ConfigError, match="cannot load column"):
        load(dataset=str(tmp_path / "none"))


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match="not enough for one sequence of 64"):
        load_corpus(DataTable(kind="text", paths=(tmp_path / "a.txt",)))
    with pytest.raises(ConfigError, match="cannot read the data file"):
        load_corpus(DataTable(kind="text", paths=(tmp_path / "b.txt",)))


def test_ranks_share_a_batch_and_no_held_out_part_is_refused() -> None:
    whole, parts = (Stream(corpus(1001), 10, 2, [0, 1], 4, seed=1) for _ in range(2))
    first = whole.next()
    assert whole.num_rows == len(first) == 8
    assert torch.equal(parts.next(slice(0, 4)), first[:4])
    assert torch.equal(parts.next(slice(4, 8)), whole.next()[4:])
    with pytest.raises(ConfigError, match=r"the held-out part has 5 tokens, less than one sequence of 10 \+ 1"):
        held_out_batches(corpus(5), 10, 3, batch=2)
