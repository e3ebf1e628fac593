"""The memory that a layout is predicted to need, against what real jobs allocate: each tensor of theirs is counted."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megaprof.analysis.what_if.contents import in_flight_layers, measured_memory
from megaprof.analysis.what_if.layouts import parse_layout
from megaprof.formats.timeline import Memory
from megaprof.parallel.schedules import PipelineSchedule
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks

STAGES, LAYERS, MICROBATCHES = 2, 8, 8


class CountedMemory(TorchDispatchMode):
    """Counts the bytes of all tensors, as torch's allocator counts those of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.peak = 0
        self._storages = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages.add(storage._cdata)
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def _free(self, storage: int, size: int) -> None:
        self._storages.discard(storage)
        self._add(-size)


def trained(layout: str) -> Memory:
    """Runs in a rank: trains two steps, and returns what is allocated behind the second and at its peak."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    init_distributed()
    pieces = parse_layout(layout, STAGES)
    chunks = len(pieces) // STAGES
    counts = tuple(piece.count("t") for piece in pieces)
    with cpu_megatron(), CountedMemory() as counted:
        vpp = chunks if chunks > 1 else None
        gpt = build(GPTWorkload(pp=STAGES, vpp=vpp, layers=LAYERS, layout=counts, microbatches=MICROBATCHES))
        gpt.train_step(get_forward_backward_func())
        counted.peak = counted.allocated
        gpt.train_step(get_forward_backward_func())
    return Memory(counted.allocated, counted.peak, 1 << 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("captured", "others"),
    [("Etttt|ttttL", ("Etttttt|ttL", "Ett|ttttttL")), ("Ett|tt|tt|ttL", ("Ettt|t|ttt|tL", "Et|ttt|t|tttL"))],
    ids=["one chunk", "two chunks"],
)
def test_a_layout_needs_the_memory_that_is_predicted(captured: str, others: tuple[str, ...]) -> None:
    pieces = parse_layout(captured, STAGES)
    chunks = len(pieces) // STAGES
    schedule = PipelineSchedule.checked(STAGES, chunks, MICROBATCHES)
    memory = measured_memory(run_ranks(trained, STAGES, captured), pieces, in_flight_layers(pieces, schedule))
    assert memory is not None
    for layout in others:
        fits, needed = memory.fit(parse_layout(layout, STAGES), schedule)
        real = [each.peak for each in run_ranks(trained, STAGES, layout)]
        assert fits
        assert needed == pytest.approx(real, rel=0.05)
