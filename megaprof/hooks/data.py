"""Hooks on the data iterators of a call, which note how long each forward waits for its data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from megaprof.capture.dispatcher import Dispatcher
from megaprof.formats.steps import codes
from megaprof.hooks.dispatch import ranged
from megaprof.recorders.call import RecordedCall

_ITERATOR = "data_iterator"


def watch_data(dispatcher: Dispatcher, arguments: dict[str, Any]) -> None:
    """Watches the data iterators among the arguments of a recorded call, for that call only: one, or one for each model
    chunk. A stage without data has None. What is no plain iterator is passed on as it is."""
    given = arguments.get(_ITERATOR)
    if type(given) is list:
        arguments[_ITERATOR] = [_watched(dispatcher, each) for each in given]
    elif given is not None:
        arguments[_ITERATOR] = _watched(dispatcher, given)


def _watched(dispatcher: Dispatcher, iterator: Any) -> Any:
    kind = type(iterator)
    if not hasattr(kind, "__next__") or hasattr(kind, "__getitem__") or callable(iterator):
        return iterator
    return Watched(iterator, ranged(partial(next, iterator), dispatcher, _code, fast=(codes.DATA,)))


def _code(call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tape = call.tape
    # Without a timeline, nothing says when a forward has ended.
    inside = not call.timed or tape.now & codes.KIND_MASK in (codes.FORWARD, codes.COMBINED)
    return codes.DATA | (tape.forward or 0) * inside


class Watched:
    """Stands for an iterator in a call. It has the iterator's attributes and class, and its ``next`` is ``hook``.

    ``next`` is a slot, so Python finds the hook without running any Python code: a method would take several times as
    long. Nothing of the iterator itself is changed, and whoever else holds it is not watched.
    """

    __slots__ = ("__next__", "__weakref__", "_iterator")

    def __init__(self, iterator: Any, hook: Any) -> None:
        object.__setattr__(self, "_iterator", iterator)
        object.__setattr__(self, "__next__", hook)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._iterator)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __bool__(self) -> bool:
        return bool(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._iterator, name, value)
