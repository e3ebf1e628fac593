"""``start``, ``step`` and ``stop``: functions that a controller dispatches to its worker processes.

    megaprof.start(config)          # before the loop, in every worker
    megaprof.step()                 # when one of the controller's steps is over
    megaprof.stop()                 # after the loop, in a finally

Arguments and results can be pickled. All calls between two ``step()`` are one step of the host, however many
mini-batches it has.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from megaprof.autoload.install import Handle, install_hooks, install_without_pipeline

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig


class _Started:
    """The hooks that `start` installed in this process."""

    handle: Handle | None = None
    number = 0
    """The controller's number of the running step."""


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
    if megaprof knows it (the FSDP engines of verl and SkyRL).

    Returns True if this process records anything. A second start before a stop changes nothing. Raises ValueError for a
    configuration that cannot be honoured.
    """
    if _Started.handle is None:
        _Started.number = first
        install = install_hooks if pipeline else install_without_pipeline
        _Started.handle = install(model, config, role=role, iteration=lambda: _Started.number)
    return _Started.handle.active


def step(number: int | None = None) -> int:
    """Ends the current step and begins the next one, ``number`` or the one after the last. Returns its number.

    Costs nothing without a start.
    """
    _Started.number = _Started.number + 1 if number is None else number
    return _Started.number


def stop(timeout: float = 60.0) -> bool:
    """Closes an open window, finishes its files and removes the hooks. Does nothing without a start.

    Returns True if every file is complete within ``timeout`` seconds.
    """
    handle, _Started.handle = _Started.handle, None
    if handle is None:
        return True
    handle.remove()
    return handle.flush(timeout)
