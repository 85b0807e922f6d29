"""A training method is a frozen value that answers eight questions; presets are functions that return one.

    question                                          fields of `Method`
    how is the model cut?                             fragments
    when is a fragment sent, when is it applied?      sync_every H, overlap τ, offsets, wait
    what goes on the wire?                            exchanged, up, down, error_feedback
    how much does each contribution count?            weight
    who must be in a merge?                           quorum
    how are contributions merged?                     merge
    what does the global model do with the result?    outer
    what does a learner do with the answer?           adopt

A method has no behaviour of its own: the state machines (`core.learner`, `core.syncer`) and the round arithmetic
(`core.update`) read it. A new method is a new value, or one new small file for the one question it answers differently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from diloco.core.adopt import Adopt, Mix, Replace, adopt_from_dict
from diloco.core.codecs import FP32, Codec, codec_from_name
from diloco.core.fragments import ByLayer, Fragmentation, Whole, fragmentation_from_dict
from diloco.core.merge import WEIGHTS, Mean, Merge, merge_from_dict
from diloco.core.outer import SGD, Nesterov, Outer, outer_from_dict
from diloco.core.quorum import AllLive, quorum_from_dict
from diloco.core.schedule import Schedule
from diloco.core.values import nearest
from diloco.errors import ConfigError

Exchanged = Literal["outer gradients", "gradients", "parameters"]
EXCHANGED: tuple[Exchanged, ...] = get_args(Exchanged)


@dataclass(frozen=True, kw_only=True)
class Method:
    """The answers that make one training method.

    Attributes:
        name: what people call it.
        paper: where it comes from.
        exchanged: what learners send. `"outer gradients"`: the displacement Δ = anchor − θ, answered by an outer step.
            `"gradients"`: the gradient itself before every inner step, answered by its mean (data parallel).
            `"parameters"`: as outer gradients, for a method that stands for plain parameter averaging at every step
            and is refused under a stateful inner optimizer.
        fragments: how the model is cut.
        sync_every: H, inner steps between two sends of one fragment.
        overlap: τ, inner steps between sending a fragment and applying the answer.
        offsets: o_p, one per fragment; fragment p is sent after inner steps t ≡ o_p (mod H). None: (p+1)·H/P.
        wait: True: a learner blocks when an answer is due and not there. False: it goes on and adopts it when it comes.
        up, down: codecs towards the merge and back. A lossy `down` carries the encoded change of the global fragment.
        error_feedback: a learner adds what its last encoding lost to its next contribution.
        weight: how much a contribution counts, "uniform" or "tokens".
        quorum: who must be in a merge.
        merge: how contributions become one outer gradient.
        outer: what the global model does with it.
        adopt: what a learner does with a new global fragment.
    """

    name: str
    paper: str
    exchanged: Exchanged = "outer gradients"
    fragments: Fragmentation = Whole()
    sync_every: int = 1
    overlap: int = 0
    offsets: tuple[int, ...] | None = None
    wait: bool = True
    up: Codec = FP32()
    down: Codec = FP32()
    error_feedback: bool = False
    weight: str = "uniform"
    quorum: AllLive = AllLive()
    merge: Merge = Mean()
    outer: Outer = SGD(lr=1.0)
    adopt: Adopt = Replace()

    def __post_init__(self) -> None:
        for name, value, known in (("weight", self.weight, WEIGHTS), ("exchanged", self.exchanged, EXCHANGED)):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; use one of {', '.join(map(repr, known))}.")
        for name in ("wait", "error_feedback"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; use true or false.")
        if self.error_feedback and self.up.lossless:
            raise ConfigError(
                f"error_feedback has nothing to feed back with the lossless codec {self.up.name!r}; drop it or choose a lossy one."
            )
        if self.exchanged != "outer gradients":
            self._require_plain_averaging()
        num_offsets = 1 if self.offsets is None else len(self.offsets)
        Schedule(self.sync_every, num_offsets, self.overlap, self.offsets)  # refuses impossible numbers

    def _require_plain_averaging(self) -> None:
        """What is averaged at every step is averaged, and nothing else is done to it."""
        plain = {
            "sync_every": 1,
            "overlap": 0,
            "wait": True,
            "weight": "uniform",
            "outer": SGD(lr=1.0),
            "adopt": Replace(),
        }
        for name, value in plain.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"averaging {self.exchanged} needs {name}={value!r}, not {getattr(self, name)!r}; "
                    "use LocalSGD or DiLoCo for anything but averaging at every step."
                )

    def schedule(self, num_fragments: int) -> Schedule:
        """The schedule for a model that was cut into `num_fragments` fragments.

        Raises:
            ConfigError: more fragments than there are steps to send them after, or another number of offsets.
        """
        every_step = self.sync_every == 1 and self.offsets is None  # all fragments are sent after every step
        return Schedule(
            self.sync_every, num_fragments, self.overlap, (1,) * num_fragments if every_step else self.offsets
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (JSON, TOML); `Method.from_dict` gives the same method back."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Method:
        """The method that `to_dict` described.

        Raises:
            ConfigError: an unknown field or value.
        """
        _check_keys(values, [field.name for field in fields(Method)], "method field")
        return Method(**{key: _parse(key, value) for key, value in values.items()})

    def difference(self, other: Method) -> str | None:
        """One phrase naming every field in which two methods differ, or None; names and papers do not count."""
        mine, theirs = self.to_dict(), other.to_dict()
        different = [k for k in mine if k not in ("name", "paper") and mine[k] != theirs[k]]
        return ", ".join(f"{k} is {mine[k]!r} here and {theirs[k]!r} there" for k in different) or None


def DataParallel(
    *, average: Literal["gradients", "parameters"] = "gradients", fragments: Any = None, codec: Any = "fp32"
) -> Method:
    """Every learner takes every step on the mean gradient: the baseline that all others are compared with.

        g = 1/M Σ_m g_m;  θ ← InnerOpt(θ, g)

    `average="parameters"` averages θ after every step instead. That equals averaging gradients only where the inner
    optimizer keeps no state, so a learner refuses it under any other.
    """
    if average not in ("gradients", "parameters"):
        raise ConfigError(f"average is {average!r}; use 'gradients' or 'parameters'.")
    up, down = _codecs(codec)
    return Method(
        name="DataParallel",
        paper="Dean et al. 2012, Large Scale Distributed Deep Networks",
        exchanged=average,
        fragments=_fragments(fragments, Whole()),
        up=up,
        down=down,
    )


def LocalSGD(
    *, sync_every: int = 8, overlap: int = 0, offsets: Sequence[int] | None = None, mix: float = 0.0,
    fragments: Any = None, codec: Any = "fp32", error_feedback: bool = False, weight: str = "uniform",
    quorum: AllLive | None = None,
) -> Method:  # fmt: skip
    """Average the parameters every H inner steps (FedAvg with every client taking part).

    θ_m ← Θ;  H times: θ_m ← InnerOpt(θ_m, g_m);  Θ ← 1/M Σ_m θ_m = Θ − 1·(1/M Σ_m (Θ − θ_m))

    Reference: Stich 2018, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """
    return _family("LocalSGD", "arXiv 1805.09767", SGD(lr=1.0), sync_every, overlap, offsets, mix, _fragments(fragments, Whole()),
                   codec, error_feedback, weight, quorum)  # fmt: skip


def DiLoCo(
    *, sync_every: int = 500, overlap: int = 0, offsets: Sequence[int] | None = None, mix: float = 0.0,
    fragments: Any = None, codec: Any = "fp32", outer: Any = None, error_feedback: bool = False,
    weight: str = "uniform", quorum: AllLive | None = None,
) -> Method:  # fmt: skip
    """Local steps, then an outer step with Nesterov momentum on the mean displacement.

        θ_m ← Θ;  H times: θ_m ← InnerOpt(θ_m, g_m);  Δ = 1/M Σ_m (Θ − θ_m);  Θ ← OuterOpt(Θ, Δ)

    Defaults: H = 500, outer Nesterov lr 0.7, momentum 0.9, fp32 on the wire, uniform weights.

    Reference: Douillard et al. 2023, DiLoCo, arXiv 2311.08105, algorithm 1.
    """
    return _family("DiLoCo", "arXiv 2311.08105", _outer(outer, Nesterov(lr=0.7, momentum=0.9)), sync_every, overlap, offsets, mix,
                   _fragments(fragments, Whole()), codec, error_feedback, weight, quorum)  # fmt: skip


def StreamingDiLoCo(
    *, sync_every: int = 100, overlap: int = 1, offsets: Sequence[int] | None = None, mix: float = 0.5,
    fragments: Any = None, codec: Any = "e3m0", outer: Any = None, error_feedback: bool = False,
    weight: str = "uniform", quorum: AllLive | None = None,
) -> Method:  # fmt: skip
    """DiLoCo by fragments, with communication hidden behind τ inner steps and 4 bits on the wire.

        send at t ≡ o_p (mod H): Δ_{m,p} = anchor_p − θ_{m,p}
        apply at t + τ:          Θ_p ← OuterOpt(Θ_p, 1/M Σ_m Δ_{m,p});  θ_{m,p} ← α·θ_{m,p} + (1 − α)·Θ_p

    Defaults: H = 100, τ = 1, α = 0.5, fragments of three layers strided with the embedding apart, E3M0 both ways,
    outer Nesterov lr 0.4, momentum 0.9.

    Reference: Douillard et al. 2025, Streaming DiLoCo with overlapping communication, arXiv 2501.18512, algorithm 2.
    """
    return _family("StreamingDiLoCo", "arXiv 2501.18512", _outer(outer, Nesterov(lr=0.4, momentum=0.9)), sync_every, overlap,
                   offsets, mix, _fragments(fragments, ByLayer(layers=3, pattern="strided")), codec, error_feedback, weight,
                   quorum)  # fmt: skip


PRESETS: dict[str, Callable[..., Method]] = {
    "DataParallel": DataParallel,
    "LocalSGD": LocalSGD,
    "DiLoCo": DiLoCo,
    "StreamingDiLoCo": StreamingDiLoCo,
}


def method_from_table(table: Mapping[str, Any]) -> Method:
    """A method from a run file's `[method]` table: `preset = "DiLoCo"` and the preset's keywords.

    Raises:
        ConfigError: no or an unknown preset, or a keyword that the preset does not take (names the nearest).
    """
    keywords = dict(table)
    name = keywords.pop("preset", None)
    if name is None:
        raise ConfigError(f"[method] names no preset; set preset to one of {', '.join(PRESETS)}.")
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}{nearest(str(name), PRESETS)}")
    preset = PRESETS[name]
    _check_keys(keywords, list(inspect.signature(preset).parameters), f"{name} keyword")
    if isinstance(keywords.get("quorum"), Mapping):
        keywords["quorum"] = quorum_from_dict(keywords["quorum"])
    return preset(**keywords)


def _family(
    name: str, paper: str, outer: Outer, sync_every: int, overlap: int, offsets: Sequence[int] | None, mix: float,
    fragments: Fragmentation, codec: Any, error_feedback: bool, weight: str, quorum: AllLive | None,
) -> Method:  # fmt: skip
    up, down = _codecs(codec)
    return Method(
        name=name, paper=paper, fragments=fragments, sync_every=sync_every, overlap=overlap,
        offsets=None if offsets is None else tuple(offsets), up=up, down=down, error_feedback=error_feedback,
        weight=weight, quorum=quorum or AllLive(), outer=outer, adopt=Mix(mix) if mix else Replace(),
    )  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Codec):
        return value.name
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def _parse(key: str, value: Any) -> Any:
    parsers: dict[str, Callable[[Any], Any]] = {
        "fragments": fragmentation_from_dict, "up": codec_from_name, "down": codec_from_name, "quorum": quorum_from_dict,
        "merge": merge_from_dict, "outer": outer_from_dict, "adopt": adopt_from_dict,
        "offsets": lambda offsets: None if offsets is None else tuple(offsets),
    }  # fmt: skip
    return parsers[key](value) if key in parsers else value


def _codecs(codec: Any) -> tuple[Codec, Codec]:
    """One codec for both ways, or (up, down), or {"up": …, "down": …}; each a `Codec` or a name."""
    if isinstance(codec, Mapping):
        _check_keys(codec, ["up", "down"], "codec direction")
        codec = (codec.get("up", "fp32"), codec.get("down", "fp32"))
    up, down = codec if isinstance(codec, (tuple, list)) else (codec, codec)
    return tuple(c if isinstance(c, Codec) else codec_from_name(c) for c in (up, down))  # type: ignore[return-value]


def _fragments(given: Any, default: Fragmentation) -> Fragmentation:
    if given is None:
        return default
    return fragmentation_from_dict(given) if isinstance(given, Mapping) else given


def _outer(given: Any, default: Outer) -> Outer:
    if given is None:
        return default
    return outer_from_dict(given) if isinstance(given, Mapping) else given


def _check_keys(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown {what} {key!r}{nearest(key, known)}")
