"""`diloco demo --rl`: its run file, its result, and a tiny one with real processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import main
from diloco.demo.display import Display
from diloco.demo.plan import RlPlan, prepared
from diloco.demo.rl_story import STATES, describe, headline, summarise, tell, work_of, write_report
from diloco.demo.roles import line
from diloco.rl.evaluation import TaskEvaluation
from diloco.rl.settings import rules_of, tokenizer_of
from diloco.rl.tasks import Tasks

GROUPS = dict(zip(STATES, (12, 3, 900, 4, 80, 1), strict=True))

SUMMARY: dict[str, Any] = {
    "accuracy": {"untrained": 0.0, "supervised": 0.312, "end": 0.934},
    "prompts": 1600,
    "groups": {"acknowledged": 1000, **GROUPS},
    "kills": [{"name": "rollout-1", "back_s": 3.14, "by": "rollout-1"}],
    "steps": 600,
    "versions": 120,
    "tokens": 12_345,
    "seconds": 181.4,
}


def test_every_prompt_and_answer_of_the_task_fits_and_none_is_held_out(tmp_path: Path) -> None:
    with prepared(tmp_path / "demo", RlPlan(), 3) as config:
        tokenizer, (task,) = tokenizer_of(config), Tasks(config.task).tasks.values()
        assert config.rl is not None
        prompts = [task.prompt(number) for number in range(2000)]
        assert len({prompt["prompt"] for prompt in prompts}) == 200
        assert max(len(tokenizer.encode(prompt["prompt"])) for prompt in prompts) <= config.rl.max_prompt_tokens
        assert max(len(tokenizer.encode(prompt["answer"])) for prompt in prompts) < config.rl.max_tokens
        assert (config.run.seed, config.run.learners, config.run.steps) == (3, 2, RlPlan().steps)
        assert rules_of(config, tokenizer).queue >= config.rl.groups_per_step


def test_the_victim_is_one_of_the_rollout_workers_and_dies_on_the_way() -> None:
    assert (RlPlan().victim, RlPlan(rollouts=1).victim) == ("rollout-1", "rollout-0")
    assert 0 < RlPlan().kill_at_step < RlPlan().steps


@pytest.mark.slow
def test_an_untrained_model_is_almost_never_right(tmp_path: Path) -> None:
    with prepared(tmp_path / "demo", RlPlan(), 0) as config:
        [(name, parts)] = TaskEvaluation(config, 200).scores(None).items()
    assert (name, list(parts)) == ("sums", ["training"])
    assert parts["training"].mean < 0.05
    assert parts["training"].prompts == 200


def test_what_a_process_has_done_is_in_the_status() -> None:
    workers = [
        {"role": "rollout", "name": "rollout-0", "generated": 5, "scored": 0},
        {"role": "reward", "name": "reward-0", "generated": 0, "scored": 4},
        {"role": "trainer", "name": "trainer-0", "generated": 0, "scored": 0},
    ]
    status = {"groups": {"workers": workers}, "learners": {"trainer-0": {"tokens": 70}}}
    done = {name: work_of(name, status) for name in ("rollout-0", "reward-0", "trainer-0", "syncer", "rollout-1")}
    assert done == {"rollout-0": 5, "reward-0": 4, "trainer-0": 70, "syncer": 0, "rollout-1": None}
    assert work_of("rollout-0", {"groups": None, "learners": {}}) is None


def test_the_line_of_a_run_has_what_became_of_groups_and_says_when_nobody_answers() -> None:
    groups = {"acknowledged": 1000, "rewards": {"sums": 0.25}, **GROUPS, "stale": 0}
    assert line({"step": 7, "groups": groups}) == (
        "step 7: 1,000 groups made, 900 merged, 80 without signal, 1 refused, mean reward of sums 0.250"
    )
    assert line({"step": 0, "groups": None}) == "no trainer has joined yet"
    assert line({}) == "no syncer answers at the moment"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rollout-1", "one rollout worker killed and back in 3.1 s"),
        ("reward-0", "the reward worker killed and back in 3.1 s"),
        ("trainer-0", "one trainer killed and back in 3.1 s"),
        ("syncer", "the syncer killed and back in 3.1 s"),
    ],
)
def test_the_headline_names_what_was_learnt_and_killed(name: str, words: str) -> None:
    kills = [{"name": name, "back_s": 3.14, "by": name}]
    assert headline({**SUMMARY, "kills": kills}) == f"sums from 31 % to 93 % right, {words}"


def test_the_numbers_have_the_equation_of_groups_and_say_that_it_is_memory() -> None:
    right, groups, run = describe(SUMMARY).splitlines()
    assert "0.0 % untrained, 31.2 % after the supervised start, 93.4 % in the end" in right
    assert "of 1,600 samples of 200 questions, each of them trained, so they are memorised" in right
    assert groups == (
        "groups: 1,000 acknowledged = 12 waiting + 3 leased + 900 merged + 4 stale + 80 without signal + 1 refused"
    )
    assert run == "600 steps, 120 versions, 12,345 tokens, 181 s"
    lost = {**SUMMARY, "groups": {**SUMMARY["groups"], "acknowledged": 1001}}
    assert "1,001 acknowledged ≠ 12 waiting" in describe(lost)


@pytest.mark.parametrize(
    ("arguments", "drop"), [(["--quick"], "drop --quick"), (["--store", "bucket"], "drop --store")]
)
def test_what_makes_no_sense_together_is_refused(
    arguments: list[str], drop: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--rl", *arguments])
    assert ended.value.code == 2
    assert drop in capfd.readouterr().err


def test_a_missing_library_is_one_sentence(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.cli.demo.find_spec", lambda name: None if name == "reasoning_gym" else name)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--rl"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == "diloco: the demo needs reasoning_gym; pip install 'diloco[demo,rl]'\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_demo_kills_a_rollout_worker_and_accounts_for_every_group(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = RlPlan(steps=30, kill_at_step=5, supervised_steps=40)
    with prepared(tmp_path / "demo", plan, 0) as config:
        with Display(plan.steps, {"syncer": "http://page"}, opens=False, to_stderr=True) as display:
            outcome = tell(config, plan, display)
        summary = summarise(outcome)
        write_report(tmp_path / "report.html", outcome, summary)

    groups = summary["groups"]
    assert groups["acknowledged"] == sum(groups[state] for state in STATES)
    assert groups["merged"] >= 2 * (plan.steps - 5) * 8
    assert (outcome.first.step, outcome.first.number) == (0, 0)
    assert (summary["steps"], summary["versions"]) == (plan.steps, plan.steps // 5)
    assert [kill["name"] for kill in summary["kills"]] == [plan.victim]
    accuracy = summary["accuracy"]
    assert accuracy["untrained"] < 0.05 < accuracy["supervised"]

    said = [line.partition("] ")[2] for line in capfd.readouterr().err.splitlines()]
    assert said[0] == "starting a syncer, two trainers, 2 rollout workers and a reward worker"
    assert "rollout-1 was killed; it will be restarted" in said
    page = (tmp_path / "report.html").read_text()
    shown = json.loads(page.partition('id="frozen">')[2].partition("</script>")[0])
    assert shown["demo"]["headline"] == summary["headline"]
    assert [event["learner"] for event in shown["events"] if event["kind"] == "killed"] == [plan.victim]
    assert shown["groups"]["acknowledged"] > 0
