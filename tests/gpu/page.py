"""The results as a table, and in docs/gpu.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gpu.bench import verdict

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


def table(found: Mapping[str, Any]) -> str:
    """Markdown: device and versions, and a row for each part with what held. The JSON has the figures."""
    versions = ", ".join(f"{name} {number or '(none)'}" for name, number in found["versions"].items())
    rows = [
        f"{found['device']}; {versions}; {found['seconds']:.0f} s.",
        "",
        "| part | result |",
        "|---|---|",
    ]
    rows += [f"| {name} | {verdict(part)} |".replace("\n", " ") for name, part in found["parts"].items()]
    return "\n".join(rows)


def write(page: Path, found: Mapping[str, Any]) -> None:
    """Put the table into ``page``, between its two marks. Raises ValueError for a page without them."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: {BEGIN} and {END} must stand in it")
    page.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")
