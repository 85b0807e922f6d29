"""Averaged tensors: running statistics and router biases take the mean, whatever the outer optimizer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import diloco
from diloco.core.codecs import SEGMENT_ELEMENTS, codec_from_name
from diloco.core.fragments import Balanced, Named, Whole, layout_of
from diloco.core.global_fragment import GlobalFragment, apply_update, close
from diloco.core.layout import SAME_MODEL, BaseTensor, Layout, Placement, Role, TensorSpec, place
from diloco.core.merges import Encoded, shard_of
from diloco.core.method import Method, OuterAt
from diloco.core.outer import Outer
from diloco.errors import LayoutError

WEIGHT = TensorSpec("w", (6,), "float32")
MEAN = TensorSpec("bn.running_mean", (3,), "float32", "averaged")
VARIANCE = TensorSpec("bn.running_var", (3,), "float32", "variance")
PLACES = place(0, [WEIGHT, MEAN, VARIANCE]).tensors
W, M, V = (each.elements for each in PLACES)
OUTERS: list[Outer] = [
    diloco.SGD(lr=0.3), diloco.Nesterov(lr=0.7, momentum=0.9), diloco.Adam(lr=0.1),
]  # fmt: skip


def method(outer: Outer, *, up: str = "fp32", down: str = "fp32", outer_at: OuterAt = "syncer") -> Method:
    codecs = {"up": codec_from_name(up), "down": codec_from_name(down)}
    return replace(diloco.DiLoCo(), outer=outer, outer_at=outer_at, **codecs)


def contributions(how: Method, deltas: Sequence[Tensor], weights: Sequence[float] | None = None) -> list[Encoded]:
    weights = weights or [1.0] * len(deltas)
    encoded = [how.up.encode(delta) for delta in deltas]
    return [Encoded(f"l{i}", (each,), weights[i]) for i, each in enumerate(encoded)]


@pytest.mark.parametrize("outer_at", ["syncer", "learners"])
@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_averaged_elements_become_the_mean_of_the_learners_values(outer: Outer, outer_at: OuterAt) -> None:
    how = method(outer, outer_at=outer_at)
    theta = torch.arange(1.0, 13.0)
    held = GlobalFragment.first(how, 0, theta)
    values = [theta * 0.5, theta * 0.25]
    for _ in range(3):
        closed = close(how, held, contributions(how, [held.theta - each for each in values], [1.0, 3.0]), PLACES)
        mean = held.theta - ((held.theta - values[0]) + 3 * (held.theta - values[1])) / 4
        torch.testing.assert_close(closed.held.theta[M.start :], mean[M.start :])
        assert not torch.equal(closed.held.theta[W], mean[W])  # parameters take the outer step
        for state in closed.held.outer_state.values():
            assert state.dim() == 0 or not state[M.start :].any()
        held = closed.held


def test_a_variance_that_falls_does_not_go_below_0_as_it_would_by_nesterov() -> None:
    how = method(diloco.Nesterov(lr=0.7, momentum=0.9))
    plain = place(0, [replace(each.spec, role="") for each in PLACES]).tensors
    start = torch.ones(12)
    lowest = {}
    for name, places in (("averaged", PLACES), ("as parameters", plain)):
        held, low = GlobalFragment.first(how, 0, start), 1.0
        for _ in range(6):  # the statistics of all learners settle at 0.01 within a round
            held = close(how, held, contributions(how, [held.theta - 0.01] * 3), places).held
            low = min(low, float(held.theta[V].min()))
        lowest[name] = low
    assert lowest["as parameters"] < -0.1
    assert lowest["averaged"] == pytest.approx(0.01, abs=1e-6)


@pytest.mark.parametrize("down", ["fp32", "int8"])
@pytest.mark.parametrize("outer_at", ["syncer", "learners"])
def test_a_variance_below_0_is_set_to_0_with_the_same_bits_everywhere(down: str, outer_at: OuterAt) -> None:
    """A learner measured from an older version, at which the variance was 1 and not 0.1."""
    how = method(diloco.Nesterov(), down=down, outer_at=outer_at)
    theta = torch.full((12,), 0.1)
    held = GlobalFragment.first(how, 0, theta)
    closed = close(how, held, contributions(how, [torch.full((12,), 0.9)]), PLACES)
    assert not closed.held.theta[V].any()
    assert (closed.held.theta[M] < 0).all()  # a mean may be
    again = apply_update(how, held, closed.update, closed.payload, PLACES)
    assert again.held.digest == closed.held.digest
    in_place = close(
        how, GlobalFragment.first(how, 0, theta.clone()), contributions(how, [torch.full((12,), 0.9)]), PLACES,
        in_place=True,
    )  # fmt: skip
    assert in_place.held.digest == closed.held.digest


def test_shards_have_the_bits_of_the_whole() -> None:
    sizes = [SEGMENT_ELEMENTS + 70, SEGMENT_ELEMENTS, 40]
    roles: tuple[Role, ...] = ("", "variance", "averaged")
    specs = [
        TensorSpec(f"t{i}", (size,), "float32", role) for i, (size, role) in enumerate(zip(sizes, roles, strict=True))
    ]
    places = place(0, specs).tensors
    how = method(diloco.Nesterov())
    torch.manual_seed(0)
    theta = torch.rand(sum(sizes))
    deltas = [torch.rand(sum(sizes)) * 2 for _ in range(3)]
    whole = close(how, GlobalFragment.first(how, 0, theta), contributions(how, deltas), places).held.theta
    assert (whole == 0).any()
    for start in range(0, sum(sizes), SEGMENT_ELEMENTS):
        elements = slice(start, min(start + SEGMENT_ELEMENTS, sum(sizes)))
        own, _ = shard_of(places, elements)
        part = GlobalFragment.first(how, 0, theta[elements])
        closed = close(how, part, contributions(how, [delta[elements] for delta in deltas]), own)
        assert torch.equal(closed.held.theta, whole[elements])


def test_a_merge_by_direction_takes_the_mean_of_statistics() -> None:
    how = replace(method(diloco.SGD(lr=1.0)), merge=diloco.RadialDirectional())
    held = GlobalFragment.first(how, 0, torch.zeros(12))
    one, two = torch.zeros(12), torch.zeros(12)
    one[0] = one[M.start] = one[V.start] = -1.0
    two[1] = two[M.start + 1] = two[V.start + 1] = -1.0
    theta = close(how, held, contributions(how, [one, two]), PLACES).held.theta
    assert float(theta[W].norm()) == pytest.approx(1.0)
    assert theta[M].tolist() == theta[V].tolist() == [0.5, 0.5, 0.0]


def test_where_learners_push_one_at_a_time_each_moves_the_mean_by_its_part() -> None:
    how = method(diloco.DelayedNesterov(buffer=4))
    held = GlobalFragment.first(how, 0, torch.ones(12))
    theta = close(how, held, contributions(how, [torch.ones(12)]), PLACES).held.theta
    assert theta[M.start :].tolist() == [0.75] * 6


# --- the layout says it -----------------------------------------------------------------------------------------------


def test_a_layout_keeps_roles_and_bases() -> None:
    base = BaseTensor(TensorSpec("base", (2, 3), "bfloat16"), "ab" * 32)
    layout = Layout((place(0, [WEIGHT, VARIANCE]),), (TensorSpec("u", (2,), "float32", "local"),), (base,))
    assert Layout.from_dict(layout.to_dict()) == layout
    plain = Layout((place(0, [WEIGHT]),), (TensorSpec("u", (2,), "float32"),))
    assert plain.to_dict() == {"fragments": [[["w", [6], "float32"]]], "static": [["u", [2], "float32"]]}


@pytest.mark.parametrize(
    "tensor", [["w", [6], "float32", ""], ["w", [6], "float32", "mean"], ["w", [6], "float32", "local", "local"]]
)
def test_an_unknown_role_is_refused(tensor: list[object]) -> None:
    with pytest.raises(LayoutError, match="role"):
        Layout.from_dict({"fragments": [[tensor]], "static": []})


@pytest.mark.parametrize("base", [[["w"]], [[["w", [2], "float32"], 5]], "w"])
def test_a_damaged_base_is_refused(base: object) -> None:
    with pytest.raises(LayoutError):
        Layout.from_dict({"fragments": [], "static": [], "base": base})


def test_a_difference_names_the_tensor_and_what_becomes_of_it() -> None:
    def layout(role: Role) -> Layout:
        spec = replace(VARIANCE, role=role)
        return Layout((place(0, [WEIGHT, *([spec] if spec.is_averaged else [])]),), () if spec.is_averaged else (spec,))

    averaged, local, fixed = layout("variance"), layout("local"), layout("")
    assert len({each.digest() for each in (averaged, local, fixed)}) == 3
    assert averaged.first_difference(local) == (
        "tensor 'bn.running_var' is (3,) float32 that is averaged, a variance here and (3,) float32 kept local there; "
        + SAME_MODEL
    )
    assert fixed.first_difference(local) == (
        f"tensor 'bn.running_var' is (3,) float32 here and (3,) float32 kept local there; {SAME_MODEL}"
    )
    one, two = (Layout(fixed.fragments, (), (BaseTensor(WEIGHT_2, digit * 64),)) for digit in "ab")
    assert one.first_difference(two) == (
        f"tensor 'base' is (2,) float32 with digest {'a' * 12}, which each learner brings, here and "
        f"(2,) float32 with digest {'b' * 12}, which each learner brings, there; {SAME_MODEL}"
    )


WEIGHT_2 = TensorSpec("base", (2,), "float32")


def test_averaged_tensors_come_last_in_their_fragment() -> None:
    specs = [MEAN, WEIGHT, replace(VARIANCE, name="z"), replace(WEIGHT, name="y")]
    whole = layout_of(specs, (), Whole())
    assert whole.fragments[0].names == ("w", "y", "bn.running_mean", "z")
    two = layout_of(specs, (), Named([["bn.*", "w"], ["y", "z"]]))
    assert [each.names for each in two.fragments] == [("w", "bn.running_mean"), ("y", "z")]
    assert sum(len(each.tensors) for each in layout_of(specs, (), Balanced(3)).fragments) == 4


def test_places_of_a_shard_keep_their_roles() -> None:
    places = [Placement(replace(VARIANCE, shape=(100,)), 0)]
    clipped, _ = shard_of(places, slice(10, 30))
    assert clipped[0].spec == replace(VARIANCE, shape=(20,))
