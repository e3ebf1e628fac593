"""How large the package is: a ratchet. A figure may fall by itself, and rises only beside a reason.

``house.json`` holds two things. ``figures``: what was measured when the command below last wrote it. ``raised``: by how
much a figure may exceed that, and why: ``{"by": {"cli lines": 40}, "why": "..."}``, written by hand. The bound of a
figure is the sum of both. A figure that is not there has the bound 0, so a new room must be raised, too.

    python -m tests.house           # what is above or far below its bound, and the sizes of the rooms
    python -m tests.house --lower   # lowers every bound to what is measured; raises none
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
PACKAGE = Path(__file__).parents[1] / "megaprof"
#: A figure that is further below its bound must be lowered, so that nobody fills the gap again unseen.
HANDFUL = {"lines": 20, "other": 5}
#: Rooms whose numbers at module level decide what is said or done.
DECIDING = ("analysis", "foreign", "nsys", "tune", "metrics", "control")
_DEFINITIONS = {ast.FunctionDef: "functions", ast.AsyncFunctionDef: "functions", ast.ClassDef: "classes"}
_ARITHMETIC = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Tuple, ast.Name, ast.expr_context)


def measure(package: Path = PACKAGE) -> Counter[str]:
    """Every figure by its name: ``cli functions``, ``analysis/report lines``, ``commands``, ..."""
    found: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        parts = path.relative_to(package).parts[:-1]
        room = "/".join(parts[: 2 if parts[:1] == ("analysis",) else 1]) or package.name
        found[f"{room} lines"] += len(text.splitlines())
        found[f"{room} modules"] += 1
        for node in ast.walk(tree):
            if type(node) in _DEFINITIONS:
                found[f"{room} {_DEFINITIONS[type(node)]}"] += 1
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                found["options of commands"] += any(ast.unparse(each).startswith("'--") for each in node.args)
        for names, value in _assignments(tree):
            if room.split("/")[0] in DECIDING:
                found["numbers that decide"] += _numbers(value)
            found["names of process-global state"] += sum(_is_state(name, value) for name in names)
            if names == ["COMMANDS"] and isinstance(value, ast.Dict):
                found["commands"] += len(value.keys)
            if names == ["Kind"] and path.name == "notes.py":
                found["kinds of notes"] += sum(isinstance(node, ast.Constant) for node in ast.walk(value))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                found["names of process-global state"] += any("cache" in ast.unparse(d) for d in node.decorator_list)
            elif isinstance(node, ast.ClassDef) and node.name == "ProfileConfig":
                found["options of training"] += sum(isinstance(each, ast.AnnAssign) for each in node.body)
    return found


def _assignments(tree: ast.Module) -> Iterator[tuple[list[str], ast.expr]]:
    """Names and value of every assignment at module level, also below ``if`` and ``try``."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.If, ast.Try)):
            waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)], node.value


def _numbers(value: ast.expr) -> int:
    """How many numbers are written in an expression that holds nothing but arithmetic; ``1 << 20`` is one."""
    nodes = list(ast.walk(value))
    if not all(isinstance(node, _ARITHMETIC) for node in nodes):
        return 0
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    return sum(any(isinstance(n, ast.Constant) and type(n.value) in (int, float) for n in ast.walk(p)) for p in parts)


def _is_state(name: str, value: ast.expr) -> bool:
    """Whether a name of a module holds what changes while the process runs: it is written in lower case and begins as
    a constant, a container or an object; or it begins as an empty container."""
    if name.startswith("__"):
        return False
    empty = isinstance(value, (ast.Dict, ast.List)) and not (value.keys if isinstance(value, ast.Dict) else value.elts)
    made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1].lstrip("_")[:1].isupper()
    return empty or (name.islower() and (made or isinstance(value, (ast.Constant, ast.Dict, ast.List, ast.Set))))


def bounds(data: Mapping[str, Any]) -> Counter[str]:
    """The bound of every figure."""
    found: Counter[str] = Counter(data["figures"])
    for each in data["raised"]:
        found.update(each["by"])
    return found


def complaints(measured: Mapping[str, int], data: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each figure that is above its bound or far below it."""
    bound = bounds(data)
    for name in sorted({*measured, *bound}):
        now, most = measured.get(name, 0), bound[name]
        if now > most:
            yield (
                f"{name}: {now} are {now - most} more than tests/house.json allows ({most}). Take something out first. "
                f'If that cannot be, add {{"by": {{"{name}": {now - most}}}, "why": "..."}} to "raised" there, by hand.'
            )
        elif most - now > HANDFUL["lines" if name.endswith(" lines") else "other"]:
            yield f"{name}: {now} are {most - now} fewer than tests/house.json has. Run: python -m tests.house --lower"
    for each in data["raised"]:
        if len(each.get("why", "").split()) < 4:
            yield f"tests/house.json raises {', '.join(each['by'])} without saying why."


def lowered(measured: Mapping[str, int], data: Mapping[str, Any]) -> dict[str, Any]:
    """The data with every bound above what is measured lowered to it. What is gone is left out."""
    bound, figures = bounds(data), {}
    raised = [
        {**each, "by": {name: by for name, by in each["by"].items() if measured[name]}} for each in data["raised"]
    ]
    for name in bound:
        if measured[name]:
            figures[name] = data["figures"].get(name, 0) - max(0, bound[name] - measured[name])
    return {"figures": figures, "raised": [each for each in raised if each["by"]]}


def _written(data: Mapping[str, Any]) -> str:
    """One figure and one raise a line, so that changes of several people merge."""
    figures = ",".join(f"\n  {json.dumps(name)}: {figure}" for name, figure in sorted(data["figures"].items()))
    raised = ",".join(f"\n  {json.dumps(each)}" for each in data["raised"])
    return f'{{"figures": {{{figures}\n}},\n"raised": [{raised}\n]}}\n'


def main(arguments: list[str]) -> int:
    """Returns 1 with sentences if a figure is above its bound."""
    measured, data = measure(), json.loads(FILE.read_text())
    if arguments == ["--lower"]:
        data = lowered(measured, data)
        FILE.write_text(_written(data))
    else:
        for kind in ("lines", "modules", "classes", "functions"):
            print(f"{sum(figure for name, figure in measured.items() if name.endswith(' ' + kind))} {kind}")
    found = list(complaints(measured, data))
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
