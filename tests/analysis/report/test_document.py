"""The report's JSON has the keys that tools rely on, no more and no fewer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaprof.analysis.report.report import analyze
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.analysis.job_timelines import Slow, write_timelines
from tests.analysis.scenarios import Scenario, write
from tests.analysis.synthetic import pipeline
from tests.cli.running import check

SPREAD = {"mean", "median", "min", "max", "stdev", "count"}
PIPELINE, TENSOR = WorldLayout(ParallelSizes.of(32, pp=4)), WorldLayout(ParallelSizes.of(32, tp=2, pp=4))


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Where in a document there is something; `json_keys.txt` holds them as they were before 1.0."""
    if isinstance(value, dict) and value.keys() == SPREAD:
        yield f"{path} (spread)"
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from paths(each, f"{path}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from paths(each, f"{path}[]")
    elif value is not None:
        yield path


def test_the_keys_of_the_json_stay_what_they_are(tmp_path: Path) -> None:
    pipeline(tmp_path / "plain", [6, 2])
    pipeline(tmp_path / "single", [4])
    gpu = Scenario("gpu", layers=(4, 6, 4, 4), loss=9.0, exposed={"tp": 0.15}, steps=3, tail=3.0, dp=2)
    write(gpu, tmp_path / "gpu")
    write(Scenario("slow", layers=(4, 4), slow={1: 1.5}, peers=2), tmp_path / "slow")
    slow = [Slow(rank=19, from_step=70, factor=1.5), Slow(stage=1, from_step=30, factor=3, kind="finalize")]
    some = {"steps": 120, "microbatches": 4}
    write_timelines(tmp_path / "tp", TENSOR, slow=slow, last_step={3: 77}, **some)
    slow = [Slow(stage=2, from_step=50, factor=1.4), Slow(from_step=40, until_step=40, factor=4)]
    write_timelines(tmp_path / "stage", PIPELINE, slow=slow, ranks=range(30), **some)
    found: set[str] = set()
    for directory in tmp_path.iterdir():
        document = json.loads(json.dumps(analyze(directory).to_json(), allow_nan=False))
        check("report", document)
        found |= set(paths(document))
    assert sorted(found) == Path(__file__).with_name("json_keys.txt").read_text().splitlines()
