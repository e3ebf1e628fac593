"""Replaces attributes of other people's modules and classes, and puts the very same objects back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from megaprof.runtime.isolation import logger

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_INHERITED = object()
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
        if not hasattr(hook, "__wrapped__"):  # a hook in C looks like what it wraps by itself, and is copied like it
            function: Any = getattr(bound, "__func__", None)

            def method(this: Any, *args: Any, **kwargs: Any) -> Any:
                return hook(*args, **kwargs) if this is instance else function(this, *args, **kwargs)

            if function is not None and bound.__self__ is instance:
                replacement = MethodType(functools.update_wrapper(method, function), instance)
            else:  # what the host put there; Python copies no function
                replacement = functools.update_wrapper(lambda *args, **kwargs: hook(*args, **kwargs), bound)
        self._applied.append((instance, name, attributes.get(name, _INHERITED), replacement))
        attributes[name] = replacement

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
