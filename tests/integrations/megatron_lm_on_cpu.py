"""Run an entrypoint of a Megatron-LM checkout on the CPU: ``megatron_lm_on_cpu.py CHECKOUT pretrain_gpt.py ARGUMENTS``.

The trainer asserts that there is a GPU and asks it about itself; what it is told is here. The rest is ``cpu_megatron``.
``TRAINERS_DIGESTS``: a directory for tests/trainers/digests.py.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import runpy
import sys
import types
import typing
from collections import defaultdict
from typing import Any


def pretend_a_gpu() -> None:
    import torch

    cuda = torch.cuda
    properties = types.SimpleNamespace(name="CPU", total_memory=1 << 34, major=8, minor=0, multi_processor_count=1)
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (8, 0),
        "get_device_name": "CPU",
        "get_device_properties": properties,
        "mem_get_info": (1 << 33, 1 << 34),
        "memory_stats": defaultdict(int),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, _answer=answer, **__: _answer)

    def typed(dtype: Any) -> Any:
        return lambda *shape: (
            torch.zeros(*shape, dtype=dtype) if isinstance(shape[0], int) else torch.tensor(shape[0], dtype=dtype)
        )

    for name, dtype in {"FloatTensor": torch.float32, "LongTensor": torch.int64, "IntTensor": torch.int32}.items():
        setattr(cuda, name, typed(dtype))


def use_the_wheels_dataset_helpers() -> None:
    """They come compiled in megatron-core's wheel; a checkout would compile its own."""
    files = importlib.metadata.files("megatron-core") or []
    (library,) = [file for file in files if "helpers_cpp" in file.name and file.suffix == ".so"]
    name = "megatron.core.datasets.helpers_cpp"
    spec = importlib.util.spec_from_file_location(name, str(library.locate()))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import megatron.core.datasets.utils as utils

    utils.compile_helpers = lambda: None


def main() -> None:
    checkout, script, *_ = sys.argv[1:]
    sys.path.insert(0, checkout)
    os.chdir(checkout)
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    fused = types.ModuleType("megatron.legacy.fused_kernels")
    fused.load = lambda args: None  # type: ignore[attr-defined]
    sys.modules[fused.__name__] = fused

    from megaprof.testing import cpu_megatron
    from tests.trainers.digests import write_digests

    write_digests(os.environ["TRAINERS_DIGESTS"])
    with cpu_megatron():
        pretend_a_gpu()
        use_the_wheels_dataset_helpers()
        sys.argv = sys.argv[2:]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
