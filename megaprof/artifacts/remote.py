"""Handles save paths such as ``s3://bucket/traces``: files are written to the local disk first, and the writer's thread
uploads them (fsspec)."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from megaprof.formats.names import host, repeats
from megaprof.runtime.interruption import Suppressed

#: Object stores, which show an object only when its upload is complete. Elsewhere a file gets a temporary name first.
_SHOWN_WHEN_COMPLETE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos"})


def is_remote(directory: str) -> bool:
    return "://" in directory


def check_remote(option: str, directory: str) -> None:
    """Raises ValueError, which names ``option``, if nothing here can write to ``directory``. Uses no network."""
    protocol, _, path = directory.partition("://")
    if protocol in ("file", "local"):
        raise ValueError(f"{option}: {directory!r} is a local directory; give its path alone: {path}")
    try:
        registry = importlib.import_module("fsspec.registry")
    except ImportError as fault:
        raise ValueError(f"{option}: {directory!r} needs the package fsspec, which is not installed") from fault
    try:
        registry.get_filesystem_class(protocol)
    except ImportError as fault:
        module_name = str(registry.known_implementations.get(protocol, {}).get("class", "")).split(".")[0]
        package = f"the package {module_name}" if module_name and module_name != "fsspec" else "a package"
        raise ValueError(f"{option}: {directory!r} needs {package}, which is not installed ({fault})") from fault
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
        protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        if protocols & _SHOWN_WHEN_COMPLETE:
            self._filesystem.put_file(str(local), target)
        else:
            self._put_and_rename(local, target)
        return f"{self.uri}/{key}"

    def _put_and_rename(self, local: Path, target: str) -> None:
        folder, _, name = target.rpartition("/")
        temporary = f"{folder}/.{name}.{host()}.{os.getpid()}.tmp"
        try:
            self._filesystem.put_file(str(local), temporary)
            self._filesystem.mv(temporary, target)
        except BaseException:
            with contextlib.suppress(Exception):
                self._filesystem.rm_file(temporary)
            raise

    def close(self) -> None:
        """Removes the staging directory, unless it still holds a file that was not uploaded."""
        with Suppressed(OSError):
            for folder in (*self.staging.iterdir(), self.staging):
                folder.rmdir()
