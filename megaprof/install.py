"""``install_hooks``: the one call in a pretrain entrypoint, and the handle that takes everything back."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any

from megaprof.artifacts.finish import FinishHook
from megaprof.artifacts.store import Store
from megaprof.artifacts.writer import Writer
from megaprof.capture import roles
from megaprof.capture.agenda import HostNumbers
from megaprof.capture.lines import Lines
from megaprof.capture.repeats import Repeats, remove
from megaprof.capture.session import Session
from megaprof.capture.this_rank import ThisRank
from megaprof.config.arguments import config_from_args
from megaprof.config.options import ProfileConfig
from megaprof.config.per_role import checked_role
from megaprof.config.windows import TRAIN_ACTOR
from megaprof.control.listener import Listener, listen
from megaprof.control.watchdog import Watchdog
from megaprof.formats.names import shard
from megaprof.hooks.dispatch import Dispatcher
from megaprof.hooks.megatron import patch_megatron
from megaprof.hooks.patching import Patches
from megaprof.hooks.plain import tell
from megaprof.integrations import contract, registry
from megaprof.metrics.overview import Overview
from megaprof.metrics.sinks import check_prometheus
from megaprof.parallel.chunks import innermost
from megaprof.parallel.topology import RankCoords, WorldLayout
from megaprof.recorders import Recorder, Window, build_recorders
from megaprof.recorders.timeline.recorder import TimelineRecorder
from megaprof.runtime import unmet
from megaprof.runtime.background import Background
from megaprof.runtime.device import capturing
from megaprof.runtime.ending import TERM_SECONDS, Termination, at_exit, in_forked_child, not_at_exit
from megaprof.runtime.isolation import Contained, in_full
from megaprof.runtime.logs import logger

#: How long the end of a host's step waits for unfinished files, in seconds, if ``--profile-flush-seconds`` is not less.
STEP_END_SECONDS = 20.0


class Handle:
    """What ``install_hooks`` returns. ``remove()``, or leaving it as a context manager, takes the hooks out again."""

    def __init__(self, config: ProfileConfig, models: tuple[Any, ...] | None, role: str | None) -> None:
        self.config = config
        """What was asked for."""
        self.role = role
        """Whose model it is; None: not said."""
        self._models = None if models is None else tuple(_reference(innermost(model)) for model in models)
        self._session: Session | None = None
        self._writer: Writer | None = None
        self._recorders: tuple[Recorder, ...] = ()
        self._timeline: TimelineRecorder | None = None
        self._listener: Listener | None = None
        self._lines: Lines | None = None
        self._last: Window | None = None  # that has closed
        self._folder = ""  # where this rank's files grow
        self._removed = threading.Event()

    @property
    def active(self) -> bool:
        """True while hooks are in: profiling is on, this rank is selected, nothing was removed and nothing failed."""
        return self._session is not None and not self._session.disabled

    @property
    def dispatcher(self) -> Dispatcher:
        """Who is told of steps and passes, where no hook on a schedule tells (`install_without_pipeline`)."""
        return _process._dispatcher

    def owns(self, models: tuple[Any, ...] | None) -> bool:
        """Whether the handle is for these very model chunks, or for any model where ``models`` is None."""
        if models is None or self._models is None:
            return models is self._models is None
        return len(models) == len(self._models) and all(
            reference() is innermost(model) for reference, model in zip(self._models, models, strict=True)
        )

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until every file of closed windows is complete; False after ``timeout`` seconds."""
        return self._writer is None or self._writer.flush(timeout)

    def kernel_summary(self, timeout: float = 0.0, role: str | None = None) -> dict[str, Any] | None:
        """The kernel summary of the last closed window, as plain data (see docs: ``.kernels.json``), picklable; with
        ``role``, of the last one of that role.

        None while it is being made in the background, for at most ``timeout`` seconds; it never shows an older window
        than the last. None as well without ``--profile-kernels``, on a rank that captures nothing, and after a failure
        (which was logged). Works after ``remove``, too.
        """
        for recorder in self._recorders:
            summary = getattr(recorder, "kernel_summary", None)
            if summary is not None:
                found: dict[str, Any] | None = summary(timeout, role)
                return found
        return None

    def remove(self) -> None:
        """Close an open window, finish its files, and put every original function back. Idempotent.

        Only the thread that trains can close its window, and not while it captures a CUDA graph. Called from another
        thread while that one has a window open, or is inside a schedule call, or called during a capture, this only
        asks: the training thread does it when its call ends, or when its next one begins. `active` stays true until it
        is done.
        """
        if self._session is not None and not _process.ask(self._remove, self._session):
            self._remove()

    def _remove(self) -> None:
        session = self._session
        if session is None:
            return
        in_full(
            partial(self._finish, session, "the hooks were removed", self.config.flush_seconds),
            partial(_process.release, self, session),
            partial(not_at_exit, self._at_exit),
            self._gone,
        )

    def _gone(self) -> None:
        self._session = None
        self._removed.set()

    def _at_exit(self) -> None:
        """The process ends; a training thread that still runs gets the time to close its window."""
        if self._session is not None:
            self.remove()
            self._removed.wait(self.config.flush_seconds)

    def _finish(self, session: Session | None, reason: str, seconds: float) -> None:
        """Close an open window, finish every file within ``seconds``, and say what there is. The window gets half of
        that time: the device may never be idle, and the files of other windows are to be finished all the same."""
        deadline = time.monotonic() + seconds
        writer = self._writer
        in_full(
            *([] if session is None else [partial(session.finish, reason, seconds / 2)]),
            *([] if self._timeline is None else [self._timeline.close]),
            *([] if writer is None else [lambda: writer.close(max(0.0, deadline - time.monotonic()))]),
            *([] if self._listener is None else [self._listener.close]),
            *([] if self._lines is None or session is None else [partial(self._lines.end, session.agenda)]),
        )

    def _keep(self, session: Session | None, reason: str, seconds: float) -> None:
        """Close an open window and wait for its files, as `_finish` does, but leave everything on."""
        deadline = time.monotonic() + seconds
        in_full(
            *([] if session is None else [partial(session.finish, reason, seconds / 2)]),
            lambda: self.flush(max(0.0, deadline - time.monotonic())),
        )

    def _forget_attempt(self) -> None:
        """The call that has just ended runs again: its file, if it was captured, makes room for the next one's."""
        session, window, writer = self._session, self._last, self._writer
        if session is None or window is None or writer is None or window.target != TRAIN_ACTOR:
            return
        if window.last in (None, window.step) and session.agenda.repeats(window.target, window.role, window.step):
            logger.info("megaprof: train_actor step %d runs again, and its file is the second run's", window.step)
            writer.run(partial(remove, self._folder, window))

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


class _Process:
    """The hooks of this process: patched while at least one handle is active."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.latest: list[Handle] = []  # those that captured a window, the last one last; removed ones, too
        self.termination = Termination(self._save, self._unsaved)
        self._dispatcher = Dispatcher()
        self._patches = Patches()
        self._patched = False
        self._forks_watched = False
        self.background = Background()

    def acquire(self, handle: Handle, session: Session, models: tuple[Any, ...] | None, *, pipeline: bool) -> None:
        """Put the hooks in for ``session``. When that fails, whatever was put in is taken out again.

        ``pipeline``: Megatron's schedules are patched; else batches of the host are steps, or the caller tells of them.
        """
        patched = bool(self._patches)
        try:
            self._acquire(handle, session, models, pipeline=pipeline)
        except BaseException:
            in_full(partial(self.release, handle, session), *([] if patched else [self._unpatch]))
            raise

    def _unpatch(self) -> None:
        self._patches.restore()
        self._patched = False

    def _acquire(self, handle: Handle, session: Session, models: tuple[Any, ...] | None, *, pipeline: bool) -> None:
        if not self._forks_watched:
            self._forks_watched = True
            os.register_at_fork(after_in_child=self._forget)
        ends = ("step", self._step_ended), ("capture", self._capture_ended), ("attempt", self._attempt_failed)
        for what, task in ends:
            if task not in contract.when_over[what]:
                contract.when_over[what].append(task)
        if not self.handles:
            self._dispatcher = Dispatcher()
            tell(self._dispatcher)
        if pipeline and not self._patched:
            self._patched = True
            patch_megatron(self._patches, self._dispatcher)
        registry.adapt(self._patches)
        self.handles.append(handle)
        self._dispatcher.add(session, models)
        roles.attach(session)

    def release(self, handle: Handle, session: Session) -> None:
        """Take out what ``session`` put in; the hooks themselves with the last handle."""
        with self.termination:
            roles.detach(session)
            self._dispatcher.remove(session)
            self.handles = [each for each in self.handles if each is not handle]
            if not self.handles:
                self._unpatch()

    def ask(self, leave: Callable[[], None], session: Session) -> bool:
        """Have the training thread call ``leave`` later, if it is another one than this and busy with ``session``'s
        models, or captures a CUDA graph; else false, and the caller is to do it."""
        there = {self._dispatcher.inside, session.thread} & set(sys._current_frames())
        if not there - {threading.get_ident()} and not capturing():
            return False
        self._dispatcher.ask(leave)
        return True

    def _step_ended(self) -> None:
        """A step of the host is over, and the host may end this process before it calls anything again (Ray does)."""
        for handle in list(self.handles):
            if handle._session is not None:
                handle._session.step_ended()
        self._flush()

    def _capture_ended(self) -> None:
        """The host says that nothing more is to be captured: what runs at the end runs now."""
        for handle in self.handles:
            if handle._writer is not None:
                handle._writer.end_capture()
        self._flush()

    def _attempt_failed(self) -> None:
        for handle in self.handles:
            handle._forget_attempt()

    def _flush(self) -> None:
        deadline = time.monotonic() + STEP_END_SECONDS
        for handle in list(self.handles):
            left = max(0.0, deadline - time.monotonic())
            handle.flush(min(left, handle.config.flush_seconds))

    def _unsaved(self) -> bool:
        if Session._holder is not None:
            return True
        return any(handle._writer is not None and handle._writer.pending for handle in self.handles)

    def _save(self, last: bool) -> None:
        """SIGTERM: what an open window has, and every file, within the shorter of two limits. ``last``: False where a
        handler of the host's decides whether the process ends, and profiling may have to go on."""
        deadline, reason = time.monotonic() + TERM_SECONDS, "the process was terminated (SIGTERM)"
        for handle in list(self.handles):
            left = max(0.0, deadline - time.monotonic())
            save = handle._finish if last else handle._keep
            save(handle._session, reason, min(left, handle.config.flush_seconds))

    def _forget(self) -> None:
        """A forked child, such as a DataLoader's worker, has no hooks, no open window and no files to finish."""
        for handle in self.handles:
            not_at_exit(handle._at_exit)
            handle._session = handle._writer = handle._timeline = handle._listener = None
            handle._recorders = ()
        self.handles.clear()
        self.latest.clear()
        self._unpatch()
        self._dispatcher.forget()
        roles.sessions.clear()
        in_forked_child(recording=Session._holder is not None)
        Session._holder = None
        self.termination.reset()


_process = _Process()


def install_hooks(
    model: Any = None,
    config: ProfileConfig | argparse.Namespace | None = None,
    *,
    role: str | None = None,
    iteration: Callable[[], int | None] | None = None,
    groups: Any = None,
) -> Handle:
    """Hook Megatron's schedules for ``model`` and return a handle that removes everything again.

    Call it after ``initialize_model_parallel`` and before the training loop asks for ``get_forward_backward_func()``
    (Megatron-LM asks once). ``model`` is one module, the list of model chunks, or None for any model that no other
    handle owns. ``config`` is a ProfileConfig or a parsed namespace; without one, Megatron-LM's global arguments where
    it is loaded, else the ``MEGAPROF_*`` environment. ``role`` is whose model it is (actor, ref, critic, ...), in
    file names and for the steps and ranks that the configuration has per role; ``megaprof.role`` scopes override it.
    ``iteration`` returns the host's current iteration number, or None; those of known hosts are found by themselves.
    ``groups`` are the model's process groups (megatron-core's ``ProcessGroupCollection``) in a job that has no
    ``parallel_state``; without them, those that the model itself has.

    With profiling off, or on a rank that is not selected, nothing is wrapped and the handle is inert. Installing the
    same model again with the same configuration returns the first handle.

    Raises ValueError for a configuration that cannot be honoured, before the first step, and ImportError where torch
    or megatron-core is not installed.
    """
    return _install(_models(model), _settle(config), role, iteration, groups, pipeline=True)


def install_without_pipeline(
    model: Any = None,
    config: ProfileConfig | argparse.Namespace | None = None,
    *,
    role: str | None = None,
    iteration: Callable[[], int | None] | None = None,
) -> Handle:
    """`install_hooks` for a trainer without Megatron's schedule: all ranks are one data-parallel group.

    The batches of hosts that are known are steps (`megaprof.hooks.batch.Batch`). Another caller tells of every step and
    every pass itself, through `PlainSteps` on the handle's ``dispatcher``. Raises ValueError as `install_hooks` does.
    """
    return _install(_models(model), _settle(config), role, iteration, pipeline=False)


def _install(
    models: tuple[Any, ...] | None,
    settled: ProfileConfig,
    role: str | None,
    iteration: Callable[[], int | None] | None,
    groups: Any = None,
    *,
    pipeline: bool,
) -> Handle:
    unmet.installed()
    role = None if role is None else checked_role(role, "install_hooks: role")
    handle = Handle(settled, models, role)
    if not settled.enabled or settled.never:
        return handle
    existing = next((each for each in _process.handles if each.owns(models)), None)
    if existing is not None:
        if (existing.config, existing.role) != (settled, role):
            raise ValueError(
                "install_hooks: this model has hooks with another configuration; remove() their handle first"
            )
        return existing
    check_prometheus(settled.prometheus)
    _require("torch")
    if pipeline:
        _require("megatron.core")
    here = ThisRank.of(settled, role, models, groups, pipeline=pipeline)
    here.announce(settled)
    store = _store(settled, here.coords) if here.records(settled) else None
    if store is None:
        return handle
    numbers = HostNumbers(iteration or registry.iteration, contract.iteration, iteration or contract.host_step)
    session = _assemble(handle, here, store, numbers)
    with Contained("installing the hooks", lambda: _undo(handle)):
        _process.acquire(handle, session, models, pipeline=pipeline)
        handle._session = session
        at_exit(handle._at_exit)
        if settled.listens:
            handle._listener = _listen(session, here.layout, store.writer, store.local)
    return handle


def _store(config: ProfileConfig, coords: RankCoords) -> Store | None:
    hook = FinishHook(config.on_finish, str(config.dir), config.on_finish_when) if config.on_finish else None
    return Store.make(str(config.dir), shard(coords), hook)


def _assemble(handle: Handle, here: ThisRank, store: Store, numbers: HostNumbers) -> Session:
    """Give ``handle`` its parts, and return the session that drives them. Raises ValueError where a recorder cannot run
    in this process."""
    config, writer = handle.config, store.writer
    handle._writer, handle._folder = writer, os.path.join(store.local, shard(here.coords))
    if here.windowed:
        handle._recorders = build_recorders(dataclasses.replace(config, dir=store.local), writer)
    if here.timed:
        handle._timeline = TimelineRecorder(config, here.coords, handle.role, _process.background, registry.framework())
    lines = handle._lines = Lines(config, store.local, speaks=here.speaks)

    def window_ended(window: Window) -> None:
        _process.latest = [each for each in _process.latest if each is not handle] + [handle]
        handle._last = window
        lines.window(window, writer.run)
        writer.end_window()

    return Session(
        config,
        here.coords,
        handle._recorders,
        role=handle.role,
        numbers=numbers,
        timeline=handle._timeline,
        window_ended=window_ended,
        repeat=Repeats(store.local, here.coords),
        framework=registry.framework(),
        termination=_process.termination,
    )


def _undo(handle: Handle) -> None:
    """After a fault while the hooks went in: nothing of them stays, and nothing runs."""
    session, handle._session = handle._session, None
    not_at_exit(handle._at_exit)
    if session is not None:
        _process.release(handle, session)
    for part in (handle._timeline, handle._writer):
        if part is not None:
            part.close()


def kernel_summary(role: str | None = None, timeout: float = 0.0) -> dict[str, Any] | None:
    """The kernel summary of the last window that closed in this process, or of the last one of ``role``, without a
    `Handle`: a controller calls it in its workers. Plain data, picklable; see `Handle.kernel_summary`.

    None where there is none, also while it is still being made after ``timeout`` seconds.
    """
    for handle in reversed(_process.latest):
        summary = handle.kernel_summary(timeout, role)
        if summary is not None:
            return summary
    return None


def _listen(session: Session, layout: WorldLayout | None, writer: Writer, directory: str) -> Listener | None:
    """Start to answer requests in ``directory``; the lowest rank also watches the job, and the last one its scalars,
    since Megatron-LM keeps its writers there."""
    listener = listen(session, layout, writer, directory)
    if listener is None:
        return None
    config, coords = session.config, session.coords
    leads, last = coords.rank == 0, coords.rank == coords.sizes.world - 1
    if leads or last:
        overview = Overview(config, leads=leads, role=session.role)
        listener.follow(overview, overview.close)
        if leads and (config.trigger_step_time is not None or config.trigger_imbalance is not None):
            watchdog = Watchdog(config)
            listener.follow(watchdog)
            if config.trigger_imbalance is not None:
                overview.want(lambda summary: watchdog.see(summary.imbalance))
    listener.start(_process.background)
    return listener


def _settle(config: ProfileConfig | argparse.Namespace | None) -> ProfileConfig:
    if isinstance(config, ProfileConfig):
        return config
    args = registry.arguments() if config is None else config
    return ProfileConfig.from_env() if args is None else config_from_args(args)


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


def _reference(model: Any) -> Callable[[], Any]:
    """Returns ``model`` while it lives: an address alone may belong to another model later."""
    try:
        return weakref.ref(model)
    except TypeError:
        return lambda: model


def _models(model: Any) -> tuple[Any, ...] | None:
    if model is None:
        return None
    models: Sequence[Any] = model if isinstance(model, list | tuple) else [model]
    if not models or not all(callable(m) for m in models):
        raise ValueError(f"install_hooks: model {model!r} is neither a module nor a non-empty list of model chunks")
    return tuple(models)
