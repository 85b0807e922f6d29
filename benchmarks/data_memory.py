"""Peak memory and speed of each way to read texts, on a text that is made for it.

    python -m benchmarks.data_memory [--megabytes 200]

Each way is a process of its own, and reads everything once: a corpus is loaded and its sequences drawn, a stream is
drawn for a pass, shards are made, and mapped. The peak is what the kernel says (`VmHWM`) beyond what the process had
after its imports; mapped files count as far as they were read, though the kernel may drop them at any time.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.memory import status_bytes
from diloco.config import DataTable
from diloco.training.data.corpus import load_corpus
from diloco.training.data.streams import Stream, TextStream
from diloco.training.data.token_shards import write_token_shards

LENGTH, BATCH = 1024, 8


def make_text(directory: Path, megabytes: int) -> None:
    """`rows.jsonl`, rows of 2,000 random words, and `tokenizer.json`, a byte-level BPE of 4,000 tokens."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5_000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sample = [" ".join(draw.choices(words, k=20_000))]
    tokenizer.train_from_iterator(sample, trainers.BpeTrainer(vocab_size=4_000, show_progress=False))
    tokenizer.save(str(directory / "tokenizer.json"))
    with (directory / "rows.jsonl").open("w") as file:
        while file.tell() < megabytes * 1_000_000:
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=2_000))}) + "\n")


def measure(way: str, directory: Path) -> dict[str, Any]:
    """Megabytes beyond the imports, seconds and tokens of one way, in this process."""
    texts: dict[str, Any] = {"kind": "text", "paths": [directory / "rows.jsonl"], "sequence_length": LENGTH}
    texts["tokenizer"] = str(directory / "tokenizer.json")
    import transformers  # noqa: F401

    before, began = status_bytes("VmHWM"), time.monotonic()
    num_tokens = 0
    if way == "tokenize":
        index = write_token_shards(DataTable(**texts), directory / "shards", shard_tokens=10_000_000)
        num_tokens = index.total("num_tokens", "train")
    elif way == "stream":
        corpus = load_corpus(DataTable(**texts, stream=True))
        assert corpus.texts is not None
        stream = TextStream(corpus.texts, LENGTH, 1, [0], BATCH, seed=0)
        of_a_pass = json.loads((directory / "shards" / "index.json").read_text())["shards"]["train"]
        while num_tokens < sum(shard["num_tokens"] for shard in of_a_pass):
            num_tokens += stream.next()[:, 1:].numel()
    else:
        mapped = DataTable(kind="tokens", directory=directory / "shards", sequence_length=LENGTH)
        corpus = load_corpus(mapped if way == "shards" else DataTable(**texts))
        drawn = Stream(corpus, LENGTH, 1, [0], BATCH, seed=0)
        while num_tokens < len(corpus.train):
            num_tokens += drawn.next()[:, 1:].numel()
    seconds = time.monotonic() - began
    return {"way": way, "peak_mb": (status_bytes("VmHWM") - before) / 1e6, "seconds": seconds, "num_tokens": num_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "DIR"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], Path(given.one[1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_text(Path(folder), given.megabytes)
        for way in ("tokenize", "shards", "text", "stream"):
            arguments = [sys.executable, "-m", "benchmarks.data_memory", "--one", way, folder]
            row = json.loads(subprocess.run(arguments, stdout=subprocess.PIPE, check=True).stdout)
            tokens, rate = row["num_tokens"], row["num_tokens"] / row["seconds"]
            print(f"{way:9} peak {row['peak_mb']:6.0f} MB, {tokens:,} tokens, {rate:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
