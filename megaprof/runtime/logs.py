"""The log of megaprof. Writing a line never raises: if the host's log handler fails, training must go on."""

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
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # shows the line that logs, not this adapter
        return msg, kwargs


logger = _Guarded(logging.getLogger("megaprof"), {})


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr as long as nobody else would write the lines of the logger ``megaprof``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes ``record``, unless the host has configured its logging meanwhile."""
        package_logger = logging.getLogger("megaprof")
        if not any(handler is not self for handler in (*package_logger.handlers, *logging.getLogger().handlers)):
            super().emit(record)


def show_lines() -> None:
    """Makes lines of level INFO visible, unless the host has configured its logging."""
    package_logger = logging.getLogger("megaprof")
    if package_logger.hasHandlers() or package_logger.level != logging.NOTSET:
        return
    handler = _OwnHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    package_logger.addHandler(handler)
    package_logger.setLevel(logging.INFO)
