"""`diloco plan scaling`: expected loss, learning rates and batch size."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from diloco.cli._options import Json, Model, Parameters, PicturesPage, SyncEvery
from diloco.cli._output import make_table, print_result, say_written
from diloco.planning.pictures import scaling_pictures
from diloco.planning.scaling_laws import ScalingEstimate, estimate_scaling
from diloco.planning.units import significant
from diloco.planning.workload import parameters_of
from diloco.report.drawing import short
from diloco.report.frame import require_html, write_drawings


def command(
    model: Model = None,
    parameters: Parameters = None,
    learners: Annotated[int, typer.Option(min=1, help="Number of learners.")] = 2,
    sync_every: SyncEvery = 30,
    tokens: Annotated[float | None, typer.Option(help="Training tokens; default: 20 for every parameter.")] = None,
    out: PicturesPage = None,
    as_json: Json = False,
) -> None:
    """Published scaling laws (arXiv 2503.09799): loss, learning rates and batch of DiLoCo and data parallel.

    Extrapolation beyond the paper's measurements prints a warning.
    """
    require_html(out)
    found = estimate_scaling(parameters_of(model, parameters), learners, sync_every=sync_every, tokens=tokens)
    print_result(as_json, {**asdict(found), "source": "arXiv 2503.09799"}, lambda: _print(found), indent=1)
    for sentence in found.warnings:
        typer.echo(f"warning: {sentence}", err=True)
    if out is not None:
        size = f"{short(found.num_parameters, 3)} parameters, {found.num_learners} learners"
        write_drawings(out, "Scaling laws", f"{size}. Made by diloco plan scaling.", scaling_pictures(found))
        say_written(out)


def _print(it: ScalingEstimate) -> None:
    loss = f"{it.loss:.3f} ({it.loss_penalty_percent:+.1f} %)"
    sequences = (significant(it.batch_sequences), significant(it.data_parallel_batch_sequences))
    rows = [
        ("held-out loss, nats per token", loss, f"{it.data_parallel_loss:.3f}"),
        ("peak learning rate, AdamW", f"{it.inner_lr:.2e}", f"{it.data_parallel_lr:.2e}"),
        ("batch, sequences of 2048", *sequences),
        ("outer learning rate, Nesterov", "not known" if it.outer_lr is None else f"{it.outer_lr:g}", "–"),
    ]
    console = Console(highlight=False)
    console.print(f"{it.num_parameters:.3g} parameters, 20 tokens for each; arXiv 2503.09799")
    console.print(make_table(("", f"DiLoCo, M = {it.num_learners}", "data parallel"), rows))
    console.print(
        "The fits deviate from measured losses by up to 1.1 % from 180M parameters on, and 1.7 % below: they do not "
        "resolve small differences.",
        style="dim",
    )
