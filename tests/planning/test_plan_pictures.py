"""The pictures of each plan: points on their curves, keys that name the curves, what is recommended."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.figures import key_of, labels_of, names_of, traces_of

from diloco.planning import pictures
from diloco.planning.advice import advice_inputs, advise
from diloco.planning.bandwidth import GraphLinkModel, LinkModel, SyncerLinkModel, required_bit_per_s
from diloco.planning.goodput import Fleet, LearnerSpeeds, simulate
from diloco.planning.scaling_laws import estimate_scaling
from diloco.planning.settings import setting_for
from diloco.planning.site import load_site
from diloco.planning.training_time import NETWORKS, Link, TrainingPlan, wall_clock
from diloco.planning.workload import load_workload
from diloco.report.drawing import Figure, Picture

ROOT = Path(__file__).parents[2]


def figure_of(picture: Picture) -> Figure:
    """The figure of a picture, once its table has as many columns as heads and its key names no curve twice."""
    assert all(len(row) == len(picture.heads) for row in picture.rows)
    names = names_of(key_of(picture.figure))
    assert len(set(names)) == len(names)
    return picture.figure


def require_on_its_curve(figure: Figure, points: str, curve: str) -> None:
    drawn = traces_of(figure)
    on = dict(zip(drawn[curve]["x"], drawn[curve]["y"], strict=True))
    assert drawn[points]["x"]
    assert [on[x] for x in drawn[points]["x"]] == pytest.approx(drawn[points]["y"], rel=1e-5)


# --------------------------------------------------------------------------------------------------------------- links


def question(method: str, *, learners: int | None = None, **options: str | float) -> LinkModel:
    workload = load_workload("1b", None)
    setting = setting_for(workload, method, **options)  # type: ignore[arg-type]
    if learners is None:
        return GraphLinkModel(workload, setting)
    return SyncerLinkModel(workload, replace(setting, down=setting.up), (1.0,) * learners)


@pytest.mark.parametrize(
    ("asked", "others"),
    [
        (question("streaming", overlap=1, up="e3m0"), {"data parallel", "DiLoCo", "Streaming DiLoCo", "eager updates"}),
        (question("data-parallel"), {"DiLoCo", "Streaming DiLoCo", "Streaming DiLoCo, τ = 1", "eager updates"}),
        (question("streaming", overlap=5, latency_s=0.02),
         {"data parallel", "DiLoCo", "Streaming DiLoCo", "Streaming DiLoCo, τ = 1", "eager updates"}),
        (question("diloco", learners=1), {"Streaming DiLoCo", "Streaming DiLoCo, τ = 1", "eager updates"}),
        pytest.param(question("decoupled", learners=2), set(), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_link_asked_for_is_on_the_curve_and_the_key_names_the_curves(asked: LinkModel, others: set[str]) -> None:
    rates = [float(f"{rate:.6g}") for rate in required_bit_per_s(asked, [0.5, 0.99])]
    picture, timeline = pictures.link_pictures(asked, dict(zip(("50 %", "99 %"), rates, strict=True)))
    figure = figure_of(picture)
    own = pictures.curve_title(asked)
    assert set(names_of(key_of(figure))) == {own, "asked for", *others}
    require_on_its_curve(figure, "asked for", own)
    assert picture.text.startswith(f"{own}: {asked.setting.label}.")
    assert ("Dashed: other methods" in picture.text) == bool(others)
    assert [row[2] for row in picture.rows] == [f"{100 * asked.value(rate):.4g} %" for rate in rates]
    assert "computing" in key_of(figure_of(timeline))


def test_a_method_that_is_another_by_its_numbers_is_one_curve_with_it() -> None:
    """Streaming one fragment is DiLoCo, and the picture says so."""
    asked = question("streaming", num_fragments=1)
    [picture, _] = pictures.link_pictures(asked, {"this link": 1e9})
    assert "Streaming DiLoCo, P = 1 = DiLoCo" in key_of(figure_of(picture))


# ------------------------------------------------------------------------------------------------------------- goodput


@pytest.mark.parametrize("mode", ["data-parallel", "elastic", "decoupled"])
@pytest.mark.parametrize(
    "speeds",
    [LearnerSpeeds(), pytest.param(LearnerSpeeds(0.05, (1.0, 0.7)), marks=pytest.mark.slow)],
    ids=["formula", "simulated"],
)
def test_this_plan_is_on_the_curve_of_its_mode(mode: str, speeds: LearnerSpeeds) -> None:
    fleet = Fleet(100_000, 2, mode, speeds=speeds)  # type: ignore[arg-type]
    found = {each: simulate(replace(fleet, mode=each)) for each in pictures.MODES}
    goodput, time = pictures.goodput_pictures(fleet, found, 0)
    figure = figure_of(goodput)
    is_formula = found[fleet.mode].closed_form is not None
    points = f"this plan, {'by formula' if is_formula else 'simulated: 95 % interval'}"
    require_on_its_curve(figure, points, pictures.mode_title(fleet, fleet.mode))
    assert ("error_y" in traces_of(figure)[points]) == (not is_formula)  # a formula has no confidence interval
    marked = [label.endswith("*") for label in labels_of(figure_of(time))]
    assert marked == [each == mode for each in found]


def test_a_fleet_of_one_learner_is_elastic_and_the_picture_says_so() -> None:
    fleet = Fleet(8)
    found = {each: simulate(replace(fleet, mode=each)) for each in pictures.MODES}
    goodput, _ = pictures.goodput_pictures(fleet, found, 0)
    assert "elastic data parallel = decoupled" in key_of(figure_of(goodput))


# ----------------------------------------------------------------------------------------------------------- wallclock


def plans(learners: Sequence[int], **networks: Link) -> pictures.Found:
    return [
        (name, plan, wall_clock(plan))
        for name, link in networks.items()
        for number in learners
        for plan in [TrainingPlan(1e9, 2e10, 1e6, 32, number, across=link)]
    ]


def test_learners_that_take_the_same_hours_share_a_curve_and_all_are_named() -> None:
    phases, hours = pictures.hours_pictures(plans((1, 2, 4, 8), **NETWORKS))
    figure = figure_of(hours)
    assert names_of(key_of(figure)) == ["DiLoCo, M = 2", "DiLoCo, M = 4", "DiLoCo, M = 8", "data parallel"]
    assert len(figure["data"]) == 2
    assert key_of(figure_of(phases)) == ["computing", "reducing within a learner", "reducing across sites"]


def test_a_phase_that_takes_no_time_has_no_key_and_the_link_that_is_asked_about_is_in_the_picture() -> None:
    phases, hours = pictures.hours_pictures(plans((1, 32), slow=Link(1e6, 0.0)))
    assert key_of(figure_of(phases)) == ["computing", "reducing across sites"]  # a learner is one chip
    curve = figure_of(hours)["data"][0]
    assert (curve["x"][0], curve["x"][-1]) == (1e-3, 1e3)


# ------------------------------------------------------------------------------------------------------------- scaling


@pytest.mark.parametrize(("parameters", "learners"), [(1.3e9, 4), (7e10, 3), (3.5e7, 1)])
def test_this_model_is_on_the_curve_of_its_learners(parameters: float, learners: int) -> None:
    for picture in pictures.scaling_pictures(estimate_scaling(parameters, learners)):
        figure = figure_of(picture)
        require_on_its_curve(figure, "this model", f"M = {learners}")
        assert "measured sizes" in key_of(figure)


def test_one_thing_has_one_colour_in_every_picture() -> None:
    shown = [
        pictures.hours_pictures(plans((1, 2), low=NETWORKS["low"]))[1],
        pictures.scaling_pictures(estimate_scaling(1e9, 2))[0],
        pictures.link_pictures(question("diloco"), {"this link": 1e9})[0],
    ]
    assert len({traces_of(figure_of(picture))["data parallel"]["line"]["color"] for picture in shown}) == 1


# -------------------------------------------------------------------------------------------------------------- advice


@pytest.mark.parametrize("choose", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4))])
def test_the_recommended_and_the_chosen_method_stand_out(choose: int) -> None:
    case = advice_inputs(load_site(ROOT / "examples" / "site.toml"))
    ranked = advise(case)
    shown = [(rank, ranked[rank - 1]) for rank in (1, 2, 4, 13, 14)]
    for picture in pictures.advice_pictures(case, shown, choose):
        labels = labels_of(figure_of(picture))
        for label, row, (rank, outcome) in zip(labels, picture.rows, shown, strict=True):
            role = pictures.mark(rank, choose)
            assert label.endswith("*") == bool(role)
            title = f"{outcome.setting.title}: {role}" if role else outcome.setting.title
            assert label.startswith(title)
            assert row[0] == f"{outcome.setting.label}{f' ({role})' if role else ''}"
    assert [pictures.mark(rank, choose) for rank in (1, 2, 4)].count("chosen") == (choose > 1)


def test_hours_are_bars_unless_they_are_orders_of_magnitude_apart() -> None:
    case = advice_inputs(load_site(ROOT / "examples" / "site.toml"))
    ranked = list(enumerate(advise(case), 1))
    near, far = (figure_of(pictures.advice_pictures(case, shown, 1)[0]) for shown in (ranked[:4], ranked[:13]))
    assert near["layout"]["xaxis"]["range"][0] == 0.0
    for figure, scale, kind, num in ((near, "linear", "bar", 4), (far, "log", "scatter", 13)):
        [drawn] = figure["data"]
        assert (figure["layout"]["xaxis"]["type"], drawn["type"], len(drawn["x"])) == (scale, kind, num)
