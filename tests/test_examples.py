"""The examples that people copy: they run, and what their tables say holds."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from diloco.config import load_config
from diloco.core.presets import method_from_table

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    """An example's `train.py` as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    pytest.importorskip("sklearn")
    return load("digits")


def test_digits_four_learners_know_what_none_of_them_has_seen(digits: ModuleType) -> None:
    arms = digits.compare("by class", "test", range(1), steps=60)
    together, alone, parallel = ([worth] for [worth] in arms.values())
    assert parallel[0].loss < together[0].loss < alone[0].loss
    assert together[0].accuracy > 0.6  # of a run of a third of its length
    assert alone[0].accuracy < 0.4  # three digits of ten


def test_digits_shards_are_disjoint_and_the_judged_images_in_none(digits: ModuleType) -> None:
    for division in ("mixed", "by class"):
        for split, number in (("test", 397), ("validation", 200)):
            data = digits.digits(division, split)
            seen = torch.cat([*data.shards, data.judged])
            assert len(data.judged) == number
            assert len(set(seen.tolist())) == len(seen) == 1200 + number
            if division == "by class":
                assert max(len(set(data.classes[shard].tolist())) for shard in data.shards) <= 4


def test_the_digits_syncer_runs_the_method_of_its_learners(digits: ModuleType) -> None:
    assert method_from_table(load_config(EXAMPLES / "digits" / "run.toml").method) == digits.METHOD


@pytest.mark.slow
def test_digits_over_a_syncer_are_the_same_bits(digits: ModuleType) -> None:
    command = [sys.executable, str(EXAMPLES / "digits" / "train.py"), "--syncer", "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "the bits of the local run: yes" in done.stdout
