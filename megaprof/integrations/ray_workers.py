"""The files of Ray's workers, whichever host uses it.

Ray ends the workers of a driver that is done with SIGKILL, while files may still be written in the background. So the
process that ends the job waits until nobody works on a file in the save path any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from megaprof.formats.names import is_leftover, is_unfinished
from megaprof.runtime.logs import logger

_POLL = 0.25
#: How far the clocks of two machines may be apart, in seconds.
_SKEW = 60.0


def wait_for_files(directory: str, seconds: float, since: float) -> bool:
    """Wait until no process works on a file of this job in ``directory``, which may be on another machine's disk: what
    is not seen from here is not waited for. At most ``seconds``; then False, and a log line that names what is missing.

    ``since``: when the job started, in seconds since the epoch. What nobody touched since then belongs to another job.
    """
    deadline = time.monotonic() + seconds
    calm = False
    while True:
        missing = sorted(_unfinished(directory, since - _SKEW))
        if not missing and calm:
            return True
        if missing and time.monotonic() >= deadline:
            logger.error("megaprof: not finished within %.0f s: %s", seconds, ", ".join(missing))
            return False
        calm = not missing  # a second look: the writer may be about to begin with the next file
        time.sleep(_POLL)


def _unfinished(directory: str, since: float) -> Iterator[str]:
    for folder in (directory, *(str(path) for path in Path(directory).glob("ranks*-*"))):
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            if is_unfinished(entry.name) and not is_leftover(entry.name):
                try:
                    if entry.stat(follow_symlinks=False).st_mtime >= since:
                        yield entry.name
                except OSError:
                    continue  # finished meanwhile
