"""The report as one self-contained HTML file to send: it opens offline, prints, and loads nothing.

The pipeline timeline is drawn on a canvas by ``static/report.js``, not by plotly: plotly.js alone is 4.5 MB in every
file, and it has no fast mark for the 160,000 boxes of 64 stages with 512 microbatches, which are 3 MB here and drawn in
one frame. Everything else (bars, spreads, tables) is HTML and CSS, which prints and needs no script.

Names in a trace are input from elsewhere. All text passes `_text`; the data of the timeline are JSON with ``<``
escaped, shown through ``textContent`` only; and a content security policy lets no script run but ours, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from megaprof.analysis.clocks.clocks import align
from megaprof.analysis.clocks.matching import Ends, ends_of, links_between
from megaprof.analysis.report import words
from megaprof.analysis.report.fleet_html import fleet_part
from megaprof.analysis.report.report import Report
from megaprof.analysis.trace.calls import Call, calls_of
from megaprof.analysis.trace.traces import Trace, UnreadableTrace, read_trace
from megaprof.formats import ranges
from megaprof.formats.names import parse_artifact_name

_KINDS = (ranges.FORWARD, ranges.BACKWARD, ranges.COMBINED, ranges.FINALIZE_GRADS, "exchange")
#: Predictions that gain less than this are in the JSON only.
_WORTH_SHOWING = 1.01
_GROUPS = ("tp", "ep", "cp", "pp", "dp")

_Key = tuple[str, str | None]  # target and role


@dataclass(frozen=True)
class Row:
    """One stage of a drawn step: a rank's call, and what to add to its times."""

    call: Call
    offset_ns: int


@dataclass(frozen=True)
class StepTimeline:
    """One step of one target, a row per captured stage, and what must be known about its clocks."""

    step: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def timelines(report: Report) -> dict[_Key, StepTimeline]:
    """The latest step of every target, on the lowest captured rank of every stage, clocks aligned.

    Reads the traces of those steps once more, one at a time; those of timelines are in the report.
    """
    latest = {(t.measured.target, t.measured.role): t.measured.steps[-1] for t in report.targets if t.measured.steps}
    found: dict[_Key, dict[int, tuple[Call, Ends]]] = {}
    for trace in chain(_traces(report.traces, set(latest.values())), report.drawn):
        calls = calls_of(trace)
        ends = ends_of(trace.metadata, calls)
        for call in calls:
            key, coords = (call.label, call.metadata.role), call.metadata.coords
            if latest.get(key) != call.step or call.index:
                continue
            stages = found.setdefault(key, {})
            if coords.pp not in stages or coords.rank < stages[coords.pp][0].metadata.coords.rank:
                stages[coords.pp] = call, ends
    return {key: _aligned(latest[key], [stages[pp] for pp in sorted(stages)]) for key, stages in found.items()}


def _traces(paths: Iterable[Path], steps: set[int]) -> Iterator[Trace]:
    for path in paths:
        name = parse_artifact_name(path.name)
        if name is not None and name.step not in steps:
            continue
        try:
            yield read_trace(path)
        except UnreadableTrace:
            continue  # the report has read it, and would have said so


def _aligned(step: int, stages: list[tuple[Call, Ends]]) -> StepTimeline:
    ends = {call.metadata.coords.rank: each for call, each in stages}
    hosts = {rank: each.metadata.host for rank, each in ends.items()}
    alignment = align(hosts, [link for link, _ in links_between(ends)])
    notes = [*alignment.sentences(), *alignment.warnings] if len(set(hosts.values())) > 1 else list(alignment.warnings)
    if any(call.has_kernels and call.gpu is None for call, _ in stages):
        notes.append("these are the host's times: when work was given to the GPU, not when the GPU did it")
    rows = tuple(Row(call, alignment.offset(call.metadata.coords.rank)) for call, _ in stages)
    return StepTimeline(step, rows, tuple(notes))


def page(report: Mapping[str, Any], drawn: Mapping[_Key, StepTimeline], *, name: str) -> str:
    """The whole file. ``report`` as ``Report.to_json`` gives it, ``name``: what the report is about."""
    script = _static("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    steps = [drawn.get((target["target"], target["role"])) for target in report["targets"]]
    data = json.dumps([_data(step) if step else None for step in steps], separators=(",", ":"))
    sections = [_section(number, target, steps[number]) for number, target in enumerate(report["targets"])]
    began = min((row.call.extent[0] for step in steps if step for row in step.rows), default=None)
    about = [_text(name), *([_date(began)] if began is not None else []), f"megaprof {_text(report['version'])}"]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>megaprof: {_text(name)}</title>
<style>
{_static("report.css")}</style>
</head>
<body>
<header><h1>Pipeline stage report</h1><p class="about">{" · ".join(about)}</p>{_navigation(report["targets"])}</header>
<main>
{"".join(sections)}{_list("Files", report["warnings"])}</main>
<script type="application/json" id="data">{_harmless(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def _section(number: int, target: Mapping[str, Any], step: StepTimeline | None) -> str:
    facts = [words.steps(target["steps"]), target["schedule"] or "unknown schedule"]
    if target["microbatches"] is not None:
        facts.append(f"{target['microbatches']} microbatches")
    facts += [f"{axis}={size}" for axis, size in target["sizes"].items() if size and size > 1]
    if target["forward_only"]:
        facts.append("forward only")
    return f"""<section id="t{number}">
<h2>{_text(words.title(target))}</h2>
<p class="about">{_text(" · ".join(facts))}</p>
{fleet_part(target)}{_verdict(target)}{_tiles(target)}\
{_timeline(number, target, step)}{_bars(target)}{_spreads(target)}{_what_if(target)}\
{_list("Good to know", target["warnings"])}</section>
"""


def _verdict(target: Mapping[str, Any]) -> str:
    fine = any(note.startswith("no stage is slow") for note in target["notes"])
    kind = "slow" if target["slowest_stage"] is not None else "fine" if fine else "open"
    lines = [f"<p class=lead>{_text(words.sentence(note))}</p>" for note in target["notes"]]
    for cause in target["causes"]:
        why = f"{words.sentence(cause['evidence'])} It costs {words.number(cause['excess_ms'])} ms {cause['basis']}."
        lines.append(f"<p><b>Why: {_text(cause['kind'].replace('_', ' '))}.</b> {_text(why)}</p>")
    what_if = target["what_if"] or {}
    if what_if.get("advice"):
        lines.append(f"<p><b>What if.</b> {_text(words.sentence(what_if['advice']))}</p>")
    if best := what_if.get("best"):
        lines.append(f"<p><code>{_text(best['flags'])}</code></p>")
        lines += [f"<p>{_text(words.sentence(best['memory']))}</p>"] if best.get("memory") else []
    return f'<div class="verdict {kind}">{"".join(lines)}</div>\n' if lines else ""


def _tiles(target: Mapping[str, Any]) -> str:
    spread = target["spread"]["step_time_ms"]
    spread = f" ±{words.number(spread['stdev'])}" if spread and spread["count"] > 1 else ""
    fractions = [s["bubble_fraction"] for s in target["stages"] if s["bubble_fraction"] is not None]
    tiles = [
        ("step time", f"{words.number(target['step_time_ms'])} ms{spread}", target.get("step_time_basis") or ""),
        (
            "imbalance",
            words.ABSENT if target["imbalance"] is None else f"{target['imbalance']:.2f}",
            "slowest stage / mean stage, compute only",
        ),
        (
            "bubble",
            words.percent(sum(fractions) / len(fractions)) if fractions else words.ABSENT,
            "of the step, mean over stages",
        ),
    ]
    cells = (f"<div><dt>{_text(n)}</dt><dd>{_text(v)}</dd><dd class=hint>{_text(h)}</dd></div>" for n, v, h in tiles)
    return f'<dl class="tiles">{"".join(cells)}</dl>\n'


def _timeline(number: int, target: Mapping[str, Any], step: StepTimeline | None) -> str:
    if step is None:
        return ""
    kinds = {_kind(each.kind) for row in step.rows for each in row.call.laid_out}
    legend = [(kind, kind.replace("_", " ")) for kind in _KINDS if kind in kinds]
    legend.append(("bubble", "nothing computed" if target["sizes"].get("pp", 1) > 1 else "between passes"))
    keys = "".join(f'<span><i class="k {kind}"></i>{_text(label)}</span>' for kind, label in legend)
    shades = any(len(row.call.metadata.chunks) > 1 for row in step.rows)
    shown = [*(["the later a model chunk, the paler its colour"] if shades else []), *step.notes]
    notes = "".join(f"<p class=hint>{_text(words.sentence(note))}</p>" for note in shown)
    return f"""<h3>Who computes what, and when: step {step.step}</h3>
<div class="timeline" data-target="{number}">
<div class="bar"><div class="legend">{keys}</div><div class="tools">\
<button data-do="out" title="zoom out (-)">&minus;</button><button data-do="in" title="zoom in (+)">+</button>\
<button data-do="fit" title="the whole step (0)">fit</button></div></div>
<canvas tabindex="0" role="img" aria-label="Timeline of the pipeline: one row per stage, one box per microbatch; \
the table below has the numbers"></canvas>
<p class="hint screen">Drag to move; pinch, or turn the wheel with Ctrl or ⌘, to zoom; arrow keys work too. \
Point at a box for its numbers.</p>
{notes}</div>
"""


def _bars(target: Mapping[str, Any]) -> str:
    stages = target["stages"]
    parts = [[("compute", s["compute_ms"]), *((g, s["exposed_ms"].get(g)) for g in _GROUPS)] for s in stages]
    sums = [sum(v or 0 for _, v in row) + (s["bubble_ms"] or 0) for row, s in zip(parts, stages, strict=True)]
    longest = max([*sums, target["step_time_ms"] or 0])
    if not longest or not any(s["compute_ms"] is not None for s in stages):
        return ""
    shown = [g for g in _GROUPS if any(s["exposed_ms"].get(g) for s in stages)]
    passes = ["forward"] if target["forward_only"] else ["forward", "backward"]
    head = "".join(f"<th>{_text(n)}</th>" for n in (*passes, "compute", *(f"exposed {g}" for g in shown), "bubble"))
    slowest = max((s["compute_ms"] or 0) for s in stages)
    rows = []
    for stage, row in zip(stages, parts, strict=True):
        pieces = [*row, ("bubble", stage["bubble_ms"])]
        split = ", ".join(f"{part} {words.number(ms)}" for part, ms in (stage.get("bubble_split") or {}).items() if ms)
        hints = {"bubble": f" ({split})" if split else ""}
        bar = "".join(
            f'<i class="k {kind}" style="width:{100 * ms / longest:.2f}%" '
            f'title="{kind} {words.number(ms)} ms{_text(hints.get(kind, ""))}"></i>'
            for kind, ms in pieces
            if ms
        )
        numbers = [stage[f"{p}_ms"] for p in passes] + [stage["compute_ms"]] + [stage["exposed_ms"][g] for g in shown]
        cells = "".join(f"<td>{words.number(value)}</td>" for value in numbers)
        fraction = (
            "" if stage["bubble_fraction"] is None else f" <small>({words.percent(stage['bubble_fraction'])})</small>"
        )
        strong = ' class="most"' if len(stages) > 1 and stage["compute_ms"] == slowest else ""
        rows.append(
            f"<tr{strong}>{_stage_cells(stage)}<td class=wide><div class=stack>{bar}</div></td>{cells}"
            f"<td>{words.number(stage['bubble_ms'])}{fraction}</td></tr>"
        )
    keys = [("compute", "compute"), *((g, f"exposed {g}") for g in shown), ("bubble", "bubble")]
    legend = "".join(f'<span><i class="k {kind}"></i>{_text(label)}</span>' for kind, label in keys)
    return f"""<h3>Where the time of a step goes, ms</h3>
<div class="legend">{legend}</div>
<div class="scroll"><table><thead><tr><th>stage</th><th>layers</th><th class=wide></th>{head}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>
"""


def _spreads(target: Mapping[str, Any]) -> str:
    kinds = ["forward"] if target["forward_only"] else ["forward", "backward"]
    per_stage = [(s, {k: s["per_microbatch"][f"{k}_ms"] for k in kinds}) for s in target["stages"]]
    longest = max((v["max"] for _, values in per_stage for v in values.values() if v), default=0)
    if not longest:
        return ""
    rows = []
    for stage, values in per_stage:
        whiskers, cells = "", ""
        for kind, value in values.items():
            cells += f"<td>{_range(value)}</td>"
            if value:
                low, middle, high = (100 * value[key] / longest for key in ("min", "median", "max"))
                whiskers += (
                    f'<div class="spread {kind}" title="{kind}: median {words.number(value["median"])} ms">'
                    f'<i class=reach style="left:{low:.2f}%;width:{high - low:.2f}%"></i>'
                    f'<i class=middle style="left:{middle:.2f}%"></i></div>'
                )
        rows.append(f"<tr>{_stage_cells(stage)}<td class=wide>{whiskers}</td>{cells}</tr>")
    head = "".join(f"<th>{kind}</th>" for kind in kinds)
    return f"""<h3>How far microbatches lie apart, ms</h3>
<p class="hint">Median, and fastest to slowest. The axis runs from 0 to {words.number(longest)} ms.</p>
<div class="scroll"><table><thead><tr><th>stage</th><th>layers</th><th class=wide></th>{head}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>
"""


def _what_if(target: Mapping[str, Any]) -> str:
    """Before and after: the measured step, its replay, and what was predicted."""
    what_if = target["what_if"] or {}
    measured, replayed = what_if.get("measured_ms"), what_if.get("replay_ms")
    warnings = "".join(
        f"<p class=hint>{_text(words.sentence(warning))}</p>" for warning in what_if.get("warnings") or ()
    )
    if measured is None or replayed is None:
        return f"<h3>What if</h3>\n{warnings}" if warnings else ""
    best = what_if.get("best")
    off = f"off by {words.percent(what_if['replay_error'], sign=True)} in the pipeline"
    now = f"as captured{': ' + what_if['layout'] if what_if.get('layout') else ''}"
    rows = [("before", now, measured, None, ""), ("before", f"replayed, {off}", replayed, None, "")]
    for each in what_if.get("candidates") or ():
        if each["speedup"] < _WORTH_SHOWING and each != best:
            continue
        remarks = [f"assumes that {each['assumes']}"] * bool(each.get("assumes")) + [each.get("memory") or ""]
        words_ = "; ".join([each["what"], *filter(None, remarks)])
        rows.append(
            ("best" if each == best else "after", words_, each["step_time_ms"], each["uncertainty_ms"], each["flags"])
        )
    longest = max(ms for _, _, ms, _, _ in rows)
    body = []
    for kind, what, ms, uncertainty, flags in rows:
        bar = f'<div class=stack><i class="k {kind}" style="width:{100 * ms / longest:.2f}%"></i></div>'
        spread = "" if uncertainty is None else f" ±{words.number(uncertainty)}"
        change = words.percent(ms / measured - 1, sign=True) if uncertainty is not None and measured else ""
        code = f"<br><code>{_text(flags)}</code>" if flags else ""
        strong = ' class="most"' if kind == "best" else ""
        body.append(
            f"<tr{strong}><td class=left>{_text(what)}{code}</td><td class=wide>{bar}</td>"
            f"<td>{words.number(ms)}{spread}</td><td>{change}</td></tr>"
        )
    return f"""<h3>What if: before and after</h3>
<div class="scroll"><table class="what"><thead><tr><th></th><th class=wide></th><th>step, ms</th><th></th></tr></thead>
<tbody>{"".join(body)}</tbody></table></div>
{warnings}"""


def _stage_cells(stage: Mapping[str, Any]) -> str:
    some = ", ".join(map(str, stage["ranks"][:4])) + (", ..." if len(stage["ranks"]) > 4 else "")
    return f'<td title="ranks {_text(some)}">{stage["pp"]}</td><td>{_text(words.layers(stage["chunks"]))}</td>'


def _range(value: Mapping[str, float] | None) -> str:
    if not value:
        return words.ABSENT
    low, high = words.number(value["min"]), words.number(value["max"])
    return f"{words.number(value['median'])} <small>({low} - {high})</small>"


def _navigation(targets: Sequence[Mapping[str, Any]]) -> str:
    if len(targets) < 2:
        return ""
    links = (f'<a href="#t{number}">{_text(words.title(target))}</a>' for number, target in enumerate(targets))
    return f"<nav>{''.join(links)}</nav>"


def _list(heading: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(words.sentence(line))}</li>" for line in lines)
    return f"<h3>{heading}</h3>\n<ul>{items}</ul>\n" if items else ""


def _data(step: StepTimeline) -> dict[str, Any]:
    """Rows for the script: times in microseconds from the step's start. ``boxes`` is flat, five numbers each: start
    (behind the start of the box before), duration, kind, microbatch and chunk (-1: unknown or none)."""
    first = min(row.call.extent[0] + row.offset_ns for row in step.rows)
    names = sorted({each.kind for row in step.rows for each in row.call.laid_out})
    numbers = {name: number for number, name in enumerate(names)}
    rows = []
    for row in step.rows:
        call, shift = row.call, row.offset_ns - first
        boxes, before = [], 0
        for box in call.laid_out:
            start, end = (round((time + shift) / 1000) for time in (box.start, box.end))
            unknown = (-1 if value is None else value for value in (box.microbatch, box.chunk))
            boxes += [start - before, end - start, numbers[box.kind], *unknown]
            before = start
        coords = call.metadata.coords
        span = [round((time + shift) / 1000) for time in call.extent]
        rows.append({"stage": coords.pp, "rank": coords.rank, "span": span, "boxes": boxes})
    kind_names = [_kind(name) for name in names]
    chunks = max(max(len(row.call.metadata.chunks), 1) for row in step.rows)
    return {"names": names, "kinds": kind_names, "chunks": chunks, "rows": rows}


def _kind(name: str) -> str:
    return name if name in _KINDS else "exchange"


def _date(nanoseconds: int) -> str:
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"


def _text(content: object) -> str:
    """Escaped for text and attributes alike; control characters, which HTML forbids, are replaced."""
    return html.escape("".join(c if c.isprintable() else "\ufffd" for c in str(content)))


def _harmless(data: str) -> str:
    """JSON that cannot end the script element around it."""
    return data.replace("<", "\\u003c")


def _static(name: str) -> str:
    return (files("megaprof.analysis.report") / "static" / name).read_text(encoding="utf-8")
