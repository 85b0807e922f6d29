"""The exchange over torchft's process group: the bits of the others, and runs that lose and regain members. Real
processes."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exchange.scenarios import SCENARIOS
from tests.exchange.worlds import in_process
from tests.processes import start_module

pytest.importorskip("torchft")

SAME_BITS = ["screened", "resumed, eager", "part of the fragments"]

pytestmark = pytest.mark.timeout(900)


class Life:
    """A process whose lines are read as they come, so that it never waits for a reader."""

    def __init__(self, *arguments: str) -> None:
        (theirs_in, mine_in), (mine_out, theirs_out) = os.pipe(), os.pipe()
        self.process = start_module("tests.exchange.torchft_life", *arguments, stdin=theirs_in, out=theirs_out)
        os.close(theirs_in)
        os.close(theirs_out)
        self._stdin, self._stdout = os.fdopen(mine_in, "w"), os.fdopen(mine_out)
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stdout:
            self.lines.put(line)
        self.lines.put(None)

    def line(self) -> str:
        line = self.lines.get(timeout=300)
        assert line is not None, "the process has ended"
        return line

    def said(self, what: str, at_least: int = 0) -> None:
        """Read until it says this, with a number of at least so much."""
        while True:
            values = json.loads(self.line())
            if values.get(what, -1) >= at_least:
                return

    def type(self, text: str) -> None:
        self._stdin.write(text)
        self._stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> dict[str, Any]:
        """Its last line, once it has ended."""
        self._stdin.close()
        self.process.join(timeout=300)
        assert self.process.exitcode is not None, "the process does not end"
        self._reader.join()
        self._stdout.close()
        last = "{}"
        while (line := self.lines.get()) is not None:
            last = line
        found: dict[str, Any] = json.loads(last)
        return found


@pytest.fixture
def lighthouse() -> Iterator[Any]:
    """Makes lighthouses that start a run with so many learners; only where one is killed do they give up a silent one
    soon."""
    processes = []

    def make(min_replicas: int, silence_ms: int = 60_000) -> str:
        process = Life("lighthouse", str(min_replicas), str(silence_ms))
        processes.append(process)
        return process.line().strip()

    yield make
    for process in processes:
        process.end()  # closes its input, which ends it


@pytest.mark.parametrize("name", SAME_BITS)
def test_a_fixed_membership_has_the_bits_of_every_other_exchange(name: str, lighthouse: Any, tmp_path: Path) -> None:
    address = lighthouse(3)
    lives = [Life("scenario", name, str(index), address, str(tmp_path / f"{index}.pt")) for index in range(3)]
    for life in lives:
        life.end()
        assert life.process.exitcode == 0
    for index, theirs in enumerate(in_process([SCENARIOS[name]], None)[name]):
        end = torch.load(tmp_path / f"{index}.pt", weights_only=True)
        mine = end["tensors"]
        assert end["ledger"] == theirs.facts["ledger"]
        assert mine.keys() == theirs.tensors.keys()
        assert [key for key in mine if not torch.equal(mine[key], theirs.tensors[key])] == []


def test_one_is_killed_and_the_other_goes_on(lighthouse: Any) -> None:
    address = lighthouse(1, silence_ms=2000)
    victim = Life("train", "b", "100000", address)
    victim.said("step", 3)
    survivor = Life("train", "a", "+60", address)
    survivor.said("joined_at")
    survivor.said("merged", 2)
    victim.kill()
    end = survivor.end()
    contributors = end["contributors"]
    assert contributors[0] == ["a", "b"]
    assert contributors[-1] == ["a"]
    assert sorted(map(len, contributors), reverse=True) == list(
        map(len, contributors)
    )  # both, then one: no learner comes back
    first_version = end["versions"][0] - len(contributors)
    assert first_version > 0  # it joined a run that had a model, and has every version since
    for ledger in end["ledger"]:
        assert ledger["merged"] == ledger["trained"]
        assert ledger["discarded"] == {}


def test_a_joiner_is_healed_and_takes_part(lighthouse: Any) -> None:
    address = lighthouse(1)
    first = Life("train", "a", "60", address, "gate")
    first.said("step", 6)
    second = Life("train", "b", "60", address)
    second.said("opening")
    first.type("\n")
    end, joined = first.end(), second.end()
    assert joined["first_step"] >= 6
    assert joined["digest"] == end["digest"]
    assert end["contributors"][0] == ["a"]
    assert end["contributors"][-1] == ["a", "b"]
    assert joined["versions"] == end["versions"] == [20]
