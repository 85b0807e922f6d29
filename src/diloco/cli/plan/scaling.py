"""`diloco plan scaling`: which loss to expect, and which learning rates and batch to begin with."""

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.plan._model import parameters_of

if TYPE_CHECKING:
    from diloco.planning.scaling_laws import Expected


def command(
    model: Annotated[
        str | None,
        typer.Option(help="1b, 10b, 100b, llama-405b, deepseek-v3, a .toml file or a transformers config.json."),
    ] = None,
    parameters: Annotated[float | None, typer.Option(help="Instead of --model.")] = None,
    learners: Annotated[int, typer.Option(min=1, help="M.")] = 2,
    sync_every: Annotated[int, typer.Option(min=1, metavar="H", help="Inner steps between two synchronisations.")] = 30,
    tokens: Annotated[
        float | None, typer.Option(help="To train on. Default: 20 for every parameter, as in the paper.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write pictures there: PNG, and one HTML page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Published scaling laws (arXiv 2503.09799): loss, learning rates and batch of DiLoCo beside data parallel.

    What lies outside of what was measured is warned about.
    """
    from dataclasses import asdict

    from diloco.planning.pictures import require
    from diloco.planning.scaling_laws import expect

    if out is not None:
        require()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = expect(parameters_of(model, parameters), learners, sync_every=sync_every, tokens=tokens)
    outside = [str(each.message) for each in caught]
    if as_json:
        typer.echo(json.dumps({**asdict(found), "warnings": outside, "source": "arXiv 2503.09799"}, indent=1))
    else:
        _print(found)
    for sentence in outside:
        typer.echo(f"warning: {sentence}", err=True)
    if out is not None:
        _draw(found, out)


def _print(it: "Expected") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from diloco.planning.units import significant

    table = Table("", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for head in (f"DiLoCo, M = {it.num_learners}", "data parallel"):
        table.add_column(head, justify="right")
    table.add_row(
        "held-out loss, nats per token",
        f"{it.loss:.3f} ({it.loss_penalty_percent:+.1f} %)",
        f"{it.data_parallel_loss:.3f}",
    )
    table.add_row("peak learning rate, AdamW", f"{it.inner_lr:.2e}", f"{it.data_parallel_lr:.2e}")
    table.add_row(
        "batch, sequences of 2048", significant(it.batch_sequences), significant(it.data_parallel_batch_sequences)
    )
    table.add_row("outer learning rate, Nesterov", "not known" if it.outer_lr is None else f"{it.outer_lr:g}", "–")
    console = Console(highlight=False)
    console.print(f"{it.num_parameters:.3g} parameters, 20 tokens for each; arXiv 2503.09799")
    console.print(table)
    console.print(
        "The fits are off by up to 1.1 % of the losses that were measured from 180M parameters on, 1.7 % below: small differences "
        "are not theirs to tell.",
        style="dim",
    )


def _draw(found: "Expected", out: Path) -> None:
    from diloco.planning.pictures import write
    from diloco.planning.scaling_pictures import pictures

    lead = f"{found.num_parameters:.3g} parameters, {found.num_learners} learners. Made by diloco plan scaling."
    for file in write(out, "scaling", "Scaling laws", lead, pictures(found)):
        typer.echo(f"wrote {file}", err=True)
