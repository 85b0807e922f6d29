"""The exchange of a method with a syncer: schedule, bytes of each fragment, and the syncer's time for a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diloco.core.codecs.formats import wire_format
from diloco.core.quorum import Called
from diloco.core.schedule import Schedule
from diloco.errors import ConfigError
from diloco.planning.graph import strided
from diloco.planning.settings import Setting
from diloco.planning.workload import Workload


@dataclass(frozen=True)
class Merging:
    """The syncer's time for a round; rounds are merged one after the other.

    Attributes:
        fixed_s: independent of the size: closing, storing, notifying.
        bytes_per_s: throughput in encoded contributions, of all learners together; infinite: no time.
    """

    fixed_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, num_bytes: float) -> float:
        """Time of a round with `num_bytes` of contributions."""
        return self.fixed_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class ExchangePlan:
    """The exchange of a method: schedule, sizes and the syncer's time.

    Attributes:
        schedule: which fragment is sent after which inner step, and τ.
        up_bytes, down_bytes: encoded size of each fragment, in the mean over learners: of a fragment that a quarter of
            them hold, a quarter of its bytes.
        merging: the syncer's time for a round.
        called: quorum of rounds that the syncer calls; None: rounds follow the schedule, and learners wait.
        held: sets of fragments that learners hold, dealt to them in turn; empty: all hold all.
    """

    schedule: Schedule
    up_bytes: Sequence[float]
    down_bytes: Sequence[float]
    merging: Merging = Merging()
    called: Called | None = None
    held: Sequence[frozenset[int]] = ()

    def share(self, fragment: int) -> float:
        """Share of the learners that hold a fragment."""
        return sum(fragment in each for each in self.held) / len(self.held) if self.held else 1.0

    def per_interval(self, of_fragments: Sequence[float]) -> float:
        """Sum over fragments of a number, such as bytes, in H inner steps: one sent every k·H steps counts 1/k."""
        return math.fsum(each / k for each, k in zip(of_fragments, self.schedule.multiples, strict=True))


class PlannedFragment(NamedTuple):
    """A fragment of the run: its elements, its encoded sizes, and whether updates are lossless."""

    numel: int
    up_bytes: int
    down_bytes: int
    is_lossless: bool


def fragments_of(workload: Workload, setting: Setting) -> list[PlannedFragment]:
    """All fragments of a run: equal groups of experts, if they are apart, then strided ones of equal layers."""
    up, down, experts, num_layers = setting.up, setting.down or setting.up, setting.experts, workload.num_layers
    sizes = list[tuple[int, str, str]]()
    if experts is not None:
        group = round(workload.expert_parameters / experts.groups)
        sizes = [(group, experts.codec or up, experts.codec or down)] * experts.groups
    layer_values = (workload.num_parameters - (workload.expert_parameters if experts else 0)) / num_layers
    sizes += [(round(len(layers) * layer_values), up, down) for layers in strided(num_layers, setting.num_fragments)]
    return [
        PlannedFragment(n, wire_format(up).encoded_bytes(n), wire_format(down).encoded_bytes(n), down == "fp32")
        for n, up, down in sizes
    ]


def exchange_of(
    workload: Workload, setting: Setting, merging: Merging | None = None, called: Called | None = None
) -> ExchangePlan:
    """Return the exchange of a setting, by default with the codec up as the one down.

    A learner sends a group of experts that it trains and receives all: the bytes up of a group are its mean over
    learners that train equally many groups. Where learners hold h of G groups, the i-th has those from i·h on.
    """
    if setting.method == "data-parallel":
        raise ConfigError("data parallel has no syncer; leave out the syncer's options, or use another method.")
    fragments, experts = fragments_of(workload, setting), setting.experts
    groups, trained = (0, 1.0) if experts is None else (experts.groups, experts.trained_share)
    held = list[frozenset[int]]()
    if experts is not None and experts.held is not None:
        num, trunk = round(experts.held * groups), range(groups, len(fragments))
        for first in range(0, math.lcm(num, groups), num):
            held.append(frozenset((*(each % groups for each in range(first, first + num)), *trunk)))
    if setting.method == "decoupled":
        called = called or Called()
    plan = ExchangePlan(setting.schedule, (), (), merging or Merging(), called, held)
    return replace(
        plan,
        up_bytes=[(trained if p < groups else 1.0) * plan.share(p) * it.up_bytes for p, it in enumerate(fragments)],
        down_bytes=[plan.share(p) * it.down_bytes for p, it in enumerate(fragments)],
    )
