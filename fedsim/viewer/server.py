"""The server of `fedsim view`: on loopback, for those who know its token."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from aiohttp import BodyPartReader, web

from fedsim.errors import BadInput, FedsimError, RunError, in_own_code
from fedsim.viewer.pages import Pages, plain_name
from fedsim.viewer.work import Work

HOST = "127.0.0.1"
MOST_BYTES = 50 * 10**6  # of an input that is dropped in
_MOST_INPUTS = 20  # that are kept
_NAMES = {"127.0.0.1", "localhost", "[::1]"}
_KINDS = {"csv": "text/csv", "png": "image/png", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serves the pages of a folder of results until it is closed, in threads of its own.

    Args:
        folder: that of a run, a grid or a search, or one above several.
        port: 0 for any that is free.
        trust: allow folders from elsewhere to run the code that their experiments name.

    Attributes:
        url: the address of the first page, with the token that all requests need.

    Raises:
        RunError: the port is taken.
    """

    def __init__(self, folder: Path, port: int = 0, trust: bool = False) -> None:
        self._closed = threading.Event()
        self._token = secrets.token_urlsafe(16)
        self._uploads = TemporaryDirectory(prefix="fedsim-view-")
        self._work = Work()
        uploads, prefix = Path(self._uploads.name), f"/{self._token}/"
        self._pages = Pages(folder.absolute(), self._work, uploads, prefix, trust)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fedsim-view-server", daemon=True
        )
        self._thread.start()
        self._runner = web.AppRunner(self._application(), access_log=None)
        try:
            self._do(self._start(port))
        except OSError as error:
            self.close()
            why = os.strerror(error.errno or 0).lower()
            raise RunError(f"port {port} cannot be used: {why}") from error
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}/{self._token}/"

    def close(self) -> None:
        """Stop serving, and end what is being worked on."""
        if self._loop.is_closed():
            return
        self._work.close()
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._uploads.cleanup()
        self._closed.set()

    def wait(self) -> None:
        """Serve until the thread is interrupted."""
        self._closed.wait()  # unlike `join`, it can be interrupted

    def _do(self, what: Any) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result()

    async def _start(self, port: int) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, port, shutdown_timeout=1).start()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guarded], client_max_size=MOST_BYTES)
        application.add_routes(
            [
                web.get("/{token}/", self._page),
                web.get(r"/{token}/at/{path:[\s\S]*}", self._page),
                web.get(r"/{token}/file/{ending}/{path:[\s\S]*}", self._file),
                web.get("/{token}/{name:(page|view)\\.(css|js)}", self._static),
                web.post("/{token}/input", self._input),
                web.post("/{token}/cancel/{path:.*}", self._cancel),
            ]
        )
        return application

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer nobody without the token, nor under a name that leads here from elsewhere."""
        host = re.sub(r":\d+$", "", request.host)
        token = request.path.split("/")[1]
        if host not in _NAMES or not secrets.compare_digest(token.encode(), self._token.encode()):
            return web.Response(
                status=403, text="403: open the address that fedsim view printed\n"
            )
        origin = request.headers.get("Origin", "")
        if request.method != "GET" and origin and urlsplit(origin).netloc != request.host:
            return web.Response(status=403, text="403: sent from another page\n")
        try:
            found = await handler(request)
        except web.HTTPRequestEntityTooLarge:
            found = await self._problem(request, f"input: larger than {MOST_BYTES // 10**6} MB")
        except web.HTTPException:  # to another address, or there is none
            raise
        except FedsimError as error:
            found = await self._problem(request, str(error))
        except Exception as error:  # what users' code and files by other hands may raise
            logging.getLogger(__name__).exception("a page could not be made")
            found = await self._problem(request, in_own_code(error), 500)
        found.headers["Content-Security-Policy"] = _POLICY
        found.headers["Referrer-Policy"] = "no-referrer"
        found.headers["X-Content-Type-Options"] = "nosniff"
        found.headers["Cache-Control"] = "no-store"
        return found

    async def _problem(self, request: web.Request, why: str, status: int = 400) -> web.Response:
        where = request.match_info.get("path", "")
        page = await asyncio.to_thread(self._pages.problem, why, where)
        return web.Response(status=status, text=page, content_type="text/html")

    async def _page(self, request: web.Request) -> web.Response:
        path = request.match_info.get("path", "")
        page = await asyncio.to_thread(self._pages.page, path, request.query)
        if "again" in request.query:  # once is enough: the address is to show what comes of it
            raise web.HTTPSeeOther(str(request.rel_url.without_query_params("again")))
        return web.Response(text=page, content_type="text/html")

    async def _file(self, request: web.Request) -> web.Response:
        ending, path = request.match_info["ending"], request.match_info["path"]
        if ending not in _KINDS:
            raise BadInput(f"there is no .{ending} of this; there is: {', '.join(_KINDS)}")
        name, content = await asyncio.to_thread(self._pages.file, path, request.query, ending)
        saved = {"Content-Disposition": f'attachment; filename="{name}"'}
        return web.Response(body=content, content_type=_KINDS[ending], headers=saved)

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        content = await asyncio.to_thread(self._pages.static, name)
        kind = "text/css" if name.endswith("css") else "text/javascript"
        return web.Response(text=content, content_type=kind)

    async def _input(self, request: web.Request) -> web.Response:
        """Keep a file that was dropped in, and answer with what it is called here."""
        if request.content_type != "multipart/form-data":
            raise BadInput("input: no file was sent")
        part = await (await request.multipart()).next()
        if not isinstance(part, BodyPartReader) or not part.filename:
            raise BadInput("input: no file was sent")
        content = bytes(await part.read())
        digest = hashlib.sha256(content).hexdigest()[:12]
        name = plain_name(Path(part.filename).name)
        place = Path(self._uploads.name) / digest
        await asyncio.to_thread(_keep, place, name, content)
        return web.json_response({"input": f"{digest}/{name}"})

    async def _cancel(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        await asyncio.to_thread(self._pages.cancel, path, request.query)
        return web.json_response({})


def _keep(place: Path, name: str, content: bytes) -> None:
    place.mkdir(exist_ok=True)
    (place / name).write_bytes(content)
    os.utime(place)
    latest = sorted(place.parent.iterdir(), key=lambda each: each.stat().st_mtime_ns)
    for old in latest[:-_MOST_INPUTS]:
        shutil.rmtree(old, ignore_errors=True)
