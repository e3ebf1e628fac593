"""A job that stops in a collective: what its ranks have in flight names the rank, the group and the operation."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megaprof.cli import main
from megaprof.testing import GPTWorkload, build, cpu_megatron, init_distributed, launcher, run_ranks
from megaprof.testing.faults import before_forward
from megaprof.testing.launcher import RanksFailed
from tests.cli.running import check

SMALL = GPTWorkload(tp=2, dp=2, hidden=64, seq_length=32, layers=2, microbatches=2)
_TENSOR = "TENSOR_MODEL_PARALLEL_GROUP"
#: Who does what else in the forward of step 2 of rank 1.
FAULTS = ("sleeps", "exits", "calls another")


def _train(fault: str, directory: str, stop: str) -> None:
    """Rank 1 of two tensor-parallel pairs goes wrong in its third step, and nobody gets on."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megaprof import ProfileConfig, install_hooks
    from megaprof.control import listener

    listener.interval = lambda world: 0.1  # type: ignore[assignment]
    listener.is_stuck = lambda status, now: status.past_first_step and status.stuck(now) > 2.0  # type: ignore[assignment]
    rank, _ = init_distributed(timeout=180)

    def end() -> None:  # also of a rank that waits in a collective
        while not Path(stop).exists():
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()

    def go_wrong() -> None:
        if rank != 1 or gpt.step != 2:
            return
        if fault == "calls another":
            import torch

            own = torch.ones(3)
            dist.all_gather([own.clone(), own.clone()], own, group=parallel_state.get_tensor_model_parallel_group())
        if fault == "exits" and os.fork():
            os._exit(0)  # the child holds its connections: over NCCL, too, nobody is told
        end()

    with cpu_megatron():
        gpt = build(SMALL)
        before_forward(gpt.chunks[0], go_wrong)
        with install_hooks(gpt.chunks, ProfileConfig(target=("train_actor",), tool=("timeline",), dir=directory)):
            forward_backward = get_forward_backward_func()
            for _ in range(4):
                gpt.train_step(forward_backward)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_real_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    traces, stop = tmp_path / "traces", tmp_path / "stop"
    monkeypatch.setattr(launcher, "GRACE", 100.0)  # the others are looked at when one has ended

    def launch() -> None:
        with pytest.raises(RanksFailed):
            run_ranks(_train, 4, fault, str(traces), str(stop), timeout=200)

    job = threading.Thread(target=launch)
    job.start()
    found: Any = None
    status: Any = None
    named: dict[int, Any] = {}
    expected = {0, 1} if fault == "calls another" else {1}
    why = {"sleeps": "absent", "exits": "no_dump", "calls another": "differs"}[fault]
    told = False
    # Every rank stands still for itself, some for a moment only, and each writes what it has in flight at its own time.
    while not told and job.is_alive():  # the start of its ranks may take a minute
        time.sleep(0.5)
        code, printed = main(["hang", str(traces), "--json"]), capsys.readouterr().out
        if code == 3:
            found = json.loads(printed)
            named = {each["rank"]: each for each in found["culprits"]}
            main(["status", str(traces), "--json", "--hang-after", "2"])
            status = json.loads(capsys.readouterr().out)
            told = named.keys() == expected and named[1]["why"] == why and status["collectives"] is not None
            # The other pair, which waits for gradients, may have written before the rank that waits for rank 1 has.
            told = told and named[1]["awaited"]["group"] == _TENSOR
    stop.touch()
    job.join()
    check("hang", found)
    check("status", status)
    assert [each["rank"] for each in status["collectives"]["culprits"]] == [*named]
    awaited = named[1]["awaited"]
    assert (named[1]["stage"], awaited["group"], awaited["ranks"]) == (0, _TENSOR, [0, 1])
    assert named[1]["why"] == why
    assert named.keys() == expected
    assert "all" in awaited["operation"]
