"""`diloco follow` and `diloco evaluate --follow`, and what an evaluator reports."""

from __future__ import annotations

import html
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from benchmarks.processes import until
from safetensors.torch import load_file
from tests.evaluation.test_evaluate import RUN as RUN_FILE
from tests.evaluation.test_evaluate import TEXT
from tests.following.published import METHODS, RUN, published_run
from tests.syncer.runs import PATIENT, status_of
from tests.syncer.test_doors import DAY

import diloco
from diloco import events
from diloco.cli import main
from diloco.config import load_config, parse_config
from diloco.errors import AuthError, ConfigError, StoreError
from diloco.evaluation.evaluate import EvaluationRequest
from diloco.evaluation.followed import Reporter, evaluate_versions
from diloco.evaluation.scores import ExportScores, Score, TaskResult
from diloco.event_log import read_events
from diloco.following.copies import DESCRIPTION, FollowedFolder, write_tensors
from diloco.following.follower import follow, newest_model
from diloco.following.stored_status import stored_status
from diloco.protocol.contribution import Budget
from diloco.store.objects import open_store, read_manifest
from diloco.store.reading import ObjectReader
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Options, Syncer
from diloco.training.model import build_model


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What a command prints; with another exit code, its error."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    printed = capsys.readouterr()
    assert ended.value.code == code, printed.err
    return printed.err if code else printed.out


TENSORS = "tensors"
"""The form of a copy for a run's name."""


def write(state: dict[str, torch.Tensor], out: Path) -> None:
    write_tensors(state, RUN, out / "model.safetensors")


def test_the_folder_has_the_newest_version_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, state = tmp_path / "deep" / "served", tmp_path / "state"
    with published_run(tmp_path, METHODS["4 bits"]) as run:
        for number, place in enumerate((run.syncer.address, state, state)):
            value = json.loads(said(capsys, "follow", place, "--run", RUN, "--into", folder, "--once", "--json"))
            assert (value["number"], value["written"]) == (number, True)
            model = newest_model(state, run=RUN)
            assert json.loads((folder / DESCRIPTION).read_bytes()) == {**model.describe(), "form": TENSORS}
            tensors = load_file(folder / "model.safetensors")
            assert all(torch.equal(tensors[name], each) for name, each in model.state_dict().items())
            run.publish(0)
        copies = sorted(path.name for path in folder.parent.iterdir())
        assert copies == [".served.1-1-1", ".served.1-2-1", "served"]  # with the one before, which may be being read
        run_again = said(capsys, "follow", state, "--run", RUN, "--into", folder, "--once")
        assert run_again == f"version 3 of 2 fragments, step 10, 50 tokens: written to {folder}\n"
        assert "was already in" in said(capsys, "follow", state, "--run", RUN, "--into", folder, "--once")


def test_a_write_that_fails_leaves_the_copy_before(tmp_path: Path) -> None:
    def fail(state: dict[str, torch.Tensor], out: Path) -> None:
        write(state, out)
        raise OSError(28, "No space left on device")

    folder = tmp_path / "served"
    with published_run(tmp_path, METHODS["4 bits"]) as run:
        assert FollowedFolder(folder, RUN, TENSORS, write).update(newest_model(tmp_path / "state", run=RUN))
        run.publish(0)
        model = newest_model(tmp_path / "state", run=RUN)
        with pytest.raises(StoreError, match="cannot keep a copy in .*No space left on device"):
            FollowedFolder(folder, RUN, TENSORS, fail).update(model)
        assert [path.name for path in tmp_path.glob(".served*")] == [".served.1-0-1"]
        assert json.loads((folder / DESCRIPTION).read_bytes())["versions"] == [0, 0]
        assert FollowedFolder(folder, RUN, TENSORS, write).update(model)
        assert sorted(path.name for path in tmp_path.glob(".served*")) == [".served.1-0-1", ".served.1-1-1"]


def test_the_copy_before_outlives_a_failed_write_of_the_same_number(tmp_path: Path) -> None:
    """As of a fresh run with the name of the one before."""

    def fail(state: dict[str, torch.Tensor], out: Path) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "served"
    models = []
    for name in ("old", "fresh"):
        with published_run(tmp_path / name, METHODS["4 bits"]):
            models.append(newest_model(tmp_path / name / "state", run=RUN))
    old, fresh = models
    assert old.digests == fresh.digests
    assert FollowedFolder(folder, RUN, TENSORS, write).update(old)
    with pytest.raises(StoreError, match="No space left on device"):
        FollowedFolder(folder, RUN, TENSORS, fail).update(fresh)
    for model, number in ((old, 1), (fresh, 2), (old, 3)):
        FollowedFolder(folder, RUN, TENSORS, write).update(model)
        assert json.loads((folder / DESCRIPTION).read_bytes())["run_id"] == model.run_id
        assert folder.readlink() == Path(f".served.1-0-{number}")
        assert load_file(folder / "model.safetensors")


def test_copies_beside_each_other_are_left_alone(tmp_path: Path) -> None:
    """Also where a link leads to the directory of them all."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep")
    folders = [
        FollowedFolder(tmp_path / place, RUN, TENSORS, write)
        for place in ("deep/model.v2", "deep/model.1-2", "deep/m*l", "deep/model")
    ]
    with published_run(tmp_path, METHODS["4 bits"]) as run:
        for number in range(3):
            for folder in (*folders, FollowedFolder(tmp_path / "link" / "other", RUN, TENSORS, write)):
                assert folder.update(newest_model(tmp_path / "state", run=RUN))
            for place in ("model.v2", "model.1-2", "m*l", "model", "other"):
                assert load_file(tmp_path / "deep" / place / "model.safetensors")
            assert len(list((tmp_path / "deep").iterdir())) == 5 * (1 + min(number + 1, 2))
            run.publish(0)


KILLED = """
import os, signal, sys

def kill(event, arguments):
    if event == "open" and str(arguments[0]).endswith("config.json") and arguments[1] == "w":
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
from diloco.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_process_that_was_killed_while_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "into" / "model"
    with trained_run(tmp_path) as (_, file):
        arguments = ("follow", tmp_path / "state", "--run", file, "--into", folder, "--once")
        killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert list(folder.parent.iterdir()) != []
        assert "written to" in said(capsys, *arguments)
        assert sorted(path.name for path in folder.parent.iterdir()) == [".model.1-1-1", "model"]


def test_a_folder_of_others_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with published_run(tmp_path, METHODS["4 bits"]):
        model = newest_model(tmp_path / "state", run=RUN)
        assert FollowedFolder(folder, RUN, TENSORS, write).update(model)  # an empty one is taken
        other = tmp_path / "other"
        other.mkdir()
        (other / "notes.txt").write_text("mine")
        taken_by = ((other, RUN, TENSORS), (folder, "another", TENSORS), (folder, RUN, "a checkpoint"))
        for taken, run, form in (*taken_by, (other / "notes.txt", RUN, TENSORS)):
            with pytest.raises(ConfigError, match="is not empty, and not a copy of the run") as refused:
                FollowedFolder(taken, run, form, write)
            assert "\n" not in str(refused.value)
        assert (other / "notes.txt").read_text() == "mine"
        arguments = ("follow", tmp_path / "state", "--run", RUN, "--into")
        assert "is not empty" in said(capsys, *arguments, other, code=2)
        assert "--every" in said(capsys, *arguments, tmp_path / "new", "--every", 0, code=2)
        assert not (tmp_path / "new").exists()


def test_the_status_and_the_page_of_a_run_without_its_syncer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have the syncer's values, as far as the store has them."""
    state, page = tmp_path / "state", tmp_path / "page.html"
    with published_run(tmp_path, METHODS["4 bits"], budget=Budget(steps=6)) as run:
        run.publish(0, 1, 0)
        run.raw.leave(5 * 6)
        theirs = status_of(run.syncer)
        served = json.loads(said(capsys, "status", "--store", state, "--json"))
        assert (served["store"]["standing"], served["store"]["is_over"]) == ("serving", True)
        run.raw.join()
        (learner,) = stored_status(state)["learners"].values()
        assert (learner["incarnation"], learner["live"]) == (2, None)
        assert "in the run" in said(capsys, "status", "--store", state)
    same = ("run", "run_id", "epoch", "method", "cut", "step", "tokens", "steering", "newest_merge", "data")
    assert {key: served[key] for key in same} == json.loads(json.dumps({key: theirs[key] for key in same}))
    for mine, its in zip(served["fragments"], theirs["fragments"], strict=True):
        assert [mine[key] for key in ("version", "ledger", "last_contributors")] == [
            its[key] for key in ("version", "ledger", "last_contributors")
        ]
    text = said(capsys, "status", "--store", state)
    assert "no syncer was asked" in text
    assert f"made from: {state}, manifest " in text
    assert "no syncer serves it" in text
    assert "newest merge: version 2 of fragment 0 by raw" in text
    assert said(capsys, "page", "--store", state, "--out", page) == f"see {page}\n"
    shown = html.unescape(page.read_text())
    assert f"{state}, manifest " in shown
    assert "version 2 of fragment 0 by raw" in shown
    for arguments, words, code in (
        ((state, "--run", RUN), "reads the run without its syncer; drop the run file, --address, --run", 2),
        ((tmp_path / "none",), "there is no run in", 2),
        ((tmp_path / ("n" * 300),), "could not be opened (File name too long", 1),
    ):
        assert words in said(capsys, "status", "--store", *arguments, code=code)


def test_a_run_that_was_over_goes_on_with_a_larger_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is durable says so from the start on, also while no learner has joined."""
    state, method = tmp_path / "state", METHODS["lossless"]

    def is_over() -> list[bool]:
        """As the manifest, its record and the status say."""
        objects = open_store(state)
        manifest = read_manifest(objects)
        assert manifest.record is not None
        with ObjectReader(objects) as reader:
            record, _ = reader.record(manifest.record, len(manifest.fragments))
        assert record is not None
        text = said(capsys, "status", "--store", state)
        return [manifest.is_over, record["is_over"], stored_status(state)["store"]["is_over"], "run is over" in text]

    with published_run(tmp_path, method, budget=Budget(steps=6)) as run:
        run.publish(0, 1, 0)
        run.raw.leave(run.raw.beat(6, 30).standing.run_tokens)
    assert is_over() == [True] * 4
    with published_run(tmp_path, method, joins=False, budget=Budget(steps=12)):
        until(lambda: not read_manifest(open_store(state)).is_over, "it is still over")
    assert is_over() == [False] * 4
    with (
        published_run(tmp_path, method, budget=Budget(steps=12)) as run,
        follow(state, run=RUN, poll_s=0.01) as follower,
    ):
        assert next(follower).versions == (2, 1)
        run.publish(0)
        assert next(follower).versions == (3, 1)
        run.raw.leave(run.raw.beat(12, 60).standing.run_tokens)
        assert list(follower) == []
    assert is_over() == [True] * 4


def test_follow_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 0; the folder has the last version."""
    folder, state = tmp_path / "served", tmp_path / "state"
    with published_run(tmp_path, METHODS["4 bits"]) as run, ThreadPoolExecutor(1) as pool:

        def train() -> None:
            until((folder / DESCRIPTION).exists, "nothing is written")
            run.publish(0, 1, 0)
            run.raw.beat(10, 50, finished=True, seen=run.raw.beat(10, 50).lineage)

        training = pool.submit(train)
        lines = said(capsys, "follow", state, "--run", RUN, "--into", folder, "--json").splitlines()
        training.result()
        found = [json.loads(line) for line in lines]
        assert (found[0]["number"], found[-1]["number"]) == (0, 3)
        assert found[-1]["versions"] == [2, 1]
        tensors = load_file(folder / "model.safetensors")
        assert all(torch.equal(tensors[name], each) for name, each in newest_model(state, run=RUN).state_dict().items())
        assert json.loads((folder / DESCRIPTION).read_bytes())["versions"] == [2, 1]


def test_the_keys_of_a_run_file_are_those_of_its_syncer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, file, folder = tmp_path / "keys", tmp_path / "run.toml", tmp_path / "served"
    Keyring.new(keys, RUN, ["127.0.0.1"], [("raw", "learner"), ("eye", "viewer")], DAY)
    (tmp_path / "text.txt").write_text(TEXT)
    text = RUN_FILE.format(text=tmp_path / "text.txt").replace('"small"', f'"{RUN}"')
    file.write_text(f'{text}\n[syncer]\nkeys = "{keys / "eye"}"\n')
    with published_run(tmp_path, METHODS["4 bits"], keys=keys / "syncer") as run:
        asked = ("follow", run.syncer.address, "--into", folder, "--once", "--run")
        assert "the run's model is not the one of [model]" in said(capsys, *asked, file, code=1)  # it was read
        assert "keys" in said(capsys, *asked, RUN, code=1)
        store = tmp_path / "state"
        assert "the run's model" in said(capsys, "follow", store, "--into", folder, "--once", "--run", file, code=1)


# --- evaluation -------------------------------------------------------------------------------------------------------


def scores_of(**values: float) -> ExportScores:
    results = [TaskResult("held-out loss", "nats per token", "lower", Score.of([2.5]))]
    results += [TaskResult(name, "acc", "higher", Score.of([value])) for name, value in values.items()]
    return ExportScores("version", 1, {it.name: it for it in results})


def reports(state: Path) -> list[events.Reported]:
    return [it for it in read_events(state / "events.jsonl") if isinstance(it, events.Reported)]


def test_an_evaluator_reports_and_a_viewer_may_not(tmp_path: Path) -> None:
    Keyring.new(
        tmp_path / "keys", RUN, ["127.0.0.1"], [("raw", "learner"), ("eye", "viewer"), ("eva", "evaluator")], DAY
    )
    keys = tmp_path / "keys"
    with published_run(tmp_path, METHODS["4 bits"], keys=keys / "syncer") as run:
        run.publish(1)
        model = newest_model(run.syncer.address, run=RUN, keys=keys / "eva")
        for name in ("eye", "raw"):
            reporter = Reporter(run.syncer.address, RUN, threading.Event(), keys=keys / name)
            with pytest.raises(AuthError, match="this needs 'evaluator'"):
                reporter.report(model, scores_of())
            reporter.close()
        reporter = Reporter(run.syncer.address, RUN, threading.Event(), keys=keys / "eva")
        reporter.report(model, scores_of(brackets=0.75, broken=float("nan")))
        reporter.close()
    (found,) = reports(tmp_path / "state")
    assert (found.by, found.loss, found.scores) == ("eva", 2.5, {"brackets/acc": 0.75})
    assert (found.versions, found.step, found.tokens) == (model.versions, model.step, model.tokens)


@contextmanager
def trained_run(tmp_path: Path) -> Iterator[tuple[Syncer, Path]]:
    """A run with its run file, which has ended at version 1."""
    (tmp_path / "text.txt").write_text(TEXT)
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE.format(text=tmp_path / "text.txt"))
    model = build_model(parse_config(file.read_text()).model, 256, 32, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = Options("127.0.0.1:0", tmp_path / "state", budget=Budget(tokens=64), deadlines=PATIENT)
    with Syncer("small", diloco.DiLoCo(sync_every=2), options) as syncer:
        exchange = diloco.connect(syncer.address, run="small", learner="a", initialise=True)
        with diloco.Learner(model, optimizer, exchange=exchange) as learner:
            while not learner.done:
                tokens = torch.arange(32)[None]
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=32)
            learner.finish()
        yield syncer, file


def test_versions_of_a_run_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the syncer, until the run has ended, and by the store alone: with the same results."""
    with trained_run(tmp_path) as (syncer, file):
        asked = ("--run", file, "--tasks", "diloco_brackets", "--limit", 4, "--json")
        (line,) = said(capsys, "evaluate", "--follow", syncer.address, *asked).splitlines()
        found = json.loads(line)
    assert found["versions"] == [1]
    request = EvaluationRequest(tasks=("diloco_brackets",), run=file, limit=4)
    ((_, scores),) = evaluate_versions([newest_model(tmp_path / "state", run="small")], request, load_config(file))
    assert found["results"] == scores.to_dict()["results"]
    reported = reports(tmp_path / "state")[-1]
    loss, brackets = (it["value"] for it in found["results"])
    assert (reported.by, reported.loss, reported.scores) == ("evaluator", loss, {"diloco_brackets/acc": brackets})
    assert (reported.versions, reported.tokens) == ((1,), 64)


def test_wrong_use_of_evaluate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ((tmp_path, "--text", "x", "--report-to", "127.0.0.1:1"), "--report-to has no effect without --follow"),
        (("--text", tmp_path / "text.txt"), "give either exports, or a run with --follow SOURCE"),
        ((tmp_path, "--follow", "127.0.0.1:1", "--tasks", "x"), "give either exports, or a run with --follow SOURCE"),
        (("--follow", "127.0.0.1:1", "--tasks", "x"), "give --run RUN_FILE"),
        (("--follow", "127.0.0.1:1", "--every", 0), "--every"),
    ):
        assert words in said(capsys, "evaluate", *arguments, code=2)
