"""The places of a file: local scratch, its final name (it appears there whole or not at all), and a remote address.

Recorders write to local scratch, so that a slow disk delays the writer's thread and not the training. Each process has
a private directory. It is in RAM (``/dev/shm``) if that has plenty of room, and else in the system's temporary
directory. There is none if the final files are on the same disk anyway. The writer's thread moves each file to its
destination. Files that a killed process left are removed by a later process on the same host.

A file goes to scratch only while this process has less than `MOST_BYTES` waiting there, and while `SPARE_BYTES` stay
free for each rank of the host. So a rank's scratch holds at most `MOST_BYTES` and one more file, on disk or in memory.

For save paths such as ``s3://bucket/traces``, files are written to the local disk first, and then uploaded (fsspec).
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from megaprof.formats.names import host, is_leftover, repeats, temporary_path
from megaprof.parallel.machine import find_bounds, local_ranks
from megaprof.runtime.isolation import Suppressed, logger

#: The most bytes that may wait in a process's scratch when another file is placed there.
MOST_BYTES = 1 << 30
#: Bytes that stay free for each rank of the host when a file is placed: the host itself uses /dev/shm, too.
SPARE_BYTES = 2 << 30
_MEMORY = Path("/dev/shm")
_CHUNK = 1 << 20
#: Object stores, which show an object only when its upload is complete. Elsewhere a file gets a temporary name first.
_SHOWN_WHEN_COMPLETE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos"})


class Scratch:
    """The private scratch directory of this process, for files whose final place is in ``destination``, which exists.

    The directory is made at once. Without room, or without another disk, there is none, and `place` returns None.
    Raises nothing.
    """

    def __init__(self, destination: Path, bases: tuple[Path, ...] | None = None) -> None:
        self.bases: tuple[Path, ...] = ()
        """The directories that may hold it, the best one first."""
        self._spare = SPARE_BYTES * local_ranks()
        self._directory: Path | None = None
        with Suppressed(OSError):  # also where there is no temporary directory
            self.bases = (_MEMORY, Path(tempfile.gettempdir())) if bases is None else bases
            device = os.stat(destination).st_dev
            for base in self.bases:
                usable = base.is_dir() and os.access(base, os.W_OK) and os.stat(base).st_dev != device
                if usable and self._has_room(base):
                    suffix = f".{host()}.{os.getpid()}.scratch"  # so that the next run can tell who left it
                    self._directory = Path(tempfile.mkdtemp(suffix, ".megaprof.", base))
                    return

    def place(self, final: Path) -> Path | None:
        """Returns where to write the raw file of ``final``; None if there is no room here, so it goes beside
        ``final``."""
        directory = self._directory
        if directory is None:
            return None
        try:
            waiting_bytes = sum(entry.stat().st_size for entry in os.scandir(directory))
            return directory / f"{final.name}.raw" if waiting_bytes < MOST_BYTES and self._has_room(directory) else None
        except FileNotFoundError:  # somebody removed the directory
            return None

    def close(self) -> None:
        """Removes the directory, unless it still holds a file that could not be moved to its destination."""
        if self._directory is not None:
            with Suppressed(OSError):
                self._directory.rmdir()

    def _has_room(self, base: Path) -> bool:
        disk = os.statvfs(base)
        if disk.f_bavail * disk.f_frsize < self._spare:
            return False
        if not base.is_relative_to(_MEMORY):
            return True
        with Suppressed(OSError, KeyError, ValueError):  # some kernels and all sandboxes report it otherwise
            return all(limit - used >= 2 * self._spare for used, limit in (read() for read in find_bounds().values()))
        return False


def publish(raw: Path, final: Path) -> Path | None:
    """Moves ``raw`` to its final name, compressed if that ends in ``.gz``. Afterwards ``raw`` is gone.

    Returns the name, which is ``final`` or its first repeat that is free. The file is never half-written. Raises
    OSError, with ``raw`` untouched and nothing left behind. Returns None, with a line in the log, if ``raw`` is a
    Kineto trace without its end (torch 2.6 to 2.13): Kineto reports a full disk only on stderr. Unless it writes to a
    temporary name of its own, it leaves half a trace under the requested name.
    """
    if final.name.endswith((".trace.json", ".trace.json.gz")):
        with open(raw, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            tail = file.read().rstrip()
        if not tail.endswith(b"}") or b'"traceName"' not in tail:
            with Suppressed(OSError):
                raw.unlink()
            logger.error("megaprof: %s is lost: %s has %d bytes and no end; is the disk full?", final, raw, size)
            return None
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.suffix == ".gz" or raw.parent != final.parent:
        return carry(raw, final)
    with open(raw, "rb") as file:
        os.fsync(file.fileno())
    return rename(raw, final)


def rename(complete: Path, final: Path) -> Path:
    """Renames a complete file to ``final``, or to its first repeat that is free. Never replaces a file.

    Returns the new name. Raises OSError.
    """
    for name in repeats(final):
        try:
            os.link(complete, name)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if name.exists():
                continue
            os.replace(complete, name)
            return name
        os.unlink(complete)
        return name
    raise FileExistsError(final)


def carry(raw: Path, final: Path, seconds: float | None = None) -> Path:
    """Copies ``raw`` to ``final``, or its first repeat that is free, compressed if that ends in ``.gz``, and removes
    ``raw``.

    Returns the name. Raises OSError, also if copying takes longer than ``seconds``; then only ``raw`` is left.
    """
    from isal import igzip  # 4 times as fast as zlib's fastest level, at the same size

    deadline = None if seconds is None else time.monotonic() + seconds
    temporary = temporary_path(final)
    try:
        with open(raw, "rb") as source, open(temporary, "wb") as file:
            is_packed = final.suffix == ".gz"
            with igzip.IGzipFile(filename="", mode="wb", fileobj=file) if is_packed else nullcontext(file) as sink:
                while chunk := source.read(_CHUNK):
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimeoutError(f"copying takes longer than {seconds} s")
                    sink.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        name = rename(temporary, final)
    except BaseException:
        with Suppressed(OSError):
            temporary.unlink()
        raise
    raw.unlink(missing_ok=True)  # missing if the writer gave up meanwhile, and kept it under another name
    return name


def remove_leftovers(directory: Path) -> None:
    """Removes what dead processes of this host left in ``directory``: unfinished files, and their scratch."""
    with Suppressed(OSError):
        for entry in os.scandir(directory):
            if is_leftover(entry.name):
                with Suppressed(OSError):  # it may be another user's
                    remove = shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink
                    remove(entry.path)
                    logger.info("megaprof: removed %s, which a killed process had left", entry.path)


def is_remote(directory: str) -> bool:
    return "://" in directory


def check_remote(option: str, directory: str) -> None:
    """Raises ValueError, which names ``option``, if nothing here can write to ``directory``. Uses no network."""
    protocol, _, path = directory.partition("://")
    if protocol in ("file", "local"):
        raise ValueError(f"{option}: {directory!r} is a local directory; give its path alone: {path}")
    try:
        registry = importlib.import_module("fsspec.registry")
        registry.get_filesystem_class(protocol)
    except ImportError as fault:  # of fsspec, or fsspec's own, which says what to install
        raise ValueError(f"{option}: {directory!r} needs a package that is not installed: {fault}") from fault
    except ValueError as fault:
        protocols = ", ".join(sorted(registry.known_implementations))
        raise ValueError(f"{option}: {directory!r} has an unknown protocol {protocol!r}; known: {protocols}") from fault
    if not path.strip("/"):
        raise ValueError(f"{option}: {directory!r} names no place; valid: {protocol}://bucket/traces")


class Remote:
    """Uploads files from ``staging``, a new directory in the system's temporary directory, to ``uri``.

    Raises OSError if the staging directory cannot be made.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.staging = Path(tempfile.mkdtemp(prefix="megaprof-"))
        self._filesystem: Any = None
        self._root = ""
        self._made: set[str] = set()

    def upload(self, local: Path) -> str:
        """Uploads ``local`` and returns its address. Keeps ``local``. Raises whatever the file system raises."""
        # Done here rather than up front: it may ask the network for credentials, which would delay the training thread.
        if self._filesystem is None:
            self._filesystem, self._root = importlib.import_module("fsspec.core").url_to_fs(self.uri)
        root = self._root.rstrip("/")
        for name in repeats(local.relative_to(self.staging)):  # with its shard directory; nothing is ever replaced
            key = name.as_posix()
            if not self._filesystem.exists(target := f"{root}/{key}"):
                break
        if (folder := target.rpartition("/")[0]) not in self._made:
            self._filesystem.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        protocols = self._filesystem.protocol
        appears_whole = _SHOWN_WHEN_COMPLETE & ({protocols} if isinstance(protocols, str) else set(protocols))
        if appears_whole:
            self._filesystem.put_file(str(local), target)
            return f"{self.uri}/{key}"
        temporary = f"{folder}/{temporary_path(Path(local.name))}"
        try:
            self._filesystem.put_file(str(local), temporary)
            self._filesystem.mv(temporary, target)
        except BaseException:
            with suppress(Exception):
                self._filesystem.rm_file(temporary)
            raise
        return f"{self.uri}/{key}"

    def close(self) -> None:
        """Removes the staging directory, unless it still holds a file that was not uploaded."""
        with Suppressed(OSError):
            for folder in (*self.staging.iterdir(), self.staging):
                folder.rmdir()
