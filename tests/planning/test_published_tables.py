"""Every printed cell of the papers' three tables comes out, and only what they published does."""

import pytest
from studies.published import TABLE_4, TABLE_5, TABLE_6, TARGETS, Row
from studies.utilization import PAGE

from diloco.errors import ConfigError
from diloco.planning.published_tables import GRID_GBIT_PER_S, published_run

ROWS = [*TABLE_4, *TABLE_5, *TABLE_6]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.convention}: {row.title}")
def test_printed_cells_digit_for_digit(row: Row) -> None:
    run = published_run(row.convention, row.model, row.method, **row.options)
    assert tuple(cell.text for cell in run.cells([target / 100 for target in TARGETS])) == row.cells


def test_all_tables_are_compared() -> None:
    """195 cells; the 60 others that are printed repeat rows of these."""
    assert (len(TABLE_4), len(TABLE_5), len(TABLE_6)) == (15, 9, 15)
    assert {len(row.cells) for row in ROWS} == {5}
    page = PAGE.read_text(encoding="utf-8")
    assert f"all {sum(len(row.cells) for row in ROWS)} printed cells" in " ".join(page.split())


def test_the_grid_is_numpys() -> None:
    import numpy as np

    assert pytest.approx(np.logspace(-1, 3, 50), rel=1e-14) == GRID_GBIT_PER_S  # a last bit of two ways to take a power


def test_no_printed_bandwidth_reaches_its_target_and_the_next_does() -> None:
    for row in ROWS:
        run = published_run(row.convention, row.model, row.method, **row.options)
        for target, cell in zip(TARGETS, run.cells([target / 100 for target in TARGETS]), strict=True):
            assert cell.gbit_per_s is not None
            if cell.text == "1000.0+":
                continue  # the end of the grid
            above = GRID_GBIT_PER_S[GRID_GBIT_PER_S.index(cell.gbit_per_s) + 1]
            assert run.utilization(cell.gbit_per_s) <= target / 100 < run.utilization(above)


def test_ends_of_the_grid() -> None:
    run = published_run("streaming-diloco", "100b", "data-parallel")
    assert [cell.text for cell in run.cells([1e-5, 0.9999])] == ["below 0.1", "1000.0+"]


def test_one_row_may_be_asked_for_in_two_ways() -> None:
    def cells(method: str, **options: int | str) -> list[str]:
        return [cell.text for cell in published_run("streaming-diloco", "1b", method, **options).cells([0.5, 0.99])]

    assert cells("eager", sync_every=30, up="e3m0") == cells("streaming", sync_every=30, overlap=30, up="e3m0")
    assert cells("data-parallel") == cells("data-parallel", sync_every=100) == cells("data-parallel", sync_every=1)


@pytest.mark.parametrize(
    ("convention", "model", "method", "options", "says"),
    [
        ("streaming-diloco", "1b", "diloco", {"sync_every": 50}, "no --sync-every 50: its paper published 30, 100"),
        ("streaming-diloco", "1b", "diloco", {"sync_every": 0}, "no --sync-every 0"),
        ("streaming-diloco", "llama-405b", "diloco", {}, "no --model llama-405b"),
        ("streaming-diloco", "ours.toml", "diloco", {}, "no --model ours.toml"),
        ("streaming-diloco", "1b", "decoupled", {}, "no --method decoupled"),
        ("streaming-diloco", "1b", "streaming", {"overlap": 5}, "no --overlap 5"),
        ("streaming-diloco", "1b", "streaming", {"num_fragments": 4}, "no --fragments 4"),
        ("streaming-diloco", "1b", "streaming", {"up": "int4"}, "no --codec int4"),
        ("streaming-diloco", "1b", "streaming", {"down": "e3m0"}, "has no --codec-down"),
        ("streaming-diloco", "1b", "streaming", {"latency_s": 0.01}, "has no --latency"),
        ("scaling-laws", "10b", "diloco", {"sync_every": 1000}, "published 10, 50, 100, 300"),
        ("scaling-laws", "10b", "data-parallel", {"sync_every": 100}, "no --sync-every 100: its paper published 1"),
        ("scaling-laws", "1b", "diloco", {}, "published 10b, llama-405b, deepseek-v3"),
        ("scaling-laws", "10b", "streaming", {}, "no --method streaming"),
        ("scaling-laws", "10b", "diloco", {"up": "e3m0"}, "no --codec e3m0"),
    ],
)
def test_what_was_not_published_is_refused(
    convention: str, model: str, method: str, options: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        published_run(convention, model, method, **options)  # type: ignore[arg-type]
