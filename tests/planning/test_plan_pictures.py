"""The pictures of each plan: points on their curves, captions that name the curves there are, what is recommended."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from tests.planning.read_pictures import drawn_on, key_of, require_readable

from diloco.planning import goodput_pictures, link_pictures, scaling_pictures, training_time_pictures
from diloco.planning.advice import advise, case_of
from diloco.planning.advice_pictures import mark, pictures
from diloco.planning.goodput import Fleet, Speeds, simulate
from diloco.planning.picture_axes import NARROW_IN, WIDTH_IN
from diloco.planning.pictures import Picture
from diloco.planning.question import Around, Graph, Question, required_bit_per_s
from diloco.planning.scaling_laws import expect
from diloco.planning.settings import setting_for
from diloco.planning.site import load_site
from diloco.planning.training_time import NETWORKS, Link, TrainingPlan, wall_clock
from diloco.planning.workload import load_workload

ROOT = Path(__file__).parents[2]


def panel(picture: Picture) -> Axes:
    """The panel of a picture, once its key, at both widths, is what is drawn, and can be read."""
    for width_in in (NARROW_IN, WIDTH_IN):
        figure = picture.draw(width_in)
        [axes] = figure.axes
        drawn = drawn_on(axes)
        assert sorted(key_of(axes)) == (drawn if len(drawn) > 1 else key_of(axes))  # one thing needs no key
        require_readable(figure)
    return axes


def names_of(key: Sequence[str]) -> list[str]:
    """The curves that a key names, those that coincide each by itself."""
    return [name for entry in key for name in re.split(r" [=≈] (?=\D)", entry)]


def require_on_its_curve(axes: Axes, points: str, curve: str) -> None:
    by_name = {name: line for line in axes.lines for name in names_of([str(line.get_label()).replace("\n", " ")])}
    on = dict(zip(by_name[curve].get_xdata(), by_name[curve].get_ydata(), strict=True))
    x, y = by_name[points].get_xdata(), by_name[points].get_ydata()
    assert len(x)
    assert [on[each] for each in x] == pytest.approx(list(y), rel=1e-9)


# --------------------------------------------------------------------------------------------------------------- links


def question(method: str, *, learners: int | None = None, **options: str | float) -> Question:
    workload = load_workload("1b", None)
    setting = setting_for(workload, method, **options)  # type: ignore[arg-type]
    if learners is None:
        return Graph(workload, setting)
    return Around(workload, replace(setting, down=setting.up), (1.0,) * learners)


@pytest.mark.parametrize(
    ("asked", "others"),
    [
        (question("streaming", overlap=1, up="e3m0"), {"data parallel", "DiLoCo", "Streaming DiLoCo", "eager updates"}),
        (question("data-parallel"), {"DiLoCo", "Streaming DiLoCo", "Streaming DiLoCo, τ = 1", "eager updates"}),
        (question("streaming", overlap=5, latency_s=0.02),
         {"data parallel", "DiLoCo", "Streaming DiLoCo", "Streaming DiLoCo, τ = 1", "eager updates"}),
        (question("diloco", learners=1), {"Streaming DiLoCo", "Streaming DiLoCo, τ = 1", "eager updates"}),
        (question("decoupled", learners=2), set()),
    ],
)  # fmt: skip
def test_what_was_asked_for_is_on_the_curve_and_the_caption_names_the_curves(asked: Question, others: set[str]) -> None:
    rates = [float(f"{rate:.6g}") for rate in required_bit_per_s(asked, [0.5, 0.99])]
    picture, timeline = link_pictures.pictures(asked, dict(zip(("50 %", "99 %"), rates, strict=True)))
    axes = panel(picture)
    own = link_pictures.title(asked)
    assert set(names_of(key_of(axes))) == {own, "asked for", *others}
    require_on_its_curve(axes, "asked for", own)
    first, _, beside = picture.text.partition(" Beside it, with the same codec and latency: ")
    assert first == f"{own}: {asked.setting}."
    named = re.sub(r", every step|every \d+ steps: ", "", beside.removesuffix("."))
    assert set(filter(None, named.split("; "))) == others
    assert [row[2] for row in picture.rows] == [f"{100 * asked.value(rate):.4g} %" for rate in rates]
    panel(timeline)


def test_a_method_that_is_another_by_its_numbers_is_one_curve_with_it() -> None:
    """Streaming one fragment is DiLoCo, and the picture says so."""
    asked = question("streaming", num_fragments=1)
    [picture, _] = link_pictures.pictures(asked, {"this link": 1e9})
    assert "Streaming DiLoCo, P = 1 = DiLoCo" in key_of(panel(picture))


# ------------------------------------------------------------------------------------------------------------- goodput


@pytest.mark.parametrize("mode", ["data-parallel", "elastic", "decoupled"])
@pytest.mark.parametrize("speeds", [Speeds(), Speeds(0.05, (1.0, 0.7))], ids=["formula", "simulated"])
def test_this_plan_is_on_the_curve_of_its_mode(mode: str, speeds: Speeds) -> None:
    fleet = Fleet(100_000, 2, mode, speeds=speeds)  # type: ignore[arg-type]
    found = {each: simulate(replace(fleet, mode=each)) for each in goodput_pictures.NAMES}
    goodput, time = goodput_pictures.pictures(fleet, found, 0)
    axes = panel(goodput)
    is_formula = found[fleet.mode].closed_form is not None
    points = f"this plan, {'by formula' if is_formula else 'simulated: 95 % interval'}"
    require_on_its_curve(axes, points, goodput_pictures.title(fleet, fleet.mode))
    assert bool(axes.containers) == (not is_formula)  # a formula has no confidence interval
    marked = [label.get_fontweight() for label in panel(time).get_yticklabels()]
    assert marked == ["bold" if each == mode else "normal" for each in found]


def test_a_fleet_of_one_learner_is_elastic_and_the_picture_says_so() -> None:
    fleet = Fleet(8)
    found = {each: simulate(replace(fleet, mode=each)) for each in goodput_pictures.NAMES}
    goodput, _ = goodput_pictures.pictures(fleet, found, 0)
    assert "elastic data parallel = decoupled" in key_of(panel(goodput))


# ----------------------------------------------------------------------------------------------------------- wallclock


def plans(learners: Sequence[int], **networks: Link) -> training_time_pictures.Found:
    return [
        (name, plan, wall_clock(plan))
        for name, link in networks.items()
        for number in learners
        for plan in [TrainingPlan(1e9, 2e10, 1e6, 32, number, across=link)]
    ]


def test_learners_that_take_the_same_hours_share_a_curve_and_all_are_named() -> None:
    phases, hours = training_time_pictures.pictures(plans((1, 2, 4, 8), **NETWORKS))
    axes = panel(hours)
    assert names_of(key_of(axes)) == ["DiLoCo, M = 2", "DiLoCo, M = 4", "DiLoCo, M = 8", "data parallel"]
    assert len(axes.lines) == 2
    assert key_of(panel(phases)) == ["computing", "reducing within a learner", "reducing across sites"]


def test_a_phase_that_takes_no_time_has_no_key_and_the_link_that_is_asked_about_is_in_the_picture() -> None:
    phases, hours = training_time_pictures.pictures(plans((1, 32), slow=Link(1e6, 0.0)))
    assert key_of(panel(phases)) == ["computing", "reducing across sites"]  # a learner is one chip
    low, high = panel(hours).get_xlim()
    assert low <= 1e-3 < 1e3 <= high


# ------------------------------------------------------------------------------------------------------------- scaling


@pytest.mark.filterwarnings("ignore:the")
@pytest.mark.parametrize(("parameters", "learners"), [(1.3e9, 4), (7e10, 3), (3.5e7, 1)])
def test_this_model_is_on_the_curve_of_its_learners(parameters: float, learners: int) -> None:
    for picture in scaling_pictures.pictures(expect(parameters, learners)):
        axes = panel(picture)
        require_on_its_curve(axes, "this model", f"M = {learners}")
        assert "sizes that were measured" in key_of(axes)


def test_one_thing_has_one_colour_in_every_picture() -> None:
    shown: list[Callable[[], Axes]] = [
        lambda: panel(training_time_pictures.pictures(plans((1, 2), low=NETWORKS["low"]))[1]),
        lambda: panel(scaling_pictures.pictures(expect(1e9, 2))[0]),
        lambda: panel(link_pictures.pictures(question("diloco"), {"this link": 1e9})[0]),
    ]
    colours = {str(line.get_color()) for draw in shown for line in draw().lines if line.get_label() == "data parallel"}
    assert len(colours) == 1


# -------------------------------------------------------------------------------------------------------------- advice


@pytest.mark.parametrize("choose", [1, 2, 4])
def test_the_recommended_and_the_chosen_method_stand_out(choose: int) -> None:
    case = case_of(load_site(ROOT / "examples" / "site.toml"))
    ranked = advise(case)
    shown = [(rank, ranked[rank - 1]) for rank in (1, 2, 4, 13, 14)]
    for picture in pictures(case, shown, choose):
        labels = panel(picture).get_yticklabels()
        for label, row, (rank, outcome) in zip(labels, picture.rows, shown, strict=True):
            role = mark(rank, choose)
            assert label.get_fontweight() == ("bold" if role else "normal")
            title = f"{outcome.setting.title}: {role}" if role else outcome.setting.title
            assert label.get_text().replace("\n", " ").startswith(title)
            assert row[0] == f"{outcome.setting.label}{f' ({role})' if role else ''}"
    assert [mark(rank, choose) for rank in (1, 2, 4)].count("chosen") == (choose > 1)


def test_hours_are_bars_unless_they_are_orders_of_magnitude_apart() -> None:
    case = case_of(load_site(ROOT / "examples" / "site.toml"))
    ranked = list(enumerate(advise(case), 1))
    near, far = (panel(pictures(case, shown, 1)[0]) for shown in (ranked[:4], ranked[:13]))
    assert (near.get_xscale(), near.get_xlim()[0], len(near.patches)) == ("linear", 0.0, 4)
    assert (far.get_xscale(), len(far.patches), len(far.lines)) == ("log", 0, 13)
