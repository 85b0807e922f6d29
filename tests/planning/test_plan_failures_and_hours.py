"""`diloco plan goodput`, `wallclock` and `scaling` as a user calls them."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from studies import goodput as study
from tests.figures import figures_in

from diloco.cli import main

Call = Callable[..., tuple[object, str, str]]

GOODPUT = ("goodput", "--chips", "1200000", "--learners", "8")
HOURS = ("wallclock", "--model", "1b", "--chips", "256", "--batch-tokens", "1e6")
SCALING = ("scaling", "--parameters", "1.3e9", "--learners", "4")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", *arguments])
        return ended.value.code or 0, *capsys.readouterr()

    return run


def answer(call: Call, *arguments: str) -> Any:
    code, printed, said = call(*arguments, "--json")
    assert (code, said) == (0, "")
    return json.loads(printed)


# ------------------------------------------------------------------------------------------------------------ goodput


@pytest.mark.parametrize(("mode", "learners"), study.PUBLISHED)
def test_the_published_table(call: Call, mode: str, learners: int) -> None:
    for chips, percent in zip(study.CHIPS, study.PUBLISHED[mode, learners], strict=True):  # type: ignore[index]
        found = answer(call, "goodput", "--chips", str(chips), "--learners", str(learners), "--mode", mode)
        assert found["goodput_percent"] == pytest.approx(percent, abs=3.5)
        low, high = found["confidence_interval_percent"]
        assert low < found["goodput_percent"] < high
        assert found["closed_form_percent"] == pytest.approx(found["goodput_percent"], abs=0.7)


def test_an_answer_says_how_it_was_found(call: Call) -> None:
    found = answer(call, *GOODPUT, "--seed", "7")
    assert (
        found.items()
        >= {
            "confidence": 0.95,
            "mode": "decoupled",
            "chips": 1_200_000,
            "learners": 8,
            "seed": 7,
            "runs": 64,
            "elastic_learners": True,
            "waiting_percent": 0.0,
        }.items()
    )
    assert found["times"] == {"mtbi_s": 31557600.0, "down_s": 15.0, "repair_s": 65.0, "up_s": 15.0, "step_s": 4.0}
    assert found["uptime_percent"] == pytest.approx(100 - found["all_stopped_percent"])
    assert found["goodput_percent"] + found["stopped_percent"] == pytest.approx(100)
    assert answer(call, *GOODPUT, "--seed", "7") == found


def test_every_option_has_its_effect(call: Call) -> None:
    plain = answer(call, *GOODPUT)["goodput_percent"]
    for option, value in (
        ("--mtbi", "100 d"),
        ("--down", "60 s"),
        ("--repair", "20 s"),
        ("--up", "60 s"),
        ("--step", "30 s"),
    ):
        assert abs(answer(call, *GOODPUT, option, value)["goodput_percent"] - plain) > 0.5, option
    assert answer(call, *GOODPUT, "--no-elastic-learners")["goodput_percent"] < plain - 5
    unequal = ("--speeds", "1,1,1,1,1,1,0.5,0.5", "--jitter", "5")
    lock_step = answer(call, *GOODPUT, *unequal, "--mode", "elastic")
    assert lock_step["waiting_percent"] > 20
    assert answer(call, *GOODPUT, *unequal)["waiting_percent"] == 0


def test_the_table_has_all_three_ways(call: Call) -> None:
    code, printed, said = call(*GOODPUT)
    assert (code, said) == (0, "")
    rows = [line.split()[0] for line in printed.splitlines() if "±" in line and "is" not in line.split()]
    assert rows == ["data-parallel", "elastic", "decoupled"]
    assert "88.7 ± 0.1" in printed


def test_goodput_draws(call: Call, tmp_path: Path) -> None:
    code, _, said = call(*GOODPUT, "--speeds", "1,1,1,1,1,1,0.7,0.7", "--out", str(tmp_path / "goodput.html"))
    assert (code, said) == (0, f"wrote {tmp_path / 'goodput.html'}\n")
    assert len(figures_in(tmp_path / "goodput.html")) == 2


# ------------------------------------------------------------------------------------------------- wallclock, scaling


def test_hours_on_three_networks(call: Call) -> None:
    found = answer(call, *HOURS)
    assert [(each["network"], each["learners"]) for each in found] == [
        (network, learners) for network in ("high", "medium", "low") for learners in (1, 2, 4, 8)
    ]
    assert [each["method"] for each in found[:2]] == ["data-parallel", "diloco"]
    for each in found:
        assert each["hours"] * 3600 == pytest.approx(each["compute_s"] + each["within_s"] + each["across_s"])
        assert each["tokens"] == 2e10


def test_hours_on_your_own_link(call: Call) -> None:
    own = ("--across", "1 Gbit/s", "--across-latency", "20 ms", "--learners", "8")
    [plain], [small] = answer(call, *HOURS, *own), answer(call, *HOURS, *own, "--codec", "e3m0")
    assert (plain["network"], plain["across_latency_s"]) == ("1 Gbit/s", 0.02)
    assert plain["across_bits_per_chip"] / small["across_bits_per_chip"] == pytest.approx(16 / 4.25)
    [slow] = answer(call, *HOURS, *own, "--within", "10 Gbit/s", "--within-latency", "1 ms", "--flops", "100 TFLOP/s")
    assert slow["compute_s"] == pytest.approx(3 * plain["compute_s"])
    assert slow["within_s"] > 39 * plain["within_s"]


def test_hours_are_printed_and_drawn(call: Call, tmp_path: Path) -> None:
    code, printed, said = call(*HOURS, "--out", str(tmp_path / "hours.html"))
    assert code == 0
    assert [word for word in printed.split() if word in ("low", "high", "medium")] == ["high", "medium", "low"]
    assert said == f"wrote {tmp_path / 'hours.html'}\n"
    assert len(figures_in(tmp_path / "hours.html")) == 2


def test_scaling_says_what_was_not_measured(call: Call, tmp_path: Path) -> None:
    inside = answer(call, *SCALING)
    assert inside["warnings"] == []
    assert inside["outer_lr"] == 0.6
    code, printed, said = call("scaling", "--model", "10b", "--learners", "3", "--json")
    found = json.loads(printed)
    assert (code, found["outer_lr"], len(found["warnings"])) == (0, None, 2)
    assert said == "".join(f"warning: {sentence}\n" for sentence in found["warnings"])
    code, printed, said = call("scaling", "--model", "10b", "--learners", "3", "--out", str(tmp_path / "loss.html"))
    assert code == 0
    assert "not known" in printed
    assert said.count("warning: ") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["loss.html"]


@pytest.mark.parametrize(("kinds", "number"), [("goodput", 3), ("wallclock|scaling", 3)])
def test_the_commands_of_the_page_run(
    kinds: str, number: int, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them draws
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    commands = re.findall(rf"^    diloco plan ((?:{kinds}) .*?)$", page, re.MULTILINE)
    assert len(commands) == number
    for command in commands:
        code, printed, said = call(*shlex.split(command, comments=True))
        assert code == 0, said
        assert printed


# ---------------------------------------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("goodput", "--chips", "4", "--learners", "8"), "4 chips cannot be shared by 8 learners"),
        ((*GOODPUT, "--repair", "65"), '--repair = "65" has no unit'),
        ((*GOODPUT, "--mtbi", "-1 y"), "--mtbi"),
        ((*GOODPUT, "--step", "0 s"), "--step"),
        ((*GOODPUT, "--speeds", "1,fast"), "--speeds '1,fast' is not a list of numbers"),
        ((*GOODPUT, "--speeds", ""), "--speeds '' is not a list of numbers"),
        ((*GOODPUT, "--jitter", "1e6"), "give 300 % or less"),
        ((*GOODPUT, "--speeds", "1,2"), "2 speeds for 8 learners"),
        ((*GOODPUT, "--mode", "data-parallel", "--no-elastic-learners"), "--elastic-learners has no effect"),
        (("wallclock", "--chips", "4", "--batch-tokens", "1e6"), "give one of the two"),
        ((*HOURS, "--parameters", "1e9"), "give one of the two"),
        ((*HOURS, "--across", "-1 Gbit/s"), "--across"),
        ((*HOURS, "--across-latency", "1 ms"), "add --across"),
        ((*HOURS, "--learners", "two"), "--learners 'two' is not a list of whole numbers"),
        ((*HOURS, "--learners", "512"), "256 chips cannot be shared by 512 learners"),
        ((*HOURS, "--codec", "int3"), "there is no codec 'int3'"),
        ((*HOURS, "--tokens", "1000"), "more than all 1,000"),
        (("wallclock", "--parameters", "1e300", "--chips", "4", "--batch-tokens", "1e6"), "out of range"),
        (
            ("wallclock", "--model", "1b", "--chips", "4", "--batch-tokens", "1e-300"),
            "the tokens of a step = 1e-300 is out of range",
        ),
        (("scaling", "--parameters", "1e300"), "out of range"),
        (("scaling", "--parameters", "0"), "must be a finite number above 0"),
        (("scaling", "--model", "2b"), "there is no model '2b'"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_two(call: Call, arguments: tuple[str, ...], message: str) -> None:
    code, printed, said = call(*arguments)
    assert (code, printed) == (2, "")
    assert said.startswith("diloco: ")
    assert said.count("\n") == 1
    assert message in said


def test_a_page_that_cannot_be_written_is_a_failure_and_another_kind_of_file_is_refused(
    call: Call, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for arguments in (GOODPUT, HOURS, SCALING):
        code, _, said = call(*arguments, "--out", str(tmp_path / "file" / "p.html"))
        assert code == 1
        assert "cannot write" in said
        code, printed, said = call(*arguments, "--out", str(tmp_path / "p.png"))
        assert (code, printed) == (2, "")
        assert f'writes one HTML page, not {tmp_path / "p.png"}; name it "{tmp_path / "p.html"}".' in said


@pytest.mark.parametrize(
    "arguments",
    [GOODPUT, (*GOODPUT, "--jitter", "10", "--json"), (*HOURS, "--json"), SCALING],
    ids=lambda it: it[0],
)
def test_plan_needs_no_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom diloco.cli import main\n"
        f"try: main(['plan', *{arguments!r}])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["False"]
