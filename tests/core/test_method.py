"""Methods are values: the papers' defaults, round trips, differences in words, and combinations that are refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from diloco.core.adopt import Eager, KeepDisplacement, Mix, Replace
from diloco.core.codecs import BF16, CODECS, E3M0, FP32, Int4, codec_from_name
from diloco.core.fragments import Balanced, LayersOrBalanced, Named, Whole
from diloco.core.global_fragment import GlobalFragment, apply_update, close
from diloco.core.layout import Placement, TensorSpec
from diloco.core.merges import (
    CoordinateMedian,
    Encoded,
    HeLoCo,
    MultiKrum,
    NormOutliers,
    RadialDirectional,
    SenderMean,
    TrimmedMean,
)
from diloco.core.method import Method
from diloco.core.outer import SGD, Adam, DelayedNesterov, Nesterov, Outer
from diloco.core.presets import (
    PRESETS,
    DataParallel,
    DecoupledDiLoCo,
    DelayedDiLoCo,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    SparseLoCo,
    StreamingDiLoCo,
    method_from_table,
)
from diloco.core.quorum import AllLive, Called
from diloco.errors import ConfigError
from diloco.protocol.rounds.base import Rules

# Quorums as tables: a way of calling rounds can be taken out of the package without this file.
DEFAULTS: dict[str, dict[str, Any]] = {
    "DataParallel": {"exchanged": "gradients", "sync_every": 1, "outer": SGD(lr=1.0)},
    "LocalSGD": {"sync_every": 8, "outer": SGD(lr=1.0)},
    # arXiv 2311.08105: H = 500, outer Nesterov 0.7 / 0.9
    "DiLoCo": {"sync_every": 500, "outer": Nesterov(lr=0.7, momentum=0.9)},
    # arXiv 2501.18512: H = 100, τ = 1, α = 0.5, three strided layers, FP4 E3M0, outer Nesterov 0.4 / 0.9
    "StreamingDiLoCo": {
        "sync_every": 100, "overlap": 1, "adopt": Mix(0.5), "fragments": LayersOrBalanced(3, "strided", 4),
        "up": E3M0(),
        "down": E3M0(), "outer": Nesterov(lr=0.4, momentum=0.9),
    },
    # arXiv 2505.23725: H = 30, outer Nesterov lr 0.7 … 0.9, momentum 0.6 … 0.8
    "MuLoCo": {"sync_every": 30, "outer": Nesterov(lr=0.8, momentum=0.7)},
    # arXiv 2502.12996: H = 30, τ = H, outer lr 0.4
    "DelayedDiLoCo": {"sync_every": 30, "overlap": 30, "outer": Nesterov(lr=0.4, momentum=0.9), "outer_at": "learners"},
    "EagerDiLoCo": {
        "sync_every": 30, "overlap": 30, "outer": Nesterov(lr=0.4, momentum=0.9), "outer_at": "learners",
        "adopt": Eager(),
    },
    # arXiv 2604.21428: P = 24, H = 24, τ = 2, K = 1 + grace, radial-directional merge, tokens²/steps
    "DecoupledDiLoCo": {
        "sync_every": 24, "overlap": 2, "fragments": Balanced(24), "wait": False, "up": BF16(), "down": BF16(),
        "weight": "tokens^2/steps",
        "quorum": {"type": "Called", "at_least": 1, "grace": 0.8, "grace_cap_s": 10.0, "late": "merge"},
        "partial": "scale",
        "outer": Nesterov(lr=0.7, momentum=0.9), "merge": RadialDirectional(),
    },
    # arXiv 2508.15706: H = 15, k = 128 of 4096 in 2 bits, β = 0.95, outer lr 1 without momentum, mean over senders
    "SparseLoCo": {
        "sync_every": 15, "up": codec_from_name("topk-128-2bit"), "error_feedback": 0.95, "merge": SenderMean(),
        "outer": SGD(lr=1.0),
    },
    # arXiv 2401.09135: Delayed Nesterov with N learners, c = 0, dynamic local steps
    "AsyncDiLoCo": {
        "sync_every": 50, "wait": False, "weight": "tokens",
        "quorum": {"type": "Pushed", "at_least": 1, "late": "merge", "dynamic_steps": True},
        "outer": DelayedNesterov(lr=0.7, momentum=0.9, buffer=4, c=0.0),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_papers_defaults(name: str) -> None:
    method = PRESETS[name]()
    expected = {**_answers(Method(name="", paper="")), **DEFAULTS[name], "name": name, "paper": method.paper}
    assert _answers(method) == expected
    assert any(year in method.paper for year in ("20", "arXiv"))
    assert method.paper.split(",")[0] in (PRESETS[name].__doc__ or "") or name == "DataParallel"


def _answers(method: Method) -> dict[str, Any]:
    answers = {field.name: getattr(method, field.name) for field in fields(Method)}
    return answers | {"quorum": method.quorum.to_dict()}


MANY = [
    *(preset() for preset in PRESETS.values()),
    DataParallel(average="parameters"),
    DataParallel(codec="int8", fragments=Balanced(3)),
    LocalSGD(sync_every=3, weight="tokens", codec=("bf16", "fp32")),
    DiLoCo(
        sync_every=30, overlap=30, codec="int4", error_feedback=True, outer=Adam(lr=0.1), quorum=AllLive(at_least=2)
    ),
    StreamingDiLoCo(
        sync_every=12, offsets=(3, 6, 12), mix=0.0, fragments=Named([["a.*"], ["b.*"], ["c"]]), codec=Int4(block=128)
    ),
    replace(DiLoCo(), wait=False),
]


@pytest.mark.parametrize("method", MANY, ids=lambda method: method.name)
def test_a_method_survives_json(method: Method) -> None:
    again = Method.from_dict(json.loads(json.dumps(method.to_dict())))
    assert again == method
    assert hash(again) == hash(method)
    assert method.difference(again) is None


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_every_codec(name: str, codec: str) -> None:
    method = PRESETS[name](codec=codec)
    assert (method.up, method.down) == (CODECS[codec], CODECS[codec])
    held, payload = GlobalFragment.first(method, 0, torch.zeros(70)), method.up.encode(torch.ones(70))
    places = [Placement(TensorSpec("w", (70,), "float32"), 0)]
    closed = close(method, held, [Encoded("a", (payload,), 1.0)], places)
    assert apply_update(method, held, closed.update, closed.payload, places).held.digest == closed.held.digest


def test_codecs_may_differ_by_direction() -> None:
    for given in (("int4", "fp32"), ["int4", "fp32"], {"up": "int4"}, (Int4(), FP32())):
        method = DiLoCo(codec=given)
        assert (method.up, method.down) == (Int4(), FP32())
    with pytest.raises(ConfigError, match="unknown codec direction 'upp'; did you mean 'up'"):
        DiLoCo(codec={"upp": "int4"})
    for wrong in ([], ["int4"], ("int4", "fp32", "fp32")):
        with pytest.raises(ConfigError, match="name one codec for both directions, or two: up and down"):
            DiLoCo(codec=wrong)


def test_the_presets_keywords_are_the_methods_fields() -> None:
    method = StreamingDiLoCo(
        sync_every=24, overlap=2, offsets=[6, 12, 18, 24], mix=0.25, fragments={"type": "Balanced", "num_fragments": 4},
        codec="int8",
        outer={"type": "SGD", "lr": 0.5}, error_feedback=True, weight="tokens", quorum=AllLive(at_least=3),
    )  # fmt: skip
    assert method.schedule(4).offsets == (6, 12, 18, 24)
    assert method.adopt == Mix(0.25)
    assert method.fragments == Balanced(4)
    assert method.outer == SGD(lr=0.5)
    assert (method.weight, method.quorum.at_least, method.error_feedback) == ("tokens", 3, True)
    assert LocalSGD(mix=0.0).adopt == Replace()
    assert StreamingDiLoCo(fragments=Whole()).fragments == Whole()


def test_a_table_names_a_preset_and_its_keywords() -> None:
    table = {
        "preset": "StreamingDiLoCo",
        "sync_every": 30,
        "codec": {"up": "e3m0", "down": "bf16"},
        "quorum": {"type": "AllLive", "at_least": 2},
    }
    method = method_from_table(table)
    assert method == StreamingDiLoCo(sync_every=30, codec=("e3m0", "bf16"), quorum=AllLive(at_least=2))
    assert method_from_table({"preset": "DataParallel", "average": "parameters"}) == DataParallel(average="parameters")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "names no preset; set preset to one of DataParallel, LocalSGD, DiLoCo, StreamingDiLoCo"),
        ({"preset": "Diloco"}, "there is no preset 'Diloco'; did you mean 'DiLoCo'?"),
        ({"preset": 3}, "there is no preset 3"),
        ({"preset": "DiLoCo", "sync_evry": 3}, "unknown DiLoCo keyword 'sync_evry'; did you mean 'sync_every'?"),
        ({"preset": "LocalSGD", "outer": {"type": "SGD", "lr": 1.0}}, "unknown LocalSGD keyword 'outer'"),
        ({"preset": "DataParallel", "sync_every": 1}, "unknown DataParallel keyword 'sync_every'"),
        ({"preset": "DiLoCo", "codec": "e3m1"}, "no codec 'e3m1'; did you mean 'e3m0'?"),
        ({"preset": "DiLoCo", "outer": {"type": "Nestrov", "lr": 1.0}}, "did you mean 'Nesterov'?"),
        ({"preset": "DiLoCo", "quorum": {"type": "AllLive", "at_least": 0}}, "at least 1"),
        ({"preset": "DataParallel", "average": "gradient"}, "average is 'gradient'; use 'gradients' or 'parameters'"),
    ],
)
def test_a_wrong_table_is_an_error_that_helps(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        method_from_table(table, "run.toml")
    assert str(caught.value).startswith("run.toml: [method] ")
    assert says in str(caught.value)


def test_unknown_fields_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown method field 'sync_evry'; did you mean 'sync_every'"):
        Method.from_dict({**DiLoCo().to_dict(), "sync_evry": 3})


def test_a_difference_is_said_in_words() -> None:
    here, there = DiLoCo(sync_every=100), DiLoCo(sync_every=50, codec=("int4", "fp32"))
    assert here.difference(there) == "sync_every is 100 here and 50 there, up is 'fp32' here and 'int4' there"
    assert here.difference(replace(here, name="mine", paper="none")) is None
    assert LocalSGD(sync_every=500).difference(DiLoCo(outer=SGD(lr=1.0))) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DiLoCo(sync_every=0), "sync_every must be a whole number of at least 1, not 0"),
        (lambda: DiLoCo(sync_every=-3), "sync_every must be a whole number of at least 1, not -3"),
        (lambda: DiLoCo(sync_every=None), "sync_every must be a whole number of at least 1, not None"),  # type: ignore[arg-type]
        (lambda: StreamingDiLoCo(overlap=None), "overlap"),  # type: ignore[arg-type]
        (lambda: DiLoCo(sync_every=10.0), "sync_every must be a whole number"),  # type: ignore[arg-type]
        (lambda: DiLoCo(sync_every=10, overlap=11), "overlap=11 exceeds sync_every=10"),
        (lambda: DiLoCo(sync_every=10, offsets=[11]), "offset 11 must be a whole number from 0 to sync_every=10"),
        (lambda: DiLoCo(mix=1.5), "Mix\\(alpha=…\\) must be a number from 0 to 1"),
        (lambda: DiLoCo(weight="token"), "weight is 'token'; use one of 'uniform', 'tokens'"),
        (lambda: DiLoCo(error_feedback=True), "error_feedback has no effect with the lossless codec 'fp32'"),
        (lambda: DiLoCo(error_feedback=1.5, codec="int4"), "error_feedback must be a number from 0 to 1"),
        (lambda: replace(DiLoCo(), wait="no"), "wait is 'no'; use true or false"),
        (lambda: replace(DiLoCo(), exchanged="weights"), "exchanged is 'weights'; use one of"),
        (lambda: replace(DataParallel(), sync_every=2), "averaging gradients needs sync_every=1, not 2"),
        (lambda: DiLoCo(sync_every=((0, 4), (8, 2)), overlap=3), "overlap=3 exceeds sync_every=2"),
        (lambda: replace(EagerDiLoCo(), overlap=7), "needs overlap=H or 2H, not overlap=7"),
        (lambda: replace(EagerDiLoCo(), merge=CoordinateMedian()), "use merge=Mean()"),
        (lambda: replace(EagerDiLoCo(), outer_at="syncer"), "overlap=30 exceeds|set outer_at='learners'"),
        (lambda: replace(EagerDiLoCo(), wait=False), "use wait=True"),
        (lambda: replace(DelayedDiLoCo(), adopt=Mix(0.5)), r"needs adopt=Replace\(\) or Eager\(\)"),
        (lambda: replace(DelayedDiLoCo(), quorum=Called()), "needs a schedule that all learners follow, not Called"),
        (lambda: replace(DecoupledDiLoCo(), wait=True), r"use wait=False with Called\(\)"),
        (lambda: replace(DiLoCo(), partial="scale"), "a scheduled round takes the mean"),
        (lambda: DecoupledDiLoCo(outer=DelayedNesterov()), "divides once more"),
        (lambda: replace(DiLoCo(outer=SGD(lr=1.0)), merge=HeLoCo()), "has none"),
        (lambda: DecoupledDiLoCo(merge=CoordinateMedian()), "use weight='uniform' with it, not 'tokens\\^2/steps'"),
        (lambda: replace(DiLoCo(weight="tokens"), merge=MultiKrum()), r"MultiKrum\(\) counts every learner the same"),
        (lambda: DiLoCo(outer="adam"), "outer is 'adam'; use one of SGD"),
        (lambda: AllLive(drop_seed=3), "has no effect with drop=0"),
        (lambda: DiLoCo(outer=DelayedNesterov(), quorum=AllLive(at_least=2)), "waits for several; use at_least=1"),
        (lambda: DiLoCo(overlap=1, quorum=AllLive(drop=0.5)), "needs overlap=0, not 1"),
        (lambda: replace(DiLoCo(), adopt=KeepDisplacement()), "set overlap"),
        (lambda: replace(DataParallel(), screen=NormOutliers()), "needs screen=None"),
        (lambda: EagerDiLoCo(intervals=3), "1 interval or 2"),
        (lambda: SparseLoCo(average="all"), "use 'senders' or 'learners'"),  # type: ignore[arg-type]
        (lambda: replace(DataParallel(), overlap=1), "averaging gradients needs overlap=0, not 1"),
        (lambda: replace(DataParallel(), outer=Nesterov()),
         "averaging gradients needs outer=SGD\\(lr=1.0\\), not Nesterov"),
        (lambda: replace(DataParallel(), adopt=Mix(0.5)), "averaging gradients needs adopt=Replace\\(\\)"),
        (lambda: replace(DataParallel(), weight="tokens"), "averaging gradients needs weight='uniform'"),
        (lambda: replace(DataParallel(), wait=False), "averaging gradients needs wait=True"),
        (lambda: replace(DataParallel(average="parameters"), sync_every=4), "averaging parameters needs sync_every=1"),
        (lambda: StreamingDiLoCo(offsets=(50, 100)).schedule(3), "needs one offset for each of the 3 fragments"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize("outer", [Nesterov(), DelayedNesterov(), Adam(lr=0.1)], ids=str)
def test_heloco_takes_any_outer_momentum(outer: Outer) -> None:
    assert replace(DiLoCo(outer=outer), merge=HeLoCo()).merge == HeLoCo()


def test_every_fragment_is_sent_after_every_step_where_there_is_only_one() -> None:
    schedule = DataParallel(fragments=Balanced(3)).schedule(3)
    assert schedule.sends(1) == schedule.sends(7) == (0, 1, 2)


def test_a_run_file_may_replace_the_merge_of_any_preset() -> None:
    table = {
        "preset": "DiLoCo",
        "sync_every": 20,
        "merge": {"type": "TrimmedMean", "trim": 0.2},
        "screen": {"type": "NormOutliers"},
    }
    method = method_from_table(table)
    assert method == replace(DiLoCo(sync_every=20), merge=TrimmedMean(0.2), screen=NormOutliers())
    with pytest.raises(ConfigError, match="did you mean 'merge'"):
        method_from_table({"preset": "DiLoCo", "merg": {"type": "Mean"}})
    with pytest.raises(ConfigError, match=r"use wait=False with Called"):
        method_from_table({"preset": "DiLoCo", "quorum": {"type": "Called"}})
    with pytest.raises(ConfigError, match="a scheduled round takes the mean"):
        method_from_table({"preset": "DiLoCo", "partial": "scale"})


OWN_OVERLAP = {
    "eager": (EagerDiLoCo(sync_every=4), 4, "has no effect with"),
    "delayed": (DelayedDiLoCo(sync_every=4), 4, "has no effect with"),
    "gradients": (DataParallel(), 0, "has no effect with"),
    "called": (DecoupledDiLoCo(sync_every=6), 2, "has no effect with"),
    "changing H": (StreamingDiLoCo(sync_every=((0, 6), (24, 8))), 2, "needs one sync_every"),
    "longer than a period": (StreamingDiLoCo(sync_every=6), 7, "exceeds sync_every=6"),
    "nothing to keep": (replace(StreamingDiLoCo(sync_every=6), adopt=KeepDisplacement()), 0, "set overlap"),
}


@pytest.mark.parametrize("name", OWN_OVERLAP)
def test_an_overlap_of_ones_own_is_refused_where_it_has_no_meaning(name: str) -> None:
    method, overlap, says = OWN_OVERLAP[name]
    with pytest.raises(ConfigError, match=says):
        method.with_own_overlap(overlap)


def test_a_learner_with_an_overlap_of_its_own_follows_the_method_otherwise() -> None:
    method = StreamingDiLoCo(sync_every=6, overlap=2)
    own = method.with_own_overlap(5)
    assert own.difference(method) == "overlap is 5 here and 2 there"
    assert Rules.of(own, 3).schedule.overlap == 5
