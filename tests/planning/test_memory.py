"""Memory of learners and syncer as the planner counts it."""

from dataclasses import replace

import pytest

from diloco.planning.memory import learner_bytes, syncer_bytes
from diloco.planning.settings import ExpertSetting, setting_for
from diloco.planning.workload import Workload

MIXTURE = Workload("mixture", 1000, 10, 6.0, expert_parameters=800, num_experts=8, top_k=2)
HELD = ExpertSetting(groups=4, held=0.25)


def test_a_learner_has_what_it_holds() -> None:
    setting = setting_for(MIXTURE, "diloco", up="bf16", experts=HELD)
    assert learner_bytes(MIXTURE, setting) == {
        "device_parameters": 1600,
        "device_gradients": 1600,
        "device_inner_optimizer": 3200,
        "device_in_flight": 800,  # one group, or the trunk
        "host_anchors": 1600,
        "host_in_flight": 800 + 400,  # the new value and the update; the contribution was dropped before
    }
    whole = learner_bytes(MIXTURE, replace(setting, experts=replace(HELD, held=None)))
    assert whole["host_anchors"] == 4000
    assert whole["device_in_flight"] == 800
    lossless = learner_bytes(MIXTURE, replace(setting, down="fp32"))
    assert lossless["host_in_flight"] == 800


@pytest.mark.parametrize(("overlap", "num"), [(0, 1), (20, 2), (60, 3)])
def test_sends_that_are_at_most_an_overlap_apart_are_in_flight_together(overlap: int, num: int) -> None:
    # Held are groups 0 and 1, and the trunk: sent after steps 20, 40 and 100 of 100.
    experts = ExpertSetting(groups=4, held=0.5)
    setting = setting_for(MIXTURE, "streaming", num_fragments=1, overlap=overlap, up="fp32", experts=experts)
    assert learner_bytes(MIXTURE, setting)["device_in_flight"] == num * 800
    rarely = replace(setting, experts=replace(experts, every=4))  # 80, 160 of 400
    assert learner_bytes(MIXTURE, rarely)["device_in_flight"] == (1 if overlap < 20 else 2) * 800


@pytest.mark.parametrize(
    ("method", "up", "down", "measured"),
    [
        ("diloco", "int8", "fp32", 3.05), ("diloco", "int8", "int4", 4.20), ("diloco", "int8", "bf16", 4.58),
        ("streaming", "int8", "fp32", 2.30), ("streaming", "int8", "int4", 3.52), ("streaming", "int8", "bf16", 3.84),
    ],
)  # fmt: skip
def test_the_syncers_memory_is_nearly_that_which_was_measured(
    method: str, up: str, down: str, measured: float
) -> None:  # fmt: skip
    """`python -m benchmarks.memory`: models of 124 million parameters, one and four fragments."""
    workload = Workload("measured", 124e6, 12, 1.0)
    memory, _ = syncer_bytes(workload, setting_for(workload, method, up=up, down=down), 2)
    assert 0.95 < memory / (4 * 124e6) / measured < 1


def test_storage_has_the_named_versions_those_that_were_just_superseded_and_the_spool() -> None:
    setting = setting_for(MIXTURE, "diloco", up="bf16", down="fp32", experts=HELD)
    _, storage = syncer_bytes(MIXTURE, setting, 4)
    version = 1000 * 8
    assert storage == version * (2 + 600 / (100 * 6)) + 4 * max(400, 400 / 4)
