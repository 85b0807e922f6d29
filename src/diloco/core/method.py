"""A training method is a frozen value that answers eight questions; presets are functions that return one.

    question                                          fields of `Method`
    how is the model cut?                             fragments
    when is a fragment sent, when is it applied?      sync_every H, overlap τ, offsets, wait
    what goes on the wire?                            exchanged, up, down, error_feedback
    how much does each contribution count?            weight
    how are rounds called, and who must be in one?    quorum
    how are contributions merged?                     screen, merge, partial
    what does the global model do with the result?    outer, outer_at
    what does a learner do with the answer?           adopt

A method has no behaviour of its own: the state machines (`protocol`) and the arithmetic of a round
(`core.global_fragment`) read it. A new method is a new value, or one new small file for the one question it answers
differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from diloco.core.adopt import ADOPTIONS, Adopt, Eager, Replace
from diloco.core.choices import Choice, Registry, fraction, nearest, one_of, plain
from diloco.core.codecs import FP32, Codec, codec_from_name
from diloco.core.fragments import FRAGMENTATIONS, Experts, Fragmentation, Layout, Whole, cut_in_words
from diloco.core.merges import MERGES, SCREENS, HeLoCo, Mean, Merge, Screen
from diloco.core.outer import OUTER_OPTIMIZERS, SGD, DelayedNesterov, Outer
from diloco.core.quorum import QUORUMS, AllLive, Called, Pushed, Quorum
from diloco.core.schedule import Schedule, SyncEvery, sync_every_of
from diloco.core.weights import WEIGHTS
from diloco.errors import ConfigError

Exchanged = Literal["outer gradients", "gradients", "parameters"]
OuterAt = Literal["syncer", "learners"]
Partial = Literal["full", "scale"]

_KINDS: dict[str, type] = {
    "fragments": Fragmentation, "up": Codec, "down": Codec, "quorum": Quorum, "merge": Merge, "outer": Outer,
    "adopt": Adopt,
}  # fmt: skip

_REGISTRIES: Mapping[str, Registry[Choice]] = {
    "fragments": FRAGMENTATIONS, "quorum": QUORUMS, "screen": SCREENS, "merge": MERGES, "outer": OUTER_OPTIMIZERS,
    "adopt": ADOPTIONS,
}  # fmt: skip


_PLAIN = ("sync_every", "overlap", "wait", "weight", "quorum", "screen", "partial", "outer", "outer_at", "adopt")
"""Fields whose defaults are the plain mean after every step."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """The answers that make one training method.

    Attributes:
        name: of the preset, or any other.
        paper: the reference.
        exchanged: what learners send. `"outer gradients"`: the displacement Δ = anchor − θ, answered by an outer step.
            `"gradients"`: the gradient itself before every inner step, answered by its mean (data parallel).
            `"parameters"`: outer gradients of single inner steps, which average the parameters: data parallel as long
            as the inner optimizer is stateless, so a learner refuses any other optimizer.
        fragments: how the model is cut.
        sync_every: H, inner steps between two sends of one fragment; pairs (from_step, H) where it changes over the
            run.
        overlap: τ, inner steps between sending a fragment and applying the answer. With `Called()` it only sizes
            the grace window.
        offsets: o_p, one per fragment; fragment p is sent after inner steps t ≡ o_p (mod H). None: (p+1)·H/P.
        wait: True: a learner blocks until a due answer has arrived. False: it trains on and adopts it on arrival.
        up, down: codecs of contributions and of updates. A lossy `down` carries the encoded change of the global
            fragment, or the encoded outer gradient where the outer optimizer is on the learners.
        error_feedback: β; a learner adds β times what its earlier encodings lost to its next contribution. 0 or False:
            no error feedback.
        weight: of a contribution in the merge: "uniform", "tokens", "tokens^2/steps", "discounted" (tokens, by
            staleness).
        quorum: how rounds are called, and which learners a round needs (`core.quorum`).
        screen: refuses contributions for their norm before the merge; None: none.
        merge: how contributions become one outer gradient Δ̄.
        partial: of a round without some live learners: "full": Δ̄ is not scaled. "scale": Δ̄ is multiplied by
            contributing ÷ live weight, so that half of the learners moves the model half as far.
        outer: the outer optimizer.
        outer_at: where it runs. "syncer": the syncer publishes the new global fragment. "learners": the syncer
            publishes Δ̄, and every learner takes the outer step.
        adopt: how a learner combines its parameters with a new global fragment.
    """

    name: str
    paper: str
    exchanged: Exchanged = "outer gradients"
    fragments: Fragmentation = Whole()
    sync_every: SyncEvery = 1
    overlap: int = 0
    offsets: tuple[int, ...] | None = None
    wait: bool = True
    up: Codec = FP32()
    down: Codec = FP32()
    error_feedback: float = 0.0
    weight: str = "uniform"
    quorum: Quorum = AllLive()
    screen: Screen | None = None
    merge: Merge = Mean()
    partial: Partial = "full"
    outer: Outer = SGD(lr=1.0)
    outer_at: OuterAt = "syncer"
    adopt: Adopt = Replace()

    def __post_init__(self) -> None:
        for name, value, known in (
            ("weight", self.weight, WEIGHTS),
            ("exchanged", self.exchanged, get_args(Exchanged)),
            ("outer_at", self.outer_at, get_args(OuterAt)),
            ("partial", self.partial, get_args(Partial)),
        ):
            one_of(*known)(name, value)
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                kinds = ", ".join(f"{each.__name__}(…)" for each in _leaves(kind))
                raise ConfigError(f"{name} is {getattr(self, name)!r}; use one of {kinds}.")
        if type(self.wait) is not bool:
            raise ConfigError(f"wait is {self.wait!r}; use true or false.")
        object.__setattr__(self, "sync_every", sync_every_of(self.sync_every))
        object.__setattr__(self, "offsets", None if self.offsets is None else tuple(self.offsets))
        object.__setattr__(self, "error_feedback", _feedback(self.error_feedback))
        if self.error_feedback and self.up.lossless:
            raise ConfigError(
                f"error_feedback has no effect with the lossless codec {self.up.name!r}; drop it or choose a lossy one."
            )
        num_fragments = 1 if self.offsets is None else len(self.offsets)
        self.schedule(num_fragments)  # refuses impossible numbers
        if self.exchanged != "outer gradients":
            self._require_plain_averaging()
        for wrong, why in self._contradictions():
            if wrong:
                raise ConfigError(why)
        self.for_fragment(0)

    def _contradictions(self) -> tuple[tuple[bool, str], ...]:
        """Pairs (whether an excluded combination of options is set, the error message)."""
        intervals = [self.sync_every] if isinstance(self.sync_every, int) else [every for _, every in self.sync_every]
        has_experts, plain = isinstance(self.fragments, Experts), self.exchanged == "outer gradients"
        own_outer = self.fragments.own_answers(0).get("outer", self.outer)
        quorum = self.quorum
        return (
            (self.dealing[2] > 0 and self.error_feedback > 0,
             "Experts(deal_every=…) excludes error_feedback, which begins anew with each set that a learner is dealt."),
            (self.dealing[2] > 0 and isinstance(quorum, AllLive) and quorum.drop > 0,
             f"Experts(deal_every=…) excludes {quorum}: a learner that leaves for others would lose dropped work."),
            (isinstance(quorum, AllLive) and self.partial == "scale",
             "partial='scale' is for asynchronous rounds; a scheduled round takes the mean of those present."),
            (isinstance(quorum, AllLive) and quorum.drop > 0 and self.overlap > 0,
             f"{quorum} needs overlap=0, not {self.overlap}."),
            (isinstance(quorum, AllLive) and self.adopt.needs_origin and self.overlap == 0,
             "KeepDisplacement() keeps the work of an overlap, and there is none; set overlap."),
            (not isinstance(quorum, AllLive) and self.outer_at == "learners",
             (f"outer_at='learners' needs a schedule that all learners follow, not {type(quorum).__name__}; use "
              "AllLive.")),
            (isinstance(quorum, Called) and self.wait,
             "a learner cannot wait for an answer that the syncer calls for; use wait=False with Called()."),
            (isinstance(quorum, Pushed) and self.overlap > 0,
             (f"overlap={self.overlap} has no effect where learners push: each adopts an answer when it arrives; use "
              "overlap=0.")),
            (self.overlap > min(intervals) and self.outer_at == "syncer",
             (f"overlap={self.overlap} exceeds sync_every={min(intervals)}; an overlap is at most one interval unless "
             "outer_at='learners'.")),
            (self.outer_at == "learners" and not isinstance(self.adopt, Replace | Eager),
             f"outer_at='learners' needs adopt=Replace() or Eager(), not {self.adopt}."),
            (isinstance(self.adopt, Eager) and self.outer_at == "syncer",
             "Eager() takes the outer step on each learner; set outer_at='learners'."),
            (isinstance(self.adopt, Eager) and any(self.overlap not in (every, 2 * every) for every in intervals),
             f"Eager() needs overlap=H or 2H, not overlap={self.overlap} with sync_every={self.sync_every}."),
            (isinstance(self.adopt, Eager) and (self.merge != Mean() or self.screen is not None),
             "Eager() replaces its own part of a mean; use merge=Mean() and no screen."),
            (isinstance(self.adopt, Eager) and not self.wait,
             "Eager() steps with the answer that is due; use wait=True."),
            (self.partial == "scale" and isinstance(self.outer, DelayedNesterov),
             "DelayedNesterov divides by its buffer, and partial='scale' divides once more; use partial='full'."),
            (self.outer.one_at_a_time and self.quorum.at_least > 1,
             (f"{type(self.outer).__name__}() takes outer gradients one at a time, and {self.quorum} waits for "
             "several; use at_least=1.")),
            (self.weight != "uniform" and not self.merge.weighted,
             (f"{type(self.merge).__name__}() counts every learner the same; use weight='uniform' with it, not "
             f"{self.weight!r}.")),
            (has_experts and (isinstance(self.adopt, Eager) or not plain),
             (f"Experts() weighs each expert by its own tokens, which {self.name} cannot; use another cut, such as "
              "Whole().")),
            (has_experts and self.merge.weighted and not self.merge.weighs_tensors,
             f"Experts() weighs each expert by its own tokens, which {self.merge} cannot; use Mean()."),
            (own_outer.one_at_a_time != self.outer.one_at_a_time,
             (f"outer={self.outer} and outer={own_outer} of Experts() differ in whether they take outer gradients one "
              "at a time; use two that agree.")),
            (isinstance(self.merge, HeLoCo) and self.outer.momentum_of(self.outer.init(0)) is None,
             f"HeLoCo() corrects towards the outer momentum, and {self.outer} has none."),
        )  # fmt: skip

    def _require_plain_averaging(self) -> None:
        """Refuse options other than the plain mean after every step."""
        for each in fields(self):
            needed = AllLive(self.quorum.at_least) if each.name == "quorum" else each.default
            if each.name in _PLAIN and getattr(self, each.name) != needed:
                raise ConfigError(
                    f"averaging {self.exchanged} needs {each.name}={needed!r}, not {getattr(self, each.name)!r}; "
                    "use LocalSGD or DiLoCo for anything but averaging at every step."
                )

    def schedule(self, num_fragments: int) -> Schedule:
        """The schedule for a model that was cut into `num_fragments` fragments.

        Raises:
            ConfigError: another number of offsets.
        """
        return Schedule(
            self.sync_every,
            num_fragments,
            self.overlap,
            self.offsets,
            self.fragments.multiples(num_fragments),
            together=self.dealing[2] > 0,  # so that a learner that gets another set has sent all of its work
        )

    def for_fragment(self, fragment: int) -> Method:
        """The method of one fragment: that of a group of experts has the codecs, the outer optimizer and the H of the
        experts (`fragments.Experts`). `close` and `apply_update` take it; any other fragment has this method."""
        own, k = self.fragments.own_answers(fragment), self.fragments.multiples(fragment + 1)[fragment]
        if not own and k == 1:
            return self
        if own.get("up", self.up).lossless:
            own = {**own, "error_feedback": 0.0}
        every = self.sync_every
        own_every = every * k if isinstance(every, int) else tuple((start, each * k) for start, each in every)
        return replace(self, fragments=Whole(), sync_every=own_every, offsets=None, **own)

    def with_own_overlap(self, overlap: int) -> Method:
        """The method of a learner with its own overlap τ = `overlap`, independent of the other learners'.

        Replicas of different speed may overlap different numbers of steps (Streaming DiLoCo, arXiv 2501.18512).

        Raises:
            ConfigError: the method does not allow own overlaps, or no learner of it could have this one.
        """
        if not isinstance(self.quorum, AllLive) or self.outer_at == "learners" or self.exchanged != "outer gradients":
            raise ConfigError(
                f"overlap={overlap} of a single learner has no effect with {self.name}; drop it, or use a method "
                "whose rounds are scheduled and whose outer step is on the syncer."
            )
        if not isinstance(self.sync_every, int):
            raise ConfigError(
                f"overlap={overlap} of a single learner needs one sync_every, not {self.sync_every}: where H changes, "
                "learners of different overlaps would contribute to a round after different steps; drop it."
            )
        return replace(self, overlap=overlap)

    @property
    def needs_whole_fragments(self) -> bool:
        """Whether rounds must be closed on whole fragments, and not shard by shard."""
        return self.screen is not None or not self.merge.elementwise

    @property
    def dealing(self) -> tuple[int, int, int]:
        """Groups of experts, `copies` and `deal_every` (`fragments.Experts`); no groups: no learner holds a part."""
        cut = self.fragments
        return (cut.groups, cut.copies, cut.deal_every) if isinstance(cut, Experts) else (0, 1, 0)

    def cut_in_words(self, layout: Layout) -> str:
        """How this method cut a model into its fragments, and why."""
        return cut_in_words(layout, self.fragments)

    def experts_of(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """As `Fragmentation.experts_of`."""
        return self.fragments.experts_of(layout)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON, TOML); `Method.from_dict` gives the same method back."""
        values = {field.name: plain(getattr(self, field.name)) for field in fields(self)}
        return {**values, "up": self.up.name, "down": self.down.name}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Method:
        """The method that `to_dict` described.

        Raises:
            ConfigError: an unknown field or value.
        """
        check_keys(values, [field.name for field in fields(Method)], "method field")
        return Method(**{key: parse_answer(key, value) for key, value in values.items()})

    def difference(self, other: Method, own: str = "here", others: str = "there") -> str | None:
        """A phrase that names every field in which two methods differ, other than name and paper; None: equal. `own`
        and `others` say in the phrase where this method and the other one are."""
        mine, theirs = self.to_dict(), other.to_dict()
        different = [k for k in mine if k not in ("name", "paper") and mine[k] != theirs[k]]
        return ", ".join(f"{k} is {mine[k]!r} {own} and {theirs[k]!r} {others}" for k in different) or None


def _leaves(kind: type[Any]) -> list[type[Any]]:
    """The subclasses of a class, at any depth, that have no subclasses."""
    return [leaf for each in kind.__subclasses__() for leaf in _leaves(each)] or [kind]


def check_keys(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Raise ConfigError naming the nearest known key for the first unknown one."""
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown {what} {key!r}{nearest(key, known)}")


def _feedback(value: object) -> float:
    if isinstance(value, bool):
        return float(value)
    return fraction("error_feedback", value, below_one=False)


def parse_answer(key: str, value: Any) -> Any:
    """The answer to one question of a Method from plain values."""
    if key in ("up", "down"):
        return codec_from_name(value)
    if key == "sync_every":
        return sync_every_of(value)
    return value if value is None or key not in _REGISTRIES else _REGISTRIES[key].read(value)
