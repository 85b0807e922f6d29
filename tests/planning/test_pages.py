"""The tables of studies/published.md are those that their commands make."""

import pytest
from studies import utilization
from studies.pages import filled


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    page = utilization.PAGE.read_text(encoding="utf-8")
    assert filled(page, utilization.tables()) == page, "run python -m studies.utilization"


def test_a_line_of_the_table_holds_all_three() -> None:
    table = utilization.table(utilization.TABLE_5[2:3]).splitlines()
    assert table[2] == "| 1B overlap of one outer step, FP4, H = 100 | printed | 0.1 | 0.2 | 0.2 | 0.2 | 0.2 |"
    assert table[3] == "|  | ours, their convention | 0.1 | 0.2 | 0.2 | 0.2 | 0.2 |"
    assert table[4].startswith("|  | ours, steady | 0.215 | 0.345 |")


def test_a_block_is_filled_and_others_are_left_alone() -> None:
    page = "a\n<!-- table one -->\nold\n<!-- end -->\n<!-- table two -->\nkept\n<!-- end -->\n"
    assert filled(page, {"one": "new\n"}) == page.replace("old", "new")
    assert filled(filled(page, {"one": "new"}), {"one": "new"}) == page.replace("old", "new")
    with pytest.raises(KeyError, match="<!-- table three -->"):
        filled(page, {"three": ""})
