"""A syncer that copies its run, and learners that train on through a copied or repaired state."""

from __future__ import annotations

import json
import shutil
import threading
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.processes import until
from safetensors import safe_open
from tests.store.small_run import flip, make_run
from tests.syncer.runs import PATIENT, RUN, LearnerThreads, Raw, layout, method, start, train
from tests.syncer.test_lineage import syncer_versions

from diloco.errors import ConfigError
from diloco.event_log import read_events
from diloco.events import Copied, CopyRefused, Event
from diloco.store.copying import CopyPlan, copy
from diloco.store.objects import open_store, opened, read_manifest
from diloco.store.repair import repair
from diloco.syncer.server import Options, Syncer


def test_the_first_copy_is_due_by_the_newest_one_that_is_there(tmp_path: Path) -> None:
    """A syncer that is started again more often than it copies does so all the same."""
    plan, log = CopyPlan(str(tmp_path / "copy"), 3600.0), tmp_path / "state" / "events.jsonl"
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.connection.close()
    for _ in range(2):
        with start(tmp_path, method(), copies=plan):
            until(partial(has_several, log, Copied, 1), "no first copy")
    assert sum(isinstance(each, Copied) for each in read_events(log)) == 1


def test_a_syncer_copies_on_its_own_and_a_place_that_refuses_ends_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "other")
    for place, kind in ((tmp_path / "other", CopyRefused), (tmp_path / "copies" / "state", Copied)):
        with start(tmp_path, method(), copies=CopyPlan(str(place), 0.05)) as syncer:
            raw = Raw(syncer.address)
            if kind is CopyRefused:
                raw.initialise()
            raw.connection.close()
            until(partial(has_several, tmp_path / "state" / "events.jsonl", kind, 4), "no such event")
    with start(tmp_path / "copies", method()) as syncer:
        assert syncer.driver.ask(lambda driver: driver.state.versions) == (0, 0)


def test_copies_to_the_store_itself_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "link").symlink_to("state")
    for place in (tmp_path / "state", tmp_path / "link"):
        with pytest.raises(ConfigError, match="copy_to = .* is the store of the run itself; name another place"):
            start(tmp_path, method(), copies=CopyPlan(str(place), 0.05))
    assert list((tmp_path / "state").iterdir()) == []


def test_the_store_may_be_named_as_the_state_directory_is_not(tmp_path: Path) -> None:
    """It is locked once."""
    (tmp_path / "state").mkdir()
    (tmp_path / "link").symlink_to("state")
    with start(tmp_path, method(), store=str(tmp_path / "link")) as syncer:
        assert syncer.standing == "serving"


def has_several(log: Path, kind: type[Event], number: int) -> bool:
    return sum(isinstance(each, kind) for each in read_events(log)) >= number


def thetas(state: Path) -> dict[int, list[torch.Tensor]]:
    """All versions of each fragment that are still there: none is deleted within minutes."""
    found = defaultdict[int, list[torch.Tensor]](list)
    for path in (state / "objects").glob("*/*"):
        if path.read_bytes()[8:9] != b"{":
            continue
        with safe_open(path, "pt") as file:
            if "theta" in file.keys():  # noqa: SIM118 - it is no dict
                described = json.loads(file.metadata()["diloco"])
                found[described["update"]["fragment"]].append(file.get_tensor("theta"))
    return found


def serve(state: Path, port: int = 0) -> Syncer:
    return Syncer(RUN, method(codec="e3m0"), Options(f"127.0.0.1:{port}", state, deadlines=PATIENT))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["copied back", "repaired"])
def test_a_learner_that_has_seen_later_versions_goes_on_with_what_is_left(how: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
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
            with opened(tmp_path / "copy", lock=True) as target:
                copy(open_store(state), target)
            go[9].set()
            until(here[25].is_set, "it does not get to step 25")
        lost = syncer_versions(state)
        if how == "repaired":
            for newest, *_ in read_manifest(open_store(state)).fragments:
                flip(0.5)(state / "objects" / newest.held)
            with opened(state, lock=True) as objects:
                repair(objects)
        else:
            shutil.rmtree(state)
            with opened(state, lock=True) as target:
                copy(open_store(tmp_path / "copy"), target)
        left = syncer_versions(state)
        assert all(mine < theirs for mine, theirs in zip(left, lost, strict=True))
        with serve(state, port) as syncer:
            go[25].set()
            model, metrics = life.result(timeout=300)
            versions = syncer.driver.ask(lambda driver: driver.state.versions)
            fragments = syncer.driver.ask(lambda driver: driver.status())["fragments"]
    assert all(mine > theirs for mine, theirs in zip(versions, left, strict=True))
    assert metrics["incarnation"] == 2
    published = thetas(state)
    for fragment in layout().fragments:  # its last rounds are merged after its last step
        held = torch.cat([model[name].flatten() for name in fragment.names])
        assert any(torch.equal(held, theta) for theta in published[fragment.index])
    for fragment in fragments:
        ledger = fragment["ledger"]
        spent = ledger["merged"] + ledger["lost"] + ledger["pending"] + sum(ledger["discarded"].values())
        assert spent == ledger["trained"]
