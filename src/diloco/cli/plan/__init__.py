"""`diloco plan`: the costs of a run. One module per question; only `measure`, which trains, imports torch."""

import typer

from diloco.cli.plan import advise, goodput, measure, scaling, utilization, wallclock

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def plan() -> None:
    """Plan a run before training: utilisation, hours, bytes, money and failures, in seconds and without torch."""


for module in (utilization, goodput, wallclock, scaling, advise, measure):
    app.command(module.__name__.rpartition(".")[2])(module.command)
