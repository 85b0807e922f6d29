"""The live page of a run, on a loopback port of its own.

The page follows the event log, which `diloco report` reads too, and asks the syncer for the current progress once a
second while a browser watches. An admin can steer the run from it (`protocol.steering`). A failure of the page does not
affect the run.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import AuthError, ConfigError, DilocoError, PayloadError, UnreachableError
from diloco.escaping import MALFORMED, read_json
from diloco.event_log import EventTail
from diloco.events import Progress
from diloco.exchange.wire.address import is_loopback, split_address
from diloco.protocol.steering import Order
from diloco.report import frame
from diloco.report.story import Story
from diloco.syncer.keys.certificates import UNKNOWN, Caller
from diloco.syncer.ports import port_refusal

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LINK_S = 600.0
"""Validity of a requested link."""

MAX_LINKS, MAX_SESSIONS = 64, 256
"""Limits for one caller; beyond them its oldest link or session ends."""

PRINTED = Caller("the printed link", "viewer")
"""The caller of the link that the syncer prints: a viewer, since many may read the log."""


@dataclass(frozen=True)
class BrowserSession:
    """The session of a browser.

    Attributes:
        caller: the one that the opened link was made for.
        token: of its orders; pages of other sites cannot read it.
    """

    caller: Caller
    token: str


class PageAccess:
    """Links and sessions of the page. Any thread may call any method.

    Arguments:
        is_open: whether every caller that reaches the page may do everything.
        check: raises AuthError if a caller's credentials have ended.
        clock: monotonic seconds.

    Attributes:
        printed: the link that the syncer prints; empty if the page is open.
    """

    def __init__(
        self, *, is_open: bool, check: Callable[[Caller], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._check, self._clock, self._lock = check, clock, threading.Lock()
        self._open = BrowserSession(UNKNOWN, secrets.token_urlsafe(32)) if is_open else None
        self._links: dict[str, tuple[Caller, float | None]] = {}
        self._sessions: dict[str, BrowserSession] = {}
        self.printed = "" if is_open else self._link(PRINTED, None)

    def link_for(self, caller: Caller) -> str:
        """A new link for a caller; empty if the page is open."""
        return "" if self._open is not None else self._link(caller, self._clock() + LINK_S)

    def _link(self, caller: Caller, ends_at: float | None) -> str:
        link = secrets.token_urlsafe(32)
        with self._lock:
            self._links[link] = caller, ends_at
            for each in [each for each, (asker, _) in self._links.items() if asker == caller][:-MAX_LINKS]:
                del self._links[each]
        return link

    def enter(self, given: str) -> str | None:
        """Open a link, once; returns the session's secret. None: the link is unknown, used or expired."""
        with self._lock:
            link = next((each for each in self._links if hmac.compare_digest(each.encode(), given.encode())), None)
            if link is None:
                return None
            caller, ends_at = self._links.pop(link)
            if ends_at is not None and self._clock() >= ends_at:
                return None
            secret = secrets.token_urlsafe(32)
            self._sessions[secret] = BrowserSession(caller, secrets.token_urlsafe(32))
            for each in [each for each, it in self._sessions.items() if it.caller == caller][:-MAX_SESSIONS]:
                del self._sessions[each]
            return secret

    def session(self, secret: str) -> BrowserSession | None:
        """The session with this secret; None: there is none, or its caller's credentials have ended."""
        if self._open is not None:
            return self._open
        with self._lock:
            kept = [(each, it) for each, it in self._sessions.items()]
        found = next((it for each, it in kept if hmac.compare_digest(each.encode(), secret.encode())), None)
        if found is None or found.caller is PRINTED:
            return found
        try:
            self._check(found.caller)
        except (AuthError, UnreachableError):
            return None
        return found


log = logging.getLogger("diloco.syncer")

EVERY_S = 1.0
GRACE_S = 3
"""Time for answers in progress when the syncer ends; each ends within `EVERY_S`."""
READ_BYTES, MAX_ORDER_BYTES = 1 << 20, 4096
MOST_CONNECTIONS = 128
"""Most open connections of all browsers, since each takes a file handle that the run may need (`ports.RESERVE`)."""
TOKEN = "x-diloco-token"
PARTS = {"page.css": "text/css", **dict.fromkeys((*frame.DRAWN_BY, "page.js"), "text/javascript")}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def missing_packages() -> list[str]:
    """Packages that the live page needs and that are not installed."""
    return [name for name in ("starlette", "uvicorn") if find_spec(name) is None]


class LivePage:
    """Serves the page on a thread until `close`.

    Arguments:
        address: host:port, loopback only; port 0 chooses one.
        event_log: the syncer's.
        progress: gives the run's current progress; None: there is none.
        is_open: every caller that reaches the port may watch and steer; otherwise only a browser that has opened a
            link, with the role of the caller that requested it. A link works once; the one in `url` is a viewer's.
        steer: executes a caller's order; returns a sentence on its effect. None: the page cannot steer.
        check: raises AuthError if a caller's credentials have ended.

    Attributes:
        url: of the page.

    Raises:
        ConfigError: the address is not loopback, or cannot be bound; a package is not installed.
    """

    def __init__(
        self, address: str, event_log: Path, progress: Callable[[], Progress | None], *, is_open: bool,
        steer: Callable[[Order, Caller], str] | None = None, check: Callable[[Caller], None] = lambda _: None,
    ) -> None:  # fmt: skip
        if absent := missing_packages():
            raise ConfigError(
                f"the live page needs {', '.join(absent)}, not installed here; pip install 'diloco[dashboard]'"
            )
        host, port = split_address(address)
        if not is_loopback(host):
            raise ConfigError(
                f"the live page at {address} would be open to other machines; bind 127.0.0.1, and watch from elsewhere "
                "through a tunnel: ssh -L PORT:127.0.0.1:PORT HOST"
            )
        self._sockets = [_bound(host, port)]
        port = self._sockets[0].getsockname()[1]
        self._access, self._steer = PageAccess(is_open=is_open, check=check), steer
        name = f"[{host}]" if ":" in host else host
        self._address = f"http://{name}:{port}/"
        self.url = self._url(self._access.printed)
        self._hosts = {f"{each}:{port}" for each in (name, "localhost", "127.0.0.1", "[::1]")}
        self._cookie = f"diloco-page-{port}"  # a browser sends a host's cookies to all its ports
        self._tail, self._story, self._progress = EventTail(event_log), Story(), progress
        self._watchers: set[asyncio.Event] = set()
        self._is_ending = self._has_all = self._has_failed = False
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, name="syncer-page", daemon=True)
        self._thread.start()

    def url_for(self, caller: Caller) -> str:
        """The page's address with a link for a caller, which works once, within ten minutes."""
        return self._url(self._access.link_for(caller))

    def _url(self, link: str) -> str:
        return self._address + (f"?link={link}" if link else "")

    def close(self) -> None:
        """Stop serving."""
        self._is_ending = True
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        import uvicorn

        options: dict[str, Any] = {
            "log_config": None, "log_level": "warning", "access_log": False, "http": _bounded_protocol(),
        }  # fmt: skip
        try:
            self._server = uvicorn.Server(uvicorn.Config(self._app(), timeout_graceful_shutdown=GRACE_S, **options))
            if not self._is_ending:
                self._server.run(sockets=self._sockets)
        except Exception:  # a failure of the page must not stop the run
            log.exception("the live page failed; the run continues without it")
        finally:
            for each in self._sockets:
                each.close()

    # --- the app ------------------------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        orders = Route("/orders", self._order, methods=["POST"])
        routes = [Route("/", self._page), Route("/updates", self._updates), orders]
        routes += [Route(f"/{name}", self._part) for name in PARTS]
        return Starlette(routes=routes, lifespan=self._following)

    def _refusal(self, request: Request) -> Response | None:
        """The response to a browser that may not watch; None: it may. The host is checked because the names of other
        sites could resolve to this machine (DNS rebinding)."""
        from starlette.responses import PlainTextResponse

        if request.headers.get("host", "") not in self._hosts:
            return PlainTextResponse("this page is served under the address that the syncer prints\n", 403, HEADERS)
        if self._session(request) is None:
            text = (
                "open the link that the syncer has printed, or request one with `diloco page`; a link works once, and "
                "that browser stays admitted\n"
            )
            return PlainTextResponse(text, 403, HEADERS)
        return None

    def _session(self, request: Request) -> BrowserSession | None:
        return self._access.session(request.cookies.get(self._cookie, ""))

    async def _page(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse, RedirectResponse

        given = request.query_params.get("link", "")
        opens = request.method == "GET" and request.headers.get("host", "") in self._hosts  # HEAD opens no link
        if given and opens and (secret := self._access.enter(given)) is not None:
            answer = RedirectResponse("/", 303, HEADERS)
            answer.set_cookie(self._cookie, secret, httponly=True, samesite="strict")
            return answer
        if (refusal := self._refusal(request)) is not None:
            return refusal
        session = self._session(request)
        token = session.token if session is not None and self._may_steer(session) else ""
        return HTMLResponse(frame.live_page(token), headers=HEADERS)

    def _may_steer(self, session: BrowserSession) -> bool:
        return self._steer is not None and session.caller.role == "admin"

    async def _order(self, request: Request) -> Response:
        """An order from the page itself: of the same origin, from an admin's session, with that session's token."""
        from starlette.responses import JSONResponse

        if (refusal := self._refusal(request)) is not None:
            return refusal
        try:
            order, caller = await self._order_of(request)
            assert self._steer is not None
            said = await asyncio.to_thread(self._steer, order, caller)
        except DilocoError as error:
            return JSONResponse({"error": str(error)}, 403 if isinstance(error, AuthError) else 400, HEADERS)
        return JSONResponse({"said": said}, headers=HEADERS)

    async def _order_of(self, request: Request) -> tuple[Order, Caller]:
        session, headers = self._session(request), request.headers
        given = headers.get(TOKEN, "").encode()
        is_own = headers.get("origin", "") == f"http://{headers.get('host', '')}"
        if session is None or not is_own or not hmac.compare_digest(given, session.token.encode()):
            raise AuthError("orders are accepted from this page only; load it again.")
        if self._steer is None or session.caller.role != "admin":
            raise AuthError(
                f"{session.caller.name!r} may watch and not steer; open the page with an admin's link (diloco page)."
            )
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_ORDER_BYTES:
                raise PayloadError(f"an order has more than {MAX_ORDER_BYTES} bytes; give a shorter reason.")
        values = read_json(body, "an order", PayloadError, "load the page again")
        try:
            what, learner, reason = (str(values.get(key, "")) for key in ("what", "learner", "reason"))
            number, bans = values.get("at_least", 0), values.get("bans") is True
            if type(number) is not int:
                raise ValueError(number)
            f"{what}{learner}{reason}".encode()  # raises for a lone surrogate
        except MALFORMED as error:
            raise PayloadError("the request is not a valid order; load the page again.") from error
        return Order(what, learner, number, bans, reason), session.caller  # type: ignore[arg-type]  # the driver checks

    async def _part(self, request: Request) -> Response:
        from starlette.responses import Response

        name = request.url.path.removeprefix("/")
        return self._refusal(request) or Response(frame.asset(name), media_type=PARTS[name], headers=HEADERS)

    async def _updates(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        stream = StreamingResponse(self._stream(request), media_type="text/event-stream", headers=HEADERS)
        return self._refusal(request) or stream

    async def _stream(self, request: Request) -> AsyncIterator[str]:
        """The story so far, then updates, as server-sent events, while the caller may watch."""
        number, news = 0, asyncio.Event()
        self._watchers.add(news)
        try:
            yield "event: begin\ndata: \n\n"
            while self._session(request) is not None:
                is_last, story = self._has_all, self._story.since(number, time.time())
                number = story["number"]
                yield f"data: {json.dumps(story)}\n\n"
                if self._has_failed:
                    yield "event: failed\ndata: \n\n"
                if is_last or self._has_failed:
                    return
                news.clear()
                await news.wait()
        finally:
            self._watchers.discard(news)

    @asynccontextmanager
    async def _following(self, _app: Starlette) -> AsyncIterator[None]:
        """Follow the event log while the app runs."""
        task = asyncio.create_task(self._follow())
        task.add_done_callback(self._stopped_following)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def _stopped_following(self, following: asyncio.Task[None]) -> None:
        """Report to the log and the watchers that following has failed, unless the page is closing."""
        if following.cancelled() or (error := following.exception()) is None:
            return
        log.error(
            "the live page shows no new events: %s", error, exc_info=None if isinstance(error, DilocoError) else error
        )
        self._has_failed = True
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        for news in self._watchers:
            news.set()

    async def _follow(self) -> None:
        while True:
            is_ending = self._is_ending  # the syncer writes its last event before it closes the page
            while events := await asyncio.to_thread(self._tail.read, READ_BYTES):
                for event in events:
                    self._story.take(event)
            if self._watchers and (progress := await asyncio.to_thread(self._progress)) is not None:
                self._story.at_this_moment(progress.model_copy(update={"t": time.time()}))
            self._has_all = is_ending
            self._tell_watchers()
            await asyncio.sleep(EVERY_S)


def _bounded_protocol() -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a limit on connections. Its own `limit_concurrency` answers requests beyond it with
    503, but keeps connections that send no request."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class BoundedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > MOST_CONNECTIONS:
                transport.abort()

    return BoundedProtocol


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen()  # accepts connections before the thread serves them, and keeps the port
    except OSError as error:
        bound.close()
        choice = "choose another port with --page-port, or 0"
        raise port_refusal(f"{host}:{port}", error, what="the live page", choice=choice) from error
    return bound
