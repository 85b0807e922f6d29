"""Who gets into a run, with real certificates over real sockets: each refusal has a sentence of its own."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from tests.frames import frames
from tests.syncer.runs import RUN, Raw, is_initialised, layout, method, start, status_of, train
from tests.syncer.test_faults import until

import diloco
from diloco import errors, events
from diloco.cli import main
from diloco.event_log import read_events
from diloco.exchange.dialling import fetch_status
from diloco.exchange.probe import measure_link, probe
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import path
from diloco.exchange.wire.tensors import bytes_of
from diloco.following.follower import newest_model
from diloco.syncer.keys.certificates import holder_of
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Options, Syncer

DAY = dt.timedelta(days=1)
NAMES: list[tuple[str, Any]] = [("site-a", "learner"), ("site-b", "learner"), ("eye", "viewer"), ("me", "admin")]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    Keyring.new(tmp_path / "keys", RUN, ["127.0.0.1", "localhost"], NAMES, DAY)
    return tmp_path / "keys"


@pytest.fixture
def syncer(tmp_path: Path, keys: Path) -> Iterator[Syncer]:
    with start(tmp_path, method(), keys=keys / "syncer") as it:
        yield it


@pytest.fixture
def learner(syncer: Syncer, keys: Path) -> Iterator[Raw]:
    it = Raw(syncer.address, "site-a", keys=keys / "site-a")
    it.initialise()
    it.join()
    yield it
    it.connection.close()


def refused(it: Raw, kind: type[errors.DilocoError], words: str) -> None:
    try:
        with pytest.raises(kind, match=words) as caught:
            it.join()
    finally:
        it.connection.close()
    assert "\n" not in str(caught.value)


def audit(syncer: Syncer, kind: type[events.Event]) -> list[Any]:
    return [it for it in read_events(syncer._options.state_dir / "events.jsonl") if isinstance(it, kind)]


# --- let in


def test_learners_viewers_and_admins_get_in_by_their_certificates(syncer: Syncer, keys: Path) -> None:
    address = syncer.address
    state, _ = train(0, diloco.connect(address, run=RUN, keys=keys / "site-a", initialise=True), None, 8)
    for name in ("site-a", "eye", "me", "syncer"):
        assert fetch_status(address, run=RUN, keys=keys / name)["tokens"] == 40
    newest = newest_model(address, run=RUN, keys=keys / "eye").state_dict()
    assert torch.equal(newest["layers.0.weight"], state["layers.0.weight"])
    assert measure_link(address, run=RUN, learner="site-b", keys=keys / "site-b", seconds=0.01, repeats=1).num_bytes
    admin = Raw(address, "site-b", keys=keys / "me")
    admin.join()
    admin.connection.close()
    admitted = [(it.call, it.learner, it.name, it.role) for it in audit(syncer, events.Admitted)]
    assert admitted == [
        ("Initialise", "site-a", "site-a", "learner"), ("Join", "site-a", "site-a", "learner"),
        ("Join", "site-b", "me", "admin"),
    ]  # fmt: skip


def test_a_second_certificate_is_taken_while_the_syncer_runs(syncer: Syncer, keys: Path, learner: Raw) -> None:
    Keyring.read(keys).add("site-c", "learner", DAY)
    it = Raw(syncer.address, "site-c", keys=keys / "site-c")
    it.join()
    it.connection.close()


# --- refused


def test_no_certificate(syncer: Syncer, keys: Path) -> None:
    """TLS with the run's authority, and nothing shown: the connection ends before a call."""
    assert stranger_is_refused(syncer.address, keys)


def stranger_is_refused(address: str, keys: Path) -> bool:
    credentials = grpc.ssl_channel_credentials((keys / "ca.pem").read_bytes())
    with grpc.secure_channel(address, credentials) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(path("Describe"))(b"", timeout=300.0)
    return bool(caught.value.code() is grpc.StatusCode.UNAVAILABLE)


def test_plain_text_to_a_syncer_with_keys(syncer: Syncer) -> None:
    refused(Raw(syncer.address, "site-a"), errors.AuthError, "wants TLS, and no keys are given here")


def test_a_certificate_of_another_authority(syncer: Syncer, keys: Path, tmp_path: Path) -> None:
    Keyring.new(tmp_path / "other", RUN, ["127.0.0.1"], NAMES, DAY)
    for file in ("ca.pem", "cert.pem", "key.pem"):  # of a site that trusts the syncer all the same
        shutil.copy((keys if file == "ca.pem" else tmp_path / "other" / "site-a") / file, tmp_path / file)
    with pytest.raises(errors.ConfigError, match=r"cert.pem was not signed by the ca.pem beside it"):
        Raw(syncer.address, "site-a", keys=tmp_path)
    refused(
        Raw(syncer.address, "site-a", keys=tmp_path / "other" / "site-a"), errors.AuthError,
        "the certificate that the syncer at .* shows is not trusted",
    )  # fmt: skip


def test_a_certificate_that_the_syncer_cannot_verify(syncer: Syncer, keys: Path, tmp_path: Path) -> None:
    """A site whose file of authorities holds the syncer's beside its own."""
    Keyring.new(tmp_path / "other", RUN, ["127.0.0.1"], NAMES, DAY)
    site = tmp_path / "other" / "site-a"
    (site / "ca.pem").write_bytes((site / "ca.pem").read_bytes() + (keys / "ca.pem").read_bytes())
    refused(Raw(syncer.address, "site-a", keys=site), errors.AuthError, "refused the certificate in .*site-a")


def test_an_expired_certificate(syncer: Syncer, keys: Path, tmp_path: Path) -> None:
    Keyring.read(keys).add("late", "learner", dt.timedelta(seconds=-1))
    it = Raw(syncer.address, "late", keys=keys / "late")
    refused(it, errors.AuthError, r"late expired at .* UTC; `diloco keys rotate` makes a new one")


def test_a_certificate_that_ends_while_its_connection_is_open(
    syncer: Syncer, learner: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pb.WatchRequest(run=RUN, learner="site-a", incarnation=learner.incarnation)
    notices = learner.connection.watch("control", request)
    assert next(notices).HasField("welcome")
    monkeypatch.setattr(
        "diloco.syncer.keys.auth.datetime", SimpleNamespace(now=lambda zone: dt.datetime.now(zone) + 2 * DAY)
    )
    with pytest.raises(errors.UnreachableError, match="cancelled"):
        list(notices)
    with pytest.raises(
        errors.AuthError, match=r"the certificate of 'site-a' expired at .* UTC; ask the run's operator"
    ):
        learner.beat()


def _fails(call: Callable[[], Any], kind: type[errors.DilocoError], words: str) -> bool:
    try:
        call()
    except kind as error:
        return words in str(error)
    return False


def test_a_certificate_of_another_run(tmp_path: Path, keys: Path) -> None:
    with Syncer("other", method(), Options("127.0.0.1:0", tmp_path / "state", keys=keys / "syncer")) as syncer:
        it = Raw(syncer.address, "site-a", keys=keys / "site-a")
        refused(it, errors.AuthError, "is for run 'tiny' and this syncer serves 'other'")


def test_a_certificate_speaks_for_its_own_learner_only(syncer: Syncer, keys: Path, learner: Raw) -> None:
    for call in (
        Raw.join, Raw.initialise, Raw.beat, Raw.leave, lambda it: it.push(torch.zeros(160, dtype=torch.uint8)),
        lambda it: list(it.connection.watch("control", pb.WatchRequest(run=RUN, learner=it.name, incarnation=1))),
        lambda it: it.connection.pull("updates", pb.PullRequest(run=RUN, learner=it.name, base=-1)),
        lambda it: probe(it.connection, pb.ProbeHeader(run=RUN, learner=it.name)),
    ):  # fmt: skip
        it = Raw(syncer.address, "site-a", keys=keys / "site-b")
        with pytest.raises(errors.AuthError, match="'site-b' may speak for learner 'site-b' only, not for 'site-a'"):
            call(it)
        it.connection.close()
    assert list(status_of(syncer)["learners"]) == ["site-a"]


def test_a_stolen_key_is_one_learner_and_the_real_one_hears_of_it(syncer: Syncer, keys: Path, learner: Raw) -> None:
    thief = Raw(syncer.address, "site-a", keys=keys / "site-a")
    thief.join()
    with pytest.raises(errors.StaleIncarnationError):
        learner.beat()
    assert [it.reason for it in audit(syncer, events.Evicted)] == ["replaced by a newer incarnation"]
    with pytest.raises(errors.AlreadyInitialisedError):
        thief.initialise(2.0)
    thief.connection.close()


@pytest.mark.parametrize("name", ["eye", "syncer"])
def test_a_role_may_not_join(name: str, syncer: Syncer, keys: Path) -> None:
    role = {"eye": "viewer", "syncer": "standby"}[name]
    it = Raw(syncer.address, name, keys=keys / name)
    refused(it, errors.AuthError, f"'{name}' has the role '{role}' and this needs 'learner'")


def test_a_learners_certificate_is_not_taken_for_a_syncers(tmp_path: Path, keys: Path) -> None:
    with pytest.raises(errors.ConfigError, match="names no host; a syncer needs that of `diloco keys init`"):
        start(tmp_path, method(), keys=keys / "site-a")


def test_a_syncer_at_another_host_is_not_trusted(tmp_path: Path) -> None:
    Keyring.new(tmp_path / "keys", RUN, ["syncer.example.org"], NAMES, DAY)
    with start(tmp_path, method(), keys=tmp_path / "keys" / "syncer") as syncer:
        it = Raw(syncer.address, "site-a", keys=tmp_path / "keys" / "site-a")
        refused(
            it, errors.AuthError, "it does not name 127.0.0.1, but syncer.example.org; use an address that it names"
        )


def test_an_expired_syncer_neither_starts_nor_is_trusted(tmp_path: Path, keys: Path) -> None:
    with start(tmp_path, method(), keys=keys / "syncer") as syncer:
        Keyring.read(keys).rotate("syncer", dt.timedelta(seconds=-1), DAY)
        it = Raw(syncer.address, "site-a", keys=keys / "site-a")
        refused(it, errors.AuthError, "shows is not trusted: it expired on .* UTC; replace the syncer's")
    with pytest.raises(errors.AuthError, match=r"syncer expired at .* UTC; `diloco keys rotate` makes a new one"):
        start(tmp_path, method(), keys=keys / "syncer")


@pytest.mark.parametrize("name", ["site-a", "syncer"])
def test_a_key_that_others_may_read_is_refused(name: str, tmp_path: Path, keys: Path) -> None:
    (keys / name / "key.pem").chmod(0o644)

    def use() -> object:
        if name == "syncer":
            return start(tmp_path, method(), keys=keys / name)
        return diloco.connect("127.0.0.1:1", run=RUN, keys=keys / name)

    with pytest.raises(errors.ConfigError, match="key.pem is open to every user of this machine"):
        use()


def test_a_public_bind_without_keys_needs_an_option(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="has no keys"):
        Syncer(RUN, method(), Options("0.0.0.0:0", tmp_path / "state"))


def test_a_public_bind_with_keys_is_served(tmp_path: Path, keys: Path) -> None:
    with Syncer(RUN, method(), Options("0.0.0.0:0", tmp_path / "state", keys=keys / "syncer")) as syncer:
        it = Raw(f"127.0.0.1:{syncer.port}", "site-a", keys=keys / "site-a")
        it.initialise()
        it.connection.close()
        refused(Raw(f"localhost:{syncer.port}", "site-b", keys=keys / "site-a"), errors.AuthError, "'site-a' only")


# --- while it lasts


def push_that_stalls(it: Raw, started: threading.Event, over: threading.Event) -> Iterator[bytes]:
    """The header of a push and a part of its bytes; the rest when `over` is set."""
    header, *rest = frames(
        it.header(4 * layout().fragments[0].numel), bytes_of(torch.ones(layout().fragments[0].numel))
    )
    yield header
    started.set()
    over.wait(300)
    yield from rest


def test_revocation_ends_open_streams_and_connections(syncer: Syncer, keys: Path, learner: Raw) -> None:
    heard, ended = threading.Event(), dict[str, BaseException | None]()
    started, over = threading.Event(), threading.Event()

    def watch() -> None:
        request = pb.WatchRequest(run=RUN, learner="site-a", incarnation=learner.incarnation)
        for _ in learner.connection.watch("control", request):
            heard.set()

    def push() -> None:
        learner.push_frames(push_that_stalls(learner, started, over))

    def run(name: str, call: Callable[[], None]) -> None:
        try:
            call()
            ended[name] = None
        except errors.DilocoError as error:
            ended[name] = error

    threads = [threading.Thread(target=run, args=it) for it in (("watch", watch), ("push", push))]
    for thread in threads:
        thread.start()
    assert heard.wait(300)
    assert started.wait(300)
    Keyring.read(keys).revoke("site-a")
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    over.set()
    # a call ends with its connection, or hears the reason just before
    assert set(ended) == {"watch", "push"}
    assert {type(error) for error in ended.values()} <= {errors.UnreachableError, errors.AuthError}
    for call in (learner.join, learner.beat, learner.initialise):
        with pytest.raises(errors.AuthError, match="the certificate of 'site-a' was revoked"):
            call()
    until(lambda: status_of(syncer)["spooled_bytes"] == 0, "its push is kept")
    other = Raw(syncer.address, "site-b", keys=keys / "site-b")
    other.join()
    other.connection.close()
    calls = {(it.call, it.name) for it in audit(syncer, events.Refused)}
    assert len(calls) == 1  # and the rest is counted, until a minute has passed or the syncer ends
    assert calls < {("Watch", "site-a"), ("Push", "site-a")}


def test_a_learner_that_is_revoked_ends_with_the_reason(syncer: Syncer, keys: Path) -> None:
    def revoke(step: int) -> None:
        if step == 5:
            Keyring.read(keys).revoke("site-a")

    exchange = diloco.connect(syncer.address, run=RUN, learner="site-a", keys=keys / "site-a", initialise=True)
    with pytest.raises(errors.AuthError, match="the certificate of 'site-a' was revoked"):
        train(0, exchange, None, 10**9, revoke)


def test_new_keys_are_taken_up_without_a_restart(
    syncer: Syncer, keys: Path, tmp_path: Path, learner: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(keys / "site-b", tmp_path / "old")
    keyring = Keyring.read(keys)
    keyring.rotate("syncer", DAY, DAY)
    keyring.rotate("site-b", DAY, dt.timedelta())
    keyring.rotate("site-a", DAY, DAY)
    learner.beat()  # by the connection that is open
    until(lambda: not _fails(learner.beat, errors.UnreachableError, "dialling again"), "it is never let in")
    shown = ssl_certificate_of(syncer.address)
    assert shown.serial == keyring.issued[-3].serial
    assert keyring.issued[-3].name == "syncer"
    said = "\n".join(each.getMessage() for each in caplog.get_records("setup"))
    assert "the syncer's own certificate ends in 23 hours, at " in said
    assert "the certificate of 'site-a' ends in 23 hours, at " in said
    old, new = (Raw(syncer.address, "site-b", keys=path) for path in (tmp_path / "old", keys / "site-b"))
    with pytest.raises(errors.AuthError, match="the certificate of 'site-b' was revoked"):
        old.join()
    new.join()
    for each in (old, new):
        each.connection.close()


def test_the_authority_is_replaced_while_learners_train(
    syncer: Syncer, keys: Path, tmp_path: Path, learner: Raw
) -> None:
    """A learner that has copied its keys and one that has not are let in until it is finished; then the first alone."""
    shutil.copytree(keys / "site-b", tmp_path / "before")

    def joins(directory: Path) -> None:
        it = Raw(syncer.address, "site-b", keys=directory)
        it.join()
        it.connection.close()

    keyring = Keyring.read(keys)
    keyring.replace_authority(DAY)
    shutil.copytree(keys / "site-b", tmp_path / "between")
    for name in ("before", "between"):
        joins(tmp_path / name)
    first = ssl_certificate_of(syncer.address).serial
    keyring.retire_authority(DAY)
    for directory in (tmp_path / "between", keys / "site-b"):
        joins(directory)
    assert ssl_certificate_of(syncer.address).serial != first
    with pytest.raises(errors.AuthError, match="shows is not trusted"):
        joins(tmp_path / "before")


def ssl_certificate_of(address: str) -> Any:
    import ssl

    host, port = address.split(":")
    return holder_of(ssl.get_server_certificate((host, int(port))).encode())


def test_a_list_of_revoked_certificates_that_is_gone_lets_no_one_in(syncer: Syncer, keys: Path, learner: Raw) -> None:
    (keys / "syncer" / "revoked.toml").rename(keys / "put-aside")
    with pytest.raises(errors.UnreachableError, match="no caller can be admitted"):
        learner.beat()
    (keys / "put-aside").rename(keys / "syncer" / "revoked.toml")
    learner.beat()


def test_what_a_caller_cannot_mean_is_one_sentence(keys: Path) -> None:
    with pytest.raises(errors.ConfigError, match="keys and insecure contradict"):
        diloco.connect("127.0.0.1:1", run=RUN, keys=keys / "site-a", insecure=True)
    with pytest.raises(errors.ConfigError, match=r"10\.0\.0\.7:1 is on another machine and no keys are given"):
        diloco.connect("10.0.0.7:1", run=RUN)
    diloco.connect("10.0.0.7:1", run=RUN, insecure=True).close()


# --- unix sockets


def test_a_unix_socket_is_open_to_the_user_of_the_syncer(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    with Syncer(RUN, method(), Options(address, tmp_path / "state")) as syncer:
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) & 0o077 == 0
        assert syncer.address == address
        it = Raw(address, "site-a")
        it.initialise()
        it.join()
        assert is_initialised(syncer)
        it.connection.close()


def test_a_unix_socket_takes_no_keys(tmp_path: Path, keys: Path) -> None:
    with pytest.raises(errors.ConfigError, match="drop keys, or bind a port"):
        Syncer(RUN, method(), Options(f"unix:{tmp_path}/s", tmp_path / "state", keys=keys / "syncer"))


# --- processes


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Of a run that has its keys where its operator has made them."""
    path = tmp_path / "run.toml"
    fragments = '{type = "Named", patterns = [["layers.0.*"], ["layers.1.*"]]}'
    path.write_text(
        f"run = {{name = '{RUN}', tokens = 1_000_000, dir = '{tmp_path / 'run'}'}}\n"
        f"[method]\npreset = 'StreamingDiLoCo'\nsync_every = 4\noverlap = 1\nmix = 0.0\nfragments = {fragments}\n"
        f"quorum = {{type = 'AllLive', at_least = 1}}\ncodec = 'fp32'\n"
    )
    return path


def test_a_syncer_opens_no_port_to_strangers_unless_it_is_told(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["syncer", str(run_file), "--address", "0.0.0.0:0"])
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "has no keys; make them with `diloco keys init`" in err


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["more"], 2, "unexpected argument 'more'; subcommands come first: diloco syncer check STORE"),
    (["--no-page", "check", "state"], 2, "unexpected argument 'check'"),
    (["--page-port", "70000"], 2, "less than or equal to"), (["--metrics-port", "-1"], 2, "greater than or equal to"),
    (["--address", "unix:/none/s"], 2, "cannot be served at unix:/none/s (there is no directory /none); choose"),
    (["--state-dir", "run.toml"], 1, "run.toml is a file; name a directory"),
])  # fmt: skip
def test_arguments_that_cannot_be_used(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str],
    code: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(run_file.parent)
    (run_file.parent / "run.toml").write_text(run_file.read_text())
    with pytest.raises(SystemExit) as ended:
        main(["syncer", str(run_file), *arguments])
    assert ended.value.code == code
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_syncer_process_with_keys(
    run_file: Path, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine's view of it: a learner, and the commands that look at the run."""
    port_file, log = tmp_path / "port", tmp_path / "log"
    command = [sys.executable, "-m", "diloco", "syncer", str(run_file), "--address", "0.0.0.0:0"]
    with (
        log.open("wb") as err,
        subprocess.Popen(
            [*command, "--keys", str(keys / "syncer"), "--port-file", str(port_file)], stderr=err
        ) as process,
    ):
        try:
            until(lambda: port_file.exists() or process.poll() is not None, "it does not start")
            address = f"127.0.0.1:{port_file.read_text()}"
            state, _ = train(
                0, diloco.connect(address, run=RUN, learner="site-a", keys=keys / "site-a", initialise=True), None, 8
            )
            asked = ["status", str(run_file), "--address", address, "--keys", str(keys / "eye"), "--json"]
            with pytest.raises(SystemExit):
                main(asked)
            assert json.loads(capsys.readouterr().out)["tokens"] == 40
            assert state.keys() == newest_model(address, run=RUN, keys=keys / "me").state_dict().keys()
            refused(Raw(address, "site-b", keys=keys / "site-a"), errors.AuthError, "'site-a' only")
            assert stranger_is_refused(address, keys)
            Keyring.read(keys).revoke("site-a")
            refused(Raw(address, "site-a", keys=keys / "site-b"), errors.AuthError, "'site-b' only")
            with pytest.raises(errors.ConfigError, match="cannot read the key"):
                Raw(address, "site-a", keys=keys / "site-a")
        finally:
            process.terminate()
    assert process.returncode == 0
    refusals = [line.split(" WARNING ")[1] for line in log.read_text().splitlines() if " WARNING refused" in line]
    assert [each.split(" at ")[0] for each in refusals] == ["refused Join of site-a", "refused Join of site-b"]
    # Strangers write nothing.


# --- ids

BAD_IDS = ["", "../x", "[/x]", "x" * 300, "a\nb", "a\x1b[2J", "a b", ".a", "é", "a\u202eb", "<script>"]


@pytest.mark.parametrize("name", BAD_IDS, ids=[f"id{index}" for index in range(len(BAD_IDS))])
def test_a_learner_id_is_checked_at_every_door(name: str, tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        good = Raw(syncer.address, "good")
        good.initialise()
        good.join()
        it = Raw(syncer.address, name)
        doors: dict[str, Callable[[], Any]] = {
            "initialise": it.initialise, "join": it.join, "heartbeat": it.beat, "leave": it.leave,
            "push": lambda: it.push(torch.zeros(160, dtype=torch.uint8)),
            "watch": lambda: list(it.connection.watch("control", pb.WatchRequest(run=RUN, learner=name))),
            "lease": lambda: it.connection.call(
                "control", "Lease", pb.LeaseRequest(run=RUN, learner=name), pb.LeaseReply
            ),
            "probe": lambda: probe(it.connection, pb.ProbeHeader(run=RUN, learner=name)),
        }  # fmt: skip
        if name:  # without a learner it is a viewer's
            doors["pull"] = lambda: it.connection.pull("updates", pb.PullRequest(run=RUN, learner=name, base=-1))
        for door, call in doors.items():
            with pytest.raises(errors.PayloadError, match="a learner cannot be called") as caught:
                call()
            assert str(caught.value).isprintable(), door
        assert list(status_of(syncer)["learners"]) == ["good"]
        assert all(it.learner == "good" for it in audit(syncer, events.Joined))
        it.connection.close()
        good.connection.close()
