"""Something to do as soon as a module has been loaded, whoever imports it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after(name: str, act: Callable[[ModuleType], object]) -> None:
    """Call ``act`` with the module ``name``: now, if it is loaded, or in its first import."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _After(name, act))


class _After(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, act: Callable[[ModuleType], object]) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            self.act(module)

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec
