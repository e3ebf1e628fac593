"""Accepts only requests that have the token and come from megaprof's own pages.

Other users of the machine can reach the port. So can every page that is open in the user's browser, even under its own
host name, if that name suddenly resolves to 127.0.0.1 (DNS rebinding). The token keeps out the users; the headers
``Host`` (Starlette's check, of `NAMES`), ``Origin`` and ``Sec-Fetch-Site`` keep out the pages. Opening the address with
the token sets a cookie, which no other site can send.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.middleware.base import DispatchFunction, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

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


def guard(token: str) -> DispatchFunction:
    """Returns the middleware that answers a request itself, with 403, unless it has the token and comes from one of our
    pages."""
    # All ports of a host share cookies, so each server uses its own cookie name.
    cookie = f"megaprof-{hashlib.sha256(token.encode()).hexdigest()[:12]}"

    async def dispatch(request: Request, call_next: RequestResponseEndpoint) -> Response:
        given = request.query_params.getlist("token")
        is_entry = (request.method, request.scope["path"], len(given)) == ("GET", "/", 1) and _same(given[0], token)
        origins, sites = map(request.headers.getlist, ("origin", "sec-fetch-site"))
        refused = ""
        if request.method not in ("GET", "HEAD") and not origins:
            refused = "a request that changes something must say which page it comes from"
        elif {*origins} - {f"http://{request.headers['host']}"} or (
            not is_entry and {*sites} - {"same-origin", "none"}
        ):
            refused = "the request comes from another page"
        elif not is_entry and not _same(request.cookies.get(cookie, ""), token):
            refused = "open the address that megaprof ui printed: it has the token of this server in it"
        response: Response
        if refused:
            response = PlainTextResponse(f"megaprof: {refused}\n", 403)
        elif is_entry:
            response = HTMLResponse(_ENTER)
            response.set_cookie(cookie, token, httponly=True, samesite="strict", path="/")
        else:
            response = await call_next(request)
        response.headers.setdefault("Content-Security-Policy", POLICY)
        response.headers.update(_HEADERS)
        return response

    return dispatch


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
