"""`diloco tokenize`: the texts of a run as token shards, which training maps into memory."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Json, Overrides, RunFile
from diloco.cli._output import print_result
from diloco.config import load_config
from diloco.escaping import printable
from diloco.tables import write_toml

if TYPE_CHECKING:
    from diloco.training.data.token_shards import PartName, ShardProgress

LINE_EVERY_S = 60.0
"""Interval of progress lines if standard error is not a terminal."""


def command(
    run_file: RunFile,
    out_dir: Annotated[Path, typer.Argument(help="The directory to write; created if absent.")],
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens after which a shard ends.")] = 100_000_000,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Make token shards of the texts that RUN_FILE describes; continues after an interruption."""

    data = load_config(run_file, overrides or ()).data

    from diloco.training.data.token_shards import write_token_shards

    with _progress() as tell:
        index = write_token_shards(data, out_dir, shard_tokens=shard_tokens, report=tell)
    parts: tuple[PartName, ...] = ("train", "held_out")
    tokens = {part: index.total("num_tokens", part) for part in parts}
    documents = {part: index.total("num_documents", part) for part in parts}
    num_held_out = tokens["held_out"]
    held_out = f"and {num_held_out:,} held out" if num_held_out else "of which a run holds out data.held_out_fraction"
    table = {"kind": "tokens", "directory": str(out_dir), "sequence_length": data.sequence_length}
    text = f"{out_dir} has {tokens['train']:,} training tokens, {held_out}; to read them:\n"
    value = {
        "directory": str(out_dir), "dtype": index.dtype, "vocab_size": index.vocab_size,
        "num_shards": sum(map(len, index.shards.values())), "num_tokens": tokens, "num_documents": documents,
    }  # fmt: skip
    print_result(as_json, value, f"{text}\n{write_toml({'data': table})}".rstrip())


@contextmanager
def _progress() -> Iterator[Callable[["ShardProgress"], None]]:
    """Show progress on standard error: one line of a terminal that is redrawn, or a line a minute."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False)
    began = last = time.monotonic()

    def line(made: "ShardProgress") -> str:
        rate = made.num_new_tokens / max(1e-9, time.monotonic() - began)
        parts = f"{made.num_tokens:,} tokens", f"{made.num_documents:,} documents", f"{made.num_shards} whole shards"
        return " | ".join([*parts, f"{rate:,.0f} tokens/s"])

    def say(made: "ShardProgress") -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            typer.echo(line(made), err=True)

    if not sys.stderr.isatty():
        yield say
        return
    with console.status("reading the data") as status:
        yield lambda made: status.update(printable(line(made)))
