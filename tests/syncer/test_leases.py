"""Leased data with real processes over sockets: learners and the syncer are killed, join and leave, and each unit is
merged once, which the durable state and the syncer's events prove."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.processes import ForkedSyncer, start_module
from tests.store.small_run import read_newest
from tests.syncer.leased_life import NUM_SAMPLES, trained_by
from tests.syncer.leased_ranks_life import BATCH
from tests.syncer.runs import RUN, Net, Raw, method, start, status_of, versions_of

import diloco
from diloco.cli import main
from diloco.errors import ConfigError, PayloadError, StaleIncarnationError
from diloco.event_log import read_events
from diloco.events import Data, Merged
from diloco.exchange.dialling import fetch_status
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.units import place_of_unit
from diloco.store.objects import open_store, opened, read_manifest
from diloco.store.repair import repair

RUN_FILE = """
[run]
name = "tiny"
tokens = 1_000_000
[method]
preset = "StreamingDiLoCo"
sync_every = 4
overlap = 1
mix = 0.0
fragments = {type = "Named", patterns = [["layers.0.*"], ["layers.1.*"]]}
[syncer]
lost_floor_s = 2.0
lost_cap_s = 2.0
"""


def durable(directory: Path) -> tuple[dict[str, Any], list[int]]:
    """The leases in the record on the disk, and the versions of the fragments."""
    saved = read_newest(open_store(directory / "state"))
    assert saved.record is not None
    return saved.record["leases"], [each.version for each in saved.fragments]


def merges_of(directory: Path, fragment: int, newest: int) -> Counter[int]:
    """How often each unit is in a durable version of a fragment. A round that was closed and not durable when the
    syncer was killed was closed again: the last one counts."""
    events = read_events(directory / "state" / "events.jsonl")
    by_version = {it.version: it for it in events if isinstance(it, Merged) and it.fragment == fragment}
    return Counter(
        unit
        for version in range(1, newest + 1)
        for ranges in by_version[version].units
        for first, stop in ranges
        for unit in range(first, stop)
    )


def numbers(ranges: list[list[int]]) -> set[int]:
    return {unit for first, stop in ranges for unit in range(first, stop)}


@pytest.mark.slow
def test_each_unit_is_merged_once_whatever_is_killed_joins_and_leaves(tmp_path: Path) -> None:
    syncer, learners = ForkedSyncer(tmp_path, RUN_FILE), list[Any]()

    def learner(name: str, *options: str) -> Any:
        process = start_module("tests.syncer.leased_life", str(tmp_path), syncer.address, name, *options)
        learners.append(process)
        return process

    def done() -> int:
        data = fetch_status(syncer.address, run=RUN)["data"]
        return 0 if data is None else sum(it["done"] for it in data["passes"]) + data["passes_done"] * NUM_SAMPLES

    def at(units: int) -> None:
        until(lambda: done() >= units, f"{units} units are not done")

    a, b, c = learner("a", "--initialise"), learner("b", "--steps=30"), learner("c")
    try:
        at(40)
        a.kill()
        a.join()
        at(60)
        os.kill(c.pid, signal.SIGSTOP)  # for so long that it is evicted
        again = learner("a")
        until(lambda: "c" not in fetch_status(syncer.address, run=RUN)["learners"], "c is not evicted")
        os.kill(c.pid, signal.SIGCONT)
        at(90)
        syncer.kill()
        syncer.start()
        at(120)
        late = learner("d")
        b.join(300)
        assert b.exitcode == 0
        at(3 * NUM_SAMPLES)
        syncer.kill()
        syncer.start()
        at(4 * NUM_SAMPLES)
        (tmp_path / "stop").touch()
        for process in (again, c, late):
            process.join(300)
            assert process.exitcode == 0
        status = fetch_status(syncer.address, run=RUN)["data"]
    finally:
        for process in learners:
            process.kill()
        syncer.kill()

    with pytest.raises(SystemExit) as ended:  # all of it is decided again as it was
        main(["replay", str(tmp_path / "state")])
    assert ended.value.code == 0

    leases, versions = durable(tmp_path)
    returned, frontier = numbers(leases["returned"]), leases["frontier"]
    all_done = set(range(frontier)) - returned
    assert leases["leases"] == []  # all have left
    assert status["passes_done"] >= 3
    assert set(range(status["passes_done"] * NUM_SAMPLES)) <= all_done
    for it in status["passes"]:
        assert it["done"] + it["leased"] + it["free"] == NUM_SAMPLES
    ever = Counter[int]()
    for fragment, totals in enumerate(leases["totals"]):
        merges = merges_of(tmp_path, fragment, versions[fragment])
        assert merges.total() == totals["merges"]
        assert sum(totals["fates"].values()) == len(all_done)
        assert sum(unit in merges for unit in all_done) >= totals["fates"]["merged"]
        assert totals["merges"] == totals["fates"]["merged"] + totals["repeated"]
        assert sum(num - 1 for num in merges.values()) <= totals["repeated"]
        trained = Counter(trained_by(tmp_path))
        assert not Counter(place_of_unit(unit, NUM_SAMPLES, 3) for unit in merges.elements()) - trained
        ever |= merges
    assert all_done <= ever.keys()
    assert any(isinstance(event, Data) for event in read_events(tmp_path / "state" / "events.jsonl"))


def test_the_ranks_of_a_learner_read_different_samples_and_continue(tmp_path: Path) -> None:
    with start(tmp_path, diloco.DiLoCo(sync_every=4)) as syncer:
        ranks = [
            start_module("tests.syncer.leased_ranks_life", str(tmp_path), syncer.address, str(rank))
            for rank in range(2)
        ]
        try:
            for process in ranks:
                process.join(300)
                assert process.exitcode == 0
        finally:
            for process in ranks:
                process.kill()
        data = fetch_status(syncer.address, run=RUN)["data"]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    steps = [set(one) | set(other) for one, other in zip(first, second, strict=True)]
    assert all(len(step) == 2 * BATCH for step in steps)
    # Two steps were pending at the end of the first part, and are merged with the second part's.
    assert [it["fates"] for it in data["fragments"]] == [{"merged": 20 * 2 * BATCH}]
    assert data["passes"][0]["done"] + data["passes_done"] * NUM_SAMPLES == 20 * 2 * BATCH
    assert data["unclaimed"] == 0
    read = Counter(sample for step in steps for sample in step)
    assert read == Counter(place_of_unit(unit, NUM_SAMPLES, 3) for unit in range(20 * 2 * BATCH))


def test_a_learner_with_units_in_its_checkpoint_leases_before_it_steps(tmp_path: Path) -> None:
    def learner(address: str, **options: Any) -> diloco.Learner:
        model = Net()
        exchange = diloco.connect(address, run=RUN, learner="a", **options)
        return diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=1e-3), exchange=exchange)

    with start(tmp_path, diloco.DiLoCo(sync_every=4)) as syncer:
        with learner(syncer.address, initialise=True) as first:
            sampler = diloco.LeasedSampler(first, NUM_SAMPLES, BATCH)
            for _ in islice(sampler.batches(iter(sampler)), 2):
                first.step(tokens=BATCH)
            saved = first.state_dict()
        with learner(syncer.address) as again:
            assert again.load_state_dict(saved)
            with pytest.raises(ConfigError, match=r"work on leased units of data; lease the same data again"):
                again.step(tokens=BATCH)


# --- at the door ------------------------------------------------------------------------------------------------------


class Leaser(Raw):
    def lease(self, number: int = 1, num_units: int = 10, **fields: Any) -> list[tuple[int, int]]:
        values = {"incarnation": self.incarnation, "data_units": 100, "data_digest": "d", **fields}
        request = pb.LeaseRequest(run=RUN, learner=self.name, number=number, num_units=num_units, **values)
        return [(it.first, it.stop) for it in self.connection.call("control", "Lease", request, pb.LeaseReply).units]


def test_a_lease_is_durable_and_a_resend_gets_the_same(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        raw = Leaser(syncer.address)
        raw.initialise()
        raw.join()
        assert raw.lease() == [(0, 10)]
        assert raw.lease() == [(0, 10)]
        assert raw.lease(2) == [(10, 20)]
        assert durable(tmp_path)[0]["frontier"] == 20
        raw.leave()
        assert durable(tmp_path)[0]["returned"] == [[0, 20]]
        with pytest.raises(StaleIncarnationError):
            raw.lease(3)


def test_units_of_a_version_that_a_repair_lost_are_leased_again(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        raw = Leaser(syncer.address)
        raw.initialise()
        raw.join()
        assert raw.lease() == [(0, 10)]
        payloads = [torch.zeros(4 * fragment.numel, dtype=torch.uint8) for fragment in raw.layout.fragments]
        for version, units in enumerate([pb.Units(first=0, stop=4), pb.Units(first=4, stop=6)]):
            for fragment, payload in enumerate(payloads):
                raw.beat(4 * (version + 1), 40)
                raw.push(
                    payload, fragment=fragment, units=[units], round=version, base=version, step=4 * (version + 1),
                    trained=40,
                )  # fmt: skip
                until(lambda f=fragment, v=version: versions_of(syncer)[f] == v + 1, "it is not published")  # type: ignore[misc]
        raw.leave(40)
        data = status_of(syncer)["data"]
        assert (data["passes"][0]["done"], data["lost"]) == (6, 0)
    newest = read_manifest(open_store(tmp_path / "state")).fragments[0][0].held
    (tmp_path / "state" / "objects" / newest).write_bytes(b"damaged")
    with opened(tmp_path / "state", lock=True) as objects:
        repair(objects)
    with start(tmp_path, method()) as syncer:
        assert versions_of(syncer) == [1, 2]
        data = status_of(syncer)["data"]
        assert (data["passes"][0]["done"], data["passes"][0]["free"], data["lost"]) == (4, 96, 2)
        assert [(it["fates"]["merged"], it["merges"], it["repeated"]) for it in data["fragments"]] == [
            (4, 4, 0), (4, 6, 2),
        ]  # fmt: skip
        raw = Leaser(syncer.address)
        raw.join()
        assert raw.lease() == [(4, 14)]  # 4 and 5 are trained again


def test_leases_and_units_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        raw = Leaser(syncer.address)
        raw.initialise()
        raw.join()
        raw.lease()
        with pytest.raises(ConfigError, match="has data of 101 units"):
            raw.lease(2, data_units=101)
        for fields in ({"number": 7}, {"num_units": 0}, {"num_units": 2**40}):
            with pytest.raises(PayloadError, match="number leases 1, 2, 3"):
                raw.lease(**{"number": 2, **fields})
        for digest in ("d" * 999, "", "[/x]", "\x1b[2J"):
            with pytest.raises(PayloadError, match="letters and digits"):
                raw.lease(2, data_digest=digest)
        for fields in ({"data_units": 2**60}, {"unit_tokens": 2**60}):
            with pytest.raises(PayloadError, match="more than the maximum"):
                raw.lease(2, **fields)
        unsorted = [pb.UnitSet(ranges=[pb.Units(first=5, stop=6), pb.Units(first=1, stop=2)])]
        with pytest.raises(PayloadError, match="sorted and disjoint"):
            raw.lease(2, claim=unsorted)
        raw.beat(2, 5)
        payload = torch.zeros(4 * raw.layout.fragments[0].numel, dtype=torch.uint8)
        for units in ([(5, 12)], [(2**60, 2**61)], [(3, 3)]):
            ranges = [pb.Units(first=first, stop=stop) for first, stop in units]
            with pytest.raises(PayloadError, match="units of (the )?data"):
                raw.push(payload, units=ranges)
            with pytest.raises(PayloadError, match="units of (the )?data"):
                raw.push(payload, overwritten=ranges)
        assert fetch_status(syncer.address, run=RUN)["data"]["learners"] == {"raw": 10}
        raw.push(payload, units=[pb.Units(first=0, stop=3)])
