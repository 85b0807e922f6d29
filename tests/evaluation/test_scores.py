"""Scores, their intervals, and the tasks' documents."""

import json
import random
from pathlib import Path

import pytest
from studies.tasks import training_line

from diloco.errors import ConfigError
from diloco.evaluation import builtin_tasks as docs
from diloco.evaluation.builtin_tasks import BUILTIN_TASKS, write_task_files
from diloco.evaluation.scores import (
    ExportScores,
    Score,
    TaskResult,
    difference,
    differences,
    t_quantile,
    wilson_interval,
)

TEXT = "The quick brown fox jumps over the lazy dog while seven other foxes watch from under their trees. " * 8


def result(*values: float, documents: tuple[str, ...] | None = None, metric: str = "acc") -> TaskResult:
    names = tuple(map(str, range(len(values)))) if documents is None else documents
    return TaskResult("task", metric, "higher", Score.of(values), names, values)


# ------------------------------------------------------------------------------------------------------------ scores


def test_intervals_are_those_of_the_tables() -> None:
    for freedom, quantile in {1: 12.706, 3: 3.182, 6: 2.447, 10: 2.228, 30: 2.042, 120: 1.980}.items():
        assert t_quantile(freedom) == pytest.approx(quantile, abs=2e-3)
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_a_mean_has_an_interval_that_narrows_with_the_documents() -> None:
    score = Score.of([1.0, 2.0, 3.0, 4.0])
    assert (score.value, score.num) == (2.5, 4)
    assert score.error == pytest.approx(0.6455, abs=1e-4)
    assert (score.low, score.high) == pytest.approx((0.446, 4.554), abs=1e-3)
    wide, narrow = Score.of([1.0] * 10), Score.of([1.0] * 1000)
    assert wide.high == narrow.high == 1.0
    assert 0.7 < (wide.low or 0) < 0.9 < 0.99 < (narrow.low or 0) < 1.0  # all right, and yet not certain
    assert Score.of([3.0]) == Score(3.0, None, 1, None, None)


def test_differences_are_of_pairs() -> None:
    rng = random.Random(0)
    first = [rng.random() for _ in range(200)]
    gap = difference(result(*(value + 0.1 for value in first)), result(*first))
    assert gap is not None
    assert gap.value == pytest.approx(0.1)
    assert gap.error == pytest.approx(0.0, abs=1e-9)  # documents differ, pairs do not
    same = difference(result(*first), result(*first))
    assert same is not None
    assert (same.value, same.error, same.low, same.high) == (0.0, 0.0, 0.0, 0.0)


def test_what_was_scored_on_other_documents_is_not_compared() -> None:
    assert difference(result(1.0, 0.0, documents=("a", "b")), result(1.0, 0.0, documents=("a", "c"))) is None
    assert difference(result(1.0, documents=()), result(1.0, documents=())) is None
    assert difference(result(1.0, 0.0, metric="f1"), result(1.0, 0.0)) is None
    one, other = result(1.0, 0.0), result(0.0, 0.0)
    exports = ExportScores("a", 1, {one.name: one}), ExportScores("b", 1, {other.name: other, "only here": other})
    assert list(differences(exports[1], exports[0])) == ["task, acc"]


# --------------------------------------------------------------------------------------------------------- documents


def test_the_same_seed_makes_the_same_documents() -> None:
    for make in (docs.bracket_documents, docs.arithmetic_documents, lambda n, s: docs.cloze_documents(TEXT, n, s)):
        assert make(20, 1) == make(20, 1) != make(20, 2)


def test_the_right_choice_is_right_and_as_long_as_the_others() -> None:
    for document in docs.arithmetic_documents(500, 0):
        a, b = map(int, document.text.strip("\n=").split("+"))
        assert document.choices[document.answer] == str(a + b)
        assert docs.is_held_out(a, b)
        assert len(set(document.choices)) == 4
        assert len({len(choice) for choice in document.choices}) == 1
    for document in docs.bracket_documents(200, 0):
        text = document.text + document.choices[document.answer]
        for _ in range(len(text)):
            text = text.replace("()", "").replace("[]", "").replace("{}", "")
        assert not set(text) & set(")]}")  # whatever closes here closes what was opened last
    for document in docs.cloze_documents(TEXT, 50, 0, context=60):
        assert document.text + document.choices[document.answer] in TEXT
        assert len(document.text) <= 60
        assert len({len(choice) for choice in document.choices}) == 1


def test_no_sum_that_is_asked_for_is_trained() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        a, b = map(int, training_line(rng, "arithmetic").partition("=")[0].split("+"))
        assert not docs.is_held_out(a, b)
        assert not docs.is_held_out(b, a)


def test_a_fifth_of_the_sums_is_asked_for() -> None:
    for document in docs.arithmetic_documents(1000, 0):
        a, b = map(int, document.text.strip("\n=").split("+"))
        assert docs.is_held_out(a, b)
        assert docs.is_held_out(b, a)
    asked = sum(docs.is_held_out(a, b) for a in range(docs.SUMMANDS) for b in range(docs.SUMMANDS))
    assert 150 < asked < 250


def test_files_hold_the_documents(tmp_path: Path) -> None:
    write_task_files(tmp_path, BUILTIN_TASKS, text=TEXT, num=7)
    for name in BUILTIN_TASKS:
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert len(lines) == 7
        assert set(json.loads(lines[0])) == {"text", "choices", "answer"}
    with pytest.raises(ConfigError, match="too short"):
        write_task_files(tmp_path, ["diloco_cloze"], text="word")
    with pytest.raises(ConfigError, match="give one with --text FILE"):
        write_task_files(tmp_path, ["diloco_cloze"])
