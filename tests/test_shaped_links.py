"""The study of shaped links, as far as it needs no root: configuration, predictions, errors, tables. What it finds is
for itself to say."""

import math
import tomllib
from pathlib import Path

import pytest
from studies.pages import filled
from studies.shaped_links import cases, report, runs
from studies.shaped_links.__main__ import EVERYTHING, chosen
from studies.shaped_links.cases import CASES, DECOUPLED, DILOCO, FOUR_BIT, IN_TURNS, LONG, QUICK, STREAMING
from studies.shaped_links.links import PAYLOAD, bit_per_s, payload_bit_per_s
from torch import nn

from diloco.core.fragments import make_layout
from diloco.core.presets import method_from_table
from diloco.planning.exchange_plan import Merging

IMMEDIATELY = Merging()


def test_rates_are_written_as_tc_writes_them() -> None:
    assert [bit_per_s(each) for each in ("20mbit", "500kbit", "1.5gbit")] == [20e6, 500e3, 1.5e9]
    assert payload_bit_per_s("100mbit") == 100e6 * PAYLOAD
    for wrong in ("20", "20Mbps", "mbit", "0mbit", "-1gbit", "infgbit"):
        with pytest.raises(ValueError, match="write 20mbit, 500kbit or 1gbit"):
            bit_per_s(wrong)


@pytest.mark.parametrize("case", [*CASES, IN_TURNS], ids=lambda case: case.name)
def test_what_is_planned_is_what_is_run(case: cases.Case) -> None:
    method = method_from_table(tomllib.loads(case.run_file("10.0.0.1"))["method"])
    model = nn.Sequential(*(nn.Linear(cases.WIDTH, cases.WIDTH, bias=False) for _ in range(cases.LAYERS)))
    layout, exchange = make_layout(model, method.fragments), cases.exchange_for(case)
    assert sum(fragment.numel for fragment in layout.fragments) == cases.MODEL.num_parameters
    assert method.schedule(len(layout.fragments)) == exchange.schedule
    assert [method.up.encoded_bytes(fragment.numel) for fragment in layout.fragments] == exchange.up_bytes
    assert [method.down.encoded_bytes(fragment.numel) for fragment in layout.fragments] == exchange.down_bytes
    assert (method.quorum if case.is_called else None) == exchange.called
    assert method.wait != case.is_called


def test_a_prediction_by_hand() -> None:
    """DiLoCo: 2 s of steps, 16 MB up, a merge, four latencies, 16 MB down."""
    bytes_s = 8 * 16e6 / 20e6
    found = cases.prediction(DILOCO, 20e6, 0.01, Merging(0.2), num_steps=120)
    assert found.utilization == pytest.approx([2 / (2 + 2 * bytes_s + 0.2 + 0.04)] * 2)
    quicker = cases.prediction(DILOCO, 20e6, 0.01, Merging(0.2), num_steps=120, narrower=0.01)
    assert quicker.mean_utilization < found.mean_utilization


def test_runs_are_long_enough() -> None:
    slow = cases.prediction(DILOCO, 20e6, 0.0, IMMEDIATELY)
    assert cases.length_of(slow, DILOCO, LONG) == 3 * cases.SYNC_EVERY  # 44 s
    fast = cases.prediction(FOUR_BIT, 400e6, 0.0, IMMEDIATELY)
    assert cases.length_of(fast, FOUR_BIT, LONG) * cases.STEP_S == LONG.seconds
    assert cases.length_of(fast, FOUR_BIT, QUICK) * cases.STEP_S == QUICK.seconds
    called = cases.prediction(DECOUPLED, 20e6, 0.0, IMMEDIATELY)
    assert cases.length_of(called, DECOUPLED, LONG) == math.ceil(9 * called.period_steps) > LONG.seconds / cases.STEP_S


def test_options_choose() -> None:
    assert chosen(None, None) == EVERYTHING
    part = chosen(["20mbit"], ["int4", "torchft"])
    assert (part.cases, part.rates, part.in_turns, part.collective, part.torchft, part.span) == (
        (FOUR_BIT,),
        ("20mbit",),
        (),
        (),
        ("20mbit",),
        LONG,
    )
    assert chosen(None, ["streaming"]).cases == (STREAMING, FOUR_BIT)
    assert chosen(["20mbit"], ["collective"]).collective == ("20mbit",)
    assert chosen(None, None, quick=True).span == QUICK
    with pytest.raises(ValueError, match="no method is called data parallel; there are DiLoCo, fp32, "):
        chosen(None, ["data parallel"])
    with pytest.raises(ValueError, match="a rate of '20'"):
        chosen(["20"], None)


def test_the_pace_is_measured_after_the_first_versions() -> None:
    """Fragment 0 comes to version 3 in step 30 and to version 5 in step 110; the others stay behind."""
    adopted = [
        (step, [version, 0, 0, 2])
        for step, version in ((10, 1), (20, 2), (30, 3), (40, 3), (70, 4), (110, 5), (120, 5))
    ]
    assert runs._period_steps(adopted) == 40
    assert runs._period_steps(adopted[:3]) == math.inf


def test_errors_are_parts_of_what_was_measured() -> None:
    assert report.beside(0.5, 0.4) == {"predicted": 0.5, "measured": 0.4, "error": pytest.approx(0.25)}
    rows = [{"error": each} for each in (0.02, -0.04, 0.2)]
    assert report.summary(rows) == {"cells": 3, "median_error": 0.04, "worst_error": 0.2, "accepted": True}
    assert not report.summary([*rows, {"error": -0.25}])["accepted"]
    assert not report.summary([{"error": 0.1}, {"error": -0.12}, {"error": 0.0}])["accepted"]


def test_a_part_is_shown_without_the_rest() -> None:
    told = {"DiLoCo, fp32": {"fragment_bytes": 16_000_000, "merge_s": 0.25, "latency_s": 0.0005}}
    peer = {"bit_per_s": 10e6, "utilization": 0.14, **report.beside(0.13, 0.14)}
    narrow = {"bit_per_s": 5e6, "utilization": 0.07, **report.beside(0.06, 0.07)}
    values = {"told": told, "rows": [], "in_turns": [], "collective": [narrow], "torchft": [peer]}
    text = report.markdown(values)
    assert "| DiLoCo, fp32 | 16,000,000 | 0.250 | 0.50 |" in text
    assert "| A process group, streaming, fp32 | 0.07 |  |" in text
    assert "| torchft 0.2.0, streaming, fp32 |  | 0.14 |" in text
    assert "| the plan for both, among equals | 0.06 | 0.13 |" in text
    row = {
        "method": "Decoupled",
        "bit_per_s": 20e6,
        "judged": "period_steps",
        "utilization": 1.0,
        **report.beside(134.0, 130.0),
    }
    assert "| Decoupled | 20 | steps between merges | 134.0 | 130.0 | +3.1 % |" in report.cells_table([row])
    assert "| Decoupled |  |" in report.equals_table({**values, "rows": [row]})


def test_the_page_shows_the_results() -> None:
    values = report.results()
    assert report.summary(values["rows"]) == values["summary"]
    page = report.PAGE.read_text(encoding="utf-8")
    assert filled(page, report.tables(values)) == page, "run python -m studies.shaped_links --show"
    assert (report.RESULTS / f"{report.NAME}.md").read_text() == report.markdown(values)
    assert Path(report.RESULTS / f"{report.NAME}.png").exists()
