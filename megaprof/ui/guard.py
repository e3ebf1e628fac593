"""Accepts only requests that have the token, come from megaprof's own pages, and use a name of this machine.

Other users of the machine can reach the port. So can every page that is open in the user's browser, even under its own
host name, if that name suddenly resolves to 127.0.0.1 (DNS rebinding). The token keeps out the users; the headers
``Host``, ``Origin`` and ``Sec-Fetch-Site`` keep out the pages. Opening the address with the token sets a cookie, which
no other site can send.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: This machine's names for itself. Any port is accepted: `ssh -L` may change it.
NAMES = ("127.0.0.1", "localhost", "[::1]")
#: Pages load only the script and the style sheets of this server.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # with no referrer, our own forms would come with ``Origin: null``
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
#: A page, not a redirect: a browser that comes from another site would not send the cookie with a redirect.
_ENTER = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=./">'
    '<title>megaprof</title><p><a href="./">megaprof</a></p></html>'
)
_KEY_BYTES = 32
_LEAST_KEY = 16


class Guard:
    """An ASGI application that lets a request through to another one, or answers it with 403."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        # All ports of a host share cookies, so each server uses its own cookie name.
        self._cookie = f"megaprof-{hashlib.sha256(token.encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", POLICY)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        if scope["type"] != "http":
            await PlainTextResponse("not found", 404)(scope, receive, send)
        elif (reason := self._foreign(request := HTTPConnection(scope))) is not None:
            await PlainTextResponse(f"megaprof: {reason}\n", 403)(scope, receive, sending)
        elif self._enters(request):
            entered = HTMLResponse(_ENTER)
            entered.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            await entered(scope, receive, sending)
        elif not _same(request.cookies.get(self._cookie, ""), self._token):
            why = "open the address that megaprof ui printed: it has the token of this server in it"
            await PlainTextResponse(f"megaprof: {why}\n", 403)(scope, receive, sending)
        else:
            await self._app(scope, receive, sending)

    def _foreign(self, request: HTTPConnection) -> str | None:
        """Returns why the request does not come from one of our pages; None if it does."""
        hosts, origins, sites = map(request.headers.getlist, ("host", "origin", "sec-fetch-site"))
        if len(hosts) != 1 or _name_of(hosts[0]) not in NAMES:
            return "this server answers only as 127.0.0.1 or localhost"
        if request.scope["method"] not in ("GET", "HEAD") and not origins:
            return "a request that changes something must say which page it comes from"
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return "the request comes from another page"
        if any(site not in ("same-origin", "none") for site in sites) and not self._enters(request):
            return "the request comes from another page"
        return None

    def _enters(self, request: HTTPConnection) -> bool:
        """Returns whether the request is for the address with the token."""
        given = request.query_params.getlist("token")
        address = request.scope["method"], request.scope["path"], len(given)
        return address == ("GET", "/", 1) and _same(given[0], self._token)


def token_of(directory: Path) -> str:
    """Returns the token of a directory's pages. It is derived from a key in a file that only this user can read, so it
    stays the same after a restart, and open pages keep working. Without such a file, it is new each time."""
    key = _key()
    if key is None:
        return secrets.token_urlsafe(24)
    return hmac.new(key, os.fsencode(directory.resolve()), "sha256").hexdigest()[:48]


def _key() -> bytes | None:
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(home) / "megaprof" / "ui.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):
            written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(written, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            stat = os.fstat(file.fileno())
            key = file.read(_KEY_BYTES)
    except OSError:
        return None
    private = stat.st_uid == os.getuid() and not stat.st_mode & 0o077
    return key if private and len(key) >= _LEAST_KEY else None


def _name_of(host: str) -> str | None:
    """Returns the name of a host: ``127.0.0.1`` for ``127.0.0.1:8000``. None if ``host`` is not a valid host."""
    try:
        address = urlsplit(f"//{host}")
        _ = address.port
    except ValueError:
        return None
    if address.username is not None or address.path or address.query or address.fragment:
        return None
    name = address.hostname or ""
    return f"[{name}]" if ":" in name else name


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
