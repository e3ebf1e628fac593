"""Numbers and layers in words, the same wherever a report (as ``Report.to_json`` gives it) is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ABSENT = "-"


def number(ms: float | None) -> str:
    """Three significant digits, and never fewer than the whole milliseconds; ``-`` for None."""
    if ms is None:
        return ABSENT
    return f"{ms:.0f}" if abs(ms) >= 100 else f"{ms:.1f}" if abs(ms) >= 10 else f"{ms:.2f}"


def percent(fraction: float | None, *, sign: bool = False) -> str:
    """``12 %``, with one digit behind the point below 10 %; ``-`` for None."""
    if fraction is None:
        return ABSENT
    points = 100 * fraction
    text = f"{points:+.{0 if abs(points) >= 9.95 else 1}f}"
    return (text if sign else text.lstrip("+")) + " %"


def layers(chunks: Iterable[Mapping[str, Any] | None]) -> str:
    """Layers of some chunks, added up, and what is beside them: ``emb+6``, ``4``, ``2+loss``; ``?`` if not known."""
    known = [chunk for chunk in chunks if chunk is not None]
    if not known or any(chunk.get("layers") is None for chunk in known):
        return "?"
    parts = [str(sum(chunk["layers"] for chunk in known))]
    if any(chunk.get("embedding") for chunk in known):
        parts.insert(0, "emb")
    if mtp := sum(chunk.get("mtp") or 0 for chunk in known):
        parts.append(f"{mtp}mtp")
    if any(chunk.get("loss") for chunk in known):
        parts.append("loss")
    return "+".join(parts)


def steps(numbers: Sequence[int]) -> str:
    """``step 3``, ``steps 2, 5``, ``steps 3-9``."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"steps {numbers[0]}-{numbers[-1]}"
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"step{'s' if len(numbers) > 1 else ''} {listed}"


def title(target: Mapping[str, Any]) -> str:
    """``train_actor``, ``train_log_probs (ref)``."""
    return str(target["target"]) + (f" ({target['role']})" if target.get("role") else "")


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
