"""A syncer that takes snapshots, and learners that train on through a restored or repaired state."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.processes import until
from diloco.store.backup import BackupPlan, back_up, due_in_s, restore, taken_last_at
from diloco.store.targets import open_target
from safetensors.torch import load_file
from tests.store.small_run import flip
from tests.syncer.runs import RUN, LearnerThreads, Raw, layout, method, start, train
from tests.syncer.test_lineage import syncer_versions

from diloco.event_log import read_events
from diloco.events import BackedUp, BackupRefused, Event
from diloco.store.repair import repair
from diloco.syncer.server import Options, Syncer


def test_the_first_backup_is_due_by_the_newest_one_that_is_there(tmp_path: Path) -> None:
    """A syncer that is started again more often than it takes snapshots takes them all the same."""
    plan, log = BackupPlan(str(tmp_path / "backups"), 3600.0, 2), tmp_path / "state" / "events.jsonl"
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.connection.close()
    with start(tmp_path, method(), backup=plan):
        until(lambda: any(isinstance(each, BackedUp) for each in read_events(log)), "no first backup")
    taken_at = taken_last_at(open_target(plan.place))
    assert taken_at is not None
    assert [due_in_s(taken_at, taken_at + later_s, 3600.0) for later_s in (-5, 0, 600, 9000)] == [3600, 3600, 3000, 0]


def test_a_syncer_takes_snapshots_on_its_own_and_a_place_that_refuses_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for place, kind in ((tmp_path / "file", BackupRefused), (tmp_path / "backups", BackedUp)):
        with start(tmp_path, method(), backup=BackupPlan(str(place), 0.05, 2)) as syncer:
            raw = Raw(syncer.address)
            if kind is BackupRefused:
                raw.initialise()
            raw.connection.close()
            until(partial(has_several, tmp_path / "state" / "events.jsonl", kind), "no such event")
    assert len(open_target(str(tmp_path / "backups")).names("snapshots")) <= 2
    restore(open_target(str(tmp_path / "backups")), tmp_path / "restored" / "state")
    with start(tmp_path / "restored", method()) as syncer:
        assert syncer.driver.ask(lambda driver: driver.state.versions) == (0, 0)


def has_several(log: Path, kind: type[Event]) -> bool:
    return sum(isinstance(each, kind) for each in read_events(log)) > 3


def serve(state: Path, port: int = 0) -> Syncer:
    return Syncer(RUN, method(codec="e3m0"), Options(f"127.0.0.1:{port}", state))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["restored from a backup", "repaired"])
def test_a_learner_that_has_seen_later_versions_goes_on_with_what_is_left(how: str, tmp_path: Path) -> None:
    state, target = tmp_path / "state", open_target(str(tmp_path / "backups"))
    here, go = {9: threading.Event(), 25: threading.Event()}, {9: threading.Event(), 25: threading.Event()}

    def at_step(step: int) -> None:
        if step in here:
            here[step].set()
            go[step].wait(300)

    with LearnerThreads(1) as pool:
        with serve(state) as syncer:
            port = syncer.port
            exchange = pool.connect(syncer.address, learner="site-a", initialise=True)
            life = pool.submit(train, 0, exchange, None, 40, at_step)
            until(here[9].is_set, "it does not get to step 9")
            back_up(state, target, 1)
            go[9].set()
            until(here[25].is_set, "it does not get to step 25")
        lost = syncer_versions(state)
        if how == "repaired":
            for fragment in (0, 1):
                flip(0.5)(max((state / "tensors").glob(f"f{fragment:05d}-*")))
            (state / "store.sqlite").unlink()
            repair(state)
        else:
            shutil.rmtree(state)
            restore(target, state)
        left = syncer_versions(state)
        assert all(mine < theirs for mine, theirs in zip(left, lost, strict=True))
        with serve(state, port) as syncer:
            go[25].set()
            model, metrics = life.result(timeout=300)
            versions = syncer.driver.ask(lambda driver: driver.state.versions)
            fragments = syncer.driver.ask(lambda driver: driver.status())["fragments"]
    assert all(mine > theirs for mine, theirs in zip(versions, left, strict=True))
    assert metrics["incarnation"] == 2
    for fragment in layout().fragments:  # the last round is merged after its last step
        held = torch.cat([model[name].flatten() for name in fragment.names])
        files = (state / "tensors").glob(f"f{fragment.index:05d}-*")
        assert any(torch.equal(held, load_file(file)["theta"]) for file in files)
    for fragment in fragments:
        ledger = fragment["ledger"]
        spent = ledger["merged"] + ledger["lost"] + ledger["pending"] + sum(ledger["discarded"].values())
        assert spent == ledger["trained"]
