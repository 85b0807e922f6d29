"""Tokens, certificates and bindings, against real files and a real TLS server."""

from __future__ import annotations

import datetime as dt
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from diloco.errors import AuthError, ConfigError
from diloco.exchange.wire.address import is_loopback, split_address
from diloco.syncer.auth import (
    Authenticator,
    Caller,
    Role,
    TokenEntry,
    check_binding,
    new_token,
    read_tokens,
    token_sha256,
    write_secret,
    write_tokens,
)
from diloco.syncer.certificates import make_certificates

TOKENS: dict[Role, str] = {"viewer": new_token(), "learner": new_token(), "admin": new_token()}


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
        ("learner", "viewer", True),
        ("learner", "learner", True),
        ("learner", "admin", False),
        ("admin", "viewer", True),
        ("admin", "learner", True),
        ("admin", "admin", True),
    ],
)
def test_each_role_may_do_its_own(tokens_file: Path, held: Role, needed: Role, allowed: bool) -> None:
    authenticator = Authenticator(tokens_file)
    if allowed:
        authenticator.bearer(TOKENS[held]).may(needed)
    else:
        with pytest.raises(AuthError, match=f"'the-{held}' has the role '{held}' and this needs '{needed}'"):
            authenticator.bearer(TOKENS[held]).may(needed)


@pytest.mark.parametrize(
    ("token", "reason"),
    [("", "no token"), ("diloco_guess", "not one of"), ("é\ud800", "not one of")],
)
def test_a_wrong_token_lets_nobody_in_and_is_not_repeated(tokens_file: Path, token: str, reason: str) -> None:
    with pytest.raises(AuthError, match=reason) as caught:
        Authenticator(tokens_file).bearer(token)
    assert not token or token not in str(caught.value)


def test_a_bound_token_speaks_for_its_learner_only(tokens_file: Path) -> None:
    authenticator = Authenticator(tokens_file)
    authenticator.bearer(TOKENS["learner"]).may("learner", "site-a")
    authenticator.bearer(TOKENS["admin"]).may("learner", "site-b")
    with pytest.raises(AuthError, match="'site-a' only, not for 'site-b'"):
        authenticator.bearer(TOKENS["learner"]).may("learner", "site-b")


def test_the_file_holds_no_secret_and_is_its_owners(tokens_file: Path) -> None:
    text = tokens_file.read_text()
    assert not any(token in text for token in TOKENS.values())
    assert stat.S_IMODE(tokens_file.stat().st_mode) == 0o600


def test_tokens_are_long_random_and_distinct() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 40


def test_revoking_and_adding_need_no_restart(tokens_file: Path) -> None:
    authenticator = Authenticator(tokens_file)
    entries = read_tokens(tokens_file)
    fresh = new_token()
    write_tokens(tokens_file, [entries["the-admin"], TokenEntry("later", "viewer", token_sha256(fresh))])
    assert authenticator.bearer(fresh) == Caller("later", "viewer")
    with pytest.raises(AuthError, match="not one of"):
        authenticator.bearer(TOKENS["learner"])


@pytest.mark.parametrize("how", ["gone", "garbled"])
def test_a_file_that_becomes_unreadable_lets_nobody_in(tokens_file: Path, how: str) -> None:
    authenticator = Authenticator(tokens_file)
    good = tokens_file.read_bytes()
    tokens_file.unlink()
    if how == "garbled":
        tokens_file.write_text('["the-admin"]\nrole = "adm')
    for _ in range(2):
        with pytest.raises(AuthError, match="no caller can be admitted"):
            authenticator.bearer(TOKENS["admin"])
    tokens_file.write_bytes(good)
    assert authenticator.bearer(TOKENS["admin"]).name == "the-admin"


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
        (f'[a]\nrole = "root"\nsha256 = "{"0" * 64}"', "role 'root'; use one of viewer, learner, admin"),
        ('[a]\nrole = "viewer"\nsha256 = "secret"', "not 64 hexadecimal digits"),
        (f'["a b"]\nrole = "viewer"\nsha256 = "{"0" * 64}"', "'a b' is no name"),
        (f'[a]\nrole = "learner"\nsha256 = "{"0" * 64}"\nlearner = "../b"', "'../b' is no name"),
    ],
)
def test_a_tokens_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=reason):
        Authenticator(path)


def test_a_missing_tokens_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Authenticator(tmp_path / "tokens.toml")


def test_secrets_are_never_readable_by_others_nor_overwritten(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_secret(tmp_path / "server.key", b"key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_secret(tmp_path / "server.key", b"other")
    assert (tmp_path / "server.key").read_bytes() == b"key"


# certificates


def test_certificates_name_their_hosts_and_the_authority_cannot_sign_for_others() -> None:
    certificates = make_certificates(["syncer.example.org", "10.0.0.7", "fd00::7", "bücher.example"], days=30)
    server = x509.load_pem_x509_certificate(certificates.server)
    ca = x509.load_pem_x509_certificate(certificates.ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["syncer.example.org", "xn--bcher-kva.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "fd00::7"]
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(
        ca=True, path_length=0
    )
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    server.verify_directly_issued_by(ca)
    valid_for = server.not_valid_after_utc - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=29, hours=23) < valid_for <= dt.timedelta(days=30)


@pytest.mark.parametrize("host", ["", "host:7700", "[::1]", "a b", "a..b", "http://syncer"])
def test_a_host_that_cannot_be_dialled_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="without a port"):
        make_certificates([host])


def test_a_certificate_needs_a_host() -> None:
    with pytest.raises(ConfigError, match="--host"):
        make_certificates([])


class _Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


@pytest.mark.parametrize(
    ("hosts", "trusted", "works"),
    [
        (["localhost", "127.0.0.1"], True, True),
        (["127.0.0.1"], True, True),
        (["elsewhere.example"], True, False),
        (["127.0.0.1"], False, False),
    ],
)
def test_grpc_accepts_exactly_the_right_certificate(hosts: list[str], trusted: bool, works: bool) -> None:
    certificates, other = make_certificates(hosts), make_certificates(hosts)
    server = grpc.server(ThreadPoolExecutor(1), handlers=(_Echo(),))
    pair = (certificates.server_key, certificates.server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    credentials = grpc.ssl_channel_credentials(certificates.ca if trusted else other.ca)
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            call = channel.unary_unary("/echo/Echo")
            if works:
                assert call(b"hello", timeout=30) == b"hello"
            else:
                with pytest.raises(grpc.RpcError) as caught:
                    call(b"hello", timeout=30)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        server.stop(None).wait()


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
def test_a_port_that_others_reach_needs_tls_and_tokens(address: str) -> None:
    check_binding(address, has_tls=True, has_tokens=True, insecure=False)
    check_binding(address, has_tls=False, has_tokens=False, insecure=True)
    for has_tls, has_tokens, missing in (
        (False, True, "TLS"),
        (True, False, "tokens"),
        (False, False, "TLS and tokens"),
    ):
        with pytest.raises(ConfigError, match=f"has no {missing};.*--insecure"):
            check_binding(address, has_tls=has_tls, has_tokens=has_tokens, insecure=False)


@pytest.mark.parametrize("address", ["127.0.0.1:7700", "localhost:0", "[::1]:7700", "unix:/run/diloco.sock"])
def test_a_port_that_only_this_machine_reaches_needs_neither(address: str) -> None:
    check_binding(address, has_tls=False, has_tokens=False, insecure=False)
