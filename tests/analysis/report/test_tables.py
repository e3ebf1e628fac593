"""Tables on a terminal and on a page: whatever its width, nothing of a table is lost."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megaprof.analysis.report.html import environment
from megaprof.analysis.report.tables import Column, TableView, row
from megaprof.analysis.report.terminal import show_table


@given(columns=st.integers(1, 9), rows=st.integers(1, 4), width=st.integers(30, 120))
@settings(max_examples=25, deadline=None)
def test_every_cell_is_shown_at_every_width_beside_what_its_row_is_about(columns: int, rows: int, width: int) -> None:
    cells = [[f"{line}.{place} ±0.1" for place in range(columns)] for line in range(rows)]
    heads = [Column(f"quantity\n{place}", unit="ms") for place in range(columns)]
    body = tuple(row(f"key{line}", *cells[line]) for line in range(rows))
    view = TableView("everything", (Column("stage", "name"), *heads), body)
    printed = io.StringIO()
    show_table(Console(file=printed, width=width), view)
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for line in range(rows):
        assert [cell for each in lines if f"key{line}" in each for cell in cells[line] if cell in each] == cells[line]


def test_a_number_is_whole_also_where_its_row_has_a_long_name() -> None:
    columns = Column("part", "name"), Column("an iteration", unit="ms")
    view = TableView("", columns, (row("exchanges and others", 170),))
    printed = io.StringIO()
    show_table(Console(file=printed, width=30), view)
    assert {"an", "iteration", "ms", "170", "exchanges", "and", "others"} <= set(printed.getvalue().split())


def test_names_from_files_are_text_in_every_cell() -> None:
    view = TableView("<b>", (Column("<i>", "text"), Column("[red]")), (row("<script>\x1b[31m", "[bold]1"),))
    printed = io.StringIO()
    show_table(Console(file=printed, width=80), view)
    assert "<script>\ufffd[31m" in printed.getvalue()
    assert "[bold]1" in printed.getvalue()
    page = environment("megaprof.analysis.report").get_template("table.html").module.table(view)  # type: ignore[attr-defined]
    assert "<script>" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;\ufffd[31m" in page
