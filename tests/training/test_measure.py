"""`diloco plan measure` against a real syncer, and the site file that comes of it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.config import RunConfig, dump_config
from diloco.core.presets import method_from_table
from diloco.planning.site import load_site
from diloco.syncer.server import Options, Syncer
from diloco.training.rank_group import RankGroup
from diloco.training.step_time import measure_step_time

Tiny = Callable[..., RunConfig]
Call = Callable[..., tuple[object, str, str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code or 0, *capfd.readouterr()

    return run


@pytest.fixture
def run_file(tiny: Tiny, tmp_path: Path) -> Iterator[Path]:
    config = tiny("train.threads=1")
    with Syncer(
        config.run.name, method_from_table(config.method), Options("127.0.0.1:0", tmp_path / "state")
    ) as syncer:
        path = tmp_path / "run.toml"
        path.write_text(dump_config(tiny("train.threads=1", f"syncer.address={syncer.address}")), encoding="utf-8")
        yield path


@pytest.mark.slow
def test_a_new_site_file_is_complete_and_a_second_learner_extends_it(
    call: Call, run_file: Path, tiny: Tiny, tmp_path: Path
) -> None:
    out = str(tmp_path / "site.toml")
    code, printed, said = call("plan", "measure", str(run_file), "--seconds", "0.1", "--out", out, "--json")
    assert (code, said.strip()) == (0, f"wrote {out}")
    measured = json.loads(printed)
    site = load_site(out)
    [learner] = site.learners()
    assert learner.name == measured["learner"] == "learner-0"
    assert learner.step_s == pytest.approx(measured["step_s"], rel=1e-3)
    assert learner.place.up == pytest.approx(measured["up_bit_per_s"], rel=1e-3)
    assert learner.place.latency == pytest.approx(measured["latency_s"], rel=1e-3)
    assert site.workload().num_parameters == measured["num_parameters"]
    assert site.workload().num_layers == 2
    assert site.budget is not None
    assert (site.budget.tokens, site.budget.tokens_per_step) == (5120, 8 * 32)

    code, printed, _ = call(
        "plan", "measure", str(run_file), "--shard", "1", "--name", "b", "--seconds", "0.1", "--out", out
    )
    assert code == 0
    assert "parameters takes" in printed
    both = load_site(out)
    assert both.site[0] == site.site[0]
    assert both.names == ["learner-0", "b"]

    code, _, _ = call("plan", "measure", str(run_file), "--only", "link", "--out", out)
    again = load_site(out)
    assert (code, again.site[0].step_time) == (0, site.site[0].step_time)


def test_what_is_timed_is_the_learners_own_inner_step(tiny: Tiny) -> None:
    pace = measure_step_time(tiny(), 0, seconds=0.0, at_least=2, ranks=RankGroup())
    assert pace.num_steps == 2
    assert pace.step_s > 0
    assert (pace.accelerators, pace.memory_bytes) == (1, None)


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["--only", "step", "--seconds", "0.1"], 2, '"site.learner-0.up" is missing'),
    (["--set", "syncer.address=127.0.0.1:1", "--only", "link"], 1, "nothing listens at 127.0.0.1:1"),
])  # fmt: skip
def test_wrong_use_is_one_sentence(
    call: Call, run_file: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    ended, _, said = call("plan", "measure", str(run_file), "--out", str(tmp_path / "site.toml"), *arguments)
    assert ended == code
    assert words in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "site.toml").exists()
