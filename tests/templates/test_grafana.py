"""The Grafana dashboard: every query of it gives data in a real Prometheus that scrapes a syncer's metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.syncer.test_metrics import RUN_VALUES, member, scrape
from tests.test_project import ROOT

from diloco.demo.plan import free_port
from diloco.protocol.in_flight import Ledger
from diloco.syncer.metrics import SyncerMetrics

DASHBOARD = json.loads((ROOT / "templates" / "grafana.json").read_text())
QUERIES = sorted({target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]})
CONFIG = """
global: {scrape_interval: 1s}
scrape_configs: [{job_name: diloco, static_configs: [{targets: ["127.0.0.1:%d"]}]}]
"""


def filled() -> SyncerMetrics:
    """The metrics of a run in which everything has happened that a panel shows."""
    metrics = SyncerMetrics("demo")
    happen(metrics)
    metrics.set_learners([member("site-a", 40, 0.5, healthy=True)])
    metrics.set_ledgers({"site-a": [Ledger(100, 60, 10, {"overlap": 5})]})
    metrics.set_run(**RUN_VALUES)
    metrics.version.labels(0).set(7)
    return metrics


def happen(metrics: SyncerMetrics) -> None:
    """Rates need counters that move."""
    metrics.merged(0, contributors=1, live=2, seconds=0.02)
    metrics.persist_seconds.observe(0.2)
    metrics.staleness.labels("site-a").observe(1)
    metrics.rejected.labels("site-a", "missed").inc()
    metrics.evictions.labels("site-a").inc()
    metrics.refused.labels("Join", "AuthError").inc()
    metrics.set_bytes({("site-a", "updates", "sent"): 1000, ("site-a", "contributions", "received"): 500})


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[int]:
    program, port = shutil.which("prometheus"), free_port()
    if program is None:
        pytest.skip("there is no Prometheus here")
    (folder / "prometheus.yml").write_text(CONFIG % target)
    command = [
        program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            yield port
        finally:
            process.terminate()


def answer(port: int, query: str) -> list[Any]:
    """The samples of a query; none while the server starts."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            found: list[Any] = json.load(reply)["data"]["result"]
            return found
    except urllib.error.HTTPError as error:
        if error.code == 400:
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        return []
    except OSError:
        return []


@pytest.mark.slow
def test_every_query_gives_data(tmp_path: Path) -> None:
    metrics = filled()
    try:
        with prometheus(tmp_path, metrics.serve()) as port:
            waiting, deadline = set(QUERIES), time.monotonic() + 300
            while waiting and time.monotonic() < deadline:
                happen(metrics)
                waiting = {query for query in waiting if not answer(port, query)}
                time.sleep(0.5)
            assert not waiting
            (whole,) = answer(port, "sum(sum(diloco_ledger_tokens) by (state)) / sum(diloco_trained_tokens)")
            assert float(whole["value"][1]) == 1.0
    finally:
        metrics.close()


def test_a_query_names_metrics_that_there_are() -> None:
    metrics = filled()
    known = set(scrape(metrics.serve()))
    metrics.close()
    named = {name for query in QUERIES for name in re.findall(r"\bdiloco_\w+", query)}
    assert named <= known
