"""Replaces attributes of other people's modules and classes, and puts the very same objects back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megaprof.runtime.isolation import logger

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_INHERITED = object()
_REDUCE = "__reduce_ex__"
#: Objects whose attributes are set by ``setattr``: their ``__dict__`` is a read-only view.
_NAMESPACES = type, ModuleType


def modules_with(name: str, function: object) -> list[ModuleType]:
    """Returns the loaded modules that have ``function`` under its ``name``: its own, and those that imported it."""
    return [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is function]


class Patches:
    """A set of replaced attributes. Other people may apply and restore patches of theirs in between, in any order."""

    def __init__(self) -> None:
        self._applied: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        """Returns whether anything is replaced."""
        return bool(self._applied)

    def apply(self, owner: Any, name: str, wrap: Wrap) -> None:
        """Replaces ``owner.name`` by ``wrap(owner.name)``, if ``owner`` has such an attribute."""
        if (original := vars(owner).get(name)) is not None:
            self.put(owner, name, original, functools.wraps(original)(wrap(original)))

    def put(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        """Replaces ``owner.name``, which is ``original``, by ``replacement``."""
        self._applied.append((owner, name, original, replacement))
        setattr(owner, name, replacement)

    def shadow(self, instance: Any, name: str, wrap: Wrap) -> None:
        """Replaces method ``name`` of this one object, even if the class defines it. The host may copy or pickle the
        object meanwhile: the copy runs its own method.

        Writes to ``__dict__`` directly, because ``torch.nn.Module`` does more than that when an attribute is set.
        """
        attributes = vars(instance)
        bound = getattr(instance, name)
        replacement = hook = wrap(bound)
        if not hasattr(hook, "__wrapped__"):  # a hook in C looks like what it wraps by itself
            replacement = functools.update_wrapper(lambda *args, **kwargs: hook(*args, **kwargs), bound)
        replacements = {name: replacement}
        if _REDUCE not in attributes:
            replacements[_REDUCE] = functools.partial(self._reduced, instance)
        for each, value in replacements.items():
            self._applied.append((instance, each, attributes.get(each, _INHERITED), value))
            attributes[each] = value

    def _reduced(self, instance: Any, protocol: Any) -> Any:
        """Stands for ``__reduce_ex__``, by which Python copies and pickles an object: says what it was before us."""
        reduced = instance.__class__.__reduce_ex__(instance, protocol)
        if len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        state = {**reduced[2]}
        for owner, name, original, replacement in reversed(self._applied):
            if owner is instance and state.get(name) is replacement:
                state[name] = original
        return *reduced[:2], {name: value for name, value in state.items() if value is not _INHERITED}, *reduced[3:]

    def restore(self) -> None:
        """Puts every original back. An attribute that somebody else wrapped after us stays as it is.

        Their wrapper still calls ours, which then only passes calls through. Removing it would undo their patch.
        """
        while self._applied:  # an entry is removed last, so that an interrupted call can be repeated
            owner, name, original, replacement = self._applied[-1]
            current = vars(owner).get(name, _INHERITED)
            if current is replacement:
                if original is _INHERITED:
                    del vars(owner)[name]
                elif isinstance(owner, _NAMESPACES):
                    setattr(owner, name, original)
                else:
                    vars(owner)[name] = original
            elif current is not original:
                logger.warning(
                    "megaprof: %s.%s was wrapped by somebody else after megaprof; it is left as it is",
                    getattr(owner, "__name__", owner),
                    name,
                )
            self._applied.pop()
