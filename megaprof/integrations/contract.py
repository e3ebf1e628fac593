"""What a host's own functions know about the schedule calls inside them, and how megaprof comes to know it.

An adapter names functions of its host and reads the arguments they are called with: a role, the host's iteration
number, whether it is an evaluation. Nothing of the host is imported and nothing of it is changed but these functions,
which are wrapped in place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from megaprof.hooks.patching import Patches
from megaprof.runtime.logs import logger

_iteration: ContextVar[int | None] = ContextVar("megaprof_iteration", default=None)


class Facts(NamedTuple):
    """What holds inside one call of a host's function; None and False: nothing that is not known already."""

    role: str | None = None
    iteration: int | None = None
    evaluation: bool = False


class Hook(NamedTuple):
    """One function of a host: ``train`` or ``Class.method`` of a module.

    ``read`` gets the call's arguments by name. ``context``: the function returns a context manager, and the facts hold
    inside that rather than inside the call.
    """

    module: str
    function: str
    read: Callable[[Mapping[str, Any]], Facts]
    context: bool = False


#: Called when a host's own settings turned up that ask for megaprof: whoever can install the hooks registers here.
when_settled: list[Callable[[], object]] = []


def settled() -> None:
    """A host's settings are known now."""
    for task in list(when_settled):
        task()


def iteration() -> int | None:
    """The host's iteration number as the innermost adapted function around the caller has it, or None."""
    return _iteration.get()


def apply(hooks: tuple[Hook, ...], patches: Patches) -> None:
    """Wrap the functions of ``hooks`` that are loaded. A function of another name in this version stays unknown."""
    for hook in hooks:
        owner: Any = sys.modules.get(hook.module)
        *classes, name = hook.function.split(".")
        for part in classes:
            owner = getattr(owner, part, None)
        function = vars(owner).get(name) if owner is not None else None
        if callable(function) and not hasattr(function, "_megaprof"):
            patches.apply(owner, name, partial(_adapted, hook))
            vars(owner)[name]._megaprof = True


@contextmanager
def inside(facts: Facts, message: str) -> Iterator[None]:
    """Everything of ``facts`` for the code inside; with a role also a range, as ``megaprof.annotate`` writes it."""
    with ExitStack() as stack:
        if facts.iteration is not None:
            stack.callback(_iteration.reset, _iteration.set(facts.iteration))
        if facts.evaluation:
            from megaprof.capture.evaluation import evaluation

            stack.enter_context(evaluation())
        if facts.role is not None:
            from megaprof.capture.annotations import annotate  # brings torch, which is not loaded yet everywhere

            stack.enter_context(annotate(message, role=facts.role))
        yield


def _adapted(hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    message = hook.function.rpartition(".")[2].lstrip("_")
    failed = False

    def known(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        nonlocal failed
        facts = Facts()
        try:
            facts = hook.read(signature.bind(*args, **kwargs).arguments)
        except Exception as fault:  # the host goes on, and so does profiling, with less to say
            if not failed:
                failed = True
                logger.warning("megaprof: %s.%s: cannot read what it knows: %r", hook.module, hook.function, fault)
        return inside(facts, message)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with known(args, kwargs):
            return original(*args, **kwargs)

    @contextmanager
    def around(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with known(args, kwargs), original(*args, **kwargs) as value:
            yield value

    return around if hook.context else wrapper
