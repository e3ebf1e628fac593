"""Nsight Systems command lines for a configuration: for a launcher, and for Ray.

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
from megaprof.formats.nsys import WINDOW
from megaprof.formats.ranges import DOMAIN

#: What to trace. ``osrt`` is left out: operating system calls make the largest part of a report, and say little here.
TRACE = "cuda,nvtx,cudnn,cublas"
CONTROLLER_TRACE = "nvtx,osrt"
#: What opens a capture range, as nsys calls it; the first is the default.
CAPTURES = ("cudaProfilerApi", "nvtx")
#: nsys replaces %q{NAME} by a variable, %h by the host's name and %p by the process id, and appends the number of the
#: capture range. A variable that is not set is an error of nsys's.
RANK_NAME = "nsys.rank%q{RANK}.%h.%p"
WORKER_NAME = "nsys.worker.%h.%p"
CONTROLLER_NAME = "nsys.controller.%h.%p"
#: What every shell passes on as it is; ``%q{RANK}`` is no brace expansion, which needs a comma or two dots.
PLAIN = re.compile(r"[\w./%{}=@:+,-]+")


def windows(config: ProfileConfig) -> int | None:
    """The most windows that one process captures for one model; None where the configuration does not bound them:
    a schedule for the whole run, steps per role, or a window for each role's work."""
    if config.roles or config.discrete:
        return None
    counts = [config.plan(target).windows(merged=config.merge_steps) for target in config.target]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def options(
    config: ProfileConfig,
    *,
    ray: bool = False,
    output: str | None = None,
    shutdown: bool = False,
    models: int = 1,
    capture: str = CAPTURES[0],
) -> dict[str, str]:
    """The options of ``nsys profile`` for every rank, by name.

    ``ray``: as ``runtime_env={"nsight": ...}`` of a Ray actor takes them. Ray writes into its own log directory unless
    the output path is absolute, and starts the worker before anybody sets its ``RANK``, so the name has host and
    process only; the ``.nsys.json`` beside the reports says which rank it was. ``output`` is nsys's ``--output``;
    without one, a file name with rank, host and process in ``config.dir``. ``shutdown`` ends nsys in each process after
    its last window, instead of with the process; it needs to know the number of windows, and so how many ``models`` of
    a process have hooks. ``capture``: what opens a capture range, of `CAPTURES`: cudaProfilerStart, or an NVTX range,
    which needs no CUDA.

    Raises ValueError for a configuration without windows, without the nsys tool, or of unknown length to shut down.
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
                f"shutdown: the number of windows is not known with {flag('repeat')} 0, {flag('role_steps')} or "
                f"{flag('discrete')}; set {flag('repeat')} or {flag('steps')} alone, or leave shutdown out"
            )
        end = f"repeat-shutdown:{count * models}"
    by_range = capture == "nvtx"
    return {
        "trace": TRACE,
        "capture-range": capture,
        # A range's name is exact for nsys, its domain stands behind it. It looks at registered names alone, or at all.
        **({"nvtx-capture": f"{WINDOW}@{DOMAIN}", "env-var": "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"} if by_range else {}),
        "capture-range-end": end,
        # nsys ends the program that it profiles when it shuts down, unless told otherwise.
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
    """Ray's nsight options for the controller, which has no GPU and no windows: NVTX and system calls, start to end."""
    _check(config)
    return {
        "trace": CONTROLLER_TRACE,
        "sample": "none",
        "cpuctxsw": "none",
        "force-overwrite": "true",
        "o": _plain(_output(config, output, CONTROLLER_NAME)),
    }


def refused(names: Iterable[str]) -> list[str] | None:
    """Returns which of these options the nsys of this machine does not know; None where there is none to be asked."""
    known = _known()
    return None if known is None else [name for name in names if len(name) > 1 and name not in known]


@functools.cache
def _known() -> frozenset[str] | None:
    """The options in ``nsys profile --help``, which is asked once."""
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
    """``output``, or else a file called ``name`` in the save directory: nsys writes files and nothing else."""
    if output is not None and is_remote(output):
        raise ValueError(f"output {output!r} is remote, and nsys writes local files only: give a directory")
    if not output and is_remote(str(config.dir)):
        raise ValueError(
            f"{flag('dir')} {config.dir} is remote, and nsys writes local files only: give a local --output, "
            "e.g. /tmp/nsys/rank%q{RANK}.%p"
        )
    return output or str(Path(str(config.dir)).absolute() / name)


def _plain(path: str) -> str:
    """Ray joins the options to a shell command, and quotes them in some versions only."""
    if not PLAIN.fullmatch(path):
        raise ValueError(f"output {path!r} has characters that Ray's shell would interpret; use letters, digits, ./_-%")
    return path
