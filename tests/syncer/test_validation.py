"""Whatever numbers a learner sends, it is answered with a sentence, and the run goes on: rounds, status, and from disk
again."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.syncer.runs import RUN, Raw, layout, method, position, start, versions_of

import diloco
from diloco.core.method import Method
from diloco.errors import LayoutError, PayloadError, StaleIncarnationError
from diloco.exchange.dialling import fetch_status
from diloco.exchange.wire import syncer_pb2 as pb

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))

EDGES = [0, 1, 2**31, 10**8, 10**12, 10**15, 2**53, 10**17, 2**63 - 1, 2**63, 2**64 - 1]
NUMBER = st.sampled_from(EDGES) | st.integers(0, 30) | st.integers(0, 2**64 - 1)
DISCARD = st.builds(pb.Discard, reason=st.sampled_from(["overlap", "", "bored"]), tokens=NUMBER)
HEARTBEAT = st.fixed_dictionaries(
    {
        "step": NUMBER,
        "tokens": NUMBER,
        "step_s": st.floats(),
        "waiting": st.booleans(),
        "versions": st.lists(NUMBER, max_size=3),
        "confirmed": st.lists(NUMBER, max_size=3),
    }
)
PUSH = st.fixed_dictionaries(
    {"step": NUMBER, "tokens": NUMBER, "steps": NUMBER, "trained": NUMBER, "round": NUMBER, "base": NUMBER},
    optional={
        "fragment": st.integers(0, 3), "discarded": st.lists(DISCARD, max_size=2), "part": st.just(value=True),
        "tensors": st.lists(st.integers(0, 3) | st.just(2**32 - 1), max_size=3), "incarnation": NUMBER,
        "number": NUMBER,
    },
)  # fmt: skip
MESSAGE = st.one_of(
    st.tuples(st.just("beat"), HEARTBEAT),
    st.tuples(st.just("push"), PUSH),
    st.tuples(st.just("leave"), st.fixed_dictionaries({"tokens": NUMBER})),
    st.tuples(st.just("join"), st.just({})),
)

PUSHED = diloco.AsyncDiLoCo(sync_every=4, fragments=method().fragments, codec="fp32")


@pytest.mark.parametrize(
    "answer", [method(), pytest.param(PUSHED, marks=pytest.mark.slow)], ids=["scheduled", "pushed"]
)
def test_no_message_ends_a_run(answer: Method, tmp_path: Path) -> None:
    work = 0
    with start(tmp_path, answer) as syncer:
        honest, liar = Raw(syncer.address, "honest"), Raw(syncer.address, "liar")
        honest.initialise()
        honest.join()

        def send(what: str, fields: dict[str, Any]) -> None:
            with suppress(
                PayloadError, LayoutError, StaleIncarnationError
            ):  # an ExchangeError would be a call that failed
                getattr(liar, what)(*[ONES] if what == "push" else [], **fields)

        @settings(max_examples=30, deadline=None)
        @given(st.lists(MESSAGE, min_size=1, max_size=8))
        def run_goes_on(messages: list[tuple[str, dict[str, Any]]]) -> None:
            nonlocal work
            liar.join()
            for message in messages:
                send(*message)
            with suppress(StaleIncarnationError):
                liar.leave()  # the round need not wait for it
            syncer.driver.drain()
            work += 5
            version, step = versions_of(syncer)[0], position(syncer)[0]
            assert honest.push(ONES, round=version, base=version, trained=work, step=step + 4)
            syncer.driver.drain()
            syncer.driver.raise_failure()
            assert versions_of(syncer)[0] > version
            status: dict[str, Any] = fetch_status(syncer.address, run=RUN)
            for fragment in status["fragments"]:
                ledger = fragment["ledger"]
                assert min(ledger["pending"], ledger["merged"], ledger["lost"], *ledger["discarded"].values(), 0) >= 0

        run_goes_on()
        versions, stood_at = versions_of(syncer), position(syncer)
        for raw in (honest, liar):
            raw.connection.close()
    with start(tmp_path, answer) as syncer:
        assert versions_of(syncer) == versions
        assert position(syncer) == stood_at


def test_a_defect_in_the_merge_worker_ends_the_process(tmp_path: Path) -> None:
    """Loudly, so that its supervisor starts it again; what was published before is served then."""
    script = f"""
import sys, threading
from pathlib import Path
import torch
from tests.syncer.runs import Raw, method, start
from tests.syncer.test_validation import ONES
from diloco.run.tensor_jobs import TensorJobs

def close(self, *arguments):
    raise ZeroDivisionError("a defect of a merge")

with start(Path({str(tmp_path)!r}), method()) as syncer:
    raw = Raw(syncer.address)
    raw.initialise()
    raw.join()
    TensorJobs.close = close
    raw.push(ONES)
    syncer.wait(threading.Event())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError: a defect of a merge" in done.stderr
    assert "a job of the syncer failed" in done.stderr
    with start(tmp_path, method()) as syncer:
        assert versions_of(syncer) == [0, 0]
