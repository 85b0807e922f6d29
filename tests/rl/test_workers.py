"""Rollout and reward workers against a real syncer: groups are merged, whatever is killed or refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.docs.blocks import blocks_of
from tests.processes import ForkedSyncer, start_module
from tests.rl.worker_run import RUN, SHORT, ServedHere, ServedRun, Trainer, served, write_run_file
from tests.syncer.test_doors import DAY

from diloco.cli import main
from diloco.config import RunConfig, load_config
from diloco.demo.plan import free_port, locked
from diloco.errors import AuthError, ConfigError, StaleIncarnationError
from diloco.exchange.dialling import fetch_status
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.groups import CompletionGroup
from diloco.exchange.wire.values import message_of
from diloco.following.follower import newest_model
from diloco.protocol.groups import digest_of
from diloco.protocol.workers import Score
from diloco.rl.evaluation import TaskEvaluation
from diloco.rl.reward import run_reward
from diloco.rl.rollout import run_rollout
from diloco.rl.settings import tokenizer_of
from diloco.rl.worker import SHOWN, WorkClient, Worked
from diloco.syncer.keys.keyring import Keyring
from diloco.training.spec import StopRequest

Run = Callable[..., Worked]

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"

AHEAD = {"queue = 16": "queue = 200"}
"""Change of the run file: rollouts are held back late."""


class Workers(ThreadPoolExecutor):
    """Threads of workers, which are stopped at the end."""

    def __init__(self) -> None:
        super().__init__(8)
        self._stops: list[StopRequest] = []

    def start(self, run: Run, config: RunConfig, name: str) -> Future[Worked]:
        self._stops.append(StopRequest())
        return self.submit(run, config, name, stop=self._stops[-1])

    def stop(self) -> None:
        for each in self._stops:
            each.set()

    def __exit__(self, *error: object) -> bool | None:
        self.stop()
        return super().__exit__(*error)


def test_groups_flow_from_prompts_to_merged_versions(tmp_path: Path) -> None:
    with served(tmp_path, steps=12) as run, Workers() as workers:
        config = run.config()
        with Trainer(run):
            made = workers.start(run_rollout, config, "paris")
            scored = workers.start(run_reward, config, "rome")
        assert made.result(60).reason == scored.result(60).reason == "over"
        groups = run.groups()
        run.require_account()
        assert groups["merged"] == 12 * 4
        assert groups["refused"] == 0
        rollout, reward = run.worker("rollout", "paris"), run.worker("reward", "rome")
        assert rollout["generated"] == groups["acknowledged"] <= made.result().groups
        assert sum(rollout["versions"]) > 0
        assert groups["scored"]["letters"] == reward["scored"] <= scored.result().groups


def process_of(role: str, run: ServedRun, name: str, **options: Any) -> ForkServerProcess:
    """`diloco rl ROLE` as a process."""
    return start_module("diloco", "rl", role, str(run.path), "--name", name, "--json", **options)


def freeze(process: ForkServerProcess, run: ServedRun, role: str, name: str) -> None:
    """Stop a process in the middle of its work."""
    assert process.pid is not None

    def is_frozen_at_work() -> bool:
        os.kill(process.pid or 0, signal.SIGSTOP)
        if run.worker(role, name).get("holds"):
            return True
        os.kill(process.pid or 0, signal.SIGCONT)
        return False

    until(is_frozen_at_work, f"{name} does no work")


@pytest.mark.slow
def test_prompts_of_a_frozen_and_of_a_killed_rollout_return(tmp_path: Path) -> None:
    out = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY)
    with served(tmp_path, AHEAD, deadlines=SHORT) as run, Trainer(run, trains=False), Workers() as workers:
        paris, rome = process_of("rollout", run, "paris", out=out), process_of("rollout", run, "rome")
        try:
            freeze(paris, run, "rollout", "paris")
            freeze(rome, run, "rollout", "rome")
            rome.kill()
            until(lambda: run.groups()["prompts"] == 0, "the prompts do not return")
            frontier, free = run.free_prompts()
            assert free
            assert free | set(run.unsettled()) == set(range(frontier))
            os.kill(paris.pid or 0, signal.SIGCONT)
            generated = run.worker("rollout", "paris").get("generated", 0)
            until(lambda: run.worker("rollout", "paris").get("generated", 0) > generated, "paris does not go on")
            workers.start(run_rollout, run.config(), "oslo")
            until(lambda: set(range(frontier)) <= set(run.unsettled()), "not all prompts are made")
            paris.terminate()
            paris.join(60)
            assert paris.exitcode == 0
            assert run.worker("rollout", "paris")["holds"] == 0  # given back
            assert json.loads((tmp_path / "out").read_text())["reason"] == "stopped"
            run.require_account()
        finally:
            paris.kill()
            rome.kill()
            os.close(out)


@pytest.mark.slow
def test_groups_of_a_killed_reward_worker_are_scored_by_another(tmp_path: Path) -> None:
    with served(tmp_path, AHEAD, deadlines=SHORT) as run, Trainer(run, trains=False), Workers() as workers:
        workers.start(run_rollout, run.config(), "paris")
        run.until_made(64)
        rome = process_of("reward", run, "rome")
        try:
            freeze(rome, run, "reward", "rome")
            rome.kill()
            workers.start(run_reward, run.config(), "oslo")
            until(lambda: not run.worker("reward", "rome").get("live", False), "rome is not forgotten")
            made = set(run.unsettled())
            until(lambda: all(it.rewards for n, it in run.unsettled().items() if n in made), "not all are scored")
            run.require_account()
        finally:
            rome.kill()


@pytest.mark.slow
def test_a_killed_syncer_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    steps = {"tokens = 1_000_000": "tokens = 1_000_000\nsteps = 24"}
    syncer = ForkedSyncer(tmp_path, write_run_file(tmp_path, "127.0.0.1:0", steps).read_text())
    try:
        path = write_run_file(tmp_path, syncer.address, steps)
        run = ServedRun(path, lambda: fetch_status(syncer.address, run=RUN))
        with Workers() as workers:
            with Trainer(run):
                made = workers.start(run_rollout, run.config(), "paris")
                scored = workers.start(run_reward, run.config(), "rome")
                for merged in (8, 32):
                    until(lambda least=merged: run.groups()["merged"] >= least, f"{merged} groups are not merged")
                    syncer.kill()
                    syncer.start()
            assert made.result(60).reason == scored.result(60).reason == "over"
        run.require_account()
        assert run.groups()["merged"] == 24 * 4
    finally:
        syncer.kill()


def test_rewards_of_the_same_process(tmp_path: Path) -> None:
    inline = {"queue = 16": 'queue = 16\nreward = "inline"'}
    with served(tmp_path, inline) as run, Workers() as workers:
        with pytest.raises(ConfigError, match="start no reward worker"):
            run_reward(run.config(), "rome", stop=StopRequest())
        with Trainer(run):
            made = workers.start(run_rollout, run.config(), "paris")
        worked = made.result(60)
        assert worked.reason == "over"
        assert worked.mean_reward is not None
        run.require_account()
        assert run.groups()["merged"] == 12 * 4


@pytest.mark.slow
def test_bad_prompts_and_scores_end_no_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(tmp_path, {"letters:Letters": "letters:Faulty"}) as run, Workers() as workers:
        with Trainer(run):
            made = workers.start(run_rollout, run.config(), "paris")
            scored = workers.start(run_reward, run.config(), "rome")
        assert made.result(60).reason == scored.result(60).reason == "over"
        groups, (frontier, free) = run.groups(), run.free_prompts()
        run.require_account()
        assert groups["merged"] == 12 * 4
        assert 0 < groups["refused"] == run.worker("reward", "rome")["refused"]
        assert run.worker("rollout", "paris")["refused"] == made.result().refused > 0
        assert groups["acknowledged"] + made.result().refused + len(free) == frontier
        for part in ("raised an error (no sample)", "has 81 tokens; rl.max_prompt_tokens = 12", "not a finite number"):
            assert part in caplog.text
        assert groups["refusals"][-1][1]


@pytest.mark.slow
def test_a_prompt_whose_sample_hangs_is_refused_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change = {"letters:Letters": "letters:Hanging", "queue = 16": "queue = 16\nscore_timeout_s = 8.0"}
    with served(tmp_path, change) as run, Trainer(run, trains=False), Workers() as workers:
        workers.start(run_rollout, run.config(), "paris")
        until(lambda: {*range(12)} - {*run.unsettled()} == {2}, "the others are not made")
        made = run.unsettled()
        until(lambda: run.worker("rollout", "paris")["refused"] == 1, "it is not refused")
        assert 'cannot use group 2: prompt 2 of task "letters" took more than 8 s; correct it' in caplog.text
        workers.start(run_reward, run.config(), "rome")
        until(lambda: all(it.rewards for n, it in run.unsettled().items() if n in made), "not all are scored")
        run.require_account()


def test_prompts_beyond_the_models_context_are_refused_alone(tmp_path: Path) -> None:
    context = {"num_hidden_layers = 1": "num_hidden_layers = 1\nmax_position_embeddings = 14"}
    with served(tmp_path, context) as run, Trainer(run, trains=False), Workers() as workers:
        workers.start(run_rollout, run.config(), "paris")
        run.until_made(4)
        assert run.worker("rollout", "paris")["refused"] > 0
        assert "exceed the 14 tokens" in run.groups()["refusals"][-1][1]


def test_a_worker_with_other_settings_or_the_name_of_another_ends(tmp_path: Path) -> None:
    with served(tmp_path) as run, Trainer(run, trains=False), Workers() as workers:
        run.groups()
        for role in (run_rollout, run_reward):
            with pytest.raises(ConfigError, match="other settings of"):
                role(run.config("rl.temperature=0.5"), "paris", stop=StopRequest())
        first = workers.start(run_rollout, run.config(), "rome")
        until(lambda: run.worker("rollout", "rome").get("live", False), "rome does not work")
        second = workers.start(run_rollout, run.config(), "rome")
        with pytest.raises(StaleIncarnationError, match="another process works as rollout 'rome' now"):
            first.result(60)
        run.until_made(4)
        assert not second.done()


@pytest.mark.slow
def test_keys_of_another_role_or_name_are_refused(tmp_path: Path) -> None:
    names: list[tuple[str, Any]] = [("trainer", "learner"), ("paris", "rollout"), ("rome", "reward")]
    Keyring.new(tmp_path / "keys", RUN, ["127.0.0.1"], names, DAY)

    def config(run: ServedRun, name: str) -> RunConfig:
        return run.config(f'syncer.keys="{tmp_path / "keys" / name}"')

    keys = tmp_path / "keys"
    with served(tmp_path, keys=keys / "syncer") as run, Workers() as workers:
        with Trainer(run, keys=keys / "trainer"):
            with pytest.raises(AuthError, match="'rome' has the role 'reward' and this needs 'rollout'"):
                run_rollout(config(run, "rome"), "rome", stop=StopRequest())
            with pytest.raises(AuthError, match="'rome' may speak for reward 'rome' only"):
                run_reward(config(run, "rome"), "oslo", stop=StopRequest())
            made = workers.start(run_rollout, config(run, "paris"), "paris")
            scored = workers.start(run_reward, config(run, "rome"), "rome")
        assert made.result(60).reason == scored.result(60).reason == "over"


def a_group(run: ServedHere, number: int, **changed: Any) -> pb.MadeGroup:
    """A group of this prompt, with the newest version."""
    model, rules = newest_model(run.syncer.address, run=RUN), run.rules()
    values = {
        "number": number, "task": "letters", "seed": 0, "versions": model.versions,
        "weights": digest_of(model.digests), "tokenizer": "", "temperature": 1.0,
        "prompt": torch.tensor([1], dtype=torch.int32),
        "tokens": torch.arange(rules.group_size, dtype=torch.int32),
        "lengths": torch.ones(rules.group_size, dtype=torch.int32),
        "ended": torch.zeros(rules.group_size, dtype=torch.bool), "log_probs": torch.full((rules.group_size,), -1.0),
    }  # fmt: skip
    group = CompletionGroup(**{**values, **changed})
    return message_of(pb.MadeGroup, group, data=group.to_bytes())


def test_garbage_is_refused_and_a_group_sent_twice_counts_once(tmp_path: Path) -> None:
    with served(tmp_path) as run, Trainer(run, trains=False):
        run.groups()
        with WorkClient(run.config(), "rollout", "paris", run.rules().digest, 1) as client:
            garbage = [
                {"data": b"garbage"}, {"tokens": torch.full((4,), 1000, dtype=torch.int32)}, {"weights": "0" * 64},
                {"versions": (7,)},
            ]  # fmt: skip
            numbers = set[int]()
            for num, bad in enumerate(garbage, 1):
                [lease] = client.take(1, 60)
                numbers.add(lease.number)
                group = a_group(run, lease.number, **{key: value for key, value in bad.items() if key != "data"})
                group.data = bad.get("data", group.data)
                client.send([group])
                until(lambda least=num: run.worker("rollout", "paris")["refused"] == least, "it is accepted")
            [lease] = client.take(1, 60)
            for _ in range(2):
                client.send([a_group(run, lease.number)])
            until(lambda: run.groups()["acknowledged"] > 0, "a group is not accepted")
            client.take(1, 60)
            run.require_account()
            assert (run.groups()["acknowledged"], run.worker("rollout", "paris")["refused"]) == (1, len(garbage))
        frontier, free = run.free_prompts()
        assert free == set(range(frontier)) - numbers - {lease.number}


def test_a_worker_whose_engine_fails_leaves_its_prompts_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue has room for 16 groups, and nothing settles them: 8 of them would else stay with the first worker."""
    engine = ("engine.kind=openai", "engine.url=http://127.0.0.1:1", f"engine.folder={tmp_path / 'weights'}")
    with served(tmp_path) as run, Trainer(run, trains=False), Workers() as workers:
        workers.start(run_rollout, run.config(*engine), "paris")
        until(lambda: "are given back" in caplog.text, "the engine does not fail")
        workers.start(run_rollout, run.config(), "rome")
        run.until_made(16)
        assert run.worker("rollout", "paris")["generated"] == 0


def test_a_call_that_is_refused_as_a_whole_loses_one_group_only(tmp_path: Path) -> None:
    with served(tmp_path) as run, Trainer(run, trains=False):
        run.groups()
        with WorkClient(run.config(), "rollout", "paris", run.rules().digest, 2) as client:
            leases = client.take(2, 60)
            leases += client.take(1, 60) if len(leases) == 1 else []
            bad, good = (lease.number for lease in leases)
            client.send([a_group(run, bad, task="x" * 1000), a_group(run, good)])
            until(lambda: run.groups()["acknowledged"] == 1, "the good one is not accepted")
            until(lambda: run.worker("rollout", "paris")["refused"] == 1, "the other one is not counted")
            run.require_account()
        _, free = run.free_prompts()
        assert not free & {bad, good}


def test_the_log_tells_of_the_first_groups_that_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(write_run_file(tmp_path, "127.0.0.1:1", {}))
    client = WorkClient(config, "reward", "rome", "digest", 1)
    for number in range(SHOWN + 5):
        client.score(Score(number, reason="it is bad"))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said[0] == "rome cannot use group 0: it is bad"
    assert said[SHOWN - 1 :] == [f"rome cannot use group {SHOWN - 1}: it is bad; further groups are only counted"]


def test_a_group_that_is_not_the_tasks_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as run, Trainer(run, trains=False), Workers() as workers:
        run.groups()
        own = tokenizer_of(run.config()).digest
        cases = [
            ({}, "or of another tokenizer"), ({"task": "words"}, "of task words"),
            ({"tokenizer": own}, "its prompt is not the task's"),
        ]  # fmt: skip
        workers.start(run_reward, run.config(), "rome")
        with WorkClient(run.config(), "rollout", "paris", run.rules().digest, 1) as client:
            for num, (changed, reason) in enumerate(cases, 1):
                [lease] = client.take(1, 60)
                client.send([a_group(run, lease.number, **changed)])
                until(lambda least=num: run.groups()["refused"] == least, "it is scored")
                assert reason in run.groups()["refusals"][-1][1]
        run.require_account()


@pytest.mark.slow
def test_all_roles_on_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = {"tokens = 1_000_000": "tokens = 1_000_000\nsteps = 4"}
    path = write_run_file(tmp_path, f"127.0.0.1:{free_port()}", change)
    command = [sys.executable, "-m", "diloco", "rl", "--local", str(path), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    groups = json.loads(ended.stdout)["groups"]
    assert groups["merged"] == 4 * 4
    assert {(it["role"], it["name"]) for it in groups["workers"]} == {("rollout", "rollout-0"), ("reward", "reward-0")}
    assert {it.stem for it in (tmp_path / "run" / "logs").glob("*.log")} == {
        "syncer", "trainer-0", "rollout-0", "reward-0",
    }  # fmt: skip

    with locked(tmp_path / "run", "", ""), pytest.raises(SystemExit) as refused:
        main(["rl", "--local", str(path)])
    assert refused.value.code == 2
    assert "another `diloco rl --local` runs 'letters'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_loop_of_the_page_trains_on_groups_of_workers(tmp_path: Path) -> None:
    [loop] = [each.text for each in blocks_of(PAGE.read_text(), "docs/rl.md") if each.text.startswith("import sys")]
    change = {
        "tokens = 1_000_000": "tokens = 1_000_000\nsteps = 4",
        "group_size = 4": 'group_size = 4\nloss = "dr_grpo"',  # it needs max_tokens
    }
    with served(tmp_path, change, steps=4) as run, Workers() as workers:
        workers.start(run_rollout, run.config(), "paris")
        workers.start(run_reward, run.config(), "rome")
        command = [sys.executable, "-c", loop, str(run.path), "own-loop"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr
        assert run.status()["step"] == 4
        assert run.groups()["merged"] == 4 * 4


OWN_TASK = """
import hashlib

def sample(seed):
    if seed % 4 == 0:
        return f"{seed} is longer than the run permits"
    return {"prompt": f"{seed % 1000}?", "answer": "1"}

def score(prompt, completion):
    if prompt["seed"] % 4 == 1:
        raise ValueError("no number")
    return int.from_bytes(hashlib.sha256(prompt["prompt"].encode()).digest()[:8], "big") / 2**64
"""
"""Its score tells the part of a prompt: below a half it is held out."""


@pytest.mark.slow
def test_the_newest_model_is_evaluated_on_a_task_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "a_task_beside_its_run_file.py").write_text(OWN_TASK)
    change = {'source = "tests.rl.letters:Letters"': 'source = "a_task_beside_its_run_file"\nheld_out = 0.5'}
    command = [sys.executable, "-m", "diloco", "rl", "evaluate", "run.toml", "--prompts", "40", "--json"]

    def evaluated(*more: str) -> dict[str, Any]:
        ended = subprocess.run(
            [*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout)
        return found

    with served(tmp_path, change) as run, Trainer(run, trains=False):
        run.groups()
        served_found = evaluated()
    assert evaluated("--store", str(tmp_path / "state"), "--set", "syncer.insecure=true") == served_found
    assert served_found["version"] == 0
    parts = served_found["scores"]["letters"]
    assert parts["held out"]["mean"] < 0.5 <= parts["training"]["mean"]
    for part in parts.values():
        assert part["prompts"] > 0
        assert 0 < part["unscored"] < 40 - part["prompts"]


def test_another_model_gets_other_scores(tmp_path: Path) -> None:
    with served(tmp_path) as run, Trainer(run, trains=False):
        run.groups()
        model = newest_model(run.config().syncer.address, run=RUN)
        evaluation = TaskEvaluation(run.config(), 60)
        own = evaluation.scores(model)["letters"]["training"]
        other = TaskEvaluation(run.config("run.seed=7"), 60)
        assert other.scores(None)["letters"]["training"] != own
        assert other.scores(model)["letters"]["training"] == own


def test_roles_of_a_run_that_is_under_way_elsewhere_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path) as run, Trainer(run, trains=False, name="trainer-0"):
        run.groups()
        with pytest.raises(SystemExit) as refused:
            main(["rl", "--local", str(run.path)])
    assert refused.value.code == 2
    assert "trainer-0 of run 'letters' is live in another process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give either a role"),
        (["--local", "run.toml", "rollout", "run.toml"], "give either a role"),
        (["--json", "rollout", "run.toml"], "must follow the role"),
    ],
)
def test_wrong_use_of_the_command(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["rl", *arguments])
    assert reason in capsys.readouterr().err
