"""A method of the family with its numbers, validated against a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, get_args

from diloco.core.codecs.formats import wire_format
from diloco.core.schedule import Schedule
from diloco.errors import ConfigError
from diloco.planning.workload import Workload
from diloco.tables import nearest

MethodName = Literal["data-parallel", "diloco", "streaming", "eager", "decoupled"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)

NAMES: dict[MethodName, tuple[str, str]] = {
    "data-parallel": ("data parallel", "DataParallel"),
    "diloco": ("DiLoCo", "DiLoCo"),
    "streaming": ("Streaming DiLoCo", "StreamingDiLoCo"),
    "eager": ("eager updates", "EagerDiLoCo"),
    "decoupled": ("Decoupled DiLoCo", "DecoupledDiLoCo"),
}
"""By method: title in tables and pictures, preset in a run file."""

LAYERS_PER_FRAGMENT = 3
SAME_SHARE = 6e-4
"""Difference of a share of the experts that counts as rounding to three digits."""
_SYNC_EVERY = {"data-parallel": 1, "diloco": 100, "streaming": 100, "eager": 100, "decoupled": 24}
_DECOUPLED_FRAGMENTS = 24
_DECOUPLED_OVERLAP = 2


@dataclass(frozen=True)
class ExpertSetting:
    """How the experts of a mixture are sent, apart from its trunk: `fragments=Experts(…)` in a Method.

    Attributes:
        groups: G, fragments of experts, besides the P of the trunk. 0 beside `held`: the smallest that has this share
            and divides the experts evenly.
        every: k; a group is sent every k·H inner steps.
        trained: groups that each learner trains; it sends no others. None: all.
        codec: of the experts, up and down; None: as the trunk's.
        held: share of the experts, whole groups, that each learner holds; it neither sends nor receives others. None:
            it holds all.
    """

    groups: int
    every: int = 1
    trained: int | None = None
    codec: str | None = None
    held: float | None = None

    @property
    def trained_share(self) -> float:
        """Share of the groups that each learner trains."""
        return 1.0 if self.trained is None else self.trained / self.groups

    @property
    def detail(self) -> str:
        """The numbers, for tables."""
        trained = "" if self.trained is None else f", {self.trained} trained"
        trained += "" if self.held is None else f", {self.held:.3g} held"
        codec = "" if self.codec is None else f", {self.codec}"
        return f"experts in {self.groups} groups{trained}, k = {self.every}{codec}"


@dataclass(frozen=True)
class Setting:
    """A method with its numbers.

    Attributes:
        method: data-parallel, diloco, streaming, eager or decoupled.
        sync_every: H, inner steps between two synchronisations of one fragment.
        overlap: τ, inner steps between a send and the application of its answer; for decoupled learners it sizes the
            grace window.
        num_fragments: P; of the trunk, where the experts are apart.
        up: codec of contributions.
        down: codec of updates, on the other direction of the link; None: a reduction is one pass, as in the papers.
        latency_s: of each pass.
        experts: how the experts of a mixture are sent; None: as the rest of the model.
    """

    method: MethodName
    sync_every: int
    overlap: int
    num_fragments: int
    up: str = "bf16"
    down: str | None = None
    latency_s: float = 0.0
    experts: ExpertSetting | None = None

    @property
    def title(self) -> str:
        """The method's name in a table."""
        return NAMES[self.method][0]

    @property
    def detail(self) -> str:
        """The numbers that apply to the method."""
        numbers = [f"H = {self.sync_every}", f"τ = {self.overlap}", f"P = {self.num_fragments}", self.up]
        shown = {"data-parallel": (3,), "diloco": (0, 3), "eager": (0, 3)}.get(self.method, (0, 1, 2, 3))
        return ", ".join([*(numbers[i] for i in shown), *([] if self.experts is None else [self.experts.detail])])

    @property
    def label(self) -> str:
        """Title and detail."""
        return f"{self.title}, {self.detail}"

    @property
    def schedule(self) -> Schedule:
        """The schedule of sends: groups of experts, then the trunk's fragments."""
        if self.experts is None:
            return Schedule(self.sync_every, self.num_fragments, self.overlap)
        multiples = (self.experts.every,) * self.experts.groups + (1,) * self.num_fragments
        return Schedule(self.sync_every, len(multiples), self.overlap, multiples=multiples)


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
    experts: ExpertSetting | None = None,
) -> Setting:
    """Return a validated setting; omitted numbers get their defaults.

    H = 1 for data parallel, 24 for decoupled, else 100. P = L / 3 for streaming and eager, 24 (or as many as there are
    layers) for decoupled, else 1. τ = H for eager, 2 for decoupled, else 0.

    Raises:
        ConfigError: numbers that are invalid for the method or the model.
    """
    if method not in METHODS:
        raise ConfigError(f"there is no method {method!r}; {nearest(method, METHODS)}")
    num_layers = workload.num_layers
    every = _SYNC_EVERY[method] if sync_every is None else sync_every
    if num_fragments is None:
        thirds = -(-num_layers // LAYERS_PER_FRAGMENT)
        decoupled = min(_DECOUPLED_FRAGMENTS, num_layers)
        num_fragments = {"streaming": thirds, "eager": thirds, "decoupled": decoupled}.get(method, 1)
    if overlap is None:
        overlap = {"eager": every, "decoupled": _DECOUPLED_OVERLAP}.get(method, 0)
    if (
        experts is not None
        and experts.held is not None
        and experts.groups >= 0
        and (experts.groups or workload.num_experts)
    ):
        experts = _with_whole_groups(experts, experts.held, workload.num_experts)
    setting = Setting(method, every, overlap, num_fragments, up, down, latency_s, experts)
    if wrong := next(chain(_problems(setting, num_layers), _expert_problems(setting, workload)), None):
        raise ConfigError(wrong)
    for codec in {up, down, experts and experts.codec} - {None}:
        wire_format(str(codec))
    return setting


def _with_whole_groups(experts: ExpertSetting, share: float, num_experts: int) -> ExpertSetting:
    """The setting with G, and with a share that is one of its groups. Raises ConfigError where there is none."""
    if not 0 < share <= 1:
        raise ConfigError(f"a share of {share:g} of the experts is out of range; give --experts-held above 0, up to 1.")
    divisors = [each for each in range(1, num_experts + 1) if num_experts % each == 0]
    for groups in [experts.groups] if experts.groups else divisors:
        if (held := round(share * groups)) and abs(held / groups - share) < SAME_SHARE:
            return replace(experts, groups=groups, held=held / groups)
    most = experts.groups or num_experts
    below = math.floor(share * most)
    near = " or ".join(f"{each / most:.3g}" for each in (below, below + 1) if each)
    what = f"{most} {'groups of experts' if experts.groups else 'experts'}"
    raise ConfigError(f"{share:g} of {what} is not a whole number; give --experts-held {near}.")


def _problems(it: Setting, num_layers: int) -> Iterator[str]:
    """Yield an error for each number that is invalid for the method or the model."""
    method, every, tau, num = it.method, it.sync_every, it.overlap, it.num_fragments
    if not 0 <= it.latency_s < math.inf:
        yield f"a latency of {it.latency_s!r} s is out of range; give 0 or more."
    if every < 1:
        yield f"H = {every} steps between synchronisations are too few; raise --sync-every to 1 or more."
    if method == "data-parallel" and every != 1:
        yield (
            f"data parallel reduces after every step, not every {every}; leave --sync-every out, or use --method "
            "diloco."
        )
    if num < 1:
        yield f"P = {num} fragments are too few; give --fragments 1 or more."
    if num > 1 and method in ("data-parallel", "diloco"):
        yield (
            f"{method} sends the whole model at once, not {num} fragments; leave --fragments out, or use --method "
            "streaming."
        )
    if num > num_layers:
        yield f"P = {num} fragments do not fit a model of {num_layers} layers; lower --fragments to at most that."
    if tau < 0:
        yield f"an overlap of {tau} steps is out of range; give --overlap 0 or more."
    if method == "data-parallel" and tau:
        yield f"data parallel cannot overlap {tau} steps; leave --overlap out."
    if method == "eager" and tau not in (every, 2 * every):
        yield (
            f"eager updates overlap a whole outer step, {every} inner steps, or two, not {tau}; leave --overlap out, "
            "or use streaming."
        )
    if method in ("diloco", "streaming") and tau > every:
        yield (
            f"an overlap of {tau} steps is longer than H = {every}; lower --overlap, raise --sync-every, or use "
            "--method eager."
        )


def _expert_problems(it: Setting, workload: Workload) -> Iterator[str]:
    """Yield an error for each number of the experts that is invalid for the method or the model."""
    experts = it.experts
    if experts is None:
        return
    if not workload.expert_parameters:
        yield f"{workload.name} has no experts to send apart; give the config.json of a mixture."
    if it.method in ("data-parallel", "eager"):
        yield f"{it.method} sends no experts apart; leave --expert-groups out, or use streaming, diloco or decoupled."
    if experts.groups < 1:
        yield f"{experts.groups} groups of experts are too few; give --expert-groups 1 or more."
    if experts.every < 1:
        yield f"experts cannot be sent every {experts.every} times H; give --expert-every 1 or more."
    if experts.trained is not None and not 1 <= experts.trained <= experts.groups:
        yield (
            f"a learner cannot train {experts.trained} of {experts.groups} groups of experts; give --trained-groups "
            f"1 to {experts.groups}."
        )
    if experts.held is not None and experts.trained is not None:
        yield "a learner trains all experts that it holds; leave --trained-groups out, or --experts-held."
    if (held := (experts.held or 1) * workload.num_experts) < workload.top_k:
        yield (
            f"a learner that holds {held:.0f} of {workload.num_experts} experts cannot route a token to "
            f"{workload.top_k}; give --experts-held {workload.top_k / workload.num_experts:.3g} or more."
        )
