"""Inside which role's scope, and inside which blocks, the running code is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, Token
from typing import NamedTuple


class Scope(NamedTuple):
    """A role's scope."""

    role: str | None
    """Whose work it is; None: nobody said."""
    window: object
    """The open window that has a range for this scope, if any."""


_NOBODY = Scope(None, None)
#: A context variable holds for the code inside, for coroutines and tasks started inside, and for no other thread.
scope: ContextVar[Scope] = ContextVar("megaprof_role", default=_NOBODY)
_blocks: ContextVar[tuple[tuple[object, object], ...]] = ContextVar("megaprof_blocks", default=())


#: Returns the innermost scope around the caller.
current: Callable[[], Scope] = scope.get


def leave(token: Token[Scope]) -> None:
    """Undo ``scope.set``. A coroutine that was never finished may be closed in another context: that one has nothing
    to undo."""
    with suppress(ValueError):
        scope.reset(token)


def enter_block(owner: object, state: object) -> None:
    """Remember ``state`` until ``owner`` is left here. Several tasks may be inside the same ``owner`` at once."""
    _blocks.set((*_blocks.get(), (owner, state)))


def leave_block(owner: object) -> object:
    """The ``state`` with which ``owner`` was entered last in this context; None where it was not."""
    blocks = _blocks.get()
    for place in reversed(range(len(blocks))):
        if blocks[place][0] is owner:
            _blocks.set(blocks[:place] + blocks[place + 1 :])
            return blocks[place][1]
    return None


def in_task() -> bool:
    """Returns whether an event loop runs the caller: other tasks may then run before a block ends."""
    events = sys.modules.get("asyncio.events")
    return events is not None and events._get_running_loop() is not None
