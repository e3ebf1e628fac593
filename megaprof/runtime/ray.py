"""Tells Ray's worker processes from others."""

from __future__ import annotations

import sys


def in_ray_worker() -> bool:
    """Returns True in a process that Ray started to run tasks or actors, and False in the one that started the job."""
    module = sys.modules.get("ray._private.worker")
    worker = getattr(module, "global_worker", None)
    return worker is not None and worker.mode == getattr(module, "WORKER_MODE", 1)
