"""A process that imports libraries once, and then forks the processes that run scripts.

Importing transformers takes 5 s of processor time in every process. This one has no threads, sockets or random state of
the tests. It takes requests as lines of JSON on its standard input and answers each with a line on its standard output:

    {"imports": [module, …], "script": path, "arguments": […], "log": path, "kill_after": n or null,
     "environment": {…}}                    the process id of a fork that runs the script as `python script …` does
    {"wait": process id}                    its exit code, negative for a signal; waits until it has ended

With `kill_after`, the process kills itself with SIGKILL at the end of its n-th `Optimizer.step`, in whatever stack.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from typing import Any, NoReturn


def serve() -> dict[str, Any] | None:
    """Answer requests until there are no more. Returns, in a fork, what the fork is to do."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    requests = os.fdopen(os.dup(0))
    while line := requests.readline():
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), file=answers)
            continue
        for module in request["imports"]:
            importlib.import_module(module)
        if (pid := os.fork()) == 0:
            answers.close()
            requests.close()
            return dict(request)
        print(pid, file=answers)
    return None


def become(request: dict[str, Any]) -> NoReturn:
    """Run the script in this process."""
    os.setpgid(0, 0)  # with its own children it can be killed as a group
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["environment"])
    if request["kill_after"] is not None:
        kill_after(request["kill_after"])
    sys.argv = [request["script"], *request["arguments"]]
    status = 1
    try:
        runpy.run_path(request["script"], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # noqa: BLE001  (what the interpreter does at the top)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking a heap of such a size down costs more than most scripts do


def kill_after(num_steps: int) -> None:
    """Kill this process at the end of an optimizer step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == num_steps:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


if __name__ == "__main__":
    if (forked := serve()) is not None:
        become(forked)
