from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from megaprof.parallel.schedules import (
    EXCHANGES,
    SPLIT_SCHEDULES,
    PassId,
    PipelineSchedule,
    SendReceive,
    Wait,
    phase_order,
    stage_program,
    turns,
)

# (stages, chunks, microbatches, group size, forward only, overlap)
REAL_CASES = [
    (1, 1, 3, None, False, "none"),
    (1, 1, 3, None, True, "none"),
    (2, 1, 1, None, False, "none"),
    (2, 1, 5, None, False, "none"),
    (2, 1, 3, None, True, "none"),
    (2, 2, 4, None, False, "steady"),
    (2, 3, 5, 3, False, "none"),
    (4, 1, 2, None, False, "none"),
    (4, 1, 8, None, False, "none"),
    (4, 1, 6, None, True, "none"),
    (4, 2, 4, None, False, "none"),
    (4, 2, 8, None, False, "steady"),
    (4, 2, 8, None, False, "none"),
    (4, 2, 8, None, False, "all"),
    (4, 2, 4, None, False, "all"),
    (4, 3, 9, 5, False, "steady"),
    (4, 2, 10, 6, False, "all"),
    (2, 2, 4, None, False, "all"),
    (4, 2, 8, None, True, "none"),
    (4, 3, 9, 5, False, "none"),
    (4, 2, 10, 6, False, "none"),
]
"""The last group may be smaller than the others, down to the number of stages."""


def frees() -> bool:
    """Whether this megatron-core waits for what it has sent, to free it, where exchanges overlap."""
    from megatron.core import __version__

    return tuple(map(int, __version__.split(".")[:2])) >= (0, 18)


Recorded = tuple[int, list[object], set[tuple[str, str]]]
"""Stage; passes and exchanges in order; which of Megatron's operations transferred what."""


def _record_real_schedule(case: tuple[int, int, int, int | None, bool, str]) -> Recorded:
    """Run one step of megatron-core's own schedule."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication, schedules
    from megatron.core.transformer.transformer_config import TransformerConfig

    pp, chunks, microbatches, group_size, forward_only, overlap = case
    overlaps = overlap != "none"
    vpp = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp)
    config = TransformerConfig(
        num_layers=pp * chunks,
        hidden_size=4,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_dtype=torch.float32,
        microbatch_group_size_per_vp_stage=group_size,
        overlap_p2p_comm=overlaps,
        batch_p2p_comm=not overlaps,
        overlap_p2p_comm_warmup_flush=overlap == "all",
        deallocate_pipeline_outputs=frees(),
    )

    class Chunk(torch.nn.Linear):
        def set_input_tensor(self, tensor):
            self.input = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self):
            return super().forward(torch.ones(2, 1, 4) if self.input is None else self.input)

    models = [Chunk(4, 4) for _ in range(chunks)]
    for model in models:
        model.config, model.model_type, model.input = config, None, None
    steps: list[object] = []
    produced: dict[int, tuple[torch.Tensor, int, int]] = {}
    real = SimpleNamespace(forward=schedules.forward_step, backward=schedules.backward_step)
    communicator = getattr(p2p_communication, "P2PCommunicator", p2p_communication)  # functions before 0.14
    communicate = communicator._communicate

    def first_tensor(value):
        return first_tensor(value[0]) if isinstance(value, (list, tuple)) else value

    def forward_step(func, data, model, *args, **kwargs):
        chunk, microbatch = models.index(model), int(kwargs["current_microbatch"])
        steps.append(("forward", chunk, microbatch))
        result = real.forward(func, data, model, *args, **kwargs)
        produced[id(first_tensor(result))] = (first_tensor(result), chunk, microbatch)
        return result

    def backward_step(input_tensor, output_tensor, *args, **kwargs):
        _, chunk, microbatch = produced[id(first_tensor(output_tensor))]
        steps.append(("backward", chunk, microbatch))
        return real.backward(input_tensor, output_tensor, *args, **kwargs)

    operations: set[tuple[str, str]] = set()

    def communicate_and_record(*args, **kwargs):
        sends = [kwargs["tensor_send_next"] is not None, kwargs["tensor_send_prev"] is not None]
        transfers = (sends[0], bool(kwargs["recv_prev"]), sends[1], bool(kwargs["recv_next"]))
        if any(transfers):
            steps.append(transfers)
        operation = sys._getframe(1).f_code.co_name
        operations.update(
            (operation, field) for field, there in zip(SendReceive._fields, transfers, strict=True) if there
        )
        result = communicate(*args, **kwargs)
        if kwargs.get("wait_on_reqs", True):
            steps.extend([("wait", transfers)] if any(transfers) else [])
            return result
        awaited = {name: SimpleNamespace(wait=partial(wait, name, handle)) for name, handle in result[-1].items()}
        return (*result[:-1], awaited)

    def wait(name, handle):
        steps.append(("wait", tuple(name == field for field in SendReceive._fields)))
        handle.wait()

    def loss(output):
        return output.sum(), {}

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    communicator._communicate = communicate_and_record
    try:
        get_forward_backward_func()(
            forward_step_func=lambda _, model: (model(), loss),
            data_iterator=[None] * chunks if vpp else None,
            model=models if vpp else models[0],
            num_microbatches=microbatches,
            seq_length=2,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return parallel_state.get_pipeline_model_parallel_rank(), steps, operations
    finally:
        schedules.forward_step, schedules.backward_step = real.forward, real.backward
        communicator._communicate = communicate
        parallel_state.destroy_model_parallel()


def record_real_schedules() -> list[Recorded]:
    from megaprof.testing import cpu_megatron, init_distributed

    init_distributed()
    with cpu_megatron():
        return [_record_real_schedule(case) for case in REAL_CASES]


@pytest.fixture(scope="module")
def real_schedules():
    """For each case what each rank recorded. Ranks beyond the case's stages are data-parallel replicas."""
    from megaprof.testing import run_ranks

    return list(zip(*run_ranks(record_real_schedules, 4, timeout=120), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(REAL_CASES)), ids=[str(case) for case in REAL_CASES])
def test_order_and_exchanges_are_those_of_the_real_schedules(real_schedules, number):
    pp, chunks, microbatches, group_size, forward_only, overlap = REAL_CASES[number]
    options = {"group_size": group_size, "forward_only": forward_only, "overlap": overlap, "frees": frees()}
    schedule = PipelineSchedule.checked(pp, chunks, microbatches, **options)

    def seen(step):
        if isinstance(step, PassId):
            return tuple(step)
        transfers = tuple(phase is not None for phase in (step.transfers if isinstance(step, Wait) else step))
        return ("wait", transfers) if isinstance(step, Wait) else transfers

    assert {stage for stage, _, _ in real_schedules[number]} == set(range(pp))
    for stage, steps, _ in real_schedules[number]:
        program = stage_program(schedule, stage)
        assert steps == [seen(step) for step in program]
        assert [step for step in program if isinstance(step, PassId)] == phase_order(schedule, stage)


@pytest.mark.slow
def test_exchanges_transfer_what_the_real_ones_do(real_schedules):
    real: dict[str, set[str]] = {}
    for recorded in real_schedules:
        for _, _, operations in recorded:
            for operation, transfer in operations:
                real.setdefault(operation, set()).add(transfer)
    assert len(real) > 5
    assert real == {operation: set(EXCHANGES[operation]) for operation in real}


def grid(max_stages: int = 5, max_microbatches: int = 12):
    """Every schedule that is not refused, small ones."""
    for stages in range(1, max_stages + 1):
        for chunks in (1, 2, 3):
            for name in ("no_pipelining", "1f1b", "interleaved"):
                for microbatches in range(1, max_microbatches + 1):
                    for group in (None, stages + 1, stages + 3) if name == "interleaved" else (None,):
                        for forward_only in (False, True):
                            options = {"name": name, "group_size": group, "forward_only": forward_only}
                            try:
                                yield PipelineSchedule.checked(stages, chunks, microbatches, **options)
                            except ValueError:
                                continue


def test_tables_and_warmup_counts_are_megatron_cores():
    from megatron.core.pipeline_parallel import schedules

    if "p2p_communicator" not in inspect.signature(schedules.get_pp_rank_microbatches).parameters:
        pytest.skip("before megatron-core 0.14 this function cannot be asked about another rank")
    seen = 0
    for schedule in grid():
        if schedule.name != "interleaved":
            continue
        table = schedules.get_schedule_table(schedule.microbatches, schedule.chunks, schedule.group_size)
        only = schedule._replace(forward_only=True)
        assert [(phase.microbatch, phase.chunk) for phase in phase_order(only, 0)] == table
        for stage in range(schedule.stages):
            communicator = SimpleNamespace(
                pp_group=SimpleNamespace(size=lambda p=schedule.stages: p, rank=lambda s=stage: s),
                virtual_pipeline_model_parallel_size=schedule.chunks,
            )
            for combined in (False, True):
                _, _, warmup, _ = schedules.get_pp_rank_microbatches(
                    schedule.microbatches,
                    schedule.chunks,
                    schedule.group_size,
                    forward_only=schedule.forward_only,
                    overlap_moe_expert_parallel_comm=combined,
                    p2p_communicator=communicator,
                )
                only = schedule._replace(combined=combined and not schedule.forward_only)
                assert only.warmup(stage) == warmup
            seen += 1
    assert seen > 500


def test_what_a_pass_makes_is_what_its_consumer_needs():
    for schedule in grid():
        placement, pieces = schedule.placement, schedule.stages * schedule.chunks
        for piece in range(pieces):
            # Megatron: stage s holds the model's pieces s, stages + s, 2 * stages + s, ...
            chunk, stage = divmod(piece, schedule.stages)
            after = None if piece == pieces - 1 else ((piece + 1) % schedule.stages, (piece + 1) // schedule.stages)
            assert placement.consumer("forward", stage, chunk) == placement.producer("backward", stage, chunk) == after
            if after is not None:
                assert placement.producer("forward", *after) == placement.consumer("backward", *after) == (stage, chunk)
                if schedule.stages > 1:
                    assert placement.beside(stage)[1] == after[0]
                    assert placement.beside(after[0])[0] == stage
        if schedule.chunks == 1:
            assert placement.beside(0)[0] is placement.beside(schedule.stages - 1)[1] is None


def test_every_phase_runs_once_and_every_transfer_has_both_ends():
    for schedule in grid():
        ends: dict[tuple[int, PassId], list[bool]] = {}
        for stage in range(schedule.stages):
            program = stage_program(schedule, stage)
            phases = [step for step in program if isinstance(step, PassId)]
            kinds = 1 if schedule.forward_only else 2
            assert len(set(phases)) == len(phases) == kinds * schedule.chunks * schedule.microbatches
            following, preceding = (stage + 1) % schedule.stages, (stage - 1) % schedule.stages
            for step in program:
                if isinstance(step, SendReceive):
                    for phase, receiver, sends in zip(
                        step, (following, stage, preceding, stage), (True, False, True, False), strict=True
                    ):
                        if phase is not None:
                            ends.setdefault((receiver, phase), []).append(sends)
        assert all(sorted(both) == [False, True] for both in ends.values())


def as_torch_has_it(name: str, stages: int, microbatches: int, stage: int) -> list[tuple[PassId, ...]]:
    """A rank's turns in torch's schedule of that name."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    made = {"zb_h1": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}[name]
    schedule = object.__new__(getattr(schedules, f"Schedule{made}"))
    schedule.pp_group_size, schedule._n_microbatches = stages, microbatches
    schedule.n_local_stages = 1 if name == "zb_h1" else 2
    schedule.num_stages = stages * schedule.n_local_stages
    schedule.microbatches_per_round = microbatches
    kinds = {"FORWARD": "forward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "weight"}
    turns = []
    for action in schedule._calculate_single_rank_operations(stage):
        if action is None:
            continue
        turn = []
        for each in action.sub_actions or (action,):
            chunk = int(each.stage_index >= stages)
            kind = each.computation_type.name
            both = ["backward", "weight"] if kind == "FULL_BACKWARD" else [kinds[kind]]
            turn += [PassId(one, chunk, each.microbatch_index) for one in both]
        turns.append(tuple(turn))
    return turns


@pytest.mark.parametrize("name", SPLIT_SCHEDULES)
def test_orders_that_split_the_backward_are_torchs(name):
    seen = 0
    for stages in range(2, 9):
        for microbatches in (*range(1, 21), 40):
            try:
                schedule = PipelineSchedule.checked(stages, 1 if name == "zb_h1" else 2, microbatches, name=name)
            except ValueError:
                assert name == "dualpipev"
                assert microbatches < 2 * stages
                continue
            for stage in range(stages):
                assert turns(schedule, stage) == as_torch_has_it(name, stages, microbatches, stage)
                order = phase_order(schedule, stage)
                assert len(set(order)) == len(order) == 3 * schedule.chunks * microbatches
                seen += 1
    assert seen > 100


def test_a_v_shape_goes_back_from_the_last_stage():
    placement = PipelineSchedule.checked(3, 2, 6, name="dualpipev").placement
    way, place = [], (0, 0)
    while place is not None:
        way.append(place)
        place = placement.consumer("forward", *place)
    assert way == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert [placement.producer("backward", *place) for place in way] == [*way[1:], None]
    assert [placement.consumer("backward", *place) for place in way] == [None, *way[:-1]]
    assert placement.consumer("weight", 1, 0) is placement.producer("weight", 1, 0) is None
    assert [placement.beside(stage) for stage in range(3)] == [(None, 1), (0, 2), (1, None)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "zb_h1", "chunks": 2}, ["zb_h1", "1 model chunks"]),
        ({"name": "zbv"}, ["zbv", "2 model chunks"]),
        ({"name": "zbv", "chunks": 2, "stages": 1}, ["zbv", "2 stages"]),
        ({"name": "zbv", "chunks": 2, "forward_only": True}, ["zbv"]),
        ({"name": "dualpipev", "chunks": 2, "microbatches": 7}, ["microbatches=7", "8"]),
        ({"combined": True}, ["combined=True", "1f1b"]),
        ({"name": "zero_bubble"}, ["zero_bubble", "1f1b", "interleaved"]),
        ({"stages": 0}, ["stages", "0"]),
        ({"microbatches": 0}, ["microbatches", "0"]),
        ({"microbatches": True}, ["microbatches", "True"]),
        ({"microbatches": 2.0}, ["microbatches", "2.0"]),
        ({"name": "no_pipelining"}, ["no_pipelining", "4"]),
        ({"chunks": 2, "name": "1f1b"}, ["1f1b", "2"]),
        ({"stages": 1, "chunks": 2}, ["no_pipelining", "2"]),
        ({"stages": 1, "name": "interleaved"}, ["interleaved", "2 stages"]),
        ({"chunks": 2, "microbatches": 6}, ["microbatches=6", "microbatch_group_size=4"]),
        ({"chunks": 2, "microbatches": 3}, ["microbatch_group_size=4", "3"]),
        ({"chunks": 2, "group_size": 3}, ["microbatch_group_size=3", "4"]),
        ({"chunks": 2, "group_size": 0}, ["microbatch_group_size", "0"]),
    ],
)
def test_what_megatron_refuses_is_refused_with_the_value(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        PipelineSchedule.checked(**{"stages": 4, "chunks": 1, "microbatches": 8, **arguments})
    assert all(word in str(error.value) for word in words)


def test_no_other_name_is_known() -> None:
    with pytest.raises(ValueError, match="schedule='GPipe' is unknown"):
        PipelineSchedule.checked(4, 1, 8, name="GPipe")
