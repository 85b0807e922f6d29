"""`diloco tasks`: the project's own tasks for small models, as files that lm-eval reads."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Annotated[Path, typer.Argument(help="The directory to write; made where there is none.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A text that no model was trained on; without one there is no diloco_cloze."),
    ] = None,
    num: Annotated[int, typer.Option(min=2, help="Documents of each task, at most.")] = 500,
    seed: Annotated[int, typer.Option(help="The same seed and text make the same documents.")] = 0,
    context: Annotated[int, typer.Option(min=1, help="Characters before the word that diloco_cloze asks for.")] = 200,
) -> None:
    """Write tasks that a small model can learn as files for lm-eval: brackets, arithmetic, cloze."""
    from diloco.evaluation.task_files import OWN_TASKS, write_task_files
    from diloco.tables import read_text

    names = [name for name in OWN_TASKS if text or name != "diloco_cloze"]
    joined = "\n".join(read_text(file, "text") for file in text) if text else None
    write_task_files(directory, names, text=joined, num=num, seed=seed, context=context)
    typer.echo(
        f"wrote {', '.join(names)} to {directory}; run them with diloco evaluate EXPORT --tasks {','.join(names)} "
        f"--task-files {directory}"
    )
