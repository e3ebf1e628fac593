"""Recordings that megaprof did not make: every number is in them, and nothing else is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megaprof.analysis.notes import Note, of_files
from megaprof.analysis.report.report import analyze
from megaprof.cli import main
from megaprof.foreign import Foreign
from megaprof.formats import inputs
from megaprof.formats.phrases import Unanswerable
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder
from tests.cli.running import check
from tests.nsys.written import write_nsys

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
TP = "TENSOR_MODEL_PARALLEL_GROUP"


class Job:
    """A trace by the torch profiler; times in milliseconds."""

    def __init__(self, rank: int | None = 0, world: int = 4) -> None:
        self.events: list[Any] = []
        self.about: dict[str, Any] = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": world}}

    def event(self, cat: str, name: str, start: float, length: float, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 7, "ts": start * 1e3, "dur": length * 1e3}
        )
        self.events[-1]["args"] = args

    def kernel(self, name: str, start: float, length: float, *, launch: float | None = None, **args: Any) -> None:
        number = len(self.events) + 1
        self.event(
            "cuda_runtime", "cudaLaunchKernel", start - 0.1 if launch is None else launch, 0.01, correlation=number
        )
        self.event("kernel", name, start, length, correlation=number, **args)

    def reduce(self, start: float, length: float, ranks: list[int], description: str = "undefined") -> None:
        self.kernel(
            ALL_REDUCE, start, length,
            **{"Process Group Ranks": str(ranks), "Process Group Description": description,
               "Process Group Name": "3", "Collective name": "allreduce"},
        )  # fmt: skip

    def write(self, path: Path, *, bare: bool = False) -> Path:
        path.write_text(json.dumps(self.events if bare else {**self.about, "traceEvents": self.events}))
        return path


def foreign(path: Path) -> Foreign:
    report = analyze(path)
    assert report.targets == ()
    assert report.foreign is not None
    check("report", report.to_json())
    return report.foreign


@pytest.fixture
def job() -> Job:
    """Computes from 0 to 10 and from 12 to 20; reduces from 8 to 12, half of it beside computation."""
    job = Job()
    job.kernel("gemm", 0, 10)
    job.reduce(8, 4, [0, 1])
    job.kernel("gemm", 12, 8, launch=0.5)
    return job


def test_times_of_a_rank(job: Job, tmp_path: Path) -> None:
    job.kernel("gemm", 25, 5, launch=24)
    job.kernel("gemm", 34, 6, launch=29)
    job.event("user_annotation", "ProfilerStep#7", 0, 40)
    (rank,) = foreign(job.write(tmp_path / "a.json")).ranks
    assert (rank.rank, rank.rank_from, rank.steps, rank.step_ms) == (0, "the trace", 1, 40)
    assert (rank.span_ms, rank.compute_ms, rank.idle_ms) == (40, 29, 9)
    assert rank.host_bound_ms == 5, "the other gap had its kernel launched before it began"
    (lost,) = rank.exposed
    assert (lost.operation, lost.group, lost.axis, lost.calls, lost.ms) == ("allreduce", "ranks 0-1", None, 1, 2)


def test_communication_of_two_groups_at_once_is_lost_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()
    job.kernel("gemm", 0, 10)
    job.reduce(10, 20, [0, 1])
    job.reduce(15, 20, [0, 2])
    job.kernel("gemm", 35, 10)
    path = job.write(tmp_path / "a.json")
    (rank,) = foreign(path).ranks
    assert ([each.ms for each in rank.exposed], rank.exposed_ms) == ([20, 20], 25)
    assert main(["report", str(path)]) == 0
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.split()[1:3] == ["the", "trace"])
    assert [float(cell) for cell in row[5:]] == [45, 20, 25, 0, 0]  # recorded, compute, exposed, idle, host bound


def test_a_bare_list_of_events_is_a_trace(job: Job, tmp_path: Path) -> None:
    (rank,) = foreign(job.write(tmp_path / "rank3.json", bare=True)).ranks
    assert (rank.rank, rank.rank_from, rank.compute_ms) == (3, "file name", 18)


@pytest.mark.parametrize(("description", "axis"), [(TP, "tp"), ("undefined", None), ("mine", None)])
def test_a_group_is_called_what_its_description_says(description: str, axis: str | None, tmp_path: Path) -> None:
    job = Job()
    job.kernel("gemm", 0, 1)
    job.reduce(2, 1, [0, 1], description)
    (rank,) = foreign(job.write(tmp_path / "a.json")).ranks
    assert rank.exposed[0].axis == axis


def test_send_receive_is_told_from_all_to_all_by_annotations_only(tmp_path: Path) -> None:
    job = Job()
    job.kernel(SEND_RECV, 0, 1, launch=-1)
    job.event("user_annotation", "nccl:all_to_all", 4.5, 1)
    job.kernel(SEND_RECV, 6, 1, launch=5)
    job.event("user_annotation", "nccl:send 0->1", 9.5, 1)
    job.kernel(SEND_RECV, 11, 1, launch=10)
    found = foreign(job.write(tmp_path / "a.json"))
    assert {e.operation for e in found.ranks[0].exposed} == {"send-receive or all-to-all", "alltoall", "send-receive"}
    assert [note.kind for note in found.warnings] == ["groups_unnamed"] * 2


def test_rccl_kernels_take_the_group_of_their_operator(tmp_path: Path) -> None:
    job = Job()
    job.event("cpu_op", "record_param_comms", 0, 1, **{"External id": 5, "Process Group Ranks": "[0, 1]"})
    job.events[-1]["args"] |= {"Collective name": "allreduce", "Process Group Name": "2"}
    job.kernel("ncclDevKernel_Generic(ncclDevComm*)", 2, 1, **{"External id": 5})
    (rank,) = foreign(job.write(tmp_path / "a.json")).ranks
    assert (rank.exposed[0].operation, rank.exposed[0].group) == ("allreduce", "ranks 0-1")


def test_who_comes_last(tmp_path: Path) -> None:
    """Rank 1's kernels are the shortest: it comes when the others wait already. Clocks that are a little apart do not
    matter."""
    for rank in range(3):
        job = Job(rank, 3)
        for number in range(5):
            length = 1 if rank == 1 else 5
            job.reduce(20 * rank + 10 * number + 5 - length, length, [0, 1, 2])
        job.write(tmp_path / f"{rank}.pt.trace.json")
    (late,) = foreign(tmp_path).late
    assert (late.rank, late.times, late.matched, late.waited_ms, late.group) == (1, 5, 5, 4, "ranks 0-2")


def test_what_others_wait_for_is_counted_where_the_rank_came_last(tmp_path: Path) -> None:
    for rank in range(2):
        job = Job(rank, 2)
        for number in range(10):
            length = (9, 5)[rank] if number < 9 else (1, 30)[rank]  # the other rank comes last to the last one
            job.reduce(40 * number + 30 - length, length, [0, 1])
        job.write(tmp_path / f"{rank}.pt.trace.json")
    (late,) = foreign(tmp_path).late
    assert (late.rank, late.times, late.matched, late.waited_ms) == (1, 9, 10, 4)


@pytest.mark.parametrize(("ranks", "times", "of", "is_said"), [(2, 9, 17, False), (2, 16, 17, True), (8, 9, 17, True)])
def test_who_comes_last_by_chance_is_not_said(ranks: int, times: int, of: int, is_said: bool, tmp_path: Path) -> None:
    """Of two ranks, one comes last to half of all collectives; of eight, to an eighth."""
    for rank in range(ranks):
        job = Job(rank, ranks)
        for number in range(of):
            last = 1 if number < times else 0
            length = 1 if rank == last else 5
            job.reduce(20 * number + 10 - length, length, [*range(ranks)])
        job.write(tmp_path / f"{rank}.pt.trace.json")
    assert [(each.rank, each.times) for each in foreign(tmp_path).late] == [(1, times)] * is_said


def test_groups_without_ranks_are_matched_by_the_name_that_torch_gave_them(tmp_path: Path) -> None:
    for rank in range(2):
        job = Job(rank, 2)
        for number in range(8):
            about = {"Process Group Name": "5", "Collective name": "allreduce"}
            job.kernel(ALL_REDUCE, 10 * number, 1 if rank else 3, **about)
            job.kernel(ALL_REDUCE, 10 * number + 5, 1, **about, **{"Process Group Description": TP})
            job.kernel(ALL_REDUCE, 10 * number + 7, 1)
        job.write(tmp_path / f"{rank}.pt.trace.json")
    (late,) = foreign(tmp_path).late
    assert (late.group, late.rank, late.times, late.matched, late.waited_ms) == ("group 5", 1, 8, 8, 2)


def test_collectives_that_one_rank_lacks_are_not_matched(tmp_path: Path) -> None:
    for rank in range(2):
        job = Job(rank, 2)
        for number in range(5 - rank):
            job.reduce(10 * number, 2, [0, 1])
        job.write(tmp_path / f"{rank}.pt.trace.json")
    assert foreign(tmp_path).late == ()


def test_a_file_of_nsys_without_our_ranges(tmp_path: Path) -> None:
    write(Scenario("gpu", layers=(2, 2), microbatches=2), tmp_path / "kineto")
    from tests.nsys.test_files import as_nsys, edit

    as_nsys(tmp_path / "kineto", tmp_path / "nsys")
    (tmp_path / "nsys").joinpath("x").mkdir()
    for path in (tmp_path / "nsys").glob("*.json"):
        path.unlink()
    for path in (tmp_path / "nsys").glob("*.sqlite"):
        edit(path, "DELETE FROM NVTX_EVENTS")
    ours = analyze(tmp_path / "kineto").targets[0].stages
    found = foreign(tmp_path / "nsys")
    assert [(rank.rank, rank.rank_from) for rank in found.ranks] == [(0, "file name"), (1, "file name")]
    for rank, stage in zip(found.ranks, ours, strict=True):
        assert rank.compute_ms == pytest.approx(stage.compute_ms.mean, rel=1e-3)
        assert {each.operation for each in rank.exposed} == {"send-receive or all-to-all"}


@pytest.mark.parametrize(
    ("name", "steps"),
    [("iteration 5", 1), ("ProfilerStep#5", 1), ("train_step_5", 1), ("optimizer step", 0), ("stepwise 5 times", 0)],
)
def test_a_file_of_nsys_has_the_steps_that_its_ranges_are_called_like(tmp_path: Path, name: str, steps: int) -> None:
    write(Scenario("gpu", layers=(2, 2), microbatches=2), tmp_path / "kineto")
    from tests.nsys.test_files import as_nsys, edit

    as_nsys(tmp_path / "kineto", tmp_path / "nsys")
    for path in (tmp_path / "nsys").glob("*.json"):
        path.unlink()
    wide = "(SELECT MAX(end - start) FROM NVTX_EVENTS)"
    for path in (tmp_path / "nsys").glob("*.sqlite"):
        edit(
            path,
            f"DELETE FROM NVTX_EVENTS WHERE end - start < {wide}",
            f"UPDATE NVTX_EVENTS SET text = '{name}', textId = NULL",
            # A shorter one inside it is no second step.
            "INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, text) "
            f"SELECT start + 10, end - 10, eventType, globalTid, '{name}' FROM NVTX_EVENTS",
        )
    for rank in foreign(tmp_path / "nsys").ranks:
        assert rank.steps == steps
        assert steps == 0 or rank.span_ms < (rank.step_ms or 0) < 2 * rank.span_ms


def test_the_report_says_what_to_record(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job.write(tmp_path / "a.json")
    assert main(["report", str(path), "--html", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--profile-target train_actor --profile-select per-stage" in shown
    assert "ranks 0-1" in shown
    assert "drag it into https://ui.perfetto.dev" in shown
    assert "megaprof open" not in shown  # it merges traces with ranges only
    plain = json.loads((tmp_path / "r.json").read_text())
    assert (plain["targets"], plain["foreign"]["ranks"][0]["file"]) == ([], "a.json")
    assert "ranks 0-1" in (tmp_path / "r.html").read_text()


def test_only_what_a_viewer_reads_is_to_be_dragged_into_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Scenario("gpu", layers=(2, 2), microbatches=2), tmp_path / "kineto")
    from tests.nsys.test_files import as_nsys

    as_nsys(tmp_path / "kineto", tmp_path / "nsys")
    for name in ("kineto", "nsys"):
        assert main(["report", str(tmp_path / name)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("drag it into" in shown) is (name == "kineto")
        assert "megaprof open" in shown


def test_a_trace_without_a_gpu_is_refused_as_before(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.event("aten::mm", 0, 1, cat="cpu_op")
    document = trace.document()
    del document["megaprof"]
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(Unanswerable, match="it was not written by megaprof"):
        analyze(tmp_path / "a.json")


def test_ours_beside_foreign_ones_stay_a_stage_report(job: Job, tmp_path: Path) -> None:
    trace = TraceBuilder(microbatches=1)
    trace.call(0, 40)
    trace.forward(0, 0, 10)
    trace.backward(0, 10, 20)
    write_nsys(trace, tmp_path)
    for number in range(5):
        job.write(tmp_path / f"{number}.pt.trace.json")
    report = analyze(tmp_path)
    assert report.foreign is None
    assert len(report.targets) == 1
    (note,) = report.warnings
    assert (note.kind, note.count, note.files) == ("skipped", 5, ("0.pt.trace.json", "1.pt.trace.json"))
    assert note.said.startswith("it was not written by")


def test_refusals_of_one_kind_are_one_line() -> None:
    files = [Note("skipped", files=(name,), said="it is empty") for name in "abcd"]
    assert [each.count for each in of_files([*files, Note("skipped", files=("x",), said="y"), *files])] == [4, 0]
    assert [*of_files(files[:3])] == files[:3]


def test_kernels_of_libraries_that_name_no_group(tmp_path: Path) -> None:
    job = Job()
    job.kernel("gemm", 0, 10)
    job.kernel("void deep_ep::intranode::dispatch<8>(int4*)", 10, 2)
    job.kernel("void mori::moe::EpCombineIntraNodeKernel<float>(float*)", 14, 1)
    job.kernel("nvshmemi_transfer_rma_p2p", 16, 1)
    found = foreign(job.write(tmp_path / "a.json"))
    assert found.ranks[0].compute_ms == 10
    assert {(each.operation, each.axis, each.ms) for each in found.ranks[0].exposed} == {
        ("dispatch", "ep", 2), ("combine", "ep", 1), ("communication", None, 1)
    }  # fmt: skip


def test_copies_of_a_collective_communicate(tmp_path: Path) -> None:
    """Copy engines run it; other copies compute."""
    job = Job()
    job.event("cpu_op", "record_param_comms", 0, 1, **{"External id": 5, "Process Group Ranks": "[0, 1]"})
    job.events[-1]["args"] |= {"Collective name": "allgather", "Process Group Description": "mesh_tp"}
    for number in (5, 6):
        job.kernel("Memcpy DtoD (Device -> Device)", number, 1, **{"External id": number})
        job.events[-1]["cat"] = "gpu_memcpy"
    job.kernel("gemm", 8, 1)
    (rank,) = foreign(job.write(tmp_path / "a.json")).ranks
    assert [(each.operation, each.axis, each.ms) for each in rank.exposed] == [("allgather", "tp", 1)]
    assert rank.compute_ms == 2


def test_what_the_host_delayed_is_unknown_without_launches(tmp_path: Path) -> None:
    job = Job()
    job.kernel("gemm", 0, 10, launch=0)
    job.kernel("gemm", 15, 5, launch=14)
    for event in job.events[::2]:
        event["cat"] = "xpu_runtime"
        event["name"] = "urEnqueueKernelLaunch"
    assert foreign(job.write(tmp_path / "a.json")).ranks[0].host_bound_ms == 5
    del job.events[::2]
    assert foreign(job.write(tmp_path / "a.json")).ranks[0].host_bound_ms is None


def test_times_that_cannot_be_true(tmp_path: Path) -> None:
    job = Job()
    for number in range(200):
        job.kernel("gemm", 1e9 + number, 1)
    job.events[-1] |= {"ts": 0.0, "dur": 0.0}  # without it, the recording is no 11 days long
    job.events[101]["dur"] = 150e3  # ends where the next one begins
    path = job.write(tmp_path / "a.json")
    found = foreign(path)
    assert (found.ranks[0].span_ms, found.ranks[0].compute_ms) == (199, 199)
    assert {note.kind: note.count for note in found.warnings}["events_left_out"] == 1
    for event in job.events[1::20]:
        event |= {"ts": 0.0, "dur": 0.0}
    job.write(path)
    with pytest.raises(Unanswerable, match="10% of its kernels cannot be true"):
        analyze(path)


def windows(directory: Path, *recorded: tuple[int, int, float], steps: bool = True) -> Foreign:
    """``recorded``: window, rank and milliseconds of each of eight collectives."""
    for window, rank, length in recorded:
        job = Job(rank, 2)
        for number in range(8):
            job.reduce(1000 * window + 20 * number + 10 - length, length, [0, 1])
        if steps:
            job.event("user_annotation", f"ProfilerStep#{window}", 1000 * window, 200)
        job.write(directory / f"node_{rank}.{window}.pt.trace.json")
    return foreign(directory)


@pytest.mark.parametrize("steps", [True, False])
def test_recordings_of_different_windows_are_not_compared(steps: bool, tmp_path: Path) -> None:
    found = windows(tmp_path, (1, 0, 5), (1, 1, 4), (2, 0, 1), steps=steps)
    assert [(rank.window, rank.rank) for rank in found.ranks] == [(1, 0), (1, 1), (2, 0)]
    (late,) = found.late
    assert (late.rank, late.times, late.matched, late.waited_ms) == (1, 8, 8, 1)


def test_ranks_of_different_windows_alone_are_not_compared(tmp_path: Path) -> None:
    assert windows(tmp_path, (1, 0, 5), (2, 1, 4)).late == ()


def test_all_windows_count(tmp_path: Path) -> None:
    recorded = [(1, 0, 5), (1, 1, 4), (2, 0, 5), (2, 1, 3), (3, 0, 2), (3, 1, 4), (4, 0, 6), (4, 1, 3)]
    (late,) = windows(tmp_path, *recorded).late
    assert (late.rank, late.times, late.matched, late.waited_ms) == (1, 24, 32, 2)


def test_who_came_last_is_unknown_if_all_came_together(tmp_path: Path) -> None:
    assert windows(tmp_path, (1, 0, 5), (1, 1, 5)).late == ()


def test_the_folders_of_roles_are_read_and_kept_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As verl's torch profiler writes them: trainers and rollouts."""
    for role, slow in (("actor_update", 1), ("ref_compute_log_prob", 0)):
        for rank in range(2):
            job = Job(rank, 2)
            for number in range(8):
                job.reduce(20 * number + 10, 1 if rank == slow else 4, [0, 1])
            (tmp_path / role).mkdir(exist_ok=True)
            job.write(tmp_path / role / f"prof_rank-{rank}_031904.json")
    (tmp_path / "agent_loop_rollout_replica_0").mkdir()
    job.write(tmp_path / "agent_loop_rollout_replica_0" / "node1_372640.1771730291744166997.pt.trace.json")
    found = foreign(tmp_path)
    assert [(rank.file.partition("/")[0], rank.rank) for rank in found.ranks] == [
        ("actor_update", 0), ("actor_update", 1), ("agent_loop_rollout_replica_0", 1),
        ("ref_compute_log_prob", 0), ("ref_compute_log_prob", 1),
    ]  # fmt: skip
    late = {(each.folder, each.rank, each.times, each.matched) for each in found.late}
    assert late == {("actor_update", 1, 8, 8), ("ref_compute_log_prob", 0, 8, 8)}
    assert main(["report", str(tmp_path)]) == 0
    assert ["3", "ref_compute_log_prob"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    memory = fsspec.filesystem("memory")
    for path in tmp_path.glob("*/*"):
        memory.pipe_file(f"/verl/{path.relative_to(tmp_path)}", path.read_bytes())
    assert foreign(inputs.path_of("memory://verl")) == found


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("trace_view.json", [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "Overlap Analysis"}},
                             {"ph": "X", "name": "Computing", "pid": 1, "tid": 2, "ts": "1773285899055563.250"}],
         "Ascend NPU"),
        ("1_results.json", {"rocprofiler-sdk-tool": [{"metadata": {}}]}, "rocprofv3"),
        ("1_results.db", {}, "rocprofv3"),
        ("1_results.pftrace", {}, "rocprofv3"),
        ("a.pt.trace.json", {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}]},
         "no kernels of a GPU"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_a_file_is(name: str, content: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "host" / name
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    for place in (tmp_path, path):
        with pytest.raises(Unanswerable, match=said):
            analyze(place)
