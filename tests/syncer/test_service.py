"""Bad input: each kind is refused with one sentence, and the run is as it was."""

from __future__ import annotations

import datetime as dt
import json
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tests.frames import frames
from tests.syncer.runs import (
    RUN,
    Fetch,
    Net,
    Raw,
    is_initialised,
    layout,
    method,
    position,
    start,
    status_of,
    tamper,
    train,
    versions_of,
)

import diloco
from diloco import errors
from diloco.core.fragments import digest, gather, make_layout
from diloco.exchange.key_pair import read_key_pair
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import from_rpc_error
from diloco.exchange.wire.rpc import path as rpc_path
from diloco.exchange.wire.tensors import bytes_of
from diloco.following.follower import newest_model
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Syncer

SIZE = layout().fragments[0].numel


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[Syncer]:
    with start(tmp_path, method()) as it:
        yield it


@pytest.fixture
def raw(syncer: Syncer) -> Iterator[Raw]:
    it = Raw(syncer.address)
    it.initialise()
    it.join()
    yield it
    it.connection.close()


def good() -> torch.Tensor:
    return diloco.FP32().encode(torch.ones(SIZE))


def poisoned(value: float) -> torch.Tensor:
    x = torch.ones(SIZE)
    x[3] = value
    return x.view(torch.uint8)


def truncated(raw: Raw) -> Any:
    return raw.push_frames(iter([*list(frames(raw.header(4 * SIZE), bytes_of(good())))[:1], b"\0" * 8]))


def oversized(raw: Raw) -> Any:
    return raw.push_frames(frames(raw.header(4 * SIZE), memoryview(bytes(4 * SIZE + 4))))


def damaged(raw: Raw) -> Any:
    header, payload, checksum = frames(raw.header(4 * SIZE), bytes_of(good()))
    return raw.push_frames(iter([header, bytes([payload[0] ^ 1]) + payload[1:], checksum]))


def other_layout(raw: Raw) -> None:
    raw.join(make_layout(Net(width=9), method().fragments))


def nameless(raw: Raw, name: str) -> None:
    other = Raw(raw.connection.address, name)
    try:
        other.join()
    finally:
        other.connection.close()


BAD: dict[str, tuple[Callable[[Raw], Any], type[errors.DilocoError], str]] = {
    "NaN": (lambda raw: raw.push(poisoned(float("nan"))), errors.PayloadError, "NaN|inf|finite"),
    "inf": (lambda raw: raw.push(poisoned(float("inf"))), errors.PayloadError, "NaN|inf|finite"),
    "too short": (lambda raw: raw.push(good()[:-4]), errors.CorruptPayloadError, f"{4 * SIZE} bytes"),
    "truncated": (truncated, errors.CorruptPayloadError, "ended after 8 of"),
    "oversized": (oversized, errors.CorruptPayloadError, "more than"),
    "damaged": (damaged, errors.CorruptPayloadError, "checksum"),
    "no header": (lambda raw: raw.push_frames(iter([])), errors.CorruptPayloadError, "before its header"),
    "unknown fragment": (lambda raw: raw.push(good(), fragment=7), errors.LayoutError, "0 to 1, not 7"),
    "unknown tensor": (
        lambda raw: raw.push(good(), part=True, tensors=[0, 99]),
        errors.LayoutError,
        "tensors 0 to [0-9], not 99",
    ),
    "unknown run": (lambda raw: raw.join(run="other"), errors.UnknownRunError, "'tiny', not 'other'"),
    "other layout": (other_layout, errors.LayoutError, r"'layers.0.weight'.*\(9, 4\).*\(8, 4\)"),
    "second model": (lambda raw: raw.initialise(2.0), errors.AlreadyInitialisedError, "has a model already"),
    "no name": (lambda raw: nameless(raw, ""), errors.PayloadError, "cannot be called ''"),
    "long name": (lambda raw: nameless(raw, "x" * 100_000), errors.PayloadError, "use 1 to 64 letters"),
    "layout of nothing": (lambda raw: raw.join(text="[1]"), errors.LayoutError, "must be a JSON object, not a list"),
    "heartbeat at step 2^63": (
        lambda raw: raw.beat(step=2**63), errors.PayloadError, "9223372036854775808 inner steps",
    ),
    "heartbeat at step 1e12": (lambda raw: raw.beat(step=10**12), errors.PayloadError, "maximum"),
    "heartbeat of 2^63 tokens": (
        lambda raw: raw.beat(tokens=2**63), errors.PayloadError, "9223372036854775808 trained",
    ),
    "heartbeat of 1e17 tokens": (lambda raw: raw.beat(tokens=10**17), errors.PayloadError, "maximum"),
    "heartbeat of NaN seconds": (lambda raw: raw.beat(step_s=math.nan), errors.PayloadError, "nan s"),
    "heartbeat blocked for NaN seconds": (lambda raw: raw.beat(blocked_s=math.nan), errors.PayloadError, "nan s"),
    "heartbeat blocked for longer than anyone lives": (
        lambda raw: raw.beat(blocked_s=1e10), errors.PayloadError, "0 to 1e.09 seconds"),
    "heartbeat of -1 seconds": (lambda raw: raw.beat(step_s=-1.0), errors.PayloadError, "-1.0 s"),
    "heartbeat of 1e300 seconds": (lambda raw: raw.beat(step_s=1e300), errors.PayloadError, "s for an inner step"),
    "too many versions": (lambda raw: raw.beat(versions=[0, 0, 0]), errors.PayloadError, "3 fragments"),
    "heartbeat of a megabyte": (
        lambda raw: raw.beat(versions=[0] * 2**20), errors.CorruptPayloadError,
        r"HeartbeatRequest has \d+ bytes, and the maximum is 262144",
    ),
    "goodbye of a megabyte": (
        lambda raw: raw.leave(seen=pb.Lineage(run_id="0" * 2**20)), errors.CorruptPayloadError, "maximum is 262144",
    ),
    "watch of a megabyte": (
        lambda raw: list(raw.connection.watch("control", pb.WatchRequest(run="x" * 2**20))),
        errors.CorruptPayloadError, "maximum is 262144",
    ),
    "push after step 2^63": (lambda raw: raw.push(good(), step=2**63), errors.PayloadError, "inner step"),
    "push of more steps than taken": (lambda raw: raw.push(good(), steps=3), errors.PayloadError, "3 steps of work"),
    "push of 2^63 tokens": (
        lambda raw: raw.push(good(), tokens=2**63, trained=2**63), errors.PayloadError, "trained tokens",
    ),
    "push of 1e17 tokens": (
        lambda raw: raw.push(good(), tokens=10**17, trained=10**17), errors.PayloadError, "trained tokens",
    ),
    "push of more tokens than trained": (lambda raw: raw.push(good(), tokens=6), errors.PayloadError, "reports 6 tok"),
    "push that discards more than trained": (
        lambda raw: raw.push(good(), discarded=[pb.Discard(reason="overlap", tokens=1)]), errors.PayloadError,
        "reports 6 tok",
    ),
    "unknown reason to discard": (
        lambda raw: raw.push(good(), tokens=4, discarded=[pb.Discard(reason="bored", tokens=1)]), errors.PayloadError,
        "bored",
    ),
    "tensors twice": (lambda raw: raw.push(good(), part=True, tensors=[0, 0]), errors.PayloadError, "each once"),
    "goodbye with 2^63 tokens": (lambda raw: raw.leave(tokens=2**63), errors.PayloadError, "trained tokens"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_refused_and_changes_nothing(kind: str, syncer: Syncer, raw: Raw) -> None:
    misbehave, expected, words = BAD[kind]
    before = status_of(syncer)["fragments"], versions_of(syncer), newest_model(syncer.address, run=RUN).state_dict()
    with pytest.raises(expected, match=words) as caught:
        misbehave(raw)
    assert "\n" not in str(caught.value)
    after = status_of(syncer)["fragments"], versions_of(syncer), newest_model(syncer.address, run=RUN).state_dict()
    assert after[:2] == before[:2]
    assert all(torch.equal(after[2][name], value) for name, value in before[2].items())
    is_kept = kind == "truncated"  # an upload that was cut off looks like it: the next one may go on
    assert status_of(syncer)["spooled_bytes"] == (4 * SIZE if is_kept else 0)
    assert raw.push(good())
    syncer.driver.drain()
    syncer.driver.raise_failure()
    assert versions_of(syncer) == [1, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 2**63},
        {"tokens": 10**17},
        {"source": "x" * 100_000},
        {"seen": pb.Lineage(run_id="0" * 32, epoch=2**63 - 2)},
        {"seen": pb.Lineage(run_id="\x1b[2Jx", epoch=1)},
    ],
    ids=["step", "tokens", "source", "epoch", "run_id"],
)
def test_an_initial_model_with_absurd_numbers_is_refused(fields: dict[str, Any], syncer: Syncer) -> None:
    raw = Raw(syncer.address)
    with pytest.raises(errors.PayloadError):
        raw.initialise(**fields)
    assert not is_initialised(syncer)
    raw.initialise(step=100, tokens=10**14)
    assert position(syncer) == (100, 10**14)
    raw.connection.close()


def test_a_layout_may_be_longer_than_other_control_calls(syncer: Syncer, raw: Raw) -> None:
    raw.join(text=json.dumps(layout().to_dict()) + " " * 2**20)


def test_steps_do_not_run_back_but_in_a_new_incarnation(syncer: Syncer, raw: Raw) -> None:
    raw.beat(step=8, tokens=40)
    with pytest.raises(errors.PayloadError, match="has taken 7 inner steps of its own and had taken 8 before"):
        raw.beat(step=7, tokens=40)
    raw.beat(step=8, tokens=40)  # as a resend says it
    raw.join()
    raw.beat(step=3, tokens=15)


def test_a_learner_that_comes_back_again_and_again_cannot_overflow_its_books(syncer: Syncer, raw: Raw) -> None:
    for _ in range(9):
        raw.beat(tokens=10**15)
        raw.join()
    with pytest.raises(errors.PayloadError, match="can be counted"):
        raw.beat(tokens=10**15)
    raw.beat(tokens=5)
    assert raw.push(good())
    syncer.driver.drain()
    syncer.driver.raise_failure()


def test_tokens_are_merged_once_however_often_they_are_pushed(syncer: Syncer, raw: Raw) -> None:
    assert raw.push(good()) == 1
    syncer.driver.drain()
    with pytest.raises(errors.PayloadError, match="contributes 5 tokens"):  # the same five, in the next round
        raw.push(good(), round=1, base=1, step=6)
    assert raw.push(good(), round=1, base=1, step=6, trained=10) == 2
    for _ in range(2):  # and again, since its acknowledgement was lost
        assert raw.push(good(), round=1, base=1, step=6, trained=10, number=2) == 2
    syncer.driver.drain()
    ledger = status_of(syncer)["fragments"][0]["ledger"]
    assert (ledger["trained"], ledger["merged"]) == (10, 10)


def test_a_stale_incarnation_is_refused(syncer: Syncer, raw: Raw) -> None:
    old = raw.incarnation
    raw.join()
    raw.incarnation, new = old, raw.incarnation
    with pytest.raises(errors.StaleIncarnationError, match="join again"):
        raw.push(good())
    raw.incarnation = new
    assert raw.push(good())


def test_a_damaged_scale_of_a_4_bit_contribution_is_refused(tmp_path: Path) -> None:
    with start(tmp_path, method(codec="e3m0")) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.join()
        payload = diloco.E3M0().encode(torch.ones(SIZE))
        payload[:2] = torch.tensor([0x80, 0x7F], dtype=torch.uint8)  # the first block's bf16 scale becomes inf
        with pytest.raises(errors.CorruptPayloadError):
            raw.push(payload)
        assert versions_of(syncer) == [0, 0]
        raw.connection.close()


def test_an_initial_model_that_is_not_finite_is_refused(syncer: Syncer) -> None:
    raw = Raw(syncer.address)
    with pytest.raises(errors.DilocoError, match="not finite"):
        raw.initialise(float("nan"))
    assert not is_initialised(syncer)
    raw.initialise()
    assert is_initialised(syncer)
    raw.connection.close()


def test_another_method_is_refused_with_the_difference(syncer: Syncer, raw: Raw) -> None:
    exchange = diloco.connect(syncer.address, run=RUN, learner="x")
    with pytest.raises(errors.ConfigError, match="overlap is 0 in the given one and 1 in the run's"):
        diloco.Learner(Net(), torch.optim.SGD(Net().parameters()), exchange=exchange, method=diloco.StreamingDiLoCo(
            sync_every=4, overlap=0, mix=0.0, codec="fp32", fragments=method().fragments))  # fmt: skip
    exchange.close()


def test_nobody_answers() -> None:
    exchange = diloco.connect("127.0.0.1:9", run=RUN, join_timeout_s=0.1)
    with pytest.raises(errors.ExchangeError, match="127.0.0.1:9"):
        exchange.method(None)
    exchange.close()


def test_contributions_beyond_the_budget_wait_on_disk(tmp_path: Path) -> None:
    with start(tmp_path, method(at_least=2), spool_bytes=10) as syncer:
        ones, twos = Raw(syncer.address, "a"), Raw(syncer.address, "b")
        ones.initialise()
        ones.join()
        twos.join()
        ones.push(good())
        assert status_of(syncer)["spooled_bytes"] == 0
        twos.push(good())
        syncer.driver.drain()
        assert versions_of(syncer) == [1, 0]
        for it in (ones, twos):
            it.connection.close()


def test_a_damaged_update_is_fetched_again_whole(syncer: Syncer, caplog: pytest.LogCaptureFixture) -> None:
    damaged_once: list[bool] = []

    def damaging(fetch: Fetch, fragment: int, base: int) -> Any:
        fetched = fetch(fragment, base)
        if fetched.payload is not None and not damaged_once:
            damaged_once.append(True)
            payload = fetched.payload.clone()
            payload[0] += 1
            return replace(fetched, payload=payload)
        return fetched

    tamper(syncer, damaging)
    state, metrics = train(0, diloco.connect(syncer.address, run=RUN, learner="a", initialise=True), None, 12)
    assert damaged_once
    assert "fetching the whole fragment" in caplog.text
    newest = newest_model(syncer.address, run=RUN).state_dict()
    assert metrics["versions"][0] == versions_of(syncer)[0] == 3
    assert torch.equal(state["layers.0.weight"], newest["layers.0.weight"])


def test_a_viewer_fetches_a_model_that_is_sent_with_its_outer_state(tmp_path: Path) -> None:
    delayed = diloco.DelayedDiLoCo(sync_every=4, fragments=method().fragments)
    with start(tmp_path, delayed) as syncer:
        state, _ = train(0, diloco.connect(syncer.address, run=RUN, learner="a", initialise=True), None, 8)
        newest = newest_model(syncer.address, run=RUN).state_dict()
        assert newest.keys() == state.keys()
        held = syncer.driver.ask(lambda it: [it.state.model.held(f).digest for f in range(2)])
        assert [digest(gather(fragment, newest)) for fragment in layout().fragments] == held


CALLS = {
    "Describe": "unary_unary", "Join": "unary_unary", "Heartbeat": "unary_unary", "Leave": "unary_unary",
    "Status": "unary_unary", "Pull": "unary_stream", "Watch": "unary_stream", "Initialise": "stream_stream",
    "Push": "stream_stream", "Probe": "stream_stream", "Lease": "unary_unary", "Deal": "unary_unary",
}  # fmt: skip
"""Every call of the service, and its shape."""


@pytest.mark.parametrize("name", CALLS)
def test_a_caller_is_known_before_its_bytes_are_parsed(name: str, tmp_path: Path) -> None:
    names: Any = [("a", "learner"), ("b", "learner")]
    keyring = Keyring.new(tmp_path / "keys", RUN, ["127.0.0.1"], names, dt.timedelta(days=1))
    garbage = b"\x0a\xff"  # a field of 127 bytes that ends after none

    def sent(channel: grpc.Channel) -> list[bytes]:
        stub = getattr(channel, CALLS[name])(rpc_path(name))
        request = iter([garbage]) if CALLS[name].startswith("stream") else garbage
        answer = stub(request, timeout=300)
        return list(answer if CALLS[name].endswith("stream") else [answer])

    def refusal(syncer: Syncer, name: str) -> errors.DilocoError:
        credentials = grpc.ssl_channel_credentials(held[name].ca, held[name].key, held[name].cert)
        with grpc.secure_channel(syncer.address, credentials) as channel, pytest.raises(grpc.RpcError) as caught:
            sent(channel)
        return from_rpc_error(caught.value, syncer.address)

    held = {name: read_key_pair(tmp_path / "keys" / name) for name in ("a", "b")}
    keyring.revoke("b")
    with start(tmp_path, method(), keys=tmp_path / "keys" / "syncer") as syncer:
        refused, undecodable = refusal(syncer, "b"), refusal(syncer, "a")
    assert isinstance(refused, errors.AuthError)
    assert "the certificate of 'b' was revoked" in str(refused)
    assert isinstance(undecodable, errors.CorruptPayloadError)
    assert "2 bytes are not a" in str(undecodable)


def test_the_bytes_of_a_tensor_keep_it_alive() -> None:
    tensor = torch.full((1000,), 3.0)
    alive = weakref.ref(tensor)
    view = bytes_of(tensor)
    del tensor
    assert alive() is not None
    del view
    assert alive() is None
