"""The contract that all hosts share: each `Hook` says what megaprof cannot see for itself in a framework.

Each file that is named after a host ends with its ``HOOKS``; `megaprof.autoload.HOSTS` names them. Nothing of a host
is imported. The functions in its ``HOOKS`` are wrapped in place: megaprof reads the arguments of their calls, and some
hooks write a step's number into a batch, for the workers that get it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Literal

from megaprof.capture.process import process
from megaprof.capture.roles import annotate, evaluation
from megaprof.recorders.call import Batch
from megaprof.runtime.armed import armed
from megaprof.runtime.isolation import Suppressed, from_host, logger
from megaprof.runtime.patching import Patches


@dataclass(frozen=True)
class Facts:
    """The facts that hold inside one call of a host's function. The defaults add nothing to what is known."""

    role: str | None = None
    """The role whose work it is (actor, ref, critic, ...)."""
    iteration: int | Callable[[], int | None] | None = None
    """The number by which ``--profile-steps`` selects the schedule's calls inside: that of their training step. A
    function if it changes during the call; it is called when the schedule is."""
    host_step: int | None = None
    """The step of the host's own loop, which training, log-probs and evaluation share; None if it is ``iteration``."""
    evaluation: bool = False
    """True if forward-only passes inside are evaluation and not log-probs."""


@dataclass(frozen=True)
class Hook:
    """One function of a host, and what a call of it says."""

    module: str
    """The module that defines it."""
    function: str
    """Its name there: ``train``, or ``Class.method``."""
    read: Callable[[Mapping[str, Any]], Facts] = lambda arguments: Facts()
    """Takes the call's arguments, by name."""
    context: bool = False
    """True if the function returns a context manager, and the facts hold inside that instead of inside the call."""
    ends: Literal["step", "job"] | None = None
    """``step`` if the call ends a step of the host in this process; ``job`` if it ends the whole job, which this
    process runs. Files are finished then, because processes may be killed without warning afterwards (see ``over``)."""
    part: str | None = None
    """The part of the host's loop that its calls are, between the schedule's calls (`megaprof.formats.facts.PARTS`);
    None if they are none."""
    batch: Batch | None = None
    """The way the function runs the microbatches of a step without Megatron's schedule; None if it runs none."""


_iteration: ContextVar[int | Callable[[], int | None] | None] = ContextVar("megaprof_iteration", default=None)
_host_step: ContextVar[int | None] = ContextVar("megaprof_host_step", default=None)


def over(part: Literal["step", "job"]) -> None:
    """Finishes windows and files, for as long as that takes, and logs what fails. What has just ended is a ``step``
    of the host in this process, or the ``job`` that this process runs."""
    with Suppressed(Exception, says=f"files could not be finished at the end of a {part}"):
        if part == "job":
            armed.finish_job()
        elif process.sessions:
            from megaprof.capture import profiler  # brings nvtx, and all that a session needs

            profiler.step_ended()


def iteration() -> int | None:
    """Returns the number of the pass that the caller is about to run, from the innermost hook around it that says one;
    None if none does."""
    value = _iteration.get()
    return value() if callable(value) else value


#: Returns the step of the host's own loop, from the innermost hook around the caller that says one. None if none does:
#: then training, log-probs, evaluation and annotated work belong to the step of their number.
host_step: Callable[[], int | None] = _host_step.get


def apply(hooks: tuple[Hook, ...], patches: Patches) -> None:
    """Wraps the functions of ``hooks`` that are loaded. Those that this version of the host does not have are left
    out."""
    for hook in hooks:
        owner: Any = sys.modules.get(hook.module)
        *classes, name = hook.function.split(".")
        for part in classes:
            owner = getattr(owner, part, None)
        function = vars(owner).get(name) if owner is not None else None
        if callable(function) and not hasattr(function, "_megaprof"):
            patches.apply(owner, name, partial(_adapted, hook))
            vars(owner)[name]._megaprof = True


def callers() -> Iterator[FrameType]:
    """Yields the frame of the caller, and then the frames around it, outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def local(name: str) -> int | None:
    """Returns the variable ``name`` of the innermost caller that has a number in it."""
    for frame in callers():
        if name in frame.f_code.co_varnames and isinstance(value := frame.f_locals.get(name), int):
            return value
    return None


@contextmanager
def inside(facts: Facts, message: str) -> Iterator[None]:
    """Makes ``facts`` hold for the code inside; a role also gets a range, as with ``megaprof.annotate``."""
    with ExitStack() as stack:
        if facts.iteration is not None:
            stack.callback(_iteration.reset, _iteration.set(facts.iteration))
        if facts.host_step is not None:
            stack.callback(_host_step.reset, _host_step.set(facts.host_step))
        if facts.evaluation:
            stack.enter_context(evaluation())
        if facts.role is not None:
            stack.enter_context(annotate(message, role=facts.role))
        yield


def _adapted(hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    if hook.batch is not None:
        from megaprof.hooks.plain import batched  # brings nvtx, and all that a session needs

        original = batched(hook.batch, original)
    message = hook.function.rpartition(".")[2].lstrip("_")

    @contextmanager
    def around(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        facts = Facts()
        try:
            facts = hook.read(signature.bind(*args, **kwargs).arguments)
        except Exception as fault:  # the host goes on, and so does profiling, with less to say
            if from_host(fault):
                raise
            name = f"{hook.module}.{hook.function}"
            logger.once("megaprof: %s: cannot read what it knows: %r", name, fault, about=name)
        try:
            with process.parts.inside(hook.part), inside(facts, message):
                yield
        except Exception:
            if hook.ends is not None:
                over(hook.ends)
            raise
        if hook.ends is not None:
            over(hook.ends)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with around(args, kwargs):
            return original(*args, **kwargs)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with around(args, kwargs):
            return await original(*args, **kwargs)

    @contextmanager
    def context(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with around(args, kwargs), original(*args, **kwargs) as value:
            yield value

    if hook.context:
        return context
    return coroutine if inspect.iscoroutinefunction(original) else wrapper
