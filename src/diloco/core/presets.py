"""The methods of the family: functions that return a `Method` with the defaults of the paper that each is named after.

Every preset takes what its paper varies. For anything else: `dataclasses.replace(preset(…), field=…)`, or `Method(…)`
itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from diloco.core.adopt import Eager, Mix
from diloco.core.choices import nearest, one_of, whole_number
from diloco.core.codecs import Codec, codec_from_name
from diloco.core.fragments import Balanced, LayersOrBalanced
from diloco.core.merges import Mean, RadialDirectional, SenderMean
from diloco.core.method import Method, Partial, check_keys, parse_answer
from diloco.core.outer import SGD, DelayedNesterov, Nesterov
from diloco.core.quorum import Called, Pushed, Quorum
from diloco.core.schedule import SyncEvery
from diloco.errors import ConfigError


def DataParallel(
    *, average: Literal["gradients", "parameters"] = "gradients", fragments: Any = None, codec: Any = "fp32"
) -> Method:
    """Every learner takes every step on the mean gradient: the baseline that all others are compared with.

        g = 1/M Σ_m g_m;  θ ← InnerOpt(θ, g)

    `average="parameters"` averages θ after every step instead. That equals averaging gradients only where the inner
    optimizer is stateless, so a learner refuses any other optimizer.
    """
    one_of("gradients", "parameters")("average", average)
    where = "Dean et al. 2012, Large Scale Distributed Deep Networks"
    return _method("DataParallel", where, locals(), exchanged=average)


def LocalSGD(
    *, sync_every: SyncEvery = 8, overlap: int = 0, offsets: Sequence[int] | None = None, mix: float = 0.0,
    fragments: Any = None, codec: Any = "fp32", error_feedback: float = False, weight: str = "uniform",
    quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """Average the parameters every H inner steps (FedAvg with every client taking part).

    θ_m ← Θ;  H times: θ_m ← InnerOpt(θ_m, g_m);  Θ ← 1/M Σ_m θ_m = Θ − 1·(1/M Σ_m (Θ − θ_m))

    Reference: Stich 2018, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """
    return _method("LocalSGD", "arXiv 1805.09767", locals(), outer=SGD(lr=1.0))


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
    return _method("DiLoCo", "arXiv 2311.08105", locals(), outer=Nesterov(lr=0.7, momentum=0.9))


def StreamingDiLoCo(
    *, sync_every: SyncEvery = 100, overlap: int = 1, offsets: Sequence[int] | None = None, mix: float = 0.5,
    fragments: Any = None, codec: Any = "e3m0", outer: Any = None, error_feedback: float = False,
    weight: str = "uniform", quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """DiLoCo by fragments, with communication hidden behind τ inner steps and 4 bits on the wire.

        send at t ≡ o_p (mod H): Δ_{m,p} = anchor_p − θ_{m,p}
        apply at t + τ:          Θ_p ← OuterOpt(Θ_p, 1/M Σ_m Δ_{m,p});  θ_{m,p} ← α·θ_{m,p} + (1 − α)·Θ_p

    Defaults: H = 100, τ = 1, α = 0.5, fragments of three layers strided with the embedding apart (of a model without a
    list of layers: 4 balanced ones), E3M0 both ways, outer Nesterov lr 0.4, momentum 0.9.

    Reference: Douillard et al. 2025, Streaming DiLoCo with overlapping communication, arXiv 2501.18512, algorithm 2.
    """
    return _method(
        "StreamingDiLoCo", "arXiv 2501.18512", locals(), fragments=LayersOrBalanced(),
        outer=Nesterov(lr=0.4, momentum=0.9),
    )  # fmt: skip


def MuLoCo(
    *, sync_every: SyncEvery = 30, overlap: int = 0, offsets: Sequence[int] | None = None, mix: float = 0.0,
    fragments: Any = None, codec: Any = "fp32", outer: Any = None, error_feedback: float = False,
    weight: str = "uniform", quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """DiLoCo with Muon as the inner optimizer: its outer gradients take a smaller momentum and survive fewer bits.

    The inner optimizer is the learner's own: `torch.optim.Muon` for 2-D weights, AdamW for embeddings, head and 1-D
    parameters. `diloco train` chooses it for a run with this preset.

    Defaults: H = 30, outer Nesterov lr 0.8, momentum 0.7, the middle of the paper's ranges.

    Reference: Thérien et al. 2025, MuLoCo, arXiv 2505.23725.
    """
    return _method("MuLoCo", "arXiv 2505.23725", locals(), outer=Nesterov(lr=0.8, momentum=0.7))


def SparseLoCo(
    *, sync_every: SyncEvery = 15, codec: Any = ("topk-128-2bit", "fp32"), error_feedback: float | None = None,
    outer: Any = None,
    average: Literal["senders", "learners"] = "senders", fragments: Any = None, weight: str = "uniform",
    quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """The largest entries of every chunk in 2 bits, what is left out fed back, and a plain outer step.

        e ← β·e + Δ;  send Q(TopK(e));  e ← e − sent;  Θ ← Θ − mean of what was sent

    `average`: a coordinate's mean over the learners that sent it (the reference implementation), or over all learners.

    Defaults: H = 15, k = 128 of each 4096, four bins, β = 0.95 (where the codec is lossy), outer SGD lr 1.

    Reference: Sarfi et al. 2025, SparseLoCo, arXiv 2508.15706.
    """
    one_of("senders", "learners")("average", average)
    if error_feedback is None:
        error_feedback = 0.0 if _codecs(codec)[0].lossless else 0.95
    merge = SenderMean() if average == "senders" else Mean()
    return _method("SparseLoCo", "arXiv 2508.15706", locals(), outer=SGD(lr=1.0))


def DelayedDiLoCo(
    *, sync_every: int = 30, intervals: int = 1, fragments: Any = None, codec: Any = "fp32", outer: Any = None,
    error_feedback: float = False, weight: str = "uniform", quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """An overlap of a whole interval (or two): at each send, the mean of the outer gradients sent before is applied.

        at t ≡ o_p (mod H): send Δ_m^(t) = anchor − θ_m;  Θ ← OuterOpt(Θ, Δ̄^(t−H));  θ_m ← Θ

    The outer optimizer is on each learner. The exchange is hidden behind H inner steps, at a cost in quality that
    `EagerDiLoCo` mostly avoids.

    Defaults: H = 30, τ = `intervals`·H, outer Nesterov lr 0.4, momentum 0.9.

    Reference: Kale et al. 2025, Eager Updates for Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """
    return _method(
        "DelayedDiLoCo", "arXiv 2502.12996", locals(), overlap=_whole_intervals(intervals) * sync_every,
        outer=Nesterov(lr=0.4, momentum=0.9), outer_at="learners",
    )  # fmt: skip


def EagerDiLoCo(
    *, sync_every: int = 30, intervals: int = 1, fragments: Any = None, codec: Any = "fp32", outer: Any = None,
    error_feedback: float = False, weight: str = "uniform", quorum: Quorum | None = None,
) -> Method:  # fmt: skip
    """An overlap of a whole interval (or two), with each learner's own newest outer gradient in place of its old one.

        Δ̃_m = Δ̄^(t−H) + 1/M·(Δ_m^(t) − Δ_m^(t−H));  θ_m ← anchor_m ← OuterOpt(anchor_m, Δ̃_m)

    The outer optimizer is on each learner, with an anchor and a state of its own. The global model is the outer step
    over the published means. With one learner it is DiLoCo without any delay.

    Defaults: H = 30, τ = `intervals`·H, outer Nesterov lr 0.4, momentum 0.9.

    Reference: Kale et al. 2025, Eager Updates for Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """
    delayed = DelayedDiLoCo(
        sync_every=sync_every, intervals=intervals, fragments=fragments, codec=codec, outer=outer,
        error_feedback=error_feedback, weight=weight, quorum=quorum,
    )  # fmt: skip
    return replace(delayed, name="EagerDiLoCo", adopt=Eager())


def DecoupledDiLoCo(
    *, sync_every: SyncEvery = 24, overlap: int = 2, offsets: Sequence[int] | None = None, fragments: Any = None,
    codec: Any = "bf16", outer: Any = None, error_feedback: float = False, weight: str = "tokens^2/steps",
    quorum: Any = None,
    merge: Any = None, partial: Partial = "scale", adopt: Any = None,
) -> Method:  # fmt: skip
    """Learners never wait: the syncer calls each fragment in its turn and merges the answers that arrive in time.

        syncer, when the run clock (mean inner steps of the learners) reaches the fragment's turn: call; wait for K
            answers, then for the grace window; Δ_p = RDA({anchor_m − θ_m}, w_m = tokens·(tokens/steps));
            Θ_p ← OuterOpt(Θ_p, scale·Δ_p);  publish
        learner, at a step boundary: answer calls;  adopt every Θ_p that has arrived: θ_p ← Θ_p

    A late answer joins the next merge. A merge of a part of the live weight moves the model by that part
    (`partial="scale"`). The overlap τ only sizes the grace window.

    Defaults: 24 balanced fragments, H = 24, τ = 2, K = 1 with grace 0.8, radial-directional merge with embeddings
    averaged, bf16 both ways, outer Nesterov lr 0.7, momentum 0.9 (the lineage's; the paper names none).

    Reference: Decoupled DiLoCo, arXiv 2604.21428.
    """
    return _method(
        "DecoupledDiLoCo", "arXiv 2604.21428", locals(), fragments=Balanced(24), wait=False, quorum=Called(),
        merge=RadialDirectional(), outer=Nesterov(lr=0.7, momentum=0.9),
    )  # fmt: skip


def AsyncDiLoCo(
    *, learners: int = 4, sync_every: int = 50, dynamic_steps: bool | None = None, fragments: Any = None,
    codec: Any = "fp32",
    outer: Any = None, error_feedback: float = False, weight: str = "tokens", quorum: Any = None, merge: Any = None,
    partial: Partial = "full", adopt: Any = None, wait: bool = False,
) -> Method:  # fmt: skip
    """Every learner pushes after its own H inner steps, and each push is merged at once, with Delayed Nesterov.

        on the s-th arriving outer gradient g (N = `learners`): buffer += g
            s mod N = 0:  m ← β·m + buffer/N;  Θ ← Θ − lr·((1 − cN + c)·β·m + g/N);  buffer = 0
            otherwise:    Θ ← Θ − lr·(c·β·m + g/N)
        learner w takes ⌊v_w / max v · H⌋ inner steps between two pushes, v its measured speed

    `dynamic_steps` turns this speed-dependent interval on or off; None: as in `quorum`, or on where `quorum` is None.

    `merge=HeLoCo(…)` corrects each outer gradient towards the outer momentum and damps it by age (arXiv 2606.00271).

    Defaults: H = 50, outer lr 0.7, momentum 0.9, c = 0, N = `learners` = 4.

    Reference: Liu et al. 2024, Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135.
    """
    whole_number("learners", learners, minimum=1)
    quorum = Pushed(dynamic_steps=True) if quorum is None else quorum
    if dynamic_steps is not None:
        quorum = parse_answer("quorum", quorum) if isinstance(quorum, Mapping) else quorum
        if not isinstance(quorum, Pushed):
            raise ConfigError(f"dynamic_steps belongs to Pushed(), not {quorum}; drop it or use quorum=Pushed().")
        quorum = replace(quorum, dynamic_steps=dynamic_steps)
    delayed = DelayedNesterov(lr=0.7, momentum=0.9, buffer=learners)
    return _method("AsyncDiLoCo", "arXiv 2401.09135", locals(), outer=delayed)


PRESETS: dict[str, Callable[..., Method]] = {
    preset.__name__: preset
    for preset in (
        DataParallel, LocalSGD, DiLoCo, StreamingDiLoCo, MuLoCo, SparseLoCo, DelayedDiLoCo, EagerDiLoCo,
        DecoupledDiLoCo, AsyncDiLoCo,
    )
}  # fmt: skip


def method_from_table(table: Mapping[str, Any], source: str = "") -> Method:
    """A method from a run file's `[method]` table: `preset = "DiLoCo"`, the preset's keywords, and `REPLACEABLE`
    fields.

    `merge`, `screen`, `partial` and `adopt` replace the preset's answer where the preset has no such keyword.

    Arguments:
        source: the run file, for errors.

    Raises:
        ConfigError: no or an unknown preset, a keyword that the preset does not take (names the nearest), or answers
            that do not go together.
    """
    try:
        return _from_table(table)
    except ConfigError as error:
        raise ConfigError(f"{source and f'{source}: '}[method] {error}") from error


def _from_table(table: Mapping[str, Any]) -> Method:
    keywords = dict(table)
    name = keywords.pop("preset", None)
    if name is None:
        raise ConfigError(f"names no preset; set preset to one of {', '.join(PRESETS)}.")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}{nearest(str(name), PRESETS)}")
    preset = PRESETS[name]
    own = inspect.signature(preset).parameters
    replaced = {key: keywords.pop(key) for key in [*keywords] if key not in own and key in REPLACEABLE}
    check_keys(keywords, [*own, *REPLACEABLE], f"{name} keyword")
    method = preset(**keywords)
    return Method.from_dict(method.to_dict() | replaced) if replaced else method


REPLACEABLE = ("merge", "screen", "partial", "adopt")
"""Fields of `Method` that a run file may set under every preset: they vary a method and do not make another one."""


OPTIONAL = ("fragments", "quorum", "outer", "merge", "screen", "adopt", "offsets")
"""Arguments of presets for which None means the default of `Method`."""


def _method(name: str, paper: str, given: Mapping[str, Any], **answers: Any) -> Method:
    """The method of a preset.

    Arguments:
        given: the preset's `locals()`. Those with the name of a question are its answers: each is a value, or the table
            of one from a run file.
        answers: where none is given.
    """
    answers["up"], answers["down"] = _codecs(given["codec"])
    if given.get("mix"):
        answers["adopt"] = Mix(given["mix"])
    for field in fields(Method):
        if field.name in given and (given[field.name] is not None or field.name not in OPTIONAL):
            answers[field.name] = given[field.name]
    read = {key: parse_answer(key, each) if isinstance(each, Mapping) else each for key, each in answers.items()}
    return Method(name=name, paper=paper, **read)


def _whole_intervals(intervals: int) -> int:
    if intervals not in (1, 2):
        raise ConfigError(f"intervals is {intervals!r}; an outer step may be overlapped by 1 interval or 2.")
    return intervals


def _codecs(codec: Any) -> tuple[Codec, Codec]:
    """One codec for both ways, or (up, down), or {"up": …, "down": …}; each a `Codec` or a name."""
    if isinstance(codec, Mapping):
        check_keys(codec, ["up", "down"], "codec direction")
        codec = (codec.get("up", "fp32"), codec.get("down", "fp32"))
    both = codec if isinstance(codec, (tuple, list)) else (codec, codec)
    if len(both) != 2:
        raise ConfigError(f"codec is {codec!r}; name one codec for both directions, or two: up and down.")
    return tuple(c if isinstance(c, Codec) else codec_from_name(c) for c in both)  # type: ignore[return-value]
