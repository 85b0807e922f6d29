"""Scores from a child process, whatever the task does there. Real processes; a completion names what the task does."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.processes import until
from tests.rl.test_tasks import classifier
from tests.rl.toy import config_of

from diloco.config import TaskTable
from diloco.errors import ConfigError, ScoringError
from diloco.rl.scoring import Scorer
from diloco.rl.tasks import Task, Tasks
from diloco.rl.worker import make_scorer

TRIALS = r"""
import ctypes, fractions, os, re, signal, sys, types

kept = []

def sample(seed):
    return "prompt"

def raises(): raise ValueError("bad \x1b digit\nmore")
def takes_memory(): kept.append(bytearray(4 << 30)); return 1.0
def loops():
    while True: pass
def backtracks(): return float(bool(re.match("(a+)+$", "a" * 60 + "b")))
def forks_and_hangs():
    child = os.fork()
    if child == 0:
        signal.pause()
    note(os.getpid(), child)
    loops()
def forks():
    return 2.0 if os.fork() else 3.0
def prints():
    print("printed", flush=True); os.write(1, b"\0\0\0\1x"); return 1.0
def reads(): input()

def note(*numbers):
    with open(os.environ["TRIALS_NOTES"] + ".part", "w") as file:
        file.write(" ".join(map(str, numbers)))
    os.rename(os.environ["TRIALS_NOTES"] + ".part", os.environ["TRIALS_NOTES"])

DOES = {
    "good": lambda: 1.5, "true": lambda: True, "fraction": lambda: fractions.Fraction(1, 4),
    "raises": raises, "nan": lambda: float("nan"), "inf": lambda: -float("inf"), "text": lambda: "1.0",
    "nothing": lambda: None, "huge": lambda: 10**400, "exits": lambda: sys.exit(0), "ends": lambda: os._exit(0),
    "crashes": lambda: ctypes.string_at(0), "memory": takes_memory, "loops": loops, "backtracks": backtracks,
    "waits": signal.pause, "forks and hangs": forks_and_hangs, "forks": forks, "prints": prints, "reads": reads,
    "kills its group": lambda: os.killpg(0, signal.SIGKILL),
    "has torch": lambda: "torch" in sys.modules, "has keys": lambda: "DILOCO_KEYS" in os.environ,
    "numpy": lambda: __import__("numpy").float32(0.5),
}

def score(prompt, completion):
    return DOES[completion]()

class Sampling:
    def __init__(self, does):
        self.does = does

    def sample(self, seed):
        return {"prompt": "prompt", "value": DOES[self.does]()}

    score = None.__ne__

SAMPLING = types.SimpleNamespace(**{name: Sampling(name) for name in DOES})
"""

LOADS_ONCE = """
import os, pathlib

if (loaded := pathlib.Path(__file__).with_suffix(".loaded")).exists():
    os._exit(1)
loaded.touch()

def sample(seed):
    return "prompt"

def score(prompt, completion):
    return 1.0
"""

PROMPT = {"prompt": "prompt", "seed": 0}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TaskTable]]:
    """The task of the trials, in a module that only `sys.path` leads to."""
    folder = tmp_path_factory.mktemp("trials")
    (folder / "trials.py").write_text(TRIALS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("TRIALS_NOTES", str(folder / "notes"))
        patch.setenv("DILOCO_KEYS", "diloco1.secret")
        yield {"trials": TaskTable(source="trials")}


@pytest.fixture(scope="module")
def scorer(settings: dict[str, TaskTable]) -> Iterator[Scorer]:
    with Scorer(settings, timeout_s=120.0) as scorer:
        yield scorer


def notes() -> list[int]:
    """The process ids that a trial noted, once it has."""
    path = Path(os.environ["TRIALS_NOTES"])
    until(path.exists, "the trial notes its processes")
    text = path.read_text()
    path.unlink()
    return [int(number) for number in text.split()]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_scores_are_those_of_the_task(scorer: Scorer) -> None:
    assert scorer.score("trials", PROMPT, ["good", "true", "fraction", "numpy"]) == [1.5, 1.0, 0.25, 0.5]
    assert scorer.score("trials", PROMPT, []) == []
    settings = {
        "sums": TaskTable(source="reasoning-gym:chain_sum"),
        "words": TaskTable(source="reasoning-gym:spell_backward"),
    }
    with Scorer(settings, timeout_s=120.0) as gym:
        for name, each in settings.items():
            prompt = Task(name, each).prompt(3)
            assert gym.score(name, prompt, [prompt["answer"], "no", "\ud800"]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("raises", r'task "trials" raised ValueError \(bad \\x1b digit\) for completion 2; correct its score function'),
        ("nan", r'task "trials" returned nan, which is not a finite number up to 1e\+06; correct'),
        ("inf", "returned -inf, which"),
        ("text", "returned '1.0', which"),
        ("nothing", "returned None, which"),
        ("huge", r"raised OverflowError \("),
        ("unknown", r"raised KeyError \('unknown'\)"),
        ("reads", r"raised EOFError \("),
        (
            "exits",
            r'task "trials" ended its process by an exit, a crash or more than 2147483648 bytes of memory; correct',
        ),
        ("ends", "ended its process"),
        ("crashes", "ended its process"),
        ("kills its group", "ended its process"),
        ("memory", "ended its process"),
    ],
)
def test_what_is_no_score_is_one_sentence_and_the_next_call_works(scorer: Scorer, does: str, message: str) -> None:
    with pytest.raises(ScoringError, match=message) as caught:
        scorer.score("trials", PROMPT, ["good", does, "good"])
    assert str(caught.value).isprintable()
    assert scorer.score("trials", PROMPT, ["good"]) == [1.5]


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("raises", r"^task\.other: the sample of seed \d+ raised an error \(bad \\x1b digit\); correct the task"),
        ("exits", r"^task\.other: the sample of seed \d+ raised an error \(0\); correct"),
        ("nan", r"^task\.other: the sample of seed \d+ is not JSON"),
        ("ends", r'^prompt 3 of task "other" ended its process by an exit, a crash or more than 2147483648 bytes'),
        ("memory", r'^prompt 3 of task "other" ended its process'),
        pytest.param(
            "loops",
            r'^prompt 3 of task "other" took more than 3 s; correct it or raise the limit',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_prompt_that_cannot_be_sampled_is_one_sentence_and_the_next_call_works(
    settings: dict[str, TaskTable], does: str, message: str
) -> None:
    good, other = TaskTable(source="trials:SAMPLING.good"), TaskTable(source=f"trials:SAMPLING.{does}")
    with Scorer({"other": other, "good": good}, timeout_s=3.0 if "took" in message else 120.0) as scorer:
        with pytest.raises(ScoringError, match=message) as caught:
            scorer.prompt(3)
        assert str(caught.value).isprintable()
        assert scorer.prompt(4) == ("good", Task("good", good).prompt(2))


def test_prompts_are_those_of_the_tasks(settings: dict[str, TaskTable]) -> None:
    settings = {"sums": TaskTable(source="reasoning-gym:chain_sum", held_out=0.5), **settings}
    with Scorer(settings, timeout_s=120.0) as scorer:
        assert [scorer.prompt(number) for number in range(20)] == [
            Tasks(settings).prompt(number) for number in range(20)
        ]


@pytest.mark.slow
def test_prompts_are_sampled_without_the_reward_model(tmp_path: Path) -> None:
    config = config_of(f'task.letters.reward_model="{tmp_path}"')
    with make_scorer(config, scores=False) as scorer:
        assert scorer.prompt(0) == Tasks(config.task).prompt(0)
    with pytest.raises(ConfigError, match="cannot be loaded"), make_scorer(config):
        pass


@pytest.mark.parametrize(
    "does",
    [pytest.param("loops", marks=pytest.mark.slow), "backtracks", "waits",
     pytest.param("forks and hangs", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_task_that_hangs_is_killed_with_the_processes_that_it_started(
    settings: dict[str, TaskTable], does: str
) -> None:
    with Scorer(settings, timeout_s=3.0) as scorer:
        with pytest.raises(ScoringError, match=r'task "trials" took more than 3 s; correct it or raise the limit'):
            scorer.score("trials", PROMPT, [does])
        if does == "forks and hangs":
            for pid in notes():
                until(lambda pid=pid: has_ended(pid), "the kernel ends a killed process")
        assert scorer.score("trials", PROMPT, ["good"]) == [1.5]


def test_prints_and_forked_copies_do_not_disturb_the_answers(scorer: Scorer) -> None:
    for _ in range(3):
        assert scorer.score("trials", PROMPT, ["prints", "forks", "good"]) == [1.0, 2.0, 1.5]


def test_without_a_reward_model_the_child_has_no_torch_and_never_the_keys(scorer: Scorer) -> None:
    assert scorer.score("trials", PROMPT, ["has torch", "has keys"]) == [0.0, 0.0]


@pytest.mark.slow
def test_a_reward_model_scores_in_the_child(settings: dict[str, TaskTable], tmp_path: Path) -> None:
    classifier(tmp_path)
    rewarded = TaskTable(source="trials", reward_model=str(tmp_path))
    task = Task("trials", rewarded)
    task.load()
    with Scorer({"trials": rewarded}, timeout_s=120.0) as scorer:
        scores = scorer.score("trials", PROMPT, ["good", "bad"])
    assert scores == pytest.approx([task.score(PROMPT, "good"), task.score(PROMPT, "bad")], abs=1e-6)  # other threads
    assert scores[0] != scores[1]


@pytest.mark.parametrize("does", ["backtracks", "forks and hangs"])
def test_no_process_outlives_the_one_that_scores(settings: dict[str, TaskTable], does: str) -> None:
    parent = f"""
from diloco.rl.scoring import Scorer
from diloco.config import TaskTable
scorer = Scorer({{"trials": TaskTable(source="trials")}}, timeout_s=3600.0)
scorer.score("trials", {PROMPT}, ["good"])
print("scored", flush=True)
scorer.score("trials", {PROMPT}, [{does!r}])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "scored\n"
    started = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    if does == "forks and hangs":
        started += notes()
    assert len(started) >= 2
    assert not any(map(has_ended, started))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: all(map(has_ended, started)), "all processes of the child end")


def test_a_child_that_cannot_be_started_again_is_no_fault_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loads_once.py").write_text(LOADS_ONCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Scorer({"once": TaskTable(source="loads_once")}, timeout_s=120.0) as scorer:
        assert scorer.score("once", PROMPT, [""]) == [1.0]
        scorer.close()
        for call in (lambda: scorer.score("once", PROMPT, [""]), lambda: scorer.prompt(0)):
            with pytest.raises(ConfigError, match="the process of the tasks could not be started, .* free memory"):
                call()
        monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
        with pytest.raises(ConfigError, match="could not be started"):
            scorer.prompt(0)


def test_close_ends_the_child_and_the_next_call_starts_another(settings: dict[str, TaskTable]) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    with Scorer(settings, timeout_s=120.0) as scorer:
        started = {each.pid for each in psutil.Process().children(recursive=True)} - before
        assert len(started) == 2
        scorer.close()
        until(lambda: all(map(has_ended, started)), "the child ends")
        assert scorer.score("trials", PROMPT, ["good"]) == [1.5]


def test_tasks_that_cannot_be_loaded_and_wrong_limits_are_one_sentence(scorer: Scorer) -> None:
    with (
        pytest.raises(ConfigError, match=r'^task\.x\.source = "absent_module" cannot be loaded'),
        Scorer({"x": TaskTable(source="absent_module")}),
    ):
        pass
    with pytest.raises(ConfigError, match='there is no task "trial"; did you mean "trials"'):
        scorer.score("trial", PROMPT, [])
    limits: list[dict[str, Any]] = [{"timeout_s": 0}, {"timeout_s": math.nan}, {"memory_bytes": -1}]
    for limit in limits:
        with pytest.raises(ConfigError, match=f"^{next(iter(limit))} = .* must be a finite number above 0"):
            Scorer({}, **limit)
