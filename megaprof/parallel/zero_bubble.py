"""Orders of passes that split backwards, and fill the bubble with the halves that compute the gradients of weights.

Megatron-Core does not have these schedules; torch does, and torchtitan uses them. Source of the orders:
``torch/distributed/pipelining/schedules.py`` (2.13), which the tests compare them with. ``zb_h1`` and ``zbv`` are ZB-H1
and ZB-V (Qi et al. 2023, arXiv 2401.10241; in torch ``InterleavedZeroBubble`` with one chunk a stage, and
``ZBVZeroBubble``), and ``dualpipev`` is DeepSeek's DualPipeV (``DualPipeV``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

Order = list[tuple[tuple[str, int, int], ...]]
"""The turns of one stage; each pass in a turn has a kind, a model chunk and a microbatch."""

_KINDS = {"F": "forward", "B": "backward", "W": "weight"}


class _Turns:
    """Collects the turns of a stage; each pass gets the next microbatch of its kind and chunk."""

    def __init__(self) -> None:
        self.turns: Order = []
        self.count: Counter[str] = Counter()

    def add(self, *passes: str) -> None:
        """Adds one turn of passes such as ``F0``: kind and chunk."""
        self.turns.append(
            tuple((_KINDS[pass_name[0]], int(pass_name[1:]), self.count[pass_name]) for pass_name in passes)
        )
        self.count.update(passes)

    def repeat(self, times: int, *passes: str) -> None:
        """Adds a turn for each pass, several times over."""
        for pass_name in passes * times:
            self.add(pass_name)


def _zb_h1(stages: int, microbatches: int, stage: int) -> Order:
    """ZB-H1: 1F1B in which a stage runs its weight halves later, by as many microbatches as there are stages before
    it."""
    order, count = _Turns(), microbatches
    for _ in range(min(stages - 1 - stage, count)):
        order.add("F0")
    for index in range(count):
        if order.count["F0"] < count:
            order.add("F0")
        order.add("B0")
        if index >= stage:
            order.add("W0")
    while order.count["W0"] < count:
        order.add("W0")
    return order.turns


def _zbv(stages: int, microbatches: int, stage: int) -> Order:
    """ZB-V for passes that all take equally long; laid out for at least 2 * stages - 1 microbatches."""
    order, ahead = _Turns(), stages - stage
    count = max(2 * stages - 1, microbatches)

    order.repeat(2 * ahead - 1, "F0")
    order.repeat(stage, "F1", "F0")
    order.repeat(ahead, "F1", "B1", "W1")
    while order.count["F1"] < count:
        if order.count["F0"] < count:
            order.add("F0")
        order.repeat(1, "B0", "W0", "F1", "B1", "W1")
    order.repeat(stage, "B0", "B1")
    order.repeat(ahead, "B0", "W0")
    order.repeat(count - order.count["W1"], "W1")
    order.repeat(count - order.count["W0"], "W0")
    return [turn for turn in order.turns if turn[0][2] < microbatches]


def _dualpipev(stages: int, microbatches: int, stage: int) -> Order:
    """DualPipeV: in its middle, a forward and a whole backward of the other chunk run as one."""
    order, ahead = _Turns(), stages - stage - 1
    delayed: deque[str] = deque()  # weight halves that are still to run

    def backward(chunk: int, *, split: bool) -> None:
        if split:
            order.add(f"B{chunk}")
            delayed.append(f"W{chunk}")
        else:
            order.add(f"B{chunk}", f"W{chunk}")

    order.repeat(2 * ahead, "F0")
    order.repeat(stage + 1, "F0", "F1")
    order.repeat(ahead, "B1", "W1", "F1")
    for index in range(microbatches - 2 * stages + stage + 1):
        if index == 0 and ahead == 0:
            order.add("F0")
            backward(1, split=False)
        else:
            order.add("F0", "B1", "W1")
        order.add("F1", "B0", "W0")
    for _ in range(ahead):
        backward(1, split=False)
        order.add("F1", "B0", "W0")
    # The second half of the last backwards is split.
    for index in range(2 * (stage + 1)):
        backward(1 - index % 2, split=index > stage)
    for _ in range(ahead):
        if delayed:
            order.add(delayed.popleft())
        backward(0, split=True)
    while delayed:
        order.add(delayed.popleft())
    return order.turns


#: The order of turns by name, from the number of stages, of microbatches, and the stage.
ORDERS: dict[str, Callable[[int, int, int], Order]] = {"zb_h1": _zb_h1, "zbv": _zbv, "dualpipev": _dualpipev}
