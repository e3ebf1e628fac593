"""The tape takes the events of one step while the training thread records it. The gate is how hooks find it quickly.

Every microbatch of an always-on run pays for the code in this file. So it exists twice: in C (`_tape.c`, built if there
is a compiler) and in Python. ``IN_C`` says which one runs. Both note the same. But where an event follows another at
once, Python asks the clock of a GPU twice, and C once.

The C part also contains the hooks themselves, for the usual case: a step is recorded and no window is open. A `Hook`
looks at the process's `Gate`. Then it calls the hooked function at once, or notes its start and end on the gate's tape,
or, if the gate is ``slow``, calls the hook in Python, which also writes ranges.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from megaprof.formats import codes, timeline

_CONTAINERS = (list, tuple, dict)


class PythonTape:
    """The codes, starts and ends of a step's events, and which backward belongs to which forward.

    A backward is matched to its forward by the identity of the output tensor. An identity means something only while
    the schedule holds the tensor. So identities are forgotten with the step, and a forward-only step keeps none. The
    tape holds no output tensor and no model.
    """

    def __init__(
        self, chunks: tuple[Any, ...] = (), forward_only: bool = False, clock: Callable[[], Any] | None = None
    ) -> None:
        """``chunks``: the model chunks in the order of the call. ``clock``: returns marks of its own kind (CUDA
        events), or None when it cannot tell the time. Without one, the tape uses the host's clock in nanoseconds."""
        self.events = array("q")
        """Code, start and end of each event in turn. With a ``clock``, times are 0 here and are in ``marks``."""
        self.marks: list[Any] | None = None if clock is None else []
        """Start and end of each event in turn, as the clock returned them. None: the host's clock is used."""
        self.mark: Callable[[], Any] = clock or time.monotonic_ns
        """Returns the time now, on this tape's clock."""
        self.now = 0
        """The code of the event that is open; 0 if none is."""
        self.forward: int | None = None
        """The position of the forward that runs now or ran last: the part of a code that names its microbatch and
        chunk. None: no forward yet, or a pass without one."""
        self.ran_forward = False
        """True once a forward has returned."""
        self.given: list[tuple[Any, ...]] = []
        """The inputs of models, which `recorders.call` reads. Either the position of the forward, the boundaries of
        its packed sequences, the boundaries with padding, and the version of the first tensor; or the position and a
        shape; or the position, ``MASK`` or ``POSITIONS`` (`formats.facts`), a tensor, and the number of tokens."""
        self.waits: list[tuple[int, int, int]] = []
        """The waits for data: code, start and end on the host's clock, whatever clock the tape has. A GPU is not asked,
        because it does not wait for data as long as it has other work."""
        self._outer = 0  # the code of the event in which a wait for data is
        self._forward_only = forward_only
        self._chunks = {id(chunk): codes.of_chunk(index) for index, chunk in enumerate(chunks)}
        self._positions: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.events) // 3

    def begin(self, code: int, follows: bool) -> Any:
        """Begins an event, and returns its mark. ``follows``: nothing runs between this event and the end of the one
        before it, or the step's beginning. Then both have one mark on a GPU's clock, in C."""
        is_wait = code & codes.KIND_MASK == codes.DATA
        if is_wait:
            self._outer = self.now
        self.now = code
        return time.monotonic_ns() if is_wait else self.mark()

    def end(self, code: int, start: Any) -> None:
        """Ends an event, and notes it."""
        if code & codes.KIND_MASK == codes.DATA:
            self.now = self._outer
            self.waits.append((code, start, time.monotonic_ns()))
        else:
            self.now = 0
            self.add(code, start, self.mark())

    def add(self, code: int, start: Any, end: Any) -> None:
        """Notes one event. ``start`` and ``end`` are marks. Without one of them, there is no event."""
        if self.marks is None:
            self.events.extend((code, start, end))
        elif start is not None and end is not None:
            self.events.extend((code, 0, 0))
            self.marks.extend((start, end))

    def position(self, chunk: Any, microbatch: Any) -> int:
        """Notes that a forward of ``chunk`` starts, and returns its part of a code. An unknown field is 0."""
        number = microbatch if isinstance(microbatch, int) and microbatch >= 0 else None
        self.forward = position = self._chunks.get(id(chunk), 0) | codes.of_microbatch(number)
        return position

    def produced(self, result: Any) -> Any:
        """Notes that the last forward returned ``result``, and returns it unchanged."""
        if self.forward is not None:
            self.ran_forward = True
            if not self._forward_only:
                self._positions[_identity(result)] = self.forward
        return result

    def takes(self, packed: Any, tokens: Any) -> None:
        """Notes what a model was given in the forward that runs. ``packed``: its ``PackedSeqParams``, or None;
        ``tokens``: its input. Boundaries are a few numbers, and are not copied here: their version shows a later reader
        whether they have changed since."""
        if self.forward is None:
            return
        boundaries = getattr(packed, "cu_seqlens_q", None)
        if boundaries is not None:
            # A tensor made in inference mode has no version.
            version = None if getattr(boundaries, "is_inference", bool)() else getattr(boundaries, "_version", None)
            self.given.append((self.forward, boundaries, getattr(packed, "cu_seqlens_q_padded", None), version))
        elif (shape := getattr(tokens, "shape", None)) is not None:
            self.given.append((self.forward, shape))

    def consumed(self, output: object) -> int:
        """Returns the position of the forward that produced ``output``, whose backward begins now; 0: not known."""
        return self._positions.pop(_identity(output), 0)


def _identity(output: object) -> int:
    """Returns the identity of the first tensor in ``output``, which ``forward_step`` returned: a tensor, a list or dict
    of tensors, or either followed by the number of tokens. The backward gets the same tensor, alone or in a list or
    dict."""
    while isinstance(output, _CONTAINERS) and output:
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return id(output)


_c: Any = None
with contextlib.suppress(ImportError):  # built without a compiler
    _c = import_module("megaprof.recorders._tape")

#: In C, ``Tape(chunks, forward_only, clock)`` may have a `Marker` as its clock. Then the start and end of each event
#: are in the list ``marks``, as the clock returned them, and 0 in ``events``; an event of which the clock cannot tell
#: one is not noted. ``begin`` gives the clock the mark at the end of the event before, if this one follows it at once
#: and is not inside another one. Without a clock, ``marks`` is None.
Tape: Any = PythonTape if _c is None else _c.Tape
#: ``Gate(on_fault=...)``: what the hooks in C look at first; the hooks in Python look at the dispatcher instead. Its
#: ``tape`` takes events; None: no call is recorded. If ``slow`` is True, hooks call their part in Python, which also
#: writes ranges. ``on_fault`` takes what the tape's clock raised. If that belongs to the host, it raises it again.
Gate: Any = SimpleNamespace if _c is None else _c.Gate
#: ``Hook(gate, original, slow, code, first, second, overlap)``: a hooked function in C. None without the C part.
#: ``code``: the event. For a forward it is the kind of event, and ``first`` and ``second`` are the place and name of
#: the arguments with the model chunk and the microbatch. For a backward it is the kind, too, and ``first`` is that of
#: the output. `codes.MODEL` is no event: the hook notes what a model was given (`PythonTape.takes`), and ``first`` and
#: ``second`` are those of its ``PackedSeqParams`` and its input. `codes.DATA` is one of `PythonTape.waits`, of the
#: forward in which it is. ``overlap``: the name of an argument; if it is true,
#: the hook in Python is called.
Hook: Any = None if _c is None else _c.Hook
IN_C = Hook is not None
#: ``Marker(pool, make, stream, device, is_capturing, record)``: the clock of a GPU in C. None without the C part. It
#: takes an event from the list ``pool``, records it on the current stream and returns it. If the list is empty, it
#: returns ``make()``. If the stream is being captured, it returns None. If it gets the mark that it made last, and the
#: stream is the same, it returns that one. ``asked`` of a mark is when the host asked for it, in nanoseconds of the
#: monotonic clock. ``stream(device)`` returns the handle of the current stream. ``is_capturing`` and ``record`` are
#: addresses of functions of the GPU's runtime,
#: ``int (*)(stream, int *status)`` and ``int (*)(event, stream)``. They return 0, or else an error.
Marker: Any = getattr(_c, "Marker", None)
#: `megaprof.recorders.tape.pack_in_python` in C. None without the C part.
pack_in_c: Any = getattr(_c, "pack", None)


def raw(tape: Any) -> Any:
    """Returns the events of ``tape`` as a buffer of 64-bit integers: code, start and end of each event in turn. The
    tape cannot grow while the buffer is held."""
    return tape.events if isinstance(tape, PythonTape) else tape


Packed = tuple[bytes, bytes, tuple[int, ...]]
"""The packed events of a step: their codes as 64-bit integers, in the order of their starts; their times, packed by
`formats.timeline.pack_times`; and their microseconds by kind of event, in the order of `codes.KINDS`."""


def pack_in_python(events: Any, zero: int) -> Packed:
    """Packs the events of one step as they are in a timeline file. The background thread does this for every step of an
    always-on run, so it exists twice, like the tape.

    ``events`` is a buffer of 64-bit integers: code, start and end of each event in turn, times in nanoseconds.
    ``zero``: when the step began, in nanoseconds of the same clock. Rounds every time rather than every length, so that
    errors do not add up. Raises ValueError if an event ends before it starts, or starts before the step."""
    noted = np.frombuffer(events, dtype=np.int64).reshape(-1, 3)
    order, times = noted[:, 0], (noted[:, 1:] - (zero - 500)) // 1000
    if (times[1:, 0] < times[:-1, 0]).any():  # an exchange inside a combined pass ends, and is noted, before the pass
        by_start = np.lexsort((-times[:, 1], times[:, 0]))
        order, times = order[by_start], times[by_start]
    lengths, kinds = times[:, 1] - times[:, 0], order & codes.KIND_MASK
    kinds[kinds == codes.WAIT] = codes.P2P  # the wait for an overlapped exchange
    totals = tuple(int(lengths[kinds == kind].sum()) for kind in codes.KINDS)
    (packed,) = timeline.pack_times(times[None])
    return order.tobytes(), packed, totals


#: `pack_in_python`, or the same function in C if it was built.
pack: Any = pack_in_c or pack_in_python
