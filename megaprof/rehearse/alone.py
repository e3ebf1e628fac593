"""In the user's program: one rank of a job of any size, without the others.

Whatever group the program asks for is one of which only this rank runs. It exchanges nothing, so losses mean nothing.
What a rank would have received is finite: its own part in a collective, and small random numbers from another stage.
Every exchange is written down with its size.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

#: The environment variable with the file of the exchanges.
VARIABLE = "REHEARSAL_EXCHANGES"
_NAME = "alone"
#: About what weights are initialised with, so that neither sums nor norms overflow.
_DEVIATION = 0.02


def arm() -> None:
    """Gives a program such groups. A program that would wait for peers gets a RuntimeError with the reason. torch, in
    a process that has it, is loaded at once, before anybody has its functions."""
    try:
        dist: Any = import_module("torch.distributed")
    except ImportError:
        return
    import torch

    written = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    c10d, group = dist.distributed_c10d, _group(dist, written, Path(os.environ[VARIABLE]).parents[1] / "shapes")
    initialize, new_group = c10d.init_process_group, c10d.new_group
    objects = (Path(os.environ[VARIABLE]).parents[1] / "objects").open("ab+")
    objects.seek(0)

    def init_process_group(*_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            os.write(written, f"0 device {torch.cuda.get_device_name()}\n".encode())
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=10))  # what no peer sets will never be there
        initialize(_NAME, store=store, rank=rank, world_size=world)

    def no_store(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the program waits for its peers at a store of its own, and in a rehearsal there are none")

    def broadcast_object_list(values: list[Any], src: int | None = None, group: Any = None, *_: Any, **__: Any) -> None:
        if not src and dist.get_world_size(group) == dist.get_world_size():  # what the first rank had, which ran before
            if dist.get_rank() == 0:
                pickle.dump(values, objects)
                objects.flush()
                return
            while True:
                with suppress(EOFError):
                    values[:] = pickle.load(objects)
                    return
                time.sleep(1.0)  # until this rank is ended: the first one did not come that far

    dist.Backend.register_backend(_NAME, lambda options, _: group(options), extended_api=True, devices=["cpu", "cuda"])
    # Both have names of their own for some of these functions.
    others = map(import_module, ("torch.distributed.device_mesh", "torch.distributed.rendezvous"))
    for module in (c10d, dist, *others):
        module.init_process_group, module.TCPStore = init_process_group, no_store
        module.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend=_NAME)
        module.broadcast_object_list, module.monitored_barrier = broadcast_object_list, lambda *_, **__: None


def _as_it_is(kind: str) -> Callable[..., Any]:
    return lambda self, tensors, opts=None, *_: self._done(kind, tensors, tensors, opts)


def _each(single: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, outputs, inputs, opts=None: [*map(single, repeat(self), outputs, inputs, repeat(opts))][-1]


def _group(dist: Any, written: int, shapes: Path) -> Callable[..., Any]:
    """Returns the class of the groups. ``written`` is the open file of exchanges; ``shapes`` has what the first stage
    tells the next one of its tensors, which go through all stages, as their gradients do, in these shapes."""
    import torch
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    generator, small_numbers, received = torch.Generator(), dict[Any, Any](), defaultdict[int, Iterator[int]](count)

    class Alone(dist.ProcessGroup):  # type: ignore[misc]
        """A group of which only this rank runs."""

        def __init__(self, options: Any) -> None:
            self._own, self._count = int(options.group_rank), int(options.group_size)
            super().__init__(self._own, self._count)
            self._ranks = ",".join(map(str, options.global_ranks_in_group or range(self._count)))

        def size(self) -> int:
            return self._count

        def getBackendName(self) -> str:
            return _NAME

        group_name = property(lambda self: dist.distributed_c10d._world.pg_names[self])

        def _done(self, kind: str, whole: Sequence[Any], result: Any, opts: Any = None) -> Any:
            """Writes an exchange of the tensors ``whole`` down, and returns the work of one that is over."""
            if self._count > 1:
                size = sum(tensor.numel() * tensor.element_size() for tensor in whole)
                backward, beside = torch._C._current_graph_task_id() != -1, getattr(opts, "asyncOp", False)
                line = f"{time.time_ns()} {kind} {size} {backward:d} {beside:d} {self._ranks}\n"
                os.write(written, line.encode())
            if kind == "send" and not whole[0].is_floating_point() and os.environ["RANK"] == "0":
                with shapes.open("a") as file:
                    print(*whole[0].tolist(), file=file)
            future = torch.futures.Future()  # type: ignore[var-annotated]
            future.set_result(result)
            return _create_work_from_future(future)

        allreduce = allreduce_coalesced = _as_it_is("all_reduce")
        broadcast = reduce = _as_it_is("broadcast")  # as many bytes
        send = _as_it_is("send")

        def barrier(self, opts: Any = None) -> Any:
            return self._done("barrier", (), [])

        def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            for output in chain(*outputs):
                output.copy_(inputs[0])
            return self._done("all_gather", inputs * self._count, outputs, opts)

        gather = allgather  # only one rank has outputs

        def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            for parts in inputs:
                outputs[0].copy_(parts[self._own])
            return self._done("reduce_scatter", outputs * self._count, outputs, opts)

        scatter = reduce_scatter  # only one rank has inputs

        def all_gather_single(self, output: Any, own_input: Any, opts: Any = None) -> Any:
            return self.allgather([output.view(self._count, -1)], [own_input.reshape(-1)], opts)

        def reduce_scatter_single(self, output: Any, own_input: Any, opts: Any = None) -> Any:
            return self.reduce_scatter([output.view(-1)], [own_input.view(self._count, -1)], opts)

        def alltoall_base(self, output: Any, own_input: Any, *splits: Any) -> Any:
            flat, own = output.view(-1), own_input.reshape(-1)
            flat[: len(own)].copy_(own[: len(flat)])
            flat[len(own) :].zero_()
            return self._done("all_to_all", (own_input,), output, splits[-1] if splits else None)

        def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
            for tensor in tensors:
                if not tensor.is_floating_point():
                    if not shapes.exists():
                        raise RuntimeError("a rank alone cannot know the numbers that another stage sends to it")
                    place = next(received[peer])
                    while len(known := shapes.read_text().splitlines()) <= place:
                        time.sleep(1.0)  # until this rank is ended: the first one did not come that far
                    tensor.copy_(torch.tensor([*map(int, known[place].split())]))
                    continue
                key = tensor.shape, tensor.dtype, tensor.device
                if key not in small_numbers:
                    numbers = torch.randn(tensor.shape, generator=generator) * _DEVIATION
                    small_numbers[key] = numbers.to(tensor.device, tensor.dtype)
                tensor.detach().copy_(small_numbers[key])
            return self._done("recv", tensors, tensors)

        alltoall = _each(alltoall_base)
        all_gather_single_coalesced = _each(all_gather_single)
        reduce_scatter_single_coalesced = _each(reduce_scatter_single)
        # What some of these are called by other versions of torch.
        _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
        _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
        all_to_all_single = alltoall_base

    return Alone
