"""Module ranges on real megatron-core: complete, nested, named alike forward and backward, and without a trace left."""

from __future__ import annotations

import copy
import gc
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp

from megaprof import ProfileConfig, install_hooks
from megaprof.analysis.trace.traces import find_traces, read_trace
from megaprof.formats.ranges import (
    DISPATCHER_STEPS,
    LAYER_PARTS,
    MODULES,
    OUTER_MODULES,
    module_backward,
    module_range,
    parse,
)
from megaprof.hooks.modules import sites
from megaprof.parallel.megatron import describe_chunk
from megaprof.recorders import emit
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.built import digests, layer_numbers

SMALL: dict[str, Any] = {"hidden": 32, "seq_length": 16, "layers": 4, "microbatches": 4}
WORKLOADS = {
    "pp2-vpp2": GPTWorkload(pp=2, vpp=2, **SMALL),
    "tp2-ep2": GPTWorkload(tp=2, ep=2, **{**SMALL, "layers": 2}),
    "ep2-pp2": GPTWorkload(ep=2, pp=2, **SMALL),
}
#: In the test's own process, and on ranks.
EVERY = ["one rank", *(pytest.param(n, marks=pytest.mark.slow) for n in WORKLOADS)]


def surface(chunks: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every attribute of every module, and of its token dispatcher: names in order, methods' and hooks' identities.

    Not what tensors they are: megatron-core itself keeps the tensors of a step in some.
    """
    found = []
    for chunk in chunks:
        for name, module in chunk.named_modules():
            for owner in (module, getattr(module, "token_dispatcher", None)):
                if owner is not None:
                    state: dict[str, Any] = {
                        key: id(value) if callable(value) or isinstance(value, dict) else None
                        for key, value in vars(owner).items()
                    }
                    state |= {f"{key}.": list(value) for key, value in vars(owner).items() if key.endswith("hooks")}
                    found.append((name, state))
    return found


def train(workload: GPTWorkload, directory: str) -> dict[str, Any]:
    init_distributed()
    with cpu_megatron():
        gpt = build(workload)
        return {"layers": layer_numbers(gpt), **compare(gpt, directory, "module")}


def compare(gpt: Any, directory: str, level: str) -> dict[str, Any]:
    """The same step without and with module ranges: losses, gradients and parameters bit by bit, and what is left."""
    gpt.train_step()  # what the model itself sets up in its first step is there now
    before, state = surface(gpt.chunks), copy.deepcopy(gpt.optimizer.state_dict())
    saved = [parameter.detach().clone() for parameter in parameters(gpt)]
    plain = numbers(gpt)
    gpt.optimizer.load_state_dict(state)
    gpt.step -= 1
    with torch.no_grad():
        for parameter, old in zip(parameters(gpt), saved, strict=True):
            parameter.copy_(old)
    config = ProfileConfig(("train_actor",), directory, select="all", schedule="0", ranges=level)
    with install_hooks(gpt.chunks, config):
        ranged = numbers(gpt)
    changed = [name for (name, old), (_, new) in zip(before, surface(gpt.chunks), strict=True) if old != new]
    return {"plain": plain, "ranged": ranged, "changed": changed}


def parameters(gpt: Any) -> Iterator[torch.nn.Parameter]:
    return (parameter for chunk in gpt.chunks for parameter in chunk.parameters())


def numbers(gpt: Any) -> tuple[Any, ...]:
    result = gpt.train_step(), digests(gpt)
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return *result, sum(tensor.grad_fn is not None for tensor in tensors)  # graphs that the step left alive


def spans(directory: Path, rank: int) -> list[tuple[float, float, str]]:
    (path,) = [path for path in find_traces(directory) if f"rank{rank:05d}" in path.name]
    with gzip.open(path) if path.suffix == ".gz" else open(path) as file:
        events = json.load(file)["traceEvents"]
    found = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") == "user_annotation"]
    return sorted((s for s in found if parse(s[2])), key=lambda s: (s[0], -s[1]))


def parents(found: list[tuple[float, float, str]]) -> list[tuple[str, str | None]]:
    """Each range with the one around it; fails where two ranges overlap without one holding the other."""
    stack: list[tuple[float, float, str]] = []
    result = []
    for start, end, name in found:
        while stack and stack[-1][1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1][1], f"{name} overlaps {stack[-1][2]}"
        result.append((name, stack[-1][2] if stack else None))
        stack.append((start, end, name))
    return result


@pytest.mark.parametrize("name", EVERY)
def test_every_module_of_every_microbatch_forward_and_backward(name: str, one_rank: Any, tmp_path: Path) -> None:
    workload = WORKLOADS.get(name, one_rank.workload)
    moe = workload.experts is not None
    if name in WORKLOADS:
        ranks = run_ranks(train, workload.world_size, workload, str(tmp_path), timeout=180)
    else:
        ranks = [{"layers": layer_numbers(one_rank), **compare(one_rank, str(tmp_path), "module")}]
    for number, rank in enumerate(ranks):
        assert rank["ranged"] == rank["plain"]
        assert rank["changed"] == []
        found = parents(spans(tmp_path, number))
        count = Counter(name for name, _ in found)
        modules = {name: n for name, n in count.items() if (read := parse(name)) and read.module}
        for layer in (layer for chunk in rank["layers"] for layer in chunk):
            for label in ("layer", "attention", "mlp", *(("router", "experts") if moe else ())):
                forward = str(module_range(label, layer))
                assert (modules[forward], modules[module_backward(forward)]) == (workload.microbatches,) * 2, forward
        for name, times in modules.items():
            read = parse(name)
            assert read is not None
            # Tokens and probabilities go through the dispatcher side by side, and their gradients may come back so.
            twice = read.is_module_backward and read.module in DISPATCHER_STEPS
            assert times in ({workload.microbatches, 2 * workload.microbatches} if twice else {workload.microbatches})
        steps = {read.module for name in modules if (read := parse(name))} & {*DISPATCHER_STEPS}
        assert len(steps) in ((2, 6) if moe else (0,))
        first, last = 1 in rank["layers"][0], workload.layers in rank["layers"][-1]
        for label, has in (("embedding", first), ("output_layer", last)):
            for direction in (f"megaprof/{label}", f"megaprof/{label}_backward"):
                assert (direction in modules) is has

        inside = {"attention": "layer", "mlp": "layer", "router": "mlp", "experts": "mlp"}
        for child, parent in found:
            read, above = parse(child), parse(parent or "")
            if read is None or read.module is None:
                continue
            assert above is not None
            if read.module in ("embedding", "layer", "output_layer"):
                assert above.label == ("backward" if read.is_module_backward else "forward")
            else:
                assert above.module == inside.get(read.module, "mlp")
                assert above.fields == read.fields
                assert above.is_module_backward is read.is_module_backward


@pytest.fixture
def recomputing(one_rank: Any) -> Iterator[Any]:
    config, names = one_rank.config, ("recompute_granularity", "recompute_method", "recompute_num_layers")
    old = [getattr(config, name) for name in names]
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    yield one_rank
    for name, value in zip(names, old, strict=True):
        setattr(config, name, value)


def test_levels_and_recomputation(recomputing: Any, tmp_path: Path) -> None:
    found = compare(recomputing, str(tmp_path), "layer")
    assert found["ranged"] == found["plain"]
    assert found["changed"] == []
    ranges = parents(spans(tmp_path, 0))
    assert {read.module for name, _ in ranges if (read := parse(name))} == {None, "embedding", "layer", "output_layer"}
    within = Counter((name, (parent or "-").split()[0]) for name, parent in ranges)
    for layer in (1, 2):
        forward = str(module_range("layer", layer))
        for name, inside in ((forward, "forward"), (forward, "backward"), (module_backward(forward), "backward")):
            assert within[name, f"megaprof/{inside}"] == recomputing.workload.microbatches


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_passes_and_leaves_no_range_open(
    one_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(emit.nvtx, "push_range", lambda name, **_: opened.append(name))
    monkeypatch.setattr(emit.nvtx, "pop_range", lambda **_: opened.pop())
    mlp = one_rank.chunks[0].module.decoder.layers[1].mlp

    class Stop(BaseException):
        """What no except clause of torch's catches."""

    def fail(*_: Any) -> None:
        assert f"megaprof/mlp{'' if where == 'forward' else '_backward'} n=2" in opened
        raise Stop

    def fail_in_backward(module: Any, args: Any, output: Any) -> None:
        output[0].grad_fn.next_functions[0][0].register_prehook(fail)

    if where == "forward":
        hook = mlp.linear_fc1.register_forward_pre_hook(fail)
    else:
        hook = mlp.register_forward_hook(fail_in_backward)
    config = ProfileConfig(("train_actor",), str(tmp_path), schedule="0", ranges="module")
    before = surface(one_rank.chunks)
    try:
        with install_hooks(one_rank.chunks, config), pytest.raises(Stop):
            one_rank.train_step()
    finally:
        hook.remove()
    assert opened == []
    assert [name for name, _ in before] == [name for name, _ in surface(one_rank.chunks)]
    assert "forward" not in vars(mlp)
    (path,) = find_traces(tmp_path)
    assert read_trace(path).metadata.truncated


def test_nothing_is_on_the_modules_without_a_window(one_rank: Any, tmp_path: Path) -> None:
    inside = []
    layer = one_rank.chunks[0].module.decoder.layers[0]
    hook = layer.register_forward_hook(lambda *_: inside.append("forward" in vars(layer)))
    with install_hooks(one_rank.chunks, ProfileConfig(("train_actor",), str(tmp_path), schedule="1", ranges="layer")):
        for _ in range(3):
            one_rank.train_step()
    hook.remove()
    assert inside == [step == 1 for step in range(3) for _ in range(one_rank.workload.microbatches)]


class Tree(torch.nn.Module):
    """A module tree of any classes: only the attribute names are megatron-core's."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, torch.nn.ModuleList(value) if isinstance(value, list) else value)


class Dispatcher:
    def token_permutation(self) -> None: ...
    def token_unpermutation(self) -> None: ...


def test_roles_are_found_by_attribute_in_hybrid_mamba_moe_and_mtp_models() -> None:
    moe = Tree(router=Tree(), experts=Tree(), shared_experts=Tree(), token_dispatcher=Dispatcher())
    hybrid = Tree(
        embedding=Tree(),
        decoder=Tree(
            layers=[
                Tree(layer_number=3, mixer=Tree(), norm=Tree()),
                Tree(layer_number=4, self_attention=Tree(), cross_attention=IdentityOp(), mlp=IdentityOp()),
                Tree(layer_number=5, self_attention=IdentityOp(), mlp=moe),
            ]
        ),
        mtp=Tree(layers=[Tree(layer_number=1, mtp_model_layer=Tree(layers=[Tree(layer_number=1, mlp=Tree())]))]),
        output_layer=Tree(),
    )
    # LLaVA has the decoder of its language model as one of its own, too.
    llava = Tree(language_model=hybrid, decoder=hybrid.decoder)
    names = [str(name).removeprefix("megaprof/") for _, _, name in sites(llava)]
    assert names == [
        *("embedding", "output_layer", "layer n=3", "mixer n=3", "layer n=4", "attention n=4", "layer n=5", "mlp n=5"),
        *("router n=5", "experts n=5", "shared_experts n=5", "token_permutation n=5", "token_unpermutation n=5"),
        *("mtp_layer n=1", "layer mtp=1 n=1", "mlp mtp=1 n=1"),
    ]
    assert {parse(f"megaprof/{name}").module for name in names} <= MODULES  # type: ignore[union-attr]
    assert sum(name.label in OUTER_MODULES for _, _, name in sites(hybrid)) == 7


def test_the_layers_of_an_encoder_are_counted() -> None:
    layers = [Tree(layer_number=number, mlp=Tree()) for number in (1, 2)]
    t5 = describe_chunk(Tree(encoder=Tree(layers=layers), decoder=Tree(layers=layers[:1])))
    assert (t5["layers"], t5["kinds"], t5["layer_numbers"]) == (3, ["encoder", "encoder", "dense"], [1, 2, 1])
    assert describe_chunk(Tree(decoder=Tree(layers=layers)))["kinds"] == ["dense", "dense"]
    assert describe_chunk(Tree())["layers"] is None


def test_labels_are_one_vocabulary() -> None:
    assert set(LAYER_PARTS.values()) <= MODULES
    read = parse(module_backward(str(module_range("experts", 3, mtp=1))))
    assert read is not None
    assert (read.module, read.is_module_backward, read.fields) == ("experts", True, {"mtp": 1, "n": 3})
    for label in ("forward", "backward", "recv_backward", "finalize_grads"):
        read = parse(f"megaprof/{label}")
        assert read is not None
        assert (read.module, read.is_module_backward) == (None, False)
