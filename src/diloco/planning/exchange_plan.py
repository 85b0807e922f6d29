"""The exchange of a method with a syncer: schedule, bytes of each fragment, and the syncer's time for a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        up_bytes, down_bytes: encoded size of each fragment.
        merging: the syncer's time for a round.
        called: quorum of rounds that the syncer calls; None: rounds follow the schedule, and learners wait.
    """

    schedule: Schedule
    up_bytes: Sequence[float]
    down_bytes: Sequence[float]
    merging: Merging = Merging()
    called: Called | None = None

    def per_interval(self, of_fragments: Sequence[float]) -> float:
        """Sum over fragments of a number, such as bytes, in H inner steps: one sent every k·H steps counts 1/k."""
        return math.fsum(each / k for each, k in zip(of_fragments, self.schedule.multiples, strict=True))


def exchange_of(
    workload: Workload, setting: Setting, merging: Merging | None = None, called: Called | None = None
) -> ExchangePlan:
    """Return the exchange of a setting: strided fragments of equal layers; by default the codec down is the one up.

    Experts that are apart are equal groups before the fragments of the trunk. A learner sends a group that it trains
    and receives all: the bytes up of a group are its mean over learners that train equally many groups.
    """
    if setting.method == "data-parallel":
        raise ConfigError("data parallel has no syncer; leave out the syncer's options, or use another method.")
    up, down, experts = wire_format(setting.up), wire_format(setting.down or setting.up), setting.experts
    layer_values = (workload.num_parameters - (workload.expert_parameters if experts else 0)) / workload.num_layers
    sizes = [round(len(layers) * layer_values) for layers in strided(workload.num_layers, setting.num_fragments)]
    groups_up, groups_down = list[float](), list[float]()
    if experts is not None:
        group = round(workload.expert_parameters / experts.groups)
        own = experts.codec and wire_format(experts.codec)
        groups_up = [experts.trained_share * (own or up).encoded_bytes(group)] * experts.groups
        groups_down = [float((own or down).encoded_bytes(group))] * experts.groups
    if setting.method == "decoupled":
        called = called or Called()
    return ExchangePlan(
        setting.schedule,
        [*groups_up, *(up.encoded_bytes(n) for n in sizes)],
        [*groups_down, *(down.encoded_bytes(n) for n in sizes)],
        merging or Merging(),
        called,
    )
