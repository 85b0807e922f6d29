"""Built-in tasks that a small model can learn: closing brackets, sums of two numbers, and the next word (cloze).

A document is a context with choices of equal length, so that the length of a choice has no influence when the
likelihoods of whole choices are compared. One choice is right. lm-eval reads a YAML file and a JSON-lines file for each
task. No torch.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco.errors import ConfigError, StoreError, translated

BUILTIN_TASKS = ("diloco_arithmetic", "diloco_brackets", "diloco_cloze")
NUM_DOCUMENTS = 500
SEED = 0
"""Seed of the documents in the task files, which are the same for all models."""

CLOSERS = {"(": ")", "[": "]", "{": "}"}
DEEPEST = 4
"""Maximum depth of nested brackets."""
SUMMANDS = 30
"""Summands are the numbers from 0 to 29."""
HELD_OUT = 5
"""One in this many pairs of summands is held out: in the task, and in no training text."""
WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{3,}(?![A-Za-z])")


@dataclass(frozen=True)
class TaskDocument:
    """A question: `choices[answer]` is the right continuation of `text`."""

    text: str
    choices: tuple[str, ...]
    answer: int


def brackets(rng: random.Random, num_pairs: int) -> str:
    """A balanced text of three kinds of brackets, nested at most `DEEPEST` deep."""
    text, open_ones, left = "", "", num_pairs
    while left or open_ones:
        opens = left and (not open_ones or (len(open_ones) < DEEPEST and rng.random() < 0.5))
        if opens:
            text, open_ones, left = text + (new := rng.choice("([{")), open_ones + new, left - 1
        else:
            text, open_ones = text + CLOSERS[open_ones[-1]], open_ones[:-1]
    return text


def bracket_documents(num: int, seed: int) -> list[TaskDocument]:
    """Which bracket closes next? The context ends with a closing bracket, so the matching one is further back."""
    rng, found = random.Random(f"brackets {seed}"), list[TaskDocument]()
    kinds = tuple(CLOSERS.values())
    while len(found) < num:
        text = brackets(rng, rng.randint(4, 12))
        places = [k for k in range(2, len(text)) if text[k] in kinds and text[k - 1] in kinds]
        if places:
            place = rng.choice(places)
            found.append(TaskDocument("\n" + text[:place], kinds, kinds.index(text[place])))
    return found


def is_held_out(first: int, second: int) -> bool:
    """Whether a sum is held out for evaluation; a + b and b + a count as the same."""
    digest = hashlib.sha256(f"{min(first, second)}+{max(first, second)}".encode()).digest()
    return digest[0] % HELD_OUT == 0


def arithmetic_documents(num: int, seed: int) -> list[TaskDocument]:
    """What is the sum? Wrong choices differ by up to three or by ten, or have their digits exchanged.

    There are at most as many documents as held-out sums.
    """
    rng, found = random.Random(f"arithmetic {seed}"), list[TaskDocument]()
    pairs = [(a, b) for a in range(SUMMANDS) for b in range(SUMMANDS) if is_held_out(a, b)]
    for a, b in rng.sample(pairs, min(num, len(pairs))):
        right = str(a + b)
        near = {str(a + b + step) for step in (-10, -3, -2, -1, 1, 2, 3, 10)} | {right[::-1]}
        others = sorted(each for each in near if len(each) == len(right) and each != right)
        choices = [right, *rng.sample(others, 3)]
        rng.shuffle(choices)
        found.append(TaskDocument(f"\n{a}+{b}=", tuple(choices), choices.index(right)))
    return found


def cloze_documents(text: str, num: int, seed: int, context: int = 200) -> list[TaskDocument]:
    """Which of four words of equal length is next in the text?

    There are at most as many documents as the text has words with enough context and three other words of their length.

    Arguments:
        context: maximum number of characters before the word.
    """
    rng, found = random.Random(f"cloze {seed}"), list[TaskDocument]()
    places = [match for match in WORD.finditer(text) if match.start() >= min(context, 40)]
    words = sorted({match[0] for match in places})
    by_length: dict[int, list[str]] = {}
    for word in words:
        by_length.setdefault(len(word), []).append(word)
    rng.shuffle(places)
    for match in places:
        if len(found) == num:
            break
        others = [word for word in by_length[len(match[0])] if word.lower() != match[0].lower()]
        if len(others) < 3:
            continue
        choices = [match[0], *rng.sample(others, 3)]
        rng.shuffle(choices)
        before = text[max(0, match.start() - context) : match.start()]
        found.append(TaskDocument(before, tuple(choices), choices.index(match[0])))
    return found


# --- files for lm-eval

# JSON is valid YAML with all necessary quotes. A choice follows its context without a space.
_TASK = """# Described in docs/your-model.md.
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
num_fewshot: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def write_task_files(
    directory: Path, names: Sequence[str], *, text: str | None = None, num: int = NUM_DOCUMENTS
) -> None:
    """Write the files of built-in tasks. The same arguments write the same documents.

    Arguments:
        directory: created if it does not exist; the `include_path` of lm-eval. The YAML files contain its path.
        text: source of the words of `diloco_cloze`.
        num: maximum number of documents of each task.

    Raises:
        ConfigError: a cloze task without a text, or with a text that is too short.
        StoreError: the directory cannot be written.
    """
    with translated(OSError, StoreError, f"cannot write tasks to {directory}", "choose another directory"):
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            documents = _documents(name, text, num)
            data = (directory / f"{name}.jsonl").resolve()
            lines = (json.dumps(asdict(each), ensure_ascii=False) for each in documents)
            data.write_text("\n".join(lines) + "\n", encoding="utf-8")
            cache = json.dumps(str((directory / ".cache").resolve()))
            (directory / f"{name}.yaml").write_text(
                _TASK.format(name=name, data=json.dumps(str(data)), cache=cache), encoding="utf-8"
            )


def _documents(name: str, text: str | None, num: int) -> list[TaskDocument]:
    if name == "diloco_brackets":
        return bracket_documents(num, SEED)
    if name == "diloco_arithmetic":
        return arithmetic_documents(num, SEED)
    if text is None:
        raise ConfigError("diloco_cloze needs a text; give one with --text FILE or --run RUN_FILE")
    documents = cloze_documents(text, num, SEED)
    if not documents:
        raise ConfigError(
            f"a text of {len(text)} characters is too short for diloco_cloze, which needs four words of equal length; "
            "give more text"
        )
    return documents
