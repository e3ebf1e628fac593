"""Replacing attributes of other people's modules and classes, and putting the very same objects back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megaprof.runtime.logs import logger

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_INHERITED = object()
#: Objects whose attributes are set by ``setattr``: their ``__dict__`` is a read-only view.
_NAMESPACES = type, ModuleType


class Patches:
    """A set of replaced attributes. ``apply`` and ``restore`` in any order with other people's patches."""

    def __init__(self) -> None:
        self._applied: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        """Returns whether anything is replaced."""
        return bool(self._applied)

    def apply(self, owner: Any, name: str, wrap: Wrap) -> bool:
        """Replace ``owner.name`` by ``wrap(owner.name)``; False when ``owner`` has no such attribute."""
        original = vars(owner).get(name)
        if original is None:
            return False
        self.put(owner, name, original, functools.wraps(original)(wrap(original)))
        return True

    def put(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        """Replace ``owner.name``, which is ``original``, by ``replacement``, which was made before."""
        self._applied.append((owner, name, original, replacement))
        setattr(owner, name, replacement)

    def shadow(self, instance: Any, name: str, wrap: Wrap) -> None:
        """Replace method ``name`` of this one object, also where it comes from the class.

        Written to ``__dict__`` directly: ``torch.nn.Module`` does more than that when an attribute is set.
        """
        own = vars(instance)
        bound = getattr(instance, name)
        replacement = wrap(bound)
        if not hasattr(replacement, "__wrapped__"):  # a hook in C looks like what it wraps by itself
            functools.update_wrapper(replacement, bound)
        self._applied.append((instance, name, own.get(name, _INHERITED), replacement))
        own[name] = replacement

    def restore(self) -> None:
        """Put every original back. An attribute that somebody else wrapped after us is left to them.

        Their wrapper still calls ours, which then only passes through: removing it would undo their patch.
        """
        while self._applied:  # an entry goes last, so that an interrupted call can be repeated
            owner, name, original, replacement = self._applied[-1]
            present = vars(owner).get(name, _INHERITED)
            if present is replacement:
                if original is _INHERITED:
                    del vars(owner)[name]
                elif isinstance(owner, _NAMESPACES):
                    setattr(owner, name, original)
                else:
                    vars(owner)[name] = original
            elif present is not original:
                logger.warning(
                    "megaprof: %s.%s was wrapped by somebody else after megaprof; it is left as it is",
                    getattr(owner, "__name__", owner),
                    name,
                )
            self._applied.pop()
