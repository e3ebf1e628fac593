"""JSON Schemas of what the commands print, from their classes: ``python -m megaprof.cli.schemas DIR`` writes them.

Where a command's JSON is a dataclass as it stands, so is its schema. Where it differs (means beside their spreads,
parts of the fleet side by side), `_shape` says how, from the dataclass that it is made of.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from megaprof.analysis.collectives.hang import Hang
from megaprof.analysis.diagnosis.diagnose import Cause, Diagnosis
from megaprof.analysis.fleet.fleet import Coverage, Fleet, Recording, StepTimes, Synchronisation
from megaprof.analysis.foreign.facts import Foreign, RankFacts
from megaprof.analysis.report import diff
from megaprof.analysis.report.document import PER_STEP, Report
from megaprof.analysis.stages.samples import Spread
from megaprof.analysis.stages.stages import ChunkTimes, Stage, TargetStages
from megaprof.analysis.trace.calls import GROUPS
from megaprof.analysis.what_if.changes import Prediction
from megaprof.analysis.what_if.contents import CostFit
from megaprof.analysis.what_if.what_if import WhatIf
from megaprof.cli.export import Answer as Exported
from megaprof.cli.jobs.trigger import Answer as Captured
from megaprof.cli.jobs.watch import Look
from megaprof.cli.merge import Answer as Merged
from megaprof.formats.job.run import RunRecord
from megaprof.formats.job.standstill import Standstill
from megaprof.formats.job.status import RankStatus
from megaprof.formats.metadata import ModelChunk
from megaprof.parallel.topology import ParallelSizes
from megaprof.tune.state import Tuning

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


#: Fields of a cause that its JSON has under the same names.
_AS_THEY_ARE = (
    "kind",
    "stage",
    "stages",
    "chunk",
    "ranks",
    "hosts",
    "link",
    "group",
    "share",
    "while_ms",
    "since",
    "parts",
)


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of every command's JSON, by command."""
    return {
        name: {"$schema": _DIALECT, "title": f"megaprof {name} --json", **_complete(shape)}
        for name, shape in {
            "diff": _shape("Diff", (diff.Diff, "targets warnings")),
            "export": Exported,
            "hang": Hang,
            "merge": Merged,
            "report": _report(),
            "status": _status(),
            "trigger": Captured,
            "tune": Tuning,
            "watch": Look,
        }.items()
    }


def write(directory: Path) -> None:
    """One file for each command. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        (directory / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")


def _report() -> Any:
    text, texts, number = str, tuple[str, ...], float | None
    spread = Spread | None
    per_step = {name: (number, _about(Stage)[name] + " The mean.") for name in PER_STEP}
    spreads = _shape(
        "StageSpread",
        **{name: (spread, _about(Stage)[name]) for name in PER_STEP},
        exposed_ms=(_by_name(spread), _about(Stage)["exposed_ms"]),
    )
    passes = _shape(
        "Passes",
        forward_ms=(spread, _about(Stage)["forward_per_microbatch_ms"]),
        backward_ms=(spread, _about(Stage)["backward_per_microbatch_ms"]),
        by_chunk=(_many(_shape("ChunkPasses", (ChunkTimes, "chunk forward_ms backward_ms"))), "By model chunk."),
    )
    groups = ", ".join(GROUPS)
    stage = _shape(
        "Stage",
        (Stage, "pp ranks bubble_fraction modules_ms"),
        **per_step,
        chunks=(tuple[ModelChunk | None, ...], "What each model chunk holds; null where the traces do not say."),
        bubble_split=(_by_name(number), _about(Stage)["bubble_split"]),
        exposed_ms=(_by_name(number), f"Communication that no compute hides, by group ({groups}). The mean."),
        host_ms=(_by_name(number), _about(Stage)["host_ms"]),
        per_microbatch=(passes, "One sample per microbatch, step and rank."),
        spread=(spreads, "The same quantities with their spread."),
    )
    prediction = _shape(
        "Prediction",
        (Prediction, _names(Prediction, "step_ms flags fits")),
        step_time_ms=(float, _about(Prediction)["step_ms"]),
        flags=(text, "Megatron's arguments for it, quoted for a shell; empty where no argument does it."),
    )
    cost = _shape(
        "Cost",
        forward_ms=(float, "Milliseconds of one microbatch's forward."),
        backward_ms=(float, "Milliseconds of its backward."),
    )
    costs = _shape(
        "Costs",
        (CostFit, "residual source assumptions"),
        by_kind=(_by_name(cost), _about(CostFit)["by_kind"]),
    )
    what_if = _shape(
        "WhatIf",
        (WhatIf, _names(WhatIf, "replay_error costs candidates best mended by_hand packings")),
        replay_error=(number, _about(WhatIf)["replay_error"] + " The mean."),
        replay_error_spread=(spread, _about(WhatIf)["replay_error"]),
        costs=(costs | None, _about(WhatIf)["costs"]),
        candidates=(_many(prediction), _about(WhatIf)["candidates"]),
        packings=(_many(prediction), _about(WhatIf)["packings"]),
        best=(prediction | None, _about(WhatIf)["best"]),
        host_options=(tuple[str, ...] | None, "`best` in the host's own options; null where it takes the flags."),
    )
    fleet = _shape(
        "Fleet",
        (Coverage, _names(Coverage, "again")),
        (StepTimes, _names(StepTimes)),
        (Synchronisation, _names(Synchronisation)),
        (Recording, _names(Recording)),
        (Fleet, _names(Fleet, "key directory coverage times synchronisation recording")),
        findings=(texts, "Where the run stood still, which ranks are gone, and what became slower, in sentences."),
        notes=(texts, "What else must be known, in sentences."),
    )
    cause: dict[str, tuple[Any, str]] = {
        **{
            name: (hint, _about(Cause).get(name, ""))
            for name, hint in get_type_hints(Cause).items()
            if name in _AS_THEY_ARE
        },
        "rank": (int | None, "The rank, where it is one."),
        "gain_ms": (float, _about(Cause)["price"]),
        "low_ms": (float, "The lower end of its 90 % interval."),
        "high_ms": (float, "The upper end."),
        "evidence": (text, "What is so, and where, in a sentence."),
    }
    step_time = _shape("TargetSpread", (TargetStages, "step_time_ms"))
    target = _shape(
        "Target",
        (TargetStages, _names(TargetStages, "step_time_ms stages unjudgeable tokens links")),
        step_time_ms=(number, _about(TargetStages)["step_time_ms"] + " The mean."),
        spread=(step_time, "The same with its spread."),
        stages=(_many(stage), _about(TargetStages)["stages"]),
        imbalance=(number, "Compute of the slowest stage over the average over stages; null where it is not known."),
        slowest_stage=(int | None, "The stage that costs most by what it holds or computes; null where none does."),
        causes=(_many(_shape("Cause", **cause)), _about(Diagnosis)["causes"]),
        perhaps=(_many(_shape("Perhaps", (Cause, "more_steps"), **cause)), _about(Diagnosis)["perhaps"]),
        rest_ms=(number, _about(Diagnosis)["rest_ms"]),
        diagnosed_ms=(number, "Milliseconds of the average step that causes are priced in."),
        diagnosed_steps=(int | None, _about(Diagnosis)["steps"]),
        withheld=(text | None, "Why no cause can be named; null where there is a diagnosis."),
        notes=(texts, "The verdict in a sentence."),
        what_if=(what_if, "What would be faster."),
        fleet=(fleet | None, "The whole run on all ranks; null without timelines."),
    )
    rank = _shape("RankFacts", (RankFacts, _names(RankFacts, "path")), file=(text, "The name of its file."))
    foreign = _shape(
        "Foreign",
        (Foreign, _names(Foreign, "ranks")),
        ranks=(_many(rank), _about(Foreign)["ranks"]),
        advice=(text, "What to record next time."),
    )
    return _shape(
        "Report",
        version=(text, "The version of megaprof that wrote it."),
        run=(int, _about(Report)["run"]),
        runs=(int, _about(Report)["runs"]),
        targets=(_many(target), "One for every target, role and set of parallel sizes."),
        warnings=(texts, "About single files."),
        standstill=(Standstill | None, _about(Report)["standstill"]),
        foreign=(foreign, "What recordings tell that hold no ranges of megaprof's; absent where there are ranges."),
    )


def _status() -> Any:
    culprit = _shape(
        "WaitedFor",
        rank=(int, "Its number."),
        silent=(bool, "Whether it gives no sign of life."),
        gone=(bool, "Whether its process does not exist any more."),
        waiting=(int, "How many ranks wait for it."),
        for_s=(float, "For how many seconds."),
    )
    status = _shape(
        "RankStatus",
        (RankStatus, _names(RankStatus)),
        version=(int, "Of the status file: 2."),
        step=(int | None, "The last step that has begun."),
        still_s=(float, "For how many seconds it has not moved."),
    )
    return _shape(
        "Status",
        (RunRecord, "run role"),
        version=(int, "Of this shape: 1."),
        state=(Literal["starts", "runs", "hangs", "died", "ended"], "One word for all of it."),
        reason=(str | None, "Why nothing is to be expected of the job any more; null while it answers."),
        ranks=(int, "How many ranks the job has."),
        sizes=(ParallelSizes, "The parallel sizes of the job."),
        running_s=(float, "For how many seconds it has been running."),
        heard=(tuple[int, ...], "The ranks that gave a sign of life lately."),
        off=(tuple[int, ...], "The ranks where profiling is off since a fault."),
        still_s=(float, "For how many seconds no rank has moved, where the job appears to hang; else 0."),
        stuck=(tuple[int, ...], "The ranks that have not moved for long."),
        culprits=(_many(culprit), "Whom the job waits for, those that keep most others waiting first."),
        collectives=(Hang | None, "Which collectives it waits in; null where it runs, or its ranks do not say."),
        status=(_many(status), "Every rank that was heard."),
    )


def _shape(name: str, *parts: tuple[Any, str], **own: tuple[Any, str]) -> Any:
    """An object with fields of dataclasses, named in one string, and fields of its own with what they are."""
    found: dict[str, tuple[Any, str]] = {}
    for part, names in parts:
        hints = get_type_hints(part)
        found |= {each: (hints[each], _about(part).get(each, "")) for each in names.split()}
    fields = [
        (each, Annotated[kind, msgspec.Meta(description=about)] if about else kind)
        for each, (kind, about) in (found | own).items()
    ]
    return msgspec.defstruct(name, fields, kw_only=True)


def _many(kind: Any) -> Any:
    return GenericAlias(tuple, (kind, ...))


def _by_name(kind: Any) -> Any:
    return GenericAlias(dict, (str, kind))


def _names(of: Any, without: str = "") -> str:
    """All fields of a dataclass except some, as `_shape` takes them."""
    fields = of.__struct_fields__ if issubclass(of, msgspec.Struct) else of.__dataclass_fields__
    return " ".join(each for each in fields if each not in without.split())


@cache
def _about(of: Any) -> dict[str, str]:
    """What the line below each field of a class says, in JSON's words."""
    try:
        source = inspect.getsource(of)
    except (OSError, TypeError):  # made here, of fields that say what they are
        return {}
    (tree,) = ast.parse(textwrap.dedent(source)).body
    lines = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        field.target.id: _in_json(" ".join(below.value.value.split()))
        for field, below in pairwise(lines)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def _in_json(text: str) -> str:
    return re.sub(r"\bNone\b", "null", text).replace("``", "`")


def _complete(shape: Any) -> dict[str, Any]:
    """The schema, with what each field is. Every field is always written, whatever default the dataclass has, except
    ``foreign``."""
    schema = msgspec.json.schema(shape)
    about = {each.__name__: _about(each) for each in _dataclasses(shape)}
    for name, definition in schema["$defs"].items():
        if "description" in definition:
            definition["description"] = _in_json(definition["description"])
        fields = definition.get("properties", {})
        for field, value in fields.items():
            value.pop("default", None)
            if (said := about.get(name, {}).get(field)) is not None:
                value["description"] = said
        definition["required"] = [field for field in fields if field != "foreign"]
    return schema


def _dataclasses(shape: Any) -> Iterator[Any]:
    """Those that a type consists of."""
    if is_dataclass(shape) or (isinstance(shape, type) and issubclass(shape, msgspec.Struct)):
        yield shape
    inner = get_type_hints(shape).values() if hasattr(shape, "__annotations__") else get_args(shape)
    for each in inner:
        yield from _dataclasses(each)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
