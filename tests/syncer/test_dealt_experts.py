"""Learners whose experts the syncer deals, as users start them: one is killed for good and another one takes over its
experts, the syncer is killed meanwhile, and a new learner is dealt what the fewest hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.processes import ForkedSyncer, start_module
from tests.syncer.runs import RUN

from diloco import events
from diloco.cli import main
from diloco.event_log import read_events
from diloco.exchange.dialling import fetch_status

RUN_FILE = """
[run]
name = "{run}"
tokens = 1_000_000_000
learners = 4
dir = "{folder}/run"

[model]
type = "mixtral"
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
num_local_experts = 6
num_experts_per_tok = 2

[data]
kind = "text"
paths = ["{folder}/text.txt"]
sequence_length = 16

[train]
global_batch = 4
threads = 1
holds_experts = "auto"

[method]
preset = "DiLoCo"
sync_every = 3
fragments = {{ type = "Experts", groups = 3, trunk = {{ type = "Whole" }} }}

[syncer]
address = "{address}"
lost_floor_s = 60.0
lost_cap_s = 60.0
reconnect_floor_s = 1.0
"""

GROUPS = [[[0, 2]], [[2, 4]], [[4, 6]]]


@pytest.mark.slow
def test_another_learner_takes_over_from_one_that_is_killed_for_good(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(3000)))
    text = RUN_FILE.format(run=RUN, folder=tmp_path, address="127.0.0.1:1")
    syncer = ForkedSyncer(tmp_path, text)
    (tmp_path / "run.toml").write_text(text.replace("127.0.0.1:1", syncer.address))

    def start(shard: int, *options: str) -> Any:
        with (tmp_path / f"learner-{shard}.log").open("ab") as log:
            return start_module(
                "diloco", "train", str(tmp_path / "run.toml"), "--shard", str(shard), *options, out=log.fileno(),
                err=log.fileno(),
            )  # fmt: skip

    def status() -> dict[str, Any]:
        found: dict[str, Any] = fetch_status(syncer.address, run=RUN)
        return found

    def holders() -> dict[str, Any]:
        return {name: it["experts"] for name, it in status()["learners"].items()}

    def hold_all(number: int) -> Callable[[], bool]:
        return lambda: len(found := holders()) == number and all(group in found.values() for group in GROUPS)

    def goes_on() -> None:
        before = [each["version"] for each in status()["fragments"]]
        until(
            lambda: all(it["version"] > old + 1 for it, old in zip(status()["fragments"], before, strict=True)),
            "the run does not go on",
        )

    learners = {f"learner-{shard}": start(shard) for shard in range(1, 4)}
    learners["learner-0"] = start(0, "--initialise", "if-empty")
    try:
        until(hold_all(4), "the learners do not hold all experts")
        goes_on()
        before = holders()
        lone = [name for name, own in before.items() if list(before.values()).count(own) == 1]
        assert len(lone) == 2
        victim = max(lone)
        learners[victim].kill()
        until(hold_all(3), "nobody takes over")
        moved = [name for name, own in holders().items() if before[name] != own]
        assert len(moved) == 1
        assert before[moved[0]] not in [before[name] for name in lone]
        assert holders()[moved[0]] == before[victim]
        goes_on()
        syncer.kill()
        syncer.start()
        until(hold_all(3), "the learners do not come back")
        goes_on()
        learners[victim] = start(int(victim[-1]), "--force")
        until(hold_all(4), "the newcomer holds nothing")
        assert {name: own for name, own in holders().items() if name != victim} == {
            name: before[victim] if name == moved[0] else own for name, own in before.items() if name != victim
        }
        goes_on()
        for process in learners.values():
            process.terminate()
        until(lambda: not holders(), "the learners do not leave")
        final = status()
        for process in learners.values():
            process.join(timeout=300)
        assert {process.exitcode for process in learners.values()} == {0}
    finally:
        for process in learners.values():
            process.kill()
            process.join()
        syncer.kill()
    assert final["experts"] == {"number": 6, "untrained": []}
    for fragment in final["fragments"]:
        ledger = fragment["ledger"]
        settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
        assert ledger["trained"] == ledger["pending"] + settled
        assert ledger["merged"] > 0
    trained = [each["ledger"]["trained"] for each in final["fragments"]]
    assert trained[3] == final["tokens"] == sum(trained[:3])
    merged = [it for it in read_events(tmp_path / "state" / "events.jsonl") if isinstance(it, events.Merged)]
    group = GROUPS.index(before[victim])
    assert set(chain.from_iterable(it.contributors for it in merged if it.fragment == group)) == {victim, moved[0]}
    with pytest.raises(SystemExit) as ended:  # what was dealt follows from the journal
        main(["replay", str(tmp_path / "state")])
    assert ended.value.code == 0


def test_a_resumed_learner_is_dealt_other_experts_after_its_checkpoint_was_superseded(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(3000)))
    text = RUN_FILE.replace("groups = 3", "groups = 3, deal_every = 2")
    text = text.format(run=RUN, folder=tmp_path, address="127.0.0.1:1") + "[checkpoint]\nevery_steps = 2\nkeep = 1\n"
    syncer = ForkedSyncer(tmp_path, text)
    run_file = tmp_path / "run.toml"
    run_file.write_text(text.replace("127.0.0.1:1", syncer.address))
    try:
        for option, steps in (("--initialise=if-empty", 4), ("--resume", 21)):
            with pytest.raises(SystemExit) as ended:
                main(["train", str(run_file), "--shard", "0", option, "--set", f"run.steps={steps}"])
            assert ended.value.code == 0
        versions = [each["version"] for each in fetch_status(syncer.address, run=RUN)["fragments"]]
    finally:
        syncer.kill()
    assert versions == [3, 2, 2, 7]
