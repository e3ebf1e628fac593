"""The server of `megaprof ui`: the handlers of its addresses, and the pages, from Jinja2 templates with the rules of
the report: all text is escaped."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from megaprof.analysis.report import diff as differences
from megaprof.analysis.report import html
from megaprof.analysis.report.diff import Diff
from megaprof.analysis.report.report import Report, TargetReport
from megaprof.analysis.what_if.changeable import Changeable
from megaprof.analysis.what_if.changes import PLANS
from megaprof.cli import look
from megaprof.control.directory import Unsafe, roles_with_a_run
from megaprof.control.request import SELECT, STEPS
from megaprof.formats.job import Refused
from megaprof.formats.phrases import Unanswerable
from megaprof.ui import what_if
from megaprof.ui.captures import Capture, KeptCaptures, Listing, Place, look_below
from megaprof.ui.guard import NAMES, guard
from megaprof.ui.live import Kept, LiveJob, state_of
from megaprof.ui.what_if import answer

#: Seconds for which a listing is reused, after which a waiting page is shown, and after which that page asks again.
_LISTED, _PATIENCE, _AGAIN = 2.0, 0.4, 2
_MISSING = "There is no such page, or not any more."
_REPORT_POLICY = "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Pages:
    """The handlers of all addresses. ``allow_trigger``: True if captures may be requested from the live page."""

    def __init__(self, directory: Path, allow_trigger: bool) -> None:
        self._directory, self._allow_trigger = directory, allow_trigger
        self._captures = KeptCaptures()
        self._jobs: dict[tuple[Path, str | None], LiveJob] = {}
        self._listing = Kept(lambda: look_below(directory), lambda listing: _LISTED)

    async def close(self) -> None:
        """Ends everything that runs behind the pages."""
        self._captures.close()
        await asyncio.gather(*(job.close() for job in self._jobs.values()))

    async def home(self, request: Request) -> Response:
        places, more = await self._list()
        rows = [(place, self._captures.brief(place)) for place in places.values()]
        jobs = [place for place in places.values() if place.job]
        states = await run_in_threadpool(lambda: {place.id: state_of(place.path) for place in jobs})
        return _page("home.html", directory=self._directory, rows=rows, states=states, more=more, whole=False)

    async def brief(self, request: Request) -> Response:
        """Answers with the verdict of one row, which the home page inserts. With ``?whole``, also with the steps in
        which the job stood still, for the live page of a job that has ended."""
        place = await self._place(request)
        try:
            briefs: object = (await self._captures.get(place)).briefs
        except Unanswerable as fault:
            briefs = str(fault)
        return HTMLResponse(render("brief.html", place=place, briefs=briefs, whole="whole" in request.query_params))

    async def capture(self, request: Request) -> Response:
        capture = await self._read(request, await self._place(request))
        return HTMLResponse(capture.page, headers={"Content-Security-Policy": html.policy() + _REPORT_POLICY})

    async def what_if(self, request: Request) -> Response:
        place = await self._place(request)
        report = (await self._read(request, place)).report
        number, target, changeable = _chosen(request, report)
        shared: dict[str, Any] = {"place": place, "targets": report.targets, "number": number, "target": target}
        if target is None or changeable is None:
            return _page("what_if.html", **shared, answer=None, data=None)
        answered = await run_in_threadpool(answer, changeable, target, request.query_params)
        return _page("what_if.html", **shared, answer=answered, data=html.embedded([answered.boxes]))

    async def tried(self, request: Request) -> Response:
        """Answers the script with the parts of the page that change."""
        place = await self._place(request)
        try:
            capture = await self._captures.get(place)
        except Unanswerable as fault:
            return JSONResponse({"fault": str(fault)})
        number, target, changeable = _chosen(request, capture.report)
        if target is None or changeable is None:
            raise HTTPException(404)
        answered = await run_in_threadpool(answer, changeable, target, request.query_params)
        if answered.fault is not None:
            return JSONResponse({"fault": answered.fault})
        values = {"place": place, "number": number, "target": target, "answer": answered}
        shown = await run_in_threadpool(render, "tried.html", **values)
        return JSONResponse({"fault": None, "html": shown, "query": answered.query(number), "boxes": answered.boxes})

    async def compare(self, request: Request) -> Response:
        places, _ = await self._list()
        both = [places.get(request.query_params.get(name, "")) for name in ("a", "b")]
        values: dict[str, Any] = {"places": [place for place in places.values() if place.files], "both": both}
        if both[0] is None or both[1] is None:
            return _page("compare.html", **values, diff=None, fault=None, data=None)
        before, after = captures = [await self._read(request, place) for place in both if place is not None]
        try:
            diff = await run_in_threadpool(differences.compare, before.report, after.report)
        except Unanswerable as fault:
            return _page("compare.html", **values, diff=None, fault=str(fault), data=None)
        drawn, drawings = side_by_side(diff, captures)
        data = html.embedded(drawings) if drawings else None
        return _page("compare.html", **values, diff=diff, drawn=drawn, fault=None, data=data)

    async def live(self, request: Request) -> Response:
        place = await self._place(request)
        roles, role = await run_in_threadpool(_roles, request, place)
        now = await self._job(place, role).now()
        shown = Markup(render("now.html", now=now, place=place))
        return _page(
            "live.html", place=place, now=now, shown=shown, roles=roles, role=role, allowed=self._allow_trigger
        )

    async def now(self, request: Request) -> Response:
        """Answers the script with the part of the page that changes, and the seconds until it should ask again."""
        place = await self._place(request)
        _, role = await run_in_threadpool(_roles, request, place)
        now = await self._job(place, role).now()
        shown = await run_in_threadpool(partial(render, "now.html", now=now, place=place))
        return JSONResponse({"html": shown, "state": now.state, "captures": now.captures, "every": now.every})

    async def trigger(self, request: Request) -> Response:
        if not self._allow_trigger:
            raise HTTPException(
                403, "megaprof ui was started without --allow-trigger: no capture is asked for from here"
            )
        place = await self._place(request)
        _, role = await run_in_threadpool(_roles, request, place)
        form = dict(parse_qsl((await request.body()).decode(errors="replace")))
        if not (steps := form.get("steps", str(STEPS))).isdecimal():
            raise HTTPException(400, f"steps={steps[:20]} is not a number")
        try:
            await self._job(place, role).capture(form.get("target", ""), int(steps[:9]), form.get("select", SELECT))
        except (Unanswerable, Refused) as refusal:
            raise HTTPException(409, str(refusal)) from None
        return RedirectResponse(f"/live/{place.id}" + ("" if role is None else f"?role={role}"), 303)

    def _job(self, place: Place, role: str | None) -> LiveJob:
        """Returns a job that remembers the last look at it."""
        key = (place.path, role)
        if key not in self._jobs:
            self._jobs[key] = LiveJob(place.path, role)
        return self._jobs[key]

    async def _list(self) -> Listing:
        """Returns a fresh listing, or the previous one if looking takes long."""
        return await self._listing.get(_PATIENCE) or await self._listing.get(None) or ({}, False)

    async def _place(self, request: Request) -> Place:
        places, _ = await self._list()
        place = places.get(request.path_params["id"])
        if place is None:
            raise HTTPException(404)
        return place

    async def _read(self, request: Request, place: Place) -> Capture:
        """Returns the capture for a page. Raises asyncio.TimeoutError while it is being read, and Unanswerable: the
        request is then answered with a page that says so."""
        request.state.place = place
        return await asyncio.wait_for(self._captures.get(place), _PATIENCE)


def app(directory: Path, token: str, allow_trigger: bool = False) -> Starlette:
    """Returns the application that serves the pages about ``directory`` and everything below it. It answers only
    requests with the token."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await answering.close()

    answering = Pages(directory, allow_trigger)
    return Starlette(
        routes=[
            Route("/", answering.home),
            Route("/brief/{id}", answering.brief),
            Route("/capture/{id}", answering.capture),
            Route("/capture/{id}/what-if", answering.what_if),
            Route("/capture/{id}/what-if.json", answering.tried),
            Route("/compare", answering.compare),
            Route("/live/{id}", answering.live),
            Route("/live/{id}/now", answering.now),
            Route("/live/{id}/capture", answering.trigger, methods=["POST"]),
            Mount("/static", StaticFiles(packages=[("megaprof.ui", "static"), ("megaprof.analysis.report", "static")])),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False),
            Middleware(BaseHTTPMiddleware, dispatch=guard(token)),
        ],
        exception_handlers={
            404: lambda request, fault: _page("message.html", 404, title="Not found", message=_MISSING),
            asyncio.TimeoutError: lambda request, fault: _page(
                "reading.html", place=request.state.place, refresh=_AGAIN
            ),
            Unanswerable: lambda request, fault: _page(
                "message.html", 422, title=request.state.place.name, message=str(fault)
            ),
        },
        lifespan=lifespan,
    )


def listen(port: int | None, first: int) -> socket.socket:
    """Returns a socket on 127.0.0.1: at ``port`` or, if that is None, at the first free one of the 20 ports from
    ``first`` on. Raises OSError if there is none."""
    *tries, last = [first + place for place in range(20)] if port is None else [port]
    for number in tries:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", number))
    return socket.create_server(("127.0.0.1", last))


def server_of(pages_of: Starlette) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            pages_of, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3, ws="none"
        )
    )


def serve(pages_of: Starlette, opened: socket.socket, ready: Callable[[], None]) -> None:
    """Serves until Ctrl-C. Calls ``ready`` meanwhile: a request that comes before the server has started waits."""
    server = server_of(pages_of)
    # Pages that are still being read when it ends are given up, which is no error.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)

    async def run() -> None:
        await asyncio.gather(server.serve([opened]), asyncio.to_thread(ready))

    asyncio.run(run())


def _page(template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    return HTMLResponse(render(template, **({"refresh": None} | values)), status)


def _chosen(request: Request, report: Report) -> tuple[int, TargetReport | None, Changeable | None]:
    """Returns the number and the report of the target in the query, or else of the first target that can be changed by
    hand, and what predicts its changes."""
    text, count = request.query_params.get("t", ""), len(report.targets)
    number = next((place for place, changeable in enumerate(report.by_hand) if changeable is not None), 0)
    if text.isascii() and text.isdecimal() and int(text[:6]) < count:
        number = int(text[:6])
    return (number, report.targets[number], report.by_hand[number]) if count else (number, None, None)


def _roles(request: Request, place: Place) -> tuple[list[str], str | None]:
    """Returns the roles of a job that have their own part of its directory, and one of them: the one in the query or
    else the first; None without roles."""
    try:
        roles = [role for role in roles_with_a_run(place.path) if role is not None]
    except Unsafe:
        roles = []
    role = request.query_params.get("role")
    return roles, role if role in roles else roles[0] if roles else None


def render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(template).render(**values)


def side_by_side(diff: Diff, captures: Sequence[Capture]) -> tuple[list[list[int] | None], list[dict[str, Any]]]:
    """Returns two lists: for each target, the places of its two drawings in the second list (None without drawings),
    and the drawings of all targets. Both of a target are on an axis as long as the longer one."""
    places: list[list[int] | None] = []
    drawings: list[dict[str, Any]] = []
    for target in diff.targets:
        drawn = [capture.drawn.get((target.target, target.role)) for capture in captures]
        steps = [step for step in drawn if step is not None]
        if len(steps) < len(drawn):
            places.append(None)
            continue
        end = max(row["span"][1] for step in steps for row in step["rows"])
        places.append([len(drawings), len(drawings) + 1])
        drawings += [step | {"end": end} for step in steps]
    return places, drawings


def _size(count: int) -> str:
    if count < 1e5:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


_TEMPLATES = html.environment("megaprof.ui", "megaprof.analysis.report")
_TEMPLATES.globals |= {"differences": differences, "look": look, "what_if": what_if, "PLANS": PLANS}
_TEMPLATES.globals |= {"date": html.date, "size": _size}
