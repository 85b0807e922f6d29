"""What the tests of all integrations share: a real syncer, scripts that run as processes, and models that are compared.

Every example in `examples/integrations` takes the same arguments (`Example.learner`), so that one suite
(`test_stacks.py`) tries each of them: two learners, checkpoints, SIGKILL.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from benchmarks.processes import until
from safetensors.torch import load_file
from tests.syncer.runs import is_initialised
from torch import Tensor

import diloco
from diloco.demo.plan import free_port
from diloco.protocol.contribution import Budget
from diloco.syncer.server import Options, Syncer

ROOT = Path(__file__).parents[2]
RUN = "tiny"
STEPS, SAVE_EVERY = 13, 6
"""Inner steps of a run, and after how many the examples save. After the last step all that was sent is adopted, so that
what a learner saves is the run's newest model."""

TIMEOUT_S = 600.0

METHOD = diloco.StreamingDiLoCo(
    sync_every=4,
    overlap=1,
    fragments=diloco.Balanced(2),
    codec="int4",
    error_feedback=1.0,
    quorum=diloco.AllLive(at_least=2),
)
"""Asks more of a checkpoint than DiLoCo does: answers on their way, mixed adoption and error feedback. Two learners
are in every merge, so that a run waits for the one that was killed."""


@contextmanager
def serve(directory: Path, method: diloco.Method = METHOD, *, steps: int | None = None) -> Iterator[Syncer]:
    """A syncer in this process, of a run that ends after so many inner steps; None: its learners know the end."""
    with Syncer(RUN, method, Options("127.0.0.1:0", directory, budget=Budget(steps=steps))) as syncer:
        yield syncer


# --- processes --------------------------------------------------------------------------------------------------------


@cache
def _zygote() -> subprocess.Popen[str]:
    """It ends with this process, which closes its standard input."""
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("zygote.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def _ask(request: Mapping[str, object]) -> int:
    zygote = _zygote()
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    zygote.stdin.write(json.dumps(request) + "\n")
    return int(zygote.stdout.readline())


@dataclass
class Process:
    """A script that runs."""

    pid: int
    log: Path
    _code: int | None = field(default=None, init=False)

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end. Returns its exit code, negative for a signal."""
        if self._code is None:
            assert self.has_ended(timeout_s), f"still runs after {timeout_s:g} s; it has said:\n{self.said}"
            self._code = _ask({"wait": self.pid})
        return self._code

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether it ends within this time."""
        if self._code is not None:
            return True
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(select.select([descriptor], [], [], within_s)[0])
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """Kill it with its children, and wait."""
        if self._code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.end()

    @property
    def said(self) -> str:
        """Its standard output and standard error so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def end_all(processes: Sequence[Process], expect: int = 0) -> None:
    """Wait for the end of all of them."""
    for process in processes:
        code = process.end()
        assert code == expect, f"{process.log.name} ended with {code}, not {expect}; it said:\n{process.said}"


@contextmanager
def running() -> Iterator[Scripts]:
    """Starts scripts, and kills those that still run in the end."""
    scripts = Scripts()
    try:
        yield scripts
    finally:
        for process in scripts.started:
            process.kill()


class Scripts:
    """Starts scripts as processes, forked from one that has imported their libraries."""

    def __init__(self) -> None:
        self.started: list[Process] = []

    def start(
        self, script: Path, *arguments: str, log: Path, imports: Sequence[str] = (), kill_after: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Process:  # fmt: skip
        """What `python script ARGUMENTS` does.

        Arguments:
            log: gets its output.
            imports: modules that the zygote imports first, once for all scripts.
            kill_after: it is killed with SIGKILL at the end of this optimizer step.
            environment: additions.
        """
        pid = _ask({
            "imports": ["torch._dynamo", *imports], "script": str(script), "arguments": arguments, "log": str(log),
            "kill_after": kill_after, "environment": dict(environment or {}),
        })  # fmt: skip
        process = Process(pid, log)
        self.started.append(process)
        return process


def worlds() -> list[dict[str, str]]:
    """What torchrun puts into the environment of two ranks."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


# --- examples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """An example in `examples/integrations`, as the suite runs it.

    Attributes:
        stack: its name in the table of docs/integrations.md.
        name: its directory.
        imports: modules that its processes are forked with.
        tokens: of all micro-batches in `STEPS` steps, of each learner.
        runner: script that runs the example's, with it as the first argument; None: the example's runs as it is.
        optimizers: optimizers that step in a step, as `kill_after` counts them.
        length: the option for the number of steps, unless the script only asks the run.
    """

    stack: str
    name: str
    imports: tuple[str, ...]
    tokens: tuple[int, int]
    runner: str | None = None
    optimizers: int = 1
    length: tuple[str, ...] = ("--steps", str(STEPS))

    @property
    def script(self) -> Path:
        return ROOT / "examples" / "integrations" / self.name / "train.py"

    def learner(
        self, scripts: Scripts, syncer: Syncer, index: int, output: Path, *arguments: str,
        kill_after: int | None = None, environment: Mapping[str, str] | None = None,
    ) -> Process:  # fmt: skip
        """Start learner `index` of two.

        It trains on its own half of the data up to the run's step `STEPS`, saves a checkpoint every `SAVE_EVERY` steps
        below `output`, and in the end the global model as `output/model.safetensors`. It continues from the newest
        checkpoint that it finds there.
        """
        output.mkdir(parents=True, exist_ok=True)
        log = output.with_name(f"{output.name}-{len(scripts.started)}.log")
        command = [self.script] if self.runner is None else [Path(__file__).with_name(self.runner), str(self.script)]
        return scripts.start(
            *command, syncer.address, "--shard", str(index), "--save-every", str(SAVE_EVERY), "--output", str(output),
            *self.length, *arguments, log=log, imports=self.imports, environment=environment,
            kill_after=None if kill_after is None else kill_after * self.optimizers,
        )  # fmt: skip

    def island(
        self, scripts: Scripts, syncer: Syncer, output: Path, *arguments: str, kill_after: int | None = None
    ) -> list[Process]:
        """Start learner 0 as a job of two ranks."""
        return [
            self.learner(scripts, syncer, 0, output, *arguments, kill_after=kill_after, environment=world)
            for world in worlds()
        ]

    @property
    def num_lines(self) -> int:
        """Lines that a user adds to a script of the stack, which the example marks."""
        return sum(line.endswith("# diloco") for line in self.script.read_text().splitlines())


def model_of(output: Path) -> dict[str, Tensor]:
    """The model that an example has saved."""
    return load_file(output / "model.safetensors")


def until_it_has_a_model(syncer: Syncer, first: Process) -> None:
    """Wait until the run has the model of its first learner, which is the same in every test."""
    until(lambda: is_initialised(syncer) or first.has_ended(), "the run has no model")
    assert is_initialised(syncer), first.said


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """The same tensors, to the bit."""
    assert a.keys() == b.keys()
    differ = [name for name in a if not torch.equal(a[name], b[name])]
    assert not differ, differ
