"""The site file: sites with their accelerators, links, prices and failures.

One TOML file, read without torch; `docs/adviser.md` lists every key. Quantities have units in the file and base units
in memory (bit/s, s, bytes, USD per byte or s). Learners, network and outages are derived from it. The adviser and
simulations read the same file; `diloco plan measure` extends it.
"""

import math
import random
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from diloco.errors import ConfigError
from diloco.planning.exchange_plan import Merging
from diloco.planning.network import Network, Route
from diloco.planning.units import COMPUTE, LARGEST, PRICE_PER_BYTE, PRICE_PER_S, RATE, SIZE, TIME, Quantity
from diloco.planning.workload import ModelSizeTable, Workload
from diloco.tables import Table, nearest, read_text, read_toml, validate


def _given_as(quantity: Quantity, *, positive: bool = False) -> BeforeValidator:
    return BeforeValidator(lambda text: quantity.parse(text, positive=positive))


Rate = Annotated[float, _given_as(RATE, positive=True)]
Duration = Annotated[float, _given_as(TIME, positive=True)]
Delay = Annotated[float, _given_as(TIME)]
Size = Annotated[float, _given_as(SIZE, positive=True)]
Speed = Annotated[float, _given_as(COMPUTE, positive=True)]
BytePrice = Annotated[float, _given_as(PRICE_PER_BYTE)]
HourPrice = Annotated[float, _given_as(PRICE_PER_S)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]


class BudgetTable(Table):
    """The length of the training, and the loss penalty that a method may have."""

    tokens: float = Field(gt=0, le=LARGEST)  # over all learners
    tokens_per_step: float = Field(gt=0, le=LARGEST)  # in one step over all learners
    sequence_length: int = Field(default=2048, gt=0)  # in tokens
    loss_penalty_percent: float = Field(
        default=1.0, ge=0
    )  # the most that is allowed, in percent of the loss of data parallel

    @model_validator(mode="after")
    def _holds_a_step(self) -> Self:
        if self.tokens_per_step > self.tokens:
            raise ValueError(
                f"a step of {self.tokens_per_step:.12g} tokens is more than all {self.tokens:.12g}; lower "
                "tokens_per_step"
            )
        return self


class SiteTable(Table):
    """Equal learners at one site. Every value is that of one learner; `learners` is their number."""

    name: Name
    learners: int = Field(default=1, ge=1, le=10_000)
    accelerators: int = Field(default=1, ge=1)
    memory: Size | None = None  # of one accelerator; without it no check whether the model fits
    step_time: Duration | None = None  # of an inner step at the learner's share of the batch
    speed: Speed | None = None  # peak of one accelerator, where the step time is unknown
    utilization: float | None = Field(default=None, gt=0, le=1)  # of the peak, at 6 FLOP per parameter and token
    jitter_percent: float = Field(
        default=0.0, ge=0, lt=1000
    )  # standard deviation of the step time, in percent of its mean
    up: Rate  # from the learner to the internet
    down: Rate
    latency: Delay = 0.0  # one way, to the syncer
    shares: Names = ()  # links that all its learners' traffic also uses
    price_up: BytePrice | None = None
    price_down: BytePrice | None = None
    price_per_accelerator_hour: HourPrice | None = None

    @model_validator(mode="after")
    def _has_a_step_time(self) -> Self:
        if (self.speed is None) != (self.utilization is None):
            raise ValueError("speed and utilization belong together")
        if (self.step_time is None) == (self.speed is None):
            raise ValueError("give either the measured step_time, or speed and utilization")
        return self


class LinkTable(Table):
    """A link that several learners share, such as a building's internet connection."""

    name: Name
    up: Rate
    down: Rate


class SiteSyncerTable(Table):
    """The syncer's links, merges and prices. Without this table its link is unlimited and free."""

    up: Rate | None = None  # of each shard, from the syncer to the internet; none: unlimited
    down: Rate | None = None
    shards: int = Field(default=1, ge=1)
    merge_time: Delay = 0.0  # of a round, independent of its size: closing, storing, notifying
    merge_speed: Rate | None = None  # rate of merging encoded contributions, of each shard; none: instantaneous
    price_up: BytePrice | None = None
    price_down: BytePrice | None = None
    price_per_hour: HourPrice | None = None  # of each shard


class FaultsTable(Table):
    """Random, independent failures of each learner, with exponential times between them."""

    mtbf: Duration  # mean time between two failures of a learner
    repair: Delay
    seed: int = Field(default=0, ge=0)


class FaultTable(Table):
    """One failure of a trace."""

    learner: str  # or a site, for all its learners
    at: Delay
    back: Duration | None = None  # none: it does not return

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.back is not None and self.back <= self.at:
            raise ValueError(f"back at {TIME.show(self.back)} is not after at = {TIME.show(self.at)}")
        return self


class SiteLearner(NamedTuple):
    """One learner.

    Attributes:
        place: its site, with the link to the syncer.
        step_s: mean duration of an inner step, seconds.
    """

    name: str
    place: SiteTable
    step_s: float

    def step_seconds(self, step: int, seed: int = 0) -> float:
        """Duration of an inner step, in seconds: log-normal, determined by seed, name and step alone."""
        if self.place.jitter_percent == 0:
            return self.step_s
        variance = math.log1p((self.place.jitter_percent / 100) ** 2)
        normal = random.Random(f"{seed}/{self.name}/{step}").gauss(0.0, 1.0)
        return self.step_s * math.exp(math.sqrt(variance) * normal - variance / 2)


class Outage(NamedTuple):
    """The absence of a learner, by its index, from `at_s` until `back_s` (None: permanent)."""

    learner: int
    at_s: float
    back_s: float | None


class Site(Table):
    """A whole site file."""

    model: ModelSizeTable | None = None
    budget: BudgetTable | None = None
    site: tuple[SiteTable, ...] = Field(min_length=1)
    link: tuple[LinkTable, ...] = ()
    syncer: SiteSyncerTable = Field(default_factory=SiteSyncerTable)
    faults: FaultsTable | None = None
    fault: tuple[FaultTable, ...] = ()

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        names = self.names
        for kind, known in (("learner", names), ("link", [each.name for each in self.link])):
            if twice := sorted(name for name, times in Counter(known).items() if times > 1):
                raise ValueError(f"there are two {kind}s {twice[0]}; rename one")
        links = [each.name for each in self.link]
        for place in self.site:
            for name in set(place.shares) - set(links):
                advice = nearest(name, links) if links else "add it"
                raise ValueError(f'site {place.name} shares the link "{name}", which has no [[link]]; {advice}')
            if place.speed is not None and (self.model is None or self.budget is None):
                raise ValueError(
                    f"site {place.name} gives speed and utilization; its step time requires [model] and [budget]"
                )
        if self.faults is not None and self.fault:
            raise ValueError("[faults] and [[fault]] exclude each other; keep one of them")
        self._check_trace()
        return self

    def _check_trace(self) -> None:
        known = list(dict.fromkeys([*self.names, *(place.name for place in self.site)]))
        absent_until: dict[int, float] = {}
        for fault in sorted(self.fault, key=lambda each: each.at):
            if fault.learner not in known:
                raise ValueError(f'a [[fault]] names the learner "{fault.learner}"; {nearest(fault.learner, known)}')
            for index in self._named(fault.learner):
                if fault.at < absent_until.get(index, 0.0):
                    at = TIME.show(fault.at)
                    raise ValueError(f"{self.names[index]} fails at {at} while it is absent; remove that [[fault]]")
                absent_until[index] = math.inf if fault.back is None else fault.back

    # --- derived values -----------------------------------------------------------------------------------------------

    @property
    def _named_places(self) -> list[tuple[str, SiteTable]]:
        """Name and site of each learner in order: the name of the site, numbered where it has several learners."""
        numbered = ((place, i) for place in self.site for i in range(place.learners))
        return [(place.name if place.learners == 1 else f"{place.name}-{i}", place) for place, i in numbered]

    @property
    def names(self) -> list[str]:
        """Names of the learners, in the order of the file."""
        return [name for name, _ in self._named_places]

    def learners(self) -> list[SiteLearner]:
        """Return all learners, in the order of the file."""
        return [SiteLearner(name, place, self._step_s(place)) for name, place in self._named_places]

    def network(self) -> Network:
        """Return the links and each learner's route over them, for simulated transfers."""
        bit_per_s = {
            "syncer up": math.inf if self.syncer.up is None else self.syncer.up * self.syncer.shards,
            "syncer down": math.inf if self.syncer.down is None else self.syncer.down * self.syncer.shards,
        }
        for link in self.link:
            bit_per_s |= {f"link {link.name} up": link.up, f"link {link.name} down": link.down}
        routes = []
        for learner in self.learners():
            own_up, own_down = f"learner {learner.name} up", f"learner {learner.name} down"
            bit_per_s |= {own_up: learner.place.up, own_down: learner.place.down}
            up, down = ([f"link {name} {way}" for name in learner.place.shares] for way in ("up", "down"))
            routes.append(Route((own_up, *up, "syncer down"), (own_down, *down, "syncer up"), learner.place.latency))
        return Network(bit_per_s, routes)

    def merging(self) -> Merging:
        """Return the syncer's time for a round."""
        speed = self.syncer.merge_speed
        bytes_per_s = math.inf if speed is None else self.syncer.shards * speed / 8
        return Merging(self.syncer.merge_time, bytes_per_s)

    def outages(self, until_s: float) -> list[Outage]:
        """Return outages that begin before `until_s`, in order: those of the trace, or random ones of the fault rate.

        Each learner has its own seeded stream, so that an additional learner does not change the outages of others.
        """
        found = []
        for fault in self.fault:
            found += [Outage(index, fault.at, fault.back) for index in self._named(fault.learner) if fault.at < until_s]
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
        """Indices of the learner of this name, or of all learners of the site of this name."""
        return [i for i, (own, place) in enumerate(self._named_places) if name in (own, place.name)]

    def _step_s(self, place: SiteTable) -> float:
        """6·N·D / (accelerators · peak · utilization): N parameters per token, D tokens of a learner."""
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
        """Return the model, without a step time, which differs by learner. Raises ConfigError where there is none."""
        if self.model is None:
            raise ConfigError("the site file has no model; add [model] with parameters and layers")
        return self.model.workload()

    def site_of(self, learner: str) -> int | None:
        """Return the index of a learner's site, or of the site of this name; None: unknown."""
        named = self._named(learner)
        return self.site.index(self._named_places[named[0]][1]) if named else None


def load_site(path: str | Path) -> Site:
    """Read a site file. Raises ConfigError naming file, key and value: missing, not TOML, unknown or invalid."""
    return parse_site(read_text(path, "site file"), source=str(path))


def parse_site(text: str, source: str = "site file") -> Site:
    """Parse the text of a site file; see `load_site`."""
    return validate(Site, read_toml(text, source), source)


# --- measurements -----------------------------------------------------------------------------------------------------


def with_measurement(
    text: str, source: str, learner: str, measured: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return the text of a site file with the `measured` values at the site of `learner`; order and comments are kept.

    A new site is appended. A measured step time replaces `speed` and `utilization`. `defaults` are tables such as
    `model`, added where the file has none; an empty text gives a new file.

    Raises:
        ConfigError: the text is not a site file, lacks a required value, or has a form that cannot be extended.
    """
    tables = read_toml(text, source)
    sites: list[dict[str, Any]] = tables.get("site", [])
    index = parse_site(text, source).site_of(learner) if sites else None
    missing = {name: table for name, table in defaults.items() if name not in tables}
    dropped = ("speed", "utilization") if "step_time" in measured else ()
    if index is None:
        sites = [*sites, {"name": learner, **measured}]
    else:
        kept = {key: value for key, value in sites[index].items() if key not in dropped}
        sites = [*sites[:index], {**kept, **measured}, *sites[index + 1 :]]
    wanted = {**tables, **missing, "site": sites}
    validate(Site, wanted, source)
    with suppress(ValueError):
        new = _extended(text, missing, index, sites[-1] if index is None else measured, dropped)
        if tomllib.loads(new) == wanted:
            return new
    raise ConfigError(f"{source} has a form that cannot be extended; write each site as a [[site]] table")


def _extended(
    text: str, missing: Mapping[str, Any], index: int | None, values: Mapping[str, Any], dropped: Sequence[str]
) -> str:
    """Return the text with missing tables, and the values of a site or a new one. Raises ValueError where tomlkit
    fails."""
    import tomlkit

    document = tomlkit.parse(text)
    for name, table in missing.items():
        document.append(name, _set_apart(table))
    sites = document.setdefault("site", tomlkit.aot())
    end: list[Any] = []  # blank lines and comments before the next table
    if sites:
        body = sites[-1 if index is None else index].value.body
        while body[-1][0] is None:
            end.insert(0, body.pop())
    if index is None:
        sites.append(_set_apart(values))
    site = sites[-1 if index is None else index]
    for key in dropped:
        site.pop(key, None)
    site.update(values)
    site.value.body.extend(end)
    return tomlkit.dumps(document) if text else tomlkit.dumps(document).lstrip()


def _set_apart(values: Mapping[str, Any]) -> Any:
    """Return a table that is preceded by an empty line."""
    import tomlkit

    table = tomlkit.table()
    table.update(values)
    table.trivia.indent = "\n"
    return table
