"""Prompts, and scores of completions, from a child process with limits of time and memory.

A task may raise, hang, fork, exit or exhaust its memory limit without effect on this process. This is no sandbox: the
child has the rights, files and network of this process, and a hostile task can use them.

    this process ── socket pair ── worker: the tasks; leads the process group of all processes that they start
         └─────── pipe ─────────── watchdog: kills that group when the pipe is closed

`Scorer.close` closes the pipe, and so does the kernel when this process ends, in whatever way. The watchdog is a
process, since a thread of the worker does not run while a task holds the interpreter lock (a regular expression does).
A message is JSON after its length, 4 bytes big-endian. The first request has the tasks; the worker answers it with {},
later ones with {"task": name, "prompt": {...}} or {"scores": [...]}, and all of them with {"error": reason}.
"""

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO, Self

from diloco.config import TaskTable
from diloco.errors import ConfigError, ScoringError, first_line
from diloco.escaping import MAX_REASON, printable
from diloco.protocol.groups import MAX_REWARD
from diloco.rl.tasks import Tasks, task_of
from diloco.tables import nearest

START_TIMEOUT_S = 300.0
"""Time limit for loading the tasks, whose libraries and reward models may be large."""


class Scorer:
    """Samples prompts and scores completions in a child process, which is started when it is needed; a context manager
    for one thread.

    Arguments:
        settings: of each task, by its name.
        timeout_s: time limit of one call.
        memory_bytes: address space that the worker may use in addition to what it has after loading the tasks.

    Raises:
        ConfigError: a limit is not above 0.
    """

    def __init__(
        self, settings: Mapping[str, TaskTable], *, timeout_s: float = 10.0, memory_bytes: int = 2 << 30
    ) -> None:  # fmt: skip
        for name, limit in (("timeout_s", timeout_s), ("memory_bytes", memory_bytes)):
            if not 0 < limit < math.inf:
                raise ConfigError(f"{name} = {limit} must be a finite number above 0; correct it")
        self._settings, self._timeout_s, self._memory_bytes = settings, timeout_s, memory_bytes
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker, and the processes of its group. The next call starts another one."""
        if self._watchdog is not None:
            self._replies.close()
            self._socket.close()
            self._watchdog.communicate()  # closes the pipe
            self._watchdog = None

    def prompt(self, number: int) -> tuple[str, dict[str, Any]]:
        """The name of a task, and its prompt, as `Tasks.prompt`.

        Raises:
            ConfigError: the tasks cannot be loaded.
            ScoringError: the task has no such prompt, ended its process or exceeded a limit.
        """
        what = f'prompt {number} of task "{task_of(number, self._settings)}"'
        answer = self._ask({"number": number}, what, self._timeout_s)
        if "error" in answer:
            raise ScoringError(answer["error"])
        return answer["task"], answer["prompt"]

    def score(self, task: str, prompt: Mapping[str, Any], completions: Sequence[str]) -> list[float]:
        """The finite score of each completion of a prompt.

        Raises:
            ConfigError: there is no such task, or the tasks cannot be loaded.
            ScoringError: the task raised, returned no finite number, ended its process or exceeded a limit.
        """
        if task not in self._settings:
            raise ConfigError(f'there is no task "{task}"; {nearest(task, list(self._settings))}')
        request = {"task": task, "prompt": dict(prompt), "completions": list(completions)}
        answer = self._ask(request, f'task "{task}"', self._timeout_s)
        if "error" in answer:
            raise ScoringError(f'task "{task}" {answer["error"]}; correct its score function')
        scores: list[float] = answer["scores"]
        return scores

    def _start(self) -> None:
        """Start the child. Raises ConfigError: that failed, for which no prompt or group is to blame."""
        first = {
            "path": sys.path, "tasks": {name: each.model_dump(mode="json") for name, each in self._settings.items()},
            "memory_bytes": self._memory_bytes,
        }  # fmt: skip
        self._socket, theirs = socket.socketpair()
        self._replies = self._socket.makefile("rb")
        try:
            with theirs:
                self._watchdog = subprocess.Popen(
                    [sys.executable, "-m", "diloco.rl.scoring", str(theirs.fileno())],
                    stdin=subprocess.PIPE, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True,
                    env={name: value for name, value in os.environ.items() if name != "DILOCO_KEYS"},  # may be a secret
                )  # fmt: skip
            answer = self._ask(first, "loading the tasks", START_TIMEOUT_S)
        except (ScoringError, OSError) as error:
            self._replies.close()
            self._socket.close()
            raise ConfigError(
                "the process of the tasks could not be started, ended by an exit or a crash, or took more than "
                f"{START_TIMEOUT_S:g} s to load them; correct the tasks, or free memory"
            ) from error
        if "error" in answer:
            self.close()
            raise ConfigError(answer["error"])

    def _ask(self, message: object, what: str, timeout_s: float) -> dict[str, Any]:
        """Send a message and receive its answer. After any error the child is ended: its answer might come late."""
        if self._watchdog is None:
            self._start()
        try:
            self._socket.settimeout(timeout_s)
            _send(self._socket, message)
            answer: dict[str, Any] = _receive(self._replies)
        except TimeoutError as error:
            self.close()
            raise ScoringError(f"{what} took more than {timeout_s:g} s; correct it or raise the limit") from error
        except (EOFError, OSError) as error:
            self.close()
            raise ScoringError(
                f"{what} ended its process by an exit, a crash or more than {self._memory_bytes} bytes of memory; "
                "correct it or raise the limit"
            ) from error
        except BaseException:
            self.close()
            raise
        return answer


def _send(connection: socket.socket, message: object) -> None:
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(4, "big") + data)


def _receive(stream: BinaryIO) -> Any:
    """Raises EOFError if the other end is closed."""
    header = stream.read(4)
    data = stream.read(int.from_bytes(header, "big"))
    if len(header) < 4 or len(data) < int.from_bytes(header, "big"):
        raise EOFError
    return json.loads(data)


# --- the child


def main(fd: int) -> None:
    """Fork the worker, and stay as its watchdog. `fd`: this end of the socket pair."""
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)
        _work(fd)
        return
    os.setpgid(worker, worker)  # whichever of the two comes first
    os.close(fd)
    sys.stdin.buffer.read()
    os.killpg(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


def _work(fd: int) -> None:
    """Load the tasks of the first request, then answer the others, until the peer closes the socket."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=lambda: os.dup2(null, fd))  # a forked copy neither reads nor answers
    connection = socket.socket(fileno=fd)
    requests = connection.makefile("rb")
    first = _receive(requests)
    sys.path[:] = first["path"]
    try:
        tasks = Tasks({name: TaskTable(**each) for name, each in first["tasks"].items()})
        for task in tasks.tasks.values():
            task.load()
    except ConfigError as error:
        return _send(connection, {"error": str(error)})
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + first["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _send(connection, {})
    with suppress(EOFError, OSError):  # closed; for a forked copy, no socket
        while True:
            request = _receive(requests)
            answer = _prompt(tasks, **request) if "number" in request else _scores(tasks, **request)
            _send(connection, answer)


def _prompt(tasks: Tasks, number: int) -> dict[str, Any]:
    try:
        task, prompt = tasks.prompt(number)
        return {"task": task, "prompt": prompt}
    except ConfigError as error:
        if isinstance(error.__cause__, MemoryError):
            raise  # as for a score
        return {"error": printable(str(error), MAX_REASON)}


def _scores(tasks: Tasks, task: str, prompt: Mapping[str, Any], completions: Sequence[str]) -> dict[str, Any]:
    scores = []
    for number, completion in enumerate(completions, 1):
        try:
            score: Any = tasks.tasks[task].score(prompt, completion)
            if not isinstance(score, Real) or not abs(float(score)) <= MAX_REWARD:
                wrong = f"is not a finite number up to {MAX_REWARD:g}"
                return {"error": f"returned {printable(repr(score), MAX_REASON)}, which {wrong}"}
            scores.append(float(score))
        except MemoryError:
            raise  # what the task keeps would leave too little for the next
        except Exception as error:  # noqa: BLE001 - a task raises anything
            reason = printable(first_line(error), MAX_REASON)
            return {"error": f"raised {type(error).__name__} ({reason}) for completion {number}"}
    return {"scores": scores}


if __name__ == "__main__":
    main(int(sys.argv[1]))
