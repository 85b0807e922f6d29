"""A real HAProxy with the configuration of `templates/haproxy` in front of a real syncer: learners train through it,
and floods are kept off."""

from __future__ import annotations

import datetime as dt
import os
import random
import re
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, cast

import pytest
from benchmarks import haproxy
from benchmarks.haproxy import Proxy
from benchmarks.processes import SyncerProcess, run_file, until
from cryptography import x509
from tests.syncer.runs import train

import diloco
from diloco.event_log import read_events
from diloco.events import Admitted
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.syncer.keys.keyring import Keyring

RUN = "besieged"
NAMES = ("site-a", "site-b")
HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(32)
"""The beginning of a ClientHello of 200 bytes."""

STRANGER, FLOODER = "127.0.0.2", "127.0.0.3"
SOON = {"inspect-delay 5s": "inspect-delay 500ms"}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _haproxy() -> None:
    if haproxy.program() is None:
        lacks = "HAProxy is not installed (apt-get install haproxy)"
        if os.environ.get("CI"):
            pytest.fail(lacks)
        pytest.skip(lacks)


def served_with(keys: Path) -> str:
    """The run file of a syncer with these keys."""
    return run_file(RUN, syncer={"keys": str(keys)}, preset="DiLoCo", sync_every=4)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys") / "keys"
    names: list[tuple[str, Any]] = [(name, "learner") for name in NAMES]
    Keyring.new(directory, RUN, ["127.0.0.1"], [*names, ("standby", "standby")], dt.timedelta(days=1))
    return directory


@pytest.fixture(scope="module")
def syncer(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[SyncerProcess]:
    it = SyncerProcess(tmp_path_factory.mktemp("syncer"), served_with(keys / "syncer"))
    with Training(it.address, keys, "site-a", initialise=True) as learner:
        learner.goes_on()
    yield it
    it.kill()


class _OverError(Exception):
    """Ends a learner."""


class Training:
    """A learner in a thread; a context manager that ends it."""

    def __init__(self, address: str, keys: Path, name: str, *, initialise: bool = False) -> None:
        self._dialled = address, keys / name, name, initialise
        self.versions = 0
        self._is_over = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        address, keys, name, initialise = self._dialled

        def at_step(step: int) -> None:
            self.versions = step // 4  # each fourth waits for a version
            if self._is_over.is_set():
                raise _OverError

        try:
            with suppress(_OverError):
                exchange = diloco.connect(address, run=RUN, learner=name, keys=keys, initialise=initialise)
                train(NAMES.index(name), exchange, None, 1 << 40, at_step)
        except Exception as error:  # noqa: BLE001 - told by the test's own thread
            self._failure = error

    def goes_on(self) -> None:
        """Wait for two more versions: one of them begins and ends from here on."""
        before = self.versions

        def goes_on() -> bool:
            if self._failure is not None:
                raise self._failure
            return self.versions >= before + 2

        until(goes_on, "the learner does not train")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def training(proxy: Proxy, keys: Path) -> Iterator[Training]:
    """A learner that trains through the proxy."""
    with Training(proxy.address, keys, "site-a") as learner:
        learner.goes_on()
        yield learner


def dial(address: str, source: str, says: bytes = b"") -> socket.socket:
    host, _, port = address.rpartition(":")
    it = socket.socket()
    it.settimeout(30)
    it.bind((source, 0))
    with suppress(ConnectionError):  # it is refused at once
        it.connect((host, int(port)))
        it.sendall(says)
    return it


def is_open(it: socket.socket) -> bool:
    it.setblocking(False)
    try:
        return bool(it.recv(1 << 16))
    except BlockingIOError:
        return True
    except OSError:
        return False


def all_ended(floods: Sequence[socket.socket]) -> Callable[[], bool]:
    return lambda: not any(map(is_open, floods))


def num_passed(proxy: Proxy) -> int:
    """Connections that reached the syncer."""
    return int(proxy.statistics("syncer", "syncer")["stot"])


def num_heard(proxy: Proxy) -> int:
    """Connections that were refused for what they said, or said nothing of."""
    return int(proxy.statistics("learners", "FRONTEND")["dreq"])


def test_a_learner_trains_through_it_and_the_log_tells_its_address(
    tmp_path: Path, syncer: SyncerProcess, keys: Path
) -> None:
    def admitted() -> list[Admitted]:
        events = read_events(syncer.directory / "state" / "events.jsonl")
        return [event for event in events if isinstance(event, Admitted)]

    num_before = len(admitted())
    with Proxy(tmp_path / "proxy", syncer.address) as proxy, training(proxy, keys):
        joined = admitted()[num_before:]
        assert "Join" in {it.call for it in joined}
        for it in joined:  # what the syncer has of it is the proxy's address, and the proxy's log has both
            peer = re.escape(it.peer.removeprefix("ipv4:"))
            assert re.search(rf"^127\.0\.0\.1:\d+ is {peer} at syncer/syncer, ", proxy.log(), re.MULTILINE)


def test_a_sender_without_a_hello_never_reaches_the_syncer(tmp_path: Path, syncer: SyncerProcess, keys: Path) -> None:
    with Proxy(tmp_path / "proxy", syncer.address, changed=SOON) as proxy, training(proxy, keys) as learner:
        says = (b"", HELLO, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", random.randbytes(400))
        with ExitStack() as stack:
            floods = [stack.enter_context(dial(proxy.address, STRANGER, each)) for each in says for _ in range(15)]
            learner.goes_on()
            until(all_ended(floods), "strangers stay")
        learner.goes_on()
        assert num_heard(proxy) == len(floods)  # all of them were refused
        assert STRANGER not in proxy.log()


def test_hellos_beyond_what_the_syncer_takes_are_refused(tmp_path: Path, syncer: SyncerProcess, keys: Path) -> None:
    changed = {"be_sess_rate(syncer) gt 200": "be_sess_rate(syncer) gt 20"}
    with Proxy(tmp_path / "proxy", syncer.address, changed=changed) as proxy, training(proxy, keys) as learner:
        answers, hello = ssl.MemoryBIO(), ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            ssl.create_default_context().wrap_bio(answers, hello, server_hostname="a.example.org").do_handshake()
        says = hello.read()
        with ExitStack() as stack:

            def is_refused() -> bool:
                for number in range(100):
                    stack.enter_context(dial(proxy.address, f"127.0.2.{number + 1}", says))
                return num_heard(proxy) > 0

            until(is_refused, "all are taken")
            learner.goes_on()
        assert num_passed(proxy) > 20


def test_one_source_has_its_share_and_a_learner_joins_beside_it(
    tmp_path: Path, syncer: SyncerProcess, keys: Path
) -> None:
    changed = {"inspect-delay 5s": "inspect-delay 10m"}
    with Proxy(tmp_path / "proxy", syncer.address, changed=changed) as proxy, training(proxy, keys) as learner:
        with ExitStack() as stack:
            floods = [stack.enter_context(dial(proxy.address, FLOODER)) for _ in range(150)]
            until(lambda: sum(map(is_open, floods)) == 100, "not 100 of one source are open")
            with Training(proxy.address, keys, "site-b") as other:
                other.goes_on()
                learner.goes_on()
            assert sum(map(is_open, floods)) == 100


def test_a_source_over_its_rate_is_refused_and_served_again(tmp_path: Path, syncer: SyncerProcess, keys: Path) -> None:
    changed = {**SOON, "sess_rate gt 200": "sess_rate gt 20", "sess_rate(10s)": "sess_rate(2s)"}
    with Proxy(tmp_path / "proxy", syncer.address, changed=changed) as proxy, training(proxy, keys) as learner:

        def num_taken(source: str, number: int) -> int:
            """How many of so many are heard out; the others are refused before they can say anything."""
            before = num_heard(proxy)
            with ExitStack() as stack:
                dialled = [stack.enter_context(dial(proxy.address, source, b"GET / HTTP/1.1")) for _ in range(number)]
                until(all_ended(dialled), "they stay")
            return num_heard(proxy) - before

        until(lambda: num_taken(FLOODER, 60) < 60, "no rate is too high")
        assert num_taken(STRANGER, 1) == 1
        until(lambda: num_taken(FLOODER, 1) == 1, "a source that goes on dialling is shut out")
        learner.goes_on()


def test_learners_that_are_connected_go_on_where_no_connection_is_left(
    tmp_path: Path, syncer: SyncerProcess, keys: Path
) -> None:
    changed = {"inspect-delay 5s": "inspect-delay 2s", "maxconn 8000": "maxconn 40"}
    with Proxy(tmp_path / "proxy", syncer.address, changed=changed) as proxy, training(proxy, keys) as learner:
        with ExitStack() as stack:
            for number in range(100):
                stack.enter_context(dial(proxy.address, f"127.0.1.{number + 1}"))
            until(lambda: proxy.statistics("learners", "FRONTEND")["scur"] == "40", "there is room for more")
            learner.goes_on()
            with Training(proxy.address, keys, "site-b") as other:  # it waits its turn
                other.goes_on()


def test_a_syncer_that_hangs_is_down_and_one_that_comes_back_is_up(
    tmp_path: Path, syncer: SyncerProcess, keys: Path
) -> None:
    changed = {"inter 5s": "inter 200ms"}
    with Proxy(tmp_path / "proxy", syncer.address, changed=changed) as proxy, training(proxy, keys) as learner:

        def status_is(status: str) -> Callable[[], bool]:
            return lambda: proxy.statistics("syncer", "syncer")["status"].startswith(status)

        os.kill(syncer.pid, signal.SIGSTOP)
        try:
            until(status_is("DOWN"), "a syncer that hangs counts as up")
        finally:
            os.kill(syncer.pid, signal.SIGCONT)
        until(status_is("UP"), "it stays down")
        learner.goes_on()
        syncer.kill()
        until(status_is("DOWN"), "a syncer that was killed counts as up")
        syncer.start()
        learner.goes_on()


def test_a_connection_that_was_idle_for_too_long_is_dialled_anew(
    tmp_path: Path, syncer: SyncerProcess, keys: Path
) -> None:
    changed = {"timeout tunnel 1h": "timeout tunnel 500ms"}
    with Proxy(tmp_path / "proxy", syncer.address, changed=changed) as proxy:
        connection = Connection(proxy.address, keys=keys / "site-a")
        for number in (1, 2):
            assert connection.call("updates", "Status", pb.StatusRequest(run=RUN), pb.StatusReply).status
            assert num_passed(proxy) == number
            until(lambda: proxy.statistics("learners", "FRONTEND")["scur"] == "0", "it stays")
        connection.close()


def test_a_standby_is_reached_by_its_name(tmp_path: Path, syncer: SyncerProcess, keys: Path) -> None:
    (tmp_path / "standby").mkdir()
    second = SyncerProcess(tmp_path / "standby", served_with(keys / "standby"))
    try:
        with Proxy(tmp_path / "proxy", syncer.address, standby=second.address) as proxy:
            for name, directory in (("a.example.org", "syncer"), ("b.example.org", "standby")):
                shown = x509.load_pem_x509_certificate((keys / directory / "cert.pem").read_bytes())
                assert certificate_at(proxy.address, name) == shown
    finally:
        second.kill()


def certificate_at(address: str, name: str) -> x509.Certificate:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with dial(address, STRANGER) as plain, context.wrap_socket(plain, server_hostname=name) as it:
        return x509.load_der_x509_certificate(cast("bytes", it.getpeercert(binary_form=True)))
