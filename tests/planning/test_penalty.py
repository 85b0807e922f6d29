"""Expected loss penalties: the published numbers, unknown where nothing was measured, the studies' own as they say."""

import json
import math
from pathlib import Path

import pytest

from diloco.planning import penalty as table
from diloco.planning.penalty import LEARNERS, LOSSES, expected_penalty
from diloco.planning.settings import setting_for
from diloco.planning.workload import PRESETS, Workload

RESULTS = Path(__file__).parents[2] / "studies" / "results"
MODEL = PRESETS["1b"]


def percent(num_parameters: float, learners: int, method: str = "diloco", **numbers: object) -> float | None:
    setting = setting_for(MODEL, method, **numbers)  # type: ignore[arg-type]
    return expected_penalty(num_parameters, learners, setting).percent


@pytest.mark.parametrize("size", LOSSES)
@pytest.mark.parametrize("index", range(len(LEARNERS)))
def test_a_cell_of_the_table_is_itself(size: float, index: int) -> None:
    reference, *losses = LOSSES[size]
    assert percent(size, LEARNERS[index], sync_every=30) == pytest.approx(100 * (losses[index] / reference - 1))


def test_between_the_cells_it_is_between_them() -> None:
    for learners in range(1, 9):
        for size in (1e6, 1e8, 5e8, 2e9):
            around = [max(s for s in LOSSES if s <= size), min(s for s in LOSSES if s >= size)]
            ends = [
                100 * (LOSSES[s][1 + LEARNERS.index(m)] / LOSSES[s][0] - 1)
                for s in around
                for m in (max(m for m in LEARNERS if m <= learners), min(m for m in LEARNERS if m >= learners))
            ]
            found = percent(size, learners, sync_every=30)
            assert found is not None
            assert min(ends) - 1e-9 <= found <= max(ends) + 1e-9
    assert percent(1e12, 2, sync_every=30) == percent(2.4e9, 2, sync_every=30)


def test_a_longer_interval_costs_what_the_paper_says() -> None:
    at_50, at_1000 = percent(1e9, 2, sync_every=50), percent(1e9, 2, sync_every=1000)
    assert at_50 is not None
    assert at_1000 is not None
    nats = (at_1000 - at_50) / 100 * math.log(15.02)
    assert math.exp(nats) == pytest.approx(1.029)
    assert percent(1e9, 2, sync_every=10) == percent(1e9, 2, sync_every=30)


# loss of Streaming DiLoCo, FP4, H = 100, τ = 1, M = 2 beside data parallel's; arXiv 2501.18512
@pytest.mark.parametrize(
    ("size", "loss", "reference"), [(1e9, 2.66, 2.67), (1e9, 2.45, 2.45), (4e9, 2.26, 2.25), (35e6, 3.56, 3.51)]
)
def test_the_sum_of_terms_is_within_a_point_of_runs_that_vary_all_at_once(
    size: float, loss: float, reference: float
) -> None:
    found = percent(size, 2, "streaming", sync_every=100, overlap=1, up="e3m0")
    assert found == pytest.approx(100 * (loss / reference - 1), abs=1.0)


@pytest.mark.parametrize(("size", "learners", "method", "numbers", "words"), [
    (1e9, 16, "diloco", {}, "16 learners at H = 30: measured with up to 8"),
    (1e5, 2, "diloco", {}, "measured from 165,056 parameters on"),
    (1e9, 2, "diloco", {"sync_every": 2000}, "H = 2000: measured up to H = 1000"),
    (1e9, 2, "diloco", {"up": "2bit"}, "2bit: 4 bits a value were measured, not 2.0"),
    (1e9, 2, "streaming", {"overlap": 20}, "τ = 20: measured up to τ = 10"),
    (1e9, 2, "eager", {"sync_every": 100}, "eager updates: measured with 2 learners at H = 30 only"),
    (1e9, 4, "eager", {"sync_every": 30}, "eager updates: measured with 2 learners at H = 30 only"),
])  # fmt: skip
def test_what_nobody_measured_is_unknown_and_says_why(
    size: float, learners: int, method: str, numbers: dict[str, object], words: str
) -> None:
    workload = Workload("model", size, 24, 1.0)
    penalty = expected_penalty(size, learners, setting_for(workload, method, **numbers))  # type: ignore[arg-type]
    assert penalty.percent is None
    assert penalty.unknown is not None
    assert words in penalty.unknown


def test_every_known_term_names_its_source() -> None:
    for method in ("data-parallel", "diloco", "streaming", "eager", "decoupled"):
        numbers = {"sync_every": 30} if method == "eager" else {}
        penalty = expected_penalty(1e9, 2, setting_for(MODEL, method, up="int4", **numbers))  # type: ignore[arg-type]
        assert penalty.percent == pytest.approx(sum(term.percent or 0.0 for term in penalty.terms))
        assert all(term.source.startswith(("arXiv ", "study ", "by definition")) for term in penalty.terms)


def test_the_studies_found_what_is_claimed_of_them() -> None:
    def loss(study: str, arm: str) -> float:
        rows = json.loads((RESULTS / f"{study}.json").read_text())["table"]
        return next(float(row["loss"]) for row in rows if row["arm"] == arm)

    arms = ["data parallel", *(f"M={m}, chosen outer" for m in LEARNERS)]
    assert [loss("learners", arm) for arm in arms] == pytest.approx(LOSSES[min(LOSSES)], abs=5e-5)
    decoupled, diloco = loss("decoupled", "K = 1 + grace"), loss("learners", "M=4, chosen outer")
    assert pytest.approx(100 * (decoupled / diloco - 1), abs=0.01) == table.DECOUPLED_PERCENT
