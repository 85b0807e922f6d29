"""What holds for every test: one torch thread, seeded random numbers, no process group, repeatable properties, the
longest first; and in the end the number of tests that only `make test-all` runs."""

import gc
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import settings

from diloco.core import arithmetic

torch.set_num_threads(1)
os.environ.pop("DILOCO_KEYS", None)  # the keys of whoever runs the tests are for another run

# The suite always tries the same examples; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "compute by compiled loops or by torch in every test (`diloco.core.arithmetic.choose`)"
    parser.addoption("--arithmetic", choices=get_args(arithmetic.Arithmetic), default="auto", help=help_)


@pytest.fixture(autouse=True)
def _arithmetic(request: pytest.FixtureRequest) -> None:
    arithmetic.choose(request.config.getoption("--arithmetic"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes the stack for accelerators that are not there
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _without_process_group() -> Iterator[None]:
    """Libraries that a test runs in this process may leave theirs behind, which the next test would find."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _same_process() -> Iterator[None]:
    """Lightning's strategies set the variables of a job of several ranks, which the next test's processes would get,
    and this process's number of threads, on which the bits of a product depend."""
    environment, num_threads = dict(os.environ), torch.get_num_threads()
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(num_threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests may take longest come first, so that of the processes none is left with one of them in the
    end."""
    longest_s: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        if (marker := item.get_closest_marker("timeout")) is not None:
            longest_s[item.path] = max(longest_s[item.path], marker.args[0])
    items.sort(key=lambda item: -longest_s[item.path])


def pytest_collectstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What is imported stays: a sixth of the processor time went to looking for garbage in it."""
    gc.collect()
    gc.freeze()
    gc.enable()


NUM_SLOW = pytest.StashKey[int]()
"""Deselected for their marker `slow`; of a controller of pytest-xdist, those that one of its workers deselected."""


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.config.stash[NUM_SLOW] = item.config.stash.get(NUM_SLOW, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["num_slow"] = session.config.stash.get(NUM_SLOW, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of pytest-xdist collects all tests."""
    node.config.stash[NUM_SLOW] = getattr(node, "workeroutput", {}).get("num_slow", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if num_slow := config.stash.get(NUM_SLOW, 0):
        terminalreporter.write_line(f"{num_slow} slow tests were left out; `make test-all` runs them too")
