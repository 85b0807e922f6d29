"""The live page of a run, on a loopback port of its own: what the syncer writes down, while it writes it.

The page reads the event log as `diloco report` does, and asks the syncer for this moment once a second while someone
watches. It changes nothing in the run, and a failure of it ends nothing.
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
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import ConfigError, StoreError
from diloco.event_log import EventTail
from diloco.events import Progress
from diloco.exchange.wire.address import is_loopback, split_address
from diloco.report import frame
from diloco.report.story import Story
from diloco.syncer.ports import port_refusal

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("diloco.syncer")

EVERY_S = 1.0
GRACE_S = 3
"""For answers under way when the syncer ends; each ends within `EVERY_S`."""
READ_BYTES = 1 << 20
COOKIE = "diloco-page"
PARTS = {"page.css": "text/css", "page.js": "text/javascript", "plotly.js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def missing_packages() -> list[str]:
    """Those that the live page needs and that are not installed."""
    return [name for name in ("starlette", "uvicorn", "plotly") if find_spec(name) is None]


class LivePage:
    """Serves the page from a thread. A context manager is not needed: `close` ends it, once.

    Arguments:
        address: host:port, loopback only; port 0 chooses one.
        event_log: the syncer's.
        progress: gives the run at this moment; None: there is nothing to tell.
        is_open: whoever reaches the port may watch; otherwise the first who opens `url`, which holds a secret that
            works once, and that browser from then on.

    Attributes:
        url: of the page.

    Raises:
        ConfigError: the address is not loopback, or cannot be bound; a package is not installed.
    """

    def __init__(
        self, address: str, event_log: Path, progress: Callable[[], Progress | None], *, is_open: bool
    ) -> None:
        if absent := missing_packages():
            raise ConfigError(f"the live page needs {', '.join(absent)}, not installed here; {frame.NEEDS}")
        host, port = split_address(address)
        if not is_loopback(host):
            raise ConfigError(
                f"the live page at {address} would be open to other machines; bind 127.0.0.1, and watch from elsewhere "
                "through a tunnel: ssh -L PORT:127.0.0.1:PORT HOST"
            )
        self._sockets = [_bound(host, port)]
        port = self._sockets[0].getsockname()[1]
        self._link, self._session = ("", "") if is_open else (secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        self.url = f"http://{host}:{port}/" + (f"?link={self._link}" if self._link else "")
        self._hosts = {f"{name}:{port}" for name in (host, "localhost", "127.0.0.1", "[::1]")}
        self._tail, self._story, self._progress = EventTail(event_log), Story(), progress
        self._watchers: set[asyncio.Event] = set()
        self._is_ending = False
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, name="syncer-page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._is_ending = True
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        import uvicorn

        options: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False}
        try:
            self._server = uvicorn.Server(uvicorn.Config(self._app(), timeout_graceful_shutdown=GRACE_S, **options))
            if not self._is_ending:
                self._server.run(sockets=self._sockets)
        except Exception:  # what watches cannot stop what decides
            log.exception("the live page failed; the run goes on without it")
        finally:
            for each in self._sockets:
                each.close()

    # --- the app ------------------------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route("/", self._page), Route("/updates", self._updates)]
        routes += [Route(f"/{name}", self._part) for name in PARTS]
        return Starlette(routes=routes, lifespan=self._following)

    def _refusal(self, request: Request) -> Response | None:
        """What to answer who may not watch; None: he may. The host is checked against pages of other sites that have
        their name resolve to this machine."""
        from starlette.responses import PlainTextResponse

        if request.headers.get("host", "") not in self._hosts:
            return PlainTextResponse("this page is served under the address that the syncer prints\n", 403, HEADERS)
        cookie = request.cookies.get(COOKIE, "")
        if self._session and not hmac.compare_digest(cookie.encode(), self._session.encode()):
            text = "open the link that the syncer has printed; it works once, and in that browser from then on\n"
            return PlainTextResponse(text, 403, HEADERS)
        return None

    async def _page(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse, RedirectResponse

        given = request.query_params.get("link", "")
        if self._link and hmac.compare_digest(given.encode(), self._link.encode()):
            self._link = ""
            answer = RedirectResponse("/", 303, HEADERS)
            answer.set_cookie(COOKIE, self._session, httponly=True, samesite="strict")
            return answer
        return self._refusal(request) or HTMLResponse(frame.live_page(), headers=HEADERS)

    async def _part(self, request: Request) -> Response:
        from starlette.responses import Response

        name = request.url.path.removeprefix("/")
        return self._refusal(request) or Response(frame.part(name), media_type=PARTS[name], headers=HEADERS)

    async def _updates(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        stream = self._stream()
        return self._refusal(request) or StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    async def _stream(self) -> AsyncIterator[str]:
        """The story so far, then what is new, as server-sent events."""
        number, news = 0, asyncio.Event()
        self._watchers.add(news)
        try:
            yield "event: begin\ndata: \n\n"
            while not self._is_ending:
                story = self._story.since(number, time.time())
                number = story["number"]
                yield f"data: {json.dumps(story)}\n\n"
                news.clear()
                await news.wait()
        finally:
            self._watchers.discard(news)

    @asynccontextmanager
    async def _following(self, _app: Starlette) -> AsyncIterator[None]:
        """While the app runs, the story grows."""
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _follow(self) -> None:
        while True:
            try:
                while events := await asyncio.to_thread(self._tail.read, READ_BYTES):
                    for event in events:
                        self._story.take(event)
                if self._watchers and (progress := await asyncio.to_thread(self._progress)) is not None:
                    self._story.at_this_moment(progress.model_copy(update={"t": time.time()}))
            except StoreError as error:
                log.error("the live page stands still: %s", error)
                return
            for news in self._watchers:
                news.set()
            await asyncio.sleep(EVERY_S)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen()  # callers are taken before the thread serves them, and no other process gets the port
    except OSError as error:
        bound.close()
        choice = "choose another port with --page-port, or 0"
        raise port_refusal(f"{host}:{port}", error, what="the live page", choice=choice) from error
    return bound
