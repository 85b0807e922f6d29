"""Defects seen in other systems, and the test of each that this code could have had too.

Those that have no better place are tested here; the table names the others, and that they exist is tested.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco
from diloco.core.codecs import codec_from_name
from diloco.core.presets import method_from_table
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.exchange.torchft import TorchFT

ROOT = Path(__file__).parent
SOURCE = ROOT.parent / "src" / "diloco"

ELSEWHERE = {
    "with more than one bucket tensors are never averaged, and learners diverge":
        "exchange/test_contract.py::test_same_bits_on_every_exchange",
    "with a large overlap a commit succeeds though the exchange failed":
        "exchange/test_torchft.py::test_one_is_killed_and_the_other_goes_on",
    "two runs on one coordinator merge into one broken quorum":
        "syncer/test_service.py::test_bad_input_is_refused_and_changes_nothing",
    "a fresh learner that is alone at start-up becomes the quorum and wipes the model":
        "run/test_driver.py::test_of_two_that_initialise_at_once_one_does",
    "after a restart the first to come back merges alone":
        "protocol/test_syncer_core.py::test_after_a_restart_the_first_to_come_back_does_not_merge_alone",
    "with a minimum of one the cluster silently becomes solo runs":
        "protocol/test_syncer_core.py::test_at_least_keeps_a_survivor_from_becoming_a_solo_run",
    "liveness is reported where participation was meant": "syncer/test_metrics.py::test_a_merge_shows_who_took_part",
    "bulk transfers starve the heartbeats": "syncer/test_hosting.py::test_a_slow_disk_holds_up_no_sign_of_life",
    "fixed time-outs kill the faster learner":
        "protocol/test_syncer_core.py::test_deadlines_are_measured_in_steps_within_a_floor_and_a_cap",
    "learners block after an upload": "learner/test_learner_events.py::test_it_waits_only_for_what_is_due_and_says_so",
    "a joiner sends zeros that count in the divisor":
        "exchange/test_torchft.py::test_a_joiner_is_healed_and_takes_part",
    "a joiner delays all others":
        "protocol/test_syncer_core.py::test_a_joiner_never_delays_an_open_round_and_is_included_when_in_time",
    "after failed exchanges each applies its own gradient":
        "exchange/test_collective.py::test_a_killed_learner_is_an_error_for_the_others",
    "a retry after a reconnect submits a zero gradient":
        "protocol/test_syncer_core.py::test_a_contribution_sent_again_after_a_reconnect_counts_once",
    "Delayed Nesterov applies buffered gradients twice":
        "core/test_outer.py::test_buffered_outer_gradients_are_applied_once",
    "the first synchronisation comes one step late": "test_torchft.py::test_golden_trajectory",
    "checkpoints drop the outer state":
        "exchange/test_contract.py::test_same_bits_on_every_exchange",  # its "resumed" scenarios
    "restored runs have a stale learning rate or a data loader one step ahead":
        "training/test_loop.py::test_stopped_and_resumed_alone_is_the_same_to_the_bit",
    "peers with different bits train on": "exchange/test_collective.py::test_different_bits_are_an_error_on_every_rank",
    "a lone contribution gets a full outer step":
        "protocol/rounds/test_called.py::test_a_merge_of_part_of_the_live_weight_is_scaled_to_that_part",
    "a fast network turns the interval into two steps":
        "protocol/rounds/test_called.py::test_a_fast_network_does_not_shorten_the_interval",
    "stale work is dropped":
        "protocol/rounds/test_called.py::test_late_work_goes_into_the_next_merge_and_adds_up_with_fresh",
}  # fmt: skip


@pytest.mark.parametrize("defect", ELSEWHERE)
def test_the_test_is_there(defect: str) -> None:
    file, name = ELSEWHERE[defect].split("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def names_in(path: Path) -> set[str]:
    """Every name and attribute that a module uses."""
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }
    return names


def test_nothing_is_unpickled() -> None:
    for path in SOURCE.rglob("*.py"):
        found = names_in(path) & {
            "pickle",
            "cloudpickle",
            "dill",
            "marshal",
            "shelve",
            "all_gather_object",
            "broadcast_object_list",
        }
        assert not found, path
        assert "torch.load(" not in path.read_text(), path


def test_no_environment_variable_beats_an_argument() -> None:
    """The library reads one, DILOCO_KEYS, in one place, where no argument gives keys (exchange/test_key_lines.py). The
    command line may take what torchrun says from it. Two are only set: one for gRPC, where it is not set (its fork
    handlers abort workers of data loaders), and the one that trackio takes its folder from."""
    readers = [path for path in SOURCE.rglob("*.py") if names_in(path) & {"environ", "getenv"}]
    for name, sets in (
        ("exchange/__init__.py", "environ.setdefault("),
        ("tracking/trackers.py", 'environ["TRACKIO_DIR"] = '),
    ):
        sets_only = SOURCE / name
        assert sets_only.read_text().count("environ") == sets_only.read_text().count(sets) == 1
        readers.remove(sets_only)
    keys = SOURCE / "exchange" / "key_pair.py"
    assert keys.read_text().count("environ.") == keys.read_text().count("environ.get(VARIABLE") == 1
    readers.remove(keys)
    readers.remove(SOURCE / "rl" / "scoring.py")  # hands it on to its child, but for DILOCO_KEYS
    readers.remove(SOURCE / "compute" / "compiling.py")  # where the caches of this user are
    readers.remove(SOURCE / "store" / "bucket.py")  # finds its endpoint where the cloud's own tools do, after its URL
    assert {path.relative_to(SOURCE).parts[0] for path in readers} <= {"cli", "demo", "training"}


def test_the_host_that_others_dial_is_given_and_not_guessed() -> None:
    assert inspect.signature(TorchFT).parameters["host"].default is inspect.Parameter.empty


def test_a_codec_that_was_asked_for_is_what_goes_on_the_wire() -> None:
    sent: list[int] = []

    def life(index: int, exchange: Exchange) -> None:
        offer = exchange.offer

        def counted(contribution: Any, payload: Any) -> None:
            encoded = payload()
            sent.append(encoded.numel())
            offer(contribution, lambda: encoded)

        exchange.offer = counted  # type: ignore[method-assign]
        model = nn.Linear(30, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(
            model, optimizer, method=diloco.DiLoCo(sync_every=1, codec="2bit"), exchange=exchange
        ) as learner:
            model(torch.ones(30)).sum().backward()
            optimizer.step()
            learner.step(tokens=1)

    diloco.run_local(life, learners=1)
    assert sent == [codec_from_name("2bit").encoded_bytes(620)]
    assert sent[0] < 620


def test_no_keyword_is_swallowed() -> None:
    for preset in (diloco.DiLoCo, diloco.DecoupledDiLoCo, diloco.run_local, diloco.connect):
        with pytest.raises(TypeError, match="sync_evry"):
            preset(sync_evry=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean 'sync_every'"):
        method_from_table({"preset": "DiLoCo", "sync_evry": 3})


def test_a_lossy_codec_is_never_mistaken_for_a_lossless_one() -> None:
    with pytest.raises(ConfigError, match="there is no codec '4bit'"):
        diloco.DiLoCo(codec="4bit")
