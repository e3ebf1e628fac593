"""Opens a SQLite file of any origin in such a way that it can do no harm.

The file is opened read-only and immutable, without extensions. Only plain tables are read, because a view or a virtual
table is a program. A query that takes longer than a healthy file of this size needs is broken off. The number of rows
is limited.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from megaprof.analysis.trace.decoding import Undecodable
from megaprof.formats.inputs import most_bytes, open_input
from megaprof.formats.remote import local_copy

_MAGIC = b"SQLite format 3\0"
#: The seconds that reading may take, and the bytes for which it may take one second more. A healthy file is read at
#: 100 MB/s or more.
_SECONDS, _BYTES_A_SECOND = 60.0, 2_000_000
_STEPS = 20_000  # steps of SQLite's virtual machine between two looks at the clock
_LONGEST_VALUE = 8 << 20
#: The most bytes of memory that a row takes.
_ROW_BYTES = 400
#: The values of `hidden` in `pragma table_xinfo` for computed columns.
_COMPUTED = (2, 3)


class Tables:
    """The plain tables of one file. Every method raises Undecodable if something cannot be read."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        with _as_undecodable():
            table_rows = connection.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = 'table' LIMIT 10000"
            ).fetchall()
        self._plain = {
            name for name, sql in table_rows if isinstance(sql, str) and sql[:14].upper().startswith("CREATE TABLE")
        }
        self._columns: dict[str, frozenset[str]] = {}

    def columns(self, table: str) -> frozenset[str]:
        """Returns the names of a table's columns; none if there is no such plain table."""
        if table not in self._columns:
            table_columns: list[Any] = []
            if table in self._plain:
                with _as_undecodable():
                    table_columns = self._connection.execute(f'PRAGMA table_xinfo("{table}")').fetchall()
            if any(row[6] in _COMPUTED for row in table_columns):
                raise Undecodable(f"its table {table} has computed columns, as no file of nsys's has")
            self._columns[table] = frozenset(str(row[1]) for row in table_columns)
        return self._columns[table]

    def has(self, table: str, *columns: str) -> bool:
        """Returns whether there is such a plain table, with these columns."""
        return bool(names := self.columns(table)) and names.issuperset(columns)

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Yields the rows of one of our queries. Raises Undecodable if there are more rows than fit into memory."""
        most_rows = most_bytes() // _ROW_BYTES
        with _as_undecodable():
            for number, row in enumerate(self._connection.execute(query, values)):
                if number >= most_rows:
                    raise Undecodable(f"it has more than {most_rows:,} rows to be read (see --max-input-mib)")
                yield row


@contextmanager
def opened(path: Path) -> Iterator[Tables]:
    """Opens ``path``. Raises Undecodable, and OSError if it cannot be read."""
    with open_input(path) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise Undecodable("it is no SQLite file")
        size = file.seek(0, 2)
    local_path = local_copy(path)
    with _as_undecodable():
        connection = sqlite3.connect(local_path.absolute().as_uri() + "?mode=ro&immutable=1", uri=True)
    deadline = time.monotonic() + _SECONDS + size / _BYTES_A_SECOND
    with closing(connection):
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        if hasattr(connection, "setlimit"):  # from Python 3.11
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        with _as_undecodable():
            for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "mmap_size = 0"):
                connection.execute(f"PRAGMA {pragma}")
        yield Tables(connection)


@contextmanager
def _as_undecodable() -> Iterator[None]:
    """Turns a fault of SQLite's into Undecodable, with a message of one line."""
    try:
        yield
    except sqlite3.OperationalError as fault:
        if "interrupted" in str(fault):
            raise Undecodable("reading it takes longer than any healthy file of its size does") from None
        raise Undecodable(f"its database is damaged: {_line(fault)}") from None
    except (sqlite3.Error, sqlite3.Warning) as fault:
        raise Undecodable(f"its database is damaged: {_line(fault)}") from None
    except (OverflowError, UnicodeError) as fault:
        raise Undecodable(f"its database holds impossible values: {_line(fault)}") from None
    except MemoryError:
        raise Undecodable("it does not fit into memory") from None


def _line(fault: Exception) -> str:
    return " ".join(str(fault).split())[:200]
