"""The place where a session's files grow and are finished."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megaprof.artifacts.finish import FinishHook
from megaprof.artifacts.remote import Remote, is_remote
from megaprof.artifacts.scratch import Scratch
from megaprof.artifacts.writer import Writer
from megaprof.runtime.interruption import from_host
from megaprof.runtime.logs import logger


@dataclass(frozen=True)
class Store:
    """Where files go."""

    local: str
    """The directory in which they grow."""
    writer: Writer
    """What finishes them."""

    @classmethod
    def make(cls, place: str, shard: str, hook: FinishHook | None) -> Store | None:
        """``place``: the save directory or a remote address; ``shard``: the rank's directory in it, made now. None, and
        an error in the log, where it cannot be made."""
        try:
            remote = Remote(place) if is_remote(place) else None
            local = place if remote is None else str(remote.staging)
            os.makedirs(os.path.join(local, shard), exist_ok=True)
        except OSError as fault:
            if from_host(fault):
                raise
            # One selected rank with a bad disk must not end a job whose other ranks are about to enter a collective.
            logger.error("megaprof: %s cannot be created: %s; profiling is off on this rank", place, fault)
            return None
        return cls(local, Writer(remote=remote, hook=hook, scratch=Scratch(Path(local))))
