"""Builds Nsight Systems command lines for a configuration, for a launcher and for Ray.

Option names and values are those of ``nsys profile`` (Nsight Systems user guide, "CLI Profile Command Switch Options").
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from megaprof.artifacts.remote import is_remote
from megaprof.config.options import ProfileConfig, flag
from megaprof.config.windows import TRAIN_OVERALL
from megaprof.formats.nsys import WINDOW
from megaprof.formats.ranges import DOMAIN

#: The APIs to trace. ``osrt`` is left out: operating system calls make up most of a report, and say little here.
TRACE = "cuda,nvtx,cudnn,cublas"
CONTROLLER_TRACE = "nvtx,osrt"
#: The ways to open a capture range, as nsys names them. The first is the default.
CAPTURES = ("cudaProfilerApi", "nvtx")
#: nsys replaces %q{NAME} by an environment variable, %h by the host's name and %p by the process id. It appends the
#: number of the capture range. If the variable is not set, nsys fails.
RANK_NAME = "nsys.rank%q{RANK}.%h.%p"
WORKER_NAME = "nsys.worker.%h.%p"
CONTROLLER_NAME = "nsys.controller.%h.%p"
#: Text that every shell passes on unchanged. ``%q{RANK}`` is no brace expansion: that needs a comma or two dots.
PLAIN = re.compile(r"[\w./%{}=@:+,-]+")


def windows(config: ProfileConfig) -> int | None:
    """Returns how many windows one process captures for one model. None if the configuration does not say: with a
    schedule for the whole run, steps per role, a window for each role's work, or targets that may be on one step."""
    if config.roles or config.discrete or (TRAIN_OVERALL in config.target and len(config.target) > 1):
        return None
    counts = [config.plan(target).windows for target in config.target]
    limits = [count for count in counts if count is not None]
    return sum(limits) if len(limits) == len(counts) else None


def options(
    config: ProfileConfig,
    *,
    ray: bool = False,
    output: str | None = None,
    shutdown: bool = False,
    models: int = 1,
    capture: str = CAPTURES[0],
) -> dict[str, str]:
    """Returns the options of ``nsys profile`` for every rank, by name.

    ``ray``: returns them as a Ray actor takes them in ``runtime_env={"nsight": ...}``. Ray writes into its own log
    directory unless the output path is absolute. It starts the worker before its ``RANK`` is set, so the file name has
    only host and process; the ``.nsys.json`` next to the reports says which rank it was. ``output``: nsys's
    ``--output``. Without it, the file is in ``config.dir``, and its name has rank, host and process. ``shutdown``: ends
    nsys in each process after its last window rather than with the process. This needs the number of windows, and
    therefore ``models``, the number of models of a process that have hooks. ``capture``: one of `CAPTURES`, which opens
    a capture range: cudaProfilerStart, or an NVTX range, which needs no CUDA.

    Raises ValueError if the configuration has no windows or lacks the nsys tool, or if ``shutdown`` is set and the
    number of windows is unknown.
    """
    _check(config)
    if capture not in CAPTURES:
        raise ValueError(f"capture={capture!r} is not valid; valid: {', '.join(CAPTURES)}")
    if models < 1:
        raise ValueError(f"models={models} is not valid; it must be at least 1")
    end = "repeat"
    if shutdown:
        count = windows(config)
        if count is None:
            raise ValueError(
                f"shutdown: the number of windows is not known with a {flag('schedule')} without an end, "
                f"{flag('role_steps')}, {flag('discrete')} or {TRAIN_OVERALL} beside other targets; set "
                f"{flag('steps')} alone, or leave shutdown out"
            )
        end = f"repeat-shutdown:{count * models}"
    by_range = capture == "nvtx"
    return {
        "trace": TRACE,
        "capture-range": capture,
        # nsys matches the exact name, then its domain. The variable has it look at unregistered names, too.
        **({"nvtx-capture": f"{WINDOW}@{DOMAIN}", "env-var": "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"} if by_range else {}),
        "capture-range-end": end,
        # By default, nsys ends the program that it profiles when it shuts down.
        **({"kill": "none"} if shutdown else {}),
        "sample": "none",
        "cpuctxsw": "none",
        "cuda-graph-trace": "graph",
        "force-overwrite": "true",
        **({"cuda-memory-usage": "true"} if config.profile_memory else {}),
        **({"python-sampling": "true"} if config.with_stack else {}),
        **(
            {"o": _plain(_output(config, output, WORKER_NAME))}
            if ray
            else {"output": _output(config, output, RANK_NAME)}
        ),
    }


def controller_options(config: ProfileConfig, *, output: str | None = None) -> dict[str, str]:
    """Returns Ray's nsight options for the controller, which has no GPU and no windows. nsys records NVTX ranges
    and system calls from start to end."""
    _check(config)
    return {
        "trace": CONTROLLER_TRACE,
        "sample": "none",
        "cpuctxsw": "none",
        "force-overwrite": "true",
        "o": _plain(_output(config, output, CONTROLLER_NAME)),
    }


def refused(names: Iterable[str]) -> list[str] | None:
    """Returns the options that the nsys on this machine does not know. None if there is no nsys that can be asked."""
    known_options = _known()
    return None if known_options is None else [name for name in names if len(name) > 1 and name not in known_options]


@functools.cache
def _known() -> frozenset[str] | None:
    """Returns the options in ``nsys profile --help``, which runs once. None if no nsys is there or answers."""
    nsys = shutil.which("nsys")
    if nsys is None:
        return None
    try:
        done = subprocess.run(
            [nsys, "profile", "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return frozenset(re.findall(r"--([a-z][a-z0-9-]*)", done.stdout)) if "--trace=" in done.stdout else None


def _check(config: ProfileConfig) -> None:
    if not config.enabled or config.never:
        raise ValueError(f"there is nothing to capture: set {flag('target')}, e.g. to train_actor, and steps")
    if "nsys" not in config.tool:
        raise ValueError(f"{flag('tool')} {' '.join(config.tool)} opens no capture range: use {flag('tool')} nsys")


def _output(config: ProfileConfig, output: str | None, name: str) -> str:
    """Returns ``output``, or else a file called ``name`` in the save directory. Raises ValueError for a remote path:
    nsys writes only local files."""
    if output is not None and is_remote(output):
        raise ValueError(f"output {output!r} is remote, and nsys writes local files only: give a directory")
    if not output and is_remote(str(config.dir)):
        raise ValueError(
            f"{flag('dir')} {config.dir} is remote, and nsys writes local files only: give a local --output, "
            "e.g. /tmp/nsys/rank%q{RANK}.%p"
        )
    return output or str(Path(str(config.dir)).absolute() / name)


def _plain(path: str) -> str:
    """Returns ``path`` if a shell passes it on unchanged, else raises ValueError. Ray joins the options to a shell
    command, and only some versions of Ray quote them."""
    if not PLAIN.fullmatch(path):
        raise ValueError(f"output {path!r} has characters that Ray's shell would interpret; use letters, digits, ./_-%")
    return path
