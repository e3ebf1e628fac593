"""A host's whole trainer in processes of its own on the CPU, with megaprof and without, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaprof.analysis.table.iterations import parts_of
from megaprof.analysis.trace.traces import read_trace
from megaprof.formats.timeline import SUFFIX, read_timeline
from tests.integrations.driving import PATIENT_RAY
from tests.trainers.digests import read_digests

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "stand_ins"
ON_CPU = Path(__file__).parent / "on_cpu"
SECONDS = 500
#: What is captured of a trainer, but for where and in which steps.
PROFILE = (
    "--profile-target",
    "train_actor",
    "evaluate",
    "--profile-select",
    "per-stage",
    "--profile-activities",
    "cpu",
)
#: The same of a trainer for RL, whose every step is in a timeline, too.
RL_PROFILE = (
    "--profile-tool",
    "torch",
    "timeline",
    "--profile-target",
    "train_actor",
    "train_log_probs",
    "--profile-select",
    "per-stage",
    "--profile-activities",
    "cpu",
)


def environment(work: Path, edges: str, *paths: Path, **variables: str) -> dict[str, str]:
    """For a trainer whose packages are in ``paths``, with nothing in the place of ``edges``; see on_cpu."""
    (work / "digests").mkdir(parents=True, exist_ok=True)
    path = [ON_CPU, STAND_INS, ROOT, *paths, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("MEGAPROF_")},
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRAINERS_EDGES": edges,
        "TRAINERS_DIGESTS": str(work / "digests"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "MODELSCOPE_CACHE": str(work / "modelscope"),
        "KINETO_LOG_LEVEL": "6",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **variables,
    }


@contextlib.contextmanager
def ray_environment(work: Path, edges: str, *paths: Path, **variables: str) -> Iterator[dict[str, str]]:
    """The same for a trainer that starts a Ray of its own, which has two GPUs that are none."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:  # Ray's sockets need short names
        ray = {
            **PATIENT_RAY,
            "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 16, "GPU": 2, "object_store_memory": 300 << 20}),
            "RAY_TMPDIR": short,
            "RAY_raylet_start_wait_time_s": "45",  # it is there by then, or has given up
            "RAY_prestart_worker_first_driver": "false",  # one for each of 16 CPUs
            "RAY_worker_niceness": "0",  # beside that of the test
            "TRAINERS_RAY": "1",
        }
        yield environment(work, edges, *paths, **ray, **variables)


def torchrun(*arguments: str) -> list[str]:
    """The command of two ranks."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *arguments]


def train(command: list[str], env: Mapping[str, str], work: Path, seconds: float = SECONDS) -> str:
    """Run it in ``work``; what it printed. It must end well."""
    output = work / "output.txt"
    with output.open("w") as file:
        options: dict[str, Any] = {"env": env, "cwd": work, "stdout": file, "stderr": file, "start_new_session": True}
        with subprocess.Popen(command, **options) as run:
            try:
                code = run.wait(seconds)
            except BaseException:
                os.killpg(run.pid, signal.SIGKILL)  # Ray's own processes end with the one that started them
                raise
    said = output.read_text(errors="replace")
    assert code == 0, said[-20000:]
    return said


def check_tuning(
    command: Sequence[str], placing: Sequence[str], env: Mapping[str, str], work: Path, *more: str
) -> None:
    """``megaprof tune`` runs ``command`` twice, which has 7 layers on its first stage and 1 on its last by the words
    ``placing``: then in the layout that it predicts to be the quickest, by the options of its host, without these
    words. ``more``: of its own options. Its layers take a given time (`paced`)."""
    out = work / "tuned"
    tune = [sys.executable, "-m", "megaprof", "tune", "--out", str(out), "--trials", "2", "--steps", "4", *more, "--"]
    said = train([*tune, *command], {**env, "TRAINERS_ADAPT": "tests.trainers.paced"}, work)
    first, *others = json.loads((out / "report.json").read_text())["trials"]
    assert (first["outcome"], first["layout"]) == ("measured", "Et*7|tL"), said
    if not others and "for a processor core" in (first["verdict"] or ""):
        pytest.skip(first["verdict"])  # other programs have them
    (second,) = others
    asked = second["proposal"]
    assert (second["outcome"], second["layout"]) == ("measured", asked["layout"]), second["why"]
    words = " ".join(placing)
    assert (words in " ".join(first["command"]), words in " ".join(second["command"])) == (True, False)


def check_rehearsal(command: Sequence[str], env: Mapping[str, str], work: Path, framework: str) -> None:
    """``megaprof rehearse`` runs ``command`` as each of its two stages alone, which have 7 layers and 1. There are no
    chunks for its 7 microbatches, so no other layout is rehearsed."""
    out = work / "rehearsed"
    options = ["--world", "2", "--steps", "3", "--saving-off", "", "--out", str(out), "--json"]
    train([sys.executable, "-m", "megaprof", "rehearse", *options, "--", *command], env, work, 2 * SECONDS)
    made = json.loads((out / "rehearsal.json").read_text())
    assert made["what_if"]["layout"] == "Et*7|tL"
    assert made["what_if"]["costs"]["from_ranges"]
    assert made["step_ms"]["low"] < made["step_ms"]["value"] < made["step_ms"]["high"]
    assert made["sent_bytes"][0] > 0
    (found,) = _report(out / "predicted").values()
    assert (found["framework"], found["microbatches"]) == (framework, 7)
    assert [stage["chunks"][0]["holds"]["layers"] for stage in found["stages"]] == [7, 1]


def check(
    plain: Path,
    profiled: Path,
    traces: Path,
    framework: str,
    steps: int,
    kinds: Sequence[str],
    microbatches: Mapping[tuple[str, str | None], int],
    lengths: Collection[tuple[int, ...]] = (),
) -> None:
    """The runs in ``plain`` and ``profiled``, of two stages with 7 layers and 1, have the same parameters after each of
    ``steps`` of the optimizer, bit by bit. Of ``kinds``, target, role and step as in names, there is a trace of each
    stage in ``traces``, and the report has what was built, with so many ``microbatches`` by target and role. With
    ``lengths``, those of the sequences of every microbatch that the data can make, its microbatches have some of them,
    the same on both stages."""
    digests = read_digests(plain / "digests")
    assert digests == read_digests(profiled / "digests")
    assert [len(each) for each in digests.values()] == [steps, steps]
    names = sorted(path.name.partition("-tp")[0] for path in traces.glob("*.pt.trace.json.gz"))
    assert names == [f"{kind}.pp{pp}" for kind in kinds for pp in (0, 1)]
    if lengths:
        for kind in kinds:
            first, second = (read_trace(path).metadata for path in sorted(traces.glob(f"{kind}.pp*.pt.trace.json.gz")))
            assert first.lengths == second.lengths is not None
            assert set(lengths) >= set(first.lengths)
            assert len(set(first.lengths)) > 1
            assert first.tokens == tuple(map(sum, first.lengths))
    found = _report(traces)
    for target in found.values():
        stages = target["stages"]
        assert [sum(chunk["holds"]["layers"] for chunk in stage["chunks"]) for stage in stages] == [7, 1]
        # Which stage is slow is not asked where the ranks share cores.
        passes = ("forward",) if target["forward_only"] else ("forward", "backward")
        assert all(stage[f"{each}_ms"]["mean"] > 0 for stage in stages for each in passes)
    for key, number in microbatches.items():
        assert (found[key]["framework"], found[key]["microbatches"]) == (framework, number)


def check_iterations(traces: Path, roles: Mapping[str, Collection[str]]) -> None:
    """Of the ranks of each of the ``roles``, the report has whole iterations with these parts, among others. The parts
    of every one add up to the time from one call of the schedule to another."""
    found = {each["role"]: each["iterations"] for each in _report(traces).values() if each["iterations"] is not None}
    print(json.dumps(found, indent=1))
    assert found.keys() == roles.keys()
    for role, names in roles.items():
        parts = {part["name"]: part["ms"] for part in found[role]["parts"]}
        assert {*names} <= parts.keys()
        assert sum(parts.values()) == pytest.approx(found[role]["ms"])
        assert (found[role]["rollout_ahead_ms"] is not None) == ("rollout" in names)
    for path in traces.rglob("*" + SUFFIX):
        timeline = read_timeline(path)
        for key in {(each.target, each.role) for each in timeline.metadata}:
            of_key = np.array([(each.target, each.role) == key for each in timeline.metadata])
            rows = np.flatnonzero(of_key[timeline.steps["metadata"]])
            starts = timeline.steps["start_ns"][rows] / 1e6
            walls = starts - starts[:, None]
            of_iterations = parts_of(timeline, rows).values()
            for whole in np.sum([np.maximum(ms, 0.0) for ms in of_iterations], axis=0).reshape(-1):
                assert np.isclose(walls, whole, rtol=0.01).any()


def _report(directory: Path) -> dict[tuple[str, str | None], dict[str, Any]]:
    """What ``megaprof report`` says, by target and role."""
    command = [sys.executable, "-m", "megaprof", "report", str(directory), "--json", "-"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return {(each["target"], each["role"]): each for each in json.loads(run.stdout)["targets"]}
