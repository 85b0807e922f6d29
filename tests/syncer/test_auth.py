"""Roles, secrets in files, certificates and bindings."""

from __future__ import annotations

import datetime as dt
import errno
import os
import resource
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from diloco.errors import AuthError, ConfigError, UnreachableError
from diloco.exchange.key_pair import hosts_of
from diloco.exchange.wire.address import is_loopback, split_address
from diloco.syncer.keys.auth import REVOKED, Authenticator, Revoked, check_binding, write_revoked
from diloco.syncer.keys.certificates import Authority, Caller, Role, holder_of
from diloco.whole_files import read_secret, replace_secret, write_secret

# roles


@pytest.mark.parametrize(
    ("held", "needed", "allowed"),
    [
        ("viewer", "viewer", True),
        ("viewer", "learner", False),
        ("viewer", "admin", False),
        ("viewer", "standby", False),
        ("learner", "standby", False),
        ("standby", "viewer", True),
        ("standby", "learner", False),
        ("standby", "admin", False),
        ("admin", "standby", True),
        ("learner", "viewer", True),
        ("learner", "learner", True),
        ("learner", "admin", False),
        ("admin", "viewer", True),
        ("admin", "learner", True),
        ("admin", "admin", True),
    ],
)
def test_each_role_may_do_its_own(held: Role, needed: Role, allowed: bool) -> None:
    caller = Caller(f"the-{held}", held)
    if allowed:
        caller.may(needed)
    else:
        with pytest.raises(AuthError, match=f"'the-{held}' has the role '{held}' and this needs '{needed}'"):
            caller.may(needed)


def test_a_learner_speaks_for_itself_and_an_admin_for_any() -> None:
    Caller("site-a", "learner", "site-a").may("learner", "site-a")
    Caller("me", "admin").may("learner", "site-b")
    with pytest.raises(AuthError, match="'site-a' only, not for 'site-b'"):
        Caller("site-a", "learner", "site-a").may("learner", "site-b")


# the list of revoked certificates


@pytest.mark.parametrize("how", ["gone", "garbled"])
def test_a_list_that_becomes_unreadable_admits_no_caller(tmp_path: Path, how: str) -> None:
    path, caller = tmp_path / REVOKED, Caller("site-a", "learner", "site-a", "3f21")
    write_revoked(path, ())
    holders = Authenticator("demo", keys=tmp_path)
    holders.check(caller)
    write_revoked(path, (Revoked(serial="3f21", name="site-a", at=dt.datetime.now(dt.UTC)),))
    with pytest.raises(AuthError, match="the certificate of 'site-a' was revoked"):
        holders.check(caller)
    good = path.read_bytes()
    path.unlink()
    if how == "garbled":
        path.write_text('[[revoked]]\nserial = "3f')
    for _ in range(2):
        with pytest.raises(UnreachableError, match="no caller can be admitted"):
            holders.check(Caller("site-b", "learner", "site-b", "77"))
    path.write_bytes(good)
    holders.check(Caller("site-b", "learner", "site-b", "77"))


# secrets in files


def test_secrets_are_never_readable_by_others_nor_overwritten(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_secret(tmp_path / "server.key", b"key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_secret(tmp_path / "server.key", b"other")
    assert read_secret(tmp_path / "server.key", "key") == b"key"


def test_a_disk_that_refuses_leaves_no_part_of_a_secret(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, before[1]))
    try:
        for write in (write_secret, replace_secret):
            with pytest.raises(OSError, match="File too large"):
                write(tmp_path / "server.key", b"key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    write_secret(tmp_path / "server.key", b"key")
    assert [each.name for each in tmp_path.iterdir()] == ["server.key"]


def test_a_secret_is_written_once_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refuses)
    write_secret(tmp_path / "key.pem", b"key")
    with pytest.raises(FileExistsError):
        write_secret(tmp_path / "key.pem", b"other")
    assert read_secret(tmp_path / "key.pem", "key") == b"key"
    assert [each.name for each in tmp_path.iterdir()] == ["key.pem"]


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601])
def test_a_secret_that_others_may_read_is_refused_where_it_is_used(tmp_path: Path, mode: int) -> None:
    write_secret(tmp_path / "key.pem", b"key")
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(ConfigError, match=f"open to every user of this machine .mode 0{mode:o}.; run chmod 600"):
        read_secret(tmp_path / "key.pem", "key")
    (tmp_path / "key.pem").chmod(0o640)  # a group may be let in
    assert read_secret(tmp_path / "key.pem", "key") == b"key"


# certificates

DAY = dt.timedelta(days=1)


def test_a_certificate_names_its_holder_and_its_hosts_and_cannot_sign_others() -> None:
    authority = Authority.new("demo/é")
    hosts = ["syncer.example.org", "10.0.0.7", "fd00::7", "bücher.example"]
    signed = authority.sign("demo/é", "standby", "syncer", hosts=hosts, lifetime=30 * DAY)
    cert, ca = (x509.load_pem_x509_certificate(text) for text in (signed.cert, authority.cert))
    assert hosts_of(signed.cert) == ["syncer.example.org", "10.0.0.7", "fd00::7", "xn--bcher-kva.example"]
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["diloco:demo%2F%C3%A9/standby/syncer"]
    assert holder_of(signed.cert) == signed.holder
    assert (signed.holder.run, signed.holder.role, signed.holder.name) == ("demo/é", "standby", "syncer")
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(
        ca=True, path_length=0
    )
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    cert.verify_directly_issued_by(ca)
    valid_for = cert.not_valid_after_utc - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=29, hours=23) < valid_for <= dt.timedelta(days=30)


def test_a_learners_certificate_cannot_serve() -> None:
    signed = Authority.new("demo").sign("demo", "learner", "site-a", lifetime=DAY)
    uses = x509.load_pem_x509_certificate(signed.cert).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert hosts_of(signed.cert) == []


@pytest.mark.parametrize("host", ["", "host:7700", "[::1]", "a b", "a..b", "http://syncer"])
def test_a_host_that_cannot_be_dialled_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="without a port"):
        Authority.new("demo").sign("demo", "standby", "syncer", hosts=[host], lifetime=DAY)


# bindings


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:7700", ("127.0.0.1", 7700)),
        ("[::1]:0", ("::1", 0)),
        (":7700", ("", 7700)),
        ("syncer.example.org:1", ("syncer.example.org", 1)),
    ],
)
def test_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", "localhost:port", "::1:7700", "localhost:70000", "[::1]", "host:-1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write host:port"):
        split_address(address)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("LOCALHOST", True),
     ("::ffff:127.0.0.1", True),
     ("0.0.0.0", False), ("::", False), ("", False), ("10.0.0.1", False), ("localhost.example.org", False),
     ("127.0.0.1.example.org", False)],
)  # fmt: skip
def test_loopback_is_this_machine_only(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("address", ["0.0.0.0:7700", "[::]:7700", ":7700", "10.0.0.7:7700", "syncer.example.org:7700"])
def test_a_port_that_others_reach_has_keys_or_is_opened_on_purpose(address: str) -> None:
    check_binding(address, keys=True, insecure=False)
    check_binding(address, keys=False, insecure=True)
    with pytest.raises(ConfigError, match=r"has no keys;.*--insecure"):
        check_binding(address, keys=False, insecure=False)


@pytest.mark.parametrize("address", ["127.0.0.1:7700", "localhost:0", "[::1]:7700", "unix:/run/diloco.sock"])
def test_a_port_that_only_this_machine_reaches_needs_neither(address: str) -> None:
    check_binding(address, keys=False, insecure=False)


@pytest.mark.parametrize(
    ("address", "words"), [("unix:run.sock", "no absolute path"), ("unix-abstract:x", "is not an address")]
)
def test_a_socket_without_a_path_is_refused(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_binding(address, keys=False, insecure=False)
