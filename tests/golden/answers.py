"""What megaprof answers about fixed inputs, kept as JSON: every change of meaning is a diff that a reviewer sees.

``TOLERANCE`` is the only one: numbers are kept with as many digits as it needs, and differ if they are further apart.
Whole numbers, names and which fields there are must be equal. Left out is what is said in words (data says it, too),
where the files are, and the version. Of a sample three of its numbers are kept, of a long list its ends.

    python -m tests.golden                   # what has changed
    python -m tests.golden --accept [NAME]   # what is answered now becomes what is expected
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from megaprof.analysis.hang import hang_of
from megaprof.analysis.report.report import analyze
from megaprof.cli.what_if import answer_to
from megaprof.formats.phrases import Unanswerable
from tests.golden.inputs import HANGS, REPORTS, WHAT_IFS

EXPECTED = Path(__file__).with_suffix("")
NAMES = [*REPORTS, *HANGS, *WHAT_IFS]
#: As a part of the number; below 1e-6 of whatever unit everything is 0.
TOLERANCE = 1e-3
_DIGITS, _NOTHING = 4, 1e-6
#: ``said``: by a library.
_LEFT_OUT = {"version", "source", "text", "notes", "caveats", "said"}
_SAMPLE = {"mean", "median", "min", "max", "stdev", "count"}
_MOST = 8


def answer(name: str) -> Any:
    """What megaprof answers about an input, in short."""
    with tempfile.TemporaryDirectory() as scratch:
        found = json.dumps(short(_answered(name, Path(scratch))))
    return json.loads(found.replace(scratch, "DIR"))


def _answered(name: str, directory: Path) -> Any:
    report, change = WHAT_IFS.get(name, (name, {}))
    ({**REPORTS, **HANGS}[report])(directory)
    try:
        if name in HANGS:
            return to_builtins(hang_of(directory.iterdir()))
        found = analyze(directory, workers=1)
    except Unanswerable as refusal:
        return {"refused": type(refusal).__name__}
    choices = dict.fromkeys(("layout", "chunks", "microbatches", "p2p", "tokens", "packing"), "")
    return to_builtins(answer_to(found, choices | change)) if change else found.to_json()


def expected(name: str) -> Any:
    path = EXPECTED / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def accept(name: str) -> None:
    """Numbers that have hardly changed stay as they are."""
    EXPECTED.mkdir(exist_ok=True)
    (EXPECTED / f"{name}.json").write_text(_written(_kept(expected(name), answer(name))) + "\n")


def differences(was: Any, now: Any, where: str = "") -> Iterator[str]:
    """A line for each field that is new or gone or has another value."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            place = f"{where}.{key}"
            if key not in was or key not in now:
                yield f"{place} is {'new' if key in now else 'gone'}"
            else:
                yield from differences(was[key], now[key], place)
    elif isinstance(was, list) and isinstance(now, list):
        if len(was) != len(now):
            yield f"{where} has {len(now)} entries and not {len(was)}"
        for number, pair in enumerate(zip(was, now, strict=False)):
            yield from differences(*pair, f"{where}[{number}]")
    elif not _alike(was, now):
        yield f"{where}: {_cut(was)} -> {_cut(now)}"


def complaint(name: str, now: Any) -> str:
    """Empty if the answer is the expected one."""
    found = list(differences(expected(name), now))
    if not found:
        return ""
    lines = [f"{name}: {len(found)} fields of the answer have changed:", *(f"  {line}" for line in found[:_MOST])]
    lines += [f"  and {len(found) - _MOST} more"] * (len(found) > _MOST)
    return "\n".join([*lines, f"If that is meant: python -m tests.golden --accept {name}"])


def _alike(was: Any, now: Any) -> bool:
    if isinstance(was, float) and isinstance(now, float):
        return math.isclose(was, now, rel_tol=TOLERANCE, abs_tol=_NOTHING)
    return type(was) is type(now) and bool(was == now)


def _kept(was: Any, now: Any) -> Any:
    if isinstance(was, dict) and isinstance(now, dict):
        return {key: _kept(was.get(key), value) for key, value in now.items()}
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return [_kept(*pair) for pair in zip(was, now, strict=True)]
    return was if _alike(was, now) else now


def short(value: Any) -> Any:
    if isinstance(value, float):
        return 0.0 if abs(value) < _NOTHING else float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        own: Collection[str] = ("mean", "stdev", "count") if set(value) == _SAMPLE else value
        return {key: short(value[key]) for key in own if key not in _LEFT_OUT}
    if isinstance(value, list | tuple):
        ends = [*value[:2], *value[-2:]] if len(value) > _MOST else value
        return [short(each) for each in ends] + [{"of": len(value)}] * (len(value) > _MOST)
    return value


def _written(value: Any, indent: str = "") -> str:
    """JSON; what fits into a line is one."""
    line = json.dumps(value)
    if len(indent + line) <= 100 or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {_written(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _written(each, inner) for each in value) + f"\n{indent}]"


def _cut(value: Any) -> str:
    line = json.dumps(value)
    return line if len(line) < 80 else f"{line[:76]} ..."
