"""Installs the hooks in a host that nobody edited, when it asks megatron-core for its schedule.

``arm()`` waits for ``megatron.core.pipeline_parallel.schedules`` to be imported and wraps ``get_forward_backward_func``
and the schedules there, before any host can import their names. When the host calls one of them for the first time, its
ranks are laid out and its arguments are parsed, so ``install_hooks()`` runs then, for whatever model the calls carry. A
host that trains without Megatron's schedule gets its hooks before its first batch. The functions of a host that say
more about a call (`registry` next to this file) are wrapped when their modules are imported.

If no hooks went in, the first armed process logs a line at its end, with the condition that was not met, for all
processes that it started: a launcher never trains itself, and each of its ranks would log the same. If they run on the
same machine, they mark how far they came in a directory that the first process made for them.

`environment` makes a process arm itself: it puts the directory ``path`` beside this file on ``PYTHONPATH``, and Python
runs the ``sitecustomize.py`` in it at start-up. Child processes inherit it, however they are started.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megaprof.autoload import HOSTS
from megaprof.runtime.armed import INSTALLED, armed
from megaprof.runtime.isolation import Suppressed, logger

if TYPE_CHECKING:
    from megaprof.config.options import ProfileConfig


PATH = str(Path(__file__).resolve().parent / "path")
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_GET_SCHEDULE = "get_forward_backward_func"
_SCHEDULE = "forward_backward_"  # begins the names of all schedules, and of nothing else there (0.12 to 0.19)
_RAY = "ray._private.worker"
#: Packages that have a module to watch. All others pass the finder at the cost of one look-up.
_PACKAGES = frozenset(package.partition(".")[0] for package, _ in HOSTS.values())
#: Names process and directory of the first process. Not one of ``MEGAPROF_*``, because those are options.
_FIRST = "_MEGAPROF_FIRST"
#: Variables of launchers with a process's rank. Only rank 0 logs the line.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
#: How far a process may come, in the order of its marks.
_REASONS = (
    "neither torch nor megatron.core was imported",
    "torch was imported, but megatron.core was not, and no step of a trainer that megaprof supports without it ran",
    "megatron.core was imported, but not megatron.core.pipeline_parallel.schedules",
    "megatron.core was imported, but no call of its schedules was seen, nor of get_forward_backward_func(), which "
    "returns them",
    "a schedule of megatron.core was asked for or called, but neither had megatron.core.parallel_state been "
    "initialised, nor was the schedule given process groups",
)


def environment(config: ProfileConfig, env: Mapping[str, str]) -> dict[str, str]:
    """Returns ``env`` for a process that is to profile itself, and its children, as ``config`` says.

    Without a target in ``config``, there is no trace of megaprof in it.
    """
    from megaprof.config.options import ENV_PREFIX

    child = {name: value for name, value in env.items() if not name.startswith(ENV_PREFIX)}
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != PATH]
    if config.enabled:
        child |= config.to_env()
        paths.insert(0, PATH)
    if paths or "PYTHONPATH" in child:
        child["PYTHONPATH"] = os.pathsep.join(paths)
    return child


def arm(config: ProfileConfig | None = None) -> None:
    """Waits for megatron-core, and installs then, with ``config`` or else with the ``MEGAPROF_*`` environment.

    Idempotent: the first configuration counts. Imports only the standard library: a cluster has many processes that
    never load megatron-core.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    armed.config, armed.since = config, time.time()
    armed.install, armed.finish_job = install, _finish_job
    armed.awaits_schedule = armed.awaits_batch = True
    sys.meta_path.insert(0, _Finder())
    for name in filter(_is_hooked, list(sys.modules)):
        _loaded(name)


class _Finder(importlib.abc.MetaPathFinder):
    """An import finder that finds what the other finders find, and hooks modules once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_hooked(fullname):
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                with Suppressed(Exception, says=f"{fullname} cannot be hooked"):  # a loader of the host's own kind
                    if (loader := spec.loader) is not None and not isinstance(loader, type):
                        loader.exec_module = functools.partial(_execute, loader, loader.exec_module)
                return spec  # type: ignore[no-any-return]
        return None


def _execute(loader: Any, execute: Callable[[ModuleType], object], module: ModuleType) -> None:
    """Runs a module as its ``loader`` does, which is as it was before from then on, and hooks the module."""
    loader.exec_module = execute
    execute(module)
    _loaded(module.__name__)


def _is_hooked(name: str) -> bool:
    if name in (_SCHEDULES, _RAY):
        return True
    if name.partition(".")[0] not in _PACKAGES:
        return False
    from megaprof.autoload.registry import MODULES

    return name in MODULES


def _loaded(name: str) -> None:
    try:
        if name == _RAY:
            from megaprof.autoload.ray import before_ray_ends, between_methods

            before_ray_ends(sys.modules[name], _finish_job)
            between_methods(sys.modules[name].FunctionActorManager)
        elif name == _SCHEDULES:
            _wrap_schedules(sys.modules[name])
        else:
            from megaprof.autoload.registry import adapt
            from megaprof.runtime.patching import Patches

            adapt(Patches(), name)
    except Exception as fault:
        logger.error("megaprof: %s cannot be hooked: %s: %s", name, type(fault).__name__, fault)


def _config() -> ProfileConfig:
    """Returns the configuration that this process was armed with, or that of the ``MEGAPROF_*`` environment. Raises
    ValueError for a mistake in it, or in the host's own settings."""
    from megaprof.config.options import ProfileConfig

    if isinstance(armed.config, ValueError):
        raise armed.config
    return armed.config or ProfileConfig.from_env()


def _finish_job() -> None:
    """Waits for the files of the job's other processes. This process runs the job, which is over."""
    from megaprof.autoload.ray import wait

    try:
        config = _config()
    except ValueError:  # the workers report it
        return
    wait(config, armed.since)


def _wrap_schedules(schedules: ModuleType) -> None:
    from megaprof.runtime.patching import modules_with

    _keep_collectives()
    for name, original in list(vars(schedules).items()):
        if (name == _GET_SCHEDULE or name.startswith(_SCHEDULE)) and not hasattr(original, "_megaprof"):
            wrapper = _asked(original) if name == _GET_SCHEDULE else _called(original)
            wrapper._megaprof = True  # type: ignore[attr-defined]
            for module in modules_with(name, original):  # also those that imported the name before we were armed
                setattr(module, name, wrapper)


def _keep_collectives() -> None:
    """Makes torch keep its last collectives, which show where a hang is. Must be called before torch's process groups
    exist."""
    from megaprof.recorders import flight

    try:
        config = _config()
    except ValueError:  # reported when the hooks go in
        return
    if config.collectives:
        os.environ.setdefault(flight.TIMING, "1")
    variable = flight.keep(sys.argv, os.environ) if config.enabled and config.listens else None
    if variable is not None and os.environ.get("RANK", "0") == "0":
        logger.info(
            "megaprof: torch keeps the last %d collectives of each rank, for a hang: %s", flight.USUAL, variable
        )


def _asked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Megatron's ``get_forward_backward_func`` so that it installs the hooks first."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        if armed.awaits_schedule or _moved():
            armed.awaits_schedule = not install()
        return original(*args, **kwargs)

    return get_forward_backward_func


def _called(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a schedule that can be hooked wherever a host keeps it: it runs what `armed.schedules` has for it.

    The first call may install the hooks: it is given the groups where Megatron's own do not exist (several modules,
    Megatron-Bridge's ``use_decentralized_pg``).
    """
    name = original.__name__
    setattr(armed.schedules, name, original)

    @functools.wraps(original)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        if armed.awaits_schedule:
            groups = kwargs.get("p2p_communicator")
            if not hasattr(groups, "module_to_grid_map"):  # the order of several modules, which groups do not say
                groups = kwargs.get("pg_collection")
            armed.awaits_schedule = not install(groups=groups)
        return getattr(armed.schedules, name)(*args, **kwargs)

    return schedule


def _moved() -> bool:
    """Returns whether an in-process restart gave this rank another place, so that its hooks are of an earlier
    attempt."""
    with Suppressed(Exception):  # groups that are half set up: the next call looks again
        from megaprof.capture.this_rank import moved

        return armed.place is not None and moved(armed.place)
    return False


def install(*, pipeline: bool = True, groups: Any = None) -> bool:
    """Installs the hooks now, for any model. Returns False if it is too early; then the caller asks again.

    ``pipeline`` is False if the host is about to run a step without Megatron's schedule; if Megatron's process groups
    exist nevertheless, it is too early until the host asks for the schedule. ``groups``: the process groups that the
    schedule was given. Raises ValueError for a configuration that this world cannot honour.
    """
    try:
        from megaprof.parallel.megatron import NoGrid, coordinates, has_groups

        if pipeline and not has_groups() and groups is None:
            armed.asked_too_early = True
            return False
        if not pipeline and has_groups():
            return False
        from megaprof.autoload import megatron_lm
        from megaprof.autoload.install import install_hooks
        from megaprof.capture.process import process
        from megaprof.config.arguments import check_host_profilers

        config = _config()
        if own := [each for each in process.sessions if each.models is not None and each.role is None]:
            if own[0].config != config:
                logger.warning("megaprof: hooks that the program installed itself have other options, which count")
            return True
        check_host_profilers(config, megatron_lm.arguments())
        install_hooks(None, config, groups=groups, pipeline=pipeline)
        if pipeline:
            armed.place = coordinates()[0] if has_groups() else None
    except NoGrid as reason:
        logger.error("megaprof: profiling is off: %s", reason)
    except ValueError:
        raise
    except Exception as fault:
        logger.error(
            "megaprof: the hooks could not be installed, profiling is off: %s: %s", type(fault).__name__, fault
        )
    return True


def log_at_end() -> None:
    """Has this process log the line at its end, or leave a mark for the process that will."""
    from tempfile import mkdtemp  # not in every process that only waits for megatron-core

    pid, _, directory = os.environ.get(_FIRST, "").partition(":")
    if not directory:
        directory = mkdtemp(prefix="megaprof-")
        os.environ[_FIRST] = f"{os.getpid()}:{directory}"
    armed.marks = Path(directory)
    if pid in ("", str(os.getpid())):  # this process may have run another program before, which set the variable
        armed.first = os.getpid()
    atexit.register(_ends, os.getpid())


def _ends(pid: int) -> None:
    """Marks how far this process came. The first process then logs the line, if no process has asked for hooks."""
    if pid != os.getpid() or armed.marks is None:  # a fork of it
        return
    progress = int("torch" in sys.modules)
    if _SCHEDULES in sys.modules:
        progress = 4 if armed.asked_too_early else 3
    elif "megatron.core" in sys.modules:
        progress = 2
    armed.mark(str(progress))
    if armed.first is None:
        return
    from shutil import rmtree

    marks = {path.name for path in armed.marks.glob("*")}
    rmtree(armed.marks, ignore_errors=True)
    if INSTALLED in marks or any(os.environ.get(name, "0") != "0" for name in _RANKS):
        return
    reason = _REASONS[max((int(mark) for mark in marks if mark.isdigit()), default=0)]
    processes = "this process" if marks == {str(progress)} else "this process, or those that it started here"
    logger.warning("megaprof: no hooks were installed in %s; nothing was captured: %s", processes, reason)
