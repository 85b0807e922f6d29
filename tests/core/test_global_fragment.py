"""Closing and advancing: what is published is what its owner holds, whole or in shards, and nothing is written to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from diloco.core.codecs import CODECS, FP32, SEGMENT_ELEMENTS, Codec, Int4
from diloco.core.codecs.codec import Scratch
from diloco.core.fragments import digest
from diloco.core.global_fragment import GlobalFragment, Publication, apply_update, close, published_mean
from diloco.core.layout import Placement, TensorSpec
from diloco.core.memory import flush_denormals
from diloco.core.merges import Encoded, Mean, NormOutliers
from diloco.core.method import Method, OuterAt, Partial
from diloco.core.outer import SGD, Adam, DelayedNesterov, Nesterov, Outer
from diloco.core.presets import DataParallel, DecoupledDiLoCo, DiLoCo, LocalSGD
from diloco.core.update import Update
from diloco.errors import CorruptPayloadError, DigestError, NonFiniteError, VersionError

N = 2 * SEGMENT_ELEMENTS + 1001
LEARNERS = 3
SMALLEST_NORMAL = 2.0**-126
OUTERS = (SGD(lr=1.0), Nesterov(lr=0.7, momentum=0.9), Adam(lr=0.1))


def method(up: str, down: str, outer: Outer = OUTERS[1]) -> Method:
    return DiLoCo(codec=(up, down), outer=outer)


def payloads(codec: Codec, num_elements: int, scale: float = 0.01) -> list[Tensor]:
    return [codec.encode(scale * torch.randn(num_elements)) for _ in range(LEARNERS)]


def places(num_elements: int) -> tuple[Placement, ...]:
    return (Placement(TensorSpec("w", (num_elements,), "float32"), 0),)


def brought(payloads: list[Tensor], weights: list[float] | None = None) -> list[Encoded]:
    shares = weights or [1.0] * len(payloads)
    return [
        Encoded(f"learner-{i}", (each,), share) for i, (each, share) in enumerate(zip(payloads, shares, strict=True))
    ]


def held_of(theta: Tensor, state: Mapping[str, Tensor] | None = None, residual: Tensor | None = None) -> GlobalFragment:
    return GlobalFragment(0, 0, theta, state or {}, residual, digest(theta))


def advanced(method: Method, theta: Tensor, closed: Publication) -> Tensor:
    """By another holder of the version before."""
    return apply_update(
        method,
        replace(held_of(theta), version=closed.update.base),
        closed.update,
        closed.payload,
        places(theta.numel()),
    ).held.theta


@pytest.mark.parametrize("down", CODECS)
@pytest.mark.parametrize("up", CODECS)
def test_every_holder_of_a_version_has_the_same_bits(up: str, down: str) -> None:
    """Over several rounds, `apply_update` gives the owner's theta bit for bit, for every pair of codecs."""
    how = method(up, down)
    theta = torch.randn(1003)
    held, other = GlobalFragment.first(how, 0, theta), held_of(theta)
    for version in range(1, 5):
        closed = close(how, held, brought(payloads(how.up, 1003), [1.0, 2.0, 1.0]), places(1003))
        assert closed.payload.numel() == how.down.encoded_bytes(1003)
        held, other = (
            closed.held,
            apply_update(how, other, closed.update, closed.payload, places(other.theta.numel())).held,
        )
        assert (held.version, other.version) == (version, version)
        assert held.digest == other.digest == digest(other.theta) == digest(held.theta)
        assert (held.residual is None) == how.down.lossless


@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: type(outer).__name__)
@pytest.mark.parametrize(("up", "down"), [("fp32", "fp32"), ("int4", "fp32"), ("e3m0", "e3m0"), ("int8", "bf16")])
def test_shards_give_the_bits_of_the_whole(up: str, down: str, outer: Outer) -> None:
    """Every rank of a process group closes the round of its own run of segments; joined, they are the round of the
    whole."""
    how = method(up, down, outer)
    theta, contributions = torch.randn(N), payloads(how.up, N)
    held = GlobalFragment.first(how, 0, theta)
    whole = close(how, held, brought(contributions), places(N))
    cuts = [(0, 1), (1, 2), (2, 3)]
    parts = []
    for first, last in cuts:
        shard = held.part(slice(first * SEGMENT_ELEMENTS, min(last * SEGMENT_ELEMENTS, N)))
        span = how.up.segment_span(N, first, last)
        parts.append(close(how, shard, brought([each[span] for each in contributions]), places(shard.theta.numel())))
    assert torch.equal(torch.cat([part.held.theta for part in parts]), whole.held.theta)
    assert torch.equal(torch.cat([part.payload for part in parts]), whole.payload)
    for name, value in whole.held.outer_state.items():
        pieces = [part.held.outer_state[name] for part in parts]
        assert torch.equal(torch.cat(pieces) if value.dim() else pieces[0], value)
    if whole.held.residual is not None:
        residuals = [part.held.residual for part in parts if part.held.residual is not None]
        assert torch.equal(torch.cat(residuals), whole.held.residual)


@pytest.mark.parametrize("down", [name for name, codec in CODECS.items() if not codec.lossless])
def test_what_a_lossy_update_leaves_out_comes_with_a_later_one(down: str) -> None:
    """Σ decoded changes + residual = Σ true changes, so the published model never drifts away from the exact one.

    The exact one takes the same merged outer gradients; SGD, because its steps do not depend on where the model is.
    """
    how = method("fp32", down, SGD(lr=1.0))
    exact = torch.randn(501)
    held = held_of(exact)
    worst = 0.0
    for _ in range(60):
        delta = 0.01 * torch.randn(501)
        exact = exact - delta
        held = close(how, held, brought([how.up.encode(delta)]), places(501)).held
        residual = held.residual
        assert residual is not None
        worst = max(worst, float(residual.abs().max()))
        # 60 fp32 additions of numbers below 4, each off by at most 2⁻²³ · 4 / 2, on either side
        torch.testing.assert_close(held.theta + residual, exact, rtol=0, atol=60 * 2 * 2.0**-22)
    assert worst < 0.08  # and what is owed stays of the order of one change (0.01 a coordinate, 4 bits in blocks)


def test_denormals_become_plus_zero() -> None:
    tiny = torch.tensor([2.0**-127, -(2.0**-140), -0.0, SMALLEST_NORMAL, -SMALLEST_NORMAL, 1.0])
    flushed = flush_denormals(tiny.clone())
    assert flushed.tolist() == [0.0, 0.0, 0.0, SMALLEST_NORMAL, -SMALLEST_NORMAL, 1.0]
    assert not torch.signbit(flushed[:3]).any()


@pytest.mark.parametrize("num_elements", [0, 1, 65_535, 65_536, 65_537, 150_001])
def test_only_denormals_and_minus_zero_are_flushed_whatever_the_length(num_elements: int) -> None:
    """Values of every exponent and sign, with zeros, infinities and NaN; by their bits, since a NaN is not equal to
    itself."""
    bits = torch.randint(-(2**31), 2**31, (num_elements,), dtype=torch.int64).to(torch.int32)
    magnitudes = [0, 1, 0x7FFFFF, 0x800000, 0x800001, 0x7F800000, 0x7FC00001, 0x3F800000]
    edges = torch.tensor([sign + edge for edge in magnitudes for sign in (0, -(2**31))], dtype=torch.int32)
    for end in (bits[: len(edges)], bits[-len(edges) :]):
        end.copy_(edges[: len(end)])
    x = bits.view(torch.float32)
    expected = torch.where(x.abs() < SMALLEST_NORMAL, 0.0, x).view(torch.int32)
    assert torch.equal(flush_denormals(x.clone()).view(torch.int32), expected)


@pytest.mark.parametrize("down", ["fp32", "int8"])
def test_published_values_hold_no_denormals(down: str) -> None:
    how = method("fp32", down, SGD(lr=1.0))
    theta = torch.tensor([2.0**-126, 1.0])
    closed = close(how, held_of(theta), brought([how.up.encode(torch.tensor([2.0**-127, 0.0]))]), places(2))
    assert closed.held.theta[0] in (0.0, 2.0**-126)
    assert digest(advanced(how, theta, closed)) == closed.held.digest


@pytest.mark.parametrize("down", ["fp32", "int8"])
def test_with_gradients_the_answer_is_their_mean(down: str) -> None:
    how = DataParallel(codec=("fp32", down))
    gradients = [torch.randn(70) for _ in range(LEARNERS)]
    closed = close(how, held_of(torch.randn(70)), brought([how.up.encode(g) for g in gradients]), places(70))
    held = closed.held
    mean = (gradients[0] + gradients[1] + gradients[2]) / 3
    if how.down.lossless:
        assert torch.equal(held.theta, mean)
    else:
        assert held.residual is not None
        torch.testing.assert_close(held.theta + held.residual, mean, rtol=0, atol=2.0**-22)  # one rounding each way
    assert digest(advanced(how, torch.randn(70), closed)) == held.digest  # whatever is held


def test_the_scale_multiplies_the_merged_outer_gradient_once() -> None:
    how = method("fp32", "fp32", SGD(lr=1.0))
    theta, delta = torch.randn(10), torch.randn(10)
    closed = close(how, held_of(theta), brought([how.up.encode(delta)]), places(10), scale=0.25)
    assert torch.equal(closed.held.theta, theta - 0.25 * delta)


def test_one_learner_of_lr_1_publishes_its_own_parameters() -> None:
    """LocalSGD with M = 1: Θ − (Θ − θ). Not bit for bit θ: the displacement is rounded once."""
    how = LocalSGD()
    theta, local = torch.randn(100), torch.randn(100)
    closed = close(how, held_of(theta), brought([how.up.encode(theta - local)]), places(100))
    torch.testing.assert_close(closed.held.theta, local, rtol=0, atol=2.0**-21)  # one rounding of a number below 8


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("down", ["fp32", "e3m0"])
@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: type(outer).__name__)
@pytest.mark.parametrize("bad", ["none", "nan", "short", "overflow"])
def test_inputs_stay_as_they_are_whatever_comes_of_it(bad: str, outer: Outer, down: str) -> None:
    how = method("fp32", down, outer)
    theta, state, residual = torch.randn(64), outer.init(64), torch.randn(64) if down != "fp32" else None
    contributions = payloads(how.up, 64, scale=1.0)
    if bad == "nan":
        contributions[1].view(torch.float32)[5] = torch.nan
    if bad == "short":
        contributions[1] = contributions[1][:-4]
    if bad == "overflow":
        contributions = [how.up.encode(torch.full((64,), 3e38)) for _ in range(LEARNERS)]
    values = [theta, *state.values(), *([] if residual is None else [residual]), *contributions]
    before = bits(values)

    held = held_of(theta, state, residual)
    if bad == "none":
        assert torch.isfinite(close(how, held, brought(contributions), places(64)).held.theta).all()
    else:
        with pytest.raises((NonFiniteError, CorruptPayloadError)):
            close(how, held, brought(contributions), places(64))
    assert bits(values) == before


MANY = 33 * SEGMENT_ELEMENTS + 5
"""Elements of more than one run, however they are taken."""


def all_of(held: GlobalFragment) -> list[Tensor]:
    return [held.theta, *held.outer_state.values(), *([] if held.residual is None else [held.residual])]


def methods(down: str) -> dict[str, Method]:
    return {
        **{type(outer).__name__: method("int8", down, outer) for outer in OUTERS},
        "on the learners": replace(method("int8", down), outer_at="learners"),
        "gradients": DataParallel(codec=("int8", down)),
    }


@pytest.mark.parametrize("down", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize("kind", methods("fp32"))
def test_in_place_gives_the_same_bits_in_the_same_memory(kind: str, down: str) -> None:
    """Of the version before, what learners fetch stays: Θ, and the outer state where they take the outer step."""
    how = methods(down)[kind]
    held = other = GlobalFragment.first(how, 0, torch.randn(MANY))
    for _ in range(2):
        contributions = brought(payloads(how.up, MANY))
        fetched = [held.theta, *(held.outer_state.values() if how.outer_at == "learners" else [])]
        before = bits(fetched)
        closed = close(how, held, contributions, places(MANY))
        in_place = close(how, other, contributions, places(MANY), in_place=True)
        assert in_place.update == closed.update
        assert bits([in_place.payload, *all_of(in_place.held)]) == bits([closed.payload, *all_of(closed.held)])
        assert bits([other.theta, *(other.outer_state.values() if how.outer_at == "learners" else [])]) == before
        if other.residual is not None:
            assert in_place.held.residual is other.residual
        if how.outer_at == "syncer" and "momentum" in other.outer_state:
            assert in_place.held.outer_state["momentum"] is other.outer_state["momentum"]
        held, other = closed.held, in_place.held


@pytest.mark.parametrize("down", ["fp32", "fp16", "int4"])
@pytest.mark.parametrize(
    ("bad", "value"),
    [("nan", torch.nan), ("merge", 3e38), ("outer step", 3e37), ("codec", 1e6)],
    ids=str,
)
def test_a_round_that_is_refused_at_its_end_leaves_the_version_whole(bad: str, value: float, down: str) -> None:
    """In place too: only the last element cannot be used."""
    how = method("fp32", down, Nesterov(lr=1e3 if bad == "outer step" else 1.0))
    held = GlobalFragment.first(how, 0, torch.randn(MANY))
    held = close(how, held, brought(payloads(how.up, MANY, scale=1e-6)), places(MANY)).held
    before = bits(all_of(held))
    contributions = payloads(how.up, MANY, scale=1e-6)
    for each in contributions:
        each.view(torch.float32)[-1] = value
    if bad == "codec" and down != "fp16":
        assert close(how, held, brought(contributions), places(MANY), in_place=True).held.theta.isfinite().all()
        return
    with pytest.raises((NonFiniteError, CorruptPayloadError)):
        close(how, held, brought(contributions), places(MANY), in_place=True)
    assert bits(all_of(held)) == before


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("down", ["fp32", "int8", "e3m0"])
@pytest.mark.parametrize(
    ("outer_at", "outer", "value"),
    [
        ("learners", SGD(lr=100.0), 3e37),
        ("learners", Nesterov(lr=100.0), 3e37),
        ("syncer", Adam(lr=0.1), 1e20),
        ("learners", Adam(lr=0.1), 1e20),
        ("syncer", DelayedNesterov(lr=1e-3, buffer=4), 2.5e38),
    ],
    ids=str,
)
def test_an_outer_state_or_a_step_of_the_learners_that_overflows_is_refused(
    outer_at: OuterAt, outer: Outer, value: float, down: str, in_place: bool
) -> None:
    """Adam's second moment holds no more than 1e38: its step is finite even then, and zero from then on."""
    how = replace(method("fp32", down, outer), outer_at=outer_at)
    held = GlobalFragment.first(how, 0, torch.randn(MANY))
    held = close(how, held, brought(payloads(how.up, MANY, scale=1e-6)), places(MANY)).held
    bad = payloads(how.up, MANY, scale=1e-6)[:1]
    bad[0].view(torch.float32)[-1] = value
    if isinstance(outer, DelayedNesterov):  # it gathers outer gradients: the second one is too much
        held = close(how, held, brought(bad), places(MANY), in_place=in_place).held
    before = bits(all_of(held))
    with pytest.raises(NonFiniteError, match="overflows fp32"):
        close(how, held, brought(bad), places(MANY), in_place=in_place)
    assert bits(all_of(held)) == before


@dataclass(frozen=True)
class Unreadable(Int4):
    """Cannot decode what it encodes."""

    value_of: ClassVar[Any] = None  # loops cannot read it, so `decode_rows` does

    def decode_rows(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        raise CorruptPayloadError("unreadable")


def test_a_failure_after_the_last_refusal_is_none_itself() -> None:
    """The version may be overwritten in part by then, and must not be used as if the round had been refused."""
    how = DiLoCo(codec=("fp32", Unreadable()))
    held = GlobalFragment.first(how, 0, torch.randn(64))
    with pytest.raises(AssertionError, match="int4 cannot decode what it has encoded"):
        close(how, held, brought(payloads(how.up, 64)), places(64), in_place=True)


@pytest.mark.parametrize("down", ["fp32", "e3m0"])
def test_an_outer_step_that_overflows_is_refused(down: str) -> None:
    how = method("fp32", down, SGD(lr=100.0))
    with pytest.raises(NonFiniteError):
        close(how, held_of(torch.zeros(4)), brought([how.up.encode(torch.full((4,), 3e37))]), places(4))


@pytest.mark.parametrize("name", CODECS)
def test_a_damaged_update_is_refused(name: str) -> None:
    how = method("fp32", name)
    held = GlobalFragment.first(how, 0, torch.randn(64))
    closed = close(how, held, brought(payloads(how.up, 64)), places(64))
    with pytest.raises(CorruptPayloadError):
        apply_update(how, held, closed.update, closed.payload[:-1], places(held.theta.numel()))


@pytest.mark.parametrize("down", ["fp32", "int8"])
@pytest.mark.parametrize("outer_at", ["syncer", "learners"])
def test_other_bits_than_were_published_are_refused(down: str, outer_at: OuterAt) -> None:
    how = replace(method("fp32", down), outer_at=outer_at)
    held = GlobalFragment.first(how, 0, torch.randn(64))
    closed = close(how, held, brought(payloads(how.up, 64)), places(64))
    damaged = closed.payload.clone()
    damaged[-1] ^= 1
    with pytest.raises(DigestError, match="version 1 of fragment 0"):
        apply_update(how, held, closed.update, damaged, places(held.theta.numel()))
    other = replace(held, theta=held.theta + 1)
    if closed.update.lossless:
        assert (
            apply_update(how, other, closed.update, closed.payload, places(other.theta.numel())).held.digest
            == closed.held.digest
        )
    else:
        with pytest.raises(DigestError):
            apply_update(how, other, closed.update, closed.payload, places(other.theta.numel()))


def test_a_change_applies_to_its_base_only() -> None:
    """A lossless update needs no base, and a version that is far behind may become it."""
    for down in ("fp32", "int8"):
        how = method("fp32", down)
        held = GlobalFragment.first(how, 0, torch.randn(64), version=4)
        closed = close(how, held, brought(payloads(how.up, 64)), places(64))
        behind = replace(held, version=2)
        if how.down.lossless:
            assert (
                apply_update(how, behind, closed.update, closed.payload, places(behind.theta.numel())).held.version == 5
            )
        else:
            with pytest.raises(VersionError, match="version 4 to 5 does not fit version 2"):
                apply_update(how, behind, closed.update, closed.payload, places(behind.theta.numel()))


@pytest.mark.parametrize("down", ["fp32", "e3m0"])
def test_what_is_published_of_a_mean_is_what_every_holder_steps_with(down: str) -> None:
    how = replace(method("int8", down), outer_at="learners")
    held = GlobalFragment.first(how, 0, torch.randn(N))
    closed = close(how, held, brought(payloads(how.up, N)), places(N))
    other = apply_update(how, held, closed.update, closed.payload, places(held.theta.numel()))
    mean = published_mean(how, closed.payload, N)
    assert mean is not None
    assert other.mean is not None
    assert torch.equal(other.mean, mean)
    assert torch.equal(other.held.outer_state["momentum"], closed.held.outer_state["momentum"])
    assert published_mean(method("int8", down), closed.payload, N) is None


def test_lossless_updates_are_not_copied() -> None:
    """The payload is the new version itself, for its author and for its receivers."""
    how = method("int8", "fp32")
    held = GlobalFragment.first(how, 0, torch.randn(N))
    closed = close(how, held, brought(payloads(how.up, N)), places(N))
    other = apply_update(how, held, closed.update, closed.payload, places(held.theta.numel())).held
    assert closed.payload.data_ptr() == closed.held.theta.data_ptr() == other.theta.data_ptr()


def test_a_version_survives_a_checkpoint() -> None:
    how = method("int8", "int8")
    held = close(how, GlobalFragment.first(how, 3, torch.randn(64)), brought(payloads(how.up, 64)), places(64)).held
    again = GlobalFragment.from_state_dict(3, held.state_dict())
    assert (again.fragment, again.version, again.digest) == (3, 1, held.digest)
    assert held.residual is not None
    assert again.residual is not None
    assert torch.equal(again.residual, held.residual)
    assert torch.equal(again.outer_state["momentum"], held.outer_state["momentum"])


def test_an_update_may_be_kept_while_the_next_is_computed() -> None:
    """theta is published: what comes later must not change it."""
    how = replace(method("fp32", "fp32"), weight="uniform")
    first = close(how, GlobalFragment.first(how, 0, torch.randn(64)), brought(payloads(how.up, 64)), places(64))
    kept = first.held.theta.clone()
    close(how, first.held, brought(payloads(how.up, 64)), places(64))
    assert torch.equal(first.held.theta, kept)
    assert torch.equal(advanced(how, torch.zeros(64), first), kept)


def test_an_update_survives_as_plain_values_and_as_json() -> None:
    update = Update(1, 4, 5, ("site-a", "site-b"), (1.0, 2.5), 0.5, "d1", lossless=False)
    assert Update.from_dict(update.as_dict()) == update
    assert Update.from_dict(json.loads(json.dumps(update.as_dict()))) == update


# --- screens ----------------------------------------------------------------------------------------------------------


def screened(contributions: list[Encoded], num_elements: int = 40) -> Publication:
    how = replace(DiLoCo(weight="tokens"), screen=NormOutliers(3.0))
    two = (
        Placement(TensorSpec("a", (30,), "float32"), 0),
        Placement(TensorSpec("b", (num_elements - 30,), "float32"), 30),
    )
    return close(how, GlobalFragment.first(how, 0, torch.zeros(num_elements)), contributions, two)


def test_a_round_goes_on_without_those_that_are_refused() -> None:
    values = [torch.randn(40) for _ in range(4)]
    sent = [FP32().encode(50 * each if i == 1 else each) for i, each in enumerate(values)]
    closed = screened(brought(sent))
    assert closed.refused == ("learner-1",)
    without = screened([each for each in brought(sent) if each.learner != "learner-1"])
    assert without.refused == ()
    assert torch.equal(closed.held.theta, without.held.theta)


@pytest.mark.parametrize(("partial", "scale"), [("scale", 0.5 * 4 / 12), ("full", 1.0)])
def test_who_is_refused_does_not_contribute_to_the_scale(partial: Partial, scale: float) -> None:
    """Half of the live weight is in the round, and a third of that is left."""
    how = replace(
        DecoupledDiLoCo(codec="fp32", merge=Mean(), outer=SGD(lr=1.0), partial=partial), screen=NormOutliers(3.0)
    )
    sent = [torch.ones(40), torch.full((40,), 100.0), torch.ones(40)]
    contributions = brought([FP32().encode(each) for each in sent], [3.0, 8.0, 1.0])
    given = 0.5 if partial == "scale" else 1.0
    closed = close(how, held_of(torch.zeros(40)), contributions, places(40), given)
    assert closed.refused == ("learner-1",)
    assert torch.equal(closed.held.theta, torch.full((40,), -torch.tensor(scale).item()))
    assert (closed.update.contributors, closed.update.scale) == (("learner-0", "learner-2"), scale)


def test_who_brings_nothing_is_no_yardstick() -> None:
    """Most learners have no tokens, or train nothing of this fragment: the one that does is no outlier."""
    zeros, work = FP32().encode(torch.zeros(40)), FP32().encode(torch.randn(40))
    for idle in ({"weight": 0.0}, {"tensors": frozenset()}):
        contributions = brought([zeros, zeros, work, zeros])
        contributions = [each if i == 2 else replace(each, **idle) for i, each in enumerate(contributions)]
        closed = screened(contributions)
        assert closed.refused == ()
        assert torch.equal(closed.held.theta, screened([contributions[2]]).held.theta)


def test_who_trains_a_part_is_judged_by_that_part() -> None:
    values = [torch.ones(40) for _ in range(5)]
    values[4][30:], values[3][:30], values[3][30:] = 1e3, 7.0, 1e3
    contributions = brought([FP32().encode(each) for each in values])
    contributions[3:] = [replace(each, tensors=frozenset({0})) for each in contributions[3:]]
    assert screened(contributions).refused == ("learner-3",)
