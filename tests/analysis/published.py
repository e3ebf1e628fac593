"""Pipelines that others published, as timelines: to check replay, verdict and advice on real GPUs' times.

Three kinds of tables are known, each a directory:

* ByteDance's StragglerAnalysis: ``trace-*.parquet``, one row for every operation of every rank.
* AMD's Primus: ``config.json`` and ``pp_rank_*.json``, starts and ends of every forward and backward by iteration.
* MegatronApp: one Chrome trace ``*-aggregated-*.json`` of one iteration, forwards and backwards of all stages.

None of them says how many layers a stage holds, so no layout can be advised from them.

    python -m tests.analysis.published TABLES OUT && megaprof report OUT
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megaprof.formats import codes
from megaprof.formats import timeline as format
from megaprof.formats.names import artifact_name
from megaprof.parallel.topology import ParallelSizes, WorldLayout
from tests.formats.step_records import StepRecord, step_record

START_NS = 1_790_000_000_000_000_000
_KINDS = {"forward": codes.FORWARD, "backward": codes.BACKWARD}


class Event(NamedTuple):
    """Something that a rank did in a step, in microseconds since the step began."""

    code: int
    start: int
    end: int


class Job(NamedTuple):
    """``events``: by (dp, pp) and step."""

    sizes: ParallelSizes
    events: Mapping[tuple[int, int], Mapping[int, Sequence[Event]]]


def read(tables: Path) -> Job:
    """Raises ValueError where a directory holds none of the known kinds of tables."""
    if found := sorted(tables.glob("trace-*.parquet")):
        return _bytedance(found[0])
    if (tables / "config.json").exists():
        return _primus(tables)
    if found := sorted(tables.glob("*-aggregated-*.json")):
        return _megatronapp(found[0])
    raise ValueError(f"{tables} holds no trace-*.parquet, no config.json and no *-aggregated-*.json")


def write(job: Job, out: Path) -> None:
    """One timeline for every rank. Steps follow each other at once: the tables do not say when they began."""
    out.mkdir(parents=True, exist_ok=True)
    layout = WorldLayout(job.sizes)
    steps = sorted(set.intersection(*(set(own) for own in job.events.values())))
    begin, now = {}, START_NS
    for step in steps:
        begin[step] = now
        now += 1000 * (1000 + max(event.end for own in job.events.values() for event in own[step]))
    for (dp, pp), own in job.events.items():
        coords = layout.coords(layout.rank_of(tp=0, cp=0, dp=dp, pp=pp))
        shapes: dict[tuple[int, ...], int] = {}
        records = [format.metadata_record(_metadata(job, coords, steps[0], own[steps[0]]))]
        for step in steps:
            events = sorted(own[step], key=lambda event: (event.start, event.end))
            shape = tuple(event.code for event in events)
            if shape not in shapes:
                shapes[shape] = len(shapes)
                records.append(format.shape_record(shape))
            totals = dict.fromkeys(codes.KINDS.values(), 0)
            for event in events:
                totals[codes.KINDS[event.code & codes.KIND_MASK]] += event.end - event.start
            starts, ends = ([getattr(event, name) for event in events] for name in ("start", "end"))
            length = max(ends)
            record = StepRecord(0, shapes[shape], step, 0, begin[step], length, starts, ends, totals)
            records.append(step_record(record))
        path = out / artifact_name("timeline", None, steps[0], coords, format.SUFFIX)
        path.write_bytes(b"".join((format.MAGIC, *records)))


def _metadata(job: Job, coords: Any, step: int, events: Sequence[Event]) -> dict[str, Any]:
    place, sizes = asdict(coords), job.sizes
    shown = place.pop("sizes")
    chunks = [
        {"embedding": coords.pp == 0 and chunk == 0, "loss": coords.pp == sizes.pp - 1 and chunk == sizes.vpp - 1}
        for chunk in range(sizes.vpp)
    ]
    forwards = sum(event.code & codes.KIND_MASK == codes.FORWARD for event in events)
    return {
        "version": "0.0.0",
        "target": "train_actor",
        "steps": [step, step],
        "coords": place,
        "sizes": shown,
        "schedule": "interleaved" if sizes.vpp > 1 else "1f1b",
        "microbatches": forwards // sizes.vpp,
        "microbatch_group_size": sizes.pp if sizes.vpp > 1 else None,
        "chunks": chunks,
        "host": "published",
        "timeline": {"clock": "host", "unit_cost_ns": 400.0},
    }


def _bytedance(path: Path) -> Job:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(path).to_pylist()
    events: dict[tuple[int, int], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        code = _of_row(row)
        if code is not None:
            start = round(1e6 * row["start_ts"])
            event = Event(code, start, start + round(1e6 * row["duration"]))
            events[row["dp_rank"], row["stage"]][row["step"]].append(event)
    dp, pp = (1 + max(place[axis] for place in events) for axis in (0, 1))
    return Job(ParallelSizes(dp=dp, pp=pp), events)


def _of_row(row: Mapping[str, Any]) -> int | None:
    """The code of an operation; None for one that a timeline does not hold."""
    kind, _, what = row["optype"].partition("-")
    if what == "compute":
        return codes.phase(_KINDS[kind], row["mb_id"], row["mc"])
    if kind in _KINDS:
        return codes.exchange(f"{what}_{kind}")
    return codes.FINALIZE if row["optype"] == "grads-reduce-scatter" else None


def _primus(tables: Path) -> Job:
    config = json.loads((tables / "config.json").read_text())
    events = {}
    for pp in range(config["pp_size"]):
        iterations = json.loads((tables / f"pp_rank_{pp}.json").read_text())
        events[0, pp] = {int(number): list(_of_iteration(times)) for number, times in iterations.items()}
    return Job(ParallelSizes(pp=config["pp_size"]), events)


def _of_iteration(times: Mapping[str, Any]) -> Iterator[Event]:
    for kind, short in (("forward", "fwd"), ("backward", "bwd")):
        pairs = zip(times[f"{short}_start"], times[f"{short}_end"], strict=True)
        for microbatch, (start, end) in enumerate(pairs):
            yield Event(codes.phase(_KINDS[kind], microbatch, 0), round(1000 * start), round(1000 * end))


def _megatronapp(path: Path) -> Job:
    events: dict[tuple[int, int], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    begun: dict[tuple[int, str], int] = {}
    chunks = 0
    for event in json.loads(path.read_text()):
        name, pp, about = event["name"], event["pid"], event["args"]
        if name not in _KINDS:
            continue
        if event["ph"] == "B":
            begun[pp, name] = event["ts"]
        else:
            code = codes.phase(_KINDS[name], about["microbatch"], about["model_chunk"])
            events[0, pp][about["iteration"]].append(Event(code, begun[pp, name], event["ts"]))
            chunks = max(chunks, about["model_chunk"] + 1)
    return Job(ParallelSizes(pp=1 + max(pp for _, pp in events), vpp=chunks), events)


if __name__ == "__main__":
    write(read(Path(sys.argv[1])), Path(sys.argv[2]))
