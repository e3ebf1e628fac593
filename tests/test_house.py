"""The package does not grow unseen (`tests.house`)."""

from __future__ import annotations

import json
from pathlib import Path

from tests import house


def test_the_house_has_not_grown() -> None:
    found = list(house.complaints(house.measure(), json.loads(house.FILE.read_text())))
    assert not found, "\n" + "\n".join(found)


def test_what_is_counted(tmp_path: Path) -> None:
    files = {
        "analysis/notes.py": 'LEVEL = 0.9\nA, B = 1, 2 * 3\nSIZE = 1 << 20\nNAME = "x"\nKind = Literal["a", "b"]\n',
        "analysis/report/lines.py": "HALF = LEVEL / 2\nOTHER = LEVEL\nclass Line:\n    def text(self): ...\n",
        "cli/__init__.py": 'COMMANDS = {"run": "runs", "hang": "names"}\n',
        "cli/run.py": "def add(parser):\n    parser.add_argument('--fast')\n    parser.add_argument('directory')\n",
        "state.py": "__all__ = ['now']\nnow = None\nkept = {}\nKEPT: dict = {}\nowner = Owner()\nget = owner.get\n"
        "@lru_cache\ndef read(): ...\n",
        "config/options.py": "class ProfileConfig:\n    dir: str\n    target: str\n",
    }
    for name, text in files.items():
        path = tmp_path / "megaprof" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = house.measure(tmp_path / "megaprof")
    assert {name: figure for name, figure in found.items() if figure} == {
        "analysis lines": 5,
        "analysis modules": 1,
        "analysis/report classes": 1,
        "analysis/report functions": 1,
        "analysis/report lines": 4,
        "analysis/report modules": 1,
        "cli functions": 1,
        "cli lines": 4,
        "cli modules": 2,
        "commands": 2,
        "config classes": 1,
        "config lines": 3,
        "config modules": 1,
        "kinds of notes": 2,
        "megaprof functions": 1,
        "megaprof lines": 8,
        "megaprof modules": 1,
        "names of process-global state": 5,
        "numbers that decide": 5,
        "options of commands": 1,
        "options of training": 2,
    }


def test_a_figure_falls_by_a_command_and_rises_only_beside_a_reason() -> None:
    data = {"figures": {"cli lines": 100, "cli functions": 10, "ui lines": 50}, "raised": []}
    assert not list(house.complaints({"cli lines": 100, "cli functions": 9, "ui lines": 31}, data))
    now = house.Counter({"cli lines": 79, "cli functions": 11})
    assert [line.split(":")[0] for line in house.complaints(now, data)] == ["cli functions", "cli lines", "ui lines"]

    fallen = house.lowered(now, data)
    assert fallen["figures"] == {"cli lines": 79, "cli functions": 10}
    assert [line.split(":")[0] for line in house.complaints(now, fallen)] == ["cli functions"]

    raised = {**fallen, "raised": [{"by": {"cli functions": 1}, "why": ""}]}
    assert len(list(house.complaints(now, raised))) == 1
    raised["raised"][0]["why"] = "a command needs a parser"
    assert not list(house.complaints(now, raised))
    # Lowered again, the reason stays as long as what it explains.
    assert house.bounds(house.lowered(house.Counter({"cli functions": 4}), raised)) == {"cli functions": 4}
    assert house.lowered(house.Counter(), raised) == {"figures": {}, "raised": []}
