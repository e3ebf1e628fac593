"""Every layer spec for Transformer Engine that this megatron-core has: its parts have the names that ranges go by.

Transformer Engine itself is replaced, since no CPU imports it: only the specs are made, no layer is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaprof.formats.ranges import LAYER_PARTS

ROOT = Path(__file__).parents[2]
#: Prints, by the name of what makes a spec, the parts of every kind of layer in it that are modules with parts.
MAKE = """
import functools, importlib, inspect, json, pkgutil
from tests.integrations.edges import replace, replace_missing
replace_missing("triton", "einops")
replace("transformer_engine", "mamba_ssm", "causal_conv1d", "flash_attn", "apex")
import megatron.core.models
from megatron.core.transformer.spec_utils import ModuleSpec

found = {}

def kind(value):
    if isinstance(value, ModuleSpec):
        return value.module
    if isinstance(value, functools.partial):  # 0.19
        return getattr(value.func, "__self__", value.func)

def walk(name, spec):
    parts = spec.submodules
    if parts is None:
        return
    fields = vars(parts) if not isinstance(parts, dict) else parts
    inner = {k: v for k, v in fields.items() if isinstance(v, ModuleSpec)}
    if {"self_attention", "mixer"} & fields.keys():
        kinds = {k: kind(v) for k, v in fields.items()}
        found.setdefault(name, []).append({k: v.__name__ for k, v in kinds.items() if inspect.isclass(v)})
    else:
        for each in inner.values():
            walk(name, each)
    for each in fields.get("layer_specs") or ():
        walk(name, each)

for module in pkgutil.walk_packages(megatron.core.models.__path__, "megatron.core.models.", onerror=lambda name: None):
    if not module.name.endswith(("_specs", "_spec")):
        continue
    try:
        loaded = importlib.import_module(module.name)
    except ImportError:
        continue
    for name, value in vars(loaded).items():
        if isinstance(value, ModuleSpec):
            walk(name, value)
        elif inspect.isfunction(value) and value.__module__ == module.name and "transformer_engine" in name:
            known = inspect.signature(value).parameters
            wanted = [{}, {"num_experts": 4, "moe_grouped_gemm": True}, {"multi_latent_attention": True}]
            for given in wanted:
                if given.keys() <= known.keys():
                    try:
                        spec = value(**given)
                    except TypeError:  # it needs a configuration, as blocks do
                        continue
                    walk(name, spec) if isinstance(spec, ModuleSpec) else None
print(json.dumps(found))
"""


@pytest.mark.slow
def test_every_part_that_is_a_module_has_a_range() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    run = subprocess.run([sys.executable, "-c", MAKE], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, list[dict[str, str]]] = json.loads(run.stdout.splitlines()[-1])
    gpt = found["get_gpt_layer_with_transformer_engine_spec"]
    assert {"MLP", "MoELayer"} <= {layer["mlp"] for layer in gpt}, "dense and with experts"
    assert {"mixer", "self_attention", "mlp"} <= {part for layer in found["mamba_stack_spec"] for part in layer}
    assert len(found) > 3
    for name, layers in found.items():
        for layer in layers:
            assert layer.keys() <= LAYER_PARTS.keys(), name
