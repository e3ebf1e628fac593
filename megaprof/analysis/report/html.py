"""The report as one self-contained HTML file to send: it opens offline, prints, and loads nothing.

The markup is in ``templates/``. The pipeline timeline is drawn on a canvas by ``static/report.js``, not by plotly:
plotly.js alone is 4.5 MB in every file, and it has no fast mark for the 160,000 boxes of 64 stages with 512
microbatches, which are 3 MB here and drawn in one frame. Everything else (bars, spreads, tables) is HTML and CSS, which
prints and needs no script.

Names in a trace are input from elsewhere. The templates escape all text, and control characters, which HTML forbids,
are replaced; the data of the timeline are JSON with ``<`` escaped, shown through ``textContent`` only; and a content
security policy lets no script run but ours, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megaprof.analysis.report import charts, sentences
from megaprof.analysis.report.document import Report
from megaprof.analysis.report.drawn import StepTimeline, boxes
from megaprof.analysis.stages import words
from megaprof.version import __version__


def page(report: Report, drawn: Mapping[tuple[str, str | None], StepTimeline]) -> str:
    """The whole file. ``drawn``: the step of each target that is drawn, by target and role."""
    script = _static("report.js")
    steps = [drawn.get(target.key) for target in report.targets]
    data = json.dumps([boxes(step) if step else None for step in steps], separators=(",", ":"))
    name = report.source.absolute().name
    began = min((row.call.extent[0] for step in steps if step for row in step.rows), default=None)
    about = [name, *([_date(began)] if began is not None else []), f"megaprof {__version__}"]
    return (
        _environment()
        .get_template("page.html")
        .render(
            report=report,
            steps=steps,
            name=name,
            about=about,
            data=Markup(data.replace("<", "\\u003c")),  # it cannot end the script element around it
            css=Markup(_static("report.css")),
            script=Markup(script),
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("megaprof.analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.globals |= {"charts": charts, "sentences": sentences, "shell": shlex.join, "words": words}
    return environment


def _printable(value: object) -> object:
    """Text without control characters."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() else "\ufffd" for c in str(value))


def _date(nanoseconds: int) -> str:
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _static(name: str) -> str:
    return (files("megaprof.analysis.report") / "static" / name).read_text(encoding="utf-8")
