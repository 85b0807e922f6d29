"""`diloco rl`: the roles of a run of reinforcement learning."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

import typer

from diloco.cli._options import Json, JsonSummary, Keys, Overrides, RunFile, Store, with_keys
from diloco.cli._output import print_result
from diloco.cli._signals import ending_by_signals, interrupted_by_signals
from diloco.config import RunConfig, load_config
from diloco.core.arithmetic import choose
from diloco.errors import ConfigError
from diloco.escaping import log_plainly

POLL_S, SAY_S = 0.2, 5.0
"""Of `--local`: between two looks at the processes, and between two lines."""

Name = Annotated[
    str | None,
    typer.Option(help="Name of this process in the run; default: trainer-0; of others, random."),
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def roles(
    context: typer.Context,
    local: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FILE",
            help="Start the trainers, a rollout and a reward worker on this machine, and a syncer where none answers; "
            "their output is in the folder logs of the run's directory.",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: JsonSummary = False,
) -> None:
    """Reinforcement learning: generate, reward or train in the run that RUN_FILE describes.

    Any number of processes of each role, anywhere; a killed one is started again by the same command."""
    if (local is None) == (context.invoked_subcommand is None):
        raise ConfigError("give either a role, as in diloco rl rollout RUN_FILE, or --local RUN_FILE")
    if local is None and (overrides or as_json):
        raise ConfigError("--set and --json must follow the role, as in diloco rl rollout RUN_FILE --json")
    if local is not None:
        _run_all(local, list(overrides or ()), as_json)


@app.command()
def rollout(
    run_file: RunFile, name: Name = None, keys: Keys = None, overrides: Overrides = None, as_json: JsonSummary = False
) -> None:  # fmt: skip
    """Generate groups of completions with the newest version of the run, until it ends."""
    from diloco.rl.rollout import run_rollout

    say = _sayer(as_json)
    _work(f"rollout-{token_hex(3)}", name, run_file, with_keys(overrides, keys), as_json, partial(run_rollout, say=say))


@app.command()
def reward(
    run_file: RunFile, name: Name = None, keys: Keys = None, overrides: Overrides = None, as_json: JsonSummary = False
) -> None:  # fmt: skip
    """Score groups, until the run ends."""
    from diloco.rl.reward import run_reward

    say = _sayer(as_json)
    _work(f"reward-{token_hex(3)}", name, run_file, with_keys(overrides, keys), as_json, partial(run_reward, say=say))


@app.command()
def trainer(
    run_file: RunFile, name: Name = None, keys: Keys = None, overrides: Overrides = None, as_json: JsonSummary = False
) -> None:  # fmt: skip
    """Train on scored groups as a learner of the run; the first one gives the run its model."""
    from diloco.rl.trainer import run_trainer
    from diloco.training.progress import make_progress

    progress = make_progress(sys.stderr if as_json else sys.stdout, SAY_S)
    _work("trainer-0", name, run_file, with_keys(overrides, keys), as_json, partial(run_trainer, progress=progress))


@app.command()
def evaluate(
    run_file: RunFile,
    prompts: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts of each task and part.")] = 500,
    store: Store = None, keys: Keys = None, overrides: Overrides = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Print the mean score of the run's newest model on its tasks: of one completion of each prompt, of prompts of
    training and of held-out ones. The model is the syncer's, or that of --store."""
    from diloco.cli.export import newest_of
    from diloco.rl.evaluation import TaskEvaluation

    config = _load(run_file, with_keys(overrides, keys))
    model = newest_of(config, store)
    found = TaskEvaluation(config, prompts).scores(model)
    lines = [f"{task}, {part}: {score}" for task, parts in found.items() for part, score in parts.items()]
    values = {task: {part: asdict(score) for part, score in parts.items()} for task, parts in found.items()}
    text = "\n".join([f"{config.run.name}, {model}:", *lines])
    print_result(as_json, {"version": model.number, "scores": values}, text)


def _load(run_file: Path, overrides: list[str], name: str | None = None) -> RunConfig:
    """The run file. Modules of tasks are looked for beside it too."""
    sys.path.append(str(run_file.resolve().parent))
    config = load_config(run_file, overrides, learner=name)
    choose(config.run.arithmetic)
    return config


def _work(
    default: str, name: str | None, run_file: Path, overrides: list[str], as_json: bool, run: Callable[..., Any]
) -> None:  # fmt: skip
    """Run a role in this process, under the name `default` or `name`."""
    from diloco.training.spec import StopRequest

    log_plainly()
    name = name or default
    config, stop = _load(run_file, overrides, name), StopRequest()
    with ending_by_signals(stop.set, "what is leased is given back"):
        result = run(config, name, stop=stop)
    print_result(as_json, asdict(result), f"{name}: {result.reason}")


def _sayer(as_json: bool) -> Callable[[str], None]:
    out = sys.stderr if as_json else sys.stdout
    return lambda line: print(line, file=out, flush=True)


# --- all roles on this machine ----------------------------------------------------------------------------------------


def _run_all(run_file: Path, overrides: list[str], as_json: bool) -> None:
    from diloco.demo.plan import locked
    from diloco.demo.processes import DemoProcesses
    from diloco.demo.roles import IMPORTS, Roles, line
    from diloco.rl.settings import table_of

    config, say = load_config(run_file, overrides), _sayer(as_json)
    rewards = int(table_of(config).reward == "workers")
    choice = f"stop it first, or add a worker: diloco rl rollout {run_file} --name another"
    refusal = f"another `diloco rl --local` runs {config.run.name!r} in {config.dir}; {choice}"
    with (
        interrupted_by_signals(), locked(config.dir, refusal, "choose another [run] dir"),
        DemoProcesses(config.dir, IMPORTS) as family,
    ):  # fmt: skip
        roles = Roles(config, family)
        own_syncer = (status := roles.status()) is None
        live = [name for name, each in (status or {"learners": {}})["learners"].items() if each["live"]]
        if there := sorted({f"trainer-{number}" for number in range(config.run.learners)}.intersection(live)):
            raise ConfigError(f"{', '.join(there)} of run {config.run.name!r} is live in another process; {choice}")
        roles.start(run_file, overrides, serves=own_syncer, rewards=rewards)
        last, said_at = _counts(None), time.monotonic()
        while not roles.are_done():
            family.watch()
            if time.monotonic() - said_at >= SAY_S:
                said_at = time.monotonic()
                last = (now := _counts(roles.status())) or last
                say(line(now))
            time.sleep(POLL_S)
        last = _counts(roles.status()) or last
        if own_syncer:
            family.stop("syncer")
    print_result(as_json, {"run": config.run.name, **last}, f"{config.run.name}: over; {line(last)}")


def _counts(status: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What a line about the run needs; empty: the syncer does not answer."""
    return {} if status is None else {key: status[key] for key in ("step", "groups")}
