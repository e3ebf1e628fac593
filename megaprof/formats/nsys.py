"""The metadata files that megaprof writes beside the files of Nsight Systems.

nsys writes its own files, which cannot hold our metadata. So megaprof writes a ``.nsys.json`` beside them for every
window: ``{"megaprof": {...}}``. nsys numbers its files by session, so the two are matched by host, process and step
range.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaprof.formats.inputs import read_input
from megaprof.formats.metadata import Metadata, read_metadata
from megaprof.formats.names import is_shard

#: Suffix of the file with a window's metadata.
SUFFIX = ".nsys.json"
#: The variable that nsys sets in the processes that it profiles.
SESSION_VARIABLE = "NSYS_PROFILING_SESSION_ID"
#: The range in our NVTX domain that is open while a window is: ``--capture-range=nvtx`` waits for it.
WINDOW = "megaprof/window"


def sidecar(metadata: Mapping[str, Any]) -> str:
    """Returns the text of a ``.nsys.json``."""
    return json.dumps({"megaprof": metadata})


def read_sidecar(path: Path) -> Metadata:
    """Reads the metadata in a ``.nsys.json`` of any origin. Raises ValueError and OSError."""
    try:
        document = json.loads(read_input(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is no object")
    return read_metadata(json.dumps(document.get("megaprof")).encode())


def sidecars(directory: Path) -> Iterator[Path]:
    """Yields every ``.nsys.json`` that may belong to a file of nsys in ``directory``: those in it and in its shards."""
    for entry in sorted(directory.iterdir()):
        if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
            yield entry
        elif is_shard(entry.name) and entry.is_dir():
            yield from sorted(entry.glob("[!.]*" + SUFFIX))
