"""``install_hooks``: the one call in a pretrain entrypoint, and the handle that takes everything back.

``start``, ``step`` and ``stop`` do the same for a controller, which dispatches them to its worker processes:

    megaprof.start(config)          # before the loop, in every worker
    megaprof.step()                 # when one of the controller's steps is over
    megaprof.stop()                 # after the loop, in a finally

Arguments and results can be pickled. All calls between two ``step()`` are one step of the host, however many
mini-batches it has.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any

from megaprof.artifacts.writer import FinishHook, open_writer
from megaprof.autoload import megatron_lm, registry
from megaprof.capture import profiler
from megaprof.capture.process import process
from megaprof.capture.session import Session
from megaprof.capture.this_rank import ThisRank, moved
from megaprof.config.arguments import config_from_args
from megaprof.config.options import ProfileConfig
from megaprof.config.values import checked_role
from megaprof.control.listener import Listener
from megaprof.hooks.schedules import patch_megatron
from megaprof.metrics.sinks import Overview
from megaprof.parallel.megatron import innermost
from megaprof.recorders import build_recorders
from megaprof.recorders.timeline import TimelineRecorder
from megaprof.runtime.armed import INSTALLED, armed
from megaprof.runtime.isolation import Contained, in_full


class Handle:
    """The result of ``install_hooks``. ``remove()``, or leaving it as a context manager, removes the hooks."""

    def __init__(self, config: ProfileConfig, role: str | None) -> None:
        self.config = config
        """The configuration."""
        self.role = role
        """Role of the model; None without one."""
        self._session: Session | None = None

    @property
    def active(self) -> bool:
        """True while the hooks work: they were installed on this rank, and nothing was removed or failed."""
        session = self._session
        return session is not None and not session.removed.is_set() and session.off is None

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until every file of closed windows is complete. Returns False after ``timeout`` seconds."""
        return self._session is None or self._session.writer.flush(timeout)

    def remove(self) -> None:
        """Closes an open window, finishes its files, and puts back every original function. May be called again.

        Only the training thread can close its window, and not while it runs a schedule call or captures a CUDA graph.
        If this is called then, or by another thread while a window is open, it only makes a request: the training
        thread does the work when its call ends, or when its next one begins. `active` stays true until then.
        """
        if self._session is not None:
            profiler.leave(self._session)

    def _undo(self) -> None:
        """Removes what was installed, after a fault while the hooks were being installed."""
        session = self._session
        if session is not None:
            session.removed.set()
            close_timeline = None if session.timeline is None else session.timeline.close
            in_full(partial(profiler.remove, session), close_timeline, session.writer.close)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


def install_hooks(
    model: Any = None,
    config: ProfileConfig | argparse.Namespace | None = None,
    *,
    role: str | None = None,
    iteration: Callable[[], int | None] | None = None,
    groups: Any = None,
    pipeline: bool = True,
) -> Handle:
    """Hooks Megatron's schedules for ``model`` and returns a handle that removes the hooks.

    Call it after ``initialize_model_parallel`` and before the training loop asks for ``get_forward_backward_func()``
    (Megatron-LM asks once). With profiling off, or on a rank that neither captures, keeps a timeline nor answers
    requests, nothing is wrapped and the handle does nothing. Installing the same model, or a part of it, again with the
    same configuration returns the first handle, unless Megatron has given this process another place since (an
    in-process restart); then the first handle is removed.

    Args:
        model: A module, the list of model chunks, or None for any model that no other handle owns.
        config: A ProfileConfig or a parsed namespace. Without one, Megatron-LM's global arguments if it is loaded, and
            otherwise the ``MEGAPROF_*`` environment.
        role: The model's role (actor, ref, critic, ...), for file names and for ranks per role; ``megaprof.role``
            overrides it.
        iteration: Returns the host's current iteration number, or None. Not needed for hosts that megaprof knows.
        groups: The model's process groups (megatron-core's ``ProcessGroupCollection``) in a job without
            ``parallel_state``; by default, those that the model has. For several modules one after the other, their
            ``MultiModulePipelineCommunicator``.
        pipeline: False for a trainer without Megatron's schedule: all ranks are one data-parallel group. The batches of
            hosts that megaprof knows are steps (`megaprof.recorders.call.Batch`). Any other caller announces every step
            and pass itself, through `megaprof.hooks.plain.PlainSteps`.

    Raises:
        ValueError: The configuration cannot be honoured. This is raised before the first step.
        ImportError: torch or megatron-core is not installed.
    """
    models = None if model is None else tuple(model) if isinstance(model, list | tuple) else (model,)
    if models is not None and not (models and all(map(callable, models))):
        raise ValueError(f"install_hooks: model {model!r} is neither a module nor a non-empty list of model chunks")
    if not isinstance(config, ProfileConfig):
        args = megatron_lm.arguments() if config is None else config
        config = ProfileConfig.from_env() if args is None else config_from_args(args)
    armed.mark(INSTALLED)
    role = None if role is None else checked_role(role, "install_hooks: role")
    handle = Handle(config, role)
    if not config.enabled or (config.steps_are_none and not config.listens):
        return handle
    owner = process.dispatcher.owner(None if models is None else tuple(map(innermost, models)))
    existing = None if owner is None else owner.handle
    if isinstance(existing, Handle):
        if (existing.config, existing.role) != (config, role):
            raise ValueError(
                "install_hooks: this model has hooks with another configuration; remove() their handle first"
            )
        if not (pipeline and existing._session is not None and moved(existing._session.coords)):
            return existing
        existing.remove()
    _require("torch")
    if pipeline:
        _require("megatron.core")
    this_rank = ThisRank.of(config, role, models, groups, pipeline=pipeline)
    if not (this_rank.windowed or this_rank.timed or config.listens):
        return handle
    hook = FinishHook(config.on_finish, str(config.dir)) if config.on_finish else None
    opened = open_writer(str(config.dir), hook)
    if opened is None:
        return handle
    directory, writer = opened
    try:
        recorders = build_recorders(dataclasses.replace(config, dir=directory), writer) if this_rank.windowed else ()
    except ValueError:
        writer.close()
        raise
    session = Session(
        config,
        this_rank,
        writer,
        role=role,
        numbers=partial(registry.numbers, given=iteration),
        recorders=recorders,
        framework=(framework := registry.framework()),
    )
    session.handle, handle._session = handle, session
    with Contained("installing the hooks", handle._undo):
        # Megatron, if the host runs its schedules, and the host modules that are loaded. In a trainer without Megatron,
        # their batches are the steps, or the caller announces the steps.
        profiler.enter(session, models, *[patch_megatron] * pipeline, registry.adapt)
        if this_rank.timed or (config.around_windows and (this_rank.windowed or config.on_demand)):
            finished = None if this_rank.timed else writer.hand_over  # of every step, or of those around windows
            session.timeline = TimelineRecorder(
                config, this_rank.coords, role, process.background, framework, directory, finished, process.parts
            )
            session.at_end.append(process.parts.watch_optimizers())
        if config.listens:
            _listen(session, directory)
    return handle


def start(
    config: ProfileConfig | argparse.Namespace | None = None,
    *,
    model: Any = None,
    role: str | None = None,
    first: int = 0,
    pipeline: bool = True,
) -> bool:
    """Installs the hooks in this process, as `megaprof.install_hooks` does, and numbers steps from ``first`` on.

    ``pipeline=False`` is for a trainer without Megatron's schedule: it captures the batches of the host's own engine,
    if megaprof knows it (verl's engines without Megatron, and SkyRL's FSDP workers).

    Returns True if the hooks work in this process. A second start before a stop changes nothing. Raises ValueError for
    a configuration that cannot be honoured.
    """
    if process.started is None:
        process.step = first
        process.started = install_hooks(model, config, role=role, iteration=lambda: process.step, pipeline=pipeline)
    return bool(process.started.active)


def step(number: int | None = None) -> int:
    """Ends the current step and begins the next one, ``number`` or the one after the last. Returns its number.

    Costs nothing without a start.
    """
    process.step = process.step + 1 if number is None else number
    return process.step


def stop(timeout: float = 60.0) -> bool:
    """Closes an open window, finishes its files and removes the hooks. Does nothing without a start.

    Returns True if every file is complete within ``timeout`` seconds, and no window waits for its own thread.
    """
    handle, process.started = process.started, None
    if handle is None:
        return True
    handle.remove()
    return bool(handle.flush(timeout) and not handle.active)


def _listen(session: Session, directory: str) -> None:
    """Starts to answer requests in ``directory``. Rank 0 and the last rank, where Megatron-LM keeps its scalar writers,
    also sum up the job's figures."""
    listener = Listener(session, directory)
    if not listener.start():
        return
    session.at_end.append(listener.close)
    coords = session.coords
    if coords.rank not in (0, coords.sizes.world - 1):
        return
    overview = Overview(coords, session.role, lambda: None if listener.closed else listener.job, megatron_lm.writers)
    process.background.add(overview.look, overview.every)
    session.at_end += partial(process.background.remove, overview.look), overview.close


def _require(package: str) -> None:
    try:
        import_module(package)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{package}.".startswith(f"{missing.name}."):
            raise  # it is installed, and lacks something itself
        raise ImportError(
            f"install_hooks: {package} is not installed; hooks need torch and megatron-core: "
            "pip install 'megaprof[train]'",
            name=missing.name,
        ) from None
