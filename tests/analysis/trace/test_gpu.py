"""GPU traces: whose time a kernel is, whose communication, and what the GPU waited for."""

from __future__ import annotations

import math

import pytest

from megaprof.analysis.report.report import analyze
from megaprof.analysis.table.matching import ends_of
from megaprof.analysis.trace import groups
from megaprof.analysis.trace.steps import steps_of
from megaprof.analysis.trace.traces import find_traces, read_trace
from tests.analysis.kineto import launched
from tests.analysis.rows import rows
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import TraceBuilder, chunk, kinds
from tests.analysis.tables import stages_of
from tests.analysis.truth.files import AUTOGRAD, GROUPS


class Gpu:
    """A trace to which kernels are added, in milliseconds; the launch is 0.1 before the kernel where not given."""

    def __init__(self, **options):
        self.trace = TraceBuilder(**options)
        self.count = 0

    def kernel(self, start, duration, *, launch=None, name="gemm", thread=1, stream=7, group=None, pg=None, **options):
        self.count += 1
        launch = start - 0.1 if launch is None else launch
        pg = GROUPS[group] if pg is None and group is not None else pg
        launched(self.trace.events, self.count, name, start, duration, launch, thread, stream, group=pg, **options)

    def nccl(self, start, duration, *, group=None, name="ncclDevKernel_AllReduce_Sum_bf16_RING_LL", **options):
        self.kernel(start, duration, name=name, stream=20, group=group, **options)

    def call(self, directory):
        (call,) = steps_of(read_trace(self.trace.write(directory)))
        return call

    def stage(self, directory):
        (target,) = stages_of([self.call(directory)])
        return target.stages[0], target


@pytest.fixture
def step():
    """Forward 0 to 10 and backward 20 to 30 on the host, one microbatch."""
    gpu = Gpu(microbatches=1, sizes={"tp": 2, "dp": 2})
    gpu.trace.call(0, 50)
    gpu.trace.forward(0, 0, 10)
    gpu.trace.backward(0, 20, 10)
    return gpu


def times(call):
    return {each.kind: each.compute / 1e6 for each in rows(call)}


def exposed(call):
    """Nanoseconds by group in passes, or else until the last one ended."""
    of_passes = {group: int(ns.sum()) for group, ns in call.passes.exposed.items() if ns.any()}
    return of_passes or {
        group: call.spent[group] for group in ("tp", "ep", "cp", "dp", "unknown") if call.spent[group] > 0
    }


class TestAttribution:
    def test_a_kernel_belongs_to_the_range_that_was_open_at_its_launch(self, step, tmp_path):
        step.kernel(9.5, 20, launch=9)  # runs long after the forward's range has ended
        step.kernel(31, 5, launch=25, thread=AUTOGRAD)
        step.kernel(40, 7, launch=15)  # between the two: neither
        call = step.call(tmp_path)
        assert times(call) == {"forward": 20, "backward": 5}
        assert [(each.start, each.end) for each in rows(call)] == [
            tuple(call.host[0] + round(ms * 1e6) for ms in span) for span in ((9.5, 29.5), (31, 36))
        ]

    def test_parallel_streams_count_once(self, step, tmp_path):
        step.kernel(1, 4)
        step.kernel(3, 4, stream=9)
        step.kernel(21, 1)
        assert times(step.call(tmp_path))["forward"] == 6

    def test_copies_and_memsets_are_work(self, step, tmp_path):
        step.kernel(1, 4)
        step.kernel(6, 2)
        step.trace.events[-1]["cat"] = "gpu_memcpy"
        assert times(step.call(tmp_path))["forward"] == 6

    def test_the_hosts_time_stands_beside_the_gpus(self, step, tmp_path):
        step.kernel(1, 4)
        step.kernel(21, 3)
        stage, _ = step.stage(tmp_path)
        assert (stage.forward_ms.mean, stage.backward_ms.mean, stage.compute_ms.mean) == (4, 3, 7)
        assert {kind: spread.mean for kind, spread in stage.host_ms.items()} == {"forward": 10, "backward": 10}

    def test_activities_without_a_launch_are_left_out_and_said(self, step, tmp_path):
        step.kernel(1, 4)
        step.kernel(5, 4)
        del step.trace.events[-2]
        step.kernel(21, 3)
        stage, target = step.stage(tmp_path)
        assert stage.forward_ms.mean == 4
        assert "events_left_out" in kinds(target.warnings)

    def test_what_still_runs_from_the_step_before_is_not_of_this_one(self, step, tmp_path):
        """It was launched before the recording began, so nothing in the recording says when."""
        step.kernel(2, 6)
        del step.trace.events[-2]
        step.kernel(9, 4, launch=1)
        step.kernel(21, 3)
        call = step.call(tmp_path)
        assert (call.extent[0], call.reasons) == (call.host[0] + 8_000_000, ())

    def test_a_combined_pass_is_not_split(self, tmp_path):
        gpu = Gpu(microbatches=1)
        gpu.trace.call(0, 50)
        gpu.trace.event("megaprof/combined mb=0 chunk=0 bmb=0 bchunk=0", 0, 20)
        gpu.kernel(1, 10)
        stage, target = gpu.stage(tmp_path)
        assert (stage.forward_ms, stage.backward_ms, stage.compute_ms.mean) == (None, None, 10)
        assert "passes_unknown" in kinds(target.warnings)

    def test_modules(self, step, tmp_path):
        for name, start, end in (
            ("layer n=3", 0, 9),
            ("attention n=3", 1, 4),
            ("layer_backward n=3", 24, 29),
            ("layer n=3", 20, 23),
        ):
            step.trace.event(f"megaprof/{name}", start, end - start)
        step.kernel(2, 2)
        step.kernel(6, 3)
        step.kernel(22, 1, thread=AUTOGRAD)
        step.kernel(25, 4, thread=AUTOGRAD)
        stage, _ = step.stage(tmp_path)
        assert {name: spread.mean for name, spread in stage.modules_ms.items()} == {
            "attention forward": 2,
            "layer forward": 5,
            "layer recompute": 1,
            "layer backward": 4,
        }


def test_without_operators_of_the_cpu_exposed_communication_stays_in_sight(tmp_path):
    """`--profile-activities cuda`: nothing names a process group, and nothing moves into compute, or away."""
    found = {}
    for operators in (True, False):
        directory = tmp_path / str(operators)
        write(Scenario("exposed tp", exposed={"tp": 0.3}, dp=2, tail=20.0, operators=operators), directory)
        (found[operators],) = analyze(directory).targets
    named, unnamed = (found[operators] for operators in (True, False))
    for known, unknown in zip(named.stages, unnamed.stages, strict=True):
        assert (unknown.exposed_ms["tp"], unknown.exposed_ms["dp"], unknown.dp_tail_ms) == (None, None, None)
        exposed = known.exposed_ms["tp"].mean + known.exposed_ms["dp"].mean
        assert known.exposed_ms["tp"].mean == pytest.approx(419, rel=0.05)
        assert unknown.exposed_ms["unknown"].mean == pytest.approx(exposed, rel=1e-3)
        assert unknown.compute_ms.mean == pytest.approx(known.compute_ms.mean)
        # What nobody names is of the last pass, or of the gradients behind it.
        assert unknown.bubble_ms.mean == pytest.approx(known.bubble_ms.mean, abs=10)
    assert {cause.group for cause in found[True].causes if cause.kind == "communication"} == {"tp"}
    assert next(cause.group for cause in found[False].causes if cause.kind == "communication") == "unknown"


@pytest.mark.parametrize("operators", [True, False])
def test_the_parts_of_a_step_add_up_to_it(operators, tmp_path):
    write(Scenario("parts", exposed={"tp": 0.2}, idle=0.1, dp=2, tail=20.0, operators=operators), tmp_path)
    (target,) = analyze(tmp_path).targets
    assert len(target.stages) == 4
    for stage in target.stages:
        beside = stage.compute_ms, stage.bubble_ms, stage.gradients_ms, stage.host_bound_ms
        parts = [part.mean for part in (*beside, *stage.exposed_ms.values()) if part is not None]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(target.step_ms, rel=1e-3)


class TestCommunication:
    def test_only_what_nothing_hides_is_exposed(self, step, tmp_path):
        step.kernel(1, 4)
        step.nccl(3, 5, group="tp")
        step.nccl(21, 2, group="dp")
        call = step.call(tmp_path)
        assert exposed(call) == {"tp": 3_000_000, "dp": 2_000_000}
        assert times(call)["forward"] == 4
        assert rows(call)[0].exposed["tp"] == 3_000_000

    @pytest.mark.parametrize(
        ("description", "group"),
        [
            ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
            ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
            ("EXPERT_TENSOR_PARALLEL_GROUP", "tp"),
            ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep"),
            ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
            ("CONTEXT_PARALLEL_GROUP", "cp"),
            ("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1", "cp"),
            ("DATA_PARALLEL_GROUP_WITH_CP_AG", "dp"),
            ("DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "dp"),
            ("GTP_WEIGHT_REMAT_GROUP", "dp"),
            ("EXPERT_GTP_WEIGHT_REMAT_GROUP", "dp"),
            ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp"),
            ("default_pg", "other"),
            ("undefined", "unknown"),
        ],
    )
    def test_megatrons_groups(self, description, group, tmp_path):
        gpu = Gpu(microbatches=1, sizes={"tp": 2, "dp": 2, "cp": 2, "ep": 2})
        gpu.trace.call(0, 50)
        gpu.trace.forward(0, 0, 10)
        gpu.nccl(1, 4, group="tp", pg=description)
        assert exposed(gpu.call(tmp_path)) == {group: 4_000_000}

    def test_of_a_group_along_two_axes_the_parallel_one_counts(self, tmp_path):
        gpu = Gpu(microbatches=1, sizes={"dp": 1, "cp": 2})
        gpu.trace.call(0, 50)
        gpu.trace.forward(0, 0, 10)
        gpu.nccl(1, 4, group="dp", pg="DATA_PARALLEL_GROUP_WITH_CP")
        assert exposed(gpu.call(tmp_path)) == {"cp": 4_000_000}

    def test_with_one_kind_of_parallelism_there_is_no_doubt(self, tmp_path):
        gpu = Gpu(microbatches=1, sizes={"dp": 2})
        gpu.trace.call(0, 50)
        gpu.trace.forward(0, 0, 10)
        gpu.nccl(1, 4, group="dp", pg="default_pg")
        assert exposed(gpu.call(tmp_path)) == {"dp": 4_000_000}

    def test_communication_of_no_known_group_is_counted_for_none_and_said(self, step, tmp_path):
        step.kernel(1, 1)
        step.nccl(3, 5, group="tp", pg="default_pg")
        _, target = step.stage(tmp_path)
        assert "groups_unnamed" in kinds(target.warnings)

    def test_without_a_name_the_range_of_an_exchange_tells(self, tmp_path):
        gpu = Gpu(pp_size=2, microbatches=1, sizes={"tp": 2})
        gpu.trace.call(0, 50)
        gpu.trace.forward(0, 10, 10)
        gpu.trace.event("megaprof/recv_forward", 1, 2)
        gpu.nccl(2.5, 6, launch=2, name="ncclDevKernel_SendRecv")
        gpu.kernel(11, 5)
        call = gpu.call(tmp_path)
        assert [(label, len(times)) for label, times in call.kernels.items()] == [("recv_forward", 1)]
        assert call.spent["unknown"] == 0

    @pytest.mark.parametrize(
        ("name", "group"),
        [
            ("void deep_ep::intranode::dispatch<768>(int4*)", "ep"),
            ("nccl_ep_jit_ht_dispatch_kernel", "ep"),
            ("nccl_ep_jit_ll_combine_kernel", "ep"),
            ("userbuffers_fp16_sum", "tp"),
        ],
    )
    def test_kernels_of_one_axis_alone(self, name, group, tmp_path):
        gpu = Gpu(microbatches=1, sizes={"tp": 2, "dp": 2, "ep": 2})
        gpu.trace.call(0, 50)
        gpu.trace.forward(0, 0, 10)
        gpu.kernel(1, 4, name=name)
        assert exposed(gpu.call(tmp_path)) == {group: 4_000_000}

    def test_where_no_group_is_named_nothing_is_zero_that_may_be_more(self, tmp_path):
        gpu = Gpu(microbatches=1, sizes={"tp": 2, "dp": 2, "cp": 2})
        gpu.trace.call(0, 50)
        gpu.trace.forward(0, 0, 20)
        gpu.nccl(1, 4)
        gpu.kernel(5, 10)
        call = gpu.call(tmp_path)
        assert {group for group, ns in call.spent.items() if math.isnan(ns)} == {"tp", "cp", "dp"}
        assert (call.spent["ep"], exposed(call)) == (0, {"unknown": 4_000_000})
        assert rows(call)[0].compute == 10_000_000
        stage, target = gpu.stage(tmp_path)
        assert stage.dp_tail_ms is None
        assert [each.names for each in target.warnings if each.kind == "exposed_unknown"] == [("tp", "cp", "dp")]

    def test_hidden_communication_needs_no_name(self, step, tmp_path):
        step.kernel(1, 8)
        step.nccl(3, 5)
        assert exposed(step.call(tmp_path)) == {}

    @pytest.mark.parametrize(
        ("name", "at", "sizes", "group"),
        [
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1, {"tp": 2}, "tp"),
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 1, {"tp": 2, "pp": 2}, "tp"),  # no use of pp in a pass
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 21, {"tp": 2, "pp": 2}, None),
            ("ncclDevKernel_SendRecv", 1, {"tp": 2, "ep": 2, "dp": 2}, "ep"),
            ("ncclDevKernel_SendRecv", 1, {"cp": 2, "ep": 2}, None),
            ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)", 1, {"tp": 2, "dp": 2}, None),
            ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(x)", 1, {"tp": 2}, "tp"),
            ("void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16, 8>(x)", 1, {"tp": 2}, "tp"),
        ],
    )
    def test_without_a_name_only_what_is_certain_counts(self, name, at, sizes, group, tmp_path):
        gpu = Gpu(pp_size=sizes.pop("pp", 1), microbatches=1, sizes=sizes)
        gpu.trace.call(0, 50)
        gpu.trace.forward(0, 0, 10)
        gpu.nccl(at, 4, name=name)
        assert exposed(gpu.call(tmp_path)) == {group or "unknown": 4_000_000}

    def test_a_copy_between_devices_is_communication(self, tmp_path):
        gpu = Gpu(microbatches=1, sizes={"tp": 2})
        gpu.trace.call(0, 50)
        gpu.trace.forward(0, 0, 20)
        gpu.kernel(1, 4)
        gpu.kernel(6, 3, name="Memcpy PtoP (Device -> Device)", category="gpu_memcpy")
        call = gpu.call(tmp_path)
        assert (exposed(call), times(call)["forward"]) == ({"tp": 3_000_000}, 4)

    @pytest.mark.parametrize(("tp", "ns", "compute"), [(2, 3_000_000, 4), (1, 0, 7)])
    def test_what_a_collective_launches_is_of_its_group(self, tp, ns, compute, tmp_path):
        """Kernels of RCCL bring no metadata, and copies that a copy engine makes for a collective never do; in a group
        of one rank a collective is a copy for itself."""
        gpu = Gpu(microbatches=1, sizes={"tp": tp, "dp": 2})
        gpu.trace.call(0, 50)
        gpu.trace.forward(0, 0, 20)
        gpu.kernel(1, 4)
        gpu.kernel(6, 3, name="Memcpy DtoD (Device -> Device)", category="gpu_memcpy", group="tp")
        gpu.nccl(10, 2, group="dp", named=False)
        call = gpu.call(tmp_path)
        expected = {"tp": ns, "dp": 2_000_000} if ns else {"dp": 2_000_000}
        assert (exposed(call), times(call)["forward"]) == (expected, compute)

    def test_the_tail_is_what_follows_the_last_computation(self, tmp_path):
        for replica in range(2):
            gpu = Gpu(microbatches=1, sizes={"tp": 2, "dp": 2}, coords={"rank": 2 * replica, "dp": replica})
            gpu.trace.call(0, 50)
            gpu.trace.forward(0, 0, 10)
            gpu.trace.backward(0, 20, 10)
            gpu.kernel(1, 4)
            gpu.nccl(3, 4, group="dp")
            gpu.kernel(21, 9)
            gpu.trace.event("megaprof/finalize_grads", 31, 10)
            gpu.nccl(29, 10, launch=28, group="dp")
            gpu.trace.write(tmp_path)
        stage = analyze(tmp_path).targets[0].stages[0]
        assert (stage.exposed_ms["dp"].mean, stage.dp_tail_ms.mean) == (11, 9)


class TestWaiting:
    def test_the_host_is_behind_when_nothing_was_launched(self, step, tmp_path):
        step.kernel(1, 2)
        step.kernel(5, 1, launch=4)  # the GPU was done at 3, and had nothing: 2 ms
        step.kernel(8, 1, launch=4.5)  # launched already, it waited for something else
        step.kernel(22, 2, launch=21)
        stage, _ = step.stage(tmp_path)
        # And 1 before the first kernel, 1 from 9 to the end of the forward's range, 2 before the backward's first.
        assert stage.host_bound_ms.mean == pytest.approx(1 + 2 + 1 + 2)

    def test_outside_of_passes_the_host_is_not_to_blame(self, step, tmp_path):
        step.kernel(0, 10, launch=0)
        step.kernel(20, 10, launch=20)
        stage, _ = step.stage(tmp_path)
        assert stage.host_bound_ms.mean == 0

    def exchange(self, directory, late, transfer):
        """Stage 1 posts its receive at 2; stage 0 sends at 2 + late; the bytes take ``transfer``."""
        arrived = 2 + late + transfer
        first = Gpu(pp=0, pp_size=2, microbatches=1, target="train_log_probs")
        first.trace.call(0, 60)
        first.trace.forward(0, 0, 2 + late - 0.5)
        first.kernel(0, 2 + late, launch=0)
        first.trace.event("megaprof/send_forward", 2 + late - 0.4, 0.2)
        first.nccl(2 + late, transfer, launch=2 + late - 0.3, group="pp", name="ncclDevKernel_SendRecv")
        second = Gpu(pp=1, pp_size=2, microbatches=1, target="train_log_probs")
        second.trace.call(0, 60)
        second.trace.event("megaprof/recv_forward", 1, 0.5)
        second.nccl(2, arrived - 2, launch=1.2, group="pp", name="ncclDevKernel_SendRecv")
        second.trace.forward(0, 1.6, 5)
        second.kernel(arrived, 10, launch=2)
        for gpu in (first, second):
            gpu.trace.write(directory)
        (target,) = analyze(directory).targets
        return target.stages[1]

    def test_a_kernel_that_only_receives_sends_nothing(self, tmp_path):
        """With ``overlap_p2p_comm`` each transfer of an exchange has a kernel, and odd stages receive first."""
        stage = Gpu(pp=1, pp_size=2, microbatches=1, target="train_log_probs")
        stage.trace.call(0, 60)
        stage.trace.forward(0, 1, 5)
        stage.kernel(2, 4, launch=2)
        stage.trace.event("megaprof/send_forward_recv_forward", 7, 2)
        for start, what in ((8, "recv"), (9, "send")):
            stage.nccl(start, 0.5, launch=start - 0.5, group="pp", name="ncclDevKernel_SendRecv")
            stage.trace.events[-1]["args"]["Collective name"] = what
        kernels = stage.call(tmp_path).kernels
        (received,), (sent,) = (kernels[label][:, 2].tolist() for label in ("recv_forward", "send_forward"))
        assert (len(kernels), sent - received) == (2, 1_000_000)

    def test_a_late_neighbour_is_no_slow_network(self, tmp_path):
        stage = self.exchange(tmp_path, late=20, transfer=1)
        assert (stage.exposed_ms["pp"].mean, stage.pp_waiting_ms.mean) == (pytest.approx(1), pytest.approx(20))

    def test_a_slow_network_is_no_late_neighbour(self, tmp_path):
        stage = self.exchange(tmp_path, late=0, transfer=21)
        assert (stage.exposed_ms["pp"].mean, stage.pp_waiting_ms.mean) == (pytest.approx(21), pytest.approx(0))

    def test_with_one_end_only_the_two_are_not_told_apart(self, tmp_path):
        self.exchange(tmp_path, late=20, transfer=1)
        next(tmp_path.glob("*pp0*")).unlink()
        (target,) = analyze(tmp_path).targets
        assert (target.stages[0].exposed_ms["pp"], target.stages[0].pp_waiting_ms) == (None, None)
        assert ("pp",) in [note.names for note in target.warnings if note.kind == "exposed_unknown"]

    def test_clocks_of_several_hosts_are_aligned_by_the_exchanges(self, tmp_path):
        for apart in (False, True):
            write(Scenario("same", apart=apart), tmp_path / str(apart))
        one, many = (analyze(tmp_path / str(apart)).targets[0] for apart in (False, True))
        assert many.step_time_ms.mean == pytest.approx(one.step_time_ms.mean, rel=0.005)
        for ours, theirs in zip(many.stages, one.stages, strict=True):
            assert ours.bubble_ms.mean == pytest.approx(theirs.bubble_ms.mean, rel=0.02, abs=0.5)
        assert "clocks_aligned" in kinds(many.warnings)

    def test_the_bubble_of_a_balanced_pipeline_is_what_filling_and_draining_take(self, tmp_path):
        write(Scenario("exact", noise=0.0, transfer=0.0), tmp_path)
        (target,) = analyze(tmp_path).targets
        first, *_, last = target.stages
        # (p-1)(f+b) of 3 x 60 ms; the last stage waits for the first forwards, the first for the last backwards.
        assert first.bubble_ms.mean == pytest.approx(180, rel=0.01)
        assert last.bubble_split["warmup_ms"].mean == pytest.approx(60, rel=0.01)
        assert last.bubble_split["cooldown_ms"].mean == pytest.approx(120, rel=0.01)
        assert last.bubble_split["steady_ms"].mean == pytest.approx(0, abs=0.5)


def test_a_pipeline_on_gpu_and_cpu_traces_gives_the_same_answer(tmp_path):
    for gpu in (True, False):
        write(Scenario("both", layers=(6, 4, 3, 3), gpu=gpu), tmp_path / str(gpu))
    on_gpu, on_cpu = (analyze(tmp_path / str(gpu)).targets[0] for gpu in (True, False))
    assert on_gpu.slowest_stage == on_cpu.slowest_stage == 0
    for left, right in zip(on_gpu.stages, on_cpu.stages, strict=True):
        assert left.compute_ms.mean == pytest.approx(right.compute_ms.mean, rel=0.01)


def test_interleaved_chunks_meet_round_the_corner(tmp_path):
    write(Scenario("vpp", layers=((2, 2), (2, 2), (2, 2)), microbatches=6), tmp_path)
    traces = [read_trace(path) for path in find_traces(tmp_path)]
    ends = [ends_of(trace.metadata, steps_of(trace)) for trace in traces]
    sent, received = ({message for end in ends for message in getattr(end, which)} for which in ("sends", "receives"))
    assert sent == received
    assert len(sent) == 2 * 6 * (2 * 3 - 1)
    corner = {(each.kind, each.microbatch) for each in sent if (each.stage, each.chunk) == (0, 1)}
    assert corner >= {("forward", microbatch) for microbatch in range(6)}
    (target,) = analyze(tmp_path).targets
    assert [c.holds.layers for c in target.stages[0].chunks] == [2, 2]


def test_traces_whose_kernels_nobody_launched_are_host_time(tmp_path):
    trace = TraceBuilder(chunks=[chunk(4)], microbatches=1)
    trace.call(0, 30)
    trace.forward(0, 0, 10)
    trace.backward(0, 10, 10)
    trace.event("gemm", 1, 2, cat="kernel")
    trace.write(tmp_path)
    (target,) = analyze(tmp_path).targets
    assert target.causes == ()
    assert "passes_unknown" in kinds(target.warnings)


class TestImpossibleTimes:
    """`gpu.activities` sees the times of every reader."""

    def test_a_kernel_ends_where_the_next_of_its_stream_begins(self, step, tmp_path):
        step.kernel(1, 100)
        step.kernel(3, 2)
        step.kernel(5.5, 1)
        step.kernel(4, 0.5, stream=9)  # runs beside them
        step.kernel(21, 3)
        stage, target = step.stage(tmp_path)
        assert (stage.forward_ms.mean, stage.backward_ms.mean) == (5, 3)  # 1 to 5 and 5.5 to 6.5
        assert "times_impossible" in kinds(target.warnings)

    def test_a_kernel_may_begin_before_the_one_before_it_ends(self, step, tmp_path):
        """Programmatic dependent launch, and the rounding of clocks."""
        step.kernel(1, 4)
        step.kernel(4.5, 2)
        step.kernel(4.5, 1)
        step.kernel(21, 3)
        stage, target = step.stage(tmp_path)
        assert stage.forward_ms.mean == 5.5
        assert "times_impossible" not in kinds(target.warnings)

    def test_many_kernels_without_a_time_allow_no_verdict(self, step, tmp_path):
        for number in range(4):
            step.kernel(1 + number, 1)
        for event in [event for event in step.trace.events if event["cat"] == "kernel"][::2]:
            event |= {"ts": 0.0, "dur": 0.0}
        stage, target = step.stage(tmp_path)
        assert (stage.forward_ms, stage.compute_ms, target.step_time_ms) == (None, None, None)
        assert target.unjudgeable.kind == "times_impossible"
        assert target.unjudgeable.factor == 0.5

    @pytest.mark.parametrize(
        "time", [{"ts": 0.0, "dur": 0.0}, {"dur": 52 * 86400e6}, {"ts": -52 * 86400e6}, {"dur": -1.0}]
    )
    def test_a_few_are_left_out_with_their_number(self, time, step, tmp_path):
        for number in range(150):
            step.kernel(0.1 + 0.05 * number, 0.05, stream=7 + (number == 149), launch=0.01)
        step.trace.events[-1] |= time
        path = step.trace.write(tmp_path)
        (target,) = analyze(path).targets
        assert target.stages[0].forward_ms.mean == pytest.approx(149 * 0.05)
        assert {note.kind: note.count for note in analyze(path).warnings}["events_left_out"] == 1

    def test_passes_do_not_compute_longer_than_their_step(self, step, tmp_path):
        step.kernel(1, 40)
        step.kernel(21, 40, stream=9)
        step.kernel(22, 1, stream=10)
        stage, target = step.stage(tmp_path)
        assert stage.compute_ms is None
        assert target.unjudgeable.kind == "times_impossible"

    def test_kernels_that_name_no_launch_are_not_lost(self, step, tmp_path):
        """ROCm writes correlation 0 for RCCL's kernels."""
        step.kernel(1, 4)
        step.kernel(21, 3)
        step.trace.events[-1]["args"]["correlation"] = 0
        _, target = step.stage(tmp_path)
        assert target.unjudgeable.kind == "kernels_lost"

    @pytest.mark.parametrize(("left", "kind"), [(0, "no_kernels"), (1, "kernels_lost")])
    def test_those_behind_the_end_of_a_cut_file_are_not_lost_by_kineto(self, left, kind, step, tmp_path):
        for number in range(3):
            step.kernel(1 + 2 * number, 1)
        step.trace.events.sort(key=lambda event: event["cat"] == "kernel")
        path = step.trace.write(tmp_path, "cut.pt.trace.json")
        pieces = path.read_text().split('"cat": "kernel"')
        path.write_text('"cat": "kernel"'.join(pieces[: 1 + left]))
        (target,) = analyze(path).targets
        assert (target.unjudgeable.kind, target.unjudgeable.said) == (kind, "it is truncated: its JSON ends too early")


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(...)", "ep"),
        (
            "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs<hip_bfloat16>)",
            "ep",
        ),
        ("EpCombineInterNodeV1Kernel_bf16", "ep"),
        ("void uccl::internode::dispatch<8>(...)", "ep"),
        ("void transformer_engine::userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(...)", "tp"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 4>(...)", "tp"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", "by group"),
        ("mscclKernel_Sum_half_Simple_false", "by group"),
        ("void rocshmem::put_nbi<float>(...)", "by group"),
        ("nvshmemi_transfer_rma_p2p", "by group"),
        ("one_shot_all_reduce_kernel<8, 16>", "by group"),
        ("Memcpy PtoP (Device -> Device)", "by group"),
        ("ncclDevKernel_SendRecv(...)", "in pairs"),
        ("rcclAllToAllKernel", "in pairs"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "compute"),
        ("StepDispatchKernel", "compute"),
    ],
)
def test_names_of_kernels(name, use):
    by_group = {"by group": groups.BY_GROUP, "in pairs": groups.BY_GROUP_PAIRWISE}
    assert groups.use_by_name(name) == (by_group[use] if use in by_group else groups.USES.index(use))


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        *((f"mesh_{axis}", axis) for axis in ("tp", "pp", "ep", "cp", "dp")),
        *(
            ("mesh_dp_shard", "dp"),
            ("mesh_dp_shard_cp", "dp"),
            ("mesh_fsdp", "dp"),
            ("mesh_sp", "cp"),
            ("mesh_dim_tp", "tp"),
        ),
        *(
            ("mesh_infer_tp", "tp"),
            ("mesh_etp", "tp"),
            ("mesh_default", None),
            ("DATA_PARALLEL_GROUP_WITH_CP_AG", "dp"),
        ),
    ],
)
def test_names_of_groups(description, axis):
    assert groups.axis_of(description) == axis


def test_an_axis_of_which_no_kernel_is_known_is_unknown(tmp_path):
    """Its communication is counted as compute. If one stage has a kernel, none on another is none."""
    for stages_with in ((), (0,)):
        directory = tmp_path / str(len(stages_with))
        for pp in range(2):
            gpu = Gpu(pp=pp, pp_size=2, microbatches=1, sizes={"ep": 2, "dp": 2}, chunks=[chunk(2)])
            gpu.trace.call(0, 50)
            gpu.trace.forward(0, 10 * pp, 10)
            gpu.trace.backward(0, 40 - 10 * pp, 10)
            gpu.kernel(10 * pp + 1, 8)
            gpu.kernel(41 - 10 * pp, 8)
            if pp in stages_with:
                gpu.nccl(10 * pp + 9, 0.5, group="ep")
            else:
                gpu.kernel(10 * pp + 9, 0.5, name="an_unknown_all_to_all", stream=20)
            gpu.trace.write(directory)
        (target,) = analyze(directory).targets
        exposed = [stage.exposed_ms["ep"] and stage.exposed_ms["ep"].mean for stage in target.stages]
        assert exposed == ([0.5, 0.0] if stages_with else [None, None])
        assert [
            note.names for note in target.warnings if note.kind == "exposed_unknown" and "pp" not in note.names
        ] == ([] if stages_with else [("ep",)])
