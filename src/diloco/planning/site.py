"""The site file: where the accelerators are, what joins them, what it costs and how it fails.

One TOML file, read without torch; its tables are in `site_tables.py`. What a learner is, its links and its outages
follow from it; the same file is read by the adviser, by simulations and written by `diloco plan measure`.
"""

import math
import random
from collections import Counter
from pathlib import Path as FilePath
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from diloco.errors import ConfigError
from diloco.planning.network import Network, Path
from diloco.planning.site_tables import (
    BudgetTable,
    FaultsTable,
    FaultTable,
    LinkTable,
    SiteModelTable,
    SiteSyncerTable,
    SiteTable,
)
from diloco.planning.stations import Merging
from diloco.planning.units import TIME
from diloco.planning.workload import Workload
from diloco.tables import Table, nearest, read_text, read_toml, validate


class SiteLearner(NamedTuple):
    """One learner, and its way to the syncer.

    Attributes:
        name, site: its own, and its site's.
        accelerators: how many it trains on.
        step_s: mean duration of an inner step, seconds.
        jitter: standard deviation of the step time, as a fraction of `step_s`.
        up_bit_per_s, down_bit_per_s: of its own link.
        latency_s: one way.
        shares: names of the links it shares with others.
    """

    name: str
    site: str
    accelerators: int
    step_s: float
    jitter: float
    up_bit_per_s: float
    down_bit_per_s: float
    latency_s: float
    shares: tuple[str, ...]

    def step_seconds(self, step: int, seed: int = 0) -> float:
        """Seconds of its inner step of this number: log-normal, a function of seed, name and number alone."""
        if self.jitter == 0:
            return self.step_s
        variance = math.log1p(self.jitter**2)
        normal = random.Random(f"{seed}/{self.name}/{step}").gauss(0.0, 1.0)
        return self.step_s * math.exp(math.sqrt(variance) * normal - variance / 2)


class Outage(NamedTuple):
    """A learner, by its index, is gone from `at_s` until `back_s` (infinite: for good)."""

    learner: int
    at_s: float
    back_s: float


class Site(Table):
    """A whole site file."""

    model: SiteModelTable | None = None
    budget: BudgetTable | None = None
    site: tuple[SiteTable, ...] = Field(min_length=1)
    link: tuple[LinkTable, ...] = ()
    syncer: SiteSyncerTable = Field(default_factory=SiteSyncerTable)
    faults: FaultsTable | None = None
    fault: tuple[FaultTable, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = self.names
        for kind, known in (("learner", names), ("link", [each.name for each in self.link])):
            if twice := sorted(name for name, times in Counter(known).items() if times > 1):
                raise ValueError(f"there are two {kind}s {twice[0]}; rename one")
        links = [each.name for each in self.link]
        for place in self.site:
            for name in set(place.shares) - set(links):
                advice = nearest(name, links) if links else "add it"
                raise ValueError(f'site {place.name} shares the link "{name}", and there is no such [[link]]; {advice}')
            if place.speed is not None and (self.model is None or self.budget is None):
                raise ValueError(
                    f"site {place.name} gives speed and utilization; its step time follows only with [model] and "
                    "[budget]"
                )
        if self.faults is not None and self.fault:
            raise ValueError("[faults] and [[fault]] contradict each other; keep one of them")
        self._check_trace()
        return self

    def _check_trace(self) -> None:
        known = list(dict.fromkeys([*self.names, *(place.name for place in self.site)]))
        gone_until: dict[int, float] = {}
        for fault in sorted(self.fault, key=lambda each: each.at):
            if fault.learner not in known:
                raise ValueError(f'a [[fault]] names the learner "{fault.learner}"; {nearest(fault.learner, known)}')
            for index in self._named(fault.learner):
                if fault.at < gone_until.get(index, 0.0):
                    at = TIME.show(fault.at)
                    raise ValueError(f"{self.names[index]} fails at {at} while it is gone; drop that [[fault]]")
                gone_until[index] = math.inf if fault.back is None else fault.back

    # --- what follows from it -----------------------------------------------------------------------------------------

    @property
    def places(self) -> list[SiteTable]:
        """The site of each learner, in the learners' order."""
        return [place for place in self.site for _ in range(place.learners)]

    @property
    def names(self) -> list[str]:
        """Names of the learners in order: the site's, numbered where it has several."""
        numbered = ((place, i) for place in self.site for i in range(place.learners))
        return [place.name if place.learners == 1 else f"{place.name}-{i}" for place, i in numbered]

    def learners(self) -> list[SiteLearner]:
        """Every learner, in the order of the file."""
        return [
            SiteLearner(
                name=name,
                site=place.name,
                accelerators=place.accelerators,
                step_s=self._step_s(place),
                jitter=place.jitter_percent / 100,
                up_bit_per_s=place.up,
                down_bit_per_s=place.down,
                latency_s=place.latency,
                shares=place.shares,
            )
            for name, place in zip(self.names, self.places, strict=True)
        ]

    def network(self) -> Network:
        """The links and each learner's path over them, for transfers in virtual time."""
        bit_per_s = {
            "syncer up": math.inf if self.syncer.up is None else self.syncer.up * self.syncer.shards,
            "syncer down": math.inf if self.syncer.down is None else self.syncer.down * self.syncer.shards,
        }
        for link in self.link:
            bit_per_s |= {f"link {link.name} up": link.up, f"link {link.name} down": link.down}
        paths = []
        for learner in self.learners():
            own_up, own_down = f"learner {learner.name} up", f"learner {learner.name} down"
            bit_per_s |= {own_up: learner.up_bit_per_s, own_down: learner.down_bit_per_s}
            up, down = ([f"link {name} {way}" for name in learner.shares] for way in ("up", "down"))
            paths.append(Path((own_up, *up, "syncer down"), (own_down, *down, "syncer up"), learner.latency_s))
        return Network(bit_per_s, paths)

    def merging(self) -> Merging:
        """The syncer's time for a round."""
        speed = self.syncer.merge_speed
        bytes_per_s = math.inf if speed is None else self.syncer.shards * speed / 8
        return Merging(self.syncer.merge_time, bytes_per_s)

    def outages(self, until_s: float) -> list[Outage]:
        """Outages of learners that begin before `until_s`, in order: those of the trace, or drawn by the fault rate.

        Each learner draws from its own seeded stream, so that adding a learner changes nothing for the others.
        """
        found = []
        for fault in self.fault:
            back_s = math.inf if fault.back is None else fault.back
            found += [Outage(index, fault.at, back_s) for index in self._named(fault.learner) if fault.at < until_s]
        for index, name in enumerate(self.names if self.faults is not None else ()):
            assert self.faults is not None
            stream = random.Random(f"{self.faults.seed}/{name}")
            at_s = stream.expovariate(1 / self.faults.mtbf)
            while at_s < until_s:
                back_s = at_s + self.faults.repair
                found.append(Outage(index, at_s, back_s))
                at_s = back_s + stream.expovariate(1 / self.faults.mtbf)
        return sorted(found, key=lambda outage: (outage.at_s, outage.learner))

    def _named(self, name: str) -> list[int]:
        """Indices of the learner, or of all learners of the site, of this name."""
        learners = enumerate(zip(self.names, self.places, strict=True))
        return [i for i, (own, place) in learners if name in (own, place.name)]

    def _step_s(self, place: SiteTable) -> float:
        """6·N·D / (accelerators · peak · utilization): N parameters that a token uses, D a learner's tokens."""
        if place.step_time is not None:
            return place.step_time
        assert self.model is not None
        assert self.budget is not None
        assert place.speed is not None
        assert place.utilization is not None
        share = self.budget.tokens_per_step / len(self.names)
        used = self.model.active_parameters or self.workload().num_parameters
        flop_per_s = place.accelerators * place.speed * place.utilization
        return 6.0 * used * share / flop_per_s

    def workload(self) -> Workload:
        """The model, without a step time: learners differ in theirs. Raises ConfigError where the file names none."""
        if self.model is None:
            raise ConfigError("the site file does not say which model; add [model] with parameters and layers")
        return self.model.workload()

    def site_of(self, learner: str) -> int | None:
        """The index of the site of a learner, or of the site of this name; None: there is none."""
        named = self._named(learner)
        return self.site.index(self.places[named[0]]) if named else None


def load_site(path: str | FilePath) -> Site:
    """Read a site file. Raises ConfigError naming file, key and value: missing, not TOML, unknown or impossible."""
    return parse_site(read_text(path, "site file"), source=str(path))


def parse_site(text: str, source: str = "site file") -> Site:
    """Read the text of a site file; see `load_site`."""
    return validate(Site, read_toml(text, source), source)
