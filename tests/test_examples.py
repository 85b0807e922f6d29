"""The examples that people copy: they run, and what their tables say holds."""

import importlib.util
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks.processes import SyncerProcess

from diloco.config import DataTable, load_config
from diloco.core.fragments import make_layout
from diloco.core.presets import method_from_table
from diloco.training.data.corpus import load_corpus
from diloco.training.data.streams import held_out_batches

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "the bits of the local run: yes" in done.stdout


@pytest.fixture(scope="module")
def moe() -> ModuleType:
    return load("moe")


def test_moe_every_expert_is_tensors_of_its_own_and_has_one_learner(moe: ModuleType) -> None:
    model = moe.Mixture()
    layout = make_layout(model, moe.METHOD.fragments)
    assert len(layout.fragments) == 1 + moe.EXPERTS // 2
    trained_by: dict[str, int] = {}
    for name, _ in model.named_parameters():
        learners = [i for i in range(moe.LEARNERS) if any(fnmatchcase(name, p) for p in moe.experts_of(i))]
        trained_by[name] = len(learners)
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            assert learners == [expert // 2], name
    assert set(trained_by.values()) == {1, moe.LEARNERS}


def test_moe_learners_of_parts_of_the_experts_train_all_of_them(moe: ModuleType) -> None:
    corpus = load_corpus(DataTable())
    plan = moe.Plan(corpus, seed=0, steps=22, warm_steps=2)
    warm = moe.Worker.new(plan, range(moe.LEARNERS)).train(plan, plan.warm_steps)
    before = {name: value.clone() for name, value in warm.model.state_dict().items()}
    result = moe.together(plan, warm, moe.experts_of)
    changed = {name for name, value in result.state.items() if not torch.equal(value, before[name])}
    assert changed == set(before)
    assert result.num_trained < sum(p.numel() for p in warm.model.parameters()) / 2
    held_out = held_out_batches(corpus, moe.LENGTH, num_sequences=64, batch=32)
    loss, loads = moe.judge(result.state, held_out)
    assert loss < moe.judge(before, held_out)[0] < 5.7
    # Every token takes as many places as experts are chosen; fp32 means of them.
    torch.testing.assert_close(loads.sum(dim=1), torch.ones(moe.LAYERS))


@pytest.mark.slow
def test_a_follower_keeps_the_best_version_of_a_run(tmp_path: Path) -> None:
    run_file = (EXAMPLES / "start" / "run.toml").read_text()
    run_file = run_file.replace("tokens = 500_000", "tokens = 30_000").replace("learners = 2", "learners = 1")
    syncer = SyncerProcess(tmp_path, run_file)
    learner = tmp_path / "learner.py"
    learner.write_text((EXAMPLES / "start" / "learner.py").read_text().replace("127.0.0.1:7700", syncer.address))
    follow = [sys.executable, str(EXAMPLES / "follow.py"), syncer.address]
    with subprocess.Popen(follow, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as follower:
        try:
            subprocess.run([sys.executable, learner, "paris"], cwd=tmp_path, timeout=300, check=True)
            *judged, last = follower.communicate(timeout=300)[0].splitlines()
        finally:
            follower.kill()
            syncer.kill()
    losses = [float(line.rsplit(" ", 1)[1]) for line in judged]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    best = judged[losses.index(min(losses))].split(":")[0]
    assert last == f"best.pt is {best}"
    ended = torch.load(tmp_path / "paris.pt")
    kept = torch.load(tmp_path / "best.pt")
    assert {name: value.shape for name, value in kept.items()} == {name: value.shape for name, value in ended.items()}


@pytest.mark.slow
def test_torchft_learners_find_each_other_and_end() -> None:
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    command = [sys.executable, str(EXAMPLES / "torchft" / "train.py"), "--lighthouse", address, "--steps", "100"]
    try:
        learners = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("a", "b")]
        for learner in learners:
            out, _ = learner.communicate(timeout=300)
            assert learner.returncode == 0
            assert "learners: 2" in out
            assert "done" in out
    finally:
        lighthouse.shutdown()
