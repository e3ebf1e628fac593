"""The figures as a table, and in docs/gpu.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gpu.bench import shown, verdict
from tests.gpu.parts import PARTS

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


def table(found: Mapping[str, Any]) -> str:
    """Markdown: device and versions, and a row for each part with what held and its figures."""
    versions = ", ".join(f"{name} {number or '(none)'}" for name, number in found["versions"].items())
    rows = [
        f"{found['device']}; {versions}; {found['seconds']:.0f} s.",
        "",
        "| part | result | figures |",
        "|---|---|---|",
    ]
    for name, part in found["parts"].items():
        figures = "; ".join(f"{key.replace('_', ' ')} {shown(value)}" for key, value in part.get("figures", {}).items())
        rows.append(f"| {name}: {PARTS[name].what} | {verdict(part)} | {figures} |".replace("\n", " "))
    return "\n".join(rows)


def write(page: Path, found: Mapping[str, Any]) -> None:
    """Put the table into ``page``, between its two marks. Raises ValueError for a page without them."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: {BEGIN} and {END} must stand in it")
    page.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")
