"""The machine that a rank runs on: its ranks, its processes, and the memory of the machine and of the containers around
this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path


def local_ranks() -> int:
    """Returns the number of ranks of the job on this host, as torchrun and other launchers set it, or else 1."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdecimal() else 1


def processes_with(*marks: str) -> list[int]:
    """Returns the ids of the processes in whose environment one of ``marks`` is. Only Linux says that; elsewhere the
    list is empty."""
    processes, sought = list[int](), [os.fsencode(mark) for mark in marks]
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            variables = environ.read_bytes()
            if any(mark in variables for mark in sought):
                processes.append(int(environ.parent.name))
    return processes


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def find_bounds(proc: Path = Path("/proc")) -> dict[str, Callable[[], tuple[int, int]]]:
    """Returns what can run out of memory: the machine, and every control group above this process that has a limit. By
    name, each with a function that reads how many bytes are in use there, and how many there are."""
    bounds: dict[str, Callable[[], tuple[int, int]]] = {"the machine": partial(_machine, proc)}
    machine = _machine(proc)[1]
    for group, version in _cgroups(proc):
        # No such controller here, or "max". Not OSError: a signal handler of the host may raise a TimeoutError in here.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
            if _cgroup(group, version)[1] < machine:
                bounds[f"the container ({group})"] = partial(_cgroup, group, version)
    return bounds


def _machine(proc: Path) -> tuple[int, int]:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kilobytes = {columns[0]: int(columns[1]) for columns in lines if len(columns) > 1}
    total = kilobytes["MemTotal:"]
    return (total - kilobytes["MemAvailable:"]) * 1024, total * 1024


def _cgroups(proc: Path) -> Iterator[tuple[Path, int]]:
    """Yields the directory of this process's group, then those of its parents up to the root of the mount, each with
    the version of its files.

    ``/proc/self/cgroup`` gives the group's path in its hierarchy, ``mountinfo`` which part of the hierarchy is mounted
    where. In a container without a cgroup namespace the path is the host's and the mount's root a prefix of it.
    """
    mounts = {}  # by version: the root within the hierarchy, and the mount point, of those that control memory
    for line in (proc / "self/mountinfo").read_text().splitlines():
        mount_text, _, type_text = line.partition(" - ")
        fields, type_fields = mount_text.split(), type_text.split()
        kind = type_fields[0] if type_fields else ""
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in type_fields[-1].split(",")):
            mounts[2 if kind == "cgroup2" else 1] = fields[3], Path(fields[4])
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = int("memory" in controllers.split(",")) if controllers else 2
        if version not in mounts:
            continue
        root, mount = mounts[version]
        group = mount / os.path.relpath(path, root) if Path(path).is_relative_to(root) else mount
        for level in (group, *group.parents):
            yield level, version
            if level == mount:
                break


def _cgroup(group: Path, version: int) -> tuple[int, int]:
    if version == 2:
        usage, limit, cached = "memory.current", "memory.max", ("inactive_file", "active_file")
    else:
        usage, limit = "memory.usage_in_bytes", "memory.limit_in_bytes"
        cached = ("total_inactive_file", "total_active_file")
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / usage).read_text()) - sum(int(stat.get(name, 0)) for name in cached)
    return used, int((group / limit).read_text())
