"""`diloco tokenize`: a run's texts as token shards, which training maps into memory."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._shared import Json, Overrides, RunFile
from diloco.escaping import printable

if TYPE_CHECKING:
    from diloco.training.data.token_shards import ShardProgress

LINE_EVERY_S = 60.0
"""Between two lines where standard error is no terminal."""


def command(
    run_file: RunFile,
    out_dir: Annotated[Path, typer.Argument(help="The directory to write; made where there is none.")],
    shard_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens after which the next shard begins, at the end of a batch of documents.")
    ] = 100_000_000,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Make token shards of the texts that RUN_FILE describes; goes on where it was ended."""
    from diloco.config import load_config

    data = load_config(run_file, overrides or ()).data

    from diloco.training.data.token_shards import write_token_shards

    with _telling() as tell:
        index = write_token_shards(data, out_dir, shard_tokens=shard_tokens, report=tell)
    tokens = {part: index.total("num_tokens", part) for part in ("train", "held_out")}
    if as_json:
        documents = {part: index.total("num_documents", part) for part in ("train", "held_out")}
        num_shards = sum(map(len, index.shards.values()))
        typer.echo(json.dumps({
            "directory": str(out_dir), "dtype": index.dtype, "vocab_size": index.vocab_size, "num_shards": num_shards,
            "num_tokens": tokens, "num_documents": documents,
        }))  # fmt: skip
        return
    held_out = (
        f"and {tokens['held_out']:,} held out"
        if tokens["held_out"]
        else "of which a run holds out data.held_out_fraction"
    )
    typer.echo(f"{out_dir} holds {tokens['train']:,} tokens to train on, {held_out}; to read them:")
    typer.echo(
        f'\n[data]\nkind = "tokens"\ndirectory = {json.dumps(str(out_dir))}\nsequence_length = {data.sequence_length}'
    )


@contextmanager
def _telling() -> Iterator[Callable[["ShardProgress"], None]]:
    """Show how far it is on standard error: in one line of a terminal that is drawn anew, or in a line a minute."""
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
    with console.status("reads the data") as status:
        yield lambda made: status.update(printable(line(made)))
