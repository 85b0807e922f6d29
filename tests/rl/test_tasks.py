"""Tasks: prompts from seeds, the held-out part, templates, one's own tasks, reward models."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.config import TaskTable
from diloco.errors import ConfigError
from diloco.rl.tasks import Task, Tasks
from diloco.training.data.reading import byte_tokenizer

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

OWN = """
def sample(seed):
    return {"prompt": f"double {seed % 50}", "answer": str(seed % 50 * 2), "extra": (1, 2)}

def score(prompt, completion):
    return float(completion == prompt["answer"])

class Text:
    def sample(self, seed):
        return f"text {seed}"

    def score(self, prompt, completion):
        return len(prompt["prompt"]) + len(completion)

class Failing(Text):
    def sample(self, seed):
        raise ZeroDivisionError("no sample\\nmore")

class NotJson(Text):
    def sample(self, seed):
        return {"prompt": "x", "more": {1}}

class NoText(Text):
    def sample(self, seed):
        return {"prompt": 5}

text = Text()
number = 3
"""


def sums(**changed: Any) -> TaskTable:
    return TaskTable(source="reasoning-gym:chain_sum", settings=SUMS, **changed)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Task]:
    """Makes the task of an object of a module."""
    (tmp_path / "own_task.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    return lambda source: Task("own", TaskTable(source=source))


def test_a_prompt_of_reasoning_gym_is_a_function_of_its_number_and_its_answer_scores_1() -> None:
    task, again = Task("sums", sums()), Task("sums", sums())
    prompts = [task.prompt(number) for number in range(50)]
    assert prompts == [again.prompt(number) for number in reversed(range(50))][::-1]
    assert len({prompt["prompt"] for prompt in prompts}) > 25
    for prompt in prompts:
        assert eval(prompt["prompt"].split(":")[1].rstrip(" =")) == int(prompt["answer"])
        assert task.score(prompt, f" {prompt['answer']}\n") == 1.0
        assert [task.score(prompt, wrong) for wrong in ("", "x", f"{prompt['answer']}0", "the answer is 3")] == [
            0.0
        ] * 4


def test_partial_scores_are_those_of_the_library() -> None:
    words = {"min_word_len": 4, "max_word_len": 4}
    task = Task("words", TaskTable(source="reasoning-gym:spell_backward", settings=words, exact=False))
    prompt = task.prompt(0)
    assert task.score(prompt, prompt["answer"]) == 1.0
    assert task.score(prompt, prompt["answer"][:2] + "??") == 0.5
    several = Task("graph", TaskTable(source="reasoning-gym:graph_color", exact=False))
    assert several.score(several.prompt(0), "{}") < 1


def test_a_task_of_the_library_whose_index_is_bounded_has_prompts_for_every_seed() -> None:
    task = Task("symbolic", TaskTable(source="reasoning-gym:gsm_symbolic"))
    prompts = [task.prompt(number) for number in range(10)]
    assert len({prompt["prompt"] for prompt in prompts}) > 5
    assert prompts == [task.prompt(number) for number in range(10)]


def test_a_template_has_the_question_and_the_metadata_and_never_the_answer() -> None:
    assert Task("sums", sums(template="{expression}=")).prompt(1)["prompt"].endswith("=")
    assert Task("sums", sums(template="{num_terms} {{}}: {question}")).prompt(1)["prompt"].startswith("2 {}: State")
    for template in ("{answer}", "{questoin}", "{}", "{question"):
        with pytest.raises(ConfigError, match=r"task\.sums\.template = .*; known are difficulty, expression.*question"):
            Task("sums", sums(template=template))


def test_no_held_out_text_is_ever_a_prompt_of_training() -> None:
    task = Task("sums", sums(held_out=0.2))
    training = {task.prompt(number)["prompt"] for number in range(1500)}
    held_out = {task.prompt(number, held_out=True)["prompt"] for number in range(500)}
    assert not training & held_out
    assert len(training | held_out) > 190  # of the 200 questions
    assert 20 < len(held_out) < 60
    assert held_out == {Task("sums", sums(held_out=0.2)).prompt(n, held_out=True)["prompt"] for n in range(500)}


def test_an_empty_part_is_an_error(own: Callable[[str], Task]) -> None:
    with pytest.raises(ConfigError, match=r"task\.sums has no held-out prompts; set task\.sums\.held_out"):
        Task("sums", sums()).prompt(0, held_out=True)
    with pytest.raises(ConfigError, match=r"held_out = 1e-09: none of 10000 sampled prompts is held out"):
        Task("own", TaskTable(source="own_task", held_out=1e-9)).prompt(0, held_out=True)


def test_a_task_of_ones_own_is_a_module_an_object_or_a_class(own: Callable[[str], Task]) -> None:
    task = own("own_task")
    prompt = task.prompt(7)
    assert prompt["prompt"] == f"double {prompt['seed'] % 50}"
    assert prompt["extra"] == [1, 2]
    assert (task.score(prompt, prompt["answer"]), task.score(prompt, "")) == (1.0, 0.0)
    for source in ("own_task:Text", "own_task:text"):
        prompt = own(source).prompt(7)
        assert prompt == {"prompt": f"text {prompt['seed']}", "seed": prompt["seed"]}
        assert own(source).score(prompt, "abc") == len(prompt["prompt"]) + 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_such_module", "\"no_such_module\" cannot be loaded .*'no_such_module'.*; name a module on PYTHONPATH"),
        ("own_task:absent", "cannot be loaded .*'absent'"),
        ("own_task:number", "has no function sample"),
        ("", "cannot be loaded"),
    ],
)
def test_a_source_that_is_no_task_is_one_sentence(own: Callable[[str], Task], source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^task.own.source = .*{message}"):
        own(source)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Failing", r"raised an error \(no sample\); correct"),
        ("NotJson", r"is not JSON \(Object of type set"),
        ("NoText", 'has no text "prompt"'),
    ],
)
def test_a_sample_that_is_no_prompt_is_one_sentence(own: Callable[[str], Task], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^task\.own: the sample of seed \d+ {message}"):
        own(f"own_task:{name}").prompt(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            TaskTable(source="reasoning-gym:chain_sums"),
            'task.x.source: .* no task "chain_sums"; did you mean "chain_sum"',
        ),
        (
            TaskTable(source="reasoning-gym:chain_sum", settings={"min_term": 2}),
            'unknown key "task.x.settings.min_term"; did you mean "min_terms"',
        ),
        (TaskTable(source="reasoning-gym:chain_sum", settings={"seed": 2}), 'unknown key "task.x.settings.seed"'),
        (
            TaskTable(source="reasoning-gym:chain_sum", settings={"min_terms": 9}),
            "task.x.settings do not suit chain_sum",
        ),
        (
            TaskTable(source="reasoning-gym:rubiks_cube"),
            "task.x.exact: rubiks_cube has no single .*; set task.x.exact = false",
        ),
        (TaskTable(source="own_task", template="{question}?"), "task.x.template has no effect"),
        (TaskTable(source="own_task", settings={"a": 1}), "task.x.settings has no effect"),
        (TaskTable(source="own_task", exact=False), "task.x.exact has no effect"),
        (
            TaskTable(source="verifiers:absent"),
            'task.x.source = "verifiers:absent" cannot be loaded .*; install verifiers and',
        ),
        (TaskTable(source="verifiers:absent", exact=False), 'exact has no effect with source = "verifiers:absent"'),
        (
            TaskTable(source="reasoning-gym:chain_sum", exact=False, reward_model="m"),
            "task.x.exact has no effect with a rew",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence(settings: TaskTable, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Task("x", settings)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if "editable" not in repr(each).lower()])
    with pytest.raises(ConfigError, match=r'^task\.sums\.source = "reasoning-gym:chain_sum" needs.*diloco\[rl\]'):
        Task("sums", sums())


ENVIRONMENT = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Double(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

class InRuntime(Double):
    @vf.reward
    async def ran(self, runtime: vf.Runtime) -> float:
        return 1.0

class Config(vf.TasksetConfig):
    kind: str = "double"

class Doubles(vf.Taskset[Double, Config]):
    def load(self):
        kind = InRuntime if self.config.kind == "runtime" else Double
        for number in range(50):
            data = Data(system_prompt="Sums.", prompt=f"double {number}", answer=str(2 * number))
            yield kind(data, self.config.task)

__all__ = ["Doubles"]
"""


def test_an_environment_of_verifiers_scores_a_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason="not among the libraries of the tests")
    (tmp_path / "own_doubles.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = Task("own", TaskTable(source="verifiers:own-doubles"))
    prompt = task.prompt(3)
    assert prompt["prompt"] == f"Sums.\n\ndouble {prompt['seed'] % 50}"
    assert [task.score(prompt, reply) for reply in (str(prompt["seed"] % 50 * 2), "no")] == [2.0, 0.0]
    with pytest.raises(ConfigError, match="is not a finite environment with rewards, or needs"):
        Task("own", TaskTable(source="verifiers:own-doubles", settings={"kind": "runtime"}))
    with pytest.raises(ConfigError, match="cannot be loaded .*settings"):
        Task("own", TaskTable(source="verifiers:own-doubles", settings={"knid": "runtime"}))


def test_the_prompts_of_several_tasks_take_turns() -> None:
    tasks = Tasks({"words": TaskTable(source="reasoning-gym:spell_backward"), "sums": sums(held_out=0.5)})
    for number in range(6):
        name = ("sums", "words")[number % 2]
        assert tasks.prompt(number) == (name, tasks.tasks[name].prompt(number // 2))
    assert tasks.prompt(4, held_out=True) == ("sums", tasks.tasks["sums"].prompt(2, held_out=True))
    with pytest.raises(ConfigError, match=r"add a table \[task\.NAME\]"):
        Tasks({})


def classifier(path: Path, num_labels: int = 1) -> Any:
    """A tiny one with random weights, saved with the tokenizer of bytes."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=num_labels, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(path)
    byte_tokenizer(64).save_pretrained(path)
    return model


def test_the_score_of_a_reward_model_is_its_logit(tmp_path: Path) -> None:
    model = classifier(tmp_path)
    task = Task("sums", sums(reward_model=str(tmp_path), template="{expression}="))
    task.load()
    prompt = task.prompt(0)
    tokens = torch.tensor([list(f"{prompt['prompt']}12".encode())])
    with torch.inference_mode():
        expected = model(input_ids=tokens).logits.item()
    assert task.score(prompt, "12") == expected
    assert task.score(prompt, "13") != expected
    with pytest.raises(ValueError, match=r"tokens are more than the 64 of"):
        task.score(prompt, "1" * 64)


def test_a_path_without_a_classifier_of_one_label_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'^reward_model = ".*" cannot be loaded .*; name a sequence classifier'):
        Task("sums", sums(reward_model=str(tmp_path / "absent"))).load()
    classifier(tmp_path, num_labels=3)
    with pytest.raises(ConfigError, match="has 3 labels; name a classifier with one"):
        Task("sums", sums(reward_model=str(tmp_path))).load()
