"""torch's flight recorder in this process: a ring of the collectives that were called lately, read while it runs.

torch has no public way to read it. NCCL has a ring of its own beside the one of all other backends, and a build without
NCCL has only the latter: together they are what the process has called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from megaprof.formats.flight import Call, Entry, GroupConfig

#: NCCL's ring (torch 2.5 and later) and that of all other backends (torch 2.8 and later): the handler of torch's
#: control plane that reads it, and the function. The handler lets go of the interpreter's lock, the function holds it:
#: for 20 us an entry (torch 2.13).
_RINGS = (("dump_nccl_trace_json", "_dump_nccl_trace_json"), ("fr_trace_json", "_dump_fr_trace_json"))
#: What says how many collectives torch keeps, read when the first process group is made: the latter in older releases.
SIZE, _OLD_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
#: Who sets these sets the size as well: Megatron-LM does, with its option.
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_OPTION = "--flight-recorder-dump-path"
#: Has NCCL's ring say how long each ran.
TIMING = "TORCH_NCCL_ENABLE_TIMING"
#: As many as torch 2.13 keeps by itself.
USUAL = 2000
_C = TypeVar("_C", bound=Call)


class _Ring(msgspec.Struct, Generic[_C]):
    """What is read of a ring."""

    version: str | int
    entries: list[_C] = []


_calls = msgspec.json.Decoder(_Ring[Call], strict=False).decode
_entries = msgspec.json.Decoder(_Ring[Entry], strict=False).decode


class NoFlightRecorder(Exception):
    """There is none that can be read; the message says why."""


def entries() -> list[Entry]:
    """Returns what this process has called, in the order of the calls, as far back as the rings go: none where torch
    keeps none. Raises NoFlightRecorder."""
    return _read(_entries)


def calls() -> list[Call]:
    """Returns the same without what they were called on, which takes a quarter of the time that the interpreter's lock
    is held."""
    return _read(_calls)


def keep(arguments: Sequence[str], env: MutableMapping[str, str]) -> str | None:
    """Has torch keep its ring where nobody has said how large it is: before the first process group, with the
    ``arguments`` of the program. Returns the variable that it sets in ``env``; None where there is nothing to set."""
    if any(name in env for name in (SIZE, _OLD_SIZE, *_DUMPS)) or any(each.startswith(_OPTION) for each in arguments):
        return None
    name = SIZE if hasattr(_module(), _RINGS[-1][1]) else _OLD_SIZE
    env[name] = str(USUAL)
    return name


def groups() -> dict[str, GroupConfig]:
    """Returns the process groups that this process is in now, by torch's name: from torch's own table, because gloo's
    ring does not say."""
    table = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names, ranks = dict(getattr(table, "pg_names", {})), dict(getattr(table, "pg_group_ranks", {}))
    found = {}
    for group, name in names.items():
        places = ranks.get(group)
        if places:
            own = sorted(places, key=places.__getitem__)
            found[str(name)] = GroupConfig(str(getattr(group, "group_desc", "")), str(own))
    return found


def _read(decode: Callable[[bytes], _Ring[_C]]) -> list[_C]:
    try:
        found = [ring.entries for ring in map(decode, _rings()) if ring.entries]
    except msgspec.MsgspecError as fault:
        raise NoFlightRecorder(f"torch's flight recorder has another format: {fault}") from None
    if len(found) < 2:
        return found[0] if found else []
    return sorted((entry for each in found for entry in each), key=lambda entry: entry.time_created_ns)


def _rings() -> Iterator[bytes]:
    own = _module()
    known = [(handler, getattr(own, name)) for handler, name in _RINGS if hasattr(own, name)]
    if not known:
        version = getattr(sys.modules.get("torch"), "__version__", "")
        raise NoFlightRecorder(f"torch {version} has no flight recorder that can be read")
    for handler, function in known:
        yield _handled(own, handler) or _called(function)


def _module() -> Any:
    return getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)


def _called(function: Callable[[bool, bool], bytes]) -> bytes:
    try:
        return function(True, False)
    except (TypeError, RuntimeError) as fault:
        raise NoFlightRecorder(f"torch's flight recorder cannot be read: {fault}") from None


def _handled(own: Any, name: str) -> bytes | None:
    """What a handler answers; None where there is none that can be asked."""
    if not (hasattr(own, "_get_handler") and hasattr(own, "_Request") and hasattr(own, "_Response")):
        return None

    class Request(own._Request):  # type: ignore[misc]
        def body(self) -> bytes:
            return b""

        def get_param(self, name: str) -> str:
            return ""

        def params(self) -> dict[str, str]:
            return {}

    class Response(own._Response):  # type: ignore[misc]
        content: bytes | str | None = None

        def set_content(self, content: bytes | str, content_type: str) -> None:
            self.content = content

        def set_status(self, status: int) -> None:
            pass

    response = Response()
    try:
        own._get_handler(name)(Request(), response)
    except Exception:  # a name that this torch does not know, or a request that it wants otherwise
        return None
    content = response.content
    return content.encode() if isinstance(content, str) else content
