"""`Replay`: executes a run's driver again, from its journal.

The real driver receives the events of the journal at their times, and its jobs end in the recorded order. A recorder
wraps it as in the run, so a replay is correct exactly if it writes the same entries. Without the payload of a
contribution, the results of its check and merge are taken from the journal, and only decisions are compared; with
payloads, checks and merges are computed again, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from diloco.errors import DilocoError, StoreError
from diloco.escaping import MALFORMED
from diloco.run.driver import Driver
from diloco.run.journal.recorder import Recorder, entry_of, is_entry
from diloco.run.journal.replay_ports import (
    DeafConnection,
    Formats,
    KnownFragment,
    Past,
    PastJobs,
    PastStore,
)
from diloco.run.journal.serialization import PlainReader
from diloco.run.memory import MemorySlot
from diloco.run.ports import NullObserver, Ports, is_event

_FAILS = (DilocoError, AssertionError, *MALFORMED)
"""Errors that an event may raise in a driver whose state has diverged from the run."""


@dataclass
class Findings:
    """The result of a replay.

    Attributes:
        num_entries: replayed events and ends of jobs.
        num_equal: replayed entries that are equal to the journal's.
        num_boots: starts of a driver.
        num_merges: closed rounds.
        num_merges_equal: rounds that were merged again with equal digests.
        num_skipped: entries between a gap and the next start, which cannot be replayed.
        gaps: descriptions of missing entries and of rollbacks of the state.
        difference: description of the first difference; None: there is none.
    """

    num_entries: int = 0
    num_equal: int = 0
    num_boots: int = 0
    num_merges: int = 0
    num_merges_equal: int = 0
    num_skipped: int = 0
    gaps: list[str] = field(default_factory=list)
    difference: str | None = None


class Replay:
    """The replay of one run, event by event.

    Arguments:
        formats: of its tensors.
        fragment: the only one to merge again; None: all.

    Attributes:
        findings: so far.
        driver: in its current state; None: before the first start, or after a gap.
    """

    driver: Driver[KnownFragment, MemorySlot, None] | None

    def __init__(self, formats: Formats, *, fragment: int | None = None) -> None:
        self.findings = Findings()
        self._formats, self._fragment = formats, fragment
        self._reader = PlainReader(
            layout=formats.layout, method=formats.method, held=self._held, numbered=self._numbered
        )
        self._store = PastStore()
        self._forget({})
        self._began_s: float | None = None

    def _forget(self, entry: Mapping[str, Any]) -> None:
        """Forget the driver so far; the entry is the next one."""
        self.driver = None
        self._is_whole = False  # the entries so far explain the durable state
        self._objects: dict[tuple[str, int], Any] = {}
        self._past = Past(self._reader, self._formats, entry)
        self._store.restart(self._past, None)

    def take(self, line: str) -> None:
        """Replay an entry of the journal.

        Raises:
            StoreError: the entry is unknown to this version of diloco.
        """
        entry = entry_of(line)
        if entry["e"] == "#journal":  # the header of a part
            return
        if entry["e"] in ("#gap", "#damage"):
            self._break_off(entry)
            return
        if self.driver is None and entry["e"] != "__init__":
            self.findings.num_skipped += 1
            return
        if self._began_s is None:
            self._began_s = entry["t"]
        self.findings.num_entries += 1
        self._past.begin_entry(entry)
        failure = ""
        try:
            self._happen(entry)
        except _FAILS as error:
            failure = f"{type(error).__name__}: {error}"
        if self._past.written == [line] or list(map(_compared, self._past.written)) == [_compared(line)]:
            self.findings.num_equal += 1
        else:
            self._differs(entry, failure)
            if self.driver is not None:
                self._recorder.digest = entry["o"]  # compare the next entry independently

    def _happen(self, entry: Mapping[str, Any]) -> None:
        name, read = entry["e"], self._reader.read
        if name == "__init__":
            self._begin(entry)
        elif name.startswith("#"):
            what, job, done = self._past.jobs.pop(entry["n"])
            if name != f"#{what}":
                raise LookupError(f"job {entry['n']} is a {what}")
            found = job()
            if what == "close":
                self.findings.num_merges += 1
                self.findings.num_merges_equal += self._jobs.is_equal
            done(found)
        elif is_event(method := getattr(Driver, name, None)):
            assert method is not None
            arguments = {key: read(value) for key, value in entry["a"].items()}
            if "done" in signature(method).parameters:  # the driver answers the event by calling it
                arguments["done"] = _ignore
            answer = method(self.driver, **arguments)
            if name == "begin_push":
                self._objects["push", self._recorder.number_of(answer)] = answer
        else:
            raise StoreError(f"the journal has an event {name!r}; read it with the version that wrote it.")

    # --- starts of a driver -------------------------------------------------------------------------------------------

    def _begin(self, entry: Mapping[str, Any]) -> None:
        """Start a driver from the durable state."""
        self.findings.num_boots += 1
        given = entry["a"]
        saved = given.get("saved")
        if self._is_whole:
            self._finish_write(saved)
        elif saved is not None and not self.findings.gaps and self.findings.difference is None:
            self.findings.gaps.append(f"{self._start_with(saved['fragments'])}: the journal has nothing before it")
        self._forget(entry)
        self._method = self._reader.read(given["method"])
        arguments = {key: self._reader.read(value) for key, value in given.items()}
        past = self._past
        self._store.restart(past, arguments.get("saved"))
        self._jobs = PastJobs(past, self._formats, self._method, fragment=self._fragment)
        self._recorder: Recorder[MemorySlot] = Recorder(past, past)
        observer = NullObserver()  # type: ignore[abstract] # omitted methods do nothing
        ports = Ports(past, past, self._jobs, self._store, past, observer)
        self._is_whole = True
        self.driver = Driver(**arguments, ports=self._recorder.around(ports))

    def finish(self, stored: Sequence[tuple[int, str]], epoch: int) -> None:
        """Compare the end of the journal with the newest durable version of each fragment.

        Arguments:
            stored: (version, digest) of each, read before the journal: entries are durable before the versions that
                they explain.
            epoch: of the newest claim on the store.
        """
        if self.driver is None or self.findings.difference is not None:
            return
        self._write_pending()
        ends = [(each.version, each.digest) for each in self._store.fragments]
        if len(ends) < len(stored) or any(
            new[0] > end[0] or (new[0] == end[0] and new != end) for end, new in zip(ends, stored, strict=False)
        ):
            said = (
                f"the journal ends with {_versions([version for version, _ in ends])}, and the store has "
                f"{_versions([version for version, _ in stored])}"
            )
            if epoch > self.driver.lineage.epoch:
                self.findings.gaps.append(f"{said}: another syncer has claimed the run since, in epoch {epoch}")
            else:
                self._note(f"{said}: its end is missing, or the syncer kept no journal later")

    def _write_pending(self) -> None:
        """Finish the commit in progress, of which the journal may lack the end."""
        self._past.entry = {"r": None}
        for what, job, _ in self._past.jobs.values():
            if what in ("initialise", "commit"):
                job()

    def _finish_write(self, saved: Mapping[str, Any] | None) -> None:
        """Check that the earlier entries explain the durable state, with or without the commit in progress."""
        if self._leads_to(saved):
            return
        self._write_pending()
        if self._leads_to(saved):
            return
        held = [] if saved is None else saved["fragments"]
        ends = _versions([each.version for each in self._store.fragments])
        said = self._start_with(held)
        if held and all(self._store.find(index, *each) for index, each in enumerate(held)):
            self.findings.gaps.append(f"{said}: the state was rolled back from {ends}")
        elif foreign := self._foreign(saved):
            self.findings.gaps.append(f"{said}: another syncer has served the run, in epoch {max(foreign)}")
        else:
            self._note(f"{said}, but the journal before it ends with {ends}: a part of the journal is missing")

    def _foreign(self, saved: Mapping[str, Any] | None) -> set[int]:
        """The epochs of a driver's earlier starts that are not in this journal."""
        assert self.driver is not None
        known = {each.number for each in self.driver.state.epochs}
        return set() if saved is None else {each["number"] for each in saved["epochs"][:-1]} - known

    def _start_with(self, held: Sequence[Any]) -> str:
        return f"start {self.findings.num_boots} of the syncer has {_versions([version for version, _ in held])}"

    def _leads_to(self, saved: Mapping[str, Any] | None) -> bool:
        fragments, record = self._store.fragments, self._store.record
        if saved is None:
            return not fragments
        if (record is None) != (saved["record"] is None):
            return False
        is_record: bool = record is None or json.loads(json.dumps(record)) == saved["record"]
        is_model: bool = saved["fragments"] == [[each.version, each.digest] for each in fragments]
        return is_record and is_model

    def _held(self, index: int, version: int, digest: str) -> KnownFragment:
        found = self._store.find(index, version, digest)
        if found is not None and found.tensors is not None:
            return found
        return KnownFragment(version, digest, self._formats.fragment(self._method, index, version, digest))

    def _numbered(self, kind: str, number: int) -> Any:
        if kind == "connection":
            return self._objects.setdefault((kind, number), DeafConnection())
        return self._objects.pop((kind, number))

    # --- findings -----------------------------------------------------------------------------------------------------

    def _break_off(self, entry: Mapping[str, Any]) -> None:
        """Stop replaying this driver; the next start is replayed again."""
        self._forget(entry)
        if entry["e"] == "#gap":
            why = entry.get("why", f"{entry['missing']} entries are missing")
            self.findings.gaps.append(f"{why}, {self._place(entry)}")
        else:
            self._note(f"{entry['why']}, {self._place(entry)}")

    def _differs(self, entry: Mapping[str, Any], failure: str) -> None:
        now = [json.loads(written) for written in self._past.written]
        if not now or not is_entry(now[0]) or "missing" in now[0]:
            self._note(f"{self._place(entry)}, {_said(entry)}: the replay fails ({failure})")
            return
        other = {**now[0]}
        if "r" in entry and other.get("r") != entry["r"]:
            sides = f"{_result(entry['r'])} in the journal, and {_result(other['r'])} in the replay"
        elif other.get("x") != entry.get("x"):
            sides = f"it read {entry.get('x')} in the journal, and {other.get('x')} in the replay"
        elif other["d"] != entry["d"]:
            sides = f"the syncer {_decisions(entry)} in the journal, and {_decisions(other)} in the replay"
        elif other["o"] != entry["o"]:
            sides = (
                f"the syncer {_decisions(entry)} in both, but the digest is {entry['o']} in the journal and "
                f"{other['o']} in the replay: its messages to learners, its jobs or its wake-up time differ, or the "
                "journal was altered here or just before"
            )
        else:
            sides = f"the entry is {json.dumps(entry)} in the journal, and {json.dumps(other)} in the replay"
        self._note(f"{self._place(entry)}, {_said(entry)}: {sides}")

    def _note(self, difference: str) -> None:
        self.findings.difference = self.findings.difference or difference

    def _place(self, entry: Mapping[str, Any]) -> str:
        place = f"at entry {self.findings.num_entries + self.findings.num_skipped}"
        return place if self._began_s is None or "t" not in entry else f"{place} (t = {entry['t']:.3f} s)"


def _ignore(*_: object) -> None:
    """Discard the answer, which the recorder has noted."""


def _versions(versions: Sequence[int]) -> str:
    return f"versions {tuple(versions)}" if versions else "no model"


def _said(entry: Mapping[str, Any]) -> str:
    """Describe the event of an entry."""
    if entry["e"].startswith("#"):
        of = "" if entry.get("f") is None else f" of fragment {entry['f']}"
        return f"end of a {entry['e'][1:]}{of}"
    given = entry.get("a", {})
    contribution = given.get("contribution")
    learner = given.get("learner") or (contribution.get("learner") if isinstance(contribution, dict) else None)
    return f"{entry['e']}{'' if learner is None else f' of {learner}'}"


def _result(found: Any) -> str:
    match found:
        case {
            "update": {
                "version": version, "fragment": fragment, "digest": str(digest), "weights": weights, "scale": scale
            },
            "refused": list(refused),
        }:  # fmt: skip
            without = f", without {', '.join(map(str, refused))}" if refused else ""
            return (
                f"version {version} of fragment {fragment} has digest {digest[:16]} (weights {weights}, scale {scale}"
                f"{without})"
            )
        case {"$": "error", "is": kind, "says": text}:
            return f"it fails ({kind}: {text})"
    return "it succeeds" if found is None else json.dumps(found)


def _decisions(entry: Mapping[str, Any]) -> str:
    reasons = f" ({'; '.join(entry['w'])})" if "w" in entry else ""
    return ("; ".join(entry["d"]) or "decides nothing") + reasons


def _compared(line: str) -> dict[str, Any]:
    """The compared values of an entry: all but its reasons in words."""
    return {**json.loads(line), "w": None}
