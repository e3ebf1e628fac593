"""Reads torch's flight recorder in this process, while it runs: a ring of the most recently called collectives.

torch has no public way to read it. NCCL has one ring, and all other backends share a second one; a build without NCCL
has only the second. Together they hold all calls of the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from megaprof.formats.flight import Call, Entry, GroupConfig

#: NCCL's ring (torch 2.5 and later) and the ring of all other backends (torch 2.8 and later). Each has a handler in
#: torch's control plane and a function that read it. The handler releases the interpreter's lock. The function holds
#: it, for 20 us per entry (torch 2.13).
_RINGS = (("dump_nccl_trace_json", "_dump_nccl_trace_json"), ("fr_trace_json", "_dump_fr_trace_json"))
#: The variables that say how many collectives torch keeps. torch reads them when the first process group is made; older
#: releases read the second.
SIZE, _OLD_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
#: A host that sets these sets the size as well. Megatron-LM does, with this option.
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_OPTION = "--flight-recorder-dump-path"
#: Has NCCL's ring record how long each collective ran.
TIMING = "TORCH_NCCL_ENABLE_TIMING"
#: The number of collectives that torch 2.13 keeps by default.
USUAL = 2000
_C = TypeVar("_C", bound=Call)


class _Ring(msgspec.Struct, Generic[_C]):
    """The part of a ring that is read."""

    version: str | int
    entries: list[_C] = []


_calls = msgspec.json.Decoder(_Ring[Call], strict=False).decode
_entries = msgspec.json.Decoder(_Ring[Entry], strict=False).decode


class NoFlightRecorder(Exception):
    """No flight recorder can be read. The message says why."""


def entries() -> list[Entry]:
    """Returns the collectives that this process has called, in the order of the calls, as far back as the rings go.
    Returns an empty list if torch keeps none. Raises NoFlightRecorder."""
    return _read(_entries)


def calls() -> list[Call]:
    """Returns the same collectives as `entries`, but without what they were called on. It holds the interpreter's lock
    for a quarter of the time."""
    return _read(_calls)


def keep(arguments: Sequence[str], env: MutableMapping[str, str]) -> str | None:
    """Has torch keep a ring of the usual size, unless the ``arguments`` of the program or ``env`` already set one.

    Must be called before the first process group is made. Returns the name of the variable that it sets in ``env``;
    None if it sets nothing."""
    if any(name in env for name in (SIZE, _OLD_SIZE, *_DUMPS)) or any(word.startswith(_OPTION) for word in arguments):
        return None
    name = SIZE if hasattr(_module(), _RINGS[-1][1]) else _OLD_SIZE
    env[name] = str(USUAL)
    return name


def groups() -> dict[str, GroupConfig]:
    """Returns the process groups that this process is in now, by torch's name. They come from torch's own table,
    because gloo's ring does not list them."""
    table = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names, ranks = dict(getattr(table, "pg_names", {})), dict(getattr(table, "pg_group_ranks", {}))
    configs = {}
    for group, name in names.items():
        places = ranks.get(group)
        if places:
            members = sorted(places, key=places.__getitem__)
            configs[str(name)] = GroupConfig(str(getattr(group, "group_desc", "")), str(members))
    return configs


def _read(decode: Callable[[bytes], _Ring[_C]]) -> list[_C]:
    try:
        rings = [ring.entries for ring in map(decode, _rings()) if ring.entries]
    except msgspec.MsgspecError as fault:
        raise NoFlightRecorder(f"torch's flight recorder has another format: {fault}") from None
    if len(rings) < 2:
        return rings[0] if rings else []
    return sorted((entry for ring in rings for entry in ring), key=lambda entry: entry.time_created_ns)


def _rings() -> Iterator[bytes]:
    module = _module()
    readers = [(handler, getattr(module, name)) for handler, name in _RINGS if hasattr(module, name)]
    if not readers:
        version = getattr(sys.modules.get("torch"), "__version__", "")
        raise NoFlightRecorder(f"torch {version} has no flight recorder that can be read")
    for handler, function in readers:
        try:
            yield _handled(module, handler) or function(True, False)
        except (TypeError, RuntimeError) as fault:
            raise NoFlightRecorder(f"torch's flight recorder cannot be read: {fault}") from None


def _module() -> Any:
    return getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)


def _handled(module: Any, name: str) -> bytes | None:
    """Returns the answer of the handler ``name``. None if torch has no such handler, or it cannot be called."""
    if not (hasattr(module, "_get_handler") and hasattr(module, "_Request") and hasattr(module, "_Response")):
        return None

    class Request(module._Request):  # type: ignore[misc]
        def body(self) -> bytes:
            return b""

        def get_param(self, name: str) -> str:
            return ""

        def params(self) -> dict[str, str]:
            return {}

    class Response(module._Response):  # type: ignore[misc]
        content: bytes | str | None = None

        def set_content(self, content: bytes | str, content_type: str) -> None:
            self.content = content

        def set_status(self, status: int) -> None:
            pass

    response = Response()
    try:
        module._get_handler(name)(Request(), response)
    except Exception:  # this torch does not know the name, or expects another kind of request
        return None
    content = response.content
    return content.encode() if isinstance(content, str) else content
