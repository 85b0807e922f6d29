"""`diloco plan utilization` as a user calls it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from studies.published import TABLE_4, TABLE_5, TABLE_6, TARGETS
from tests.figures import figures_in, traces_of

from diloco.cli import main
from diloco.planning.workload import count_parameters

Call = Callable[..., tuple[object, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", "utilization", *arguments])
        return ended.value.code or 0, *capsys.readouterr()

    return run


def answers(call: Call, *arguments: str) -> list[dict[str, Any]]:
    code, printed, said = call(*arguments, "--json")
    assert (code, said) == (0, "")
    found = json.loads(printed)
    assert isinstance(found, list)
    return found


OPTIONS = {"sync_every": "--sync-every", "overlap": "--overlap", "up": "--codec"}


@pytest.mark.parametrize("row", [TABLE_4[0], TABLE_4[4], TABLE_5[1], TABLE_6[1]], ids=lambda row: row.title)
def test_a_row_of_each_table(call: Call, row: Any) -> None:
    given = [text for key, value in row.options.items() for text in (OPTIONS[key], str(value))]
    found = answers(call, "--model", row.model, "--method", row.method, "--convention", row.convention, *given)
    assert [each["target"] for each in found] == list(TARGETS)
    assert [each["gbit_per_s"] for each in found] == [float(cell) for cell in row.cells]


def test_the_steady_answer_is_the_default_and_describes_itself(call: Call) -> None:
    [found] = answers(call, "--model", "1b", "--method", "diloco", "--targets", "80")
    assert found["gbit_per_s"] == pytest.approx(6.33, rel=1e-3)
    assert (
        found.items()
        >= {
            "target": 80,
            "measure": "computing",
            "convention": "steady",
            "model": "1b",
            "method": "diloco",
            "sync_every": 100,
            "overlap": 0,
            "fragments": 1,
            "codec": "bf16",
            "codec_down": None,
            "latency_s": 0.0,
            "step_s": 0.1,
            "layers": 24,
        }.items()
    )


def test_what_a_link_comes_to(call: Call) -> None:
    [found] = answers(call, "--model", "1b", "--overlap", "1", "--bandwidth", "4.31 Gbit/s")
    assert found["computing"] == pytest.approx(80, abs=0.1)
    code, printed, _ = call("--model", "1b", "--overlap", "1", "--codec-down", "e3m0", "--latency", "1 ms")
    assert code == 0
    assert re.search(r"99 %\s+13\S* Gbit/s", printed)


def test_more_fragments_than_steps_are_several_after_one_step(call: Call) -> None:
    command = ("--model", "100b", "--method", "eager", "--sync-every", "30", "--codec", "e3m0")
    steady = answers(call, *command)
    assert (steady[0]["fragments"], steady[0]["sync_every"]) == (36, 30)
    least = 100e9 * 4.25 / (30 * 4.9) / 1e9  # what any overlap needs for a full pace; compute catches up a little
    assert [each["gbit_per_s"] for each in steady] == pytest.approx([t / 100 * least for t in TARGETS], rel=0.01)
    # arXiv 2502.12996, table 5: an overlap of one outer step, and of one inner step
    printed = answers(call, *command, "--convention", "streaming-diloco")
    assert [each["gbit_per_s"] for each in printed] == [0.5, 0.8, 0.9, 0.9, 0.9]
    inner = ("--method", "streaming", "--overlap", "1", "--convention", "streaming-diloco")
    printed = answers(call, *command, *inner)
    assert [each["gbit_per_s"] for each in printed] == [0.9, 1.7, 2.0, 2.0, 2.0]
    around = answers(call, *command, "--learners", "2", "--targets", "50")
    assert around[0]["gbit_per_s"] == pytest.approx(steady[0]["gbit_per_s"], rel=0.02)


def test_a_target_out_of_reach_says_why(call: Call) -> None:
    code, printed, _ = call("--model", "1b", "--method", "data-parallel", "--latency", "20 ms", "--targets", "50,90")
    assert code == 0
    assert re.search(r"90 %\s+never", printed)
    assert "never: latency alone costs more." in printed
    found = answers(call, "--model", "1b", "--method", "streaming", "--speeds", "1,0.5", "--targets", "90")
    assert found[0]["gbit_per_s"] is None


def test_learners_around_a_syncer(call: Call) -> None:
    found = answers(
        call,
        "--model",
        "1b",
        "--method",
        "streaming",
        "--overlap",
        "5",
        "--codec",
        "e3m0",
        "--speeds",
        "1,0.8",
        "--latency",
        "10 ms",
        "--syncer",
        "5 Gbit/s",
        "--shards",
        "2",
        "--merge",
        "2 GB/s",
        "--targets",
        "50,85",
    )
    assert found[0]["gbit_per_s"] < found[1]["gbit_per_s"]
    assert found[1]["utilization_of_learners"][0] == pytest.approx(
        0.8 * found[1]["utilization_of_learners"][1], rel=1e-3
    )
    assert found[0]["codec_down"] == "e3m0"
    [free] = answers(call, "--model", "1b", "--learners", "3", "--bandwidth", "1 Tbit/s")
    assert free["computing"] > 99


@pytest.mark.slow
def test_decoupled_learners_always_compute_and_are_judged_by_their_pace(call: Call) -> None:
    half, most = answers(call, "--model", "1b", "--method", "decoupled", "--targets", "50,95")
    assert half["measure"] == "pace"
    assert half["utilization"] == most["utilization"] == 100
    assert half["gbit_per_s"] == pytest.approx(16 / 4.8, rel=0.02)
    assert half["period_steps"] == pytest.approx(48, rel=0.02)
    assert half["stale_steps"] > 2 * most["stale_steps"]
    code, printed, _ = call("--model", "1b", "--method", "decoupled", "--targets", "50")
    assert code == 0
    assert "answer's age, steps" in printed


def test_a_model_of_ones_own(call: Call, tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text('parameters = 1e9\nlayers = 24\nstep_time = "100 ms"\n')
    ours, theirs = (answers(call, "--model", model) for model in (str(tmp_path / "ours.toml"), "1b"))
    assert [each["gbit_per_s"] for each in ours] == [each["gbit_per_s"] for each in theirs]
    twice = answers(call, "--model", "1b", "--step-time", "200 ms")
    assert twice[0]["gbit_per_s"] == pytest.approx(theirs[0]["gbit_per_s"] / 2, rel=1e-5)


def test_the_experts_of_a_mixture_apart(call: Call, tmp_path: Path) -> None:
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = {"model_type": "mixtral", "num_hidden_layers": 24, "num_local_experts": 8, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mixture.toml").write_text('config = "config.json"\nstep_time = "1 s"\n')
    parameters, _, experts, *_ = count_parameters(tmp_path / "config.json")
    options = ("--model", str(tmp_path / "mixture.toml"), "--method", "diloco", "--targets", "80")
    apart = ("--expert-groups", "8", "--expert-every", "4", "--trained-groups", "2", "--expert-codec", "e3m0")
    [whole], [found] = answers(call, *options, "--learners", "4"), answers(call, *options, *apart)
    assert whole["up_bytes_per_step"] == whole["down_bytes_per_step"] == 2 * parameters / 100
    trunk, apart_bytes = 2 * (parameters - experts), experts * 4.25 / 8 / 4
    assert found["up_bytes_per_step"] == pytest.approx((trunk + apart_bytes / 4) / 100, rel=1e-3)
    assert found["down_bytes_per_step"] == pytest.approx((trunk + apart_bytes) / 100, rel=1e-3)
    assert found["gbit_per_s"] < whole["gbit_per_s"] / 2
    assert found["experts"] == {"groups": 8, "every": 4, "trained": 2, "codec": "e3m0", "held": None}
    code, printed, _ = call(*options, *apart)
    assert code == 0
    assert "experts in 8 groups, 2 trained, k = 4, e3m0" in printed
    assert re.search(r"a learner's bytes in the mean of its inner steps: \S+ kB up, \S+ kB down", printed)
    for wrong, says in (
        (("--expert-every", "4"), "without --expert-groups"),
        (("--expert-groups", "8", "--method", "eager"), "eager sends no experts apart"),
        (("--expert-groups", "0"), "give --expert-groups 1 or more"),
        (("--expert-groups", "8", "--expert-every", "0"), "give --expert-every 1 or more"),
        (("--expert-groups", "8", "--trained-groups", "9"), "give --trained-groups 1 to 8"),
        (("--expert-groups", "8", "--expert-codec", "zip"), "there is no codec 'zip'"),
        (("--expert-groups", "8", "--model", "1b"), "1b has no experts to send apart"),
        (("--expert-groups", "8", "--model", "10b", "--convention", "scaling-laws"), "--expert-groups has no effect"),
    ):
        code, _, said = call(*options[:4], *wrong)
        assert code == 2
        assert said.count("\n") == 1
        assert says in said


def test_experts_that_each_learner_holds(call: Call) -> None:
    options = ("--model", "deepseek-v3", "--method", "diloco", "--targets", "95", "--experts-held", "0.25")
    [found] = answers(call, *options)
    assert (found["experts"]["groups"], found["experts"]["held"]) == (4, 0.25)
    values = 17e9 + 654e9 / 4
    assert found["up_bytes_per_step"] == found["down_bytes_per_step"] == pytest.approx(2 * values / 100)
    part, whole = found["learner_bytes"], found["learner_bytes_all_held"]
    assert part["device_parameters"] == part["host_anchors"] == pytest.approx(4 * values)
    assert whole["device_inner_optimizer"] == pytest.approx(8 * 671e9)
    assert found["syncer_memory"] == pytest.approx(671e9 * (12 + 2) + 4 * 654e9 / 4)
    assert found["syncer_bit_per_s"] > 100e9
    link, memory = found["syncer_words"]
    assert link.startswith("one syncer does not suffice at a link of 100 Gbit/s: raise --sync-every to about ")
    assert memory.startswith("one syncer does not suffice with 2 TB of memory")
    enough = ("--syncer", "200 Gbit/s", "--syncer-memory", "12 TB")
    [found] = answers(call, *options, *enough)
    assert found["syncer_words"] == ["one syncer suffices, with a link of 200 Gbit/s and 12 TB of memory"]
    assert found["syncer_bit_per_s"] < 200e9
    code, printed, _ = call(*options)
    assert code == 0
    assert "experts in 4 groups, 0.25 held" in printed
    assert re.search(r"device: parameters +722 GB +2.68 TB", printed)
    assert "the syncer of 8 learners holds all: 10 TB of memory" in printed
    longer = next(word.split(",")[0] for word in link.split() if word.endswith(","))
    [found] = answers(call, *options, "--sync-every", longer, "--syncer-memory", "12 TB")
    assert found["syncer_words"] == ["one syncer suffices, with a link of 100 Gbit/s and 12 TB of memory"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--experts-held", "0"), "give --experts-held above 0, up to 1"),
        (("--experts-held", "nan"), "give --experts-held above 0, up to 1"),
        (("--experts-held", "0.3"), "0.3 of 256 experts is not a whole number; give --experts-held 0.297 or 0.301"),
        (("--experts-held", "0.3", "--expert-groups", "4"), "give --experts-held 0.25 or 0.5"),
        (("--experts-held", "0.25", "--expert-groups", "-1"), "give --expert-groups 1 or more"),
        (("--experts-held", "0.25", "--trained-groups", "1"), "leave --trained-groups out"),
        (("--experts-held", "0.0156"), "holds 4 of 256 experts cannot route a token to 8; give --experts-held 0.0312"),
        (("--experts-held", "0.0625", "--learners", "4"), "give --learners 16 or more"),
        (("--experts-held", "0.25", "--method", "eager"), "eager sends no experts apart"),
        (("--experts-held", "0.25", "--model", "1b"), "1b has no experts"),
        (("--experts-held", "0.25", "--convention", "scaling-laws"), "--experts-held has no effect"),
        (("--syncer-memory", "2 TB"), "--syncer-memory has no effect without --experts-held"),
    ],
)  # fmt: skip
def test_a_share_of_the_experts_that_cannot_be_held(call: Call, arguments: tuple[str, ...], says: str) -> None:
    code, printed, said = call("--model", "deepseek-v3", *arguments)
    assert (code, printed) == (2, "")
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "around",
    [(), ("--learners", "2", "--latency", "10 ms"), pytest.param(("--method", "decoupled"), marks=pytest.mark.slow)],
)
def test_pictures(call: Call, tmp_path: Path, around: tuple[str, ...]) -> None:
    page = tmp_path / "link.html"
    code, _, said = call("--model", "1b", "--targets", "50,90", "--out", str(page), *around)
    assert (code, said) == (0, f"wrote {page}\n")
    curve, timeline = figures_in(page)
    assert len(traces_of(curve)["asked for"]["x"]) == 2
    assert "computing" in traces_of(timeline)
    assert "90 %" in page.read_text()
    assert page.stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--bandwidth", "-1 Gbit/s"), "has to be above 0"),
        (("--bandwidth", "10"), "has no unit"),
        (("--latency", "20"), '"20" has no unit; write for example "20 ms"'),
        (("--step-time", "0 ms"), "has to be above 0"),
        (("--fragments", "30"), "do not fit a model of 24 layers"),
        (("--overlap", "200"), "longer than H = 100"),
        (("--codec", "fp4"), "there is no codec 'fp4'"),
        (("--targets", "50,101"), "a target of 101 % is out of range"),
        (("--targets", "a,b"), "is not a list of percentages"),
        (("--targets", ""), "is not a list of percentages"),
        (("--bandwidth", "1e308 Gbit/s"), "is out of range"),
        (("--step-time", "1e-300 s"), "is out of range"),
        (("--codec", "zip"), "there is no codec 'zip'; choose for example 'fp32'"),
        (("--codec", "topk"), "did you mean 'topk-128'?"),
        (("--method", "decoupled", "--sync-every", "1000000"), "lower H"),
        (("--method", "decoupled", "--speeds", "1,1e-6"), "far faster than the others"),
        (("--speeds", ""), "is not a list of numbers"),
        (("--targets", "50", "--bandwidth", "1 Gbit/s"), "drop one of them"),
        (("--convention", "papers"), "choose steady, streaming-diloco, scaling-laws"),
        (("--convention", "streaming-diloco", "--sync-every", "50"), "its paper published 30, 100"),
        (("--convention", "streaming-diloco", "--latency", "20 ms"), "has no --latency"),
        (("--convention", "streaming-diloco", "--step-time", "1 s"), "--step-time has no effect"),
        (("--convention", "streaming-diloco", "--learners", "2"), "--learners has no effect"),
        (("--learners", "0"), "give --learners 1 or more"),
        (("--learners", "-1"), "--learners -1 is too few"),
        (("--learners", "3", "--speeds", "1,1"), "has 2 speeds for 3 learners"),
        (("--speeds", "fast"), "is not a list of numbers"),
        (("--speeds", "1,0"), "give speeds above 0"),
        (("--learners", "3", "--shards", "2"), "add --syncer or --merge"),
        (("--learners", "3", "--shards", "0"), "give --shards 1 or more"),
        (("--method", "data-parallel", "--learners", "3"), "data parallel has no syncer"),
        (("--method", "steaming",), 'did you mean "streaming"'),
    ],
)  # fmt: skip
def test_wrong_use_is_one_sentence_and_exit_code_2(call: Call, arguments: tuple[str, ...], says: str) -> None:
    code, printed, said = call("--model", "1b", *arguments)
    assert (code, printed) == (2, "")
    assert says in said
    assert said.startswith("diloco: ")
    assert said.count("\n") == 1


def test_a_terminal_without_greek_is_no_error() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", "from diloco.cli import main; main(['plan', 'utilization', '--model', '1b'])"]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"H = 100, ? = 0" in done.stdout


def test_nothing_to_draw_is_said(call: Call, tmp_path: Path) -> None:
    code, _, said = call("--model", "1b", "--speeds", "1,0.5", "--targets", "99", "--out", str(tmp_path / "p.html"))
    assert code == 2
    assert "lower --targets" in said


def test_plan_needs_no_torch() -> None:
    code = (
        "import sys\nfrom diloco.cli import main\n"
        "try: main(['plan', 'utilization', '--model', '100b', '--overlap', '1'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["False"]
