"""What a host imports and this machine lacks (CUDA kernels, inference engines, web servers): names without behaviour.

A test that drives a host's real function replaces these, and only these, at the edge of what it drives.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _Class(abc.ABCMeta):
    """A class whose every attribute exists and does nothing. Hosts derive from such ones beside abstract ones."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{cls.__name__}.{name}")


class _Anything(metaclass=_Class):
    """It is made of whatever arguments there are, and told whatever there is to do."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        other = getattr(super(), "__getattr__", None)  # of a host's class that derives from this one and another
        return MagicMock(name=f"{type(self).__name__}().{name}", return_value=None) if other is None else other(name)


class _Nothing(ModuleType):
    """A module whose every attribute exists and does nothing."""

    __path__ = ()  # type: ignore[assignment]
    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Class(name, (_Anything,), {}) if name[:1].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Edges(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: frozenset[str]) -> None:
        self.roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == root or fullname.startswith(f"{root}.") for root in self.roots):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def replace_missing(*names: str) -> list[str]:
    """Put nothing in the place of each package that is not installed; returns those names."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    _undistributed(missing)
    sys.meta_path.append(_Edges(frozenset(missing)))
    return missing


def _undistributed(names: list[str]) -> None:
    """transformers asks which distribution brought a package that it finds. None did: it takes these for missing."""
    found = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: found() | {name: ["nothing"] for name in names}


def replace(*names: str) -> None:
    """Put nothing in the place of each module that is not loaded yet, installed or not."""
    sys.meta_path.insert(0, _Edges(frozenset(names) - sys.modules.keys()))
