"""The names of files: artifacts are named after what they show, unfinished files after the process that writes them.
Also files that appear under their names whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megaprof.parallel.topology import Coords

#: Never follows a link, never waits for the other end of a FIFO, and never gets the terminal of this process.
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
TRACE_SUFFIX = ".pt.trace.json.gz"
KERNELS_SUFFIX, STACKS_SUFFIX, DEVICE_STACKS_SUFFIX = ".kernels.json", ".stacks.txt.gz", ".cuda.stacks.txt.gz"
_LONGEST_PART = 40
_SHARD = re.compile(r"ranks\d{6,}-\d{6,}", re.ASCII)
#: Ranks whose files share a directory. A larger world has several, so that none ever holds 100,000 files.
SHARD_RANKS = 1024
#: ``.{final name}.{writer's host}.{writer's pid}.{kind}``; Kineto itself writes ``{path}.tmp`` before ``{path}``.
_UNFINISHED = re.compile(r"\..+\.(?P<host>[\w-]+)\.(?P<pid>\d+)\.(?:raw|tmp|raw\.tmp|json|scratch)", re.ASCII)
_ARTIFACT = re.compile(
    r"(?P<stem>(?P<target>[\w-]+)(?:\.(?P<role>[\w-]+))?\.step(?P<step>\d{1,18})"
    r"\.pp(?P<pp>\d{1,9})-tp(?P<tp>\d{1,9})-cp(?P<cp>\d{1,9})-ep(?P<ep>\d{1,9})-dp(?P<dp>\d{1,9})"
    r"\.rank(?P<rank>\d{1,9}))(?:\.(?P<repeat>[2-9]|[1-9]\d{1,8}))?(?P<suffix>(?:\.(?!\d).*)?)",
    re.ASCII,
)


@dataclass(frozen=True)
class ArtifactName:
    """The content of a file according to its name. The metadata inside counts more, because files get renamed."""

    target: str
    """The target, sanitised."""
    role: str | None
    """The role, sanitised; None without one."""
    step: int
    """The first step in the file."""
    coords: Coords
    """The rank that wrote it."""
    suffix: str
    """The kind of file, with a leading dot, such as ``.pt.trace.json.gz``."""


def parse_artifact_name(name: str) -> ArtifactName | None:
    """Reads a name that `artifact_name` wrote; None for any other name."""
    match = _ARTIFACT.fullmatch(name)
    if match is None:
        return None
    coords = Coords(**{axis: int(match[axis]) for axis in ("rank", "pp", "tp", "cp", "ep", "dp")})
    return ArtifactName(match["target"], match["role"], int(match["step"]), coords, match["suffix"])


def artifact_name(target: str, role: str | None, step: int, coords: Coords, suffix: str) -> str:
    """Returns ``{target}[.{role}].step{step:06d}.pp{p}-tp{t}-cp{c}-ep{e}-dp{d}.rank{r:05d}{suffix}``. A file whose name
    is taken has ``.{repeat}`` before its suffix, from 2 on (`repeats`).

    Every part is sanitised, so that the name is one component of a path whatever the role.
    """
    role_part = f".{sanitise(role)}" if role else ""
    coordinates = f"pp{coords.pp}-tp{coords.tp}-cp{coords.cp}-ep{coords.ep}-dp{coords.dp}.rank{coords.rank:05d}"
    return f"{sanitise(target)}{role_part}.step{step:06d}.{coordinates}{suffix}"


def shard(rank: int, world: int) -> str:
    """Returns the directory of a rank's files below the save path: empty up to 1,024 ranks, then such as
    ``ranks001024-002047``."""
    if world <= SHARD_RANKS:
        return ""
    first_rank = rank // SHARD_RANKS * SHARD_RANKS
    return f"ranks{first_rank:06d}-{first_rank + SHARD_RANKS - 1:06d}"


def is_shard(name: str) -> bool:
    """Returns whether a directory has a name that `shard` gives."""
    return _SHARD.fullmatch(name) is not None


def sanitise(part: str) -> str:
    """Returns ``part`` with only letters, digits, ``-`` and ``_``, at most 40 of them. A digest keeps changed names
    apart."""
    clean = re.sub(r"[^A-Za-z0-9_-]+", "_", part)[:_LONGEST_PART]
    if clean == part:
        return clean
    digest = hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{clean[: _LONGEST_PART - 7]}_{digest}"


def repeats(final: Path) -> Iterator[Path]:
    """Yields ``final``, and then, in order, the names that a later file of the same name may have instead: a finished
    file is never replaced."""
    yield final
    match = _ARTIFACT.fullmatch(final.name)
    stem, dot, suffix = final.name.partition(".") if match is None else (match["stem"], "", match["suffix"])
    for repeat in itertools.count(2 if match is None else int(match["repeat"] or 1) + 1):
        yield final.with_name(f"{stem}.{repeat}{dot}{suffix}")


def raw_path(final: Path) -> Path:
    """Returns where the raw file of ``final`` lies until it is finished: hidden, beside it, and this process's own.

    Makes its directory if there is none, because somebody may remove it during the run. Raises OSError if it cannot be
    made.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    return final.with_name(_unfinished(final.name, "raw"))


def temporary_path(final: Path) -> Path:
    """Returns the name under which ``final`` grows before it is renamed."""
    return final.with_name(_unfinished(final.name, "tmp"))


def kineto_temporary(raw: Path) -> Path:
    """Returns the name of the file that Kineto leaves behind if it cannot finish ``raw``, as on a full disk."""
    return raw.with_name(raw.name + ".tmp")


def is_unfinished(name: str) -> bool:
    """Returns whether some process still works on the file, or has left it behind, so that it has no final name."""
    return name.startswith(".") and _UNFINISHED.fullmatch(name) is not None


def is_leftover(name: str) -> bool:
    """Returns whether a dead process of this host left the file unfinished. Always False for files of other hosts."""
    match = _UNFINISHED.fullmatch(name)
    return match is not None and dead(match["host"], int(match["pid"]))


def dead(host_of: str, pid: int) -> bool:
    """Returns whether a process is known to be gone. False for a process of another host, about which nothing is
    known."""
    if host_of != host():
        return False
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        if file.read().rpartition(b")")[2].split()[0] == b"Z":  # it has ended, but its parent has not noticed
            return True
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as fault:  # it may be somebody else's process, or no process id at all
        return isinstance(fault, ProcessLookupError)
    return False


@functools.cache
def host() -> str:
    """Returns this host as part of a file name: its name, and the namespace in which its process ids are valid.

    Containers may share a host name and a directory without seeing each other's processes.
    """
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        namespace = "0"
    return f"{sanitise(socket.gethostname() or 'unknown')}-{namespace}"


def _unfinished(name: str, kind: str) -> str:
    return f".{name}.{host()}.{os.getpid()}.{kind}"


@contextlib.contextmanager
def appearing(final: Path, *, mode: int = 0o666, sync: bool = True, directory: int | None = None) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces `final` when the block ends; after an exception, nothing has changed.

    It grows under a hidden name beside `final`. If a link is already there, it is not followed. `directory`: the
    descriptor of the directory that `final` lies in, if that is only a name. With `sync`, the file is on the disk in
    the end, and not just on its way there.
    """
    temporary = temporary_path(final)

    def create() -> int:
        return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, mode, dir_fd=directory)

    try:
        descriptor = create()
    except FileExistsError:
        # An earlier process with this id died here, or somebody has planted a link.
        os.unlink(temporary, dir_fd=directory)
        descriptor = create()
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(descriptor)
        # The file is closed by now: a network file system sends it when it is closed.
        os.replace(temporary, final, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
