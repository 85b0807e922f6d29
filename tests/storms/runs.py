"""Storms one after the other, and what is said of one that fails: the shortest list of its faults that does, and how
to replay it."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.chaos.versions import BrokenInvariantError
from tests.storms.going_back import GoingBackStorm
from tests.storms.plans import Fault, Plan, plan_of, told
from tests.storms.standby import StandbyStorm
from tests.storms.steered import SteeredStorm
from tests.storms.world import Storm

TRIES = 60
"""Storms that are run to shorten the list of one's faults."""


@dataclass(frozen=True)
class Failure:
    """A storm in which something did not hold."""

    plan: Plan
    faults: tuple[Fault, ...]
    at_s: float
    error: Exception

    def __str__(self) -> str:
        kind = "" if isinstance(self.error, BrokenInvariantError) else f"{type(self.error).__name__}: "
        kept = ",".join(str(self.plan.faults.index(fault)) for fault in self.faults)
        options = {
            " --leased": self.plan.num_units and not self.plan.workers, " --standby": self.plan.standby,
            " --goes-back": self.plan.goes_back, " --steered": self.plan.steered, " --parts": self.plan.num_experts,
            " --groups": self.plan.workers,
        }  # fmt: skip
        chosen = "".join(option for option, is_chosen in options.items() if is_chosen and not self.plan.holds)
        chosen = " --dealt" if self.plan.dealt else " --held" if self.plan.holds else chosen
        return (
            f"{told(self.plan, self.faults)}\n  at {self.at_s:.3f} s: {kind}{self.error}\n"
            f"  replay: python -m tests.storms {self.plan.seed} --faults '{kept}'{chosen}"
        )


def storm_of(plan: Plan, faults: Sequence[Fault] | None = None) -> Storm:
    """With one syncer, or with two, or of a run that goes back or is steered."""
    if plan.standby:
        return StandbyStorm(plan, faults)
    kind = GoingBackStorm if plan.goes_back else SteeredStorm if plan.steered else Storm
    return kind(plan, faults)


def run(plan: Plan, faults: Sequence[Fault], struck: Counter[str] | None = None) -> Failure | None:
    """One storm with these faults; `struck` is told how many of each kind have happened."""
    storm = storm_of(plan, faults)
    try:
        storm.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return Failure(plan, tuple(faults), storm.now_s, error)
    finally:
        if struck is not None:
            struck.update(storm.struck)
    return None


def run_seed(seed: int, *, struck: Counter[str] | None = None, **kind: bool) -> Failure | None:
    """The storm of a seed, of a kind as in `plan_of`; a failure comes with the shortest list of faults that was
    found."""
    plan = plan_of(seed, **kind)
    failure = run(plan, plan.faults, struck)
    return None if failure is None else shortest(failure)


def shortest(failure: Failure) -> Failure:
    """Leave faults out, ever smaller parts of them, while the storm still fails (delta debugging: Zeller and
    Hildebrandt, 2002)."""
    tries, num_parts = TRIES, 2
    while len(failure.faults) > 0 and tries > 0:
        faults = failure.faults
        size = max(1, len(faults) // num_parts)
        for begin in range(0, len(faults), size):
            tries -= 1
            if (shorter := run(failure.plan, faults[:begin] + faults[begin + size :])) is not None:
                failure, num_parts = shorter, max(2, num_parts - 1)
                break
        else:
            if size == 1:
                break
            num_parts = min(len(faults), 2 * num_parts)
    return failure


def failures(seeds: Sequence[int], *, struck: Counter[str] | None = None, **kind: bool) -> Iterator[Failure | None]:
    """Of each seed, in order."""
    with quiet():
        for seed in seeds:
            yield run_seed(seed, struck=struck, **kind)


def firsts(first: int, num_seeds: int, per_test: int, num_default: int) -> list[Any]:
    """Parameters of a test that runs `per_test` storms from each on; those after the first `num_default` are slow."""
    return [
        pytest.param(seed, marks=[pytest.mark.slow] if seed >= first + num_default else [])
        for seed in range(first, first + num_seeds, per_test)
    ]


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of evictions and the like; and what a storm's time goes to otherwise: a second thread for a few
    numbers, what autograd notes of them, and collections of garbage."""
    num_threads, before, thresholds = torch.get_num_threads(), logging.root.manager.disable, gc.get_threshold()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    gc.freeze()  # what is imported stays
    gc.set_threshold(50_000, *thresholds[1:])
    try:
        with torch.inference_mode():
            yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        logging.disable(before)
        torch.set_num_threads(num_threads)
