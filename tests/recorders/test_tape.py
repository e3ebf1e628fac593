"""The tape and its hooks, in C and in Python: both do the same, whatever is called."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaprof.formats import codes
from megaprof.hooks import modules
from megaprof.recorders import tape
from megaprof.recorders.tape import Gate, Hook, PythonTape, Tape, raw
from megaprof.runtime.patching import Patches

pytestmark = pytest.mark.skipif(not tape.IN_C, reason="megaprof was built without a C compiler")


class Chunk:
    """Stands for a model chunk: only its identity matters."""


class Scaled:
    """Stands for a model with a parameter."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def forward(self, x: int) -> int:
        return self.factor * x


def call(function: Any, *args: Any) -> Any:
    return function(*args)


def events(of: Any) -> list[list[int]]:
    return np.frombuffer(raw(of), dtype=np.int64).reshape(-1, 3).tolist()


NUMBERS = st.one_of(st.none(), st.integers(-3, 1 << 21), st.just(1 << 70), st.just("text"))


@given(st.integers(0, 300), st.integers(0, 300), NUMBERS)
def test_positions_are_codes(count: int, which: int, microbatch: Any) -> None:
    chunks = tuple(Chunk() for _ in range(count))
    chunk = chunks[which] if which < count else Chunk()
    known = microbatch if isinstance(microbatch, int) and microbatch >= 0 else None
    expected = codes.of_chunk(which if which < count else None) | codes.of_microbatch(known)
    for made in (Tape(chunks), PythonTape(chunks)):
        assert made.forward is None
        assert made.position(chunk, microbatch) == made.forward == expected


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(-10, -1)), max_size=60), st.booleans())
def test_backwards_find_their_forwards(order: list[int], forward_only: bool) -> None:
    """A number at or above 0 is a forward that makes that output, ``-n - 1`` the backward of output n."""
    outputs = [object() for _ in range(10)]
    shapes = [lambda o: o, lambda o: [o, 1], lambda o: (o, 3), lambda o: {"a": o}, lambda o: [{"x": [o]}, 2]]
    both = Tape((), forward_only), PythonTape((), forward_only)
    for microbatch, number in enumerate(order):
        if number >= 0:
            result = shapes[microbatch % len(shapes)](outputs[number])
            for made in both:
                made.position(None, microbatch)
                assert made.produced(result) is result
        else:
            output = outputs[-number - 1]
            if order[:microbatch].count(-number - 1) <= 1:  # an output that is there twice is a reused identity
                assert both[0].consumed(output) == both[1].consumed([output])
    assert both[0].ran_forward == both[1].ran_forward == any(number >= 0 for number in order)


@given(st.lists(st.tuples(*[st.integers(-(1 << 62), 1 << 62)] * 3), max_size=300))
def test_events_are_kept_as_they_come(noted: list[tuple[int, int, int]]) -> None:
    for made in (Tape(), PythonTape()):
        for event in noted:
            made.add(*event)
        assert len(made) == len(noted)
        assert events(made) == [list(event) for event in noted]
        assert made.marks is None


def test_a_clock_of_its_own_keeps_its_answers() -> None:
    answers = iter(range(100))
    for made in (Tape((), False, lambda: next(answers)), PythonTape((), False, lambda: next(answers))):
        first = made.mark()
        made.add(7, first, made.mark())
        assert made.marks == [first, first + 1]
        assert events(made) == [[7, 0, 0]]


class Packed:
    """Stands for ``PackedSeqParams``."""

    def __init__(self, boundaries: Any, padded: Any = None) -> None:
        self.cu_seqlens_q, self.cu_seqlens_q_padded = boundaries, padded


def test_what_models_are_given_is_kept_as_it_is() -> None:
    boundaries, padded, tokens = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8]), torch.zeros(2, 7)
    boundaries += 0  # its version is 1
    with torch.inference_mode():
        without_version = torch.tensor([0, 3])
    for made in (Tape(), PythonTape()):
        made.takes(Packed(boundaries), tokens)  # in no forward
        made.position(None, 4)
        for packed in (Packed(boundaries, padded), Packed(without_version), Packed(None), object(), None):
            made.takes(packed, tokens)
        made.takes(None, None)
        position = codes.of_microbatch(4)
        shape = (position, (2, 7))
        assert made.given[0] == (position, boundaries, padded, 1)
        assert made.given[1] == (position, without_version, None, None)
        assert made.given[2:] == [shape] * 3
    seen: list[Any] = []
    gate = Gate(seen.append)
    hook = Hook(gate, lambda *args, **kwargs: (args, kwargs), None, codes.MODEL, (1, "packed_seq_params"), (0, "ids"))
    gate.tape = made = Tape()
    made.position(None, 0)
    for call in (
        lambda: hook(tokens, None),
        lambda: hook(ids=tokens),
        lambda: hook(ids=tokens, packed_seq_params=None),
    ):
        assert call() == call()
    assert made.given == [(codes.of_microbatch(0), (2, 7))] * 6
    hook(**{"".join(("i", "d", "s")): tokens})  # the name is not interned
    assert len(made.given) == 7
    assert seen == []


def test_what_a_model_is_given_is_noted_when_it_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(input_ids: Any, *, fails: bool = False) -> Any:
        assert made.given == []
        if fails:
            raise TimeoutError
        return input_ids

    gate, tokens = Gate(never), torch.zeros(2, 7)
    dispatcher = SimpleNamespace(call=SimpleNamespace(), drop=never)
    monkeypatch.setattr(modules, "Hook", None)
    in_python: Any = modules.takes_packed(dispatcher, model)  # type: ignore[arg-type]
    in_c = Hook(gate, model, in_python, codes.MODEL, (1, "packed_seq_params"), (0, "input_ids"))
    for hook in (in_c, in_python):
        gate.tape = dispatcher.call.tape = made = Tape()
        made.position(None, 3)
        with pytest.raises(TimeoutError):
            hook(tokens, fails=True)
        assert made.given == []
        assert hook(tokens) is tokens
        assert made.given == [(codes.of_microbatch(3), (2, 7))]


def test_an_exception_of_the_hosts_passes_what_models_are_given() -> None:
    class Interrupted:
        @property
        def shape(self) -> Any:
            raise TimeoutError

    gate = Gate(never)
    hook = Hook(gate, lambda ids: ids, None, codes.MODEL, (1, "packed_seq_params"), (0, "ids"))
    gate.tape = Tape()
    gate.tape.position(None, 0)
    with pytest.raises(TimeoutError):
        hook(Interrupted())


def test_a_tape_cannot_grow_while_it_is_read() -> None:
    made = Tape()
    for _ in range(64):
        made.add(1, 2, 3)
    held = memoryview(made)
    with pytest.raises(BufferError):
        made.add(1, 2, 3)
    held.release()
    made.add(1, 2, 3)


def forward_step(step: Any, data: Any, model: Any, count: int, current_microbatch: Any = None, **more: Any) -> Any:
    return step(**more)


def hooked(gate: Any, original: Any = forward_step, slow: Any = None, code: int = codes.FORWARD) -> Any:
    places = {codes.FORWARD: ((2, "model"), (4, "current_microbatch")), codes.BACKWARD: ((1, "output"),)}
    return Hook(gate, original, slow or (lambda *a, **k: "slow"), code, *places.get(code, ()))


def never(fault: BaseException) -> None:
    raise fault


@pytest.mark.parametrize("named", [False, True])
def test_a_hook_notes_what_it_calls(named: bool) -> None:
    gate, chunks, output = Gate(never), (Chunk(), Chunk()), object()
    forward = hooked(gate)
    backward = hooked(gate, lambda given, output: gate.tape.now, code=codes.BACKWARD)
    assert forward(lambda: output, None, chunks[1], 8) is output  # nothing is recorded
    gate.tape = made = Tape(chunks)
    if named:
        forward(step=lambda: output, data=None, model=chunks[1], count=8, current_microbatch=5)
        running = backward(given=None, output=output)
    else:
        forward(lambda: output, None, chunks[1], 8, 5)
        running = backward(None, output)
    position = codes.of_chunk(1) | codes.of_microbatch(5)
    assert running == codes.BACKWARD | position
    assert made.now == 0
    (first, second) = events(made)
    assert [first[0], second[0]] == [codes.FORWARD | position, codes.BACKWARD | position]
    assert first[1] <= first[2] <= second[1] <= second[2]
    gate.slow = True
    assert forward(1, 2, 3, 4) == "slow"


def test_an_exception_of_the_hosts_passes_and_its_event_is_kept() -> None:
    gate, raised = Gate(never), KeyError("mine")

    def fails() -> None:
        raise raised

    for clock in (None, lambda: "mark"):
        gate.tape = made = Tape((), False, clock)
        with pytest.raises(KeyError) as caught:
            hooked(gate)(fails, None, None, 1, 0)
        assert caught.value is raised
        assert (len(made), made.now) == (1, 0)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("host_fails", [False, True])
def test_a_clock_that_raises_is_our_fault(at: int, host_fails: bool) -> None:
    faults: list[BaseException] = []
    gate = Gate(faults.append)
    answers = ["mark"] * at

    def clock() -> str:
        if not answers:
            raise RuntimeError("no clock")
        return answers.pop()

    def step() -> str:
        if host_fails:
            raise KeyError("mine")
        return "result"

    gate.tape = Tape((), False, clock)
    if host_fails:
        with pytest.raises(KeyError, match="mine"):
            hooked(gate)(step, None, None, 1, 0)
    else:
        assert hooked(gate)(step, None, None, 1, 0) == "result"
    assert [str(fault) for fault in faults] == ["no clock"]
    assert len(gate.tape) == 0


def test_what_belongs_to_the_host_is_raised_out_of_the_clock() -> None:
    gate = Gate(never)

    def clock() -> None:
        raise KeyboardInterrupt

    gate.tape = Tape((), False, clock)
    with pytest.raises(KeyboardInterrupt):
        hooked(gate)(lambda: 1, None, None, 1, 0)


def test_a_hook_in_a_class_is_a_method_and_looks_like_what_it_hooks() -> None:
    class Communicator:
        def send(self, tensor: int, *, overlap_p2p_comm: bool = False) -> tuple[Any, int]:
            "Sends."
            return self, tensor

    gate, original = Gate(never), Communicator.send
    hook = Hook(gate, original, lambda *a, **k: "slow", 99, (-1, None), (-1, None), "overlap_p2p_comm")
    Communicator.send = functools.wraps(original)(hook)  # type: ignore[method-assign]
    gate.tape = made = Tape()
    communicator = Communicator()
    assert communicator.send(3) == (communicator, 3)
    assert communicator.send(3, overlap_p2p_comm=False) == (communicator, 3)
    assert communicator.send(3, overlap_p2p_comm=True) == "slow"
    assert [event[0] for event in events(made)] == [99, 99]
    assert (Communicator.send.__name__, Communicator.send.__doc__) == ("send", "Sends.")
    assert Communicator.send.__wrapped__ is original  # type: ignore[attr-defined]


def test_a_hook_needs_no_copied_attributes_to_look_like_what_it_hooks() -> None:
    class Model:
        def forward(self, input_ids: int, *, labels: int = 0) -> int:
            return input_ids + labels

    model, patches = Model(), Patches()
    bound = inspect.signature(model.forward)
    patches.shadow(model, "forward", lambda original: hooked(Gate(never), original, code=codes.MODEL))
    assert inspect.signature(model.forward) == bound
    assert (model.forward.__name__, model.forward.__wrapped__) == ("forward", Model.forward.__get__(model))  # type: ignore[attr-defined]
    assert not hasattr(model.forward, "other")
    assert model.forward(1, labels=2) == 3
    patches.restore()
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    "wrap", [lambda bound: hooked(Gate(never), bound, code=codes.MODEL), lambda bound: functools.partial(call, bound)]
)
def test_a_copy_of_an_object_that_is_hooked_runs_its_own_method(wrap: Any) -> None:
    model, patches = Scaled(2), Patches()
    patches.shadow(model, "forward", wrap)
    patches.shadow(model, "forward", lambda bound: lambda x: bound(x))
    shallow, copied, pickled = copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    shallow.factor, copied.factor, pickled.factor = 11, 3, 5
    for _ in range(2):
        assert [each.forward(7) for each in (model, shallow, copied, pickled)] == [14, 77, 21, 35]
        assert list(map(vars, (shallow, copied, pickled))) == [{"factor": 11}, {"factor": 3}, {"factor": 5}]
        patches.restore()
    assert vars(model) == {"factor": 2}
    own = model.forward = Scaled(13).forward  # type: ignore[method-assign]
    patches.shadow(model, "forward", wrap)
    assert copy.copy(model).forward is own
    patches.restore()
    config = SimpleNamespace(function=hooked(Gate(never), call))
    assert copy.deepcopy(config).function is pickle.loads(pickle.dumps(config)).function is call


def test_the_tape_may_be_taken_away_meanwhile_and_nothing_leaks() -> None:
    gate, held = Gate(never), Chunk()
    seen = weakref.ref(held)

    def step() -> Any:
        gate.tape = None
        return "result"

    hook = hooked(gate)
    gate.tape = Tape((held,))
    assert hook(step, None, held, 1, 0) == "result"
    hook.itself = hook, held  # a cycle
    del hook, held
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    "wrong", [lambda: Hook(1, 2, 3, 4), lambda: Tape([1]), lambda: Gate(), lambda: setattr(Gate(never), "tape", 5)]
)
def test_wrong_arguments_are_type_errors(wrong: Any) -> None:
    with pytest.raises(TypeError):
        wrong()


def test_without_a_compiler_everything_is_python() -> None:
    code = (
        "import sys; sys.modules['megaprof.recorders._tape'] = None\n"
        "from megaprof.recorders import tape; print(tape.IN_C, tape.Tape.__name__, tape.Hook)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "PythonTape", "None"]


@pytest.mark.parametrize("made", [Tape, PythonTape])
@pytest.mark.parametrize("clock", [None, lambda *_: "mark"])
def test_waits_for_data_are_on_the_hosts_clock(made: Any, clock: Any) -> None:
    noted = made((), False, clock)
    outer = codes.FORWARD | noted.position(None, 3)
    began = noted.begin(outer, True)
    code = codes.DATA | noted.forward
    start = noted.begin(code, True)
    assert (noted.now, codes.microbatch_and_chunk(noted.now)[0]) == (code, 3)
    noted.end(code, start)
    assert noted.now == outer
    noted.end(outer, began)
    ((found, since, until),) = noted.waits
    assert (found, since, noted.now) == (code, start, 0)
    assert since <= until
    assert [event[0] for event in events(noted)] == [outer]


def test_a_hook_waits_for_data_of_the_forward_that_runs() -> None:
    items = iter("ab")
    gate = Gate(pytest.fail)
    gets = Hook(gate, functools.partial(next, items), None, codes.DATA)
    runs = Hook(gate, lambda *_: gets(), None, codes.FORWARD, (0, "model"), (1, "microbatch"))
    gate.tape = noted = Tape()
    assert (runs(None, 5), gets()) == ("a", "b")
    with pytest.raises(StopIteration):
        runs(None, 6)
    assert [code for code, _, _ in noted.waits] == [
        codes.DATA | codes.of_microbatch(5),
        codes.DATA,  # in no forward
        codes.DATA | codes.of_microbatch(6),
    ]
    assert noted.now == 0
