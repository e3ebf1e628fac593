"""The events of one step while the training thread records it, and the hooks' shortest way there.

What stands in this file is what every microbatch of an always-on run pays, so it exists twice: in C (`_tape.c`, built
where there is a compiler) and in Python. Both do the same; ``IN_C`` says which one runs.

The C part also has the hooks themselves, for the usual case that a step is recorded and no window is open: `Hook` looks
at the process's `Gate` and then either calls the hooked function at once, or notes its start and end on the gate's
tape, or, where the gate is ``slow``, takes the way in Python that also writes ranges.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable
from importlib import import_module
from typing import Any

from megaprof.formats.steps import codes

_CONTAINERS = (list, tuple, dict)


class PythonTape:
    """Codes, starts and ends of a step's events, and which backward belongs to which forward.

    A backward is matched to its forward by the identity of the output tensor. Identities are meaningful only while the
    schedule holds the tensor, so they are forgotten with the step, and a forward-only step keeps none. Nothing here
    holds a tensor or a model.
    """

    __slots__ = (
        "_chunks",
        "_forward_only",
        "_positions",
        "clock",
        "events",
        "forward",
        "given",
        "marks",
        "now",
        "ran_forward",
    )

    def __init__(
        self, chunks: tuple[Any, ...] = (), forward_only: bool = False, clock: Callable[[], Any] | None = None
    ) -> None:
        """``chunks``: the model chunks in the order of the call. ``clock``: answers marks of its own kind (CUDA
        events), or None where it cannot say; None: the host's clock in nanoseconds."""
        self.events = array("q")
        """Code, start and end in turns; with a clock of its own, starts and ends are 0 and stand in ``marks``."""
        self.marks: list[Any] | None = None if clock is None else []
        """Start and end of every event in turns, as the clock answered them; None: the host's clock."""
        self.clock = clock
        self.now = 0
        """The code of the event that is open; 0: none."""
        self.forward: int | None = None
        """The position of the forward that runs or ran last: the part of a code that says of which microbatch and chunk
        it is. None: no forward yet, or a pass without one."""
        self.ran_forward = False
        """True once a forward has returned."""
        self.given: list[tuple[Any, ...]] = []
        """What models were given, see `recorders.work`: the position of the forward, and the boundaries of its packed
        sequences, these with padding, and the version of the first; or the position and a shape."""
        self._forward_only = forward_only
        self._chunks = {id(chunk): codes.of_chunk(index) for index, chunk in enumerate(chunks)}
        self._positions: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.events) // 3

    def mark(self) -> Any:
        """The time now, on this tape's clock."""
        return time.monotonic_ns() if self.clock is None else self.clock()

    def add(self, code: int, start: Any, end: Any) -> None:
        """Note one event; ``start`` and ``end`` are marks. Where the clock could not say, there is no event."""
        if self.marks is None:
            self.events.extend((code, start, end))
        elif start is not None and end is not None:
            self.marks += (start, end)
            self.events.extend((code, 0, 0))

    def position(self, chunk: Any, microbatch: Any) -> int:
        """A forward of ``chunk`` starts; its part of a code. What is not known is 0 in its field."""
        number = microbatch if isinstance(microbatch, int) and microbatch >= 0 else None
        self.forward = position = self._chunks.get(id(chunk), 0) | codes.of_microbatch(number)
        return position

    def produced(self, result: Any) -> Any:
        """``result`` came out of the last forward; returned unchanged."""
        if self.forward is not None:
            self.ran_forward = True
            if not self._forward_only:
                self._positions[_identity(result)] = self.forward
        return result

    def takes(self, packed: Any, tokens: Any) -> None:
        """A model is called in the forward that runs. ``packed``: its ``PackedSeqParams``, or None; ``tokens``: its
        input. Boundaries are a few numbers, kept as they are: whoever reads them sees by their version whether they
        were changed meanwhile."""
        if self.forward is None:
            return
        boundaries = getattr(packed, "cu_seqlens_q", None)
        if boundaries is not None:
            # A tensor of inference mode has no version.
            version = None if getattr(boundaries, "is_inference", bool)() else getattr(boundaries, "_version", None)
            self.given.append((self.forward, boundaries, getattr(packed, "cu_seqlens_q_padded", None), version))
        elif (shape := getattr(tokens, "shape", None)) is not None:
            self.given.append((self.forward, shape))

    def consumed(self, output: object) -> int:
        """The position of the forward that produced ``output``, which is now being differentiated; 0: not known."""
        return self._positions.pop(_identity(output), 0)


class PythonGate:
    """Where the hooks of a process look first; the hooks in Python look at the dispatcher instead."""

    __slots__ = ("on_fault", "slow", "tape")

    def __init__(self, on_fault: Callable[[BaseException], None]) -> None:
        """``on_fault`` takes what the tape's clock raised, or raises it where it belongs to the host."""
        self.on_fault = on_fault
        self.tape: Any = None
        """Where events go; None: nowhere."""
        self.slow = False
        """True: hooks take the way in Python, which also writes ranges."""


def _identity(output: object) -> int:
    """Identity of the first tensor in what ``forward_step`` returned: a tensor, a list or dict of them, or either with
    the number of tokens behind it. The backward gets the same tensor, alone or in a list or dict."""
    while isinstance(output, _CONTAINERS) and output:
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return id(output)


_c: Any = None
with contextlib.suppress(ImportError):  # built without a compiler
    _c = import_module("megaprof.recorders._tape")

Tape: Any = PythonTape if _c is None else _c.Tape
Gate: Any = PythonGate if _c is None else _c.Gate
#: ``Hook(gate, original, slow, code, first, second, overlap)``: a hooked function in C, None where there is none.
#: ``code``: the event, or its kind for a forward (``first`` and ``second``: place and name of the arguments with model
#: chunk and microbatch) and for a backward (``first``: of the output). `codes.MODEL` is no event: what a model is given
#: (``first`` and ``second``: of its ``PackedSeqParams`` and its input) is noted, see `PythonTape.takes`. ``overlap``:
#: the name of an argument that needs the way in Python when it is true.
Hook: Any = None if _c is None else _c.Hook
IN_C = Hook is not None
#: ``Marker(pool, make, stream, device, is_capturing, record)``: the clock of a GPU in C, None where there is none. It
#: answers an event of the list ``pool``, recorded on the current stream, or else what ``make()`` returns; None where
#: that stream is being captured. ``stream(device)``: the current stream's handle. The last two are addresses of
#: functions of the GPU's runtime, ``int (*)(stream, int *status)`` and ``int (*)(event, stream)``; their answer is an
#: error if it is not 0.
Marker: Any = getattr(_c, "Marker", None)
#: `megaprof.recorders.timeline.packing.in_python` in C, None where there is none.
pack_in_c: Any = getattr(_c, "pack", None)


def raw(tape: Any) -> Any:
    """The events of ``tape`` as a buffer of 64-bit integers: code, start and end in turns. It cannot grow meanwhile."""
    return tape.events if isinstance(tape, PythonTape) else tape
