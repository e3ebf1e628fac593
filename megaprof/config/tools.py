"""The tools that exist, which are the values of ``--profile-tool``. `megaprof.recorders` has what each of them does."""

from __future__ import annotations

#: The class of each tool's recorder, imported when the tool is chosen. Recorders stop in this order and start in the
#: reverse order: nsys is innermost, so that it records neither Kineto's start nor the writing of a trace.
BUILTIN = {
    "nsys": "megaprof.recorders.nsys:NsysRecorder",
    "memory": "megaprof.recorders.memory:MemoryRecorder",
    "torch": "megaprof.recorders.torch_profiler:TorchRecorder",
}
#: Records every step rather than windows (`megaprof.recorders.timeline`), so it is no ``Recorder``.
TIMELINE = "timeline"
#: Tools of third parties that were registered in this process, each with the factory of its recorder.
registered: dict[str, object] = {}


def known_tools() -> tuple[str, ...]:
    """Returns the values that ``--profile-tool`` takes now."""
    return (*BUILTIN, TIMELINE, *registered)


def register(name: str, factory: object) -> None:
    """Adds a tool; see `megaprof.recorders.register_recorder`. Raises ValueError for a name that cannot be used."""
    if not _is_word(name):
        raise ValueError(f"register_recorder: {name!r} is not valid; it must be one lower-case word without a comma")
    if name in (*BUILTIN, TIMELINE) or registered.get(name, factory) is not factory:
        raise ValueError(f"register_recorder: {name!r} is taken; known tools: {', '.join(known_tools())}")
    registered[name] = factory


def _is_word(name: object) -> bool:
    return isinstance(name, str) and name == name.lower() and [name] == name.replace(",", " ").split()
