"""What if a run had called its rounds otherwise: the driver a second time, beside its replay, with another quorum,
weight or deadlines.

It hears what the run's driver heard, at the same times. That is what the answer assumes: learners' messages are as they
were, although other versions at other times would have changed when they send and what they wait for. A message that
the other driver refuses is counted, and not sent again. Merges and writes take no time, and as there are no tensors, no
screen leaves a contribution out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from diloco.core.actions import MergeRound
from diloco.core.members import Deadlines
from diloco.core.update import Update
from diloco.errors import DilocoError, PayloadError
from diloco.run.counts import Counts
from diloco.run.driver import Driver
from diloco.run.memory import MemorySlot, MemorySpool
from diloco.run.plain import PlainReader
from diloco.run.ports import InitialModel, Json, MergedRound, Ports, RunMethod, T, Work
from diloco.run.replay_ports import DeafConnection, Formats, KnownFragment

ASSUMED = (
    "Assumed: learners' messages are as they were, at the same times, whatever they would have heard instead. Messages "
    "that would have been refused are counted and not repeated; merges and writes take no time, and no screen leaves a "
    "contribution out."
)


class OtherRounds:
    """Another driver of the run.

    Arguments:
        formats: of the run.
        method, deadlines: what is changed of them.

    Attributes:
        counts: what it has done.
        driver: None: it has not begun.
    """

    def __init__(self, formats: Formats, *, method: Mapping[str, Any], deadlines: Mapping[str, float]) -> None:
        self.observer = Counts()  # type: ignore[abstract] # what it leaves out does nothing
        self.driver: Driver[KnownFragment, MemorySlot, None] | None = None
        self._formats, self._changes, self._deadlines = formats, method, deadlines
        self._reader = PlainReader(
            layout=formats.layout, method=self._method, held=self._first, numbered=self._numbered
        )
        self._now_s, self._wake_at_s = 0.0, math.inf
        self._queue: list[Callable[[], None]] = []
        self._objects: dict[tuple[str, int], Any] = {}
        self._fragments: list[KnownFragment] = []
        self._record: Json | None = None

    def take(self, entry: Mapping[str, Any], push: int | None) -> None:
        """The next event. `push`: the number of the upload that it began."""
        name = entry["e"]
        if name == "__init__":
            self._begin(entry)
        elif self.driver is None or name[0] == "#":
            return
        else:
            self._until(entry["t"])
            self._tell(name, entry["a"], push)
        self._settle()

    def _begin(self, entry: Mapping[str, Any]) -> None:
        self._queue, self._objects, self._now_s, self._wake_at_s = [], {}, entry["t"], math.inf
        given = {key: self._reader.read(value) for key, value in entry["a"].items()}
        given["deadlines"] = replace(given.get("deadlines") or Deadlines(), **self._deadlines)
        if (saved := given.get("saved")) is not None:
            saved = replace(saved, method=given["method"])
            if self._fragments:
                saved = replace(saved, fragments=tuple(self._fragments), record=self._record)
            self._fragments, self._record, given["saved"] = list(saved.fragments), saved.record, saved
        self._jobs = self._formats.jobs(given["method"])
        self.driver = Driver(**given, ports=Ports(self, MemorySpool(), self, self, self, self.observer))

    def _tell(self, name: str, given: Mapping[str, Any], push: int | None) -> None:
        method = getattr(Driver, name)
        arguments = {key: self._reader.read(value) for key, value in given.items()}
        if name in ("complete_push", "cut_push") and arguments["push"] is None:
            return  # it was refused
        if "done" in signature(method).parameters:  # the event is answered by a call of it
            arguments["done"] = self._answered
        try:
            answer = method(self.driver, **arguments)
        except DilocoError as error:
            self._answered(error)
        else:
            if push is not None:
                self._objects["push", push] = answer

    def _answered(self, *answer: object) -> None:
        for each in answer:
            if isinstance(each, DilocoError):
                self.observer.counts[f"messages refused: {type(each).__name__}"] += 1

    def _until(self, at_s: float) -> None:
        """The other driver is woken when it asked for that."""
        while self.driver is not None and self._wake_at_s < at_s:
            self._now_s, self._wake_at_s = max(self._now_s, self._wake_at_s), math.inf
            self.driver.tick()
            self._settle()
        self._now_s = max(self._now_s, at_s)

    def _settle(self) -> None:
        while self._queue:
            self._queue.pop(0)()

    def _method(self, values: Any) -> Any:
        return self._formats.method({**values, **self._changes})

    def _first(self, index: int, version: int, digest: str) -> KnownFragment:
        return KnownFragment(version, digest)

    def _numbered(self, kind: str, number: int) -> Any:
        if kind == "connection":
            return self._objects.setdefault((kind, number), DeafConnection())
        return self._objects.pop((kind, number), None)

    # --- ports --------------------------------------------------------------------------------------------------------

    def now_s(self) -> float:
        """As `ports.ClockPort`."""
        return self._now_s

    def wake_at(self, at_s: float) -> None:
        """As `ports.ClockPort`."""
        self._wake_at_s = at_s

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """As `ports.WorkerPort`: at once."""
        self._queue.append(lambda: done(job()))

    def contribution_bytes(self, num_elements: int) -> int:
        """As `ports.JobsPort`."""
        return self._jobs.contribution_bytes(num_elements)

    def check(self, slot: MemorySlot, num_elements: int) -> PayloadError | None:
        """As `ports.JobsPort`: what was sent can be used."""
        return None

    def close(
        self, action: MergeRound, layout: Any, held: KnownFragment, slots: Sequence[MemorySlot]
    ) -> MergedRound[KnownFragment, None] | PayloadError:
        """As `ports.JobsPort`: a version without tensors."""
        learners = tuple(dict.fromkeys(c.learner for c in action.contributions))
        new = KnownFragment(held.version + 1, "")
        update = Update(
            action.fragment, held.version, new.version, learners, action.weights, action.scale, "", lossless=True
        )  # fmt: skip
        return MergedRound(action, update, new, None, 4 * layout.fragments[action.fragment].numel)

    def initialise(self, run: str, method: RunMethod, model: InitialModel[KnownFragment]) -> None:
        """As `ports.StorePort`."""
        self._fragments, self._record = list(model.fragments), None

    def publish(self, merged: MergedRound[KnownFragment, None], record: Json) -> None:
        """As `ports.StorePort`."""
        self._fragments[merged.update.fragment], self._record = merged.held, record

    def save_record(self, record: Json) -> None:
        """As `ports.StorePort`."""
        self._record = record
