"""The one contract of all hosts: a `Host` is what a framework tells megaprof that megaprof cannot see for itself.

Each file of this room that is named after a host ends with its ``HOST``; `megaprof.integrations.registry` lists them.
Nothing of a host is imported, and nothing of it is changed but the functions in ``HOST.hooks``, which are wrapped in
place: megaprof reads the arguments of their calls.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from megaprof.capture.process import process
from megaprof.hooks.batch import Batch
from megaprof.runtime.armed import armed
from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger
from megaprof.runtime.patching import Patches

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig


def unknown() -> None:
    """What a host says that does not know."""
    return None


@dataclass(frozen=True)
class Facts:
    """What holds inside one call of a host's function. The defaults say nothing that is not known already."""

    role: str | None = None
    """Whose work it is (actor, ref, critic, ...)."""
    iteration: int | Callable[[], int | None] | None = None
    """The number under which ``--profile-steps`` names the calls of the schedule inside: that of their training step.
    A function where it changes during the call; it is asked when the schedule is called."""
    host_step: int | None = None
    """The step of the host's own loop, which training, log-probs and evaluation share. None: ``iteration``."""
    evaluation: bool = False
    """True: forward-only passes inside are evaluation and not log-probs."""


@dataclass(frozen=True)
class Hook:
    """One function of a host, and what can be read from a call of it."""

    module: str
    """The module it is defined in."""
    function: str
    """Its name there: ``train``, or ``Class.method``."""
    read: Callable[[Mapping[str, Any]], Facts] = lambda arguments: Facts()
    """Gets the call's arguments by name."""
    context: bool = False
    """True: the function returns a context manager, and the facts hold inside that rather than inside the call."""
    ends: Literal["step", "job"] | None = None
    """What is over when the call is: a step of the host in this process, or the whole job, which this process runs.
    Files are finished then, because what follows may end their processes without warning (see ``over``)."""
    batch: Batch | None = None
    """The function runs the microbatches of a step by itself, without Megatron's schedule; None: it does not."""


@dataclass(frozen=True)
class Writers:
    """Where the host sends scalars of its own on this rank; None: nowhere."""

    tensorboard: Any | None = None
    """A TensorBoard ``SummaryWriter``."""
    wandb: Any | None = None
    """The module ``wandb`` with a run in it."""
    meter: Any | None = None
    """An OpenTelemetry meter."""


@dataclass(frozen=True)
class Host:
    """One host framework. What it has nothing to say about keeps its default."""

    name: str
    """As in ``patches/`` and ``docs/hosts/``."""
    package: str
    """The package that is loaded where it runs."""
    hooks: tuple[Hook, ...]
    """Its functions that say more about the calls inside them."""
    arguments: Callable[[], Any | None] = unknown
    """Its parsed command line, for `megaprof.install_hooks` without a configuration; None before it is parsed."""
    config: Callable[[], ProfileConfig | None] = unknown
    """What its own profiling settings ask of megaprof by name. Raises ValueError for what cannot be honoured."""
    iteration: Callable[[], int | None] = unknown
    """The number of the running training step, where no hook around the call tells it."""
    writers: Callable[[], Writers] = Writers
    """Where it sends its scalars, now."""


_iteration: ContextVar[int | Callable[[], int | None] | None] = ContextVar("megaprof_iteration", default=None)
_host_step: ContextVar[int | None] = ContextVar("megaprof_host_step", default=None)


def install_as_asked() -> None:
    """Installs the hooks that a host's own settings, which have turned up, ask for."""
    armed.install()


def over(what: Literal["step", "capture", "job", "attempt"]) -> None:
    """Finishes windows and files, for as long as that takes, and logs what fails: a host's step in this process is
    over, or the ``capture`` (nothing more will be captured), or the ``job``, in the process that runs it, or a failed
    ``attempt`` (the call that has just ended, which the host makes once more)."""
    try:
        if what == "job":
            armed.finish_job()
        elif process.sessions:
            from megaprof.capture.profiler import profiler  # brings torch

            {"step": profiler.step_ended, "capture": profiler.capture_ended, "attempt": profiler.attempt_failed}[what]()
    except Exception as fault:
        if from_host(fault):
            raise
        logger.warning("megaprof: files could not be finished at the end of a %s: %r", what, fault)


def iteration() -> int | None:
    """The number of the pass that the caller is about to run, as the innermost hook around it has it, or None."""
    found = _iteration.get()
    return found() if callable(found) else found


#: Returns the step of the host's own loop, as the innermost hook around the caller has it, or None: then training, log-
#: probs, evaluation and annotated work belong to the step of their number.
host_step: Callable[[], int | None] = _host_step.get


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


def callers() -> Iterator[FrameType]:
    """The frames around whoever asks, its own first, then outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextmanager
def inside(facts: Facts, message: str) -> Iterator[None]:
    """Everything of ``facts`` for the code inside; with a role also a range, as ``megaprof.annotate`` writes it."""
    with ExitStack() as stack:
        if facts.iteration is not None:
            stack.callback(_iteration.reset, _iteration.set(facts.iteration))
        if facts.host_step is not None:
            stack.callback(_host_step.reset, _host_step.set(facts.host_step))
        if facts.evaluation:
            from megaprof.capture.roles import evaluation

            stack.enter_context(evaluation())
        if facts.role is not None:
            from megaprof.capture.annotations import annotate  # brings torch, which is not loaded yet everywhere

            stack.enter_context(annotate(message, role=facts.role))
        yield


def _adapted(hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    if hook.batch is not None:
        from megaprof.hooks.plain import batched  # brings torch

        original = batched(hook.batch, original)
    message = hook.function.rpartition(".")[2].lstrip("_")
    failed = False

    def known(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        nonlocal failed
        facts = Facts()
        try:
            facts = hook.read(signature.bind(*args, **kwargs).arguments)
        except Exception as fault:  # the host goes on, and so does profiling, with less to say
            if from_host(fault):
                raise
            if not failed:
                failed = True
                logger.warning("megaprof: %s.%s: cannot read what it knows: %r", hook.module, hook.function, fault)
        return inside(facts, message)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _ended(hook), known(args, kwargs):
            return original(*args, **kwargs)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with _ended(hook), known(args, kwargs):
            return await original(*args, **kwargs)

    @contextmanager
    def around(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with known(args, kwargs), original(*args, **kwargs) as value:
            yield value

    if hook.context:
        return around
    return coroutine if inspect.iscoroutinefunction(original) else wrapper


@contextmanager
def _ended(hook: Hook) -> Iterator[None]:
    try:
        yield
    except Exception:
        if hook.ends is not None:
            over(hook.ends)
        raise
    if hook.ends is not None:
        over(hook.ends)
