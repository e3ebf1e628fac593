"""The server of `megaprof ui`, and the handlers of its addresses."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from megaprof.analysis.report import html
from megaprof.analysis.report.compare import NothingToCompare, compare
from megaprof.analysis.report.document import Report, TargetReport
from megaprof.analysis.what_if.changeable import Changeable
from megaprof.control.directory import Unsafe, roles_with_a_run
from megaprof.formats.job import Refused
from megaprof.ui import pages
from megaprof.ui.captures import Capture, KeptCaptures, Unreadable
from megaprof.ui.guard import Guard
from megaprof.ui.live import Kept, LiveJob, state_of
from megaprof.ui.places import Listing, Place, look_below
from megaprof.ui.what_if import answer, host_options

#: Seconds for which a listing is reused, after which a waiting page is shown, and after which that page asks again.
_LISTED, _PATIENCE, _AGAIN = 2.0, 0.4, 2
#: The most bytes of a form.
_LONGEST_FORM = 4096
#: How often the server looks whether it shall end.
_EXIT_SECONDS = 0.1
_MOST_STEPS = 20
_REPORT_POLICY = "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Pages:
    """The handlers of all addresses. ``allow_trigger``: True if captures may be requested from the live page."""

    def __init__(self, directory: Path, allow_trigger: bool) -> None:
        self._directory, self._allow_trigger = directory, allow_trigger
        self._captures = KeptCaptures()
        self._jobs: dict[tuple[Path, str | None], LiveJob] = {}
        self._listing = Kept(lambda: look_below(directory), lambda listing: _LISTED)

    def routes(self) -> list[BaseRoute]:
        """Returns every address with its handler."""
        return [
            Route("/", self.home),
            Route("/brief/{id}", self.brief),
            Route("/capture/{id}", self.capture),
            Route("/capture/{id}/what-if", self.what_if),
            Route("/capture/{id}/what-if.json", self.tried),
            Route("/compare", self.compare),
            Route("/live/{id}", self.live),
            Route("/live/{id}/now", self.now),
            Route("/live/{id}/capture", self.trigger, methods=["POST"]),
            Mount("/static", StaticFiles(packages=[("megaprof.ui", "static"), ("megaprof.analysis.report", "static")])),
        ]

    async def close(self) -> None:
        """Ends everything that runs behind the pages."""
        self._captures.close()
        await asyncio.gather(*(job.close() for job in self._jobs.values()))

    async def home(self, request: Request) -> Response:
        listing = await self._list()
        briefs = [self._captures.brief(place) for place in listing.places]
        rows = list(zip(listing.places, briefs, strict=True))
        jobs = [place for place in listing.places if place.job]
        states = await run_in_threadpool(lambda: {place.id: state_of(place.path) for place in jobs})
        return _page("home.html", directory=self._directory, rows=rows, states=states, more=listing.more, whole=False)

    async def brief(self, request: Request) -> Response:
        """Answers with the verdict of one row, which the home page inserts. With ``?whole``, also with the steps in
        which the job stood still, for the live page of a job that has ended."""
        place = await self._place(request)
        try:
            briefs: object = (await self._captures.get(place, pages.links_of(place))).briefs
        except Unreadable as fault:
            briefs = str(fault)
        return HTMLResponse(
            pages.render("brief.html", place=place, briefs=briefs, whole="whole" in request.query_params)
        )

    async def capture(self, request: Request) -> Response:
        place = await self._place(request)
        capture = await self._read(place)
        if isinstance(capture, Response):
            return capture
        return HTMLResponse(capture.page, headers={"Content-Security-Policy": html.policy() + _REPORT_POLICY})

    async def what_if(self, request: Request) -> Response:
        place = await self._place(request)
        capture = await self._read(place)
        if isinstance(capture, Response):
            return capture
        targets = capture.report.targets
        number, target, changeable = _chosen(request, capture.report)
        shared: dict[str, Any] = {"place": place, "targets": targets, "number": number, "target": target}
        if target is None or changeable is None:
            return _page("what_if.html", **shared, answer=None, data=None)
        answered = await run_in_threadpool(answer, changeable, target, request.query_params)
        options = host_options(target, answered.now.prediction)
        return _page("what_if.html", **shared, answer=answered, options=options, data=pages.data_of([answered.boxes]))

    async def tried(self, request: Request) -> Response:
        """Answers the script with the parts of the page that change."""
        place = await self._place(request)
        try:
            capture = await self._captures.get(place, pages.links_of(place))
        except Unreadable as fault:
            return JSONResponse({"fault": str(fault)})
        number, target, changeable = _chosen(request, capture.report)
        if target is None or changeable is None:
            raise HTTPException(404)

        def try_it() -> dict[str, object]:
            answered = answer(changeable, target, request.query_params)
            if answered.fault is not None:
                return {"fault": answered.fault}
            shown = pages.render(
                "tried.html",
                place=place,
                number=number,
                target=target,
                answer=answered,
                options=host_options(target, answered.now.prediction),
            )
            return {"fault": None, "html": shown, "query": answered.query(number), "boxes": answered.boxes}

        return JSONResponse(await run_in_threadpool(try_it))

    async def compare(self, request: Request) -> Response:
        listing = await self._list()
        both = [listing.find(request.query_params.get(name, "")) for name in ("a", "b")]
        values: dict[str, Any] = {"places": [place for place in listing.places if place.files], "both": both}
        if both[0] is None or both[1] is None:
            return _page("compare.html", **values, diff=None, fault=None, data=None)
        captures: list[Capture] = []
        for place in both:
            if place is not None:
                read = await self._read(place)
                if isinstance(read, Response):
                    return read
                captures.append(read)
        try:
            diff = await run_in_threadpool(compare, captures[0].report, captures[1].report)
        except NothingToCompare as fault:
            return _page("compare.html", **values, diff=None, fault=str(fault), data=None)
        drawn, drawings = pages.side_by_side(diff, captures)
        data = pages.data_of(drawings) if drawings else None
        return _page("compare.html", **values, diff=diff, drawn=drawn, fault=None, data=data)

    async def live(self, request: Request) -> Response:
        place = await self._place(request)
        roles = await run_in_threadpool(_roles, place.path)
        role = _role(request, roles)
        now = await self._job(place, role).now()
        shown = Markup(pages.now_html(now, place))
        return _page(
            "live.html", place=place, now=now, shown=shown, roles=roles, role=role, allowed=self._allow_trigger
        )

    async def now(self, request: Request) -> Response:
        """Answers the script with the part of the page that changes, and the seconds until it should ask again."""
        place = await self._place(request)
        role = _role(request, await run_in_threadpool(_roles, place.path))
        now = await self._job(place, role).now()
        shown = await run_in_threadpool(pages.now_html, now, place)
        return JSONResponse({"html": shown, "state": now.state, "captures": now.captures, "every": now.every})

    async def trigger(self, request: Request) -> Response:
        if not self._allow_trigger:
            return _refused("captures are not asked for from here: megaprof ui was started without --allow-trigger")
        place = await self._place(request)
        role = _role(request, await run_in_threadpool(_roles, place.path))
        form = await _form(request)
        if form is None:
            return _refused("this is no form of the live page", 400)
        steps = form.get("steps", "2")
        if not steps.isascii() or not steps.isdecimal() or not 1 <= int(steps[:9]) <= _MOST_STEPS:
            return _refused(f"steps={steps[:20]} is not a number from 1 to {_MOST_STEPS}", 400)
        job = self._job(place, role)
        try:
            await job.capture(form.get("target", ""), int(steps), form.get("select", "") or "per-stage")
        except Refused as refusal:
            return _refused(str(refusal), 409)
        return RedirectResponse(f"/live/{place.id}" + ("" if role is None else f"?role={role}"), 303)

    def _job(self, place: Place, role: str | None) -> LiveJob:
        """Returns a job that remembers the looks at it so far."""
        key = (place.path, role)
        if key not in self._jobs:
            self._jobs[key] = LiveJob(place.path, role)
        return self._jobs[key]

    async def _list(self) -> Listing:
        """Returns a fresh listing, or the previous one if looking takes long."""
        return await self._listing.get(_PATIENCE) or await self._listing.get(None) or Listing((), False)

    async def _place(self, request: Request) -> Place:
        place = (await self._list()).find(request.path_params["id"])
        if place is None:
            raise HTTPException(404)
        return place

    async def _read(self, place: Place) -> Capture | Response:
        """Returns the capture, or a page that says that it is being read, or why it cannot be read."""
        try:
            return await asyncio.wait_for(self._captures.get(place, pages.links_of(place)), _PATIENCE)
        except asyncio.TimeoutError:
            return _page("reading.html", place=place, refresh=_AGAIN)
        except Unreadable as fault:
            return _page("message.html", 422, title=place.name, message=str(fault))


def app(directory: Path, token: str, allow_trigger: bool = False) -> Starlette:
    """Returns the application that serves the pages about ``directory`` and everything below it. It answers only
    requests with the token."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await answering.close()

    answering = Pages(directory, allow_trigger)

    def missing(request: Request, fault: Exception) -> Response:
        return _page("message.html", 404, title="Not found", message="There is no such page, or not any more.")

    return Starlette(
        routes=answering.routes(),
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={404: missing},
        lifespan=lifespan,
    )


def listen(port: int | None, first: int) -> socket.socket:
    """Returns a socket on 127.0.0.1: at ``port`` or, if that is None, at the first free one of the 20 ports from
    ``first`` on. Raises OSError."""
    tries = [first + place for place in range(20)] if port is None else [port]
    for number in tries:
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(("127.0.0.1", number))
        except OSError:
            opened.close()
            if number == tries[-1]:
                raise
        else:
            return opened
    raise OSError("no port was tried")


def server_of(pages_of: Starlette) -> uvicorn.Server:
    """Returns the server for an application that `app` made."""
    return uvicorn.Server(
        uvicorn.Config(
            pages_of, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3, ws="none"
        )
    )


def serve(pages_of: Starlette, opened: socket.socket, ready: Callable[[], None]) -> None:
    """Serves until Ctrl-C. Calls ``ready`` once the server has started."""
    server = server_of(pages_of)

    async def run() -> None:
        serving = asyncio.create_task(server.serve([opened]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            await asyncio.to_thread(ready)
        while not server.should_exit and not serving.done():
            await asyncio.sleep(_EXIT_SECONDS)
        # Pages that are still being read are given up now, which is no error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await serving

    asyncio.run(run())


def _page(template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    return HTMLResponse(pages.render(template, **({"refresh": None} | values)), status)


def _refused(message: str, status: int = 403) -> Response:
    return PlainTextResponse(f"megaprof: {message}\n", status)


def _chosen(request: Request, report: Report) -> tuple[int, TargetReport | None, Changeable | None]:
    """Returns the number and the report of the target in the query, or else of the first target that can be changed by
    hand, and what predicts its changes."""
    text, count = request.query_params.get("t", ""), len(report.targets)
    number = next((place for place, changeable in enumerate(report.by_hand) if changeable is not None), 0)
    if text.isascii() and text.isdecimal() and int(text[:6]) < count:
        number = int(text[:6])
    return (number, report.targets[number], report.by_hand[number]) if count else (number, None, None)


def _roles(directory: Path) -> list[str]:
    """Returns the roles of a job that have their own part of its directory."""
    try:
        return [role for role in roles_with_a_run(directory) if role is not None]
    except Unsafe:
        return []


def _role(request: Request, roles: list[str]) -> str | None:
    """Returns the role in the query if the job has it, else the job's first role; None without roles."""
    role = request.query_params.get("role")
    return role if role in roles else roles[0] if roles else None


async def _form(request: Request) -> dict[str, str] | None:
    """Returns the fields of a small form; None for anything else."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
        return None
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _LONGEST_FORM:
            return None
    try:
        return {name: values[0] for name, values in parse_qs(content.decode("ascii"), max_num_fields=16).items()}
    except ValueError:
        return None
