"""The host's own OpenTelemetry span says which capture was made in it, so that one leads to the other."""

from __future__ import annotations

import sys
from typing import Any

from megaprof.recorders import Window
from megaprof.runtime.interruption import Suppressed


def note(window: Window) -> None:
    """Add an event ``megaprof.capture`` to the span that is open on this thread, with what the names of the capture's
    files begin with. Does nothing where nobody traces; nothing of OpenTelemetry is imported."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return
    stem = window.path("", ".").name.rstrip(".")
    facts = {"target": window.target, "role": window.role, "step": window.step, "file": stem}
    known = {f"megaprof.{name}": value for name, value in facts.items() if value is not None}
    with Suppressed(Exception):  # the capture is whole, whatever becomes of the event
        span = trace.get_current_span()
        if span.is_recording():
            span.add_event("megaprof.capture", known)
