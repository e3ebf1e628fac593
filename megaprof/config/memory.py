"""``--profile-max-host-memory``: how much memory may be in use while a window is open."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_SHARE = 0.95
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_VALID = "valid: a size such as 64GiB or 500MB (of this process), or a share such as 80% (of the container's memory)"


@dataclass(frozen=True)
class MemoryLimit:
    """How much memory may be in use, including what closing the window takes."""

    size: int | None
    """Bound of this process's resident memory, in bytes; None for no bound."""
    share: float
    """Bound of the memory of the container and of the machine, as a fraction of it, 0 to 1."""


def parse_limit(option: str, text: str) -> MemoryLimit:
    """Reads ``64GiB`` (or ``64g``), ``64GB`` (decimal), ``1000000B`` or ``80%``. Refuses a number alone, because nobody
    who writes 12 means bytes.

    Raises ValueError that names ``option``, the value and what would be valid.
    """
    if match := _SHARE.fullmatch(text.strip()):
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise ValueError(f"{option}: {text!r} is not a share between 0% and 100%; {_VALID}")
        return MemoryLimit(None, share)
    match = _SIZE.fullmatch(text.strip())
    if match is not None and text.strip()[-1] in "0123456789":
        raise ValueError(f"{option}: {text!r} has no unit; {_VALID}")
    if match is None:
        raise ValueError(f"{option}: {text!r} is neither a size nor a share; {_VALID}")
    decimal = match[2] and not match[3] and text.strip().lower().endswith("b")
    size = int(float(match[1]) * (1000 if decimal else 1024) ** _POWERS[match[2].lower()])
    if size < 1:
        raise ValueError(f"{option}: {text!r} is less than one byte; {_VALID}")
    return MemoryLimit(size, DEFAULT_SHARE)
