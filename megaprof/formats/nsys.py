"""What megaprof writes beside the files of Nsight Systems, and how the two find each other.

nsys writes its own files. For every window one ``.nsys.json`` stands beside them, with the metadata that nsys cannot
carry: ``{"megaprof": {...}}``. nsys numbers its files by session, so a file and its metadata belong together by host,
process and step range.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaprof.formats.inputs import read_input
from megaprof.formats.metadata import Metadata, read_metadata
from megaprof.formats.names import is_shard

#: Of the file with a window's metadata.
SUFFIX = ".nsys.json"
#: nsys sets it in the processes that it profiles.
SESSION_VARIABLE = "NSYS_PROFILING_SESSION_ID"
#: The range, in our NVTX domain, that is open while a window is: what ``--capture-range=nvtx`` waits for.
WINDOW = "megaprof/window"


def sidecar(metadata: Mapping[str, Any]) -> str:
    """The text of a ``.nsys.json``."""
    return json.dumps({"megaprof": metadata})


def read_sidecar(path: Path) -> Metadata:
    """The metadata in a ``.nsys.json`` of any origin. Raises ValueError and OSError."""
    try:
        found = json.loads(read_input(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return read_metadata(json.dumps(found.get("megaprof")).encode())


def sidecars(directory: Path) -> Iterator[Path]:
    """Every ``.nsys.json`` that may belong to a file of nsys's in ``directory``: there, and in its shards of ranks."""
    for entry in sorted(directory.iterdir()):
        if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
            yield entry
        elif is_shard(entry.name) and entry.is_dir():
            yield from sorted(entry.glob("[!.]*" + SUFFIX))
