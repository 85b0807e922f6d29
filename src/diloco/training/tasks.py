"""The run's tasks on the global model, beside training: one process at a time, of low priority.

The training thread pays for the copy of the model that `offer` is given. A thread writes it down and starts the process
(`python -m diloco.training.tasks_process`), which reads it, runs the tasks by lm-eval and answers in JSON.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.config import RunConfig
from diloco.core.session.requests import Scores, TaskScore
from diloco.errors import ConfigError, StoreError
from diloco.training.part import Part

TOLD_BYTES = 2000
"""Of what a process that failed has written to standard error, from the end."""


@dataclass(frozen=True)
class Asked:
    """A global model and the moment it was taken.

    Attributes:
        step, tokens, versions: of the run then.
        skipped: times, before, that tasks were due while others were still running.
    """

    step: int
    tokens: int
    versions: tuple[int, ...]
    skipped: int


@dataclass(frozen=True)
class Answer:
    """What came of it: scores, or why there are none.

    Attributes:
        seconds: from the offer on.
    """

    asked: Asked
    scores: Scores | None
    error: str
    seconds: float


def runs_tasks(config: RunConfig, part: Part) -> bool:
    """Whether this part of the run runs the run's tasks: of learners one, of controls each."""
    table = config.evaluate
    if not table.tasks:
        return False
    if part.role != "learner":
        return True
    return part.name == table.tasks_learner if table.tasks_learner is not None else part.shard == 0


class Tasks:
    """Runs the tasks of `[evaluate]`. One thread calls the methods; `stop` may be called by any, and a signal handler.

    Arguments:
        config_file: the resolved run file that the trainer has written.
        directory: of its own, for the model under way.
        seconds: a monotonic clock.

    """

    def __init__(self, config_file: Path, directory: Path, seconds: Callable[[], float]) -> None:
        self._config_file, self._directory, self._seconds = config_file.absolute(), directory.absolute(), seconds
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False
        self._skipped = 0
        self._last: tuple[int, tuple[int, ...]] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a model is under way; no other one is taken meanwhile."""
        return self._thread is not None and self._thread.is_alive()

    def skip(self) -> None:
        """Tasks are due, and others are still running: count it."""
        self._skipped += 1

    def offer(self, state: Mapping[str, Tensor], step: int, tokens: int, versions: tuple[int, ...]) -> None:
        """Run the tasks on this model, whose tensors belong to this object from now on. Not while `is_busy`."""
        if self._is_ending:
            return
        asked, self._skipped = Asked(step, tokens, versions, self._skipped), 0
        self._last = (step, versions)
        arguments = (state, asked, self._seconds())
        self._thread = threading.Thread(target=self._run, args=arguments, name="tasks", daemon=True)
        self._thread.start()

    def has_had(self, step: int, versions: tuple[int, ...]) -> bool:
        """Whether the model of this moment is the newest that was offered."""
        return self._last == (step, versions)

    def answers(self, *, wait_for_all: bool = False) -> list[Answer]:
        """What has come since the last call; `wait_for_all`: also of the model under way, unless `stop` is called."""
        if wait_for_all and self._thread is not None:
            self._thread.join()
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._answers.get_nowait())
        return found

    def stop(self) -> None:
        """End the process, if there is one, and take no more models."""
        self._is_ending = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process and the thread, and remove the model."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- the thread

    def _run(self, state: Mapping[str, Tensor], asked: Asked, started_s: float) -> None:
        scores, error = None, ""
        try:
            scores = self._scores(state, asked)
        except (ConfigError, StoreError) as refusal:
            error = str(refusal)
        except OSError as refusal:
            error = f"cannot run the tasks ({refusal.strerror}); free disk space or memory"
        if not self._is_ending:
            self._answers.put(Answer(asked, scores, error, self._seconds() - started_s))

    def _scores(self, state: Mapping[str, Tensor], asked: Asked) -> Scores:
        self._directory.mkdir(parents=True, exist_ok=True)
        weights = self._directory / "model.safetensors"
        write_tensors(weights, state)
        del state  # the process has its own
        job = json.dumps({"config": str(self._config_file), "weights": str(weights)}).encode() + b"\n"
        command = [sys.executable, "-m", "diloco.training.tasks_process"]
        pipe = subprocess.PIPE
        with (
            (self._directory / "log").open("wb") as log,  # in a session of its own: a Ctrl-C is for the trainer
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True) as process,
        ):
            self._process = process
            assert process.stdin is not None
            assert process.stdout is not None
            if self._is_ending:
                process.kill()
            with suppress(BrokenPipeError):
                process.stdin.write(job)
                process.stdin.flush()  # and left open: the process ends where it closes
            answer = process.stdout.read()
            process.stdin.close()
        self._process = None
        return self._read(answer, asked, process.returncode)

    def _read(self, answer: bytes, asked: Asked, code: int) -> Scores:
        if code != 0 or not answer:
            log = (self._directory / "log").read_text(encoding="utf-8", errors="replace")
            lines = log[-TOLD_BYTES:].strip().splitlines()
            raise ConfigError(f"the tasks' process ended with exit code {code} ({lines[-1] if lines else 'no word'})")
        found = json.loads(answer)
        if "error" in found:
            raise ConfigError(found["error"])
        return Scores(tuple(TaskScore(**each) for each in found["scores"]), asked.tokens)


def write_tensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write host tensors as safetensors. Each is handed to the system in one call, during which other threads run on;
    the library's own writer copies every tensor first, and holds them up meanwhile.

    Raises:
        OSError: the disk refuses.
        ConfigError: a tensor has an unusual dtype.
    """
    names = {
        torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
        torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    }  # fmt: skip
    header: dict[str, Any] = {}
    tensors, start = [], 0
    for name, tensor in state.items():
        tensor = tensor.detach().contiguous()
        if tensor.dtype not in names:
            raise ConfigError(f"{name} has the dtype {tensor.dtype}, which tasks cannot be given; use another one")
        stop = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        tensors.append(tensor)
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data = memoryview(tensor.view(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")
            while data:
                data = data[file.write(data) :]
