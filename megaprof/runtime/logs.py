"""The log of megaprof. Writing a line never raises: a handler of the host's that fails must not fail its training."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from megaprof.runtime.interruption import from_host


class _Guarded(logging.LoggerAdapter):  # type: ignore[type-arg]
    """The logger ``megaprof``, without the exceptions of its handlers."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        try:
            super().log(level, msg, *args, **kwargs)
        except Exception as fault:  # there is nowhere left to say it
            if from_host(fault):
                raise

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line that wrote it, not the one above
        return msg, kwargs


logger = _Guarded(logging.getLogger("megaprof"), {})


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr as long as nobody else would write the lines of the logger ``megaprof``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``, unless the host has configured its logging meanwhile."""
        own = logging.getLogger("megaprof")
        if not any(handler is not self for handler in (*own.handlers, *logging.getLogger().handlers)):
            super().emit(record)


def show_lines() -> None:
    """Make lines of level INFO visible, unless the host has configured its logging."""
    own = logging.getLogger("megaprof")
    if own.hasHandlers() or own.level != logging.NOTSET:
        return
    handler = _OwnHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    own.addHandler(handler)
    own.setLevel(logging.INFO)
