"""Writes a trace as Nsight Systems would export it: the tables of its schema 3.0.0 that are read, and their types."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from tests.analysis.synthetic import BASE, TraceBuilder

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER NOT NULL, devStateName TEXT NOT NULL, name TEXT NOT NULL,
    nameEnum INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
"""
_VM = 0x1000000000000  # what stands above the process id in nsys's serialised ids
_PLACE = {"gpu_memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY", "kernel": "CUPTI_ACTIVITY_KIND_KERNEL"}
#: Seconds before the first event in which nothing of ours was recorded, so that no step is the first behind an opening.
EARLIER = 2.0


def nsys_name(trace: TraceBuilder) -> str:
    described = trace.document()["megaprof"]
    return f"nsys.rank{described['coords']['rank']}.{described['host']}.{described['pid']}.sqlite"


def write_nsys(
    trace: TraceBuilder, directory: Path, *, sidecar: bool = True, earlier: float = EARLIER, name: str | None = None
) -> Path:
    """The export of one process, and the metadata beside it; ``earlier``: how long nsys had recorded already, in
    seconds."""
    return write_document(trace.document(), directory, trace, sidecar=sidecar, earlier=earlier, name=name)


def write_document(
    document: dict[str, Any],
    directory: Path,
    trace: TraceBuilder,
    *,
    sidecar: bool = True,
    earlier: float = EARLIER,
    name: str | None = None,
) -> Path:
    described = document["megaprof"]
    path = directory / (name or nsys_name(trace))
    directory.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with sqlite3.connect(path) as database:
        if new:
            database.executescript(SCHEMA)
            start = BASE - round(earlier * 1e9)
            database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '')", (start,))
            host = (0, "Local (CLI)", "Hostname", 619, described["host"])
            database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (?, ?, ?, ?, ?)", host)
        (start,) = database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        _insert(database, document["traceEvents"], described["pid"], BASE - start)
    database.close()
    if sidecar:
        beside = trace.name.replace(".pt.trace.json.gz", ".nsys.json")
        (directory / beside).write_text(json.dumps({"capture": 1, "megaprof": described}))
    return path


def _insert(database: sqlite3.Connection, events: list[dict[str, Any]], pid: int, later: int) -> None:
    strings: dict[str, int] = {text: number for number, text in database.execute("SELECT id, value FROM StringIds")}

    def text(value: str) -> int:
        if value not in strings:
            strings[value] = len(strings) + 1
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (strings[value], value))
        return strings[value]

    process = _VM | pid << 24
    ((used,),) = database.execute("SELECT COALESCE(MAX(correlationId), 0) FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchall()
    if not database.execute("SELECT 1 FROM NVTX_EVENTS").fetchall():
        row = (-1000, None, 75, "megaprof", process | pid, None, 1)
        database.execute(_NVTX, row)
    for number, event in enumerate(events):
        if event["ph"] != "X":
            continue
        start = later + round(event["ts"] * 1000)
        end = start + round(event["dur"] * 1000)
        thread, args = process | (pid + event["tid"]), event.get("args", {})
        category = event["cat"]
        if category == "user_annotation":
            # nsys writes a text of its own or a registered one.
            own = (event["name"], None) if number % 2 else (None, text(event["name"]))
            database.execute(_NVTX, (start, end, 59, own[0], thread, own[1], 1))
        elif category == "cuda_runtime":
            row = (start, end, 0, thread, used + args["correlation"], text(event["name"]), 0, None)
            database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({_marks(8)})", row)
        elif category == "kernel":
            name, short = text(event["name"]), text(event["name"].partition("(")[0])
            row = (start, end, 0, 1, event["tid"], used + args["correlation"], process, name, short)
            database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({_marks(9)})", row)
        elif category == "gpu_memcpy":
            row = (start, end, 0, 1, event["tid"], used + args["correlation"], process, 1, 8)
            database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({_marks(9)})", row)


_NVTX = (
    "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, textId, domainId) VALUES (?, ?, ?, ?, ?, ?, ?)"
)


def _marks(count: int) -> str:
    return ", ".join("?" * count)
