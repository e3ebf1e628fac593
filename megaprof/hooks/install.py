"""``install_hooks``: the one call in a pretrain entrypoint, and the handle that takes everything back."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from megaprof.arguments import config_from_args
from megaprof.artifacts import Writer
from megaprof.config import ProfileConfig
from megaprof.hooks.dispatch import Dispatcher
from megaprof.hooks.microbatches import patch_microbatches
from megaprof.hooks.p2p import patch_p2p
from megaprof.hooks.patching import Patches
from megaprof.hooks.schedules import patch_schedules
from megaprof.hosts import megatron_lm
from megaprof.metadata import innermost
from megaprof.recorders.torch_profiler import TorchRecorder
from megaprof.session import Session
from megaprof.topology import coords_from_parallel_state, layout_from_parallel_state

logger = logging.getLogger("megaprof")


class Handle:
    """What ``install_hooks`` returns. ``remove()``, or leaving it as a context manager, takes the hooks out again."""

    def __init__(self, config: ProfileConfig, models: tuple[Any, ...] | None, role: str | None) -> None:
        self.config = config
        self.role = role
        self._models = None if models is None else [id(innermost(m)) for m in models]
        self._session: Session | None = None
        self._writer: Writer | None = None

    @property
    def active(self) -> bool:
        """True while hooks are in: profiling is on, this rank is selected, nothing was removed and nothing failed."""
        return self._session is not None and not self._session.disabled

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until every file of closed windows is complete; False after ``timeout`` seconds."""
        return self._writer is None or self._writer.flush(timeout)

    def remove(self) -> None:
        """Close an open window, finish its files, and put every original function back. Idempotent."""
        session, self._session = self._session, None
        if session is None:
            return
        atexit.unregister(self.remove)
        session.finish("the hooks were removed")
        _process.release(self, session)
        self.flush()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


class _Process:
    """The hooks of this process: patched while at least one handle is active."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.evaluations = 0
        self._dispatcher = Dispatcher()
        self._patches = Patches()

    def acquire(self, handle: Handle, session: Session, models: tuple[Any, ...] | None) -> None:
        if not self.handles:
            self._dispatcher = Dispatcher()
            patch_schedules(self._patches, self._dispatcher, lambda: self.evaluations > 0)
            patch_microbatches(self._patches, self._dispatcher)
            patch_p2p(self._patches, self._dispatcher)
        self.handles.append(handle)
        self._dispatcher.add(session, models)

    def release(self, handle: Handle, session: Session) -> None:
        self._dispatcher.remove(session)
        self.handles.remove(handle)
        if not self.handles:
            self._patches.restore()


_process = _Process()


def install_hooks(
    model: Any = None,
    config: ProfileConfig | argparse.Namespace | None = None,
    *,
    role: str | None = None,
    iteration: Callable[[], int | None] | None = None,
) -> Handle:
    """Hook Megatron's schedules for ``model`` and return a handle that removes everything again.

    Call it after ``initialize_model_parallel`` and before the training loop asks for ``get_forward_backward_func()``
    (Megatron-LM asks once). ``model`` is one module, the list of model chunks, or None for any model that no other
    handle owns. ``config`` is a ProfileConfig or a parsed namespace; without one, Megatron-LM's global arguments where
    it is loaded, else the ``MEGAPROF_*`` environment. ``role`` names the model (actor, ref, critic, ...) in file names.
    ``iteration`` returns the host's current iteration number, or None; Megatron-LM's is found by itself.

    With profiling off, or on a rank that is not selected, nothing is wrapped and the handle is inert. Installing the
    same model again with the same configuration returns the first handle.

    Raises ValueError for a configuration that cannot be honoured, before the first step.
    """
    settled = _settle(config)
    models = _models(model)
    handle = Handle(settled, models, role)
    if not settled.enabled:
        return handle
    for existing in _process.handles:
        if existing._models == handle._models:
            if (existing.config, existing.role) != (settled, role):
                raise ValueError(
                    "install_hooks: this model has hooks with another configuration; remove() their handle first"
                )
            return existing
    chunks = None if models is None else len(models)
    coords = coords_from_parallel_state(chunks)
    selector = settled.selector()
    selector.check(coords.sizes, layout_from_parallel_state(chunks))
    if not selector.selects(coords):
        return handle
    try:
        os.makedirs(str(settled.dir), exist_ok=True)
    except OSError as fault:
        # One selected rank with a bad disk must not end a job whose other ranks are about to enter a collective.
        logger.error("megaprof: %s cannot be created: %s; profiling is off on this rank", settled.dir, fault)
        return handle
    handle._writer = Writer()
    session = Session(
        settled,
        coords,
        [TorchRecorder(settled, handle._writer)],
        role=role,
        iteration=iteration or megatron_lm.iteration,
    )
    handle._session = session
    _process.acquire(handle, session, models)
    atexit.register(handle.remove)
    logger.info("megaprof: rank %d captures %s into %s", coords.rank, ", ".join(settled.target), settled.dir)
    return handle


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    """Forward-only passes inside are evaluation, not log-probs. Not needed inside a function named ``evaluate``."""
    _process.evaluations += 1
    try:
        yield
    finally:
        _process.evaluations -= 1


def _settle(config: ProfileConfig | argparse.Namespace | None) -> ProfileConfig:
    if isinstance(config, ProfileConfig):
        return config
    args = megatron_lm.global_args() if config is None else config
    return ProfileConfig.from_env() if args is None else config_from_args(args)


def _models(model: Any) -> tuple[Any, ...] | None:
    if model is None:
        return None
    models: Sequence[Any] = model if isinstance(model, list | tuple) else [model]
    if not models or not all(callable(m) for m in models):
        raise ValueError(f"install_hooks: model {model!r} is neither a module nor a non-empty list of model chunks")
    return tuple(models)
