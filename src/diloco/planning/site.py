"""The site file: where the accelerators are, what joins them, what it costs and how it fails. `docs/site-file.md` lists every key.

One TOML file, read without torch. Quantities are written with their units and held in base units (bit/s, s, bytes, USD per byte or s).
What a learner is, its links and its outages follow from it; the same file is read by the adviser, by simulations and written by
`diloco plan measure`.
"""

import math
import random
from pathlib import Path as FilePath
from typing import Annotated, NamedTuple, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from diloco.errors import ConfigError
from diloco.planning.configs import count_parameters
from diloco.planning.models import PRESETS, Workload
from diloco.planning.network import Network, Path
from diloco.planning.units import COMPUTE, PRICE_PER_BYTE, PRICE_PER_S, RATE, SIZE, TIME, Quantity
from diloco.tables import Table, nearest, read_toml, validate, write_toml

DIGITS = 6
"""Significant digits of a quantity in a written site file."""


def _given_as(quantity: Quantity, *, positive: bool = False) -> tuple[BeforeValidator, PlainSerializer]:
    return (
        BeforeValidator(lambda text: quantity.parse(text, positive=positive)),
        PlainSerializer(lambda value: quantity.show(value, DIGITS), when_used="json"),
    )


Rate = Annotated[float, *_given_as(RATE, positive=True)]
Duration = Annotated[float, *_given_as(TIME, positive=True)]
Delay = Annotated[float, *_given_as(TIME)]
Size = Annotated[float, *_given_as(SIZE, positive=True)]
Speed = Annotated[float, *_given_as(COMPUTE, positive=True)]
BytePrice = Annotated[float, *_given_as(PRICE_PER_BYTE)]
HourPrice = Annotated[float, *_given_as(PRICE_PER_S)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]


class ModelTable(Table):
    """Which model, as far as a plan needs to know it."""

    preset: str | None = None  # a model of the papers: 1b, 10b, 100b, llama-405b, deepseek-v3
    parameters: float | None = Field(default=None, gt=0)
    layers: int | None = Field(default=None, gt=0)
    config: FilePath | None = None  # a transformers config.json, instead of parameters and layers
    active_parameters: float | None = Field(default=None, gt=0)  # those that a token uses, of a mixture of experts

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = (self.preset is not None) + (self.parameters is not None) + (self.config is not None)
        if ways != 1 or (self.parameters is None) != (self.layers is None):
            raise ValueError("a model is its preset, its parameters and layers, or its config; give one of the three")
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f'there is no model preset "{self.preset}"; {nearest(self.preset, list(PRESETS))}')
        return self


class BudgetTable(Table):
    """How long to train, and what a method may cost in loss."""

    tokens: float = Field(gt=0)  # trained by all learners together
    tokens_per_step: float = Field(gt=0)  # of one step over all learners
    sequence_length: int = Field(default=2048, gt=0)  # in tokens
    loss_penalty_percent: float = Field(default=1.0, ge=0)  # of the loss of data parallel, that is allowed


class SiteTable(Table):
    """Learners of one kind at one place. Everything here is of one learner; with `learners = 4` there are four like it."""

    name: Name
    learners: int = Field(default=1, ge=1)
    accelerators: int = Field(default=1, ge=1)
    memory: Size | None = None  # of one accelerator; without it nothing is said about whether the model fits
    step_time: Duration | None = None  # of an inner step at the learner's share of the batch
    speed: Speed | None = None  # peak of one accelerator, where the step time is not known
    utilization: float | None = Field(
        default=None, gt=0, le=1
    )  # of the peak, by the model's 6 FLOP per parameter and token
    jitter_percent: float = Field(default=0.0, ge=0, lt=100)  # standard deviation of the step time
    up: Rate  # from the learner to the internet
    down: Rate
    latency: Delay = 0.0  # one way, to the syncer
    shares: Names = ()  # links that all traffic of its learners also passes through
    price_up: BytePrice | None = None
    price_down: BytePrice | None = None
    price_per_accelerator_hour: HourPrice | None = None

    @model_validator(mode="after")
    def _has_a_step_time(self) -> Self:
        if (self.speed is None) != (self.utilization is None):
            raise ValueError("speed and utilization belong together")
        if (self.step_time is None) == (self.speed is None):
            raise ValueError("give the step_time that was measured, or speed and utilization; one of the two")
        return self


class LinkTable(Table):
    """A link that several learners share, such as a building's line."""

    name: Name
    up: Rate
    down: Rate


class SyncerTable(Table):
    """Where the syncer is. Without this table its link is no limit and costs nothing."""

    up: Rate | None = None  # of each shard, from the syncer to the internet; none: no limit
    down: Rate | None = None
    shards: int = Field(default=1, ge=1)
    price_up: BytePrice | None = None
    price_down: BytePrice | None = None
    price_per_hour: HourPrice | None = None  # of each shard


class FaultsTable(Table):
    """Failures at random, of each learner by itself: exponential times between them."""

    mtbf: Duration  # mean time a learner runs between two failures
    repair: Delay
    seed: int = Field(default=0, ge=0)


class FaultTable(Table):
    """One failure of a trace."""

    learner: str  # or a site: all its learners
    at: Delay
    back: Duration | None = None  # none: it does not return

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.back is not None and self.back <= self.at:
            raise ValueError(f"back at {TIME.show(self.back)} is not after at = {TIME.show(self.at)}")
        return self


class Learner(NamedTuple):
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
        """How long its inner step of this number takes, seconds: log-normal, and the same whoever asks and in whatever order."""
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

    model: ModelTable | None = None
    budget: BudgetTable | None = None
    site: tuple[SiteTable, ...] = Field(min_length=1)
    link: tuple[LinkTable, ...] = ()
    syncer: SyncerTable = Field(default_factory=SyncerTable)
    faults: FaultsTable | None = None
    fault: tuple[FaultTable, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = self.names
        for kind, known in (("learner", names), ("link", [each.name for each in self.link])):
            if twice := sorted({name for name in known if known.count(name) > 1}):
                raise ValueError(f"there are two {kind}s {twice[0]}; rename one")
        for place in self.site:
            for name in place.shares:
                if name not in (known := [each.name for each in self.link]):
                    raise ValueError(f'site {place.name} shares the link "{name}", and there is no such [[link]]; '
                                     f"{nearest(name, known) if known else 'add it'}")  # fmt: skip
            if place.speed is not None and (self.model is None or self.budget is None):
                raise ValueError(
                    f"site {place.name} gives speed and utilization; its step time follows only with [model] and [budget]"
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
                    raise ValueError(
                        f"{self.names[index]} fails at {TIME.show(fault.at)} while it is gone; drop that [[fault]]"
                    )
                gone_until[index] = math.inf if fault.back is None else fault.back

    # --- what follows from it ---------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the learners in order: the site's, numbered where it has several."""
        return [
            place.name if place.learners == 1 else f"{place.name}-{i}"
            for place in self.site
            for i in range(place.learners)
        ]

    @property
    def places(self) -> list[SiteTable]:
        """The site of each learner, in the learners' order."""
        return [place for place in self.site for _ in range(place.learners)]

    def learners(self) -> list[Learner]:
        """Every learner, in the order of the file."""
        return [
            Learner(name, place.name, place.accelerators, self._step_s(place), place.jitter_percent / 100, place.up, place.down,
                    place.latency, place.shares)
            for name, place in zip(self.names, self.places, strict=True)
        ]  # fmt: skip

    def network(self) -> Network:
        """All links and each learner's way over them, for transfers in virtual time."""
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

    def outages(self, until_s: float) -> list[Outage]:
        """Who is gone when, of all that begins before `until_s`, in order: the trace, or drawn from the mean time between failures.

        Each learner draws from its own seeded stream, so that another learner more or less changes nothing for it.
        """
        if self.faults is None:
            found = [
                Outage(index, fault.at, math.inf if fault.back is None else fault.back)
                for fault in self.fault
                if fault.at < until_s
                for index in self._named(fault.learner)
            ]
            return sorted(found, key=lambda outage: (outage.at_s, outage.learner))
        found = []
        for index, name in enumerate(self.names):
            stream = random.Random(f"{self.faults.seed}/{name}")
            at_s = stream.expovariate(1 / self.faults.mtbf)
            while at_s < until_s:
                back_s = at_s + self.faults.repair
                found.append(Outage(index, at_s, back_s))
                at_s = back_s + stream.expovariate(1 / self.faults.mtbf)
        return sorted(found, key=lambda outage: (outage.at_s, outage.learner))

    def _named(self, name: str) -> list[int]:
        """Indices of the learner, or of all learners of the site, of this name."""
        return [i for i, (own, place) in enumerate(zip(self.names, self.places, strict=True)) if name in (own, place.name)]  # fmt: skip

    def _step_s(self, place: SiteTable) -> float:
        """6·N·D / (accelerators · peak · utilization): N parameters that a token uses, D tokens of a step, an equal share of the batch."""
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
        if self.model.preset is not None:
            return PRESETS[self.model.preset].with_step(0.0)
        if self.model.config is not None:
            return Workload(self.model.config.parent.name, *count_parameters(self.model.config), 0.0)
        assert self.model.parameters is not None
        assert self.model.layers is not None
        return Workload("the model", self.model.parameters, self.model.layers, 0.0)

    def site_of(self, learner: str) -> int | None:
        """The index of the site of a learner, or of the site of this name; None: there is none."""
        named = self._named(learner)
        return self.site.index(self.places[named[0]]) if named else None


def load_site(path: str | FilePath) -> Site:
    """Read a site file. Raises ConfigError naming file, key and value: missing, not TOML, unknown keys, impossible values."""
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the site file {path} ({error}); check the path") from error
    return parse_site(text, source=str(path))


def parse_site(text: str, source: str = "site file") -> Site:
    """As `load_site`, from the text of a site file."""
    return validate(Site, read_toml(text, source), source)


def dump_site(site: Site) -> str:
    """The site file as TOML that `parse_site` reads back; quantities to `DIGITS` digits."""
    return write_toml(site.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
