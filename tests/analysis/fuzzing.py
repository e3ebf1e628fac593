"""Files that were changed on purpose, in ways that know their structure, and what every command must make of them."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import resource
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megaprof.cli import main
from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.inputs import unpacked
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.exchanging import exchanging
from tests.analysis.job_timelines import write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder
from tests.nsys.written import write_nsys

#: Values that stand where others belong.
HOSTILE: tuple[Any, ...] = (
    *(None, True, "", "x", "\x1b[2J", "é", "\ud800", [], {}, [[]], {"a": 1}),
    *(0, 1, -1, 2, 255, 1 << 16, 1 << 20, 1 << 31, 1 << 47, 1 << 60, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**30),
    *(0.5, -0.0, 1e-300, 1e18, 1e300, float("nan"), float("inf"), float("-inf")),
    *("megaprof/train_actor step=5", "megaprof/forward mb=0 chunk=0", "megaprof/combined mb=1 chunk=0 bmb=0 bchunk=0"),
)
_INTEGERS = (0, 1, -1, 1 << 20, 1 << 32, 1 << 40, 1 << 47, 1 << 59, (1 << 63) - 1, -(1 << 63))
_MOST_MEMORY = 1 << 30


def mutated(tree: Any, random: random.Random, changes: int = 3) -> Any:
    """A copy of plain data with a few values replaced, left out, doubled or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(random.randint(1, changes)):
        holder, key = _place(tree, random)
        if holder is None:
            return random.choice(HOSTILE)
        change = random.random()
        if change < 0.6:
            holder[key] = copy.deepcopy(random.choice(HOSTILE))
        elif change < 0.75:
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(random.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        else:
            holder[random.choice(list(holder))] = copy.deepcopy(holder[key])
    return tree


def _place(tree: Any, random: random.Random) -> tuple[Any, Any]:
    """A container somewhere in the tree, and a key of it; deeper ones as often as others."""
    found, at = (None, None), tree
    while isinstance(at, dict | list) and at:
        key = random.choice(list(at)) if isinstance(at, dict) else random.randrange(len(at))
        if found[0] is None or random.random() < 0.7:
            found = at, key
        at = at[key]
    return found


def traces(directory: Path) -> list[tuple[str, Any]]:
    """Names and documents of healthy traces: two stages of a CPU pipeline on two hosts, and of a GPU's."""
    for trace in exchanging([0.0, 40.0]):
        trace.write(directory)
    write(Scenario("gpu", layers=(2, 1), microbatches=2, target="train_log_probs"), directory)
    paths = sorted(directory.glob("*.json*"))
    found = [(path.name, json.loads(_text(path))) for path in paths]
    for path in paths:
        path.unlink()
    return found


def write_mutated_traces(healthy: list[tuple[str, Any]], directory: Path, random: random.Random) -> None:
    """All of them, one or two changed."""
    changed = set(random.sample(range(len(healthy)), random.randint(1, 2)))
    for number, (name, document) in enumerate(healthy):
        if number in changed:
            if random.random() < 0.5:
                document = {**document, "megaprof": mutated(document["megaprof"], random)}
            else:
                document = mutated(document, random, 20)
        (directory / name.removesuffix(".gz")).write_text(json.dumps(document))


def nsys_files(directory: Path) -> list[Path]:
    """Healthy files of nsys's with their metadata: two stages of a GPU job, two steps in each file."""
    for step in (0, 1):
        for trace in traced(Scenario("gpu", layers=(2, 1), microbatches=2, steps=2), directory / "traces", step):
            write_nsys(trace, directory)
    return sorted(path for path in directory.iterdir() if path.is_file())


def traced(scenario: Scenario, directory: Path, step: int) -> list[TraceBuilder]:
    """The traces of one step of a scenario."""
    write(scenario, directory)
    found = []
    for path in sorted(directory.glob(f"*step{5 + step:06d}*")):
        document = json.loads(_text(path))
        described = document["megaprof"]
        place = {"pp": described["coords"]["pp"], "coords": described["coords"], "metadata": described}
        found.append(TraceBuilder(step=5 + step, events=document["traceEvents"][1:], **place))
    return found


def write_mutated_nsys(healthy: list[Path], directory: Path, random: random.Random) -> None:
    """All of them, one or two changed: their values, their schema, or their bytes."""
    changed = set(random.sample(range(len(healthy)), random.randint(1, 2)))
    for number, path in enumerate(healthy):
        data = path.read_bytes()
        copy = directory / path.name
        if number in changed and path.suffix == ".json":
            data = json.dumps(mutated(json.loads(data), random)).encode()
        elif number in changed and random.random() < 0.3:
            for _ in range(random.randint(1, 40)):
                data = _patched(data, random)
            data = data[: random.randrange(len(data))] if random.random() < 0.2 else data
        copy.write_bytes(data)
        if number in changed and path.suffix != ".json":
            with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError):
                _mutate_tables(copy, random)


def _mutate_tables(path: Path, random: random.Random) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i AS end FROM n"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(random.randint(1, 6)):
            table = random.choice(tables or ["gone"])
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            column, what = random.choice(columns or ["gone"]), random.random()
            if what < 0.7:
                value = random.choice((*(v for v in HOSTILE if not isinstance(v, list | dict)), b"\xff\0", *_INTEGERS))
                some = f"rowid % {random.randint(1, 9)} = 0"
                with contextlib.suppress(sqlite3.IntegrityError):
                    database.execute(f"UPDATE {table} SET {column} = ? WHERE {some}", (value,))
            elif what < 0.8:
                database.execute(f"DELETE FROM {table} WHERE rowid % 2 = 0")
            elif what < 0.85:
                database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
            elif what < 0.9:
                database.execute(f"DROP TABLE {table}")
            elif what < 0.95:
                database.execute(f"ALTER TABLE {table} RENAME TO was_{random.randrange(1 << 30)}")
                database.execute(f"CREATE VIEW {table} AS {endless}")
            else:
                database.execute(f"ALTER TABLE {table} RENAME TO was_{random.randrange(1 << 30)}")
                database.execute(f"CREATE TABLE {table} (start, end AS (hex(zeroblob(900000000))))")


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and content of every record of a timeline."""
    position = len(format.MAGIC)
    while position < len(data):
        kind, length = format._HEAD.unpack_from(data, position)
        position += format._HEAD.size
        yield kind, data[position : position + length]
        position += length + format._CHECK.size


def timelines(directory: Path) -> list[tuple[Path, list[tuple[int, bytes]]]]:
    """Paths below ``directory`` and records of healthy timelines: two stages, two replicas, with events."""
    paths = write_timelines(directory, WorldLayout(ParallelSizes(pp=2, dp=2)), steps=6, microbatches=2)
    found = [(path.relative_to(directory), list(_records(path.read_bytes()))) for path in paths]
    for path in paths:
        path.unlink()
    return found


def write_mutated_timelines(
    healthy: list[tuple[Path, list[tuple[int, bytes]]]], directory: Path, random: random.Random
) -> None:
    """All of them, one or two changed; every checksum is right."""
    changed = set(random.sample(range(len(healthy)), random.randint(1, 2)))
    for number, (name, records) in enumerate(healthy):
        if number in changed:
            records = list(records)
            for _ in range(random.randint(1, 3)):
                _change(records, random)
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(format.MAGIC + b"".join(format._record(kind, payload) for kind, payload in records))


def _change(records: list[tuple[int, bytes]], random: random.Random) -> None:
    if not records:
        return
    place = random.randrange(len(records))
    kind, payload = records[place]
    changes: list[Callable[[], bytes]] = [lambda: _patched(payload, random), lambda: random.randbytes(len(payload))]
    if kind == format.METADATA:
        changes = [lambda: _mutated_metadata(payload, random)] * 4 + changes[:1]
    elif kind == format.STEP:
        changes += [lambda: _patched_field(payload, random)] * 4 + [
            lambda: payload[: random.randrange(len(payload) + 1)]
        ]
    else:
        changes += [lambda: _codes(random), lambda: payload * random.randint(0, 3)]
    what = random.random()
    if what < 0.8:
        records[place] = kind, random.choice(changes)()
    elif what < 0.9:
        del records[place]
    else:
        records.insert(random.randrange(len(records)), (random.choice((kind, 1, 2, 3, 9)), payload))


def _mutated_metadata(payload: bytes, random: random.Random) -> bytes:
    try:
        return json.dumps(mutated(json.loads(payload), random)).encode()
    except ValueError:  # changed before
        return _patched(payload, random)


def _patched_field(payload: bytes, random: random.Random) -> bytes:
    """One field of a step with an extreme number."""
    name = random.choice(format.STEP_TYPE.names or ())
    kind, offset = (format.STEP_TYPE.fields or {})[name][:2]
    number = random.choice(_INTEGERS) % (1 << 8 * kind.itemsize)
    return payload[:offset] + number.to_bytes(kind.itemsize, "little") + payload[offset + kind.itemsize :]


def _patched(payload: bytes, random: random.Random) -> bytes:
    if not payload:
        return random.randbytes(random.randrange(20))
    place = random.randrange(len(payload))
    return payload[:place] + random.randbytes(1) + payload[place + 1 :]


def _codes(random: random.Random) -> bytes:
    known = [codes.phase(kind, random.choice((0, 1, 1 << 19)), random.choice((0, 254))) for kind in (1, 2, 3)]
    numbers = [random.choice((*known, *_INTEGERS)) for _ in range(random.randint(0, 200))]
    return format.shape_record(numbers)[5:-4]


def refused_in_one_line_or_read(directory: Path, out: Path, commands: tuple[str, ...]) -> None:
    """Every command reads the files or says in one line why not; nothing is raised, and memory stays bounded."""
    arguments = {
        "report": ["report", str(directory), "--json", str(out / "r.json"), "--html", str(out / "r.html")],
        "merge": ["merge", str(directory), "-o", str(out / "m.json.gz")],
        "export": ["export", str(directory), "--parquet", str(out / "parquet")],
    }
    for command in commands:
        shown, said = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
            code = main(arguments[command])
        assert code in (0, 1), said.getvalue()
        assert said.getvalue().count("\n") == (code != 0), said.getvalue()
        shown.getvalue().encode()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert used < _MOST_MEMORY + _before, f"{used >> 20} MiB"


_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _text(path: Path) -> bytes:
    return b"".join(unpacked(path))
