"""The whole way on real megatron-core schedules: hooks, windows, recorders, files. One launch per parallel layout."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaprof.analysis.table.table import Table
from megaprof.formats import codes, ranges
from megaprof.formats import timeline as format
from megaprof.formats.facts import unpack_work
from megaprof.formats.ranges import COMBINED as COMBINED_PASS
from megaprof.formats.ranges import P2P_OPERATIONS, PASSES, OfPass, parse
from megaprof.formats.timeline import Timeline, read_timeline
from megaprof.parallel.schedules import EXCHANGES, RECEIVES, SENDS, PassId, PipelineSchedule, turns
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, run_ranks
from tests.analysis.tables import tables_in
from tests.built import digests, layer_numbers
from tests.formats.step_records import events_of

SMALL: dict[str, Any] = {"hidden": 64, "seq_length": 32, "layers": 4, "microbatches": 4}
WORKLOADS = {
    "pp1": GPTWorkload(**SMALL),
    "pp2": GPTWorkload(pp=2, layout=(3, 1), **SMALL),
    "pp4": GPTWorkload(pp=4, **SMALL),
    "pp2-vpp2-overlap": GPTWorkload(pp=2, vpp=2, **SMALL),
    "tp2-pp2": GPTWorkload(tp=2, pp=2, **SMALL),
    "ep2-pp2": GPTWorkload(ep=2, pp=2, **SMALL),
}
QUICK = ("pp2", "pp2-vpp2-overlap")
EVERY = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in WORKLOADS]
SCHEDULES = {"pp1": "no_pipelining", "pp2-vpp2-overlap": "interleaved"}
STEPS = 3


#: What is captured beside the timeline.
CAPTURED = (("train_actor", STEPS - 1, True), ("train_log_probs", 0, False))


def profile_flags(out: Path, *more: str) -> list[str]:
    """A trace of one training step and of one log-prob pass, and a timeline of everything."""
    steps = ";".join([*(f"{target}={step}" for target, step, _ in CAPTURED), "evaluate=none"])
    targets = ["--profile-target", "train_actor", "train_log_probs", "evaluate"]
    tools = ["--profile-tool", "torch", "timeline"]
    return [*targets, *tools, "--profile-dir", str(out), "--profile-steps", steps, *more]


Job = tuple[list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """What the ranks of a workload tell of themselves, and the directory of their files."""

    @functools.cache
    def ran(name: str) -> Job:
        workload, out = WORKLOADS[name], tmp_path_factory.mktemp(name)
        return run_ranks(
            train, workload.world_size, workload, profile_flags(out, "--profile-all-ranks"), timeout=240
        ), out

    return ran


def train(workload: GPTWorkload, flags: list[str]) -> dict[str, Any]:
    """A pretrain entrypoint: returns what the rank knows about itself, and what it computed."""
    import argparse

    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import add_profile_args, install_hooks

    args = add_profile_args(argparse.ArgumentParser()).parse_args(flags)
    rank, _ = init_distributed()
    with cpu_megatron():
        gpt = build(workload)
        coords = {
            "rank": rank,
            "pp": ps.get_pipeline_model_parallel_rank(),
            "tp": ps.get_tensor_model_parallel_rank(),
            "cp": ps.get_context_parallel_rank(),
            "ep": ps.get_expert_model_parallel_rank(),
            "dp": ps.get_data_parallel_rank(),
        }
        with install_hooks(gpt.chunks, args):
            forward_backward = get_forward_backward_func()
            losses = [gpt.train_step(forward_backward) for _ in range(STEPS)]
            gradients, _ = digests(gpt)
            log_probs = [tensor.sum().item() for tensor in gpt.log_probs_pass(forward_backward)]
            evaluation = gpt.evaluate(forward_backward)
            losses.append(gpt.train_step(forward_backward))
    return {
        "coords": coords,
        "layers": list(map(len, layer_numbers(gpt))),
        "numbers": (losses, gradients, digests(gpt)[1], log_probs, evaluation),
    }


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def timelines(directory: Path) -> dict[int, Timeline]:
    """By rank; every one is whole."""
    found = [read_timeline(path) for path in sorted(directory.rglob("*" + format.SUFFIX))]
    assert all(timeline.damage is None for timeline in found)
    return {timeline.metadata[0].coords.rank: timeline for timeline in found}


def events(timeline: Timeline, position: int) -> list[tuple[str, Any, int, int]]:
    found = events_of(timeline, position)
    assert found is not None
    named = []
    for code, start, end in zip(found.code.tolist(), found.start.tolist(), found.end.tolist(), strict=True):
        name = codes.name(code)
        assert name is not None
        named.append((name.label, tuple(name.fields.values()), start, end))
    return named


def ours(trace: dict[str, Any]) -> list[Any]:
    names = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    return [name for name in map(parse, names) if name is not None]


def ran(trace: dict[str, Any]) -> list[tuple[PassId, ...]]:
    """The passes of the one step in a trace, in order; those of one range together."""
    found = []
    for event in sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: float(e["ts"])):
        name = parse(event["name"])
        if name is not None and name.label in PASSES:
            fields = name.fields
            turn = [PassId(name.label, fields["chunk"], fields["mb"])]
            if name.label == COMBINED_PASS:
                turn = [turn[0]._replace(kind="forward"), PassId("backward", fields["bchunk"], fields["bmb"])]
            found.append(tuple(turn))
    return found


def received(trace: dict[str, Any]) -> list[tuple[OfPass, OfPass]]:
    """Of each exchange and wait that receives the input of a pass, and sends no result of one of that kind: the
    microbatch and chunk that it names, and those of the pass of that kind that runs next."""
    found, following = [], {}
    for event in sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: -float(e["ts"])):
        name = parse(event["name"])
        if name is None:
            continue
        if name.label in PASSES:
            following[name.label] = name.fields["mb"], name.fields["chunk"]
        elif transfers := ranges.transfers(name.label):
            of = [kind for kind in SENDS if {SENDS[kind], RECEIVES[kind]} & set(transfers)]
            found += [
                ((name.fields[f"{prefix}mb"], name.fields[f"{prefix}chunk"]), following[kind])
                for prefix, kind in zip(("", "b"), of, strict=False)
                if SENDS[kind] not in transfers
            ]
    return found


@pytest.mark.parametrize("name", EVERY)
def test_traces_agree_with_the_ranks_true_coordinates(name: str, job: Callable[[str], Job]) -> None:
    workload = WORKLOADS[name]
    ranks, out = job(name)
    assert len(list(out.rglob("*.pt.trace.json.gz"))) == 2 * workload.world_size
    for rank in ranks:
        c = rank["coords"]
        place = f"pp{c['pp']}-tp{c['tp']}-cp{c['cp']}-ep{c['ep']}-dp{c['dp']}.rank{c['rank']:05d}"
        for target, step, backwards in CAPTURED:
            trace = read(out / f"{target}.step{step:06d}.{place}.pt.trace.json.gz")
            meta = trace["megaprof"]
            assert meta["coords"] == c
            assert (meta["target"], meta["steps"], meta["truncated"]) == (target, [step, step], False)
            assert meta["sizes"]["pp"] == workload.pp
            assert meta["sizes"]["tp"] == workload.tp
            assert meta["sizes"]["ep"] == workload.ep
            assert meta["sizes"]["vpp"] == (workload.vpp or 1)
            assert meta["microbatches"] == workload.microbatches
            assert meta["schedule"] == SCHEDULES.get(name, "1f1b")
            assert meta["forward_only"] is not backwards
            assert [chunk["layers"] for chunk in meta["chunks"]] == rank["layers"]
            assert meta["chunks"][0]["embedding"] is (c["pp"] == 0)
            assert meta["chunks"][-1]["loss"] is (c["pp"] == workload.pp - 1)
            assert {kind for chunk in meta["chunks"] for kind in chunk["kinds"]} == {
                "moe" if workload.ep > 1 else "dense"
            }

            found = ours(trace)
            outermost = [r for r in found if r.label == target]
            assert [r.fields for r in outermost] == [{"step": step, **{k: v for k, v in c.items() if k != "rank"}}]
            every = Counter((mb, chunk) for mb in range(workload.microbatches) for chunk in range(len(rank["layers"])))
            for label, expected in (("forward", every), ("backward", every if backwards else Counter())):
                assert Counter((r.fields["mb"], r.fields["chunk"]) for r in found if r.label == label) == expected
            sent = Counter(
                (r.fields["mb"], r.fields["chunk"]) for r in found if "send_next" in EXCHANGES.get(r.label, ())
            )
            assert sent == every if meta["schedule"] == "1f1b" else sent.keys() <= every.keys()
            assert all(r.fields and None not in r.fields.values() for r in found if ranges.transfers(r.label))
            assert bool(received(trace)) == (workload.pp > 1)
            assert all(named == runs for named, runs in received(trace))
            exchanges = {r.label for r in found if ranges.transfers(r.label)}
            assert exchanges <= {
                *P2P_OPERATIONS,
                "wait_recv_prev",
                "wait_recv_next",
                "wait_send_prev",
                "wait_send_next",
            }
            assert bool(exchanges) == (workload.pp > 1)
            if workload.vpp and backwards:  # a forward-only pass exchanges and waits at once
                assert {"wait_recv_prev"} <= exchanges
            assert ("finalize_grads" in {r.label for r in found}) is backwards

    if name == "pp2":  # a capture changes no bit
        plain = run_ranks(train, 2, workload, [], timeout=180)
        assert [rank["numbers"] for rank in ranks] == [rank["numbers"] for rank in plain]
        assert plain[1]["numbers"][0][0] != plain[1]["numbers"][0][1], "the model did not learn: nothing was compared"


@pytest.mark.parametrize("name", EVERY)
def test_every_phase_of_every_step_is_in_the_timeline(name: str, job: Callable[[str], Job]) -> None:
    workload = WORKLOADS[name]
    known, out = job(name)
    read = timelines(out)
    assert sorted(read) == list(range(workload.world_size))
    for truth in known:
        timeline = read[truth["coords"]["rank"]]
        passes = [
            (timeline.metadata[step["metadata"]].target, int(step["step"]), int(step["index"]))
            for step in timeline.steps
        ]
        assert passes == [
            *(("train_actor", step, 0) for step in range(STEPS)),
            ("train_log_probs", 0, 0),
            ("evaluate", 0, 0),
            ("train_actor", STEPS, 0),
        ]
        assert {key: getattr(timeline.metadata[0].coords, key) for key in truth["coords"]} == truth["coords"]
        assert [chunk.layers for chunk in timeline.metadata[0].chunks] == truth["layers"]
        chunks = workload.vpp or 1
        each = [(microbatch, chunk) for chunk in range(chunks) for microbatch in range(workload.microbatches)]
        captured = [index for index, step in enumerate(passes) if step[:2] in {window[:2] for window in CAPTURED}]
        disturbed = {index + behind for index in captured for behind in (0, 1)}
        for position, (target, _, _) in enumerate(passes):
            here = events(timeline, position)
            forwards = [where for label, where, _, _ in here if label == "forward"]
            backwards = [where for label, where, _, _ in here if label == "backward"]
            assert sorted(forwards) == sorted(each)
            assert sorted(backwards) == (sorted(each) if target == "train_actor" else [])
            fixed = timeline.steps[position]
            # Times of a step are kept in 16 bits: past 65 ms in units of 2 us, past 131 ms of 4 us.
            starts = [0, *(start for _, _, start, _ in here)]
            longest = max(*(end - start for _, _, start, end in here), *(b - a for a, b in itertools.pairwise(starts)))
            resolution = 1 if longest < 1 << 15 else 1 << (longest.bit_length() - 15)
            assert all(0 <= start <= end <= fixed["duration"] + resolution for _, _, start, end in here)
            for kind in ("forward", "backward"):
                lengths = [end - start for label, _, start, end in here if label == kind]
                assert abs(int(fixed[kind]) - sum(lengths)) <= len(lengths) * (resolution - 1)
            assert [label for label, *_ in here].count("finalize_grads") == (target == "train_actor")
            if workload.pp > 1:
                assert 0 < fixed["p2p"] < fixed["duration"]
            assert fixed["own"] > 0
            assert fixed["flags"] in ((format.DISTURBED,) if position in disturbed else (0, format.DISTURBED))
            if not {position, position + 1} & disturbed:  # the profiler may be prepared behind the call before
                assert fixed["flags"] == 0
        # Steps of one kind have one shape, and an evaluation runs as a log-prob pass does.
        assert len(timeline.shapes) == 2


COMBINED: dict[str, Any] = {
    "ep": 2,
    "options": {"overlap_moe_expert_parallel_comm": True},
    "dtype": "bfloat16",
    **SMALL,
}


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(GPTWorkload(**COMBINED), id="ep2", marks=pytest.mark.slow),
        pytest.param(GPTWorkload(pp=2, vpp=2, **COMBINED), id="pp2-vpp2-ep2", marks=pytest.mark.slow),
    ],
)
def test_combined_1f1b_names_both_microbatches(workload: GPTWorkload, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.pipeline_parallel.combined_1f1b", reason="megatron-core 0.14 brought it")
    flags = profile_flags(tmp_path, "--profile-select", "per-stage", "--profile-ranges", "module")
    ranks = run_ranks(train, workload.world_size, workload, flags, timeout=180)
    chunks = workload.vpp or 1
    every = Counter((mb, chunk) for mb in range(workload.microbatches) for chunk in range(chunks))
    files = list(tmp_path.glob("train_actor.*.trace.json.gz"))
    assert len(files) == workload.pp
    assert {int(path.name.split("rank")[1][:5]) for path in files} <= {rank["coords"]["rank"] for rank in ranks}
    for path in files:
        trace = read(path)
        found = ours(trace)
        without = {each["module"]: each["reason"] for each in trace["megaprof"]["ranges"]["without"]}
        assert without == dict.fromkeys(("layer", "mlp"), "the combined 1F1B schedule calls its parts itself")
        assert {"attention", "router"} <= {r.module for r in found}
        both = [r.fields for r in found if r.label == "combined"]
        assert both, "nothing was overlapped"
        forward = Counter((r.fields["mb"], r.fields["chunk"]) for r in found if r.label == "forward")
        backward = Counter((r.fields["mb"], r.fields["chunk"]) for r in found if r.label == "backward")
        assert forward + Counter((fields["mb"], fields["chunk"]) for fields in both) == every
        assert backward + Counter((fields["bmb"], fields["bchunk"]) for fields in both) == every
        schedule = PipelineSchedule.checked(workload.pp, chunks, workload.microbatches, combined=True)
        assert ran(trace) == turns(schedule, trace["megaprof"]["coords"]["pp"])
    (table,) = (table for key, table in tables_in(tmp_path).items() if key.target == "train_actor")
    assert isinstance(table, Table), table
    assert table.schedule.combined
    assert (table.passes > 0).all()
    for timeline in timelines(tmp_path).values():
        here = events(timeline, 0)
        kinds = Counter(label for label, *_ in here)
        each = workload.microbatches * chunks
        assert kinds["combined"] > 0
        assert kinds["forward"] + kinds["combined"] == kinds["backward"] + kinds["combined"] == each
        assert all(None not in where for label, where, _, _ in here if label == "combined")
        assert timeline.steps[0]["combined"] > 0
        work = unpack_work(timeline.facts(format.WORK)[0])
        assert work is not None, "the hook on the model did not see its plan"
        assert (work[1][:, 0] == workload.seq_length * workload.micro_batch_size).all()
