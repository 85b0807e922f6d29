"""What `diloco status` says of every learner: whether it is live, takes part, and how far it is behind."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from tests.syncer.runs import RUN, Raw, fall_silent, is_initialised, layout, method, start, status_of
from typer.testing import CliRunner

import diloco
from diloco import events
from diloco.cli._status_view import view
from diloco.cli.status import command
from diloco.core.fragments import layout_of
from diloco.core.layout import TensorSpec
from diloco.errors import ConfigError
from diloco.event_log import read_events
from diloco.events import RECENT_MERGES
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.following.stored_status import stored_status
from diloco.protocol.contribution import UNMERGED
from diloco.protocol.steering import Pool
from diloco.report.frame import live_page
from diloco.report.members import LearnerSummary
from diloco.run.status import _Seen
from diloco.store.directory import Directory
from diloco.store.format import TensorFormat
from diloco.store.objects import read_manifest
from diloco.store.reading import ObjectReader
from diloco.syncer.server import Syncer

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    with start(tmp_path, method()) as it:
        yield it


def joined(syncer: Syncer, name: str) -> Raw:
    raw = Raw(syncer.address, name)
    if not is_initialised(syncer):
        raw.initialise()
    raw.join()
    return raw


def beat(raw: Raw, step: int, versions: tuple[int, ...] = (0, 0)) -> None:
    request = pb.HeartbeatRequest(
        run=RUN, learner=raw.name, incarnation=raw.incarnation, step=step, steps=step, tokens=5 * step,
        step_s=0.1, versions=versions
    )  # fmt: skip
    raw.connection.call("control", "Heartbeat", request, pb.HeartbeatReply)


def test_the_command_imports_neither_torch_nor_numpy(syncer: Syncer) -> None:
    """Which would cost seconds of processor time each time."""
    joined(syncer, "a")
    script = (
        "import atexit, sys; from diloco.cli import main; "
        "atexit.register(lambda: print(*sorted({'torch', 'numpy', 'safetensors', 'transformers'} & {*sys.modules}))); "
        f"main(['status', '--address', '{syncer.address}', '--run', '{RUN}'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "1 live" in lines[2]
    assert lines[-1] == ""


def shown(syncer: Syncer, *options: str, columns: int = 100) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["--address", syncer.address, "--run", RUN, *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_before_there_is_a_model(syncer: Syncer) -> None:
    assert "no model yet" in shown(syncer)
    assert json.loads(shown(syncer, "--json"))["cut"] == ""
    assert json.loads(shown(syncer, "--json"))["newest_merge"] is None


def test_who_takes_part_and_who_is_behind(syncer: Syncer) -> None:
    first, second = joined(syncer, "first"), joined(syncer, "second")
    beat(first, 1)
    assert first.push(ONES)  # second has not trained yet, so no round waits for it
    syncer.driver.drain()
    beat(first, 2, versions=(1, 0))
    beat(second, 2, versions=(0, 0))
    status: dict[str, Any] = json.loads(shown(syncer, "--json"))
    learners = status["learners"]
    assert {name: (it["live"], it["healthy"], it["merged"]) for name, it in learners.items()} == {
        "first": (True, True, 1),
        "second": (True, True, 0),
    }
    assert [learners[name]["versions_behind"] for name in ("first", "second")] == [0, 1]
    assert [learners[name]["staleness"] for name in ("first", "second")] == [0, None]
    assert status["newest_merge"] == {
        "fragment": 0,
        "version": 1,
        "contributors": ["first"],
        "weights": [1.0],
        "scale": 1.0,
    }
    for fragment in status["fragments"]:
        ledger = fragment["ledger"]
        settled = ledger["pending"] + ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
        assert settled == ledger["trained"] == status["tokens"] == 20
    assert [learners[name]["share"] for name in ("first", "second")] == [1.0, None]
    text = shown(syncer, "--fragments")
    assert (status["run_id"], status["epoch"]) == (syncer.driver.ask(lambda driver: driver.lineage.run_id), 1)
    assert "epoch 1, this syncer started" in text
    assert status["cut"] == "2 fragments: Named(patterns=(('layers.0.*',), ('layers.1.*',)))"
    assert f"\ncut into {status['cut']}\n" in text
    assert "2 live, 2 healthy; newest merge: version 1 of fragment 0 by first\n" in text
    assert re.search(
        r" 1 +no contribution yet", text
    )  # contributors of the newest merge, and what the fragment does now
    assert re.search(r"first +healthy +2 +100% +\d+\.\d s", shown(syncer))
    for raw in (first, second):
        raw.connection.close()


def test_who_trains_which_experts(tmp_path: Path) -> None:
    specs = [TensorSpec("embed", (3,), "float32"), TensorSpec("m.experts.w", (4, 3), "float32"),
             TensorSpec("m.gate.w", (4, 2), "float32")]  # fmt: skip
    cut = diloco.Experts(groups=2, trunk=diloco.Whole())
    mixture = replace(method(), fragments=cut, sync_every=1)
    held, whole = layout_of(specs, (), cut), diloco.FP32().encode(torch.ones(10))
    nothing = whole[:0]
    with start(tmp_path, mixture) as syncer:
        first, second = (Raw(syncer.address, name, held=held) for name in ("first", "second"))
        first.initialise()
        first.join()
        second.join()
        beat(first, 1, versions=(0, 0, 0))
        first.push(whole, fragment=0, step=1)  # second has not trained yet, so no round waits for it
        first.push(nothing, fragment=1, step=1, part=True)
        syncer.driver.drain()
        status = json.loads(shown(syncer, "--json"))
        assert status["experts"]["untrained"] == []  # second may train the rest
        assert [it["experts"] for it in status["learners"].values()] == [[[0, 2]], None]
        beat(second, 1, versions=(0, 0, 0))
        beat(first, 2, versions=(1, 1, 0))
        for fragment in (0, 1):
            own = {"fragment": fragment, "round": 1, "base": 1, "step": 2, "trained": 10}
            first.push(nothing if fragment else whole, part=fragment == 1, **own)
            second.push(whole, part=True, tensors=[0, 2], routed=[3, 0, 3, 0], **own)  # one expert of each group
        syncer.driver.drain()
        status = json.loads(shown(syncer, "--json"))
        assert status["experts"] == {"number": 4, "untrained": [[3, 4]]}
        assert [it["experts"] for it in status["learners"].values()] == [[[0, 2]], [[0, 1], [2, 3]]]
        text = shown(syncer)
        assert "no live learner trains experts 3: nothing is merged into them\n" in text
        assert re.search(r"second +healthy +2 +\S+ +\S+ s +0, 2 *\n", text), text
        first.leave(tokens=10)
        assert status_of(syncer)["experts"]["untrained"] == [[1, 2], [3, 4]]
        [*_, merged] = [each for each in read_events(tmp_path / "state" / "events.jsonl") if each.kind == "merged"]
        assert merged.experts in ((((0, 2),), ((0, 1),)), ((), ((2, 3),)))
        for raw in (first, second):
            raw.connection.close()


def test_who_holds_which_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A learner that holds a part trains what it holds, from its join on; who is gone is said where, and in the log."""
    caplog.set_level("INFO", logger="diloco")
    specs = [TensorSpec("embed", (3,), "float32"), TensorSpec("m.experts.w", (4, 3), "float32")]
    cut = diloco.Experts(groups=2, trunk=diloco.Whole())
    mixture, every = replace(method(), fragments=cut, sync_every=1), layout_of(specs, (), cut)
    with start(tmp_path, mixture) as syncer:
        first, second = (Raw(syncer.address, name, held=every) for name in ("first", "second"))
        first.initialise()
        first.join(held=[0, 2])
        second.join(held=[1, 2])
        for raw in (first, second):
            beat(raw, 1, versions=(0, 0, 0))  # on the wire, also of those that it does not hold
        status = json.loads(shown(syncer, "--json"))
        assert status["experts"] == {"number": 4, "untrained": []}
        assert [(it["experts"], it["holds_part"]) for it in status["learners"].values()] == [
            ([[0, 2]], True), ([[2, 4]], True),
        ]  # fmt: skip
        assert [it["versions"] for it in status["learners"].values()] == [[0, -1, 0], [-1, 0, 0]]
        text = shown(syncer)
        assert re.search(r"first +healthy .* 0-1\* *\n", text), text
        assert "*: it holds no other experts." in " ".join(text.split())
        first.push(diloco.FP32().encode(torch.ones(6)), fragment=0, step=1)
        syncer.driver.drain()
        first.push(diloco.FP32().encode(torch.ones(6)), fragment=0, round=1, base=1, step=2, trained=10)
        syncer.driver.drain()
        second.leave(tokens=5)
        status = json.loads(shown(syncer, "--json"))
        assert status["experts"]["untrained"] == [[2, 4]]
        assert [each["version"] for each in status["fragments"]] == [2, 0, 0]
        assert [each["ledger"]["trained"] for each in status["fragments"]] == [10, 5, 15]
        assert status["learners"]["first"]["share"] == 1.0
        text = shown(syncer, "--fragments")
        assert "no live learner trains experts 2-3: nothing is merged into them\n" in text
        assert re.search(r"\n +1 .* no live learner holds it *\n", text), text
        for raw in (first, second):
            raw.connection.close()
    assert "joined: second (incarnation 1) at step 0, with experts 2-3" in caplog.text
    assert "100% of live learners took part" in caplog.text  # of those that hold the fragment
    joins = [each for each in read_events(tmp_path / "state" / "events.jsonl") if isinstance(each, events.Joined)]
    assert [each.holds for each in joins] == [((0, 2),), ((2, 4),)]
    stored = stored_status(tmp_path / "state")
    assert stored["experts"] == {"number": 4, "untrained": [[2, 4]]}
    assert (stored["learners"]["first"]["experts"], stored["learners"]["first"]["holds_part"]) == ([[0, 2]], True)


def test_a_run_without_a_learner_has_no_empty_table(syncer: Syncer) -> None:
    initialiser = joined(syncer, "first")
    initialiser.leave()
    initialiser.connection.close()
    assert "no learner is in the run" in shown(syncer)


def learners_of(status: dict[str, Any], num: int) -> None:
    """Put so many learners with long names in place of the one that is there."""
    (it,) = status["learners"].values()
    status["learners"] = {f"a-long-name-of-a-site-in-the-north-{index}": it for index in range(num)}


def test_it_fits_eighty_columns(syncer: Syncer) -> None:
    raw = joined(syncer, "first")
    beat(raw, 123_456)
    status = json.loads(shown(syncer, "--json"))
    learners_of(status, 3)
    mixture = {"number": 64, "untrained": [[each, each + 1] for each in range(1, 30, 2)]}
    for it in status["learners"].values():
        it["experts"] = [[each, each + 1] for each in range(0, 64, 2)]
    for columns, wide, experts in ((80, False, None), (132, True, None), (80, False, mixture), (132, True, mixture)):
        status["experts"] = experts
        console = Console(width=columns, file=io.StringIO(), markup=False, highlight=False)
        console.print(view(status, wide=wide))
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, said.splitlines())) <= columns
        lines = [line for line in said.splitlines() if "healthy  " in line]
        assert [line.split()[0] for line in lines] == [f"a-long-name-of…n-the-north-{index}" for index in range(3)]
        assert all("123,456" in line for line in lines)
    raw.connection.close()


def test_in_a_pipe_each_learner_is_one_whole_line(syncer: Syncer) -> None:
    name = "site-" + 40 * "n"
    raw = joined(syncer, name)
    beat(raw, 20)
    said = shown(syncer, "--fragments", columns=40)
    assert re.search(rf"^ {name} +healthy +20 .* B *$", said, re.MULTILINE)
    raw.connection.close()


def test_shares_are_of_what_was_trained_and_never_round_to_all_or_nothing(syncer: Syncer) -> None:
    raw = joined(syncer, "first")
    beat(raw, 400)
    status = json.loads(shown(syncer, "--json"))
    for fragment in status["fragments"]:
        fragment["ledger"] = {
            "trained": 2000, "merged": 1971, "pending": 0, "lost": 1, "discarded": {"late": 8, UNMERGED: 20}
        }  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    console.print(view(status, wide=True))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    words = " ".join(said.split())
    assert "trained tokens: 99% merged, <1% discarded (late), 1% not merged at the end, <1% lost" in words
    assert (
        "not merged at the end: discarded, since it was in flight or not sent when its learner finished or left."
        in words
    )
    assert re.search(r" 0 +0 +99% +0% +1% +<1% ", said)
    raw.connection.close()


def test_a_share_is_of_as_many_merges_here_and_on_the_page() -> None:
    assert _Seen(1).recent.maxlen == LearnerSummary("a", 0).recent.maxlen == RECENT_MERGES
    docs = Path(__file__, "../../../docs/operate.md").resolve().read_text(encoding="utf-8")
    assert all(f"the last {RECENT_MERGES} merges" in text for text in (live_page(), docs))


def test_after_a_restart_what_is_not_known_is_not_said(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        raw = joined(syncer, "first")
        beat(raw, 7)
        raw.connection.close()
    with start(tmp_path, method()) as syncer:
        learner = json.loads(shown(syncer, "--json"))["learners"]["first"]
        assert (learner["heard"], learner["live"], learner["share"]) == (False, False, None)
        assert re.search(r"first +not back yet +\d+ +\? *$", shown(syncer), re.MULTILINE)


def test_whom_a_round_waits_for_and_who_is_lost(syncer: Syncer) -> None:
    first, second = joined(syncer, "first"), joined(syncer, "second")
    for raw in (first, second):
        beat(raw, 1)
    assert first.push(ONES)
    assert "waiting for second; second is given up in" in " ".join(shown(syncer).split())
    second.connection.close()
    fall_silent(syncer, "second")
    assert "second" not in status_of(syncer)["learners"]
    text = shown(syncer, "--fragments")
    assert "gone" in text
    assert "1 live, 1 healthy" in text
    first.connection.close()


def test_which_learners_the_pool_has_drained(tmp_path: Path) -> None:
    with start(tmp_path, method(), pool=Pool("halving", 2, 8)) as syncer:
        first, second = joined(syncer, "first"), joined(syncer, "second")

        def drained() -> list[bool]:
            return [it["drained"] for it in json.loads(shown(syncer, "--json"))["learners"].values()]

        beat(second, 3)
        assert drained() == [False, False]
        assert "  drained  " not in shown(syncer)
        beat(first, 4)
        assert drained() == [False, True]
        assert re.search(r"second +drained +3", shown(syncer))
        for raw in (first, second):
            raw.connection.close()


def test_a_reason_to_discard_that_is_not_known_is_shown_as_it_is(tmp_path: Path) -> None:
    """A state directory whose books hold one, as a learner could once write it."""
    with start(tmp_path, method()) as syncer:
        raw = joined(syncer, "first")
        raw.leave(tokens=5)
        raw.connection.close()
        syncer.driver.drain()
    with Directory(tmp_path / "state") as store:
        manifest = read_manifest(store)
        assert manifest.record is not None
        with ObjectReader(store) as reader:
            record, epochs = reader.record(manifest.record, len(manifest.fragments))
        assert record is not None
        for ledger in record["accounts"]["first"]["ledgers"]:
            ledger[2:] = [0, {"bored": 5}]  # lost, and discarded by reason
        blob = TensorFormat().record(record, epochs)
        store.put(name := f"{manifest.epoch}/99-{blob.hash}", blob.parts)
        found = store.manifest()
        assert found is not None
        store.swap(replace(manifest, record=name, serial=manifest.serial + 1).to_bytes(), found.token)
    with start(tmp_path, method()) as syncer:
        assert "100% discarded (bored)" in shown(syncer)


def test_a_run_that_needs_more_says_how_many(tmp_path: Path) -> None:
    with start(tmp_path, method(at_least=3)) as syncer:
        raw = joined(syncer, "first")
        beat(raw, 1)
        assert raw.push(ONES)
        assert "1 of at least 3 learners have contributed" in " ".join(shown(syncer).split())
        raw.connection.close()


def test_an_address_in_place_of_a_run_file_is_said_to_be_one() -> None:
    with pytest.raises(ConfigError, match="no run file localhost:1; .* with --address"):
        command(run_file=Path("localhost:1"), run=RUN)
