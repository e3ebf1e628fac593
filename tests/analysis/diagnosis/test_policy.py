"""The numbers that decide are few, and stand in one file."""

import ast
from pathlib import Path

from megaprof.analysis.diagnosis import policy


def test_the_numbers_that_decide_are_few() -> None:
    assert len([value for value in vars(policy).values() if type(value) in (int, float)]) <= 20


def test_no_fraction_decides_elsewhere() -> None:
    """A half is a median or a root; what is smaller than these guards a division or rounds."""
    rooms = Path(policy.__file__).parents[1]
    found = {
        (path.name, node.value)
        for room in ("diagnosis", "what_if")
        for path in (rooms / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and 0.01 < node.value < 1.0
        if node.value != 0.5 and path.name != "policy.py"
    }
    assert found == set()
