"""Every note that the analysis makes has the facts that its words are made of."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import megaprof
from megaprof.analysis.notes import Kind, Note
from tests.analysis.synthetic import kinds

FACTS: dict[str, Any] = {
    "files": ("a.json", "b.json"),
    "names": ("forward", "backward", "1f1b"),
    "ms": (1.0, 2.0),
    "said": "it is empty",
    "why": Note("no_layout", said="it is empty"),
    **dict.fromkeys(("stages", "ranks", "steps", "layers"), (1, 2)),
    **dict.fromkeys(("count", "of", "factor"), 2),
}


def made() -> list[Note]:
    """One note for each place that makes some, with all of its facts."""
    notes = []
    for path in Path(megaprof.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Note":
                facts = {each.arg: FACTS[each.arg] for each in node.keywords if each.arg}
                said = [each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)]
                notes += [Note(kind, **facts) for kind in said if kind in get_args(Kind)]
    return notes


def test_every_kind_has_words_for_the_facts_that_it_is_made_with() -> None:
    notes = made()
    assert kinds(notes) == set(get_args(Kind))
    assert all(note.text for note in notes)
