"""What is planned: a method of the family with its numbers, checked against a model."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Literal, get_args

from diloco.core.schedule import Schedule
from diloco.errors import ConfigError
from diloco.planning.wire import wire_format
from diloco.planning.workload import Workload

MethodName = Literal["data-parallel", "diloco", "streaming", "eager", "decoupled"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)

LAYERS_PER_FRAGMENT = 3
_SYNC_EVERY = {"data-parallel": 1, "diloco": 100, "streaming": 100, "eager": 100, "decoupled": 24}
_DECOUPLED_FRAGMENTS = 24
_DECOUPLED_OVERLAP = 2


@dataclass(frozen=True)
class Setting:
    """A method with its numbers.

    Attributes:
        method: data-parallel, diloco, streaming, eager or decoupled.
        sync_every: H, inner steps between two synchronisations of one fragment.
        overlap: τ, inner steps between a send and the application of its answer; of decoupled it sizes the grace
            window.
        num_fragments: P.
        up: the codec of what a learner sends.
        down: the codec of the answer, on the other direction of the link; None: a reduction is one pass, as in the
            papers.
        latency_s: of each pass.
    """

    method: MethodName
    sync_every: int
    overlap: int
    num_fragments: int
    up: str = "bf16"
    down: str | None = None
    latency_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.method}, H = {self.sync_every}, τ = {self.overlap}, P = {self.num_fragments}, {self.up}"

    @property
    def schedule(self) -> Schedule:
        """Which fragment is sent after which inner step."""
        return Schedule(self.sync_every, self.num_fragments, self.overlap)


def setting_for(
    workload: Workload,
    method: str,
    *,
    sync_every: int | None = None,
    overlap: int | None = None,
    num_fragments: int | None = None,
    up: str = "bf16",
    down: str | None = None,
    latency_s: float = 0.0,
) -> Setting:
    """A setting with what is not given filled in.

    H = 1 for data parallel, 24 for decoupled, else 100. P = L / 3 for streaming and eager, 24 (or as many as there are
    layers) for decoupled, else 1. τ = H for eager, 2 for decoupled, else 0.

    Raises:
        ConfigError: numbers that the method cannot have, or that do not fit the model.
    """
    if method not in METHODS:
        close = difflib.get_close_matches(method, METHODS, n=1, cutoff=0.4)
        raise ConfigError(
            f"there is no method {method!r}; "
            f"{f'did you mean {close[0]!r}?' if close else 'choose ' + ', '.join(METHODS) + '.'}"
        )
    name = method
    every = _SYNC_EVERY[name] if sync_every is None else sync_every
    _check_every(name, every)
    fragments = _default_fragments(name, workload.num_layers) if num_fragments is None else num_fragments
    _check_fragments(name, fragments, workload)
    tau = {"eager": every, "decoupled": _DECOUPLED_OVERLAP}.get(name, 0) if overlap is None else overlap
    _check_overlap(name, tau, every)
    for codec in (up, down):
        if codec is not None:
            wire_format(codec)
    if not 0 <= latency_s < math.inf:
        raise ConfigError(f"a latency of {latency_s!r} s cannot be; give 0 or more.")
    return Setting(name, every, tau, fragments, up, down, latency_s)


def _default_fragments(method: MethodName, num_layers: int) -> int:
    if method in ("streaming", "eager"):
        return -(-num_layers // LAYERS_PER_FRAGMENT)
    return min(_DECOUPLED_FRAGMENTS, num_layers) if method == "decoupled" else 1


def _check_every(method: MethodName, every: int) -> None:
    if every < 1:
        raise ConfigError(f"H = {every} steps between synchronisations cannot be; raise --sync-every to 1 or more.")
    if method == "data-parallel" and every != 1:
        raise ConfigError(
            f"data parallel reduces after every step, not every {every}; leave --sync-every out, or use --method "
            "diloco."
        )


def _check_fragments(method: MethodName, fragments: int, workload: Workload) -> None:
    if fragments < 1:
        raise ConfigError(f"P = {fragments} fragments cannot be; give --fragments 1 or more.")
    if fragments > 1 and method in ("data-parallel", "diloco"):
        raise ConfigError(
            f"{method} sends the whole model at once, not {fragments} fragments; leave --fragments out, or use "
            "--method streaming."
        )
    if fragments > workload.num_layers:
        raise ConfigError(
            f"P = {fragments} fragments do not fit a model of {workload.num_layers} layers; lower --fragments to at "
            "most that."
        )


def _check_overlap(method: MethodName, tau: int, every: int) -> None:
    if tau < 0:
        raise ConfigError(f"an overlap of {tau} steps cannot be; give --overlap 0 or more.")
    if method == "data-parallel" and tau:
        raise ConfigError(f"data parallel cannot overlap {tau} steps; leave --overlap out.")
    if method == "eager" and tau not in (every, 2 * every):
        raise ConfigError(
            f"eager updates overlap a whole outer step, {every} inner steps, or two, not {tau}; leave --overlap out, "
            "or use streaming."
        )
    if method in ("diloco", "streaming") and tau > every:
        raise ConfigError(
            f"an overlap of {tau} steps is longer than H = {every}; lower --overlap, raise --sync-every, or use "
            "--method eager."
        )
