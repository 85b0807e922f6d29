"""Mixtures of experts: units below the tensor, the cut into groups and a trunk, answers and weights of experts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
from tests.core.whole_vectors import merged_vector
from torch import Tensor, nn

import diloco
from diloco.core.codecs import FP32
from diloco.core.fragments import Balanced, Experts, Named, Whole, describe, layout_of, make_layout
from diloco.core.layout import Layout, Origin, TensorSpec, gather, named_tensors, place
from diloco.core.merges import Encoded, Mean, RadialDirectional
from diloco.core.method import Method
from diloco.core.schedule import Schedule
from diloco.core.weights import shares_of
from diloco.errors import ConfigError, LayoutError

EXPERTS, WIDTH = 6, 3


class Block(nn.Module):
    """A mixture block with the names of transformers: fused experts, a router, and a buffer with a row per expert."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w_in = nn.Parameter(torch.randn(experts, 4, WIDTH))
        self.experts.w_out = nn.Parameter(torch.randn(experts, WIDTH, 4))
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.gate_proj = nn.Linear(WIDTH, experts)  # as many rows as experts, and no router
        self.shared_experts = nn.Linear(WIDTH, experts)


class Mixture(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(blocks or (Block(), Block()))


def units_of(layout: Layout, fragment: int) -> list[tuple[str, int]]:
    origins = (place.spec.origin for place in layout.fragments[fragment].tensors)
    return [(origin.parameter, origin.first) for origin in origins if origin is not None]


def test_experts_are_units_in_groups_of_all_layers_and_everything_else_is_the_trunk() -> None:
    layout = make_layout(Mixture(), Experts(groups=3, trunk=Whole()))
    assert units_of(layout, 1) == [
        (f"layers.{layer}.{name}", expert)
        for layer in (0, 1)
        for name in ("experts.w_in", "experts.w_out", "gate.weight")
        for expert in (2, 3)
    ]
    assert [fragment.numel for fragment in layout.fragments[:3]] == [2 * 2 * (12 + 12 + 3)] * 3
    first = layout.fragments[0].tensors[0].spec
    assert first == TensorSpec(
        "layers.0.experts.w_in.0", (1, 4, WIDTH), "float32", origin=Origin("layers.0.experts.w_in", 0, EXPERTS)
    )
    trunk = layout.fragments[3].names
    assert trunk == (
        "embed.weight",
        *(
            f"layers.{layer}.{name}"
            for layer in (0, 1)
            for name in ("gate_proj.weight", "gate_proj.bias", "shared_experts.weight", "shared_experts.bias")
        ),
    )
    assert layout.num_parameters == sum(p.numel() for p in Mixture().parameters())


def test_a_buffer_with_a_row_for_each_expert_is_cut_where_it_is_averaged() -> None:
    trainable, static = describe(Mixture(Block()))
    bias = next(spec for spec in static if spec.name.endswith("e_score_correction_bias"))
    layout = layout_of([*trainable, replace(bias, role="averaged")], (), Experts(groups=2, trunk=Whole()))
    last = [placement.spec for placement in layout.fragments[1].tensors][-3:]
    assert [(spec.name[-6:], spec.shape, spec.role) for spec in last] == [
        (f"bias.{expert}", (1,), "averaged") for expert in (3, 4, 5)
    ]
    assert bias in make_layout(Mixture(Block()), Experts(groups=2)).static  # a static one is whole


@pytest.mark.parametrize(("groups", "sizes"), [(1, [6]), (4, [2, 1, 2, 1]), (6, [1] * 6)])
def test_groups_take_experts_in_order(groups: int, sizes: list[int]) -> None:
    layout = make_layout(Mixture(Block()), Experts(groups=groups))
    found = [sorted({expert for _, expert in units_of(layout, group)}) for group in range(groups)]
    assert [len(each) for each in found] == sizes
    assert list(chain(*found)) == list(range(EXPERTS))


def test_a_list_of_experts_keeps_its_tensors_and_their_names() -> None:
    block = Block()
    block.experts = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(EXPERTS))
    fragmentation = Experts(groups=2, trunk=Whole())
    layout = make_layout(Mixture(block), fragmentation)
    assert layout.fragments[1].names == (
        *(f"layers.0.experts.{expert}.{name}" for expert in (3, 4, 5) for name in ("weight", "bias")),
        *(f"layers.0.gate.weight.{expert}" for expert in (3, 4, 5)),
    )
    assert [fragmentation.expert_of(each.spec) for each in layout.fragments[1].tensors] == [3, 3, 4, 4, 5, 5, 3, 4, 5]
    assert {fragmentation.expert_of(each.spec) for each in layout.fragments[2].tensors} == {None}


def test_an_expert_of_a_list_may_be_frozen() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), "out": nn.Linear(2, 2)})
    model["experts"][0].requires_grad_(False)
    cut = Experts(groups=1, trunk=Whole())
    assert cut.experts_of(make_layout(model, cut)) == ((1, 1, 2, 2), ())


def test_patterns_name_the_experts_of_models_with_other_names() -> None:
    model = nn.ModuleDict({"mlp": nn.Module(), "out": nn.Linear(2, 2)})
    model["mlp"].w = nn.Parameter(torch.zeros(4, 5))
    layout = make_layout(model, Experts(groups=2, trunk=Whole(), patterns=["mlp.w"]))
    assert [fragment.names for fragment in layout.fragments] == [
        ("mlp.w.0", "mlp.w.1"), ("mlp.w.2", "mlp.w.3"), ("out.weight", "out.bias"),
    ]  # fmt: skip


def test_a_pattern_may_match_a_scalar_and_a_model_may_have_no_trunk() -> None:
    specs = [TensorSpec("w", (4, 2), "float32"), TensorSpec("scale", (), "float32")]
    cut = Experts(groups=2, patterns=["*"])
    assert [f.names for f in layout_of(specs, (), cut).fragments] == [("w.0", "w.1"), ("w.2", "w.3"), ("scale",)]
    assert [f.names for f in layout_of(specs[:1], (), cut).fragments] == [("w.0", "w.1"), ("w.2", "w.3")]


def test_units_are_joined_into_the_parameters_that_they_are_rows_of() -> None:
    model = Mixture()
    layout = make_layout(model, Experts(groups=4))
    own = {name: each.detach() for name, each in model.named_parameters()}
    units = dict(own)
    for parameter, specs in layout.units().items():
        rows = own[parameter]
        units |= {spec.name: rows[spec.origin.first : spec.origin.first + 1] for spec in specs if spec.origin}
    thetas = [gather(fragment, units) for fragment in layout.fragments]
    joined = named_tensors(layout, thetas)
    assert joined.keys() == own.keys()
    assert all(torch.equal(joined[name], each) for name, each in own.items())


def test_a_layout_with_units_goes_through_json_and_one_without_has_the_digest_of_before() -> None:
    layout = make_layout(Mixture(), Experts(groups=2))
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    whole = make_layout(Mixture(), Balanced(2))
    assert all(len(spec) == 3 for fragment in whole.to_dict()["fragments"] for spec in fragment)  # type: ignore[attr-defined]
    assert layout.digest() != whole.digest()
    unit = layout.units()["layers.0.experts.w_in"][1]
    assert "from row 1 of 'layers.0.experts.w_in' (6 rows)" in str(unit)  # so that a model of more experts differs


def test_a_layout_of_another_cut_has_no_experts_by_group() -> None:
    cut = Experts(groups=2, trunk=Whole())
    layout = make_layout(Mixture(Block()), cut)
    assert cut.experts_of(layout)[0][:3] == (0, 1, 2)
    assert cut.experts_of(layout)[2] == ()
    with pytest.raises(LayoutError, match="is not cut by Experts"):
        replace(cut, groups=3).experts_of(layout)
    far = place(0, [TensorSpec("experts.999999999.w", (1,), "float32")])
    with pytest.raises(LayoutError, match="is not cut by Experts"):
        replace(cut, groups=1).experts_of(Layout((far,), ()))


UNIT = TensorSpec("w.0", (1, 2), "float32", origin=Origin("w", 0, 2))


@pytest.mark.parametrize(
    "second",
    [
        UNIT,
        replace(UNIT, name="w.1", origin=Origin("w", 1, 3)),
        replace(UNIT, name="w.1", shape=(1, 3), origin=Origin("w", 1, 2)),
        replace(UNIT, name="w.1", dtype="bfloat16", origin=Origin("w", 1, 2)),
        replace(UNIT, name="w", origin=None),
    ],
)
def test_units_that_are_not_a_parameters_rows_are_refused(second: TensorSpec) -> None:
    with pytest.raises(LayoutError, match="'w"):
        Layout((place(0, [UNIT, second]),), ())


@pytest.mark.parametrize("rows", [[1, 10**15], [10**15, 10**15]])
def test_numbers_of_rows_cost_no_memory(rows: list[int]) -> None:
    """A layout is read before its size is known."""
    own, whole = rows
    values = {"fragments": [[["w.0", [own, 2], "float32", "", ["w", 0, whole]]]], "static": []}
    if own == whole:
        assert Layout.from_dict(values).num_parameters == 2 * whole
    else:
        with pytest.raises(LayoutError, match="must contain each of its rows once"):
            Layout.from_dict(values)


@pytest.mark.parametrize("origin", [["w", 0], ["w", -1, 4], ["w", 4, 4], [3, 0, 4], ["w", 0.0, 4], "w", ["w", 0, 4, 4]])
def test_a_unit_with_a_wrong_origin_is_refused(origin: object) -> None:
    values = {"fragments": [[["w.0", [1, 2], "float32", "", origin]]], "static": []}
    with pytest.raises(LayoutError, match="first row, number of rows"):
        Layout.from_dict(values)


@pytest.mark.parametrize(
    ("model", "fragmentation", "words"),
    [
        (nn.Linear(2, 2), Experts(groups=1), "finds no experts among the model's tensors, such as 'weight'"),
        (Mixture(), Experts(groups=7), "more groups than the 6 experts"),
        (Mixture(Block(), Block(4)), Experts(groups=1), "finds 4 experts in 'layers.1' and 6 in another tensor"),
        (
            Mixture(),
            Experts(groups=1, patterns=["*.experts.v"]),
            r"finds no tensor with rows of the name '\*.experts.v'",
        ),
        (Mixture(), Experts(groups=1, trunk=Named([["embed.*"]])), "into no fragment"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(model: nn.Module, fragmentation: Experts, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_layout(model, fragmentation)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"groups": 0}, "whole number of at least 1, not 0"),
        ({"groups": 2, "every": 1.5}, "the experts' H as a multiple of the trunk's, must be a whole number"),
        ({"groups": 2, "trunk": {"type": "Experts", "groups": 2}}, "must be another fragmentation"),
        ({"groups": 2, "trunk": 3}, "must be another fragmentation"),
        ({"groups": 2, "outer": 3}, "must be an outer optimizer"),
        ({"groups": 2, "up": "int5"}, "int5"),
        ({"groups": 2, "patterns": "*.w"}, "is a list of names"),
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Method.from_dict({"name": "x", "paper": "y", "fragments": {"type": "Experts", **values}})


def test_experts_have_their_own_h_codec_and_outer_optimizer() -> None:
    fragments = Experts(groups=2, every=3, up="e3m0", down="int8", outer=diloco.SGD(lr=0.5))
    method = diloco.DiLoCo(sync_every=10, fragments=fragments, codec="int4", error_feedback=True)
    assert Method.from_dict(json.loads(json.dumps(method.to_dict()))) == method
    trunk, expert = method.for_fragment(2), method.for_fragment(1)
    assert trunk is method
    assert (expert.up.name, expert.down.name, expert.outer, expert.sync_every) == ("e3m0", "int8", diloco.SGD(0.5), 30)
    assert expert.error_feedback == 1.0
    lossless = replace(method, fragments=replace(fragments, up="fp32"))
    assert (lossless.for_fragment(0).error_feedback, lossless.for_fragment(2).error_feedback) == (0.0, 1.0)
    same = replace(method, fragments=Experts(groups=2))
    assert same.for_fragment(0) is same
    changing = replace(method, sync_every=((0, 4), (9, 6))).for_fragment(0)
    assert changing.sync_every == ((0, 12), (9, 18))


def test_a_method_that_cannot_weigh_experts_apart_is_refused() -> None:
    cut = Experts(groups=2)
    with pytest.raises(ConfigError, match="weighs each expert by its own tokens, which EagerDiLoCo cannot"):
        diloco.EagerDiLoCo(fragments=cut)
    with pytest.raises(ConfigError, match="which DataParallel cannot"):
        diloco.DataParallel(fragments=cut)
    with pytest.raises(ConfigError, match="GeometricMedian"):
        replace(diloco.DiLoCo(fragments=cut), merge=diloco.GeometricMedian())
    with pytest.raises(ConfigError, match="one at a time"):
        diloco.AsyncDiLoCo(fragments=replace(cut, outer=diloco.SGD(lr=1.0)))


def test_a_fragment_with_a_multiple_is_sent_once_in_so_many_intervals() -> None:
    schedule = Schedule(6, 3, multiples=(4, 1, 1))
    sent = [step for step in range(1, 73) if 0 in schedule.sends(step)]
    assert sent == [8, 32, 56]
    for fragment in range(3):
        own = [step for step in range(1, 73) if fragment in schedule.sends(step)]
        assert [schedule.next_send(fragment, step - 1) for step in own] == own
        assert {b - a for a, b in pairwise(own)} == {schedule.sync_every_at(1, fragment)}
    # without the multiple fragment 0 would be sent four times as often, at the same phase
    assert [step for step in range(1, 73) if 0 in Schedule(6, 3).sends(step)][:2] == [2, 8]
    assert Schedule(6, 3, multiples=(1, 1, 1)) == Schedule(6, 3)


def test_offsets_reach_over_the_whole_interval_of_their_fragment() -> None:
    schedule = Schedule(5, 2, offsets=(13, 0), multiples=(3, 1))
    assert [step for step in range(1, 32) if 0 in schedule.sends(step)] == [13, 28]
    with pytest.raises(ConfigError, match="from 0 to sync_every=15"):
        Schedule(5, 2, offsets=(16, 0), multiples=(3, 1))


def test_intervals_that_change_change_for_experts_too() -> None:
    schedule = Schedule(((0, 2), (12, 3)), 2, multiples=(2, 1))
    assert [step for step in range(1, 31) if 0 in schedule.sends(step)] == [2, 6, 10, 15, 21, 27]
    assert schedule.next_send(0, 10) == 15


def test_an_expert_is_weighed_by_the_tokens_that_were_routed_to_it() -> None:
    shares = shares_of([10, 20], [[5, 0, 1, 3], [5, 0, 0, 9]], [None, {0, 1, 2}], [False, False, False, True])
    assert shares == [(0.5, 1.0, 0.1, 1.0), (0.25, 1.0, 0.0, 1.0)]
    # tensor 1: nobody routed a token; of those that train it, so no weight is preferred
    assert shares_of([0], [[0]], [None], [False]) == [(1.0,)]
    assert shares_of([2, 2], [[10**15], [1]], [None, None], [False]) == [(1.0,), (0.5,)]  # none lifts itself
    assert shares_of([4, 4], [[0], [3]], [None, set()], [False]) == [(1.0,), (1.0,)]


def vectors(*values: list[float]) -> list[Tensor]:
    return [torch.tensor(each) for each in values]


@pytest.mark.parametrize("merge", [Mean(), diloco.SenderMean(), diloco.HeLoCo()])
def test_a_merge_weighs_each_tensor_by_its_share(merge: diloco.Merge) -> None:
    places = place(0, [TensorSpec("a", (2,), "float32"), TensorSpec("b", (1,), "float32")]).tensors
    a, b = vectors([1.0, 2.0, 4.0], [3.0, 6.0, 8.0])
    brought = [
        Encoded("a", (FP32().encode(a),), 2.0, shares=(0.5, 0.25)),
        Encoded("b", (FP32().encode(b),), 1.0, shares=(1.0, 0.0)),
    ]
    merged = merged_vector(merge, FP32(), brought, places, 3)
    assert torch.equal(merged, torch.tensor([2.0, 4.0, 4.0]))
    equal = [replace(each, shares=(1.0, 1.0)) for each in brought]
    without = [replace(each, shares=None) for each in brought]
    assert torch.equal(merged_vector(merge, FP32(), equal, places, 3), merged_vector(merge, FP32(), without, places, 3))


def test_directions_are_merged_with_the_weights_of_their_tensor() -> None:
    places = place(0, [TensorSpec("a", (2,), "float32"), TensorSpec("b", (2,), "float32")]).tensors
    a, b = vectors([3.0, 0.0, 3.0, 0.0], [0.0, 6.0, 0.0, 6.0])
    brought = [
        Encoded("a", (FP32().encode(a),), 4.0, shares=(1.0, 0.5)),
        Encoded("b", (FP32().encode(b),), 2.0, shares=(0.0, 1.0)),
    ]
    merged = merged_vector(RadialDirectional(), FP32(), brought, places, 4)
    assert torch.equal(merged[:2], a[:2])  # only one has a weight
    torch.testing.assert_close(merged[2:], torch.tensor([4.5, 4.5]) / 2**0.5)  # equal weights, mean length 4.5
