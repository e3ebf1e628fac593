"""Refuses, before the first step, configurations that cannot work together with profiling.

FSDP2 keeps its parameters in DTensors. So ``model.to("cpu")``, the manual way of offloading, exchanges them with
``torch.utils.swap_tensors``, which fails on a tensor with weak references: "_apply(): Couldn't swap ...". While a
window is open, torch.profiler holds such references to every tensor that an operator saw, if it records shapes or
FLOPs. With stacks it holds the parameters of ordinary modules. We have not seen it hold a DTensor then (torch 2.13),
but nothing promises that it never does. After a window it holds nothing.

Frameworks offload manually inside their loop when models share a GPU. FSDP2's own offload swaps nothing, and neither
does Megatron, which moves flat buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from megaprof.config.options import ProfileConfig, flag
from megaprof.config.values import TRAIN_OVERALL

#: Options that make the profiler hold weak references to tensors.
HOLDING = ("record_shapes", "with_flops", "with_stack")


def check_model(config: ProfileConfig, chunks: Iterable[Any]) -> None:
    """Raises ValueError for FSDP2 models without CPUOffloadPolicy if windows would be open between calls.

    A model does not show whether the host will move it between calls. If the host does, an open window makes it crash.
    """
    held = held_by(config)
    lasting = [f"{flag('target')} {TRAIN_OVERALL}"] if TRAIN_OVERALL in config.target else []
    lasting += [flag("discrete")] * config.discrete
    if lasting and held and any(map(offloads_manually, chunks)):
        raise ValueError(f"{' and '.join(lasting)}: {refusal(held)}")


def refusal(held: tuple[str, ...]) -> str:
    """Returns why a window whose profiler holds tensors by the options ``held`` must not be open between calls of a
    model that is offloaded manually."""
    options = ", ".join(map(flag, held))
    return (
        f"with {options} on an FSDP2 model its window would be open between calls, and moving the model to "
        "the CPU meanwhile would fail ('Couldn't swap ...'). Use CPUOffloadPolicy (cpu_offload=true), or Megatron, "
        f"or another target, or drop {options}"
    )


def held_by(config: ProfileConfig) -> tuple[str, ...]:
    """Returns the options of ``config`` that make the torch profiler hold tensors."""
    return tuple(name for name in HOLDING if config.enabled and "torch" in config.tool and getattr(config, name))


def offloads_manually(model: Any) -> bool:
    """Returns whether FSDP2 (``fully_shard``) shards ``model``, or a part of it, without ``CPUOffloadPolicy``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, it shards nothing
    sharded, policy = getattr(fsdp, "FSDPModule", None), getattr(fsdp, "CPUOffloadPolicy", None)
    if sharded is None or policy is None or not hasattr(model, "modules"):
        return False
    return any(isinstance(module, sharded) and not _has_policy(module, policy) for module in model.modules())


def _has_policy(module: Any, policy: type) -> bool:
    """Returns whether the private state of ``module`` says that it offloads by ``policy`` (torch 2.6 to 2.13)."""
    try:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    except AttributeError:
        return False
    return all(group is None or isinstance(getattr(group, "offload_policy", None), policy) for group in groups)
