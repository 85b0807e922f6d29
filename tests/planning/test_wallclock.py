"""Wall clock: the paper's formulas, by hand and at their limits."""

from dataclasses import replace

import pytest
from studies import scaling_laws
from studies.pages import filled

from diloco.errors import ConfigError
from diloco.planning.training_time import NETWORKS, Link, TrainingPlan, wall_clock

JOB = TrainingPlan(num_parameters=1e9, tokens=2e10, batch_tokens=1e6, chips=256)


def test_the_papers_networks() -> None:
    assert {name: (link.bit_per_s, link.latency_s) for name, link in NETWORKS.items()} == {
        "high": (400e9, 1e-4),
        "medium": (100e9, 1e-3),
        "low": (10e9, 1e-2),
    }


@pytest.mark.parametrize("network", NETWORKS)
def test_data_parallel_by_hand(network: str) -> None:
    link = NETWORKS[network]
    found = wall_clock(replace(JOB, across=link))
    reduction_s = 2 * 1e9 * 16 / link.bit_per_s * (1 - 1 / 256) + link.latency_s
    assert found.steps == 20_000
    assert found.compute_s == pytest.approx(6 * 1e9 * 2e10 / (256 * 300e12))
    assert (found.within_s, found.across_s) == pytest.approx((0, 20_000 * reduction_s))
    assert found.utilization == pytest.approx(found.compute_s / (found.compute_s + found.across_s))


def test_diloco_by_hand() -> None:
    found = wall_clock(replace(JOB, learners=4, sync_every=30, across=NETWORKS["low"], outer_bits=4.25))
    assert found.within_s == pytest.approx(20_000 * (2 * 1e9 * 16 / 400e9 * (1 - 4 / 256) + 1e-4))
    assert found.across_s == pytest.approx(666 * (2 * 1e9 * 4.25 / 10e9 * (1 - 1 / 256) + 1e-2))
    assert found.across_bits == pytest.approx(666 * 2 * 1e9 * 4.25 * (1 - 1 / 256))
    assert found.total_s == pytest.approx(found.compute_s + found.within_s + found.across_s)


def test_limits() -> None:
    free = Link(1e30, 0.0)
    data_parallel, diloco = (
        wall_clock(replace(JOB, within=free, across=free, learners=learners)) for learners in (1, 4)
    )
    assert data_parallel.total_s == pytest.approx(diloco.total_s)
    assert wall_clock(replace(JOB, chips=4, learners=4)).within_s == 0  # a chip each: nothing to reduce within
    assert wall_clock(replace(JOB, chips=1)).across_s == 0
    assert wall_clock(replace(JOB, learners=4, sync_every=20_001)).across_s == 0
    low = replace(JOB, across=NETWORKS["low"])
    assert wall_clock(low).across_s / wall_clock(replace(low, learners=2, sync_every=100)).across_s == pytest.approx(
        100
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chips": 2, "learners": 4}, "2 chips cannot be shared by 4 learners"),
        ({"batch_tokens": 1e11}, "a batch of 100,000,000,000 tokens is more than all 20,000,000,000"),
        ({"num_parameters": -1.0}, "the number of parameters must be a finite number above 0, not -1.0"),
        ({"sync_every": 0}, r"sync_every=…\) must be a whole number of at least 1, not 0"),
    ],
)
def test_wrong_jobs(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(JOB, **changed)  # type: ignore[arg-type]


def test_the_page_is_up_to_date() -> None:
    page = scaling_laws.PAGE.read_text(encoding="utf-8")
    assert filled(page, scaling_laws.tables()) == page, "run python -m studies.scaling_laws"
