"""The live page: who may watch, and what comes as server-sent events, over real HTTP."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from benchmarks.processes import until

from diloco import events as ev
from diloco.errors import AuthError, ConfigError, RunError
from diloco.event_log import EventLog
from diloco.protocol.steering import Order
from diloco.syncer.keys.certificates import Caller
from diloco.syncer.page.live_page import LINK_S, MAX_LINKS, MAX_SESSIONS, BrowserSession, LivePage, PageAccess


@contextmanager
def served(tmp_path: Path, *, is_open: bool) -> Iterator[tuple[LivePage, EventLog]]:
    with EventLog(tmp_path / "events.jsonl", who="syncer") as log:
        log.append(ev.SyncerStarted(run="tiny", address="x", method={"name": "DiLoCo"}))
        page = LivePage("127.0.0.1:0", log.path, lambda: None, is_open=is_open)
        with closing(page):
            yield page, log


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    text: str


@contextmanager
def asking(page: LivePage, path: str, method: str = "GET", **headers: str) -> Iterator[http.client.HTTPResponse]:
    at = urlsplit(page.url)
    with closing(http.client.HTTPConnection(at.hostname or "", at.port or 0, timeout=300)) as connection:
        connection.request(method, path, headers=headers)
        with connection.getresponse() as answer:
            yield answer


def get(page: LivePage, path: str, method: str = "GET", **headers: str) -> Answer:
    with asking(page, path, method, **headers) as answer:
        return Answer(answer.status, answer.headers, answer.read().decode())


def updates(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while True:
        line = answer.readline()
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def test_a_watcher_gets_the_story_and_then_what_is_new(tmp_path: Path) -> None:
    with served(tmp_path, is_open=True) as (page, log):
        with asking(page, "/updates") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            stories = updates(answer)
            texts: list[str] = []
            while not texts:
                story = next(stories)
                texts += [event["text"] for event in story["events"]]
            assert story["head"]["run"] == "tiny"
            log.append(
                ev.Initialised(
                    learner="a", source="seed", layout_digest="", num_parameters=7, cut="1 fragment: Whole()"
                )
            )
            log.append(ev.Joined(learner="a", incarnation=1))
            while len(texts) < 3:
                texts += [event["text"] for event in next(stories)["events"]]
        model = "a gave the run its model of 7 parameters (from seed), in 1 fragment: Whole()"
        assert texts[1:] == [model, "a joined at step 0"]


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    with served(tmp_path, is_open=True) as (page, _):
        answer = get(page, "/")
        text = answer.text
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert 'src="http' not in text
        for part in ("page.css", "page.js", "drawing.js", "plotly.min.js"):
            assert f'"{part}"' in text
            assert get(page, f"/{part}").status == 200


def test_a_link_works_once_and_in_that_browser_from_then_on(tmp_path: Path) -> None:
    with served(tmp_path, is_open=False) as (page, _):
        link = f"/?{urlsplit(page.url).query}"
        assert "link=" in link
        for path in ("/", "/updates", "/page.js", "/?link=", "/?link=wrong"):
            refused = get(page, path)
            assert refused.status == 403
            assert "works once" in refused.text
        assert get(page, link, "HEAD").status == 403  # which takes no link
        first = get(page, link)
        assert first.status == 303
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert get(page, link).status == 403
        assert get(page, "/", cookie=cookie.partition(";")[0]).status == 200
        assert get(page, "/", cookie=f"{cookie.partition('=')[0]}=wrong").status == 403


def test_two_pages_in_one_browser_do_not_end_each_others_session(tmp_path: Path) -> None:
    with served(tmp_path / "one", is_open=False) as (one, _), served(tmp_path / "two", is_open=False) as (two, _):
        jar: SimpleCookie = SimpleCookie()
        for page in (one, two):
            jar.load(get(page, f"/?{urlsplit(page.url).query}").headers["set-cookie"])
        cookie = "; ".join(f"{name}={it.value}" for name, it in jar.items())  # a browser's, which knows no ports
        assert [get(page, "/", cookie=cookie).status for page in (one, two)] == [200, 200]


@pytest.mark.parametrize("breaks", ["the event log", "the syncer's answer"])
def test_a_page_that_cannot_follow_the_run_says_so(
    tmp_path: Path, breaks: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ValueError("a defect")

    path, of_log = tmp_path / "events.jsonl", breaks == "the event log"
    path.write_text('{"t":1.0}\n' if of_log else "")
    with closing(LivePage("127.0.0.1:0", path, (lambda: None) if of_log else broken, is_open=True)) as page:
        for _ in range(2):
            assert get(page, "/updates").text.endswith("}\n\nevent: failed\ndata: \n\n")
    (said,) = [it for it in caplog.records if it.getMessage().startswith("the live page shows no new events: ")]
    assert ("is not an event" if of_log else "a defect") in said.getMessage()
    assert (said.exc_info is None) == of_log  # a defect has a traceback


def test_connections_are_bounded_also_those_that_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.syncer.page.live_page.MOST_CONNECTIONS", 5)
    with served(tmp_path, is_open=True) as (page, _), ExitStack() as stack:
        at = urlsplit(page.url)
        silent = [stack.enter_context(socket.create_connection((at.hostname, at.port), 300)) for _ in range(8)]
        for each in silent[5:]:
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""
        for each in silent[:5]:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
            each.close()

        def is_served() -> bool:
            with suppress(ConnectionResetError, http.client.RemoteDisconnected):
                return get(page, "/").status == 200
            return False

        until(is_served, "connections that were closed still count")


def test_a_page_of_another_site_cannot_read_it_under_its_own_name(tmp_path: Path) -> None:
    with served(tmp_path, is_open=True) as (page, _):
        assert get(page, "/", host="evil.example:80").status == 403
        assert get(page, "/", host=f"localhost:{urlsplit(page.url).port}").status == 200


def test_it_is_served_to_this_machine_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"open to other machines; bind 127.0.0.1, and watch from elsewhere"):
        LivePage("0.0.0.0:0", tmp_path / "events.jsonl", lambda: None, is_open=True)
    with served(tmp_path, is_open=True) as (page, _):
        port = urlsplit(page.url).port
        with pytest.raises(RunError, match="is in use by another process.*--page-port, or 0"):
            LivePage(f"127.0.0.1:{port}", tmp_path / "events.jsonl", lambda: None, is_open=True)


def test_it_is_served_on_ipv6s_loopback(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    path = tmp_path / "events.jsonl"
    with closing(LivePage("[::1]:0", path, lambda: None, is_open=True)) as page:
        assert page.url.startswith("http://[::1]:")
        assert get(page, "/").status == 200


# --- steering


ADMIN, VIEWER = Caller("anna", "admin", key="1"), Caller("vera", "viewer", key="2")


@contextmanager
def steerable(tmp_path: Path, *, is_open: bool) -> Iterator[tuple[LivePage, list[tuple[Order, str]], set[Caller]]]:
    """A page, the orders that it was given, and the callers whose keys have ended."""
    orders: list[tuple[Order, str]] = []
    ended: set[Caller] = set()

    def steer(order: Order, caller: Caller) -> str:
        if order.learner == "nobody":
            raise ConfigError("no learner 'nobody' takes part.")
        orders.append((order, caller.name))
        return "done"

    def check(caller: Caller) -> None:
        if caller in ended:
            raise AuthError("it was revoked.")

    path = tmp_path / "events.jsonl"
    path.touch()
    with closing(LivePage("127.0.0.1:0", path, lambda: None, is_open=is_open, steer=steer, check=check)) as page:
        yield page, orders, ended


def post(page: LivePage, body: str, **headers: str) -> Answer:
    host = urlsplit(page.url).netloc
    with closing(http.client.HTTPConnection("127.0.0.1", urlsplit(page.url).port or 0, timeout=300)) as connection:
        connection.request("POST", "/orders", body, {"origin": f"http://{host}", **headers})
        with connection.getresponse() as answer:
            return Answer(answer.status, answer.headers, answer.read().decode())


def entered(page: LivePage, url: str) -> tuple[str, str]:
    """A browser's cookie, and the token that its page carries; empty: none."""
    cookie = get(page, f"/?{urlsplit(url).query}").headers["set-cookie"].partition(";")[0]
    return cookie, token_in(get(page, "/", cookie=cookie).text)


def token_in(text: str) -> str:
    found = re.search('<meta name="orders" content="([^"]+)">', text)
    return "" if found is None else found[1]


def test_the_open_page_takes_orders_of_its_own_alone(tmp_path: Path) -> None:
    with steerable(tmp_path, is_open=True) as (page, orders, _):
        token = token_in(get(page, "/").text)
        drain = json.dumps({"what": "drain", "learner": "a", "reason": "it moves"})
        foreign = {"origin": "http://evil.example"}
        for headers in ({}, {"x-diloco-token": "wrong"}, {"x-diloco-token": token, **foreign}):
            refused = post(page, drain, **headers)
            assert (refused.status, "from this page only" in refused.text) == (403, True)
        assert post(page, drain, **{"x-diloco-token": token, "host": "evil.example:80"}).status == 403
        assert orders == []
        assert json.loads(post(page, drain, **{"x-diloco-token": token}).text) == {"said": "done"}
        assert orders == [(Order("drain", "a", reason="it moves"), "anyone")]
        number, half = '{"what": "quorum", "at_least": %s}', '{"what": "pause", "reason": "\\ud800"}'
        for body in ("", "[]", number % '"x"', number % "true", number % "1.9", half, "x" * 5000):
            assert post(page, body, **{"x-diloco-token": token}).status == 400, body
        wrong = post(page, json.dumps({"what": "evict", "learner": "nobody"}), **{"x-diloco-token": token})
        assert (wrong.status, json.loads(wrong.text)["error"]) == (400, "no learner 'nobody' takes part.")


def test_only_an_admins_link_steers(tmp_path: Path) -> None:
    with steerable(tmp_path, is_open=False) as (page, orders, ended):
        pause = json.dumps({"what": "pause"})
        admin, token = entered(page, page.url_for(ADMIN))
        for url in (page.url, page.url_for(VIEWER)):
            cookie, none = entered(page, url)
            assert none == ""
            for given in ("", token):
                assert post(page, pause, **{"cookie": cookie, "x-diloco-token": given}).status == 403
        assert post(page, pause, **{"x-diloco-token": token}).status == 403  # without the cookie
        assert post(page, pause, **{"cookie": admin, "x-diloco-token": token}).status == 200
        assert orders == [(Order("pause"), "anna")]
        with asking(page, "/updates", cookie=admin) as answer:
            next(updates(answer))
            ended.add(ADMIN)
            answer.read()  # to its end
        assert post(page, pause, **{"cookie": admin, "x-diloco-token": token}).status == 403
        assert get(page, "/", cookie=admin).status == 403


def test_a_link_that_was_asked_for_ends(tmp_path: Path) -> None:
    now = [0.0]
    access = PageAccess(is_open=False, check=lambda _: None, clock=lambda: now[0])
    early, late = access.link_for(ADMIN), access.link_for(ADMIN)
    secret = access.enter(early)
    assert secret is not None
    assert access.session(secret) == BrowserSession(ADMIN, access.session(secret).token)  # type: ignore[union-attr]
    assert access.enter(early) is None
    now[0] = LINK_S
    assert access.enter(late) is None
    for _ in range(MAX_LINKS + 1):
        newest = access.link_for(VIEWER)
    assert len(access._links) == MAX_LINKS + 1  # and the printed one
    assert access.enter(newest) is not None
    assert access.enter(access.printed) is not None


def test_what_one_caller_opens_ends_nothing_of_another() -> None:
    access = PageAccess(is_open=False, check=lambda _: None)
    link, session = access.link_for(ADMIN), access.enter(access.link_for(ADMIN))
    for _ in range(MAX_SESSIONS + 1):
        newest = access.enter(access.link_for(VIEWER))
    for _ in range(MAX_LINKS + 1):
        access.link_for(VIEWER)
    assert len(access._sessions) == MAX_SESSIONS + 1  # and the admin's
    assert None not in (access.session(session or ""), access.session(newest or ""), access.enter(link))
