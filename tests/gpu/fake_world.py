"""One rank of a job of any size, alone: torch's fake process group exchanges nothing, and kernels are real.

What would have come from another rank is whatever memory held, so losses mean nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


@contextlib.contextmanager
def rank_of(rank: int, world: int, **sizes: int) -> Iterator[None]:
    """This process is ``rank`` of ``world``. ``sizes``: what Megatron is told of its groups beyond the workload's."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    initialize, new_group = parallel_state.initialize_model_parallel, dist.new_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        """Megatron asks for groups of gloo as well, which would look for their peers."""
        return new_group(*args, **{**kwargs, "backend": "fake"})

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with (
            patch.object(dist, "new_group", fake_group),
            patch.object(parallel_state, "initialize_model_parallel", functools.partial(initialize, **sizes)),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
