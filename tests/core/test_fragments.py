"""Every trainable tensor has one place, the same on every machine, and errors name the tensor."""

import hashlib
import json
import re
import struct
import tomllib
from itertools import pairwise

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from diloco.core.codecs import SEGMENT_ELEMENTS
from diloco.core.fragments import (
    FRAGMENTATIONS,
    Balanced,
    ByLayer,
    Fragmentation,
    LayersOrBalanced,
    Layout,
    Named,
    TensorSpec,
    Whole,
    cut_in_words,
    describe,
    digest,
    gather,
    layout_of,
    make_layout,
    scatter,
)
from diloco.core.layout import SAME_MODEL, Digest, digest_of_segments
from diloco.errors import ConfigError, LayoutError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4))


class Model(nn.Module):
    """Tied weights, a frozen parameter, a persistent buffer under two names, and one that is not persistent."""

    def __init__(self, num_layers: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("count_again", self.count)
        self.register_buffer("mask", torch.ones(2), persistent=False)


def specs(*names: str, shape: tuple[int, ...] = (2,)) -> list[TensorSpec]:
    return [TensorSpec(name, shape, "float32") for name in names]


def groups(fragmentation: Fragmentation, *names: str) -> list[tuple[str, ...]]:
    return [fragment.names for fragment in layout_of(specs(*names), (), fragmentation).fragments]


# --- description ------------------------------------------------------------------------------------------------------


def test_tied_weights_count_once_and_frozen_tensors_are_static() -> None:
    trainable, static = describe(Model(num_layers=1))
    assert [spec.name for spec in trainable] == ["embed.weight", "layers.0.w", "layers.0.b"]
    assert static == (TensorSpec("scale", (), "float32"), TensorSpec("count", (3,), "int64"))
    assert make_layout(Model(num_layers=1), Whole()).num_parameters == 5 * 4 + 4 * 4 + 4


def test_a_buffer_registered_as_temporary_and_persistent_is_persistent() -> None:
    model = nn.Linear(1, 1)
    shared = torch.zeros(2)
    model.register_buffer("cache", shared, persistent=False)
    model.register_buffer("kept", shared)
    assert [spec.name for spec in describe(model)[1]] == ["kept"]


def test_tensors_without_data_can_be_described() -> None:
    with torch.device("meta"):
        model = Model()
    assert describe(model) == describe(Model())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_trainable_tensor_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2, dtype=dtype))
    with pytest.raises(ConfigError, match=r"parameter 'w' is (float64|complex64)"):
        describe(model)
    model.w.requires_grad_(False)
    assert describe(model)[0] == ()


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        make_layout(nn.Linear(2, 2).requires_grad_(False), Whole())


# --- fragmentations ---------------------------------------------------------------------------------------------------

LAYERS_OF_FRAGMENTS = [
    (7, 3, "strided", [[0, 3, 6], [1, 4], [2, 5]]),
    (7, 3, "sequential", [[0, 1, 2], [3, 4, 5], [6]]),
    (6, 3, "strided", [[0, 2, 4], [1, 3, 5]]),
    (6, 3, "sequential", [[0, 1, 2], [3, 4, 5]]),
    (2, 3, "strided", [[0, 1]]),
    (3, 1, "strided", [[0], [1], [2]]),
]


@pytest.mark.parametrize(("num_layers", "layers", "pattern", "expected"), LAYERS_OF_FRAGMENTS)
def test_layers_are_dealt_strided_or_sequential_with_the_rest_last(
    num_layers: int, layers: int, pattern: str, expected: list[list[int]]
) -> None:
    layout = make_layout(Model(num_layers), ByLayer(layers, pattern))  # type: ignore[arg-type]
    *of_layers, rest = [fragment.names for fragment in layout.fragments]
    assert of_layers == [tuple(f"layers.{i}.{part}" for i in each for part in ("w", "b")) for each in expected]
    assert rest == ("embed.weight",)


@pytest.mark.parametrize(("num_layers", "expected"), [(24, 8), (48, 16), (108, 36)])
def test_the_paper_counts_of_fragments(num_layers: int, expected: int) -> None:
    names = [f"model.layers.{i}.w" for i in range(num_layers)]
    assert len(groups(ByLayer(), "embed", *names)) == expected + 1


def test_layers_are_found_in_the_names_that_libraries_use() -> None:
    two = ByLayer(layers=1)
    assert groups(two, "model.embed.w", "model.layers.0.w", "model.layers.1.w", "head.w") == [
        ("model.layers.0.w",),
        ("model.layers.1.w",),
        ("model.embed.w", "head.w"),
    ]
    assert groups(two, "transformer.h.0.ln.w", "transformer.h.1.ln.w", "wte") == [
        ("transformer.h.0.ln.w",),
        ("transformer.h.1.ln.w",),
        ("wte",),
    ]
    # nn.Sequential: the list has no prefix; modules without parameters leave gaps in the numbers
    assert groups(two, "0.weight", "2.weight", "10.weight") == [("0.weight",), ("2.weight",), ("10.weight",)]


def test_a_list_inside_a_layer_is_part_of_the_layer() -> None:
    names = [f"layers.{i}.experts.{j}.w" for i in range(2) for j in range(5)]
    assert groups(ByLayer(layers=1), *names) == [tuple(names[:5]), tuple(names[5:])]


def test_a_second_shorter_list_belongs_to_the_rest() -> None:
    assert groups(ByLayer(layers=1), "stem.0.w", "layers.0.w", "layers.1.w") == [
        ("layers.0.w",),
        ("layers.1.w",),
        ("stem.0.w",),
    ]


def test_no_list_or_two_equally_long_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot cut this model, as its tensors' names hold no list of layers; set"):
        groups(ByLayer(), "w", "conv2d.w", "params.0", f"layers.{'1' * 5000}.w")
    with pytest.raises(
        ConfigError, match="hold equally long lists of layers, 'decoder.block' and 'encoder.block'; set"
    ):
        groups(ByLayer(), "encoder.block.0.w", "decoder.block.0.w")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.rnn = nn.GRU(8, 16)
        self.head = nn.Linear(16, 50)


def test_a_model_with_layers_is_cut_by_layer_to_the_same_digest() -> None:
    layout = make_layout(Model(), LayersOrBalanced())
    assert layout == make_layout(Model(), ByLayer(layers=3, pattern="strided"))
    assert layout.digest() == "2511f2a90e18a71c80d64173189dafad87b7f9f38d53c0e856113af5ff498093"
    assert cut_in_words(layout, LayersOrBalanced()) == "4 fragments: ByLayer(layers=3, pattern='strided')"
    assert groups(LayersOrBalanced(1, "sequential"), *(f"h.{i}.w" for i in range(3))) == [
        ("h.0.w",), ("h.1.w",), ("h.2.w",),
    ]  # fmt: skip


NO_LIST = "as its tensors' names hold no list of layers"
TWO_LISTS = "as its tensors' names hold equally long lists of layers, 'decoder' and 'encoder'"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Recurrent(), f"4 fragments: Balanced(num_fragments=4), {NO_LIST}"),
        (nn.Linear(3, 2), f"2 fragments: Balanced(num_fragments=2), {NO_LIST}"),
        (nn.Linear(3, 2, bias=False), f"1 fragment: Balanced(num_fragments=1), {NO_LIST}"),
        (
            nn.ModuleDict({"encoder": nn.ModuleList([Block()]), "decoder": nn.ModuleList([Block()])}),
            f"4 fragments: Balanced(num_fragments=4), {TWO_LISTS}",
        ),
    ],
)
def test_a_model_without_layers_is_balanced_and_why_is_said(model: nn.Module, words: str) -> None:
    layout = make_layout(model, LayersOrBalanced())
    assert cut_in_words(layout, LayersOrBalanced()) == words
    trainable, _ = describe(model)
    assert LayersOrBalanced().resolved(trainable) == LayersOrBalanced().resolved(trainable[::-1])
    assert layout == make_layout(model, LayersOrBalanced().resolved(trainable))


def test_tensors_without_elements_fill_no_fragment() -> None:
    some = [TensorSpec("a", (3,), "float32"), TensorSpec("b", (0,), "float32"), TensorSpec("c", (1,), "float32")]
    assert [fragment.numel for fragment in layout_of(some, (), LayersOrBalanced()).fragments] == [3, 1]
    with pytest.raises(ConfigError, match="no trainable parameter"):
        layout_of(some[1:2], (), LayersOrBalanced())


@pytest.mark.parametrize("wrong", [Balanced(24), Balanced(3), ByLayer(), Named([["a"]])])
def test_the_advice_of_a_refusal_cuts_the_model(wrong: Fragmentation) -> None:
    some = [*specs("a", "b"), TensorSpec("empty", (0,), "float32")]
    with pytest.raises(ConfigError) as refusal:
        layout_of(some, (), wrong)
    found = r"; set \[method\] (fragments = .*) in the run file, .*, or fragments=diloco.Balanced\(2\)\.$"
    advice = re.search(found, str(refusal.value))
    assert advice is not None
    assert str(refusal.value).count(". ") == 0
    layout_of(some, (), FRAGMENTATIONS.read(tomllib.loads(advice[1])["fragments"]))


def test_balanced_packs_the_largest_first() -> None:
    sizes = {"a": 1, "b": 7, "c": 3, "d": 3, "e": 6}
    some = [TensorSpec(name, (size,), "float32") for name, size in sizes.items()]
    layout = layout_of(some, (), Balanced(2))
    # b → 0, e → 1, c → 1 (6 < 7), d → 0 (7 < 9), a → 1 (9 < 10)
    assert [fragment.names for fragment in layout.fragments] == [("b", "d"), ("a", "c", "e")]
    assert [fragment.numel for fragment in layout.fragments] == [10, 10]
    assert [placement.offset for placement in layout.fragments[1].tensors] == [0, 1, 4]


def test_balanced_breaks_ties_by_model_order() -> None:
    assert groups(Balanced(2), "d", "c", "b", "a") == [("d", "b"), ("c", "a")]


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Balanced\(3\) is more fragments than the 2 trainable tensors"):
        groups(Balanced(3), "a", "b")
    with pytest.raises(ConfigError, match="leaves fragment 1 empty"):
        layout_of([TensorSpec("a", (3,), "float32"), TensorSpec("b", (0,), "float32")], (), Balanced(2))


def test_named_matches_shell_patterns() -> None:
    named = Named([["layers.0.*"], ["embed", "layers.[12].*"]])
    assert groups(named, "embed", "layers.0.w", "layers.1.w", "layers.2.a.b") == [
        ("layers.0.w",),
        ("embed", "layers.1.w", "layers.2.a.b"),
    ]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([["a"], ["*"]], "puts tensor 'a' into fragments 0 and 1"),
        ([["a"]], "puts tensor 'b' into no fragment"),
        ([["a", "b"], ["c*"]], "leaves fragment 1 empty"),
        ([["A"], ["b"]], "puts tensor 'a' into no fragment"),
        ([], "puts tensor 'a' into no fragment"),
    ],
)
def test_named_must_place_every_tensor_once(patterns: list[list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        groups(Named(patterns), "a", "b")


def test_named_refuses_patterns_outside_a_list() -> None:
    with pytest.raises(ConfigError, match="one list of patterns per fragment, not 'a'"):
        Named(["a", "b"])


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_sizes_are_whole_numbers(wrong: object) -> None:
    with pytest.raises(ConfigError, match="whole number of at least 1"):
        ByLayer(layers=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="whole number of at least 1"):
        LayersOrBalanced(num_fragments=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="whole number of at least 1"):
        Balanced(wrong)  # type: ignore[arg-type]


def test_an_unknown_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match="is 'stride'; use 'strided' or 'sequential'"):
        ByLayer(pattern="stride")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is 'stride'; use 'strided' or 'sequential'"):
        LayersOrBalanced(pattern="stride")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fragmentation",
    [
        Whole(),
        ByLayer(),
        ByLayer(2, "sequential"),
        Balanced(8),
        LayersOrBalanced(2, "sequential", 3),
        Named([["a.*", "b"], ["c"]]),
    ],
)
def test_fragmentations_survive_json(fragmentation: Fragmentation) -> None:
    again = FRAGMENTATIONS.read(json.loads(json.dumps(fragmentation.to_dict())))
    assert again == fragmentation
    assert hash(again) == hash(fragmentation)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "ByLayers"}, "'ByLayers' is not a known fragmentation; did you mean 'ByLayer'"),
        ({"layers": 3}, "None is not a known fragmentation; known are 'Balanced', 'ByLayer', 'Experts', 'L"),
        ({"type": "ByLayer", "layer": 3}, "ByLayer has no field 'layer'; did you mean 'layers'"),
        ({"type": "Whole", "layers": 3}, "'layers', which ByLayer and LayersOrBalanced have; give that type too"),
        ({"type": "Whole", "leyers": 3}, "Whole has no field 'leyers'; it takes none"),
        ({"type": "Balanced"}, "Balanced needs a value for 'num_fragments'"),
        ({"type": "Balanced", "num_fragments": "8"}, "whole number of at least 1, not '8'"),
    ],
)
def test_a_typo_in_a_description_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FRAGMENTATIONS.read(values)


@st.composite
def _models(draw: st.DrawFn) -> tuple[list[TensorSpec], Fragmentation]:
    num_layers = draw(st.integers(1, 12))
    names = ["embed", *(f"h.{i}.{part}" for i in range(num_layers) for part in "wb"), "norm"]
    some = [TensorSpec(name, (draw(st.integers(1, 50)),), "float32") for name in draw(st.permutations(names))]
    return some, draw(
        st.one_of(
            st.just(Whole()),
            st.builds(ByLayer, st.integers(1, 5), st.sampled_from(["strided", "sequential"])),
            st.builds(Balanced, st.integers(1, len(names))),
            st.builds(LayersOrBalanced, st.integers(1, 5), st.just("strided"), st.integers(1, 5)),
            st.just(Named([["h.*.w"], ["h.*.b", "embed"], ["norm"]])),
        )
    )


@given(_models())
def test_every_tensor_has_one_place_in_model_order(case: tuple[list[TensorSpec], Fragmentation]) -> None:
    some, fragmentation = case
    layout = layout_of(some, (), fragmentation)
    order = {spec.name: position for position, spec in enumerate(some)}
    placed = [placement.spec for fragment in layout.fragments for placement in fragment.tensors]
    assert sorted(placed, key=lambda spec: order[spec.name]) == some
    for fragment in layout.fragments:
        assert list(fragment.names) == sorted(fragment.names, key=order.__getitem__)
        ends = [placement.offset + placement.spec.numel for placement in fragment.tensors]
        assert [placement.offset for placement in fragment.tensors] == [0, *ends[:-1]]
        assert fragment.numel == ends[-1] > 0
    if isinstance(fragmentation, Balanced):
        sizes = [fragment.numel for fragment in layout.fragments]
        assert max(sizes) - min(sizes) <= max(spec.numel for spec in some)
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


# --- the layout -------------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_documented_text() -> None:
    layout = layout_of(specs("a", "b"), [TensorSpec("n", (), "int64")], Named([["b"], ["a"]]))
    text = '{"fragments":[[["b",[2],"float32"]],[["a",[2],"float32"]]],"static":[["n",[],"int64"]]}'
    assert layout.digest() == hashlib.sha256(text.encode()).hexdigest()


def test_equal_layouts_have_no_difference() -> None:
    one, other = make_layout(Model(), ByLayer()), make_layout(Model(), ByLayer())
    assert one.first_difference(other) is None
    assert one.digest() == other.digest()


def _layout(
    first: tuple[int, ...] = (4, 4), fragmentation: Fragmentation | None = None, static: tuple[str, ...] = ("n", "m")
) -> Layout:
    trainable = [TensorSpec("layers.0.w", first, "float32"), TensorSpec("layers.1.w", (2,), "float32")]
    return layout_of(trainable, specs(*static), fragmentation or Whole())


@pytest.mark.parametrize(
    ("other", "phrase"),
    [
        (_layout(first=(4, 8)), "tensor 'layers.0.w' is (4, 4) float32 here and (4, 8) float32 there"),
        (
            _layout(fragmentation=Balanced(2)),
            "tensor 'layers.1.w' is at element 16 of fragment 0 here and at element 0 of fragment 1 there",
        ),
        (_layout(static=("n",)), "tensor 'm' is (2,) float32 here and missing there"),
        (_layout(static=("n", "m", "o")), "tensor 'o' is missing here and (2,) float32 there"),
        (_layout(static=("m", "n")), "tensor 'n' is static tensor 0 here and static tensor 1 there"),
    ],
)
def test_the_first_difference_names_the_tensor(other: Layout, phrase: str) -> None:
    assert _layout().first_difference(other) == f"{phrase}; {SAME_MODEL}"
    assert _layout().digest() != other.digest()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fragments": []}, r"'fragments' and 'static', not \['fragments'\]"),
        ({"fragments": [3], "static": []}, "a fragment is a list of"),
        ({"fragments": [[["w", [-1], "float32"]]], "static": []}, r"not \['w', \[-1\], 'float32'\]"),
        ({"fragments": [[["w", [True], "float32"]]], "static": []}, r"a tensor in a layout is \[name, shape, dtype\]"),
        ({"fragments": [[]], "static": []}, "fragment 0 holds no elements"),
        ({"fragments": [[["w", [1], "float32"]]], "static": [["w", [1], "float32"]]}, "tensor 'w' occurs twice"),
    ],
)
def test_a_damaged_layout_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.from_dict(values)


# --- flat vectors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gather_and_scatter_are_inverse(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    layout = make_layout(model, ByLayer())
    parameters = dict(model.named_parameters())
    for fragment in layout.fragments:
        flat = gather(fragment, parameters)
        assert flat.dtype == torch.float32
        assert not flat.requires_grad
        views = scatter(fragment, flat)
        assert tuple(views) == fragment.names
        for name, view in views.items():
            assert torch.equal(view, parameters[name].float())
            assert view.data_ptr() >= flat.data_ptr()
            view.zero_()
        assert not flat.any()


def test_gather_follows_shape_and_not_memory_order() -> None:
    w = torch.arange(6.0).view(2, 3).t()
    layout = layout_of([TensorSpec("w", (3, 2), "float32")], (), Whole())
    assert gather(layout.fragments[0], {"w": w}).tolist() == [0, 3, 1, 4, 2, 5]


def test_gather_writes_into_the_given_vector() -> None:
    layout = layout_of(specs("a", "b"), (), Whole())
    out = torch.full((4,), 7.0)
    assert gather(layout.fragments[0], {"a": torch.ones(2), "b": torch.zeros(2)}, out) is out
    assert out.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.zeros(2)}, "tensor 'b' of fragment 0 is missing"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3)},
            r"tensor 'b' is \(3,\) float32, and the layout has \(2,\) float32",
        ),
        (
            {"a": torch.zeros(2).double(), "b": torch.zeros(2)},
            "tensor 'a' is .* float64, and the layout has .* float32",
        ),
    ],
)
def test_gather_refuses_what_does_not_fit(tensors: dict[str, torch.Tensor], message: str) -> None:
    fragment = layout_of(specs("a", "b"), (), Whole()).fragments[0]
    untouched = torch.full((4,), 7.0)
    with pytest.raises(LayoutError, match=message):
        gather(fragment, tensors, untouched)
    assert untouched.tolist() == [7.0] * 4


@pytest.mark.parametrize("flat", [torch.zeros(3), torch.zeros(2, 2), torch.zeros(4).double(), torch.zeros(8)[::2]])
def test_scatter_refuses_what_does_not_fit(flat: torch.Tensor) -> None:
    fragment = layout_of(specs("a", "b"), (), Whole()).fragments[0]
    with pytest.raises(LayoutError, match="fragment 0 is a contiguous float32 vector of 4 elements"):
        scatter(fragment, flat)


def hashed(raw: bytes) -> bytes:
    return blake3(raw).digest()


def test_the_digest_of_a_vector_is_that_of_the_digests_of_its_segments() -> None:
    numbers = [1.0, -0.0, 3.25, 1e-40]
    assert digest(torch.tensor(numbers)) == hashed(hashed(struct.pack("<4f", *numbers))).hex()
    assert digest(torch.tensor(numbers)[1:3]) == hashed(hashed(struct.pack("<2f", *numbers[1:3]))).hex()
    assert digest(torch.empty(0)) == hashed(b"").hex()
    long = torch.randn(2 * SEGMENT_ELEMENTS + 5, generator=torch.Generator().manual_seed(1))
    raw = long.numpy().tobytes()
    segments = b"".join(hashed(raw[start : start + 4 * SEGMENT_ELEMENTS])
                        for start in range(0, len(raw), 4 * SEGMENT_ELEMENTS))  # fmt: skip
    for cuts in ([], [7], [SEGMENT_ELEMENTS], [3, SEGMENT_ELEMENTS + 3, 2 * SEGMENT_ELEMENTS]):
        whole = Digest()
        for start, stop in pairwise([0, *cuts, long.numel()]):
            whole.update(long[start:stop])
        assert (whole.segments, whole.hex()) == (segments, hashed(segments).hex())
    assert digest_of_segments(segments) == digest(long)


def test_a_digest_tells_zeros_apart() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


@pytest.mark.parametrize("flat", [torch.zeros(4).double(), torch.zeros(8)[::2], torch.zeros(4, device="meta")])
def test_the_digest_is_of_fp32_on_the_host(flat: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match="contiguous float32 vector on the CPU"):
        digest(flat)
