"""Makes the report one self-contained HTML file that can be sent: it opens offline, can be printed, and loads nothing.

The markup is in ``templates/``. ``static/report.js`` draws the pipeline timeline on a canvas. It does not use plotly:
plotly.js alone adds 4.5 MB to every file, and it has no fast mark for the 160,000 boxes of 64 stages with 512
microbatches. Here these boxes take 3 MB and are drawn in one frame. Everything else (bars, spreads, tables) is HTML and
CSS, which can be printed and needs no script.

Names in a trace are untrusted input. The templates escape all text, and replace control characters, which HTML forbids.
The data of the timeline are JSON with ``<`` escaped, and the script shows them through ``textContent`` only. A content
security policy allows only our own script to run, identified by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megaprof.analysis import words
from megaprof.analysis.report import drawn as drawings
from megaprof.analysis.report import views
from megaprof.analysis.report.drawn import StepTimeline, boxes
from megaprof.analysis.report.report import Report
from megaprof.analysis.report.text import causes, sentences, what_if
from megaprof.formats.phrases import printable
from megaprof.version import __version__


def page(report: Report, drawn: Mapping[int, StepTimeline], links: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the whole file. ``drawn``: as `Report.steps` returns it; ``links``: addresses and titles of others."""
    *steps, roles = (drawn.get(place) for place in range(len(report.targets) + 1))
    name = report.path.absolute().name
    began = min((row.extent[0] for step in steps if step for row in step.rows), default=None)
    about = [name, *([date(began / 1e9)] if began is not None else []), f"megaprof {__version__}"]
    template = environment("megaprof.analysis.report").get_template("page.html")
    return template.render(
        report=report,
        steps=steps,
        roles=roles,
        name=name,
        about=about,
        data=embedded([boxes(step) if step else None for step in (*steps, *filter(None, [roles]))]),
        css=Markup(static("report.css")),
        script=Markup(static("report.js")),
        policy=policy(),
        links=links,
    )


def embedded(drawn: Sequence[Mapping[str, Any] | None]) -> Markup:
    """Returns drawings for the script, as JSON that cannot end the element around it."""
    return Markup(json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c"))


def policy() -> str:
    """Returns the content security policy of the report: nothing is loaded, and only our script runs, by its hash."""
    digest = base64.b64encode(hashlib.sha256(static("report.js").encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def environment(*packages: str) -> Environment:
    """Returns a Jinja2 environment with the templates of these packages. It escapes all text, and replaces control
    characters."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value), "\ufffd"),
    )
    made.globals |= {"causes": causes, "drawings": drawings, "light": light, "predictions": what_if}
    made.globals |= {"sentences": sentences, "shell": shlex.join, "views": views, "words": words}
    return made


def light(text: str) -> Markup:
    """Returns a number as HTML, with its error or range in a lighter weight: what is behind the first line break or, if
    there is none, the first space."""
    number, space, error = text.partition("\n" if "\n" in text else " ")
    return Markup("{}<small class=error> {}</small>").format(number, error) if space else Markup("{}").format(number)


def date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def static(name: str) -> str:
    return (files("megaprof.analysis.report") / "static" / name).read_text(encoding="utf-8")
