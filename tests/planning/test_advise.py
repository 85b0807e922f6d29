"""The adviser: outcomes by hand where a hand can compute them, the ranking, run files that load, sentences for what
cannot be."""

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.figures import figures_in

from diloco.cli import main
from diloco.config import parse_config
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError
from diloco.planning.advice import (
    PENALTY_STATUSES,
    RankBy,
    advice_inputs,
    advise,
    candidates,
    method_table,
    penalty_status,
    run_file,
)
from diloco.planning.run_estimate import AdviceInputs, RunEstimate, estimate_run
from diloco.planning.settings import setting_for
from diloco.planning.site import parse_site

ROOT = Path(__file__).parents[2]
HEAD = (
    "[model]\nparameters = 1e8\nlayers = 12\n[budget]\ntokens = 1e9\ntokens_per_step = 262144\nsequence_length = 1024\n"
)
STEPS = 1e9 / 262144


def place(name: str = "a", **keys: object) -> str:
    values = {"name": name, "step_time": "1 s", "up": "100 Mbit/s", "down": "200 Mbit/s", "latency": "50 ms", **keys}
    return "[[site]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


TWO = place("a") + place("b", step_time="1.25 s", accelerators=3)


def case(*parts: str) -> AdviceInputs:
    return advice_inputs(parse_site(HEAD + "".join(parts)))


def outcome(of: AdviceInputs, method: str, **numbers: object) -> RunEstimate:
    return estimate_run(of, setting_for(of.workload, method, **numbers))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ by hand


def test_diloco_without_overlap_by_hand() -> None:
    found = outcome(case(TWO), "diloco", sync_every=50, up="bf16")
    exchange_s = 2e8 * 8 / 1e8 + 2e8 * 8 / 2e8 + 4 * 0.05  # up, down, and there and back twice
    step_s = 1.25 + exchange_s / 50
    assert found.step_s == pytest.approx(step_s)
    assert found.utilization == pytest.approx([1 / step_s, 1.25 / step_s])
    assert case(TWO).utilization(found) == pytest.approx((1 + 3 * 1.25) / step_s / 4)
    assert found.hours == pytest.approx(STEPS * step_s / 3600)
    assert found.up_bytes == found.down_bytes == pytest.approx(STEPS / 50 * 2 * 2e8)


def test_an_overlap_that_is_long_enough_leaves_the_slowest_computing_all_the_time() -> None:
    found = outcome(case(TWO), "eager", sync_every=100, num_fragments=1, up="e3m0")
    assert found.utilization == pytest.approx([0.8, 1.0])  # faster learners still wait for the others


def test_data_parallel_by_hand() -> None:
    found = outcome(case(TWO), "data-parallel", up="bf16")
    step_s = 1.25 + 2 * 0.5 * 2e8 * 8 / 1e8 + 2 * 0.05
    assert found.step_s == pytest.approx(step_s)
    assert found.up_bytes == pytest.approx(STEPS * 2 * 2e8)
    alone = outcome(case(place("a")), "data-parallel")
    assert (alone.step_s, alone.up_bytes, alone.utilization) == (1.0, 0.0, (1.0,))


def test_a_shared_link_is_divided() -> None:
    shared = '[[link]]\nname = "line"\nup = "100 Mbit/s"\ndown = "200 Mbit/s"\n'
    four = [place(name, shares="line") for name in "abcd"]
    own, common = case(*map(place, "abcd")), case(*four, shared)
    for method, numbers in (("diloco", {"sync_every": 50}), ("data-parallel", {})):
        waits = [
            outcome(each, method, **numbers).step_s - 1.0 - (0.2 / 50 if numbers else 0.1) for each in (own, common)
        ]
        assert waits[1] == pytest.approx(4 * waits[0])


MERGING = '[syncer]\nmerge_time = "100 ms"\nmerge_speed = "200 MB/s"\n'
SYNCER = MERGING + 'up = "300 Mbit/s"\ndown = "300 Mbit/s"\n'
LINE = '[[link]]\nname = "line"\nup = "150 Mbit/s"\ndown = "150 Mbit/s"\n'


@pytest.mark.parametrize("method", ["data-parallel", "diloco", "streaming", "decoupled"])
@pytest.mark.parametrize(("shared", "link"), [("", MERGING), ("", SYNCER), ("line", SYNCER + LINE)])
def test_equal_learners_of_one_site_are_the_same_as_sites_of_their_own(method: str, shared: str, link: str) -> None:
    def sites(slow: int, *fast: tuple[str, int]) -> AdviceInputs:
        keys = {"shares": shared} if shared else {}
        places = [place(name, learners=number, **keys) for name, number in fast]
        return case(*places, place("slow", learners=slow, step_time="1.1 s"), link)

    one = outcome(sites(4, ("a", 4)), method, up="e3m0")
    other = outcome(sites(4, ("a", 1), ("b", 1), ("c", 1), ("d", 1)), method, up="e3m0")
    assert one.hours == pytest.approx(other.hours)
    assert one.utilization == pytest.approx(other.utilization)
    assert one.total_bytes == pytest.approx(
        other.total_bytes, rel=0.02
    )  # a merge more or less in the stretch that is looked at


def test_decoupled_learners_step_at_their_own_pace() -> None:
    found = outcome(case(TWO), "decoupled", up="int4")
    assert found.utilization == (1.0, 1.0)
    assert found.hours == pytest.approx(1e9 / (131072 / 1.0 + 131072 / 1.25) / 3600)
    assert found.penalty.percent is not None


def test_decoupled_learners_on_links_that_do_not_keep_up_have_no_known_penalty() -> None:
    found = outcome(case(place("a"), place("b", up="2 Mbit/s")), "decoupled")
    assert found.penalty.percent is None
    assert found.penalty.unknown is not None
    assert "learners in it" in found.penalty.unknown


def test_merging_takes_time_on_the_syncer() -> None:
    plain = outcome(case(TWO), "diloco", sync_every=50)
    slow = outcome(
        case(TWO, '[syncer]\nmerge_time = "2 s"\nmerge_speed = "100 MB/s"\n'), "diloco", sync_every=50, up="bf16"
    )
    assert 50 * (slow.step_s - plain.step_s) == pytest.approx(2 + 2 * 2e8 / 1e8)


def test_failures_slow_a_run_down_by_who_stops() -> None:
    faulty = case(TWO, '[faults]\nmtbf = "10 h"\nrepair = "30 min"\n')
    given_up_s = 20 * outcome(faulty, "diloco").step_s
    for method, slowdown in {
        "data-parallel": 1 + 2 * 0.5 / 10, "decoupled": 1.05, "diloco": 1.05 * (1 + 2 * given_up_s / 36000)
    }.items():  # fmt: skip
        assert outcome(faulty, method).hours == pytest.approx(slowdown * outcome(case(TWO), method).hours)


def test_money_by_hand() -> None:
    priced = case(
        place("a", price_up="0.1 USD/GB", price_per_accelerator_hour="2 USD/h", accelerators=4),
        place("b", price_down="0.2 USD/GB"),
        '[syncer]\nprice_up = "0.05 USD/GB"\nprice_down = "0.01 USD/GB"\nprice_per_hour = "0.5 USD/h"\nshards = 2\n',
    )
    found = outcome(priced, "diloco")
    up_gb, down_gb = found.up_bytes / 1e9, found.down_bytes / 1e9
    by_hand = 0.1 * up_gb / 2 + 0.2 * down_gb / 2 + found.hours * (4 * 2 + 2 * 0.5) + 0.05 * down_gb + 0.01 * up_gb
    assert found.usd == pytest.approx(by_hand)
    assert outcome(case(TWO), "diloco").usd is None


# --------------------------------------------------------------------------------------------------------- ranking


def test_allowed_penalties_come_first_unknown_ones_last_each_group_by_hours() -> None:
    of = case(TWO)
    ranked = advise(of)
    standings = [PENALTY_STATUSES.index(penalty_status(of, each)) for each in ranked]
    assert standings == sorted(standings)
    assert {PENALTY_STATUSES[each] for each in standings} == set(PENALTY_STATUSES)
    for group in range(3):
        hours = [each.hours for each, its in zip(ranked, standings, strict=True) if its == group]
        assert all(later >= earlier / 1.011 for earlier, later in itertools.pairwise(hours))
    assert len(ranked) == len(list(candidates(of.workload)))


def test_a_stricter_allowance_moves_methods_down_and_none_allowed_leaves_data_parallel() -> None:
    strict = advice_inputs(parse_site(HEAD + "loss_penalty_percent = 0.0\n" + TWO))
    assert advise(strict)[0].setting.method == "data-parallel"


@pytest.mark.parametrize(("by", "value"), [("usd", lambda o: o.usd), ("bytes", lambda o: o.total_bytes)])
def test_ranked_by_something_else(by: RankBy, value: object) -> None:
    of = case(place("a", price_up="5 USD/GB", price_per_accelerator_hour="1 USD/h"), place("b"))
    allowed = [each for each in advise(of, by) if penalty_status(of, each) == "allowed"]
    assert callable(value)
    assert value(allowed[0]) <= 1.01 * min(map(value, allowed))
    by_hours = [each for each in advise(of) if penalty_status(of, each) == "allowed"]
    assert [each.setting for each in allowed] != [each.setting for each in by_hours]


def test_a_single_learner_needs_nobody() -> None:
    of = case(place("a"))
    assert advise(of)[0].utilization == (1.0,)


# -------------------------------------------------------------------------------------------------------- run files


@pytest.mark.parametrize("layers", [3, 12, 108])
def test_every_candidate_is_a_method_with_the_numbers_that_were_planned(layers: int) -> None:
    of = advice_inputs(parse_site(HEAD.replace("12", str(layers)) + TWO))
    for planned in candidates(of.workload):
        method = method_from_table(parse_config(run_file(of, planned)).method)
        assert (method.sync_every, method.up.name, method.down.name) == (
            planned.sync_every,
            planned.up.partition(":")[0],
            planned.up,
        )
        if planned.method != "data-parallel":
            assert method.overlap == planned.overlap
        fragments = method.fragments.to_dict()
        if planned.method == "streaming":
            assert -(-layers // fragments["layers"]) == planned.num_fragments
        elif planned.method == "decoupled":
            assert fragments["num_fragments"] == planned.num_fragments


def test_the_run_file_has_what_the_site_file_says() -> None:
    of = case(TWO)
    text = run_file(of, advise(of)[0].setting, name="mine")
    config = parse_config(text)
    assert (config.run.name, config.run.tokens, config.run.learners) == ("mine", 1_000_000_000, 2)
    assert config.tokens_per_full_step == 262144
    assert config.model.settings["num_hidden_layers"] == 12
    width = config.model.settings["hidden_size"]
    assert 12 * 12 * width**2 == pytest.approx(1e8, rel=0.2)
    assert config.inner.lr == pytest.approx(22256 * 1e8**-0.8827 * 2**0.2929, rel=0.05)
    assert "a, b" in text.splitlines()[0]
    parallel = next(each for each in candidates(of.workload) if each.method == "data-parallel")
    assert "--collective" in run_file(of, parallel)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TWO, "the site file has no model; add [model] with parameters and layers"),
        (
            "[model]\npreset = '1b'\n" + TWO,
            "the site file has no training budget; add [budget] with tokens and tokens_per_step",
        ),
        (HEAD.replace("262144", "262145") + TWO, "whole sequences of 1024 tokens for each of 2 learners; write 262144"),
        (
            HEAD.replace("1e8", "1e10") + place("a", memory="80 GB"),
            "the model does not fit site a: its 1e+10 parameters take 160 GB",
        ),
        (HEAD.replace("1e9", "inf") + TWO, "budget.tokens = Infinity: input should be less than or equal to"),
        (
            HEAD.replace("1e9", "1e5") + TWO,
            "[budget] a step of 262144 tokens is more than all 100000; lower tokens_per_step",
        ),
        (HEAD.replace("layers = 12", "layers = 12\nactive_parameters = 2e8") + TWO, "lower active_parameters"),
        (
            HEAD.replace("1e8", "1e10") + place("a", memory="80 GB"),
            "and there are 80 GB; take a smaller model, or larger accelerators",
        ),
    ],
)
def test_what_cannot_be_advised_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        advice_inputs(parse_site(text))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranking_by_money_needs_a_price() -> None:
    with pytest.raises(ConfigError, match="no prices to rank by"):
        advise(case(TWO), "usd")


# ---------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def site_file(tmp_path: Path) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(HEAD + TWO)
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "advise", *arguments])
    return (ended.value.code or 0, *capsys.readouterr())


def test_the_table_and_the_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, site_file: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, printed, _ = call(capsys, str(site_file), "--out", str(tmp_path / "out"))
    assert code == 0
    ranked = advise(case(TWO))
    best = ranked[0].setting
    assert f"Take {best.title}, {best.detail}; its run file is {tmp_path / 'out' / 'run.toml'}." in printed
    for title in ("Streaming DiLoCo", "DiLoCo", "data parallel", "Decoupled DiLoCo", "eager updates"):
        assert title in printed
    assert parse_config((tmp_path / "out" / "run.toml").read_text()).method == method_table(best)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"run.toml", "advice.html"}
    assert len(figures_in(tmp_path / "out" / "advice.html")) == 2


def test_json_has_every_setting_and_the_chosen_run_file(capsys: pytest.CaptureFixture[str], site_file: Path) -> None:
    code, printed, _ = call(capsys, str(site_file), "--json", "--choose", "3")
    answer = json.loads(printed)
    assert (code, answer["chosen"]) == (0, 3)
    rows = answer["candidates"]
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(0 < row["utilization_percent"] <= 100 for row in rows)
    assert all((row["loss_penalty_percent"] is None) == (row["standing"] == "not known") for row in rows)
    assert all(math.isfinite(row["hours"]) for row in rows)
    assert parse_config(answer["run_file"]).method["sync_every"] == rows[2]["sync_every"]


def test_all_settings_and_a_faster_one_of_unknown_loss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "many.toml"
    path.write_text(HEAD.replace("262144", "294912") + place("a", learners=9))
    code, printed, _ = call(capsys, str(path), "--all")
    assert code == 0
    assert printed.count("H = 100") >= 6
    assert "Take data parallel, bf16" in printed
    assert "no experiment has measured its loss" in printed


def test_on_a_narrow_terminal_the_words_give_way_and_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "66")
    _, printed, _ = call(capsys, str(ROOT / "examples" / "site.toml"))
    assert "…" not in printed
    assert {"88.3 %", "60,035", "4.57 TB", "unknown"} <= set(re.split(r"\s{2,}|\n", printed))


@pytest.mark.parametrize(("arguments", "words"), [
    (["--choose", "99"], "--choose 99 does not exist"),
    (["--by", "usd"], "no prices to rank by"),
])  # fmt: skip
def test_wrong_use(capsys: pytest.CaptureFixture[str], site_file: Path, arguments: list[str], words: str) -> None:
    code, _, said = call(capsys, str(site_file), *arguments)
    assert code == 2
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_advice_needs_no_torch(site_file: Path) -> None:
    code = (
        "import sys\nfrom diloco.cli import main\n"
        f"try: main(['plan', 'advise', {str(site_file)!r}])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
