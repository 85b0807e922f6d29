"""A part that is told to stop while it waits for others ends with a checkpoint, and the next one goes on from it."""

from __future__ import annotations

import datetime as dt
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.chaos.relay import Relay
from tests.training.test_torchrun import torchrun

from diloco.cli.train import _connector
from diloco.config import RunConfig, dump_config
from diloco.core.presets import method_from_table
from diloco.event_log import read_events
from diloco.events import Merged
from diloco.exchange.dialling import fetch_status
from diloco.exchange.remote import remote
from diloco.protocol.members import Deadlines
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Options, Syncer
from diloco.training.checkpoint import list_checkpoints, load_checkpoint
from diloco.training.loop import Trainer
from diloco.training.progress import ProgressDisplay
from diloco.training.spec import LearnerSpec, StopRequest, Summary

Tiny = Callable[..., RunConfig]
SCHEDULED = "method={preset='DiLoCo', sync_every=6}"
STREAMING = "method={preset='StreamingDiLoCo', sync_every=6, overlap=2, mix=0.0, fragments={type='Whole'}}"
LONG = ("run.tokens=512_000", "run.steps=18")
PATIENT = Deadlines(lost_floor_s=120.0, reconnect_floor_s=120.0, stalled_floor_s=600.0)
WAIT_S = 300.0
"""Without an end to its waiting a part waits for good."""


def serve(config: RunConfig, directory: Path, **more: Any) -> Syncer:
    options = Options("127.0.0.1:0", directory, deadlines=PATIENT, **more)
    return Syncer(config.run.name, method_from_table(config.method), options)


def trainer_of(config: RunConfig, part: LearnerSpec, progress: ProgressDisplay | None = None) -> Trainer:
    stopping = StopRequest()
    attach = _connector(config, part, stopping)
    return Trainer(config, part, attach=attach, progress=progress, stop_request=stopping)


@contextmanager
def running(trainer: Trainer) -> Iterator[Future[Summary]]:
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(trainer.train)
        try:
            yield result
        finally:
            trainer.stop()


class Pause(ProgressDisplay):
    """Holds a trainer up once it has taken this many steps, until it may go on."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.trainer: Trainer | None = None
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def is_due(self) -> bool:
        if self.trainer is not None and self.trainer.learner.steps == self._step:
            self.is_there.set()
            self.may_go_on.wait(WAIT_S)
        return False


@contextmanager
def held_up(config: RunConfig) -> Iterator[tuple[Pause, Future[Summary]]]:
    """The run's first learner, after three steps: rounds wait for it."""
    pause = Pause(3)
    pause.trainer = trainer_of(config, LearnerSpec("first", initialise=True), pause)
    with running(pause.trainer) as result:
        try:
            until(lambda: pause.is_there.is_set() or result.done(), "it does not train")
            yield pause, result
        finally:
            pause.may_go_on.set()


def status(syncer: Syncer) -> dict[str, Any]:
    return fetch_status(syncer.address, run="tiny")


def newest(config: RunConfig, name: str) -> Path:
    return list_checkpoints(config.dir / name / "checkpoints")[-1]


def ledgers_add_up(syncer: Syncer) -> None:
    syncer.driver.drain()
    found = status(syncer)
    for fragment in found["fragments"]:
        ledger = fragment["ledger"]
        assert ledger["trained"] == found["tokens"] > 0
        settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
        assert ledger["trained"] == ledger["pending"] + settled


@pytest.mark.parametrize(("method", "step"), [(SCHEDULED, 6), (STREAMING, 8)])
def test_a_learner_that_waits_for_another_one_stops_with_a_checkpoint(
    method: str, step: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its contribution is with the syncer, and is merged after it has left."""
    monkeypatch.setattr(remote, "STOPPED_TIMEOUT_S", WAIT_S)  # for an answer that comes, however slow the machine is
    with serve(tiny(method), tmp_path / "state") as syncer:
        config = tiny(method, f"syncer.address={syncer.address}", *LONG)
        with held_up(config) as (pause, first):
            trainer = trainer_of(config, LearnerSpec("second", shard=1))
            with running(trainer) as result:
                until(lambda: status(syncer)["learners"].get("second", {}).get("waiting", False), "it does not wait")
                trainer.stop()
                summary = result.result(WAIT_S)
            assert (summary.reason, summary.steps, summary.held_out_loss) == ("stopped", step, None)
            assert status(syncer)["learners"].keys() == {"first"}
            saved = load_checkpoint(newest(config, "second"))
            assert (saved["step"], saved["joined"]) == (step, True)
            again = trainer_of(config, LearnerSpec("second", shard=1, resume_from=newest(config, "second")))
            with running(again) as resumed:
                until(lambda: "second" in status(syncer)["learners"] or resumed.done(), "it does not join")
                pause.may_go_on.set()
                assert resumed.result(WAIT_S).steps == 18
                assert first.result(WAIT_S).steps == 18
        ledgers_add_up(syncer)
        merges = [each for each in read_events(tmp_path / "state" / "events.jsonl") if isinstance(each, Merged)]
        assert merges[0].contributors == ("first", "second")


@pytest.mark.parametrize("how", ["stalled", "gone"])
def test_a_learner_whose_push_gets_nowhere_stops_with_a_checkpoint(how: str, tiny: Tiny, tmp_path: Path) -> None:
    """The network takes nothing any more from its third step on, or the syncer is gone; later it comes back."""
    syncer = serve(tiny(SCHEDULED), tmp_path / "state")
    with ExitStack() as undo:
        undo.callback(syncer.close)
        relay = undo.enter_context(Relay(syncer.port))
        config = tiny(SCHEDULED, f"syncer.address={relay.address}", *LONG)
        with held_up(config) as (pause, result):
            if how == "stalled":
                relay.refuse()
                relay.stall()
            else:
                syncer.close()
            pause.may_go_on.set()
            assert pause.trainer is not None
            until(lambda: pause.trainer.learner.steps == 6 or result.done(), "it does not come to its push")  # type: ignore[union-attr]
            pause.trainer.stop()
            summary = result.result(WAIT_S)
        assert (summary.reason, summary.steps) == ("stopped", 6)
        assert load_checkpoint(newest(config, "first"))["step"] == 6
        if how == "gone":
            syncer = undo.enter_context(serve(tiny(SCHEDULED), tmp_path / "state"))
        config = tiny(SCHEDULED, f"syncer.address={syncer.address}", *LONG)
        resumed = trainer_of(config, LearnerSpec("first", resume_from=newest(config, "first")))
        assert resumed.train().steps == 18
        ledgers_add_up(syncer)


def test_a_learner_that_joins_no_syncer_stops(tiny: Tiny, tmp_path: Path) -> None:
    """After the warm start, of which there is a checkpoint; one that comes from a checkpoint leaves that as it is."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        config = tiny(SCHEDULED, f"syncer.address=127.0.0.1:{nobody.getsockname()[1]}", *LONG, "warm_start.steps=2")
        trainer = trainer_of(config, LearnerSpec("a", initialise=True))
        with running(trainer) as result:
            until(lambda: trainer.learner.steps == 2 or result.done(), "it does not warm up")
            trainer.stop()
            assert result.result(WAIT_S).reason == "stopped"
        [checkpoint] = list_checkpoints(config.dir / "a" / "checkpoints")
        saved = load_checkpoint(checkpoint)
        assert (saved["step"], saved["joined"]) == (2, False)
        before = (checkpoint / "manifest.json").stat()
        again = trainer_of(config, LearnerSpec("a", initialise=True, resume_from=checkpoint))
        with running(again) as result:
            again.stop()
            assert result.result(WAIT_S).reason == "stopped"
        assert (checkpoint / "manifest.json").stat() == before


@pytest.mark.slow
def test_a_signal_ends_a_blocked_process(tiny: Tiny, tmp_path: Path) -> None:
    with serve(tiny(SCHEDULED), tmp_path / "state") as syncer:
        config = tiny(SCHEDULED, f"syncer.address={syncer.address}", *LONG)
        run_file = tmp_path / "run.toml"
        run_file.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "diloco", "train", str(run_file), "--name", "second", "--shard", "1"]
        with held_up(config), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: status(syncer)["learners"].get("second", {}).get("waiting", False), "it does not wait")
                process.send_signal(signal.SIGTERM)
                output, _ = process.communicate(timeout=WAIT_S)
            finally:
                process.kill()
        assert process.returncode == 0
        assert "stops after step 6, while it waited for others" in output
        assert load_checkpoint(newest(config, "second"))["step"] == 6


@pytest.mark.slow
def test_a_learner_that_is_refused_while_it_waits_ends_with_a_checkpoint_and_one_sentence(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Its certificate is revoked; with another one it goes on from there."""
    keyring = Keyring.new(
        tmp_path / "keys", "tiny", ["127.0.0.1"], [("first", "learner"), ("second", "learner")], dt.timedelta(days=1)
    )

    def keys(name: str) -> str:
        return f"syncer.keys='{tmp_path / 'keys' / name}'"

    with serve(tiny(SCHEDULED), tmp_path / "state", keys=tmp_path / "keys" / "syncer") as syncer:
        address = f"syncer.address={syncer.address}"
        config = tiny(SCHEDULED, address, *LONG, keys("second"))
        run_file = tmp_path / "run.toml"
        run_file.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "diloco", "train", str(run_file), "--name", "second", "--shard", "1"]
        with (
            held_up(tiny(SCHEDULED, address, *LONG, keys("first"))) as (pause, first),
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process,
        ):
            try:
                until(lambda: waits(syncer, "second") or process.poll() is not None, "it does not wait")
                keyring.revoke("second")
                _, said = process.communicate(timeout=WAIT_S)
            finally:
                process.kill()
            assert process.returncode == 1
            assert said.splitlines()[-1].startswith("diloco: the certificate of 'second' was revoked")
            assert "Traceback" not in said
            assert load_checkpoint(newest(config, "second"))["step"] == 6
            keyring.add("second", "learner", dt.timedelta(days=1))
            again = trainer_of(config, LearnerSpec("second", shard=1, resume_from=newest(config, "second")))
            with running(again) as resumed:
                until(lambda: again.learner.steps == 6 or resumed.done(), "it does not join")
                pause.may_go_on.set()
                assert resumed.result(WAIT_S).steps == 18
                assert first.result(WAIT_S).steps == 18


def rank_of(torchrun: int, rank: int) -> int:
    """The process of a rank that a torchrun has started."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    environments = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    return next(pid for pid, environment in environments.items() if f"RANK={rank}".encode() in environment)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("to", ["torchrun", "rank 1"])
def test_a_signal_ends_blocked_ranks(to: str, tiny: Tiny, tmp_path: Path) -> None:
    """Only one of them may hear it: torch blocks that one until rank 0 has been asked."""
    with serve(tiny(SCHEDULED), tmp_path / "state") as syncer:
        config = tiny(SCHEDULED, f"syncer.address={syncer.address}", *LONG)
        with held_up(config), torchrun(config, tmp_path / "job", "--name", "second", "--shard", "1") as process:
            until(lambda: waits(syncer, "second") or process.poll() is not None, "it does not wait")
            os.kill(process.pid if to == "torchrun" else rank_of(process.pid, 1), signal.SIGTERM)
            output, errors = process.communicate(timeout=WAIT_S)
            assert "stops after step 6, while it waited for others" in output, errors
        if to == "rank 1":
            assert process.returncode == 0, errors
        saved = load_checkpoint(newest(config, "second"))
        assert (saved["step"], saved["learner"]["rank"]) == (6, [0, 1])  # of both ranks, as of one process


class Before(ProgressDisplay):
    """Does something before the trainer's step with this number."""

    def __init__(self, step: int, do: Callable[[], None]) -> None:
        self._step, self._do = step, do
        self.trainer: Trainer | None = None

    def is_due(self) -> bool:
        if self.trainer is not None and self.trainer.learner.steps == self._step - 1:
            self._do()
        return False


def slow_disk(syncer: Syncer, may_write: threading.Event) -> None:
    """The syncer's writes wait for the disk: a lease is answered once it is durable."""
    syncer.driver.ask(lambda driver: driver._ports.worker.submit("swap", None, may_write.wait, lambda _: None))


def test_a_learner_that_waits_for_a_lease_stops_with_a_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    """Also one that has just come back, and claims the units of its checkpoint."""
    may_write = threading.Event()
    leased = (SCHEDULED, "data.deal='leases'", "data.lease_steps=1", "train.log_every_s=0.001")
    with serve(tiny(*leased), tmp_path / "state") as syncer:
        config = tiny(*leased, f"syncer.address={syncer.address}", *LONG, "run.learners=1")

        def wait_before_step_5() -> None:  # the batch of step 4 was asked for ahead, that of step 5 will be
            until(lambda: status(syncer)["data"]["learners"] == {"a": 4 * config.learner_batch}, "it asked for none")
            syncer.driver.drain()  # that batch is answered for, or the learner waits for it before step 4
            slow_disk(syncer, may_write)

        before = Before(4, wait_before_step_5)
        before.trainer = trainer_of(config, LearnerSpec("a", initialise=True), before)
        with running(before.trainer) as result:
            try:
                until(lambda: waits(syncer, step=4) or result.done(), "it does not wait")
                before.trainer.stop()
                summary = result.result(WAIT_S)
            finally:
                may_write.set()
        assert (summary.reason, summary.held_out_loss, summary.steps) == ("stopped", None, 4)
        checkpoint = newest(config, "a")
        assert told_by(checkpoint) == (summary.steps, summary.tokens)

        again, may_write = trainer_of(config, LearnerSpec("a", resume_from=checkpoint)), threading.Event()
        has_joined = threading.Event()
        join = again._attach
        assert join is not None

        def join_and_wait(*given: Any) -> Any:
            learner = join(*given)
            slow_disk(syncer, may_write)
            has_joined.set()
            return learner

        again._attach = join_and_wait
        with running(again) as result:
            try:
                until(lambda: (has_joined.is_set() and waits(syncer)) or result.done(), "it does not wait")
                again.stop()
                assert result.result(WAIT_S).reason == "stopped"
            finally:
                may_write.set()
        assert told_by(newest(config, "a")) == (summary.steps, summary.tokens)

        last = trainer_of(config, LearnerSpec("a", resume_from=newest(config, "a")))
        assert last.train().steps == 18
        ledgers_add_up(syncer)
        [fragment] = [each["fates"] for each in status(syncer)["data"]["fragments"]]
        assert fragment == {"merged": 18 * config.learner_batch}


def told_by(checkpoint: Path) -> tuple[int, int]:
    saved = load_checkpoint(checkpoint)
    return saved["step"], saved["tokens"]


def waits(syncer: Syncer, name: str = "a", *, step: int | None = None) -> bool:
    """Whether it said that it waits after this step."""
    said = syncer.driver.ask(lambda driver: driver.status())["learners"].get(name, {})
    return bool(said.get("waiting", False)) and step in (None, said["step"])
