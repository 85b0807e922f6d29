"""The methods of the family: functions that return a `Method` with the defaults of the paper that each is named after.

Every preset takes what its paper varies. For anything else: `dataclasses.replace(preset(…), field=…)`, or `Method(…)` itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from diloco.core.adopt import Adopt, Eager, Mix, Replace, adopt_from_dict
from diloco.core.codecs import Codec, codec_from_name
from diloco.core.fragments import Balanced, ByLayer, Fragmentation, Whole, fragmentation_from_dict
from diloco.core.merge import Mean, Merge, SenderMean
from diloco.core.merges import merge_from_dict
from diloco.core.method import Method, Partial, check_keys
from diloco.core.outer import SGD, DelayedNesterov, Nesterov, Outer, outer_from_dict
from diloco.core.quorum import AllLive, Called, Pushed, Quorum, quorum_from_dict
from diloco.core.radial import RadialDirectional
from diloco.core.schedule import SyncEvery
from diloco.core.values import nearest, whole_number
from diloco.errors import ConfigError


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
    *, sync_every: SyncEvery = 8, overlap: int = 0, offsets: Sequence[int] | None = None, mix: float = 0.0,
    fragments: Any = None, codec: Any = "fp32", error_feedback: float = False, weight: str = "uniform",
    quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """Average the parameters every H inner steps (FedAvg with every client taking part).

    θ_m ← Θ;  H times: θ_m ← InnerOpt(θ_m, g_m);  Θ ← 1/M Σ_m θ_m = Θ − 1·(1/M Σ_m (Θ − θ_m))

    Reference: Stich 2018, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """
    return _family("LocalSGD", "arXiv 1805.09767", SGD(lr=1.0), sync_every, overlap, offsets, mix, _fragments(fragments, Whole()),
                   codec, error_feedback, weight, quorum)  # fmt: skip


def DiLoCo(
    *, sync_every: SyncEvery = 500, overlap: int = 0, offsets: Sequence[int] | None = None, mix: float = 0.0,
    fragments: Any = None, codec: Any = "fp32", outer: Any = None, error_feedback: float = False,
    weight: str = "uniform", quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """Local steps, then an outer step with Nesterov momentum on the mean displacement.

        θ_m ← Θ;  H times: θ_m ← InnerOpt(θ_m, g_m);  Δ = 1/M Σ_m (Θ − θ_m);  Θ ← OuterOpt(Θ, Δ)

    Defaults: H = 500, outer Nesterov lr 0.7, momentum 0.9, fp32 on the wire, uniform weights.

    Reference: Douillard et al. 2023, DiLoCo, arXiv 2311.08105, algorithm 1.
    """
    return _family("DiLoCo", "arXiv 2311.08105", _outer(outer, Nesterov(lr=0.7, momentum=0.9)), sync_every, overlap, offsets, mix,
                   _fragments(fragments, Whole()), codec, error_feedback, weight, quorum)  # fmt: skip


def StreamingDiLoCo(
    *, sync_every: SyncEvery = 100, overlap: int = 1, offsets: Sequence[int] | None = None, mix: float = 0.5,
    fragments: Any = None, codec: Any = "e3m0", outer: Any = None, error_feedback: float = False,
    weight: str = "uniform", quorum: Quorum | None = None,
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


def MuLoCo(
    *, sync_every: SyncEvery = 30, overlap: int = 0, offsets: Sequence[int] | None = None, mix: float = 0.0,
    fragments: Any = None, codec: Any = "fp32", outer: Any = None, error_feedback: float = False,
    weight: str = "uniform", quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """DiLoCo with Muon as the inner optimizer: its outer gradients take a smaller momentum and survive fewer bits.

    The inner optimizer is the learner's own: `torch.optim.Muon` for 2-D weights, AdamW for embeddings, head and 1-D parameters.
    `diloco train` chooses it for a run with this preset.

    Defaults: H = 30, outer Nesterov lr 0.8, momentum 0.7, the middle of the paper's ranges.

    Reference: Thérien et al. 2025, MuLoCo, arXiv 2505.23725.
    """
    return _family("MuLoCo", "arXiv 2505.23725", _outer(outer, Nesterov(lr=0.8, momentum=0.7)), sync_every, overlap, offsets, mix,
                   _fragments(fragments, Whole()), codec, error_feedback, weight, quorum)  # fmt: skip


def SparseLoCo(
    *, sync_every: SyncEvery = 15, codec: Any = ("topk-128-2bit", "fp32"), error_feedback: float | None = None, outer: Any = None,
    average: Literal["senders", "learners"] = "senders", fragments: Any = None, weight: str = "uniform",
    quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """The largest entries of every chunk in 2 bits, what is left out fed back, and a plain outer step.

        e ← β·e + Δ;  send Q(TopK(e));  e ← e − sent;  Θ ← Θ − mean of what was sent

    `average`: a coordinate's mean over those who sent it (the reference implementation), or over all learners.

    Defaults: H = 15, k = 128 of each 4096, four bins, β = 0.95 (where the codec is lossy), outer SGD lr 1.

    Reference: Sarfi et al. 2025, SparseLoCo, arXiv 2508.15706.
    """
    if average not in ("senders", "learners"):
        raise ConfigError(f"average is {average!r}; use 'senders' or 'learners'.")
    up, down = _codecs(codec)
    if error_feedback is None:
        error_feedback = 0.0 if up.lossless else 0.95
    return Method(
        name="SparseLoCo", paper="arXiv 2508.15706", fragments=_fragments(fragments, Whole()), sync_every=sync_every, up=up,
        down=down, error_feedback=error_feedback, weight=weight, quorum=_quorum(quorum, AllLive()),
        merge=SenderMean() if average == "senders" else Mean(), outer=_outer(outer, SGD(lr=1.0)),
    )  # fmt: skip


def DelayedDiLoCo(
    *, sync_every: int = 30, intervals: int = 1, fragments: Any = None, codec: Any = "fp32", outer: Any = None,
    error_feedback: float = False, weight: str = "uniform", quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """A whole outer step of overlap: what is applied at a send is the mean that was sent one interval (or two) before.

        at t ≡ o_p (mod H): send Δ_m^(t) = anchor − θ_m;  Θ ← OuterOpt(Θ, Δ̄^(t−H));  θ_m ← Θ

    The outer optimizer is on each learner. It hides the exchange behind H inner steps and pays for it with quality: see
    `EagerDiLoCo`.

    Defaults: H = 30, τ = `intervals`·H, outer Nesterov lr 0.4, momentum 0.9.

    Reference: Kale et al. 2025, Eager Updates for Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """
    return _overlapped(
        "DelayedDiLoCo", Replace(), sync_every, intervals, fragments, codec, outer, error_feedback, weight, quorum
    )


def EagerDiLoCo(
    *, sync_every: int = 30, intervals: int = 1, fragments: Any = None, codec: Any = "fp32", outer: Any = None,
    error_feedback: float = False, weight: str = "uniform", quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """A whole outer step of overlap, with each learner's own newest outer gradient in place of its old one.

        Δ̃_m = Δ̄^(t−H) + 1/M·(Δ_m^(t) − Δ_m^(t−H));  θ_m ← anchor_m ← OuterOpt(anchor_m, Δ̃_m)

    The outer optimizer is on each learner, with an anchor and a state of its own. The global model is the outer step over the
    published means. With one learner it is DiLoCo without any delay.

    Defaults: H = 30, τ = `intervals`·H, outer Nesterov lr 0.4, momentum 0.9.

    Reference: Kale et al. 2025, Eager Updates for Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """
    return _overlapped(
        "EagerDiLoCo", Eager(), sync_every, intervals, fragments, codec, outer, error_feedback, weight, quorum
    )


def DecoupledDiLoCo(
    *, sync_every: SyncEvery = 24, overlap: int = 2, offsets: Sequence[int] | None = None, fragments: Any = None,
    codec: Any = "bf16", outer: Any = None, error_feedback: float = False, weight: str = "tokens^2/steps", quorum: Any = None,
    merge: Any = None, partial: Partial = "scale", adopt: Any = None,
) -> Method:  # fmt: skip
    """Learners that never wait: the syncer calls each fragment's turn and merges whoever answers in time.

        syncer, when a run clock of mean inner steps reaches the fragment's turn: call; wait for K answers, then for the grace window;
            Δ_p = RDA({anchor_m − θ_m}, w_m = tokens·(tokens/steps));  Θ_p ← OuterOpt(Θ_p, scale·Δ_p);  publish
        learner, at a step boundary: answer calls;  take every Θ_p that has arrived: θ_p ← Θ_p

    An answer that comes late goes into the next merge. A merge of part of the live weight moves the model by that part
    (`partial="scale"`). The overlap τ only sizes the grace window.

    Defaults: 24 balanced fragments, H = 24, τ = 2, K = 1 with grace 0.8, radial-directional merge with embeddings averaged, bf16
    both ways, outer Nesterov lr 0.7, momentum 0.9 (the lineage's; the paper names none).

    Reference: Decoupled DiLoCo, arXiv 2604.21428.
    """
    up, down = _codecs(codec)
    return Method(
        name="DecoupledDiLoCo", paper="arXiv 2604.21428", fragments=_fragments(fragments, Balanced(24)), sync_every=sync_every,
        overlap=overlap, offsets=None if offsets is None else tuple(offsets), wait=False, up=up, down=down,
        error_feedback=error_feedback, weight=weight, quorum=_quorum(quorum, Called()), merge=_merge(merge, RadialDirectional()),
        partial=partial, outer=_outer(outer, Nesterov(lr=0.7, momentum=0.9)), adopt=_adopt(adopt, Replace()),
    )  # fmt: skip


def AsyncDiLoCo(
    *, learners: int = 4, sync_every: int = 50, dynamic_steps: bool = True, fragments: Any = None, codec: Any = "fp32",
    outer: Any = None, error_feedback: float = False, weight: str = "tokens", quorum: Any = None, merge: Any = None,
    partial: Partial = "full", adopt: Any = None, wait: bool = False,
) -> Method:  # fmt: skip
    """Every learner pushes after its own H inner steps and is merged at once, with Delayed Nesterov on the syncer.

        on the s-th arriving outer gradient g (N = `learners`): buffer += g
            s mod N = 0:  m ← β·m + buffer/N;  Θ ← Θ − lr·((1 − cN + c)·β·m + g/N);  buffer = 0
            otherwise:    Θ ← Θ − lr·(c·β·m + g/N)
        learner w takes ⌊v_w / max v · H⌋ inner steps between two pushes (`dynamic_steps`), v its measured speed

    `merge=HeLoCo(…)` corrects each outer gradient towards the outer momentum and damps it by age (arXiv 2606.00271).

    Defaults: H = 50, outer lr 0.7, momentum 0.9, c = 0, N = `learners` = 4.

    Reference: Liu et al. 2024, Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135.
    """
    whole_number("learners", learners, minimum=1)
    up, down = _codecs(codec)
    return Method(
        name="AsyncDiLoCo", paper="arXiv 2401.09135", fragments=_fragments(fragments, Whole()), sync_every=sync_every, wait=wait,
        dynamic_steps=dynamic_steps, up=up, down=down, error_feedback=error_feedback, weight=weight,
        quorum=_quorum(quorum, Pushed()), merge=_merge(merge, Mean()), partial=partial,
        outer=_outer(outer, DelayedNesterov(lr=0.7, momentum=0.9, buffer=learners)), adopt=_adopt(adopt, Replace()),
    )  # fmt: skip


PRESETS: dict[str, Callable[..., Method]] = {
    preset.__name__: preset
    for preset in (
        DataParallel, LocalSGD, DiLoCo, StreamingDiLoCo, MuLoCo, SparseLoCo, DelayedDiLoCo, EagerDiLoCo, DecoupledDiLoCo, AsyncDiLoCo,
    )
}  # fmt: skip


def method_from_table(table: Mapping[str, Any]) -> Method:
    """A method from a run file's `[method]` table: `preset = "DiLoCo"`, the preset's keywords, and `REPLACEABLE` fields.

    `merge`, `screen`, `partial` and `adopt` replace the preset's answer where it has no such keyword.

    Raises:
        ConfigError: no or an unknown preset, a keyword that the preset does not take (names the nearest), or answers that
            do not go together.
    """
    keywords = dict(table)
    name = keywords.pop("preset", None)
    if name is None:
        raise ConfigError(f"[method] names no preset; set preset to one of {', '.join(PRESETS)}.")
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}{nearest(str(name), PRESETS)}")
    preset = PRESETS[name]
    own = inspect.signature(preset).parameters
    replaced = {key: keywords.pop(key) for key in [*keywords] if key not in own and key in REPLACEABLE}
    check_keys(keywords, [*own, *REPLACEABLE], f"{name} keyword")
    method = preset(**keywords)
    return Method.from_dict(method.to_dict() | replaced) if replaced else method


REPLACEABLE = ("merge", "screen", "partial", "adopt")
"""Fields of `Method` that a run file may set whatever the preset: none of them makes another method of it."""


def _family(
    name: str, paper: str, outer: Outer, sync_every: SyncEvery, overlap: int, offsets: Sequence[int] | None, mix: float,
    fragments: Fragmentation, codec: Any, error_feedback: float, weight: str, quorum: Quorum | None,
) -> Method:  # fmt: skip
    up, down = _codecs(codec)
    return Method(
        name=name, paper=paper, fragments=fragments, sync_every=sync_every, overlap=overlap,
        offsets=None if offsets is None else tuple(offsets), up=up, down=down, error_feedback=error_feedback,
        weight=weight, quorum=_quorum(quorum, AllLive()), outer=outer, adopt=Mix(mix) if mix else Replace(),
    )  # fmt: skip


def _overlapped(
    name: str, adopt: Adopt, sync_every: int, intervals: int, fragments: Any, codec: Any, outer: Any, error_feedback: float,
    weight: str, quorum: Any,
) -> Method:  # fmt: skip
    if intervals not in (1, 2):
        raise ConfigError(f"intervals is {intervals!r}; an outer step may be overlapped by 1 interval or 2.")
    up, down = _codecs(codec)
    return Method(
        name=name, paper="arXiv 2502.12996", fragments=_fragments(fragments, Whole()), sync_every=sync_every,
        overlap=intervals * sync_every, up=up, down=down, error_feedback=error_feedback, weight=weight,
        quorum=_quorum(quorum, AllLive()), outer=_outer(outer, Nesterov(lr=0.4, momentum=0.9)), outer_at="learners", adopt=adopt,
    )  # fmt: skip


def _codecs(codec: Any) -> tuple[Codec, Codec]:
    """One codec for both ways, or (up, down), or {"up": …, "down": …}; each a `Codec` or a name."""
    if isinstance(codec, Mapping):
        check_keys(codec, ["up", "down"], "codec direction")
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


def _merge(given: Any, default: Merge) -> Merge:
    if given is None:
        return default
    return merge_from_dict(given) if isinstance(given, Mapping) else given


def _adopt(given: Any, default: Adopt) -> Adopt:
    if given is None:
        return default
    return adopt_from_dict(given) if isinstance(given, Mapping) else given


def _quorum(given: Any, default: Quorum) -> Quorum:
    if given is None:
        return default
    return quorum_from_dict(given) if isinstance(given, Mapping) else given
