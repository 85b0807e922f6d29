"""Metrics as Prometheus sees them: scraped over HTTP and parsed."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from diloco.errors import ConfigError, RunError
from diloco.protocol.in_flight import Ledger
from diloco.protocol.members import Member
from diloco.syncer.metrics import SyncerMetrics

Labels = frozenset[tuple[str, str]]

RUN_VALUES: dict[str, Any] = {
    "tokens": 700, "budget_tokens": 1000, "held_out_loss": 2.25, "training_losses": {"site-a": 2.5},
    "tokens_per_s": 30.0, "eta_s": 10.0, "blocked_s": {"site-a": 1.5},
}  # fmt: skip


@pytest.fixture
def metrics() -> Iterator[SyncerMetrics]:
    metrics = SyncerMetrics("demo")
    yield metrics
    metrics.close()


def scrape(port: int) -> dict[str, dict[Labels, float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as answer:
        text = answer.read().decode()
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples


def member(learner: str, step: int, step_s: float | None, *, healthy: bool) -> Member:
    return Member(learner, 1, step, seen_at=0.0, progressed_at=0.0, step_s=step_s, ready=healthy)


def labels(**pairs: str) -> Labels:
    return frozenset(pairs.items())


def test_a_merge_shows_who_took_part(metrics: SyncerMetrics) -> None:
    port = metrics.serve()
    metrics.set_learners([member("site-a", 40, 0.5, healthy=True), member("site-b", 3, None, healthy=False)])
    metrics.merged(1, contributors=1, live=2, seconds=0.02)
    metrics.persist_seconds.observe(0.2)
    metrics.version.labels(1).set(7)
    for state, num_units in (("done", 40), ("leased", 9), ("returned", 2)):
        metrics.data_units.labels(state).set(num_units)
    found = scrape(port)
    assert found["diloco_run"] == {labels(run="demo"): 1}
    assert found["diloco_learners"] == {labels(state="live"): 2, labels(state="healthy"): 1}
    assert found["diloco_participation_ratio"] == {labels(fragment="1"): 0.5}
    assert found["diloco_merge_contributors"] == {labels(fragment="1"): 1}
    assert found["diloco_data_units"] == {
        labels(state="done"): 40,
        labels(state="leased"): 9,
        labels(state="returned"): 2,
    }
    assert found["diloco_fragment_version"] == {labels(fragment="1"): 7}
    assert found["diloco_learner_step"] == {labels(learner="site-a"): 40, labels(learner="site-b"): 3}
    assert found["diloco_learner_step_seconds"] == {labels(learner="site-a"): 0.5}
    assert found["diloco_merge_seconds_bucket"][labels(le="0.01")] == 0
    assert found["diloco_merge_seconds_bucket"][labels(le="0.03")] == 1
    assert found["diloco_persist_seconds_sum"] == {labels(): 0.2}


def test_how_the_run_goes(metrics: SyncerMetrics) -> None:
    port = metrics.serve()
    metrics.set_run(**RUN_VALUES)
    found = scrape(port)
    assert found["diloco_run_tokens_total"] == {labels(): 700}
    assert found["diloco_budget_tokens"] == {labels(): 1000}
    assert found["diloco_held_out_loss"] == {labels(): 2.25}
    assert found["diloco_training_loss"] == {labels(learner="site-a"): 2.5}
    assert found["diloco_tokens_per_second"] == {labels(): 30.0}
    assert found["diloco_eta_seconds"] == {labels(): 10.0}
    unknown = dict.fromkeys(("budget_tokens", "held_out_loss", "tokens_per_s", "eta_s"))
    metrics.set_run(**RUN_VALUES | unknown | {"training_losses": {}, "blocked_s": {}})
    found = scrape(port)
    assert not {"diloco_budget_tokens", "diloco_held_out_loss", "diloco_eta_seconds"} & set(found)


def test_a_learner_that_left_leaves_no_line(metrics: SyncerMetrics) -> None:
    port = metrics.serve()
    metrics.set_learners([member("site-a", 40, 0.5, healthy=True)])
    metrics.set_learners([])
    found = scrape(port)
    assert found["diloco_learners"] == {labels(state="live"): 0, labels(state="healthy"): 0}
    assert "diloco_learner_step" not in found
    metrics.merged(0, contributors=0, live=0, seconds=0.0)
    assert scrape(port)["diloco_participation_ratio"] == {labels(fragment="0"): 0}


def test_counted_events(metrics: SyncerMetrics) -> None:
    port = metrics.serve()
    for staleness in (0, 1, 1):
        metrics.staleness.labels("site-a").observe(staleness)
    metrics.rejected.labels("site-b", "missed").inc()
    metrics.rejected.labels("site-b", "missed").inc()
    metrics.joins.labels("site-a").inc()
    metrics.evictions.labels("site-a").inc()
    found = scrape(port)
    assert found["diloco_contribution_staleness_versions_bucket"][labels(learner="site-a", le="0.0")] == 1
    assert found["diloco_contribution_staleness_versions_bucket"][labels(learner="site-a", le="1.0")] == 3
    assert found["diloco_rejected_contributions_total"] == {labels(learner="site-b", reason="missed"): 2}
    assert found["diloco_joins_total"] == {labels(learner="site-a"): 1}
    assert found["diloco_evictions_total"] == {labels(learner="site-a"): 1}


def test_the_ledger_adds_up_over_learners(metrics: SyncerMetrics) -> None:
    port = metrics.serve()
    first = [Ledger(100, 60, 10, {"overlap": 5}), Ledger(100)]
    second = [Ledger(50, 50, 0, {}), Ledger(50, 0, 0, {"missed": 7})]
    metrics.set_ledgers({"site-a": first, "site-b": second})
    samples = scrape(port)
    found = samples["diloco_ledger_tokens"]
    states = {
        (dict(key)["state"], dict(key)["reason"]): value for key, value in found.items() if ("fragment", "0") in key
    }
    assert states == {
        ("pending", ""): 25, ("merged", ""): 110, ("lost", ""): 10, ("discarded", "overlap"): 5
    }  # fmt: skip
    assert samples["diloco_trained_tokens"][labels(fragment="0")] == sum(states.values())
    assert found[labels(fragment="1", state="discarded", reason="missed")] == 7
    metrics.set_ledgers({})
    assert "diloco_ledger_tokens" not in scrape(port)


def test_bytes_by_learner_kind_and_direction(metrics: SyncerMetrics) -> None:
    port = metrics.serve()
    metrics.set_bytes({("site-a", "contributions", "received"): 10**12 + 1, ("site-a", "updates", "sent"): 7})
    found = scrape(port)["diloco_wire_bytes_total"]
    assert found[labels(learner="site-a", kind="contributions", direction="received")] == 10**12 + 1
    assert found[labels(learner="site-a", kind="updates", direction="sent")] == 7


def test_two_runs_in_one_process_share_nothing(metrics: SyncerMetrics) -> None:
    other = SyncerMetrics("other")
    before = {family.name for family in REGISTRY.collect()}
    port, other_port = metrics.serve(), other.serve("[::1]:0") if _has_ipv6() else other.serve()
    metrics.version.labels(0).set(3)
    other.close()
    assert scrape(port)["diloco_fragment_version"] == {labels(fragment="0"): 3}
    assert port != other_port
    assert not any(name.startswith("diloco") for name in before)


def _has_ipv6() -> bool:
    import socket

    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_the_port_is_free_after_closing(metrics: SyncerMetrics) -> None:
    port = metrics.serve()
    with pytest.raises(RunError, match="is in use by another process.*choose another port"):
        SyncerMetrics("other").serve(f"127.0.0.1:{port}")
    metrics.close()
    metrics.close()
    assert metrics.serve(f"127.0.0.1:{port}") == port


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", ":0", "10.0.0.1:0"])
def test_metrics_are_for_this_machine_only(metrics: SyncerMetrics, address: str) -> None:
    with pytest.raises(ConfigError, match="open to other machines"):
        metrics.serve(address)
