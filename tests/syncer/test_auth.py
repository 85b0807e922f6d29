"""Tokens, certificates and bindings, against real files and a real TLS server."""

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

from diloco.cli import main
from diloco.errors import AuthError, ConfigError, UnreachableError
from diloco.exchange.key_pair import hosts_of
from diloco.exchange.wire.address import is_loopback, split_address
from diloco.secret_files import read_secret, replace_secret, write_secret
from diloco.syncer.auth import check_binding
from diloco.syncer.callers import ROLES, Caller, Role
from diloco.syncer.certificates import Authority, holder_of
from diloco.syncer.tokens import BearerTokens, TokenEntry, new_token, read_tokens, token_sha256, write_tokens

TOKENS: dict[Role, str] = {role: new_token() for role in ROLES}


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    bound = {"learner": "site-a"}
    write_tokens(
        path, [TokenEntry(f"the-{role}", role, token_sha256(t), bound.get(role)) for role, t in TOKENS.items()]
    )
    return path


# tokens and roles


@pytest.mark.parametrize(
    ("held", "needed", "allowed"),
    [
        ("viewer", "viewer", True),
        ("viewer", "learner", False),
        ("viewer", "admin", False),
        ("viewer", "standby", False),
        ("learner", "standby", False),
        ("standby", "viewer", True),
        ("standby", "standby", True),
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
def test_each_role_may_do_its_own(tokens_file: Path, held: Role, needed: Role, allowed: bool) -> None:
    tokens = BearerTokens(tokens_file)
    if allowed:
        tokens.owner(TOKENS[held]).may(needed)
    else:
        with pytest.raises(AuthError, match=f"'the-{held}' has the role '{held}' and this needs '{needed}'"):
            tokens.owner(TOKENS[held]).may(needed)


@pytest.mark.parametrize(
    ("token", "reason"),
    [("", "no token"), ("diloco_guess", "not one of"), ("é\ud800", "not one of")],
)
def test_a_wrong_token_lets_nobody_in_and_is_not_repeated(tokens_file: Path, token: str, reason: str) -> None:
    with pytest.raises(AuthError, match=reason) as caught:
        BearerTokens(tokens_file).owner(token)
    assert not token or token not in str(caught.value)


def test_a_bound_token_speaks_for_its_learner_only(tokens_file: Path) -> None:
    tokens = BearerTokens(tokens_file)
    tokens.owner(TOKENS["learner"]).may("learner", "site-a")
    tokens.owner(TOKENS["admin"]).may("learner", "site-b")
    with pytest.raises(AuthError, match="'site-a' only, not for 'site-b'"):
        tokens.owner(TOKENS["learner"]).may("learner", "site-b")


def test_the_file_holds_no_secret_and_is_its_owners(tokens_file: Path) -> None:
    text = tokens_file.read_text()
    assert not any(token in text for token in TOKENS.values())
    assert stat.S_IMODE(tokens_file.stat().st_mode) == 0o600


def test_tokens_are_long_random_and_distinct() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 40


def test_revoking_and_adding_need_no_restart(tokens_file: Path) -> None:
    tokens = BearerTokens(tokens_file)
    entries = read_tokens(tokens_file)
    fresh = new_token()
    write_tokens(tokens_file, [entries["the-admin"], TokenEntry("later", "viewer", token_sha256(fresh))])
    assert tokens.owner(fresh) == Caller("later", "viewer", key=token_sha256(fresh))
    with pytest.raises(AuthError, match="not one of"):
        tokens.owner(TOKENS["learner"])


def test_a_token_ends_and_one_that_is_in_use_is_looked_at_again(tokens_file: Path) -> None:
    entries, fresh, old = read_tokens(tokens_file), new_token(), new_token()
    now = dt.datetime.now(dt.UTC)
    ends = [TokenEntry("fresh", "viewer", token_sha256(fresh), expires=now + DAY),
            TokenEntry("old", "viewer", token_sha256(old), expires=now - DAY)]  # fmt: skip
    write_tokens(tokens_file, [entries["the-admin"], *ends])
    tokens = BearerTokens(tokens_file)
    with pytest.raises(AuthError, match=r"the token of 'old' expired at .* UTC; ask"):
        tokens.check(tokens.owner(old))
    caller = tokens.owner(fresh)
    tokens.check(caller)
    rotated = {"sha256": token_sha256(new_token()), "old_sha256": token_sha256(fresh)}
    write_tokens(tokens_file, [entries["the-admin"], TokenEntry("fresh", "viewer", **rotated, old_expires=now + DAY)])
    tokens.check(caller)
    write_tokens(tokens_file, [entries["the-admin"], TokenEntry("fresh", "viewer", **rotated, old_expires=now)])
    with pytest.raises(AuthError, match="'fresh' expired"):
        tokens.check(caller)  # it came before the rotation, and its grace is over
    write_tokens(tokens_file, [entries["the-admin"]])
    with pytest.raises(AuthError, match="the token of 'fresh' was revoked"):
        tokens.check(caller)


@pytest.mark.parametrize("how", ["gone", "garbled"])
def test_a_file_that_becomes_unreadable_lets_nobody_in(tokens_file: Path, how: str) -> None:
    tokens = BearerTokens(tokens_file)
    good = tokens_file.read_bytes()
    tokens_file.unlink()
    if how == "garbled":
        tokens_file.write_text('["the-admin"]\nrole = "adm')
    for _ in range(2):
        with pytest.raises(UnreachableError, match="no caller can be admitted"):
            tokens.owner(TOKENS["admin"])
    tokens_file.write_bytes(good)
    assert tokens.owner(TOKENS["admin"]).name == "the-admin"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no token"),
        ("=", "cannot be read"),
        ("\xff", "cannot be read"),
        ("name = 3", "is not a token"),
        ('[a]\nrole = "viewer"\nsha256 = "0"\nrule = "x"', "is not a token"),
        ('[a]\nrole = "viewer"', "no sha256"),
        (f'[a]\nsha256 = "{"0" * 64}"', "no role"),
        (f'[a]\nrole = "root"\nsha256 = "{"0" * 64}"', "role 'root'; use one of viewer, learner, standby, admin"),
        ('[a]\nrole = "viewer"\nsha256 = "secret"', "not 64 hexadecimal digits"),
        (f'[a]\nrole = "viewer"\nsha256 = "{"0" * 64}"\nexpires = "soon"', "is not a token"),
        (f'[a]\nrole = "viewer"\nsha256 = "{"0" * 64}"\nexpires = 2027-01-01T00:00:00', "no time zone"),
        (f'["a b"]\nrole = "viewer"\nsha256 = "{"0" * 64}"', "'a b' is no name"),
        (f'[a]\nrole = "learner"\nsha256 = "{"0" * 64}"\nlearner = "../b"', "'../b' is no name"),
    ],
)
def test_a_tokens_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=reason):
        BearerTokens(path)


def test_a_missing_tokens_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        BearerTokens(tmp_path / "tokens.toml")


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


def test_a_token_file_without_its_hash_is_made_anew(tmp_path: Path) -> None:
    """As the full disk leaves it that took the secret and not the list."""
    (tmp_path / "site-a").mkdir()
    (tmp_path / "site-a" / "token").write_text("half")
    with pytest.raises(SystemExit):
        main(["keys", "add", "learner", "site-a", "--token", "--dir", str(tmp_path)])
    token = read_secret(tmp_path / "site-a" / "token", "token").decode().strip()
    assert read_tokens(tmp_path / "syncer" / "tokens.toml")["site-a"].sha256 == token_sha256(token)
    assert (tmp_path / "site-a" / "token.before").read_text() == "half"  # it may be of another syncer


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
def test_a_port_that_others_reach_asks_for_client_certificates_or_is_opened_on_purpose(address: str) -> None:
    check_binding(address, keys=True, client_certificates=True, tokens=False, insecure=False)
    check_binding(address, keys=True, client_certificates=False, tokens=True, insecure=False)
    check_binding(address, keys=False, client_certificates=False, tokens=False, insecure=True)
    for tokens in (False, True):
        with pytest.raises(ConfigError, match=r"has no keys;.*--insecure"):
            check_binding(address, keys=False, client_certificates=False, tokens=tokens, insecure=False)
    with pytest.raises(ConfigError, match="would admit every caller"):
        check_binding(address, keys=True, client_certificates=False, tokens=False, insecure=False)


@pytest.mark.parametrize("address", ["127.0.0.1:7700", "localhost:0", "[::1]:7700", "unix:/run/diloco.sock"])
def test_a_port_that_only_this_machine_reaches_needs_neither(address: str) -> None:
    check_binding(address, keys=False, client_certificates=False, tokens=False, insecure=False)


@pytest.mark.parametrize(
    ("address", "words"), [("unix:run.sock", "no absolute path"), ("unix-abstract:x", "is not an address")]
)
def test_a_socket_without_a_path_is_refused(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_binding(address, keys=False, client_certificates=False, tokens=False, insecure=False)
