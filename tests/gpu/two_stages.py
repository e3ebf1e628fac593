"""Two stages on one GPU: exchanges over gloo, which sends no CUDA tensors, go through host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megaprof.testing.launcher import init_distributed
from tests.gpu.job import device_of


class _Received:
    """An exchange that still runs."""

    def __init__(self, work: Any, tensor: torch.Tensor, host: torch.Tensor) -> None:
        self.work, self.tensor, self.host = work, tensor, host

    def wait(self, *args: Any) -> bool:
        self.work.wait(*args)
        self.tensor.copy_(self.host)
        return True

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


@contextlib.contextmanager
def joined(cpu: bool) -> Iterator[str]:
    """The device to build on, in a rank of `megaprof.testing.run_ranks`."""
    init_distributed()
    with device_of(cpu) as device:
        if not cpu:
            _send_through_host_memory()
        yield device


def _send_through_host_memory() -> None:
    """For the life of the process."""
    module = dist.distributed_c10d
    send, receive = module.isend, module.irecv

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return send(tensor.detach().cpu(), *args, **kwargs)

    def irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host = torch.empty_like(tensor, device="cpu")
        return _Received(receive(host, *args, **kwargs), tensor, host)

    for owner in (dist, module):
        for function in (isend, irecv):
            setattr(owner, function.__name__, function)
