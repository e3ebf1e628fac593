"""Artifacts: their names, and a background writer that makes them appear whole or not at all."""

from megaprof.artifacts.names import TRACE_SUFFIX, artifact_name, artifact_path, plain_path, raw_path, sanitise, shard
from megaprof.artifacts.writer import FLUSH_SECONDS, Job, Writer

__all__ = [
    "FLUSH_SECONDS",
    "TRACE_SUFFIX",
    "Job",
    "Writer",
    "artifact_name",
    "artifact_path",
    "plain_path",
    "raw_path",
    "sanitise",
    "shard",
]
